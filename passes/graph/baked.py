"""What a trace reads besides its inputs: the attributes and globals whose values went into a graph for good.

A graph that stands in for a forward is right as long as these are what they were. They are few, and compared at every
call.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import itertools
import math
import numbers
import operator
import pathlib
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from passes.graph.side_effects import contents_of, globals_in, names_in, package_of, plain_function, slots_of
from passes.graph.structure import CONSTANTS


class _Word:
    """Stands where there is no value; copies and pickles of it are the one object of this module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> str:
        return self.name


ABSENT = _Word("ABSENT")
UNKNOWN = _Word("UNKNOWN")

_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, types.MethodType, nn.Module, torch.Tensor)
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType)
_IMMUTABLE = (*CONSTANTS, *_FUNCTIONS, enum.Enum, range, torch.memory_format)
# The order matters: the methods of `dict` don't know the order of an `OrderedDict`.
_CONTAINERS = (OrderedDict, dict, types.MappingProxyType, list, tuple, set, frozenset, deque)
# What torch keeps in a module; a graph reads tensors and calls children by their names, at every call anew.
_BOOKKEEPING = frozenset(nn.Module().__dict__) - {"training", "_modules"} | {"forward"}
# Values that can't change, and that their text tells from others of their type.
_WRITTEN = (numbers.Number, numpy.generic, pathlib.PurePath)
# How deep in containers and plain objects values are compared, and how many of them, at most.
_DEPTH = 32
_MOST = 4096


class TooMuch(Exception):
    """A value of more parts, or deeper ones, than are compared."""


@dataclass(frozen=True)
class Baked:
    """One value that went into a graph.

    Attributes:
        holder: the module whose graph it is, the class or dict of globals that has it, or the cell of a closure; for a
            module that the graph's own can't reach by its children, that module.
        name: under which name.
        value: the value; of a container, a tuple of its items, of a dict a tuple of keys and values; compared first, by
            identity, unless something in it can change in place.
        print: what it was, all through, as `fingerprint` gives it.
        registry: for the place of a parameter, buffer or child, the attribute of the module that has it; else "".
        path: the children that lead from the holder to the module that has it as an attribute.
    """

    holder: Any
    name: str
    value: Any
    print: Any
    registry: str = ""
    path: tuple[str, ...] = ()

    @classmethod
    def of(cls, holder: Any, name: str, value: Any, registry: str = "", path: tuple[str, ...] = ()) -> Baked:
        """The value as it is now."""
        items = _items(value)
        known = value if _cannot_change(value) else items if items is not value and _cannot_change(items) else UNKNOWN
        return cls(holder, name, known, fingerprint(value), registry, path)

    def home(self) -> Any:
        """What has it now; `ABSENT` where the path leads nowhere."""
        home = self.holder
        for name in self.path:
            home = _registered(home, "_modules", name)
            if home is None or home is ABSENT:
                return ABSENT
        return home

    def now(self) -> Any:
        """The value as it is now; `ABSENT` for none."""
        # Runs at every call of the graph, and most paths are empty.
        holder, name = self.home() if self.path else self.holder, self.name
        if type(holder) is types.CellType:
            return _content(holder)
        if holder is ABSENT:
            return ABSENT
        if self.registry:
            return _registered(holder, self.registry, name)
        if isinstance(holder, dict):
            return holder.get(name, ABSENT)
        if isinstance(holder, nn.Module):
            if name == "_modules":
                return tuple(holder._modules.keys())
            if name in holder.__dict__:
                return holder.__dict__[name]
        return getattr(holder, name, ABSENT)

    @property
    def holds(self) -> bool:
        """Whether it is what it was."""
        now = self.now()
        if now is self.value:
            return True
        if self.value is not UNKNOWN and type(now) in (list, dict, tuple) and type(now) is self.print[0]:
            items = _items(now)
            if len(items) == len(self.value) and all(map(operator.is_, items, self.value)):
                return True
        try:
            return bool(fingerprint(now) == self.print)
        except TooMuch:
            return False

    def of_now(self) -> Baked | None:
        """What of it still holds after passes have written to the tree; None for what a graph reads anew at every call.

        Where a pass put another parameter, buffer or child, or none, the graph of now goes with what is there now.
        """
        home = self.home()
        registries = ("_parameters", "_buffers", "_modules") if isinstance(home, nn.Module) else ()
        registry = next((each for each in registries if self.name in getattr(home, each)), "")
        if not registry:
            return self
        now = getattr(home, registry)[self.name]
        return None if isinstance(now, torch.Tensor) else Baked.of(self.holder, self.name, now, registry, self.path)

    def moved(self, holder: Any) -> Baked:
        """The same value of another holder."""
        return dataclasses.replace(self, holder=holder)


