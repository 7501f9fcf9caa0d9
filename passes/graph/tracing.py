"""Running one forward on symbols, so that all it does goes into a graph and nothing is frozen or lost.

FX's own `Tracer.trace` is made for one trace of a whole model. Here thousands of small ones are made, one per module:
what it sets up for each is set up once for all (`Interception`), and only for the thread that traces, so that other
threads may go on running models meanwhile.
"""

from __future__ import annotations

import dis
import functools
import keyword
import math
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import Attribute, ParameterProxy
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils import _pytree as pytree

from passes.graph.baked import Reads
from passes.graph.fingerprint import ABSENT
from passes.graph.operations import returns_tensor
from passes.graph.side_effects import assigned_outside, attributes_of, names_in
from passes.graph.structure import CallStructure, Unstructured, flatten_outputs
from passes.program.forwards import InstanceForward, inner_forward
from passes.program.seals import SHAPE_AND_KIND

# What may be asked of a tensor that exists while tracing: the answer is the same for every input.
METADATA = SHAPE_AND_KIND | {
    "is_meta", "is_mkldnn", "is_nested", "requires_grad", "is_leaf", "stride", "is_contiguous", "__len__", "is_mps",
    "is_xpu", "names", "has_names", "is_tensor", "is_same_size", "grad_fn",
}  # fmt: skip


# In the `meta` of a node whose value is a tensor for certain.
IS_TENSOR = "optimize_export_is_tensor"
# In the `meta` of an input of a graph: the number of dims that the graph holds for.
RANK = "optimize_export_rank"

_TENSOR_LAYERS = (
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.Dropout, nn.Identity, nn.Flatten, nn.ReLU, nn.GELU, nn.SiLU,
    nn.Sigmoid, nn.Tanh, nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase,
)  # fmt: skip
# Those that torch has no schema of return a tensor too.
_TENSOR_OPERATIONS = frozenset({"float", "half", "interpolate"})


class Untraceable(Exception):
    """The forward does what a graph can't hold; the message, a clause about the forward, says what."""


class _GivenUp(BaseException):
    """Ends a trace that catches every `Untraceable`."""


_MOST_REFUSALS = 1000

# Questions about a tensor whose answer is its rank, those whose answer is as long as that, and what is made of ranks.
_RANKS = frozenset({"ndim", "dim", "ndimension"})
_SHAPES = frozenset({"shape", "size"})
_ON_RANKS: dict[Any, Callable[..., int]] = {
    function: function
    for function in (
        operator.eq,
        operator.ne,
        operator.lt,
        operator.le,
        operator.gt,
        operator.ge,
        operator.add,
        operator.sub,
    )
}


def function_name(func: Any) -> str:
    """The name of a function, "" where it has none."""
    return str(getattr(func, "__name__", ""))


def function_of(module: nn.Module) -> types.FunctionType | None:
    """The Python function that the module's forward runs, under its decorators; None where there is none."""
    forward = inner_forward(module)
    if forward is None or isinstance(forward, InstanceForward):
        forward = next(vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))
    inner = forward
    for _ in range(_DECORATORS):
        if inner is None:
            break
        forward, inner = inner, _decorated(inner)
    return forward if type(forward) is types.FunctionType else None


# More decorators than that have none at their end.
_DECORATORS = 100


def _decorated(function: Any) -> Any:
    """What a decorator, a bound method or a partial function stands around; None where it is none of them."""
    if type(function) in (types.MethodType, staticmethod, classmethod):
        return function.__func__
    if isinstance(function, functools.partial | functools.partialmethod):
        return function.func
    return (attributes_of(function) or {}).get("__wrapped__")


