"""What the code of forwards may do to memory, in branches too that no run took: write in place, and copy by strides."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import textwrap
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes.graph.operations import may_give_memory, schemas
from passes.graph.side_effects import names_in, with_helpers
from passes.graph.tracing import METADATA, function_of

# Given a tensor whose rows are parts of wider ones, these copy; given one that lies in one piece, they give its memory.
# With what einops calls the first, and the formats that `to` takes.
COPIES_BY_STRIDES = frozenset({
    "channels_last", "channels_last_3d", "contiguous", "contiguous_format", "flatten", "ravel", "rearrange", "reshape",
    "reshape_as",
})  # fmt: skip
# Layers of torch that do.
_COPYING_LAYERS = (nn.Flatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)
# By these a code may go by how the numbers of a tensor lie in memory.
BY_PLACE = frozenset({
    "as_strided", "as_strided_", "data_ptr", "resize_", "resize_as_", "set_", "storage", "typed_storage", "untyped_storage",
})  # fmt: skip
# By these it may write to numbers without torch counting that.
PAST_COUNTS = frozenset({
    "__array__", "__dlpack__", "_unsafe_preserve_version_counter", "asarray", "data", "from_dlpack", "numpy", "to_dlpack",
})  # fmt: skip
# Properties of tensors that give one in the same memory.
_VIEWS = frozenset({"H", "T", "data", "imag", "mH", "mT", "real"})
# Functions of Python that give no tensor that they are given, and those that give only what is in their arguments.
_PLAIN = frozenset({"bool", "float", "int", "isinstance", "len", "range", "round", "str"})
_THROUGH = frozenset({"enumerate", "max", "min", "reversed", "tuple", "zip"})


@dataclass(frozen=True)
class Named:
    """What some code names.

    Attributes:
        writes: what writes in place to something that the code didn't make itself.
        copies: what gives a copy or the same memory, as the strides of what it is given are.
    """

    writes: frozenset[str] = frozenset()
    copies: frozenset[str] = frozenset()

    def __or__(self, other: Named) -> Named:
        return Named(self.writes | other.writes, self.copies | other.copies)


def functions_of(module: nn.Module) -> Iterator[Any]:
    """The function of the module's forward, and those that it keeps as attributes; none for torch's own."""
    if not type(module).__module__.startswith("torch."):
        function = function_of(module)
        if function is not None:
            yield function
        yield from (value for value in vars(module).values() if type(value) is types.FunctionType)


def named_in(modules: Iterable[nn.Module]) -> Named:
    """What the code of the modules' own forwards names, and that of the helpers that they name."""
    found = Named()
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            found |= Named(frozenset({"code of torch.jit"}), frozenset({"code of torch.jit"}))
        elif type(module).__module__.startswith("torch."):
            name = frozenset({type(module).__name__})
            writes = name if getattr(module, "inplace", False) else frozenset()
            found |= Named(writes, name if isinstance(module, _COPYING_LAYERS) else frozenset())
        else:
            for function in functions_of(module):
                found |= _named_by(function, type(module))  # type: ignore[arg-type]
    return found


def named_of(names: frozenset[str], module: nn.Module) -> str | None:
    """One of the names that the code of a module's forward, or of its helpers, has; None for none."""
    found = (names & _names_by(each, type(module)) for each in functions_of(module))  # type: ignore[arg-type]
    return next((min(some) for some in found if some), None)


@functools.lru_cache(maxsize=4096)
def _names_by(function: Any, cls: type) -> frozenset[str]:
    return frozenset[str]().union(*(names_in(helper.__code__) for helper in with_helpers(function, cls)))


@functools.lru_cache(maxsize=4096)
def _named_by(function: Any, cls: type) -> Named:
    helpers, copies = with_helpers(function, cls), _names_by(function, cls) & COPIES_BY_STRIDES
    if not copies:
        # Most writes are harmless then, and the text of a function takes its time to be read.
        return Named(frozenset().union(*(_writing_steps(helper.__code__) for helper in helpers)), copies)
    return Named(frozenset().union(*map(_writes_of, helpers)), copies)


@functools.lru_cache(maxsize=4096)
def _writes_of(function: Any) -> frozenset[str]:
    """What in the function may write to what it didn't make itself."""
    steps = _writing_steps(function.__code__)
    if not steps or function.__name__ == "<lambda>":
        return steps
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return steps
    return frozenset(_Values(tree, frozenset(function.__code__.co_freevars)).writes())


