"""Read the contents of containers and plain objects without calling methods that their classes override."""

from __future__ import annotations

import array
import enum
import functools
import mmap
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
# Values of these types are not containers, and their attributes are not part of whatever holds them.
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
# Objects of these packages may be shared with other threads.
_SHARED = frozenset({"threading", "queue", "logging", "concurrent", "multiprocessing", "asyncio"})


@dataclass(frozen=True)
class _Kind:
    """How values of one type can be read. The type is inspected, because an object may raise when asked for its class."""

    base: Any  # the built-in container class; None for other values
    is_opaque: bool  # whether the contents must not be read
    attributes: Callable[[Any], Any] | None  # reads the `__dict__`, bypassing any override; None if there is none
    slots: tuple[tuple[str, Callable[[Any], Any]], ...]  # the attributes in `__slots__`, each with its reader


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
    """The container itself, or the `__dict__` of a plain object; None for values that are not inspected."""
    kind = _kind(value)
    if kind.base is not None:
        return value
    attributes = None if kind.is_opaque or kind.attributes is None else kind.attributes(value)
    return attributes if type(attributes) is dict else None


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes of a plain object that are stored in `__slots__` and are set."""
    kind = _kind(value)
    found = {}
    for name, read in () if kind.is_opaque else kind.slots:
        with suppress(AttributeError):
            found[name] = read(value)
    return found


def items_of(container: Any) -> list[Any]:
    """The items of a container in order; for a mapping the keys, then the values."""
    base = _kind(container).base
    items = list(base.__iter__(container))
    if base is dict:
        return [*items, *dict.values(container)]
    return [*items, *(dict.__getitem__(container, key) for key in items)] if base is OrderedDict else items


def numbers_in(value: Any) -> Any:
    """A copy of the internal state of a value such as an array or a random generator, to be compared by `==`.

    None for other values, and for arrays that are read-only or memory-mapped.
    """
    read = next((read for base, read in _NUMBERS.items() if issubclass(type(value), base)), None)
    return None if read is None else _frozen(read(value))


def _array(value: Any) -> Any:
    return value.view(numpy.ndarray).copy() if value.flags.writeable and not _is_mapped(value) else None


def _is_mapped(value: Any) -> bool:
    """Whether an array is a memory-mapped file, which may be larger than the memory."""
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