class Tree:
    """Where the modules and tensors of one tree stand, as attributes of each other."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules = {id(module): module for module in root.modules()}
        self.parents: dict[int, list[tuple[nn.Module, str]]] = {}
        self._tensors: dict[int, list[tuple[nn.Module, str]]] | None = None
        for module in self.modules.values():
            for name, child in module._modules.items():
                if child is not None:
                    self.parents.setdefault(id(child), []).append((module, name))

    def owners_of(self, tensor: torch.Tensor) -> list[tuple[nn.Module, str]]:
        """The modules that have the tensor as a parameter, buffer or attribute, each with the name."""
        if self._tensors is None:
            self._tensors = {}
            for module in self.modules.values():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
                    if isinstance(value, torch.Tensor):
                        self._tensors.setdefault(id(value), []).append((module, name))
        return self._tensors.get(id(tensor), [])


class _Paths:
    """By which attributes one module reaches those below it."""

    def __init__(self, tree: Tree, top: nn.Module) -> None:
        self.tree = tree
        self.top = top
        self._known: dict[int, str | None] = {id(top): ""}
        self._below: dict[int, str] | None = None

    def of(self, module: nn.Module) -> str | None:
        """The path of attributes, dotted; None where the module isn't reached by any."""
        key = id(module)
        if key not in self._known:
            self._known[key] = self._climb(module)
        return self._known[key]

    def _climb(self, module: nn.Module) -> str | None:
        parents = self.tree.parents.get(id(module), [])
        if not parents:
            return None
        if len(parents) > 1:
            return self._search(module)
        parent, name = parents[0]
        above = self.of(parent)
        if above is None or not _is_attribute(parent, name):
            return None
        return f"{above}.{name}" if above else name

    def _search(self, module: nn.Module) -> str | None:
        """For a module with several parents: downward, since there may be thousands of ways up."""
        if self._below is None:
            self._below = {}
            for path, inner in self.top.named_modules():
                parent = self.top.get_submodule(path.rpartition(".")[0]) if "." in path else self.top
                if not path or _is_attribute(parent, path.rpartition(".")[2]):
                    self._below[id(inner)] = path
        return self._below.get(id(module))


def _is_attribute(parent: nn.Module, name: str) -> bool:
    """Whether the child is what its parent has under that name: a method or attribute may hide it, a keyword is none."""
    return name not in parent.__dict__ and not hasattr(type(parent), name) and not keyword.iskeyword(name)


# Modules that ask a symbol for its class and mean the symbol.
_INTERNAL = ("torch.fx", "torch.utils._pytree", "torch.overrides", "passes.graph", "weakref", "copyreg")


@functools.lru_cache(maxsize=4096)
def _tests_classes(code: types.CodeType) -> bool:
    """Whether a code asks for the class of a value; otherwise it is a function written in C, called by it, that asks."""
    if "isinstance" in code.co_names or "__class__" in code.co_names:
        return True
    return any(instruction.opname == "MATCH_CLASS" for instruction in dis.get_instructions(code))


class _Sealed(fx.Proxy):
    """A symbol that takes no attributes, which FX would lose without a word, and that has a class where that is known.

    `isinstance(symbol, …)` in a forward would be answered as for an `fx.Proxy`, and so wrongly.
    """

    # `isinstance(symbol, nn.Parameter)` looks for this attribute.
    _is_param = False

    def __setattr__(self, name: str, value: Any) -> None:
        # The attributes of the symbol itself are set once; an attribute's node, when it is first needed.
        own = name == "_node" or (
            name in ("tracer", "node", "root", "attr", "param", "name") and name not in vars(self)
        )
        if not own:
            raise self._refused(f"its forward assigns the attribute {name!r} of a value")
        object.__setattr__(self, name, value)

    def __getattr__(self, k: str) -> Attribute:
        # What a tensor doesn't have, `hasattr` must not find.
        if self._is_tensor() and not hasattr(torch.Tensor, k):
            raise AttributeError(k)
        return _SealedAttribute(self, k)

    def _is_tensor(self) -> bool:
        node = vars(self).get("node") or vars(self).get("_node")
        return node is not None and IS_TENSOR in node.meta

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__", "").startswith(_INTERNAL) or not _tests_classes(caller.f_code):
            return type(self)
        if "param" in vars(self):
            return type(vars(self)["param"])
        if self._is_tensor():
            return torch.Tensor
        raise self._refused("its forward tests the class of a value, which only a run shows")

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __hash__(self) -> int:
        # A set or a dict would be searched for the symbol, and never hold it.
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__", "").startswith(_INTERNAL):
            return object.__hash__(self)
        raise self._refused("its forward looks a value up in a set or a dict")

    # Not `__index__`: torch would ask for it before it lets a size be a symbol.
    def __int__(self) -> int:
        return int(self._answer("its forward makes a number of a value, which only a run shows"))

    def __float__(self) -> float:
        return float(self._answer("its forward makes a number of a value, which only a run shows"))

    def __complex__(self) -> complex:
        return complex(self._answer("its forward makes a number of a value, which only a run shows"))

    def __len__(self) -> int:
        return self._answer("its forward asks for the len of a value, which only a run shows", of_len=True)

    def __format__(self, spec: str) -> str:
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__", "").startswith(_INTERNAL):
            return f"symbol {self.node.name}"
        return format(self._answer("its forward makes text of a value, which only a run shows"), spec)

    def _text(self) -> str:
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__", "").startswith(_INTERNAL):
            return f"symbol {self.node.name}"
        return str(self._answer("its forward makes text of a value, which only a run shows"))

    __str__ = __repr__ = _text

    def _answer(self, reason: str, *, of_len: bool = False) -> int:
        tracer = self.tracer
        assert isinstance(tracer, ForwardTracer)
        return tracer.answer(self.node, reason, of_len=of_len)

    def _refused(self, reason: str) -> Untraceable:
        tracer = self.tracer
        assert isinstance(tracer, ForwardTracer)
        return tracer.refused(reason)