@dataclass(frozen=True)
class BakedShape(Baked):
    """The shape of a tensor that a module has: numbers made of it went into a graph, which reads the values anew."""

    @classmethod
    def of_tensor(cls, holder: nn.Module, name: str, path: tuple[str, ...] = ()) -> BakedShape:
        """The shape as it is now."""
        found = cls(holder, name, None, None, path=path)
        shape = found.now()
        return dataclasses.replace(found, value=shape, print=shape)

    def now(self) -> Any:
        """The shape as it is now; `ABSENT` where there is no tensor."""
        tensor = getattr(self.home(), self.name, None)
        return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else ABSENT

    @property
    def holds(self) -> bool:
        """Whether it is what it was."""
        return bool(self.now() == self.value)

    def of_now(self) -> Baked | None:
        """Itself, unless a pass put a tensor of another shape there, or none, and saw to what follows."""
        return self if self.holds else None


@dataclass(frozen=True)
class BakedMethod(Baked):
    """A method that the forward called, by its function: none of another name was put in its place."""

    @classmethod
    def of_method(cls, holder: nn.Module, name: str, path: tuple[str, ...] = ()) -> BakedMethod:
        """The method as it is now."""
        found = cls(holder, name, None, None, path=path)
        return dataclasses.replace(found, value=found.now())

    def now(self) -> Any:
        """The function of the method as it is now; what hides it where something does; `ABSENT` for none."""
        home, name = self.home() if self.path else self.holder, self.name
        if home is ABSENT:
            return ABSENT
        # What stands in the place of a forward answers as the forward does.
        if name in home.__dict__ and name != "forward":
            return home.__dict__[name]
        found = getattr(type(home), name, ABSENT)
        return getattr(found, "__func__", found)

    @property
    def holds(self) -> bool:
        """Whether it is what it was."""
        return self.now() is self.value

    def of_now(self) -> Baked | None:
        """Itself."""
        return self


def _registered(module: nn.Module, registry: str, name: str) -> Any:
    held = getattr(module, registry)
    if name not in held:
        return ABSENT
    # That of a script module has no `get`.
    return held[name]


def _items(value: Any) -> Any:
    if type(value) is dict:
        return (*value, *value.values())
    return tuple(value) if type(value) is list else value


def _is(value: Any, kinds: Any) -> bool:
    """`isinstance` by what the object is: its class may answer anything when it is asked, or raise."""
    return issubclass(type(value), kinds)


def _cannot_change(value: Any) -> bool:
    return _is(value, _IMMUTABLE) or (type(value) is tuple and all(map(_cannot_change, value)))


def fingerprint(value: Any) -> Any:
    """What tells the value from others: equal for equal values of the same types, whatever objects they are.

    A tensor is the same as any other and a module as any of its class, since a graph reads the ones and calls the others
    anew at every call.

    Raises:
        TooMuch: it holds so much that comparing it at every call would be work.
    """
    return _print(value, (), itertools.count())


def _print(value: Any, around: tuple[int, ...], count: Iterator[int]) -> Any:
    """The fingerprint of a value that stands in others, the outermost first, by identity."""
    if next(count) > _MOST:
        raise TooMuch
    kind = type(value)
    if issubclass(kind, float):
        # Neither of NaN and -0.0 does `==` tell what it is.
        return kind, math.copysign(1.0, value), value if value == value else None
    if issubclass(kind, complex):
        return kind, _print(value.real, around, count), _print(value.imag, around, count)
    if issubclass(kind, _FUNCTIONS):
        # Not their kind, which pickle doesn't find by its name.
        return None, value
    if issubclass(kind, _IMMUTABLE):
        return kind, value
    if issubclass(kind, nn.Module):
        return nn.Module, kind
    if issubclass(kind, torch.Tensor):
        return torch.Tensor, None
    if issubclass(kind, functools.partial):
        return kind, _joined([value.func, value.args, value.keywords], (*around, id(value)), count)
    if issubclass(kind, types.MethodType):
        return None, value.__func__, _joined([value.__self__], (*around, id(value)), count)
    if issubclass(kind, _WRITTEN):
        return kind, repr(value)
    if id(value) in around:
        return kind, len(around) - around.index(id(value))
    if len(around) == _DEPTH:
        raise TooMuch
    if (parts := _parts(value)) is not None:
        return kind, _joined(parts, (*around, id(value)), count)
    return (value if value is ABSENT else kind), None


