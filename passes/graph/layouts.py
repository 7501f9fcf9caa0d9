"""The strides of tensors, and of the values in a captured graph: whether they show, and how to change them.

Most operations accept any strides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.graph import effects
from passes.graph.captured import (
    EXAMPLE,
    CapturedGraph,
    argument,
    autocast_at,
    example_of,
    name_of,
    propagate,
    take_place,
    value_with,
)
from passes.torch_private import FakeTensorMode, hint_of, is_transformed


def why_layout_shows(node: fx.Node, instead: torch.Tensor) -> str | None:
    """The reason why a value can't have other strides, as a clause; None if nothing depends on its strides.

    The users of the value are recomputed on fake tensors, as far as the strides differ. Views pass on the new strides;
    most other operations don't.

    Args:
        node: the node of the value.
        instead: an example of the same shape with the other strides.
    """
    known: dict[fx.Node, Any] = {node: instead}
    waiting = dict.fromkeys(node.users) if _strides(instead) != _strides(example_of(node)) else {}
    while waiting:
        # In the order of execution, so that all inputs of a node are up to date.
        user = min(waiting)
        del waiting[user]
        name = name_of(user)
        if user.op == "output":
            return "its output leaves the forward, and its memory layout would change"
        if name.startswith("as_strided"):
            return f"its output goes to {name}, which depends on its memory layout"
        try:
            value = value_with(user, known)
        except (RuntimeError, ValueError):
            value = _at_fixed_sizes(user, known)
            if value is None:
                return f"its output goes to {name}, which doesn't accept rows of a wider tensor"
            if _hints(value) != _hints(example_of(user)):
                return f"its output goes to {name}, whose result isn't known for rows of a wider tensor"
            continue
        if value is None:
            return f"its output goes to {name}, which isn't known to accept rows of a wider tensor"
        if _strides(value) != _strides(example_of(user)):
            known[user] = value
            waiting |= dict.fromkeys(user.users)
    return None


def _at_fixed_sizes(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """An example of a node's value at the sizes of the capture; None if the operation fails.

    torch's linear layers fail on rows of a wider tensor at open sizes, and not at fixed ones. Seen in 2.11.
    """
    examples = {source: known.get(source, example_of(source)) for source in node.all_input_nodes}
    leaves = pytree.tree_leaves(list(examples.values()))
    mode = next((leaf.fake_mode for leaf in leaves if hasattr(leaf, "fake_mode")), nullcontext())
    try:
        with mode:
            fixed = {
                source: pytree.tree_map_only((torch.Tensor, torch.SymInt), _with_hints, example)
                for source, example in examples.items()
            }
        return value_with(node, fixed)
    except (RuntimeError, ValueError):
        return None


def _strides(value: Any) -> list[Any]:
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [leaf.stride() if leaf.layout is torch.strided else leaf.layout for leaf in tensors]


def settle(captured: CapturedGraph, changed: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Bring a graph up to date after some nodes got inputs with other strides.

    The examples of all values that depend on these nodes are computed again. Where strides show, the values are copied
    to their old strides: in the outputs of the graph, for random numbers, which fill memory in its order, and for
    operations that fail with other strides, or that torch doesn't know.

    Returns:
        The copies, each with the node that needs the old strides.
    """
    if not changed:
        return {}
    as_written: set[fx.Node] = set()
    while True:
        plan = _Plan(captured, changed, as_written)
        try:
            plan.walk()
        except _Bound as bound:
            if bound.node in as_written:
                raise
            as_written.add(bound.node)
        else:
            return plan.written()


