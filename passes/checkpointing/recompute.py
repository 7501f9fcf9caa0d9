"""Recompute dropped tensors in the backward pass, one call at a time, each from its recorded arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from passes.checkpointing.ambient import Ambient, Settings, settings_of
from passes.checkpointing.calls import UNWATCHED
from passes.checkpointing.sharding import Gathered
from passes.checkpointing.tensors import CONTAINERS, View, mapped, tensors_in, view_of
from passes.torch_private import pop_saved_tensors_hooks, push_saved_tensors_hooks


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
_CONVERTED = (*_RECORDS, *CONTAINERS)
_AS_IT_IS = nullcontext()


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
        found = {}
        for number, reference in self.slots.items():
            slot = reference()
            if slot is not None and slot.value is None:
                found[number] = slot
        return found


def fill(wanted: Slot) -> Tensor:
    """Compute the tensor of a slot.

    The slots in its own region and in the surrounding ones that it depends on are filled too. Values of other regions
    are temporary; they are computed again in their own turn.
    """
    if wanted.value is not None:
        return wanted.value
    node = wanted.node
    order, uses = _needed(node)
    values = _Temporary(uses)
    region = node.region
    before, UNWATCHED.on = UNWATCHED.on, True
    gradients = torch.is_grad_enabled()
    try:
        for node in order:
            slots = node.empty_slots() if node.region == region[: len(node.region)] else {}
            found = _run(node, slots, values)
            if values.gathered is not None:
                values.gathered.called()
            for number, tensor in found.items():
                if (slot := slots.get(number)) is not None:
                    slot.value = tensor
                elif (id(node), number) in uses:
                    values.tensors[id(node), number] = tensor
    finally:
        torch.set_grad_enabled(gradients)
        if values.gathered is not None:
            values.gathered.over()
        UNWATCHED.on = before
    assert wanted.value is not None
    return wanted.value


def _needed(wanted: Node) -> tuple[list[Node], dict[tuple[int, int], int]]:
    """The nodes to run, in the order of the forward; and how often each missing result is an argument."""
    uses: dict[tuple[int, int], int] = {}
    if not wanted.sources:
        return [wanted], uses
    found = {id(wanted): wanted}
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
    """The state of one `fill`: the results that no slot holds; each stays until the last node that needs it has taken it."""

    def __init__(self, uses: dict[tuple[int, int], int]) -> None:
        self._uses = uses
        self.tensors: dict[tuple[int, int], Tensor] = {}
        self.gathered: Gathered | None = None
        # The settings of now by types of devices; the nodes leave them as they are.
        self._settings: dict[tuple[str, ...], Settings] = {}

    def settings(self, kinds: tuple[str, ...]) -> Settings:
        if kinds not in self._settings:
            self._settings[kinds] = settings_of(kinds)
        return self._settings[kinds]

    def gather(self, tensor: Tensor, unit: nn.Module) -> None:
        if self.gathered is None:
            self.gathered = Gathered()
        self.gathered.gather(tensor, unit)

    def is_needed(self, node: Node, number: int) -> bool:
        return (id(node), number) in self._uses

    def take(self, source: Dropped) -> Tensor:
        slot = source.node.known(source.number)
        if slot is not None and slot.value is not None:
            return slot.value
        key = id(source.node), source.number
        self._uses[key] -= 1
        if self._uses[key]:
            return self.tensors[key]
        del self._uses[key]
        return self.tensors.pop(key)


def _run(node: Node, slots: dict[int, Slot], values: _Temporary) -> dict[int, Tensor]:
    """Run a node; returns the internal tensors and results that the slots or later nodes need, by number."""
    outer = [number for number in node.views if number >= 0 and (number in slots or values.is_needed(node, number))]
    inner = {number for number in slots if number < 0}
    tensors: dict[int, Tensor] = {}
    args = [_argument(tensors, node, values, item) if isinstance(item, _CONVERTED) else item for item in node.arguments]
    options = node.options
    kwargs = {key: _argument(tensors, node, values, item) for key, item in options.items()} if options else {}
    del tensors
    # Autograd saves nothing.
    internals = _Internals(inner, may_stop=not outer) if inner else None
    ambient = node.ambient
    now = values.settings(ambient.settings[0])
    # The gradient mode is the recorded one, because the kernel may depend on it. `fill` restores it.
    torch.set_grad_enabled(ambient.gradients)
    push_saved_tensors_hooks(_nothing if internals is None else internals.pack, _never)
    try:
        with _AS_IT_IS if ambient.is_here(now) else ambient.again(now):
            if node.writes:
                args[0] = args[0].clone()
            result = node.function(*args, **kwargs)
            if isinstance(result, Tensor):
                got = {0: result.detach()} if outer else {}
            else:
                got = {number: tensor.detach() for number, tensor in enumerate(tensors_in(result)) if number in outer}
    except _AllSaved:
        got = {}
    finally:
        pop_saved_tensors_hooks()
    if internals is not None:
        got |= internals.found
    for number, tensor in got.items():
        if (view := view_of(tensor)) != node.views[number]:
            raise RuntimeError(
                f"{node.name} produced a different layout when it was recomputed in the backward pass: {view} "
                f"instead of {node.views[number]}"
            )
    return got


def _argument(tensors: dict[int, Tensor], node: Node, values: _Temporary, item: Any) -> Any:
    """Convert an argument record of a node to a tensor. An argument that was given twice is one tensor again."""
    if not isinstance(item, _RECORDS):
        is_container = isinstance(item, CONTAINERS)
        return mapped(item, partial(_argument, tensors, node, values)) if is_container else item
    if id(item) not in tensors:
        tensors[id(item)] = _tensor(item, node, values)
    return tensors[id(item)]


def _tensor(item: Dropped | Kept | Scratch, node: Node, values: _Temporary) -> Tensor:
    if isinstance(item, Dropped):
        tensor = values.take(item)
        if item.view is not None:
            tensor = tensor.as_strided(*item.view)
        return tensor.detach().requires_grad_() if item.requires_grad else tensor
    if isinstance(item, Scratch):
        return torch.zeros(item.shape, dtype=item.dtype, device=item.device)
    tensor = item.tensor
    if item.unit is not None:
        values.gather(tensor, item.unit)
    if tensor._version != item.version:
        raise RuntimeError(
            f"a tensor of shape {list(tensor.shape)} from which {node.name} is recomputed in the backward pass "
            "has been modified by an inplace operation since the forward"
        )
    if tensor.requires_grad is item.requires_grad:
        return tensor
    return tensor.detach().requires_grad_(item.requires_grad)


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


def _nothing(tensor: Tensor) -> None:
    pass


def _never(held: Any) -> Tensor:
    raise AssertionError("no gradient goes through a recomputed call")