def _joined(parts: Any, around: tuple[int, ...], count: Iterator[int]) -> Any:
    if isinstance(parts, dict):
        return tuple((_print(key, around, count), _print(item, around, count)) for key, item in parts.items())
    return parts if isinstance(parts, frozenset) else tuple([_print(item, around, count) for item in parts])


def _parts(value: Any) -> Any:
    """What stands in a container or in a plain object, by the containers' own methods; None for anything else."""
    if _is(value, numpy.ndarray):
        return _parts_of_array(value)
    base: Any = next((base for base in _CONTAINERS if _is(value, base)), None)
    if base is None:
        attributes, slots = contents_of(value), slots_of(value)
        return {**(attributes or {}), **slots} if slots else attributes
    if base is types.MappingProxyType or issubclass(base, dict):
        return dict(base.items(value))
    items = base.__iter__(value)
    return frozenset(items) if base in (set, frozenset) else list(items)


def _parts_of_array(array: Any) -> list[Any]:
    if array.size > _MOST:
        raise TooMuch
    return [str(array.dtype), array.shape, numpy.ndarray.tolist(array)]


class Reads:
    """Collects, while one forward is traced, what it reads.

    Attributes:
        root: the module whose forward it is.
        functions: the Python functions that were looked up on modules, by which globals are found, each with the class of
            the module.
    """

    def __init__(self, root: nn.Module, function: Callable[..., Any] | None) -> None:
        self.root = root
        self.functions: dict[Any, type] = {} if function is None else {function: type(root)}
        self._found: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        self._shapes: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        self._methods: dict[tuple[int, str], tuple[nn.Module, str]] = {}

    def look(self, module: nn.Module, name: str, value: Any) -> None:
        """The attribute of a module was read; `ABSENT` where it has none."""
        if _is(value, types.MethodType) and name not in module.__dict__:
            self._look_at_method(module, name, value.__func__)
            return
        if _is_dunder(name) or name in _BOOKKEEPING:
            return
        stands_for = getattr(type(module), name, None)
        if isinstance(stands_for, property):
            # It reads what it is made of.
            self.functions.setdefault(stands_for.fget, type(module))
        elif _is(value, types.FunctionType) and name not in module.__dict__:
            self._look_at_method(module, name, value)
        else:
            self._found.setdefault((id(module), name), (module, value))

    def _look_at_method(self, module: nn.Module, name: str, function: Any) -> None:
        self.functions.setdefault(function, type(module))
        own = not (function.__module__ or "").startswith("torch.")
        if name == "forward" or (own and name not in _BOOKKEEPING and not _is_dunder(name)):
            self._methods.setdefault((id(module), name), (module, name))

    def look_at_shape(self, module: nn.Module, name: str) -> None:
        """The shape of a tensor of the module was asked for."""
        self._shapes.setdefault((id(module), name), (module, name))

    def baked(self, path_of: Callable[[nn.Module], str | None]) -> tuple[Baked, ...]:
        """All of it, with the values of now.

        Args:
            path_of: by which children the root reaches a module, dotted; None where it doesn't.

        Raises:
            TooMuch: one of them holds too much to be compared.
        """
        outside = tuple(_named_outside(self.functions, [value for _, value in self._found.values()]))
        tests_classes = any(_tests_classes(function) for function in self.functions)

        def place(module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
            # A child may be replaced: what counts is what the one has that stands in its place then.
            path = path_of(module)
            return (module, ()) if path is None else (self.root, tuple(filter(None, path.split("."))))

        def places(found: Mapping[Any, tuple[nn.Module, str]]) -> Iterator[tuple[nn.Module, str, tuple[str, ...]]]:
            for module, name in found.values():
                holder, path = place(module)
                yield holder, name, path

        attributes = []
        for (_, name), (module, value) in self._found.items():
            if tests_classes or not _is(value, nn.Module):
                # The class may have a way of its own to answer for what it hasn't.
                value = getattr(module, name, ABSENT) if value is ABSENT else value
                holder, path = place(module)
                attributes.append(
                    Baked.of(holder, name, tuple(value.keys()) if name == "_modules" else value, path=path)
                )
        shapes = [BakedShape.of_tensor(holder, name, path) for holder, name, path in places(self._shapes)]
        methods = [BakedMethod.of_method(holder, name, path) for holder, name, path in places(self._methods)]
        return (*attributes, *shapes, *methods, *outside)


def _tests_classes(function: Any) -> bool:
    if (function.__module__ or "").startswith("torch."):
        return False
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and not names_in(code).isdisjoint(("isinstance", "type", "__class__", "issubclass"))


def _named_outside(functions: Mapping[Any, Any], values: Iterable[Any]) -> Iterator[Baked]:
    """The data that functions name outside of themselves, and that those name which they can get hold of.

    Args:
        functions: what was looked up on modules, each with the class of the module.
        values: the attributes that were read of modules.
    """
    seen: set[tuple[int, str]] = set()
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
        for holder, name, value in _outside(function, owner, names):
            if _is_data(value) and (id(holder), name) not in seen:
                seen.add((id(holder), name))
                yield Baked.of(holder, name, value)
            # What another library's functions go by is its own affair.
            own = package_of(function)
            waiting += (found for found in _functions_in(value, names) if package_of(inspect.unwrap(found[0])) == own)
        if owner is not None and not issubclass(owner, nn.Module):
            waiting += _methods(owner, names)


def _own_function(function: Any) -> types.FunctionType | None:
    """The Python function under its decorators; None for one of torch's own, and for what is none."""
    inner = inspect.unwrap(function)
    return inner if _is(inner, types.FunctionType) and not (inner.__module__ or "").startswith("torch.") else None


def _functions_in(value: Any, names: frozenset[str], depth: int = 4) -> Iterator[tuple[types.FunctionType, Any]]:
    """The functions in a value and the methods of these names of its objects, each with the class that it is of."""
    if _is(value, types.FunctionType):
        yield value, None
    elif _is(value, types.MethodType):
        yield value.__func__, type(value.__self__)
    elif _is(value, functools.partial):
        yield from _functions_in([value.func, *value.args, *value.keywords.values()], names, depth)
    elif depth and not _is(value, (*_OPAQUE, *_IMMUTABLE)) and (parts := _parts(value)) is not None:
        yield from _methods(type(value), names)
        for part in parts.values() if isinstance(parts, dict) else parts:
            yield from _functions_in(part, names, depth - 1)


def _methods(cls: Any, names: frozenset[str]) -> Iterator[tuple[types.FunctionType, Any]]:
    for name in names & _class_names(cls):
        function = plain_function(inspect.getattr_static(cls, name))
        if _is(function, types.FunctionType):
            yield function, cls


def _outside(function: types.FunctionType, owner: Any, names: frozenset[str]) -> Iterator[tuple[Any, str, Any]]:
    """What a function may take of its globals, of the variables around it, and of modules and classes among these."""
    scope = function.__globals__
    found: list[tuple[Any, str, Any]] = [(scope, n, scope.get(n, ABSENT)) for n in globals_in(function.__code__)]
    found += ((cell, "cell_contents", _content(cell)) for cell in function.__closure__ or ())
    if owner is not None and not names.isdisjoint(("type", "__class__")):
        found += _of_class(owner, names)
    seen: set[int] = set()
    while found:
        holder, name, value = found.pop()
        yield holder, name, value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is(value, types.ModuleType) and value.__name__.partition(".")[0] not in ("torch", "math"):
            found += ((vars(value), inner, vars(value)[inner]) for inner in names if inner in vars(value))
        elif _is(value, type):
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
    return frozenset(name for name in itertools.chain(*own) if not _is_dunder(name))


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return ABSENT


def _is_data(value: Any) -> bool:
    return value is not ABSENT and not _is(value, _OPAQUE) and not callable(value)


def portable(baked: Baked) -> Baked | None:
    """As it can be pickled: globals by the name of their module; None for what can't be."""
    if isinstance(baked, BakedMethod) and not _found_by_name(baked.value):
        return None
    if isinstance(baked.holder, nn.Module):
        return baked
    if isinstance(baked.holder, type):
        return baked if _found_by_name(baked.holder) else None
    if isinstance(baked.holder, dict):
        name = baked.holder.get("__name__")
        return baked.moved(name) if getattr(sys.modules.get(str(name)), "__dict__", None) is baked.holder else None
    return None


def _found_by_name(named: Any) -> bool:
    """Whether pickle finds a class or function where its name says."""
    found: Any = sys.modules.get(named.__module__)
    for name in named.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is named


def found_again(baked: Baked) -> Baked | None:
    """The reverse of `portable`; None where the module of the globals isn't there."""
    if not isinstance(baked.holder, str):
        return baked
    home = sys.modules.get(baked.holder)
    return None if home is None else baked.moved(vars(home))
