"""Recompute dropped tensors in the backward pass, one call at a time, each from its recorded arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from passes.checkpointing.ambient import Ambient
from passes.checkpointing.calls import UNWATCHED
from passes.checkpointing.sharding import Gathered
from passes.checkpointing.tensors import CONTAINERS, View, mapped, tensors_in, view_of


class Slot:
    """A dropped tensor that autograd needs. Once computed, the tensor stays as long as autograd holds the slot."""

    __slots__ = ("__weakref__", "node", "number", "value")

    def __init__(self, node: Node, number: int) -> None:
        self.node = node
        # Results of the call count from 0 up, its internal tensors (indices of a pooling, casts) from -1 down.
        self.number = number
        self.value: Tensor | None = None


class Dropped:
    """An argument that is dropped and must be recomputed too."""

    __slots__ = ("node", "number", "requires_grad", "view")

    def __init__(self, node: Node, number: int, view: View | None, requires_grad: bool) -> None:
        self.node = node
        self.number = number
        self.view = view
        self.requires_grad = requires_grad


class Kept:
    """An argument that is kept, with its version at the call."""

    __slots__ = ("requires_grad", "tensor", "unit", "version")

    def __init__(self, tensor: Tensor, unit: nn.Module | None) -> None:
        # A parameter is stored as it is, because FSDP swaps its memory.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = tensor._version
        self.requires_grad = tensor.requires_grad
        # The FSDP2 unit that gathers it, if it is a sharded parameter.
        self.unit = unit


class Scratch:
    """An argument that the call only writes to. Running statistics are replaced by a temporary tensor."""

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device


_RECORDS = (Dropped, Kept, Scratch)


class Node:
    """A call that can run again.

    Attributes:
        arguments, options: positional and keyword arguments, with an argument record in place of each tensor.
        writes: whether the call writes to its first argument and returns it.
        views: for each result, its view of its storage.
    """

    __slots__ = (
        "__weakref__",
        "ambient",
        "arguments",
        "function",
        "index",
        "name",
        "options",
        "region",
        "slots",
        "sources",
        "views",
        "writes",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        name: str,
        function: Callable[..., Any],
        region: tuple[int, ...],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        sources: tuple[Dropped, ...],
        ambient: Ambient,
    ) -> None:
        self.index = index
        self.name = name
        self.function = function
        self.region = region
        self.arguments = arguments
        self.options = options
        self.sources = sources
        self.ambient = ambient
        self.writes = False
        self.views: dict[int, View] = {}
        self.slots: dict[int, weakref.ref[Slot]] = {}

    def place_of(self, tensor: Tensor, number: int) -> View | None:
        """The view of a tensor in the storage of a result; None if it is the same as that of the result."""
        view = view_of(tensor)
        return None if view == self.views[number] else view

    def slot(self, number: int) -> Slot:
        """The slot of one of its results; created if there is none."""
        slot = self.known(number)
        if slot is None:
            slot = Slot(self, number)
            self.slots[number] = weakref.ref(slot)
        return slot

    def known(self, number: int) -> Slot | None:
        """The slot of a result, if something holds it; None otherwise."""
        reference = self.slots.get(number)
        return None if reference is None else reference()

    def empty_slots(self) -> dict[int, Slot]:
        """The slots that something holds and that have no value yet."""
        found = {number: reference() for number, reference in self.slots.items()}
        return {number: slot for number, slot in found.items() if slot is not None and slot.value is None}


def fill(wanted: Slot) -> Tensor:
    """Compute the tensor of a slot.

    The slots in its own region and in the surrounding ones that it depends on are filled too. Values of other regions
    are temporary; they are computed again in their own turn.
    """
    if wanted.value is not None:
        return wanted.value
    with UNWATCHED.entered():
        order, uses = _needed(wanted.node)
        values = _Temporary(uses)
        region = wanted.node.region
        try:
            for node in order:
                slots = node.empty_slots() if node.region == region[: len(node.region)] else {}
                found = _run(node, slots.keys(), values)
                values.gathered.called()
                for number, tensor in found.items():
                    if (slot := slots.get(number)) is not None:
                        slot.value = tensor
                    elif values.is_needed(node, number):
                        values.tensors[id(node), number] = tensor
        finally:
            values.gathered.over()
    assert wanted.value is not None
    return wanted.value


def _needed(wanted: Node) -> tuple[list[Node], dict[tuple[int, int], int]]:
    """The nodes to run, in the order of the forward; and how often each missing result is an argument."""
    found = {id(wanted): wanted}
    uses: dict[tuple[int, int], int] = {}
    stack = [wanted]
    while stack:
        for source in stack.pop().sources:
            node = source.node
            slot = node.known(source.number)
            if slot is None or slot.value is None:
                key = id(node), source.number
                uses[key] = uses.get(key, 0) + 1
                if id(node) not in found:
                    found[id(node)] = node
                    stack.append(node)
    return sorted(found.values(), key=lambda node: node.index), uses


class _Temporary:
    """Results that no slot holds; each stays until the last node that needs it has taken it."""

    def __init__(self, uses: dict[tuple[int, int], int]) -> None:
        self._uses = uses
        self.tensors: dict[tuple[int, int], Tensor] = {}
        self.gathered = Gathered()

    def is_needed(self, node: Node, number: int) -> bool:
        return self._uses.get((id(node), number), 0) > 0

    def take(self, source: Dropped) -> Tensor:
        slot = source.node.known(source.number)
        if slot is not None and slot.value is not None:
            return slot.value
        key = id(source.node), source.number
        self._uses[key] -= 1
        return self.tensors[key] if self._uses[key] else self.tensors.pop(key)


def _run(node: Node, numbers: Any, values: _Temporary) -> dict[int, Tensor]:
    """Run a node; returns the requested results and internal tensors by number."""
    inner = {number for number in numbers if number < 0}
    outer = {number for number in node.views if number >= 0 and (number in numbers or values.is_needed(node, number))}
    arguments = _Arguments(node, values)
    args = tuple([arguments.of(item) for item in node.arguments])
    kwargs = {key: arguments.of(item) for key, item in node.options.items()}
    del arguments
    internals = _Internals(inner, may_stop=not outer)
    # The gradient mode is the recorded one, because the kernel may depend on it. The hooks make autograd save nothing.
    with saved_tensors_hooks(internals.pack, _never):
        try:
            ambient = node.ambient
            with torch.set_grad_enabled(ambient.gradients) if ambient.is_here() else ambient.again():
                if node.writes:
                    args = (args[0].clone(), *args[1:])
                result = node.function(*args, **kwargs)
                got = {number: tensor.detach() for number, tensor in enumerate(tensors_in(result)) if number in outer}
        except _AllSaved:
            got = {}
    got |= internals.found
    for number, tensor in got.items():
        if (view := view_of(tensor)) != node.views[number]:
            raise RuntimeError(
                f"{node.name} produced a different layout when it was recomputed in the backward pass: {view} "
                f"instead of {node.views[number]}"
            )
    return got


class _Arguments:
    """Converts the argument records of a node to tensors. An argument that was given twice is one tensor again."""

    def __init__(self, node: Node, values: _Temporary) -> None:
        self._node = node
        self._values = values
        self._tensors: dict[int, Tensor] = {}

    def of(self, item: Any) -> Any:
        if not isinstance(item, _RECORDS):
            return mapped(item, self.of) if isinstance(item, CONTAINERS) else item
        if id(item) not in self._tensors:
            self._tensors[id(item)] = _tensor(item, self._node, self._values)
        return self._tensors[id(item)]


def _tensor(item: Dropped | Kept | Scratch, node: Node, values: _Temporary) -> Tensor:
    if isinstance(item, Dropped):
        tensor = values.take(item)
        if item.view is not None:
            tensor = tensor.as_strided(*item.view)
        return tensor.detach().requires_grad_(item.requires_grad)
    if isinstance(item, Scratch):
        return torch.zeros(item.shape, dtype=item.dtype, device=item.device)
    if item.unit is not None:
        values.gathered.gather(item.tensor, item.unit)
    if item.tensor._version != item.version:
        raise RuntimeError(
            f"a tensor of shape {list(item.tensor.shape)} from which {node.name} is recomputed in the backward pass "
            "has been modified by an inplace operation since the forward"
        )
    return item.tensor.detach().requires_grad_(item.requires_grad)


class _AllSaved(Exception):
    """The call has saved everything that was requested, so its kernel needn't run."""


class _Internals:
    """Keeps the requested ones of the tensors that a call saves for its backward pass, and drops the rest."""

    def __init__(self, wanted: set[int], *, may_stop: bool) -> None:
        self.found: dict[int, Tensor] = {}
        self._wanted = wanted
        self._may_stop = may_stop
        self._saved = 0

    def pack(self, tensor: Tensor) -> None:
        self._saved += 1
        if -self._saved in self._wanted:
            self.found[-self._saved] = tensor.detach()
            if self._may_stop and len(self.found) == len(self._wanted):
                raise _AllSaved


def _never(held: Any) -> Tensor:
    raise AssertionError("no gradient goes through a recomputed call")
