"""What functions name outside of themselves: globals, variables around them, and what hangs on these."""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from passes.graph.fingerprint import ABSENT, IMMUTABLE, cannot_change, is_of, parts_of
from passes.graph.side_effects import globals_in, holds_no_module, names_in, package_of, plain_function

_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, types.MethodType, nn.Module, torch.Tensor)

_CONTAINERS = frozenset({list, tuple, dict, set, frozenset, OrderedDict, defaultdict, deque})
WEAK_DICTS = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
WEAK = frozenset({weakref.ref, weakref.WeakMethod, weakref.WeakSet, *WEAK_DICTS})
# What leads to other objects and isn't copied with them: `copy.deepcopy` gives it back as it is, or so that it still holds
# the originals.
KEPT = WEAK | {types.FunctionType, types.MethodType, functools.partial}


def named_outside(functions: Mapping[Any, Any], values: Iterable[Any]) -> Iterator[tuple[Any, str, Any]]:
    """The data that functions name outside of themselves, and that those name which they can get hold of.

    Args:
        functions: what was looked up on modules, each with the class of the module.
        values: the attributes that were read of modules.

    Yields:
        The dict of globals, class or cell that has it, under which name, and the value.
    """
    seen: set[tuple[int, str]] = set()
    for _, holder, name, value in _everything(functions, values):
        if is_data(value) and (id(holder), name) not in seen:
            seen.add((id(holder), name))
            yield holder, name, value


def named_everywhere(
    functions: Mapping[Any, Any], values: Iterable[Any]
) -> Iterator[tuple[types.FunctionType, str, Any]]:
    """Each function of those that `named_outside` looks at, with the name and the value of all that it names outside.

    A function that names nothing comes once, with "" and `ABSENT`.
    """
    for function, _, name, value in _everything(functions, values):
        yield function, name, value


def _everything(
    functions: Mapping[Any, Any], values: Iterable[Any]
) -> Iterator[tuple[types.FunctionType, Any, str, Any]]:
    known: set[types.FunctionType] = set()
    waiting: list[tuple[Any, Any]] = list(functions.items())
    everything = frozenset[str]().union(*(names_in(f.__code__) for f in map(_own_function, functions) if f))
    waiting += (found for value in values for found in _functions_in(value, everything))
    while waiting:
        function, owner = waiting.pop()
        function = _own_function(function)
        if function is None or function in known:
            continue
        known.add(function)
        names = names_in(function.__code__)
        yield function, None, "", ABSENT
        for holder, name, value in _outside(function, owner, names):
            yield function, holder, name, value
            # What another library's functions go by is its own affair.
            own = package_of(function)
            waiting += (found for found in _functions_in(value, names) if package_of(inspect.unwrap(found[0])) == own)
            if is_of(value, type):
                waiting += (found for found in _methods(value, names) if package_of(found[0]) == own)
        if owner is not None and not issubclass(owner, nn.Module):
            waiting += _methods(owner, names)


def _own_function(function: Any) -> types.FunctionType | None:
    """The Python function under its decorators; None for one of torch's own, and for what is none."""
    inner = inspect.unwrap(function)
    return inner if is_of(inner, types.FunctionType) and not (inner.__module__ or "").startswith("torch.") else None


def _functions_in(value: Any, names: frozenset[str], depth: int = 4) -> Iterator[tuple[types.FunctionType, Any]]:
    """The functions in a value and the methods of these names of its objects, each with the class that it is of."""
    if is_of(value, types.FunctionType):
        yield value, None
    elif is_of(value, types.MethodType):
        yield value.__func__, type(value.__self__)
    elif is_of(value, functools.partial):
        yield from _functions_in([value.func, *value.args, *value.keywords.values()], names, depth)
    elif depth and not is_of(value, (*_OPAQUE, *IMMUTABLE)) and (parts := parts_of(value)) is not None:
        yield from _methods(type(value), names | {"__call__"})
        for part in parts.values() if isinstance(parts, dict) else parts:
            yield from _functions_in(part, names, depth - 1)


def _methods(cls: Any, names: frozenset[str]) -> Iterator[tuple[types.FunctionType, Any]]:
    for name in names & (_class_names(cls) | {"__call__"}):
        function = plain_function(inspect.getattr_static(cls, name, None))
        if is_of(function, types.FunctionType):
            yield function, cls


