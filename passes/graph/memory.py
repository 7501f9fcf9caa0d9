"""Which tensors of a tree of modules lie in each other's memory without being one: ties by `.data`, views, flat buffers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from passes.graph.side_effects import REGISTRIES
from passes.graph.storage import Extent, extents_of


class Place(NamedTuple):
    """Where a module holds a tensor: by registering it, as an attribute, or in a plain container among them.

    Attributes:
        stands_apart: whether who reads it here is seen to read no registered tensor, though it may be the same object:
            so it is with attributes and with what TorchScript holds. What is read from a container is known by identity.
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
        by_storage: dict[int, list[tuple[Extent, Place]]] = defaultdict(list)
        for place in self._places:
            for extent in extents_of(place.tensor):
                by_storage[extent.storage].append((extent, place))
        for found in by_storage.values():
            # Most storages have one tensor.
            if len(found) > 1:
                self._group(found, counts)

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


def places_in(path: str, module: nn.Module) -> Iterator[Place]:
    """The tensors that a module itself holds, those in plain containers among its attributes too."""
    prefix = f"{path}." if path else ""
    if isinstance(module, torch.jit.ScriptModule):
        # It has no more than these, and may give them out anew at each look, over the same memory.
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield Place(prefix + name, tensor, stands_apart=True)
        return
    for home in (module._parameters, module._buffers):
        yield from (Place(prefix + name, tensor) for name, tensor in home.items() if tensor is not None)
    for name, value in module.__dict__.items():
        if isinstance(value, torch.Tensor):
            yield Place(prefix + name, value, stands_apart=True)
        elif name not in REGISTRIES:
            yield from _places_at(prefix + name, value, depth=2)


def _places_at(path: str, value: object, depth: int) -> Iterator[Place]:
    if isinstance(value, torch.Tensor):
        yield Place(path, value)
    elif depth and isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places_at(f"{path}[{key!r}]", item, depth - 1)
