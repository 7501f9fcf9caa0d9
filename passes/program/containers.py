"""What stands in containers and plain objects, read past whatever methods their classes have."""

from __future__ import annotations

import array
import enum
import functools
import mmap
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

# What torch.nn.Module keeps its tensors and children in.
REGISTRIES = ("_parameters", "_buffers", "_modules")
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
# Values of these types are no containers, and what their attributes lead to is none of theirs.
_OPAQUE = (
    nn.Module,
    torch.Tensor,
    torch.Generator,
    type,
    enum.Enum,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
)
# What objects of these packages hold belongs to other threads as well.
_SHARED = frozenset({"threading", "queue", "logging", "concurrent", "multiprocessing", "asyncio"})


@dataclass(frozen=True)
class _Kind:
    """What values of one type are; an object itself may raise when it is asked for its class.

    Attributes:
        base: the container; None for other values.
        is_opaque: whether there is nothing to look into.
        attributes: reads the `__dict__` past whatever the class makes of it; None where there is none.
        slots: the attributes that aren't in the `__dict__`, each with what reads it.
    """

    base: Any
    is_opaque: bool
    attributes: Callable[[Any], Any] | None
    slots: tuple[tuple[str, Callable[[Any], Any]], ...]


@functools.lru_cache(maxsize=4096)
def _kind_of(kind: Any) -> _Kind:
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    is_opaque = issubclass(kind, _OPAQUE) or str(kind.__module__).partition(".")[0] in _SHARED
    descriptor = next((vars(cls)["__dict__"] for cls in kind.__mro__ if "__dict__" in vars(cls)), None)
    plain = descriptor if isinstance(descriptor, types.GetSetDescriptorType | types.MemberDescriptorType) else None
    slots = (item for cls in kind.__mro__ if "__slots__" in vars(cls) for item in vars(cls).items())
    readers = tuple((name, slot.__get__) for name, slot in slots if type(slot) is types.MemberDescriptorType)
    return _Kind(base, is_opaque, None if plain is None else plain.__get__, readers)


def _kind(value: Any) -> _Kind:
    kind: Any = type(value)
    return _kind_of(kind)


def contents_of(value: Any) -> Any:
    """The container itself, or the attributes of a plain object; None where there is nothing to look into."""
    kind = _kind(value)
    if kind.base is not None:
        return value
    attributes = None if kind.is_opaque or kind.attributes is None else kind.attributes(value)
    return attributes if type(attributes) is dict else None


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes of a plain object that its class has slots for, as far as they are set."""
    kind = _kind(value)
    found = {}
    for name, read in () if kind.is_opaque else kind.slots:
        with suppress(AttributeError):
            found[name] = read(value)
    return found


def items_of(container: Any) -> list[Any]:
    """What stands in a container, in its order; of a mapping the keys, then the values."""
    base = _kind(container).base
    items = list(base.__iter__(container))
    if base is dict:
        return [*items, *dict.values(container)]
    return [*items, *(dict.__getitem__(container, key) for key in items)] if base is OrderedDict else items


def held_by(value: Any) -> Iterable[Any]:
    """What a function, method, partial or weak reference holds, as far as it shows without a look at any code.

    Of a function these are the variables that it closes over, its defaults and its attributes.
    """
    kind = type(value)
    if kind is types.FunctionType:
        cells = []
        for cell in value.__closure__ or ():
            # A variable may have no value yet.
            with suppress(ValueError):
                cells.append(cell.cell_contents)
        named = (*(value.__kwdefaults__ or {}).values(), *value.__dict__.values())
        return (*cells, *(value.__defaults__ or ()), *named)
    if kind is types.MethodType:
        return (value.__func__, value.__self__)
    if kind is functools.partial:
        return (value.func, *value.args, *value.keywords.values())
    return (value(),) if kind is weakref.ref else ()


def numbers_in(value: Any) -> Any:
    """What a value keeps inside itself, where no container shows it, to be compared by `==`; None where it keeps nothing so,
    or nobody can write to it."""
    read = next((read for base, read in _NUMBERS.items() if issubclass(type(value), base)), None)
    return None if read is None else _frozen(read(value))


def _array(value: Any) -> Any:
    return value.view(numpy.ndarray).copy() if value.flags.writeable and not _is_mapped(value) else None


def _is_mapped(value: Any) -> bool:
    """Whether an array is a file that is mapped into the memory: data, which may be larger than the memory."""
    while value is not None:
        if isinstance(value, numpy.memmap | mmap.mmap):
            return True
        value = getattr(value, "base", None)
    return False


def _frozen(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _frozen(item) for key, item in state.items()}
    if isinstance(state, torch.Tensor):
        return bytes(state.numpy())
    return (state.shape, state.dtype, state.tobytes()) if isinstance(state, numpy.ndarray) else state


_NUMBERS: dict[type, Callable[[Any], Any]] = {
    numpy.ndarray: _array,
    bytearray: bytes,
    array.array: array.array.tobytes,
    random.Random: random.Random.getstate,
    numpy.random.Generator: lambda value: value.bit_generator.state,
    numpy.random.BitGenerator: lambda value: value.state,
    numpy.random.RandomState: lambda value: value.get_state(legacy=False),
    torch.Generator: lambda value: value.get_state(),
}