def _outside(function: types.FunctionType, owner: Any, names: frozenset[str]) -> Iterator[tuple[Any, str, Any]]:
    """What a function may take of its globals, of the variables around it, and of modules and classes among these."""
    scope = function.__globals__
    found: list[tuple[Any, str, Any]] = [
        (scope, name, scope.get(name, ABSENT)) for name in globals_in(function.__code__)
    ]
    found += ((cell, "cell_contents", content_of(cell)) for cell in function.__closure__ or ())
    own = ((name, getattr(function, name)) for name in ("__defaults__", "__kwdefaults__", "__dict__"))
    found += ((function, name, value) for name, value in own if value and not _is_constant(value))
    # Of a module the attributes are seen to be read.
    if owner is not None and (not issubclass(owner, nn.Module) or not names.isdisjoint(("type", "__class__"))):
        found += _of_class(owner, names)
    seen: set[int] = set()
    while found:
        holder, name, value = found.pop()
        yield holder, name, value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_of(value, types.ModuleType) and value.__name__.partition(".")[0] not in ("torch", "math"):
            found += ((vars(value), inner, vars(value)[inner]) for inner in names if inner in vars(value))
        elif is_of(value, type):
            found += _of_class(value, names)


def _of_class(cls: Any, names: frozenset[str]) -> Iterator[tuple[Any, str, Any]]:
    for name in names & _class_names(cls):
        value = inspect.getattr_static(cls, name)
        if not hasattr(type(value), "__get__"):
            yield cls, name, value


def _class_names(cls: Any) -> frozenset[str]:
    """The names that a user's class has something under; none of an enum, whose members stay."""
    if issubclass(cls, enum.Enum):
        return frozenset()
    own = (vars(base) for base in cls.__mro__ if base.__module__.partition(".")[0] not in ("builtins", "torch"))
    return frozenset(name for name in itertools.chain(*own) if not is_dunder(name))


def is_dunder(name: str) -> bool:
    """Whether it is one of Python's own names, such as `__class__`."""
    return name.startswith("__") and name.endswith("__")


def content_of(cell: types.CellType) -> Any:
    """The value of a variable around a function; `ABSENT` for none."""
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return ABSENT


def _is_constant(held: Any) -> bool:
    """Whether nothing of what a function holds by itself can change."""
    return all(map(cannot_change, held.values() if is_of(held, dict) else held))


def is_data(value: Any) -> bool:
    """Whether a value is none of what is called, followed or read anew: it may be other data at another call."""
    if value is ABSENT or is_of(value, _OPAQUE):
        return False
    return not callable(value) or type(value).__module__.partition(".")[0] not in _LIBRARIES


# What can be called of these is a function, whatever its class.
_LIBRARIES = frozenset({"builtins", "functools", "numpy", "operator", "torch"})


def held_by(value: Any) -> Iterable[Any]:
    """What functions, methods, partials, cells, weak references and plain containers hold; nothing for other values.

    Of a function these are its cells, its defaults, its attributes, and what it names of the globals of its file.
    """
    kind = type(value)
    if kind is types.FunctionType:
        held = (value.__dict__, value.__kwdefaults__ or {}, named_globals(value))
        return (
            *(value.__closure__ or ()),
            *(value.__defaults__ or ()),
            *(item for each in held for item in each.values()),
        )
    if kind is types.CellType:
        return (content_of(value),)
    if kind is types.MethodType:
        return (value.__func__, value.__self__)
    if kind is functools.partial:
        return (value.func, *value.args, *value.keywords.values(), *value.__dict__.values())
    if kind is weakref.WeakMethod:
        method = value()
        return () if method is None else (method.__func__, method.__self__)
    if kind is weakref.ref:
        return (value(),)
    if kind in WEAK_DICTS or kind in (dict, OrderedDict, defaultdict):
        return (*value.keys(), *value.values())
    return tuple(value) if kind in _CONTAINERS or kind is weakref.WeakSet else ()


def named_globals(function: types.FunctionType) -> dict[str, Any]:
    """The modules, tensors, functions and plain containers that a function names as globals.

    Of functions these are those of its own file, and those that were made with something: decorated ones, say. What
    torch's own functions name is none of a user's.
    """
    home = function.__globals__
    if str(home.get("__name__")).partition(".")[0] == "torch":
        return {}
    found = {name: home[name] for name in globals_in(function.__code__) if name in home}
    return {name: value for name, value in found.items() if _may_lead_on(value, home)}


def _may_lead_on(value: Any, home: dict[str, Any]) -> bool:
    kind = type(value)
    if kind is types.FunctionType:
        held = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        is_made = value.__closure__ or value.__dict__ or not all(map(holds_no_module, held))
        return value.__globals__ is home or bool(is_made)
    return issubclass(kind, nn.Module | torch.Tensor) or kind in _CONTAINERS or kind in KEPT
