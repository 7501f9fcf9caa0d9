"""Which tensors of a tree of modules lie in each other's memory without being one: ties by `.data`, views, flat buffers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from passes.program.containers import REGISTRIES, held_by
from passes.program.storage import Extent, extents_of, kind_of, storages_of
from passes.program.weights import PLAIN_TENSORS


class Place(NamedTuple):
    """Where a module holds a tensor: by registering it, as an attribute, or in a container, partial or function among them.

    Attributes:
        stands_apart: whether who reads it here is seen to read no registered tensor, though it may be the same object.
    """

    path: str
    tensor: torch.Tensor
    stands_apart: bool = False


class SharedMemory:
    """For each of some tensors, another one that lies in the same bytes."""

    def __init__(
        self, places: Iterable[Place], *, counts: Callable[[torch.Tensor], bool] = lambda tensor: True
    ) -> None:
        """Compare the places, which may name a tensor more than once; those that `counts` leaves out are never told of."""
        # They are held, else the id of one could name another tensor later.
        self._places = tuple(places)
        self._groups: dict[int, list[Place]] = {}
        by_storage: dict[int, list[Place]] = defaultdict(list)
        for place in self._places:
            for storage in storages_of(place.tensor):
                by_storage[storage].append(place)
        for storage, places in by_storage.items():
            # Most storages have one tensor.
            if len(places) > 1:
                extents = ((extent, place) for place in places for extent in extents_of(place.tensor))
                self._group([found for found in extents if found[0].storage == storage], counts)

    def _group(self, found: list[tuple[Extent, Place]], counts: Callable[[torch.Tensor], bool]) -> None:
        end, group = 0, list[Place]()
        # The widest first of those that start together: it is the one to name.
        for extent, place in sorted(found, key=lambda item: (item[0].start, -item[0].end)):
            if extent.start >= end:
                group = []
            end = max(end, extent.end)
            self._groups[id(place.tensor)] = group
            if counts(place.tensor):
                group.append(place)

    def beside(self, tensor: torch.Tensor) -> Place | None:
        """Another tensor in the bytes of this one, or in those of one that is; None where it is alone there.

        One that is an attribute besides, or a scripted module's, is beside itself.
        """
        group = self._groups.get(id(tensor), ())
        return next((place for place in group if place.tensor is not tensor or place.stands_apart), None)


def groups_of(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors, each once, in groups that share no bytes with each other; most are alone."""
    distinct = {id(tensor): tensor for tensor in tensors}
    shared = SharedMemory(Place("", tensor) for tensor in distinct.values())
    found: dict[int, list[torch.Tensor]] = defaultdict(list)
    for key, tensor in distinct.items():
        found[id(shared._groups.get(key, tensor))].append(tensor)
    return list(found.values())


def copied_together(group: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Copies of tensors that share what they shared: what is written to one shows in the others.

    Those of other classes than torch's own, and those that don't lie in strides, are copied each for itself.

    Args:
        group: as `groups_of` gives it.
        dtype: that of the copies; the tensors of the group have one dtype then. None keeps each one's own.
    """
    if len(group) == 1 or not all(map(_can_be_laid_anew, group)):
        own = [tensor.detach().clone() for tensor in group]
        return own if dtype is None else [tensor.to(dtype) for tensor in own]
    extents = [extent for tensor in group for extent in extents_of(tensor)]
    # Numbers of every dtype may start there.
    first = min(extent.start for extent in extents) // 16 * 16
    one = group[0].dtype if all(tensor.dtype is group[0].dtype for tensor in group) else torch.uint8
    size = max(extent.end for extent in extents) - first
    old = group[0].untyped_storage()
    bytes_or_numbers = _over(old, one, group[0], first // one.itemsize, (size // one.itemsize,), (1,))
    memory = bytes_or_numbers.to(dtype or one, copy=True).untyped_storage()
    return [
        _over(memory, dtype or tensor.dtype, tensor, (extent.start - first) // tensor.element_size(), tensor.shape,
              tensor.stride())
        for tensor, extent in zip(group, extents, strict=True)
    ]  # fmt: skip


def _can_be_laid_anew(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in PLAIN_TENSORS and kind_of(tensor) is None
    return is_plain and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    like: torch.Tensor,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """A tensor over a storage: no view of another, so that a forward may write to it as to any."""
    return torch.empty(0, dtype=dtype, device=like.device).set_(storage, offset, tuple(shape), tuple(strides))


def places_in(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Place]:
    """The tensors that modules, each with its path, hold: registered, as attributes, and in what is in `Place`.

    Modules may share a container, a vocabulary, say: it is looked through once.
    """
    # By identity: from how many levels above the last one it was looked into.
    seen: dict[int, int] = {}
    for path, module in modules:
        prefix = f"{path}." if path else ""
        if isinstance(module, torch.jit.ScriptModule):
            # It has no more than these, and may give them out anew at each look, over the same memory.
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            yield from (Place(prefix + name, tensor, stands_apart=True) for name, tensor in own)
            continue
        for home in (module._parameters, module._buffers):
            yield from (Place(prefix + name, tensor) for name, tensor in home.items() if tensor is not None)
        for name, value in module.__dict__.items():
            if name not in REGISTRIES:
                yield from _inside(prefix + name, value, seen, depth=3)


def _inside(path: str, value: object, seen: dict[int, int], depth: int) -> Iterator[Place]:
    """The tensors in a container; in functions and the like, what these hold."""
    if isinstance(value, torch.Tensor):
        yield Place(path, value, stands_apart=True)
        return
    items = _items_in(path, value)
    if items and depth > seen.get(id(value), 0):
        seen[id(value)] = depth
        for name, item in items:
            yield from _inside(name, item, seen, depth - 1)


def _items_in(path: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f"{path}[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    return [(path, item) for item in held_by(value)]