class _Bound(Exception):
    """A value whose strides show must be copied where its memory is made, because something else uses this memory."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node.name)
        self.node = node


class _Plan:
    """The new examples and the copies for one graph, which is not changed before `written`.

    Args:
        changed: the nodes with new inputs.
        as_written: nodes whose values must have the strides that they had.
    """

    def __init__(self, captured: CapturedGraph, changed: Collection[fx.Node], as_written: Collection[fx.Node]) -> None:
        self._captured = captured
        self._changed = changed
        self._as_written = as_written
        self._memory = effects.Memory(captured.graph, captured.tensors)
        self._end = captured.graph.output_node()
        self._new: dict[fx.Node, Any] = {}
        # The same for the values that get copies with their old strides as soon as they are made.
        self._made: dict[fx.Node, Any] = {}
        # Examples of fixed size, with which torch computes much faster than with sizes that are symbols.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fixed: dict[fx.Node, Any] = {}
        # The nodes that need a value with its old strides, by that value.
        self._needing: dict[fx.Node, list[fx.Node]] = {}

    def walk(self) -> None:
        """Find the new examples and the copies.

        Raises:
            _Bound: a node must be in `as_written`.
        """
        for node in self._captured.graph.nodes:
            sources = [source for source in node.all_input_nodes if source in self._new]
            if not sources and node not in self._changed:
                continue
            if node is self._end:
                for source in sources:
                    self._return(source, sources)
            elif effects.takes_any_strides(node) and not _has_tensors(node):
                continue
            elif (value := self._value(node)) is None:
                for source in filter(self._differs, sources):
                    self._copy(source, node)
            elif node in self._as_written:
                self._made[node] = value
                self._needing[node] = list(node.users)
            elif node in self._changed or self._memory.shares(node) or any(map(self._differs, sources)):
                self._new[node] = value

    def _value(self, node: fx.Node) -> Any:
        """The new example of a node; None if it must get the strides that it was written for."""
        if node in self._as_written and (order_of_example(node) is None or self._memory.shares(node)):
            return None
        if not effects.takes_any_strides(node):
            return None
        try:
            is_apart = isinstance(example_of(node), torch.Tensor) and not self._memory.shares(node)
            order = self._order_of_result(node) if is_apart else None
            return value_with(node, self._new) if order is None else _in_order(example_of(node), order)
        except (RuntimeError, ValueError):
            return None

    def _order_of_result(self, node: fx.Node) -> Sequence[int] | None:
        if name_of(node) == "batch_norm":
            # It keeps the format of its input, and takes long with examples.
            return order_of(self._of_fixed_size(argument(node, 0, "input")))
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._of_fixed_size)
        target: Any = node.target
        with self._mode, torch.no_grad(), autocast_at(node):
            if node.op == "call_method":
                return order_of(getattr(args[0], target)(*args[1:], **kwargs))
            return order_of(target(*args, **kwargs))

    def _of_fixed_size(self, node: fx.Node) -> Any:
        if node not in self._fixed:
            with self._mode:
                value = self._new.get(node, example_of(node))
                self._fixed[node] = pytree.tree_map_only((torch.Tensor, torch.SymInt), _with_hints, value)
        return self._fixed[node]

    def _return(self, source: fx.Node, others: Sequence[fx.Node]) -> None:
        if self._differs(source):
            mine = effects.places_of(source)
            if any(other is not source and mine & effects.places_of(other) for other in others):
                raise _Bound(self._maker(source))
            self._copy(source, self._end)

    def _copy(self, source: fx.Node, user: fx.Node) -> None:
        # What is written to a copy later doesn't reach the value itself.
        if self._memory.may_be_written([source], between=(source, self._end)) or order_of_example(source) is None:
            raise _Bound(self._maker(source))
        self._needing.setdefault(source, []).append(user)

    def _maker(self, node: fx.Node) -> fx.Node:
        """The node that made the memory of a value."""
        while node not in self._changed and node not in self._as_written:
            mine = effects.places_of(node)
            shared = (each for each in node.all_input_nodes if each in self._new and mine & effects.places_of(each))
            source = next(shared, None)
            if source is None:
                break
            node = source
        return node

    def _differs(self, node: fx.Node) -> bool:
        return node in self._new and _hints(self._new[node]) != _hints(example_of(node))

    def written(self) -> dict[fx.Node, fx.Node]:
        """Insert the copies and set the examples."""
        copies: dict[fx.Node, fx.Node] = {}
        for source, users in self._needing.items():
            first = min(users)
            copy = _restored(self._captured.graph, source, first)
            for user in users:
                user.replace_input_with(source, copy)
            copies[copy] = first
        for node, value in (*self._new.items(), *self._made.items()):
            node.meta[EXAMPLE] = value
        return copies


def _with_hints(value: Any, device: str | None = None) -> Any:
    if not isinstance(value, torch.Tensor):
        return hint_of(value)
    known = [hint for size in (*value.shape, *value.stride()) if (hint := hint_of(size)) is not None]
    if len(known) < 2 * value.dim():
        raise ValueError("a size depends on values")
    sizes, strides = known[: value.dim()], known[value.dim() :]
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=device or value.device)


def _in_order(example: Any, order: Sequence[int]) -> torch.Tensor:
    """An example of the same shape with its dims in this order in memory, from the largest stride to the smallest."""
    strides: list[Any] = [0] * len(order)
    step: Any = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * example.shape[dim]
    with example.fake_mode:
        return torch.empty_strided(example.shape, strides, dtype=example.dtype, device=example.device)


def laid_out(node: fx.Node) -> torch.Tensor | None:
    """A tensor without memory, of the shape and strides that a node's value has in the call of the capture.

    None for values that are no tensors with strides, and for sizes that depend on values.
    """
    value = example_of(node)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or is_transformed(value):
        return None
    try:
        return _with_hints(value, "meta")
    except ValueError:
        return None


def order_of_example(node: fx.Node) -> Sequence[int] | None:
    """The order of the dims of a node's value in memory; None if it has gaps, overlaps, or no known strides."""
    value = laid_out(node)
    return None if value is None else order_of(value)


