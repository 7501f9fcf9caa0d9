"""The decisions that Python takes while a model is traced, and that a file then holds as they fell.

A trace keeps the operations that ran. Where Python looked at a value on the way (`if x.sum() > 0`, `if len(x) > 16`, `for
i in range(n)`), the file holds one side of it for all inputs, without a word. Here each such look is recorded with what
it depends on:

- the values of the inputs: the file would be wrong for other values, so the route is refused;
- sizes alone: the smallest batch at which the decision falls differently is looked for, and the file is proven there too;
- weights and constants: it falls the same way every time.

A decision that only chooses between going on and raising (`assert`, `if …: raise`) has one side that gives outputs, and
the file holds that one.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from exporters.autograd_functions import traced_by_their_forwards
from exporters.base import Adapter, clones
from exporters.conditions import Condition, Line, batches_near, line_through
from exporters.errors import RouteRefused
from exporters.isolation import silent, undisturbed
from exporters.places import paths_of, place_of, user_frame
from exporters.proof import Evidence, refusing
from exporters.torchscript_deprecation import torchscript_allowed

# Their answers tell no value: kinds, names and places.
_TELLING_NO_VALUE = (str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device, torch.layout, type(None), type)
_ABOUT_THE_KIND = frozenset({
    "dim", "ndimension", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_contiguous", "is_pinned",
    "is_shared", "is_conj", "is_neg", "is_same_size", "element_size", "get_device", "stride", "storage_offset", "data_ptr",
    "has_names", "requires_grad_", "__get__", "__repr__", "__format__", "__hash__", "__deepcopy__", "__reduce_ex__",
    "is_nested", "result_type", "can_cast", "promote_types", "is_tensor", "is_storage", "_is_view", "_is_zerotensor",
    "backward", "register_hook", "untyped_storage", "storage", "_typed_storage", "_version", "broadcast_shapes",
})  # fmt: skip

# Nodes of a trace that read the shape of a tensor and none of its values.
_OF_THE_SHAPE = frozenset({"aten::size", "aten::numel", "aten::dim", "aten::len", "aten::sym_size", "aten::stride"})

# Operators that give as many rows as the values say.
_AS_LONG_AS_VALUES_SAY = frozenset({
    "aten::nonzero", "aten::nonzero_numpy", "aten::argwhere", "aten::masked_select", "aten::unique_dim", "aten::_unique",
    "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::repeat_interleave",
    "aten::bincount", "aten::index",
})  # fmt: skip

# Where a tensor becomes an argument that is a number.
_INTO_A_NUMBER = frozenset({
    "aten::Int", "aten::Float", "aten::Bool", "aten::IntImplicit", "aten::FloatImplicit", "aten::ScalarImplicit",
    "aten::item",
})  # fmt: skip

_VIEWS = frozenset({
    "aten::alias", "aten::as_strided", "aten::chunk", "aten::contiguous", "aten::detach", "aten::diagonal",
    "aten::expand", "aten::expand_as", "aten::flatten", "aten::imag", "aten::lift_fresh", "aten::movedim",
    "aten::narrow", "aten::permute", "aten::positive", "aten::ravel", "aten::real", "aten::reshape",
    "aten::reshape_as", "aten::select", "aten::slice", "aten::split", "aten::split_with_sizes", "aten::squeeze",
    "aten::swapaxes", "aten::swapdims", "aten::t", "aten::tensor_split", "aten::to", "aten::transpose",
    "aten::type_as", "aten::unbind", "aten::unflatten", "aten::unfold", "aten::unsafe_chunk", "aten::unsafe_split",
    "aten::unsqueeze", "aten::view", "aten::view_as", "aten::view_as_complex", "aten::view_as_real",
    "prim::ListConstruct", "prim::ListUnpack", "prim::TupleUnpack",
})  # fmt: skip

_DEPTH = 200


@dataclass(frozen=True)
class Constant:
    """A value that every call has."""

    value: Any


@dataclass(frozen=True)
class SizeOf:
    """A size in this run; `input` is the input and its dim where it is one of an input."""

    size: int
    input: tuple[int, int] | None


@dataclass(frozen=True)
class Operation:
    """An operator by its name, such as "gt", on expressions; `keywords` are the names of the last, which go by name."""

    name: str
    arguments: tuple[Expression, ...]
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unknown:
    """What can't be computed from sizes."""

    sizes: tuple[SizeOf, ...]


Expression = Constant | SizeOf | Operation | Unknown


@dataclass(frozen=True)
class Decision:
    """One look of Python at a traced value.

    Attributes:
        place: the line and the module, for a message.
        outcome: what Python saw: True, 3, …
        of_values: whether it depends on the values of the inputs.
        expression: how it depends on sizes.
    """

    place: str
    outcome: Any
    of_values: bool
    expression: Expression


