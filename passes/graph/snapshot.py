"""What forwards may change while they run, kept so that it can be put back: attributes, containers, arrays, generators."""

from __future__ import annotations

import array
import functools
import mmap
import operator
import random
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy
import torch
from torch import fx, nn

from passes.graph.side_effects import (
    PLAIN,
    REGISTRIES,
    STOCK,
    contents_of,
    items_of,
    named_values,
    refill,
    refill_slots,
    slots_of,
    values_in,
)

# How many levels of containers and objects are looked into, from the attributes of a module on.
_DEPTH = 4
# Values of these types have nothing that could change.
_BARE = PLAIN - {tuple, torch.Tensor}
# Objects of these types reach far, and no forward keeps its state in one.
_LEFT_OUT = (fx.Graph, fx.Node, torch.optim.Optimizer)


class _Numbers(NamedTuple):
    """What a value keeps inside itself, where no container shows it.

    Attributes:
        read: gives a copy of it; None for a value that nobody can write to.
        has_changed: whether the value is another than such a copy.
        put_back: writes a copy into the value.
    """

    read: Callable[[Any], Any]
    has_changed: Callable[[Any, Any], bool]
    put_back: Callable[[Any, Any], object]


class Snapshot:
    """What forwards can reach by a name, each with what stands in it.

    These are the attributes of the modules and what is in them, four levels deep: containers, plain objects (slots too),
    arrays and random generators. So are the containers and objects that the code of the functions names as globals or
    closes over, one level deep. What is nearest comes first, so each is looked into once, however many modules share it.

    Attributes:
        own: the tensors, by identity, that modules register or have as attributes, parameters aside. Their values and those
            of `nested` aren't kept here.
        nested: the tensors, by identity, in containers and objects among the attributes.
    """

    def __init__(self, *modules: nn.Module, functions: Iterable[types.FunctionType] = ()) -> None:
        self.own: dict[int, torch.Tensor] = {}
        self.nested: dict[int, torch.Tensor] = {}
        self._kept: list[tuple[Any, list[Any]]] = []
        self._empty: list[Any] = []
        self._slotted: list[tuple[Any, dict[str, Any]]] = []
        self._numbers: list[tuple[Any, _Numbers, Any]] = []
        self._seen = set[int]()
        level = [value for module in modules for value in self._attributes(module)]
        for depth in range(_DEPTH):
            if depth == _DEPTH - 1:
                level += (value for function in functions for value in named_values(function))
            level = [item for value in level for item in self._look_into(value)]
        self.nested |= {id(value): value for value in level if _is_state(value)}

    def _attributes(self, module: nn.Module) -> Iterable[Any]:
        """Keep the attributes of a module; gives those to look into."""
        attributes = module.__dict__
        self._kept.append((attributes, items_of(attributes)))
        for name in REGISTRIES:
            if registry := attributes.get(name):
                self._seen.add(id(registry))
                self._kept.append((registry, items_of(registry)))
                if name != "_modules":
                    self.own |= {id(value): value for value in registry.values() if _is_state(value)}
        for value in _changeable(attributes.values()):
            if _is_state(value):
                self.own[id(value)] = value
            else:
                yield value

    def _look_into(self, value: Any) -> Iterable[Any]:
        """Keep what one value holds; gives what is in it."""
        if id(value) in self._seen:
            return ()
        self._seen.add(id(value))
        kind: Any = type(value)
        if kind in STOCK and not value:
            self._empty.append(value)
            return ()
        if _is_state(value):
            self.nested[id(value)] = value
            return ()
        if (numbers := _numbers_of(kind)) is not None and (state := numbers.read(value)) is not None:
            self._numbers.append((value, numbers, state))
        if issubclass(kind, _LEFT_OUT):
            return ()
        if issubclass(kind, tuple):
            return _changeable(tuple.__iter__(value))
        found: list[Any] = []
        if slots := slots_of(value):
            self._slotted.append((value, slots))
            found += _changeable(slots.values())
        if (contents := contents_of(value)) is not None:
            self._kept.append((contents, items_of(contents)))
            found += _changeable(values_in(contents))
        return found

    def restore(self) -> bool:
        """Put back what changed; true where anything did."""
        grown = [container for container in self._empty if container]
        for container in grown:
            container.clear()
        changed = bool(grown)
        for container, before in self._kept:
            now = items_of(container)
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                changed = True
                refill(container, before)
        for holder, slots in self._slotted:
            found = slots_of(holder)
            if found.keys() != slots.keys() or not all(found[name] is item for name, item in slots.items()):
                changed = True
                refill_slots(holder, slots)
        for value, numbers, state in self._numbers:
            if numbers.has_changed(value, state):
                changed = True
                numbers.put_back(value, state)
        return changed