def _hints(value: Any) -> list[Any]:
    return [
        [hint_of(stride) for stride in strides] if isinstance(strides, tuple) else strides
        for strides in _strides(value)
    ]


def _has_tensors(node: fx.Node) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(example_of(node)))


def _restored(graph: fx.Graph, source: fx.Node, before: fx.Node) -> fx.Node:
    """Insert a copy of a value with the strides of its example; nothing is copied if it has them already."""
    order = order_of_example(source)
    assert order is not None
    rank = len(order)
    memory_format = torch.contiguous_format if order == tuple(range(rank)) else CHANNELS_LAST_FORMATS.get(rank)
    with graph.inserting_before(before):
        if order in (tuple(range(rank)), ORDERS.get(rank)):
            nodes = [graph.call_method("contiguous", (source,), {"memory_format": memory_format})]
        else:
            moved = graph.call_method("permute", (source, *order))
            copied = graph.call_method("contiguous", (moved,))
            back = [order.index(dim) for dim in range(rank)]
            nodes = [moved, copied, graph.call_method("permute", (copied, *back))]
    for node in nodes:
        take_place(node, source)
        propagate(node)
    nodes[-1].meta[EXAMPLE] = example_of(source)
    return nodes[-1]


# The memory formats of tensors -----------------------------------------------------------------------------------------

_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams, torch.per_channel_symmetric)


def kind_of(tensor: torch.Tensor) -> str | None:
    """The layout of a tensor without strides, as in "it is sparse"; None for a tensor with strides."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is torch.strided:
        return None
    return "in mkldnn's own layout" if tensor.is_mkldnn else "sparse"


def has_strides(tensor: torch.Tensor) -> bool:
    """Whether the tensor has dims and strides that can be rearranged; tensors quantized per channel don't."""
    return kind_of(tensor) is None and not (tensor.is_quantized and tensor.qscheme() in _PER_CHANNEL)


# The dims of a tensor, ordered from the largest stride to the smallest: (0, 1, 2, 3) is contiguous, (0, 2, 3, 1)
# channels_last.
DimOrder = tuple[int, ...]

CHANNELS_LAST_FORMATS: Mapping[int, torch.memory_format] = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels_last memory format for tensors of each number of dims; other numbers have none."""
# The order of dims in each of these formats.
ORDERS: Mapping[int, DimOrder] = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether torch treats a tensor of 4 or 5 dims as channels_last, with or without gaps in memory.

    torch checks only the strides (c10's `is_channels_last_strides_2d` and `_3d`). A tensor with one channel or one
    spatial position is in both formats, but its strides still show one of them.
    """
    shape, strides = tensor.shape, tensor.stride()
    if strides[1] == 0:
        return False
    smallest = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < smallest or (dim == 0 and smallest == strides[1]):
            return False
        smallest = strides[dim] * max(shape[dim], 1)
    return True


LAST = "channels_last"
CONTIGUOUS = "contiguous"
EITHER = "either"


def layout_of(value: Any) -> str | None:
    """The format of a feature map: `LAST`, `EITHER` if it is in both, else `CONTIGUOUS`; None for other values."""
    if not isinstance(value, torch.Tensor) or not has_strides(value) or value.dim() not in CHANNELS_LAST_FORMATS:
        return None
    if is_transformed(value):
        # It represents a batch of tensors with other dims.
        return None
    if value.is_contiguous():
        return EITHER if value.is_contiguous(memory_format=CHANNELS_LAST_FORMATS[value.dim()]) else CONTIGUOUS
    return LAST if is_channels_last(value) else CONTIGUOUS


def order_of(tensor: torch.Tensor) -> DimOrder | None:
    """The order of the dims of a tensor with strides, from the largest stride to the smallest.

    None for less than two dims, and for tensors with gaps or overlaps in memory.
    """
    if tensor.dim() < 2:
        return None
    dims, strides = range(tensor.dim()), tensor.stride()
    order = tuple(dims) if tensor.is_contiguous() else tuple(sorted(dims, key=lambda dim: -strides[dim]))
    return order if lies_in(tensor, order) else None


def lies_in(tensor: torch.Tensor, order: DimOrder) -> bool:
    """Whether the dims of a tensor are in this order in memory, without gaps; dims of size 1 fit anywhere."""
    return tensor.dim() == len(order) and tensor.permute(order).is_contiguous()