class Watch(TorchFunctionMode):
    """While it is active, the decisions of the adapter's traces are recorded.

    Functions of torch that are written in Python are seen from outside: what they decide on themselves isn't.
    """

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.decisions: list[Decision] = []
        self._paths = paths_of(adapter.model)
        self._inputs: dict[int, int] = {}
        self._looks: list[_Look] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _tracing() and not _tells_no_value(func, result):
            frame = user_frame(sys._getframe(1))
            if not _only_raises(frame):
                values = [_traced(tensor) for tensor in _tensors_in((args, kwargs))]
                place = place_of(frame, frame.f_lineno if frame else 0, self._paths)
                self._looks.append(_Look(place, result, _is_whole(func, args), values))
        return result

    def began(self, module: nn.Module, tensors: tuple[torch.Tensor, ...]) -> None:
        """A forward hook of the adapter: its inputs are known now."""
        if _tracing():
            values = map(_traced, tensors)
            self._inputs = {value.unique(): index for index, value in enumerate(values)}
            self._looks.clear()

    def ended(self, module: nn.Module, tensors: tuple[torch.Tensor, ...], outputs: Any) -> None:
        """A forward hook of the adapter: the trace is whole, and not yet rewritten by torch."""
        if not _tracing():
            return
        graph = _Graph(torch._C._get_tracing_state().graph(), self._inputs) if self._looks else None
        self.decisions = [graph.decision(look) for look in self._looks] if graph else []
        self._looks.clear()


@dataclass(frozen=True)
class _Look:
    place: str
    outcome: Any
    whole: bool
    values: Sequence[Any]


@contextmanager
def watching(adapter: Adapter, *, open_sizes: bool = True) -> Iterator[Watch]:
    """Record the decisions of the traces of `adapter` that are made inside.

    Args:
        open_sizes: whether any size of the inputs is to be open; where none is, `len(x)` stays a number.
    """
    watch = Watch(adapter)
    hooks = (adapter.register_forward_pre_hook(watch.began), adapter.register_forward_hook(watch.ended))
    try:
        with watch, _lengths_as_sizes(adapter) if open_sizes else nullcontext():
            yield watch
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _lengths_as_sizes(adapter: Adapter) -> Iterator[None]:
    """While it is active, `len(x)` of a tensor is `x.shape[0]` in a trace.

    Python wants a plain number of `__len__`, which a trace would keep as it is. That of a weight stays one: it is the same
    at every call, and a size in a trace is no key of a dict and no `int`.
    """
    length = builtins.len
    weights = {id(tensor) for tensor in (*adapter.parameters(), *adapter.buffers())}

    def traced_length(value: Any, /) -> Any:
        # A trace is of one thread.
        if not isinstance(value, torch.Tensor) or not _tracing() or id(value) in weights or not value.dim():
            return length(value)
        return value.shape[0]

    builtins.len = traced_length
    try:
        yield
    finally:
        builtins.len = length


def traced_with_decisions(
    adapter: Adapter, inputs: Sequence[torch.Tensor], *, open_sizes: bool = True
) -> tuple[torch.jit.ScriptModule, Sequence[Decision]]:
    """The adapter's trace on these inputs, and what was decided on the way; `open_sizes` as in `watching`.

    Raises:
        RouteRefused: it can't be traced.
    """
    with (
        undisturbed(adapter), refusing(), silent(), torchscript_allowed(), traced_by_their_forwards(),
        watching(adapter, open_sizes=open_sizes) as watch,
    ):  # fmt: skip
        module = torch.jit.trace(adapter, clones(inputs), check_trace=False)
    return module, watch.decisions


def conditions_of(evidence: Evidence, decisions: Sequence[Decision]) -> tuple[Condition, ...]:
    """What must hold of the open sizes for the trace of the first call to be the one that any inputs would give.

    Raises:
        RouteRefused: a decision depends on the values of the inputs, or on the batch in a way that can't be followed.
    """
    _refuse_values(decisions)
    of_sizes = [index for index, decision in enumerate(decisions) if _sizes_in(decision.expression)]
    if not evidence.open_dims or not of_sizes:
        return ()
    return tuple(
        replace(condition, along=number)
        for number, view in enumerate(evidence.along)
        for condition in _conditions_along(view, decisions, of_sizes)
    )