def numbers_in(value: Any) -> Any:
    """What a value keeps inside itself, where no container shows it, to be compared by `==`; None where it keeps nothing so,
    or nobody can write to it."""
    kind: Any = type(value)
    numbers = _numbers_of(kind)
    return None if numbers is None else _frozen(numbers.read(value))


def _changeable(values: Iterable[Any]) -> list[Any]:
    """Those of the values that hold something that could change: most of what a layer has doesn't."""
    return [
        value
        for value in values
        if (kind := type(value)) not in _BARE and not (kind is tuple and _BARE.issuperset(map(type, value)))
    ]


def _is_state(value: Any) -> bool:
    # An object itself may raise when it is asked for its class.
    return issubclass(type(value), torch.Tensor) and not isinstance(value, nn.Parameter)


@functools.lru_cache(maxsize=4096)
def _numbers_of(kind: Any) -> _Numbers | None:
    return next((numbers for base, numbers in _NUMBERS.items() if issubclass(kind, base)), None)


def _read_array(value: Any) -> Any:
    return value.view(numpy.ndarray).copy() if value.flags.writeable and not _is_mapped(value) else None


def _is_mapped(value: Any) -> bool:
    """Whether an array is a file that is mapped into the memory: data, which may be larger than the memory."""
    while value is not None:
        if isinstance(value, numpy.memmap | mmap.mmap):
            return True
        value = getattr(value, "base", None)
    return False


def _has_other_numbers(value: Any, before: Any) -> bool:
    if not value.flags.writeable or value.shape != before.shape or value.dtype != before.dtype:
        return True
    # Bit by bit, as NaN differs from itself, and the objects in an array may compare in any way.
    return bool(value.tobytes() != before.tobytes())


def _put_back_array(value: Any, before: Any) -> None:
    value.flags.writeable = True
    if value.dtype != before.dtype:
        value.dtype = before.dtype
    if value.shape != before.shape:
        value.resize(before.shape, refcheck=False)
    value.view(numpy.ndarray)[...] = before


def _put_back_numbers(value: Any, before: bytes) -> None:
    value[:] = array.array(value.typecode, before)


def _by_equality(read: Callable[[Any], Any], put_back: Callable[[Any, Any], object]) -> _Numbers:
    return _Numbers(read, lambda value, before: bool(_frozen(read(value)) != _frozen(before)), put_back)


def _frozen(state: Any) -> Any:
    """The state of a generator, or the numbers of an array, to be compared by `==`."""
    if isinstance(state, dict):
        return {key: _frozen(item) for key, item in state.items()}
    if isinstance(state, torch.Tensor):
        return bytes(state.numpy())
    return (state.shape, state.dtype, state.tobytes()) if isinstance(state, numpy.ndarray) else state


_NUMBERS: dict[type, _Numbers] = {
    numpy.ndarray: _Numbers(_read_array, _has_other_numbers, _put_back_array),
    bytearray: _by_equality(bytes, lambda value, before: operator.setitem(value, slice(None), before)),
    array.array: _by_equality(array.array.tobytes, _put_back_numbers),
    random.Random: _by_equality(random.Random.getstate, random.Random.setstate),
    numpy.random.Generator: _by_equality(
        lambda value: value.bit_generator.state, lambda value, before: setattr(value.bit_generator, "state", before)
    ),
    numpy.random.BitGenerator: _by_equality(
        lambda value: value.state, lambda value, before: setattr(value, "state", before)
    ),
    numpy.random.RandomState: _by_equality(
        lambda value: value.get_state(legacy=False), lambda value, before: value.set_state(before)
    ),
    torch.Generator: _by_equality(lambda value: value.get_state(), lambda value, before: value.set_state(before)),
}
