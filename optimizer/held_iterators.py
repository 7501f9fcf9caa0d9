"""Iterators among the attributes of modules, kept from being moved on by a trace, which runs a forward by itself."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from optimizer.module_tree import REGISTRIES, is_script

# A class of the user's may do anything when an item is set.
_CONTAINERS = (dict, list, OrderedDict, defaultdict)
_DEPTH = 4


@contextmanager
def held_iterators(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, each iterator among the attributes, and in the dicts and lists among them, is a copy."""
    seen: dict[int, int] = {}
    places = [place for module in modules if not is_script(module) for place in _places(vars(module), seen, _DEPTH)]
    try:
        for home, key, iterator in places:
            home[key] = copy.deepcopy(iterator)
        yield
    finally:
        for home, key, iterator in places:
            # A list may have become shorter.
            if isinstance(home, dict) or key < len(home):
                home[key] = iterator


def _places(home: Any, seen: dict[int, int], depth: int) -> Iterator[tuple[Any, Any, Any]]:
    """The iterators in a container, each with the dict or list that it stands in and the key."""
    if seen.get(id(home), -1) >= depth:
        return
    is_new = id(home) not in seen
    seen[id(home)] = depth
    for key, item in enumerate(home) if type(home) is list else home.items():
        if key in REGISTRIES:
            continue
        if type(item) in _CONTAINERS and depth:
            yield from _places(item, seen, depth - 1)
        elif is_new and hasattr(type(item), "__next__") and not isinstance(item, nn.Module | torch.Tensor):
            yield home, key, item
