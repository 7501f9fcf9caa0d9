"""What a trace reads besides its inputs: the attributes and globals whose values went into a graph for good.

A graph that stands in for a forward is right as long as these are what they were. They are few, and compared at every
call.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes.graph.fingerprint import ABSENT, UNKNOWN, TooMuch, cannot_change, fingerprint, is_of
from passes.graph.hooks import has_global_hooks, has_hooks
from passes.graph.outside import content_of, is_dunder, named_outside
from passes.graph.side_effects import REGISTRIES, names_in

# What torch keeps in a module; a graph reads tensors and calls children by their names, at every call anew.
_BOOKKEEPING = frozenset(nn.Module().__dict__) - {"training", "_modules"} | {"forward"}


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
        known = value if cannot_change(value) else items if items is not value and cannot_change(items) else UNKNOWN
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
            return content_of(holder)
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

    def look(self) -> Callable[[], bool] | None:
        """A quick look, which tells that it is what it was, or can't tell; None where there is no such look.

        Most of what a forward reads is an attribute of a module, and still the object that it was.
        """
        name, value, home = self.name, self.value, self.holder
        if self.path or self.registry or value is UNKNOWN or not isinstance(home, nn.Module):
            return None
        if isinstance(home, torch.jit.ScriptModule):
            return None
        own = home.__dict__
        if name == "_modules":
            return lambda: tuple(own["_modules"]) == value
        return (lambda: own.get(name, ABSENT) is value) if own.get(name, ABSENT) is value else None

    @property
    def parts(self) -> int:
        """How many values are looked at to compare it: 0 where a quick look does."""
        return 0 if self.look() is not None else _count(self.print)

    def of_now(self) -> Baked | None:
        """What of it still holds after passes have written to the tree; None for what a graph reads anew at every call.

        Where a pass put another parameter, buffer or child, or none, the graph of now goes with what is there now.
        """
        home = self.home()
        registries = REGISTRIES if isinstance(home, nn.Module) else ()
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

    def look(self) -> Callable[[], bool] | None:
        """A quick look, as for other values."""
        name, value, home = self.name, self.value, self.holder
        if self.path or isinstance(home, torch.jit.ScriptModule):
            return None
        own = home.__dict__
        if name == "forward":
            return lambda: getattr(type(home), name, None) is value
        return lambda: name not in own and getattr(type(home), name, None) is value

    def of_now(self) -> Baked | None:
        """Itself."""
        return self


@dataclass(frozen=True)
class BakedCall(Baked):
    """A call of a child that was left out, as it gives what it is given: it is in eval, of its class, and nobody watches it."""

    @classmethod
    def of_child(cls, holder: nn.Module, path: tuple[str, ...]) -> BakedCall:
        """The child at the end of the path, as it is now."""
        *above, name = path
        found = cls(holder, name, None, None, "_modules", tuple(above))
        return dataclasses.replace(found, value=type(found.now()))

    @property
    def holds(self) -> bool:
        """Whether calling the child would still do nothing."""
        # Looked at at every call, for each child that was left out.
        home = self.holder
        for name in self.path:
            home = home._modules.get(name)
            if home is None:
                return False
        child = home._modules.get(self.name)
        if type(child) is not self.value:
            return False
        own = child.__dict__
        return not (own["training"] or "forward" in own or has_hooks(child) or has_global_hooks())

    def of_now(self) -> Baked | None:
        """Itself."""
        return self


def _registered(module: nn.Module, registry: str, name: str) -> Any:
    held = getattr(module, registry)
    if name not in held:
        return ABSENT
    # That of a script module has no `get`.
    return held[name]


def _count(print: Any) -> int:
    return 1 + sum(map(_count, print)) if type(print) is tuple else 0


def _items(value: Any) -> Any:
    if type(value) is dict:
        return (*value, *value.values())
    return tuple(value) if type(value) is list else value


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
        if is_of(value, types.MethodType) and name not in module.__dict__:
            self._look_at_method(module, name, value.__func__)
            return
        if is_dunder(name) or name in _BOOKKEEPING:
            return
        stands_for = getattr(type(module), name, None)
        if isinstance(stands_for, property):
            # It reads what it is made of.
            self.functions.setdefault(stands_for.fget, type(module))
        elif is_of(value, types.FunctionType) and name not in module.__dict__:
            self._look_at_method(module, name, value)
        else:
            self._found.setdefault((id(module), name), (module, value))

    def _look_at_method(self, module: nn.Module, name: str, function: Any) -> None:
        self.functions.setdefault(function, type(module))
        own = not (function.__module__ or "").startswith("torch.")
        if name == "forward" or (own and name not in _BOOKKEEPING and not is_dunder(name)):
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
        values = [value for _, value in self._found.values()]
        outside = [Baked.of(*place) for place in named_outside(self.functions, values)]
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
            if tests_classes or not is_of(value, nn.Module):
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


def portable(baked: Baked) -> Baked | None:
    """As it can be pickled: globals by the name of their module; None for what can't be."""
    if isinstance(baked, BakedMethod | BakedCall) and not _found_by_name(baked.value):
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
    found: Any = sys.modules.get(getattr(named, "__module__", ""))
    for name in getattr(named, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is named


def found_again(baked: Baked) -> Baked | None:
    """The reverse of `portable`; None where the module of the globals isn't there."""
    if not isinstance(baked.holder, str):
        return baked
    home = sys.modules.get(baked.holder)
    return None if home is None else baked.moved(vars(home))
