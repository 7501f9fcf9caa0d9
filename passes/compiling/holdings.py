"""The places in which something stands that is reached from a module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from passes.program.containers import REGISTRIES, contents_of

# More than that of objects aren't looked through for one tensor.
_MOST = 1 << 20


class Holding(NamedTuple):
    """Where something stands: in a dict under a key, or in another container, all of whose items are meant.

    Attributes:
        owner: what is reached on the way to it: a module or an object, whose dict it is, or the container itself.
        home: the dict or the container.
        key: that of the dict; None for another container.
        values: what stands there; one in a dict.
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
    """All places that are reached from a module by attributes, but for those of these names, and through containers."""
    # What stands in a place lives as long as this runs: nothing else gets its identity.
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
    """Whether it is of torch.fx: what a graph leads to is none of a module's."""
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