def _record_in_place(name: str) -> None:
    function = getattr(operator, name)

    def write(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    # FX would take `x += y` for `x = x + y`, which leaves other names of the tensor as they were.
    setattr(_Sealed, f"__{name}__", write)


_IN_PLACE = ("iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub", "itruediv", "ixor")  # fmt: skip
for _name in _IN_PLACE:
    _record_in_place(_name)


class _SealedAttribute(_Sealed, Attribute):
    pass


class _SealedParameter(_Sealed, ParameterProxy):
    """Answers for its shape as the parameter does; that it was asked is kept, since a graph holds for that shape."""

    _is_param = True

    def _looked_at(self) -> nn.Parameter:
        tracer = self.tracer
        assert isinstance(tracer, ForwardTracer)
        tracer.look_at_shape(self.param)
        return self.param

    @property
    def shape(self) -> torch.Size:
        return self._looked_at().shape

    @property
    def ndim(self) -> int:
        return self._looked_at().ndim

    def size(self, *dim: Any, **named: Any) -> Any:
        return self._looked_at().size(*dim, **named)

    def dim(self) -> int:
        return self._looked_at().dim()

    def numel(self) -> int:
        return self._looked_at().numel()

    def nelement(self) -> int:
        return self._looked_at().nelement()


class ForwardTracer(fx.Tracer):
    """Makes the graph of one forward; every call of a module is one node.

    Attributes:
        ranks: of the inputs, in the order of the structure; empty where they aren't known.
        symbols: every symbol that was made, held weakly; those that live on after the trace were kept somewhere.
        reads: what the forward reads of modules.
    """

    def __init__(
        self,
        tree: Tree,
        module: nn.Module,
        structure: CallStructure,
        returns_tensor: Callable[[nn.Module], bool],
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(autowrap_modules=(), param_shapes_constant=True)  # type: ignore[arg-type]
        self.root = module
        self.graph = fx.Graph()
        self.tree = tree
        self.structure = structure
        self.returns_tensor = returns_tensor
        self.ranks = ranks
        self._rank_of: dict[fx.Node, int] = {}
        self.symbols: list[weakref.ref[fx.Proxy]] = []
        # What was raised on the way: a forward may catch it and go another way than a run does.
        self.refusals: list[str] = []
        self.reads = Reads(module, function_of(module))
        self._own_work = False
        self._paths = _Paths(tree, module)
        self._tensors: dict[str, fx.Proxy] = {}

    def trace_forward(self) -> tuple[fx.Graph, pytree.TreeSpec]:
        """The graph, whose output is the list of the leaves of what the forward returns, and the tree of those.

        Raises:
            Untraceable: a graph can't hold what the forward does.
            Exception: whatever the forward raises on symbols.
        """
        names = self.structure.tensor_names
        inputs = [self._input(name) for name in names]
        if len(self.ranks) == len(inputs):
            self._rank_of = {symbol.node: rank for symbol, rank in zip(inputs, self.ranks, strict=True)}
        args, kwargs = self.structure.arguments(inputs)
        with _RecordEverything(self):
            try:
                outputs = self.root.forward(*args, **kwargs)
            except _GivenUp:
                outputs = None
        if self.refusals:
            raise Untraceable(self.refusals[0])
        try:
            leaves, spec = flatten_outputs(outputs, fx.Proxy)
        except Unstructured as error:
            raise Untraceable(str(error)) from error
        self.create_node("output", "output", (self.create_arg(leaves),), {})
        return self.graph, spec

    def to_bool(self, obj: Any) -> bool:
        """A branch on a value."""
        return bool(self.answer(obj.node, "its forward branches on a value (control flow), which only a run shows"))

    def answer(self, node: fx.Node, reason: str, *, of_len: bool = False) -> int:
        """The value of a node, or its len, that follows from the ranks of the inputs: from here on the graph holds for these.

        A call of other rank is refused by the graph's forward, so whatever the code does with the answer is right.

        Raises:
            Untraceable: it follows from anything else; `reason` is the message.
        """
        asked: set[fx.Node] = set()
        value = self._known_rank(node, asked, names=_SHAPES) if of_len else self._follows(node, asked)
        if value is None or writes_in_place(self.graph):
            raise self.refused(reason)
        for each in asked:
            each.meta[RANK] = self._rank_of[each]
        return value

    def _follows(self, value: Any, asked: set[fx.Node]) -> int | None:
        """The number or truth value that follows from ranks; None where it follows from anything else."""
        if not isinstance(value, fx.Node):
            return value if type(value) in (int, bool) else None
        rank = self._known_rank(value, asked, names=_RANKS)
        if rank is not None or value.op != "call_function" or value.target not in _ON_RANKS:
            return rank
        operands = [self._follows(each, asked) for each in value.args]
        return None if None in operands else _ON_RANKS[value.target](*operands)

    def _known_rank(self, node: fx.Node, asked: set[fx.Node], *, names: frozenset[str]) -> int | None:
        """The rank of an input, where the node is one of these questions about it."""
        source, *others = node.args or (None,)
        is_property = node.op == "call_function" and node.target is getattr and others[0] in names
        is_method = node.op == "call_method" and node.target in names and not (others or node.kwargs)
        if not (is_property or is_method) or not isinstance(source, fx.Node) or source not in self._rank_of:
            return None
        asked.add(source)
        return self._rank_of[source]

    def iter(self, obj: Any) -> Any:
        """An iteration over a value, but for the unpacking that FX knows."""
        try:
            return super().iter(obj)
        except fx.proxy.TraceError:
            raise self.refused("its forward iterates over a value, whose length only a run shows") from None

    def keys(self, obj: Any) -> Any:
        """A value as a mapping."""
        raise self.refused("its forward takes a value for a mapping, which only a run shows")

    def refused(self, reason: str) -> Untraceable:
        """What to raise where the forward does what a graph can't hold; that it was raised isn't forgotten.

        Raises:
            _GivenUp: the forward catches all that is raised and goes on trying.
        """
        self.refusals.append(reason)
        if len(self.refusals) > _MOST_REFUSALS:
            raise _GivenUp
        return Untraceable(reason)

    def close(self) -> None:
        """Let go of all symbols, so that those which live on are held by someone else."""
        self._tensors.clear()

    def _input(self, name: str) -> fx.Proxy:
        symbol = self.create_proxy("placeholder", name, (), {})
        # The name of the node is one that Python takes and that nothing else has.
        symbol.node.target = symbol.node.name
        return symbol

    def create_node(
        self,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        # The code of a graph calls its module `self`: a node of that name would hide it.
        own_name = "self_" if name is None and isinstance(target, str) and target.split(".")[-1] == "self" else name
        node = super().create_node(kind, target, args, kwargs, own_name, type_expr)
        if kind in ("placeholder", "get_attr") or _gives_tensor(node):
            node.meta[IS_TENSOR] = True
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return self._kept(_Sealed(node, self))

    def _kept(self, symbol: fx.Proxy) -> fx.Proxy:
        self.symbols.append(weakref.ref(symbol))
        return symbol

    def look(self, module: nn.Module, name: str, value: Any) -> None:
        """The forward reads an attribute, `ABSENT` where there is none."""
        if not self._own_work:
            self.reads.look(module, name, value)

    def look_at_shape(self, tensor: torch.Tensor) -> None:
        """The forward asks for the shape of a tensor that a module has, or for what follows from it."""
        for owner, name in self.tree.owners_of(tensor):
            if self.path_of(owner) is not None:
                self.reads.look_at_shape(owner, name)

    def path_of(self, module: nn.Module) -> str | None:
        """By which attributes the forward's module reaches another, dotted; None where it doesn't."""
        self._own_work = True
        try:
            return self._paths.of(module)
        finally:
            self._own_work = False

    def call_child(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of another module."""
        path = self.path_of(module)
        if not path:
            raise self.refused("its forward calls a module that isn't its own by any attribute")
        symbol = self.create_proxy("call_module", path, args, kwargs)
        if self.returns_tensor(module):
            symbol.node.meta[IS_TENSOR] = True
        return symbol

    def read(self, module: nn.Module, name: str, value: Any) -> Any:
        """The attribute that the forward reads from a module: a symbol for a parameter or buffer."""
        self.look(module, name, value)
        if not isinstance(value, torch.Tensor):
            return value
        path = self.path_of(module)
        if path is None or keyword.iskeyword(name):
            return value
        target = f"{path}.{name}" if path else name
        if target not in self._tensors:
            self._tensors[target] = self.create_proxy(
                "get_attr", target, (), {}, proxy_factory_fn=self._parameter_symbol(target, value)
            )
        return self._tensors[target]

    def _parameter_symbol(self, target: str, value: torch.Tensor) -> Callable[[fx.Node], fx.Proxy] | None:
        if not isinstance(value, nn.Parameter):
            return None
        return lambda node: self._kept(_SealedParameter(self, node, target, value))

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            if a.tracer is not self:
                raise self.refused("its forward uses a value that another forward kept")
            return a.node
        if a is None or type(a) in (int, float, bool, str):
            return a
        if isinstance(a, torch.Tensor):
            return self._tensor_argument(a)
        if isinstance(a, nn.Module):
            raise self.refused("its forward gives a module to a function")
        return super().create_arg(a)

    def _tensor_argument(self, tensor: torch.Tensor) -> fx.Node:
        for owner, name in self.tree.owners_of(tensor):
            path = self.path_of(owner)
            if path is not None and not keyword.iskeyword(name):
                return self.create_node("get_attr", f"{path}.{name}" if path else name, (), {})
        raise self.refused("its forward uses a tensor that it finds outside of the module")


def _gives_tensor(node: fx.Node) -> bool:
    """Whether the value of a function or method is a tensor, whatever its arguments are; false where that isn't known."""
    if node.op == "call_method":
        of_tensor = bool(node.args) and isinstance(node.args[0], fx.Node) and IS_TENSOR in node.args[0].meta
        return of_tensor and (node.target == "where" or _returns_tensor(str(node.target)))
    if node.op != "call_function":
        return False
    home = getattr(node.target, "__module__", None) or ""
    if home == "_operator":
        return any(IS_TENSOR in source.meta for source in node.all_input_nodes)
    if node.target is torch.where:
        # Given a condition alone, it returns where that holds.
        return len(node.args) == 3
    return home.startswith("torch") and _returns_tensor(function_name(node.target))


def _returns_tensor(name: str) -> bool:
    return name in _TENSOR_OPERATIONS or returns_tensor(name)


def always_tensor(module: nn.Module) -> bool:
    """Whether the module is a layer of torch.nn that returns one tensor."""
    kind: Any = type(module)
    return _is_tensor_layer(kind)


@functools.lru_cache(maxsize=4096)
def _is_tensor_layer(kind: Any) -> bool:
    return issubclass(kind, _TENSOR_LAYERS) and str(kind.__module__).startswith("torch.nn.modules.")


class _RecordEverything(TorchFunctionMode):
    """Puts into the graph what FX would run while tracing and freeze: factories, random draws, work on constants."""

    def __init__(self, tracer: ForwardTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if name in ("_set_grad_enabled", "set_grad_enabled", "_enter_inference_mode"):
            raise self.tracer.refused("its forward switches gradients on or off")
        leaves = pytree.tree_leaves((args, kwargs))
        symbolic = any(isinstance(leaf, fx.Proxy) for leaf in leaves)
        if not symbolic and name in METADATA:
            self._look_at(leaves)
            return func(*args, **kwargs)
        if func in (torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__):
            raise self.tracer.refused("its forward reads the value of a constant tensor")
        if name == "__get__":
            return self._property(func, args)
        if is_tensor_method_or_property(func):
            return self.tracer.create_proxy("call_method", name, args, kwargs)
        return self.tracer.create_proxy("call_function", func, args, kwargs)

    def _look_at(self, values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self.tracer.look_at_shape(value)

    def _property(self, func: Any, args: Any) -> Any:
        name = func.__self__.__name__
        if isinstance(args[0], fx.Proxy):
            return getattr(args[0], name)
        if name in METADATA:
            self._look_at(args)
            return func(*args)
        return self.tracer.create_proxy("call_function", getattr, (args[0], name), {})


class Interception:
    """Sees what the forwards of one tree do while they are traced, by the thread that made it.

    Attributes:
        tracer: of the forward that is being traced; None between two.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.tracer: ForwardTracer | None = None
        self._thread = threading.get_ident()
        # What stands in for a function, by the identity of the function.
        self._replacements: dict[int, Any] = {}
        self._stack = ExitStack()

    def _active(self) -> ForwardTracer | None:
        return self.tracer if threading.get_ident() == self._thread else None

    @contextmanager
    def installed(self) -> Iterator[Interception]:
        """Intercept calls and attributes of modules, and all that a graph can't hold, for the time of the block."""
        with ExitStack() as stack:
            self._stack = stack
            self._watch_modules()
            self._refuse(torch.autocast, "__enter__", "its forward enters autocast")
            for context in (torch.no_grad, torch.enable_grad, torch.inference_mode):
                self._refuse(context, "__enter__", "its forward switches gradients on or off")
            self._refuse(
                torch.autograd.graph.saved_tensors_hooks,
                "__enter__",
                "its forward uses checkpoints or hooks on gradients",
            )
            self._refuse(
                torch.autograd.Function, "apply", "its forward calls an autograd.Function, whose gradient is its own"
            )
            for name in ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled"):
                self._refuse(torch, name, "its forward asks for a global setting of torch")
            for name in ("set_default_dtype", "set_default_device"):
                self._refuse(torch, name, "its forward changes a global setting of torch")
            self._refuse(torch, "manual_seed", "its forward seeds the random generator")
            for (_, name), scope in list(getattr(fx._symbolic_trace, "_wrapped_fns_to_patch", {}).items()):
                if name in scope:
                    self._wrap(scope, name)
            for name, function in list(vars(math).items()):
                if callable(function) and not name.startswith("_"):
                    self._wrap(vars(math), name)
            if "torch._dynamo" in sys.modules:
                # A compiled function would compile for symbols.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield self

    def follow_imports(self, function: types.FunctionType) -> None:
        """Intercept the functions of `math` and torch that a code has imported under names of its own, too."""
        for name in names_in(function.__code__):
            replacement = self._replacements.get(id(function.__globals__.get(name)))
            if replacement is not None:
                self._patch(function.__globals__, name, replacement)

    def _patch(self, owner: Any, name: str, new: Any) -> None:
        scope = owner if isinstance(owner, dict) else vars(owner)
        inherited = name not in scope
        old = None if inherited else scope[name]
        if isinstance(owner, dict):
            owner[name] = new
            self._stack.callback(owner.__setitem__, name, old)
            return
        setattr(owner, name, new)
        self._stack.callback(delattr, owner, name) if inherited else self._stack.callback(setattr, owner, name, old)

    def _refuse(self, owner: Any, name: str, reason: str) -> None:
        original = getattr(owner, name)
        kept = vars(owner).get(name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if (tracer := self._active()) is not None:
                raise tracer.refused(reason)
            return original(*args, **kwargs)

        def refuse_for(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if (tracer := self._active()) is not None:
                raise tracer.refused(reason)
            return original.__func__(cls, *args, **kwargs)

        refuse.__wrapped__ = original  # type: ignore[attr-defined]
        is_classmethod = isinstance(kept, classmethod)
        if not isinstance(owner, type):
            self._replacements[id(original)] = refuse
        self._patch(owner, name, classmethod(refuse_for) if is_classmethod else refuse)

    def _wrap(self, scope: dict[str, Any], name: str) -> None:
        original = scope[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            tracer = self._active()
            if tracer is None or not any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves((args, kwargs))):
                return original(*args, **kwargs)
            return tracer.create_proxy("call_function", original, args, kwargs)

        # Whoever looks through decorators finds the function that a graph calls.
        call.__wrapped__ = original  # type: ignore[attr-defined]
        self._replacements[id(original)] = call
        self._patch(scope, name, call)

    def _watch_modules(self) -> None:
        module_call, module_getattr = nn.Module.__call__, nn.Module.__getattr__
        module_setattr = nn.Module.__setattr__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            tracer = self._active()
            if tracer is None:
                return module_call(module, *args, **kwargs)
            return tracer.call_child(module, args, kwargs)

        def look(module: nn.Module, name: str) -> Any:
            value = object.__getattribute__(module, name)
            # Every attribute of every module comes by here, also between two traces, and most are these two.
            if (
                self.tracer is not None
                and name not in ("__dict__", "__class__")
                and (tracer := self._active()) is not None
            ):
                tracer.look(module, name, value)
            return value

        def read(module: nn.Module, name: str) -> Any:
            tracer = self._active()
            try:
                value = module_getattr(module, name)
            except AttributeError:
                if tracer is not None:
                    tracer.look(module, name, ABSENT)
                raise
            return value if tracer is None else tracer.read(module, name, value)

        def write(module: nn.Module, name: str, value: Any) -> None:
            tracer = self._active()
            if tracer is not None and id(module) in self.tree.modules:
                raise tracer.refused(f"its forward assigns the attribute {name!r} of a module")
            module_setattr(module, name, value)

        self._patch(nn.Module, "__call__", call)
        self._patch(nn.Module, "__getattribute__", look)
        self._patch(nn.Module, "__getattr__", read)
        self._patch(nn.Module, "__setattr__", write)


def writes_in_place(graph: fx.Graph) -> bool:
    """Whether an operation of the graph may write to one of its arguments; calls of modules aside."""
    return any(writes(node) for node in graph.nodes)


def writes(node: fx.Node) -> bool:
    """Whether a function or method may write to one of its arguments."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = function_name(node.target) if node.op == "call_function" else str(node.target)
    if "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    if node.kwargs.get("training") and "dropout" not in name:
        # What counts statistics.
        return True
    if name.endswith("_") and not name.endswith("__"):
        return True
    if name in ("batch_norm", "instance_norm"):
        # In training they move the running statistics, which `instance_norm` does unless it is told otherwise.
        by_place = node.args[5] if len(node.args) > 5 else name == "instance_norm"
        return node.kwargs.get("use_input_stats", node.kwargs.get("training", by_place)) is not False
    if node.op == "call_method":
        return name == "__setitem__" or name.strip("_") in _IN_PLACE
    home = getattr(node.target, "__module__", None) or ""
    if home == "_operator":
        return name in ("setitem", "delitem", *_IN_PLACE)
    # A function of the user's own may do anything.
    return not home.startswith(("torch", "math")) and home != "builtins" and bool(home)


def why_not_traced(code: types.CodeType) -> str | None:
    """The reason, seen in the code of a forward, why it can't be traced; None where there is none."""
    return _untraceable_step(code) or assigns_outside(code)


@functools.lru_cache(maxsize=4096)
def _untraceable_step(code: types.CodeType) -> str | None:
    """The first thing in a code, or in a function defined in it, that symbols can't go through, as a clause."""
    before, name = "", None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL", "BEFORE_ASYNC_WITH"):
            return "its forward enters a context ('with'), which a graph doesn't hold"
        if instruction.opname == "PUSH_EXC_INFO":
            return "its forward handles exceptions, which a symbol raises where a value doesn't"
        if instruction.opname == "IS_OP" and before not in ("LOAD_CONST", "LOAD_GLOBAL"):
            return "its forward asks whether two values are the same object"
        if before == "LOAD_GLOBAL" and name == "type" and instruction.argval != "self":
            return "its forward asks for the type of a value, which only a run shows"
        before, name = instruction.opname, instruction.argval
    inner = (_untraceable_step(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return next((reason for reason in inner if reason), None)


def assigns_outside(code: types.CodeType) -> str | None:
    """The reason why a code that assigns a global, or a variable of the function around it, can't be traced."""
    names = assigned_outside(code)
    return None if not names else f"its forward assigns the {names[0][0]} {names[0][1]!r}"
