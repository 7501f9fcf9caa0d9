"""Find all references that can be reached from a module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from passes.graph.containers import REGISTRIES, contents_of

# The search stops after this number of objects.
_MOST = 1 << 20


class Holding(NamedTuple):
    """A reference: an entry of a dict, or all items of another container.

    Attributes:
        owner: the module or object whose `__dict__` holds the entry, or the container itself.
        home: the dict or container.
        key: the key in the dict; None for another container.
        values: the referenced values; exactly one for a dict entry.
    """

    owner: Any
    home: Any
    key: Any
    values: tuple[Any, ...]

    @property
    def is_row(self) -> bool:
        """Whether it is a container without keys."""
        return not isinstance(self.home, dict)


def holdings_from(root: nn.Module, *, without: Sequence[str] = ()) -> Iterator[Holding]:
    """All references reachable from a module through attributes, except those named in `without`, and containers."""
    # The referenced values stay alive during the search, so ids stay unique.
    waiting: list[Any] = [root]
    seen = {id(root)}
    for owner in waiting:
        if len(waiting) > _MOST:
            return
        for place in _holdings_in(owner, without):
            yield place
            for value in place.values:
                if id(value) not in seen and not isinstance(value, torch.Tensor) and not _is_graph(value):
                    seen.add(id(value))
                    waiting.append(value)


def _is_graph(value: Any) -> bool:
    """Whether the value is a torch.fx object, whose contents don't belong to the module."""
    return type(value).__module__.startswith("torch.fx.")


def _holdings_in(owner: Any, without: Sequence[str]) -> Iterator[Holding]:
    if isinstance(owner, nn.Module):
        own = vars(owner)
        attributes = (Holding(owner, own, key, (own[key],)) for key in own if key not in (*REGISTRIES, *without))
        yield from attributes
        yield from (Holding(owner, own[name], *item) for name in REGISTRIES for item in _items(own[name]))
        return
    inside = owner if isinstance(owner, tuple) else contents_of(owner)
    if isinstance(inside, dict):
        yield from (Holding(owner, inside, *item) for item in _items(inside))
    elif inside is not None:
        yield Holding(owner, inside, None, tuple(inside))


def _items(home: dict[Any, Any]) -> Iterator[tuple[Any, tuple[Any]]]:
    return ((key, (value,)) for key, value in dict.items(home))