def _conditions_along(
    evidence: Evidence, decisions: Sequence[Decision], of_sizes: Sequence[int]
) -> Iterator[Condition]:
    inputs = {(index, dim): evidence.line(index, dim) for index, dim in evidence.open_dims}
    if evidence.steps:
        # Where all grow together a size inside may be their product. It was followed along each of them, and so was what
        # goes by one size alone.
        followed = (decisions[index] for index in of_sizes if _is_of_several_inputs_sizes(decisions[index], evidence))
        conditions = (_condition([decision], evidence, evidence.batches, inputs) for decision in followed)
        yield from (condition for condition in conditions if condition is not None)
        return
    traces = [decisions]
    if any(size.input is None for index in of_sizes for size in _sizes_in(decisions[index].expression)):
        # Three points show whether a size goes in a straight line with the batch.
        traces += [traced_with_decisions(evidence.adapter, tensors)[1] for tensors in evidence.inputs[1:3]]
    for index in of_sizes:
        same = [_same(trace, decisions, index, evidence) for trace in traces]
        if (condition := _condition(same, evidence, evidence.batches, inputs)) is not None:
            yield condition


def conditions_at(evidence: Evidence, batch: int) -> tuple[Condition, ...]:
    """What the model decides by the sizes of its inputs at a batch that no call has.

    What can't be followed, or not be traced, is left out: file and model were compared at that batch.

    Raises:
        RouteRefused: a decision depends on the values of the inputs there.
    """
    try:
        _, decisions = traced_with_decisions(evidence.adapter, evidence.inputs_at(batch))
    except RouteRefused:
        return ()
    _refuse_values(decisions, f"at {evidence.at(batch)} ")
    inputs = {(index, dim): evidence.line(index, dim) for index, dim in evidence.open_dims}
    followed = [decision for decision in decisions if _is_of_input_sizes(decision)]
    conditions = (_condition([decision], evidence, [batch], inputs) for decision in followed)
    return tuple(condition for condition in conditions if condition is not None)


def _refuse_values(decisions: Sequence[Decision], where: str = "") -> None:
    for decision in decisions:
        if decision.of_values:
            raise RouteRefused(
                f"{where}the model decides by the values of its inputs at {decision.place}, and a trace keeps one side of it"
                " for all inputs (torch.where and torch.cond keep both)"
            )


def _is_of_input_sizes(decision: Decision) -> bool:
    """Whether a decision is a yes or no that sizes of the inputs alone give."""
    sizes = _sizes_in(decision.expression)
    known = bool(sizes) and all(size.input is not None for size in sizes) and not _has_unknown(decision.expression)
    return known and isinstance(decision.outcome, bool)


def _is_of_several_inputs_sizes(decision: Decision, evidence: Evidence) -> bool:
    """Whether it is such a yes or no that goes by two open sizes or more."""
    places = {size.input for size in _sizes_in(decision.expression) if size.input in evidence.open_dims}
    names = {evidence.input_specs[place[0]].shape[place[1]] for place in places if place is not None}
    return len(names) > 1 and _is_of_input_sizes(decision)


def _same(trace: Sequence[Decision], first: Sequence[Decision], index: int, evidence: Evidence) -> Decision:
    if len(trace) != len(first) or trace[index].place != first[index].place:
        raise RouteRefused(
            f"the model takes another path at another {evidence.size} from {first[index].place} on, and a trace keeps one",
            size=evidence.size,
        )
    return trace[index]


def _condition(
    decisions: Sequence[Decision],
    evidence: Evidence,
    batches: Sequence[int],
    inputs: dict[tuple[int, int], Line | None],
) -> Condition | None:
    """The batches at which the decision falls as it did; None where it does at all."""
    first = decisions[0]
    sizes = [_sizes_in(decision.expression) for decision in decisions]
    if len({len(found) for found in sizes}) > 1:
        raise RouteRefused(
            f"the model takes another path at another {evidence.size} before {first.place}, and a trace keeps one",
            size=evidence.size,
        )
    lines = [
        inputs.get(at_first.input, Line(0, at_first.size))
        if at_first.input is not None
        else line_through(batches, [found[index].size for found in sizes])
        for index, at_first in enumerate(sizes[0])
    ]
    if all(line is not None and line.slope == 0 for line in lines):
        return None
    known = [line for line in lines if line is not None]
    expression = first.expression
    if len(known) < len(lines) or _has_unknown(expression) or not isinstance(first.outcome, bool):
        raise RouteRefused(
            f"the model takes a size that goes with {evidence.growing} into Python at {first.place}, and a trace keeps what"
            f" followed from it at one {evidence.size}",
            size=evidence.size,
        )

    def holds(batch: int) -> bool:
        try:
            value = _value(expression, iter([line.at(batch) for line in known]))
        except (RuntimeError, ArithmeticError):  # no value: the model can't go the same way there either
            return False
        return bool(value) == first.outcome

    if any(holds(batch) != (each.outcome == first.outcome) for batch, each in zip(batches, decisions, strict=False)):
        raise RouteRefused(
            f"the model decides at {first.place} by sizes that can't be computed from those of its inputs",
            size=evidence.size,
        )

    constants = [value for value in _constants_in(expression) if isinstance(value, int)]
    return Condition(first.place, holds, batches_near(constants, known))