@functools.lru_cache(maxsize=4096)
def _writing_steps(code: types.CodeType) -> frozenset[str]:
    """What a code has of in-place operations, whatever they write to."""
    found = {name for name in code.co_names if _is_writing_name(name)}
    for step in dis.get_instructions(code):
        if step.opname == "STORE_SUBSCR":
            found.add("[]=")
        elif step.opname == "BINARY_OP" and step.argrepr.endswith("="):
            found.add(step.argrepr)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _writing_steps(constant)
        elif isinstance(constant, tuple):
            # The names of the arguments of a call.
            found |= {f"{name}=" for name in ("out", "inplace") if name in constant}
    return frozenset(found)


def _is_writing_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and not name.startswith("__") and name != "_"


class _Values:
    """Which values of a function may be, or lie in the memory of, something that it was given or that a layer gave it.

    A name stands for all that the function, or one defined in it, assigns to it anywhere.
    """

    def __init__(self, tree: ast.Module, outer: frozenset[str]) -> None:
        self.tree = tree
        self.given = set(outer)
        self.first: set[str] = set()
        self.of_containers: set[ast.expr] = set()
        # By name: the expressions whose value, or a part of it, it is given.
        self.variables: dict[str, list[ast.expr]] = defaultdict(list)
        self.attributes: dict[str, list[ast.expr]] = defaultdict(list)
        self._asked: set[tuple[int, bool]] = set()
        for node in ast.walk(tree):
            self._look_at(node)

    def _look_at(self, node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments += [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
            self.given.update({one.arg for one in arguments} - set(_numbers_of(node.args)))
            self.first.update(one.arg for one in arguments[:1])
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
                if isinstance(target, ast.Subscript) and isinstance(node.value, ast.Tuple | ast.Dict):
                    # No tensor takes these.
                    self.of_containers.add(target)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._bind(node.target, node.value)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            items = node.iter.elts if isinstance(node.iter, ast.Tuple | ast.List) else [_item_of(node.iter)]
            for item in items:
                self._bind(node.target, item)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind(node.optional_vars, node.context_expr)
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name is not None:
            self.given.add(node.name)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.variables[target.id].append(value)
        elif isinstance(target, ast.Attribute):
            self.attributes[target.attr].append(value)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, value)
        elif isinstance(target, ast.Tuple | ast.List):
            pairs = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            is_paired = len(pairs) == len(target.elts) and not any(isinstance(one, ast.Starred) for one in pairs)
            for number, one in enumerate(target.elts):
                self._bind(one, pairs[number] if is_paired else _item_of(value))

    def writes(self) -> Iterator[str]:
        """What writes to a value that isn't the function's own."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.AugAssign):
                target = node.target
                held = target.value if isinstance(target, ast.Subscript) else target
                if not self._is_own(held, is_item=isinstance(target, ast.Subscript)):
                    yield f"{_SIGNS.get(type(node.op), '')}="
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                if node not in self.of_containers and not self._is_own(node.value):
                    yield "[]="
            elif isinstance(node, ast.Call):
                yield from self._writes_of_call(node)

    def _writes_of_call(self, node: ast.Call) -> Iterator[str]:
        name = _name_of(node.func)
        written = list(node.args)
        if isinstance(node.func, ast.Attribute) and not self._is_global(node.func.value):
            # A method writes to the tensor that it is one of.
            written = [node.func.value]
        is_in_place = _is_writing_name(name)
        for keyword in node.keywords:
            plain = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg == "out" and not plain and not self._is_own(keyword.value, is_item=True):
                yield "out="
            if keyword.arg == "inplace" and not plain:
                is_in_place, written = True, [*written, *node.args]
        if is_in_place and not all(self._is_own(each, is_item=True) for each in written):
            yield name

    def _is_global(self, value: ast.expr) -> bool:
        while isinstance(value, ast.Attribute):
            value = value.value
        return isinstance(value, ast.Name) and value.id not in self.given and not self.variables.get(value.id)

    def _is_own(self, value: ast.expr, *, is_item: bool = False) -> bool:
        """Whether a write to the value reaches nothing that the function was given or that a layer gave it.

        Args:
            is_item: whether what is written to stands in the value, where that is a container.
        """
        if isinstance(value, ast.Name):
            return self._is_own_name(value.id, is_item)
        if isinstance(value, ast.Attribute):
            if value.attr in METADATA:
                return True
            if value.attr in _VIEWS:
                return self._is_own(value.value, is_item=is_item)
            return self._are_own(self.attributes[value.attr], is_item)
        if isinstance(value, ast.Call):
            return self._is_own_result(value, is_item)
        if isinstance(value, ast.Subscript | ast.Starred):
            return self._is_own(value.value, is_item=True)
        if isinstance(value, ast.UnaryOp):
            # What a plus stands in front of is that itself.
            return not isinstance(value.op, ast.UAdd) or self._is_own(value.operand, is_item=is_item)
        if isinstance(value, ast.IfExp):
            return self._is_own(value.body, is_item=is_item) and self._is_own(value.orelse, is_item=is_item)
        if isinstance(value, ast.BoolOp):
            return all(self._is_own(one, is_item=is_item) for one in value.values)
        if isinstance(value, ast.NamedExpr):
            return self._is_own(value.value, is_item=is_item)
        if isinstance(value, ast.List | ast.Tuple | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
            return not is_item
        if isinstance(value, ast.BinOp):
            # Of tensors it is another one; of lists it holds what they hold.
            return not (is_item and isinstance(value.left, ast.List))
        return isinstance(value, ast.Constant | ast.Compare | ast.JoinedStr | ast.Slice)

    def _is_own_name(self, name: str, is_item: bool) -> bool:
        # A name that is assigned nowhere is a global: a module of torch, or a constant.
        return name not in self.given and self._are_own(self.variables[name], is_item)

    def _are_own(self, values: list[ast.expr], is_item: bool) -> bool:
        key = id(values), is_item
        if key in self._asked:
            # What is assigned to itself is what else is assigned to it.
            return True
        self._asked.add(key)
        try:
            return all(self._is_own(value, is_item=is_item) for value in values)
        finally:
            self._asked.discard(key)

    def _is_own_result(self, call: ast.Call, is_item: bool) -> bool:
        name = _name_of(call.func)
        if isinstance(call.func, ast.Name):
            if name in self.given or self.variables[name]:
                return False
            return name in _PLAIN or (name in _THROUGH and all(self._is_own(one, is_item=is_item) for one in call.args))
        if not isinstance(call.func, ast.Attribute) or self._is_of_first(call.func):
            # A child of the module may be called anything, `mean` too.
            return False
        if name in METADATA:
            return True
        if _is_writing_name(name) or (schemas(name) is not None and may_give_memory(name) and name not in _OWN):
            return all(self._is_own(one, is_item=is_item) for one in (call.func.value, *call.args))
        return name in _OWN or schemas(name) is not None

    def _is_of_first(self, value: ast.expr) -> bool:
        """Whether something of the first argument is called, which may be the module."""
        while isinstance(value, ast.Attribute | ast.Subscript):
            value = value.value
        return isinstance(value, ast.Name) and value.id in self.first


# Composed of other operations; their values are in memory of their own all the same.
_OWN = frozenset({
    "arange", "cat", "full", "matmul", "ones", "scaled_dot_product_attention", "softmax", "stack", "zeros",
})  # fmt: skip
_SIGNS = {
    ast.Add: "+", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.Div: "/", ast.FloorDiv: "//", ast.LShift: "<<",
    ast.MatMult: "@", ast.Mod: "%", ast.Mult: "*", ast.Pow: "**", ast.RShift: ">>", ast.Sub: "-",
}  # fmt: skip


def _numbers_of(arguments: ast.arguments) -> Iterator[str]:
    """The arguments that have a number by default."""
    plain = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(reversed(plain), reversed(arguments.defaults), strict=False)]
    pairs += [(one, by_default) for one, by_default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
              if by_default is not None]  # fmt: skip
    for one, by_default in pairs:
        if isinstance(by_default, ast.Constant) and isinstance(by_default.value, int | float):
            yield one.arg


def _item_of(value: ast.expr) -> ast.expr:
    return ast.Subscript(value, ast.Constant(0), ast.Load())


def _name_of(value: ast.expr) -> str:
    return value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
