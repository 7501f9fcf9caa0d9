"""Find functions that a model keeps as attributes or hooks and that hold modules of the model itself.

`copy.deepcopy` doesn't copy functions, so in a copy of the model they still use the original's modules.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from optimizer.model.module_tree import REGISTRIES, is_script

_CONTAINERS = (dict, OrderedDict, list, tuple, set)
# Maximum depth of containers and functions to search.
_DEPTH = 4


def functions_over_modules(
    owners: Sequence[nn.Module], modules: Sequence[nn.Module]
) -> Iterator[tuple[nn.Module, str, list[nn.Module]]]:
    """Find the functions that hold modules.

    Yields:
        The module that keeps the function, a name for the place, and those of `modules` that the function holds.
    """
    tree = {id(module) for module in modules}
    for owner in owners:
        attributes = {} if is_script(owner) else vars(owner)
        for name, value in attributes.items():
            if name in REGISTRIES or (type(value) in _CONTAINERS and not value):
                continue
            held = [
                module
                for function in _functions_in(value, _DEPTH)
                for module in _modules_in(_held_by(function), _DEPTH, set())
                if id(module) in tree
            ]
            if held:
                yield owner, f"a hook ({name})" if "hook" in name else f"attribute {name!r}", held


def _functions_in(value: Any, depth: int) -> Iterator[types.FunctionType]:
    """The functions in a value, and in lists, bound methods and partials, which `copy.deepcopy` does copy."""
    kind = type(value)
    if kind is types.FunctionType:
        yield value
    elif depth and (kind in _CONTAINERS or kind in (types.MethodType, functools.partial)):
        for part in _parts_of(value):
            yield from _functions_in(part, depth - 1)


def _modules_in(values: Iterable[Any], depth: int, seen: set[int]) -> Iterator[nn.Module]:
    for value in values:
        if isinstance(value, nn.Module):
            yield value
        elif depth and id(value) not in seen:
            seen.add(id(value))
            kind = type(value)
            parts = _held_by(value) if kind is types.FunctionType else _parts_of(value)
            owner = (value.__self__,) if kind is types.MethodType else ()
            yield from _modules_in((*owner, *parts), depth - 1, seen)


def _held_by(function: types.FunctionType) -> list[Any]:
    """The closure variables of a function, its defaults and its attributes (`__wrapped__`)."""
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            continue
    return held


def _parts_of(value: Any) -> Iterable[Any]:
    kind = type(value)
    if kind in (dict, OrderedDict):
        return list(value.values())
    if kind is types.MethodType:
        return (value.__func__,)
    if kind is functools.partial:
        return (value.func, *value.args, *value.keywords.values())
    return list(value) if kind in _CONTAINERS else ()