def _sizes_in(expression: Expression) -> list[SizeOf]:
    if isinstance(expression, SizeOf):
        return [expression]
    if isinstance(expression, Operation):
        return [size for argument in expression.arguments for size in _sizes_in(argument)]
    return list(expression.sizes) if isinstance(expression, Unknown) else []


def _has_unknown(expression: Expression) -> bool:
    if isinstance(expression, Operation):
        return any(map(_has_unknown, expression.arguments))
    return isinstance(expression, Unknown)


def _constants_in(expression: Expression) -> Iterator[Any]:
    if isinstance(expression, Constant):
        value = expression.value
        yield value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    elif isinstance(expression, Operation):
        for argument in expression.arguments:
            yield from _constants_in(argument)


def _value(expression: Expression, sizes: Iterator[int]) -> Any:
    """The expression computed by torch's own operators, its sizes given in the order of `_sizes_in`."""
    if isinstance(expression, SizeOf):
        return torch.tensor(next(sizes))
    if isinstance(expression, Constant):
        return expression.value
    assert isinstance(expression, Operation)
    arguments = [_value(argument, sizes) for argument in expression.arguments]
    if expression.name == "list":
        return arguments
    count = len(arguments) - len(expression.keywords)
    named = dict(zip(expression.keywords, arguments[count:], strict=True))
    return getattr(torch.ops.aten, expression.name)(*arguments[:count], **named)


class _Graph:
    """The graph of a running trace, with what depends on the values of the inputs."""

    def __init__(self, graph: Any, inputs: dict[int, int]) -> None:
        self._inputs = inputs
        self._of_values = set(inputs)
        # Values whose shape depends on the values of the inputs.
        self._of_open_length: set[int] = set()
        self._roots: dict[int, int] = {}
        self._written: set[int] = set()
        self._read(graph)

    def decision(self, look: _Look) -> Decision:
        of_values = any(map(self._depends, (value.unique() for value in look.values)))
        if of_values:
            return Decision(look.place, look.outcome, True, Unknown(()))
        expressions = [self._expression(value, 0) for value in look.values]
        if look.whole and len(expressions) == 1:
            return Decision(look.place, look.outcome, False, expressions[0])
        sizes = tuple(size for expression in expressions for size in _sizes_in(expression))
        return Decision(look.place, look.outcome, False, Unknown(sizes))

    def _depends(self, value: int) -> bool:
        return value in self._of_values or self._roots.get(value, value) in self._written

    def _read(self, block: Any) -> None:
        """Go through the nodes in their order, those of traced children in their place."""
        for node in block.nodes():
            for inner in node.blocks():
                self._read(inner)
            self._read_node(node)

    def _read_node(self, node: Any) -> None:
        kind: str = node.kind()
        inputs = [value.unique() for value in node.inputs()]
        outputs = [value.unique() for value in node.outputs()]
        if kind in _OF_THE_SHAPE:
            if inputs[0] in self._of_open_length:
                self._of_values.update(outputs)
            return
        of_values = any(map(self._depends, inputs))
        if of_values:
            self._of_values.update(outputs)
        if any(value in self._of_open_length for value in inputs) or (of_values and _gives_open_length(node, kind)):
            self._of_open_length.update(outputs)
        in_place = kind.endswith("_") and not kind.endswith("__")
        if inputs and (in_place or kind in _VIEWS):
            root = self._roots.get(inputs[0], inputs[0])
            self._roots.update(dict.fromkeys(outputs, root))
            if in_place and of_values:
                self._written.add(root)

    def _expression(self, value: Any, depth: int) -> Expression:
        node = value.node()
        kind: str = node.kind()
        inputs = list(node.inputs())
        if kind == "prim::Constant":
            return Constant(value.toIValue())
        if kind == "aten::size" and len(inputs) == 2 and inputs[1].node().kind() == "prim::Constant":
            return self._size(inputs[0], inputs[1].toIValue())
        if kind == "prim::NumToTensor":
            return self._expression(inputs[0], depth + 1)
        if depth > _DEPTH or not inputs or kind in _OF_THE_SHAPE:
            return Unknown(self._all_sizes(inputs) if kind in _OF_THE_SHAPE else ())
        arguments = tuple(self._expression(argument, depth + 1) for argument in inputs)
        if kind == "prim::ListConstruct":
            return Operation("list", arguments)
        name = kind.removeprefix("aten::")
        if name == kind or not hasattr(torch.ops.aten, name.rstrip("_")):
            return Unknown(tuple(size for argument in arguments for size in _sizes_in(argument)))
        # In place it would change the value that another expression reads.
        return Operation(name.rstrip("_"), arguments, _keywords(node))

    def _size(self, tensor: Any, dim: int) -> SizeOf:
        sizes = tensor.type().sizes()
        index = self._inputs.get(tensor.unique())
        return SizeOf(sizes[dim], None if index is None else (index, dim % len(sizes)))

    def _all_sizes(self, tensors: Sequence[Any]) -> tuple[SizeOf, ...]:
        return tuple(self._size(tensors[0], dim) for dim in range(len(tensors[0].type().sizes())))


