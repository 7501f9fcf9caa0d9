"""The modules that a model reaches: in its tree, in plain lists, dicts and attributes, and through functions."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

# The dicts in which `nn.Module` keeps its tensors and children.
REGISTRIES = ("_parameters", "_buffers", "_modules")
# Values of these types contain no module. Most attributes of a module have one of these types.
_WITHOUT_MODULES = (type(None), bool, int, float, complex, str, bytes, torch.Tensor)
_CONTAINERS = (dict, OrderedDict, list, tuple, set)
# Maximum depth of containers to search, starting at the attributes of a module.
_DEPTH = 3


def reachable_modules(model: nn.Module) -> list[nn.Module]:
    """All modules of the tree, then the modules in attributes and plain containers, with their trees."""
    return list(dict.fromkeys([*model.modules(), *(module for _, module in unregistered_modules(model))]))


def unregistered_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that no module registers as a child, each with its path.

    The path is the code that reaches the module: `layers[0].conv`. A module in several places is listed once per place.
    """
    registered = dict.fromkeys(model.modules())
    paths: dict[nn.Module, str] = {}
    found: list[tuple[str, nn.Module]] = []
    waiting = list(registered)
    visited = set[nn.Module]()
    held: dict[int, list[tuple[str, nn.Module]]] = {}
    while waiting:
        module = waiting.pop()
        if isinstance(module, torch.jit.ScriptModule) or module in visited:
            continue
        visited.add(module)
        for name, value in module.__dict__.items():
            if holds_no_module(value) or name in REGISTRIES:
                continue
            if (inside := held.get(id(value))) is None:
                inside = held[id(value)] = list(_modules_in(value, "", _DEPTH))
            if inside and not paths:
                # Most models have no such module, so the paths are computed only here.
                paths = {module: path for path, module in model.named_modules()}
            for place, top in inside:
                path = f"{paths[module]}.{name}{place}".lstrip(".")
                new = [item for item in top.named_modules(prefix=path) if item[1] not in registered]
                found += new
                waiting += (inner for _, inner in new)
                for inner_path, inner in new:
                    paths.setdefault(inner, inner_path)
    return found


def modules_of(target: Any) -> list[nn.Module]:
    """The modules of the tree; empty for a callable that isn't a module."""
    return list(target.modules()) if isinstance(target, nn.Module) else []


def is_script(module: nn.Module) -> bool:
    """Whether this is a TorchScript module, whose attributes aren't Python attributes."""
    return isinstance(module, torch.jit.ScriptModule)


def holds_no_module(value: Any) -> bool:
    """Whether a search for modules can skip a value, because of its type or because it is empty."""
    return type(value) in _WITHOUT_MODULES or (type(value) in _CONTAINERS and not value)


def _modules_in(value: Any, path: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, value
    elif depth and isinstance(value, dict | list | tuple | set):
        keys, items = (value, value.values()) if isinstance(value, dict) else (range(len(value)), value)
        for key, item in zip(keys, items, strict=False):
            if not holds_no_module(item):
                yield from _modules_in(item, f"{path}[{key!r}]", depth - 1)


# Maximum depth of containers and functions to search for modules that functions hold.
_DEPTH_OF_FUNCTIONS = 4


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
                for function in _functions_in(value, _DEPTH_OF_FUNCTIONS)
                for module in _modules_held_by(_contents_of(function), _DEPTH_OF_FUNCTIONS, set())
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


def _modules_held_by(values: Iterable[Any], depth: int, seen: set[int]) -> Iterator[nn.Module]:
    for value in values:
        if isinstance(value, nn.Module):
            yield value
        elif depth and id(value) not in seen:
            seen.add(id(value))
            kind = type(value)
            parts = _contents_of(value) if kind is types.FunctionType else _parts_of(value)
            owner = (value.__self__,) if kind is types.MethodType else ()
            yield from _modules_held_by((*owner, *parts), depth - 1, seen)


def _contents_of(function: types.FunctionType) -> list[Any]:
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