def _keywords(node: Any) -> tuple[str, ...]:
    """The names of a node's inputs that its operator takes by name alone, such as `alpha` of `add`: the last ones."""
    schema = torch._C.parse_schema(node.schema())
    return tuple(argument.name for argument in schema.arguments if argument.kwarg_only)


def _gives_open_length(node: Any, kind: str) -> bool:
    if kind == "aten::index":
        # A mask picks as many rows as it has True; numbers pick as many as there are numbers.
        return any(_is_mask(value) for value in list(node.inputs())[1].node().inputs())
    return kind in _AS_LONG_AS_VALUES_SAY or kind in _INTO_A_NUMBER


def _is_mask(value: Any) -> bool:
    type_ = value.type()
    return type_.kind() == "TensorType" and type_.scalarType() in ("Bool", "Byte", None)


def _traced(tensor: torch.Tensor) -> Any:
    """What stands for the tensor in the running trace."""
    return torch._C._get_value_trace(tensor)  # type: ignore[attr-defined]


def _tracing() -> bool:
    return torch._C._get_tracing_state() is not None


def _tells_no_value(func: Any, result: Any) -> bool:
    if isinstance(result, _TELLING_NO_VALUE) or getattr(func, "__name__", "") in _ABOUT_THE_KIND:
        return True
    if hasattr(type(result), "__torch_function__"):
        # It stands for a tensor, and is none.
        return True
    return isinstance(result, list | tuple) and len(result) > 0 and all(map(_is_traced_or_none, result))


def _is_traced_or_none(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_traced_or_none, value))
    return value is None or isinstance(value, torch.Tensor)


def _is_whole(func: Any, args: Any) -> bool:
    """Whether what Python saw is the one tensor's value itself."""
    return len(args) == 1 and getattr(func, "__name__", "") in ("__bool__", "is_nonzero", "item")


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _only_raises(frame: FrameType | None) -> bool:
    """Whether what runs there is the test of an `assert`, or of an `if` with a side that raises."""
    if frame is None:
        return False
    positions = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    line, end_line, column, end_column = positions
    if line is None or end_line is None or column is None or end_column is None:
        return False
    start, end = (line, column), (end_line, end_column)
    # The instruction that takes a test as True or False stands at the test or at the whole statement.
    return any(
        (first <= start and end <= last) or (start, end) == statement
        for (first, last), statement in _raising_tests(frame.f_code.co_filename)
    )


_Span = tuple[tuple[int, int], tuple[int, int]]
"""First and last (line, column)."""


@lru_cache(maxsize=256)
def _raising_tests(path: str) -> tuple[tuple[_Span, _Span], ...]:
    """Where each test in the file stands that only chooses between going on and raising, and its statement.

    One in the body of a `try` with an `except` is none.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):  # no Python, or none any more
        return ()
    # What is raised there may be caught, and the model goes on another way.
    caught = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and node.handlers
        for statement in node.body
        for inner in ast.walk(statement)
    }
    statements = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and (_raises(node.body) or _raises(node.orelse)))
        if node not in caught
    ]
    return tuple(
        (_span(statement.test), _span(statement))
        for statement in statements
        # A name that is given in the test goes on being used.
        if not any(isinstance(node, ast.NamedExpr) for node in ast.walk(statement.test))
    )


def _span(node: ast.expr | ast.stmt) -> _Span:
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)


_LEAVING = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom)


def _raises(body: Sequence[ast.stmt]) -> bool:
    """Whether the statements always end in `raise`."""
    if not body or not isinstance(body[-1], ast.Raise):
        return False
    return not any(isinstance(node, _LEAVING) for statement in body for node in ast.walk(statement))
