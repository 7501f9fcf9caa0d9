"""Read the contents of containers and plain objects without calling methods that their classes override."""

from __future__ import annotations

import array
import enum
import functools
import mmap
import random
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from passes.graph.tensors import PLAIN_TENSORS, Extent, extents_of, kind_of, storages_of

# The dicts in which torch.nn.Module keeps its tensors and children.
REGISTRIES = ("_parameters", "_buffers", "_modules")
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


def held_by(value: Any) -> Iterable[Any]:
    """The values that a function, method, partial or weak reference holds, without inspecting code.

    For a function these are its closure variables, defaults and attributes.
    """
    kind = type(value)
    if kind is types.FunctionType:
        cells = []
        for cell in value.__closure__ or ():
            # A closure variable may not be set yet.
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


class Place(NamedTuple):
    """Where a module holds a tensor: registered, as an attribute, or inside a container, partial or function."""

    path: str  # the path, for reports
    tensor: torch.Tensor
    # Whether a read here is not recognized as a read of a registered tensor, even if it is the same object
    stands_apart: bool = False


class SharedMemory:
    """For each tensor, find another one that overlaps it in memory."""

    def __init__(
        self, places: Iterable[Place], *, counts: Callable[[torch.Tensor], bool] = lambda tensor: True
    ) -> None:
        """Compare the places, which may name a tensor more than once.

        Args:
            places: the tensors to compare.
            counts: whether a tensor may be returned by `beside`.
        """
        # Keeps the tensors alive, so that their ids stay unique.
        self._places = tuple(places)
        self._groups: dict[int, list[Place]] = {}
        by_storage: dict[int, list[Place]] = defaultdict(list)
        for place in self._places:
            for storage in storages_of(place.tensor):
                by_storage[storage].append(place)
        for storage, places in by_storage.items():
            # Most storages hold one tensor.
            if len(places) > 1:
                extents = ((extent, place) for place in places for extent in extents_of(place.tensor))
                self._group([found for found in extents if found[0].storage == storage], counts)

    def _group(self, found: list[tuple[Extent, Place]], counts: Callable[[torch.Tensor], bool]) -> None:
        end, group = 0, list[Place]()
        # Of tensors with the same start, the widest comes first, as the best one to name.
        for extent, place in sorted(found, key=lambda item: (item[0].start, -item[0].end)):
            if extent.start >= end:
                group = []
            end = max(end, extent.end)
            self._groups[id(place.tensor)] = group
            if counts(place.tensor):
                group.append(place)

    def beside(self, tensor: torch.Tensor) -> Place | None:
        """Another tensor that overlaps this one, directly or through a third one; None if there is none.

        A tensor that is also held as a plain attribute, or by a scripted module, counts as overlapping itself.
        """
        group = self._groups.get(id(tensor), ())
        return next((place for place in group if place.tensor is not tensor or place.stands_apart), None)


def groups_of(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group the tensors, each once, so that different groups share no bytes; most groups have one tensor."""
    distinct = {id(tensor): tensor for tensor in tensors}
    shared = SharedMemory(Place("", tensor) for tensor in distinct.values())
    found: dict[int, list[torch.Tensor]] = defaultdict(list)
    for key, tensor in distinct.items():
        found[id(shared._groups.get(key, tensor))].append(tensor)
    return list(found.values())


def copied_together(group: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Copy tensors so that the copies overlap like the originals: a write to one shows in the others.

    If one of them has no strides or is of a foreign class, all are copied separately.

    Args:
        group: one of the groups of `groups_of`.
        dtype: the dtype of the copies; the tensors of the group must then have one common dtype. None keeps the dtypes.
    """
    if len(group) == 1 or not all(map(_can_be_laid_anew, group)):
        own = [tensor.detach().clone() for tensor in group]
        return own if dtype is None else [tensor.to(dtype) for tensor in own]
    extents = [extent for tensor in group for extent in extents_of(tensor)]
    # A multiple of the alignment of every dtype.
    first = min(extent.start for extent in extents) // 16 * 16
    one = group[0].dtype if all(tensor.dtype is group[0].dtype for tensor in group) else torch.uint8
    size = max(extent.end for extent in extents) - first
    old = group[0].untyped_storage()
    bytes_or_numbers = _over(old, one, group[0], first // one.itemsize, (size // one.itemsize,), (1,))
    memory = bytes_or_numbers.to(dtype or one, copy=True).untyped_storage()
    return [
        _over(memory, dtype or tensor.dtype, tensor, (extent.start - first) // tensor.element_size(), tensor.shape,
              tensor.stride())
        for tensor, extent in zip(group, extents, strict=True)
    ]  # fmt: skip


def _can_be_laid_anew(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in PLAIN_TENSORS and kind_of(tensor) is None
    return is_plain and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    like: torch.Tensor,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """Make a tensor over a storage. It is not a view, so that a forward may write to it."""
    return torch.empty(0, dtype=dtype, device=like.device).set_(storage, offset, tuple(shape), tuple(strides))


def places_in(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Place]:
    """Yield the tensors that modules hold: registered, as attributes, and in the containers named in `Place`.

    A container that several modules share, such as a vocabulary, is searched once.

    Args:
        modules: (path, module) of each module.
    """
    # The remaining depth with which each container was searched, by id.
    seen: dict[int, int] = {}
    for path, module in modules:
        prefix = f"{path}." if path else ""
        if isinstance(module, torch.jit.ScriptModule):
            # A scripted module has only these, and may create them again at each access, over the same memory.
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            yield from (Place(prefix + name, tensor, stands_apart=True) for name, tensor in own)
            continue
        for home in (module._parameters, module._buffers):
            yield from (Place(prefix + name, tensor) for name, tensor in home.items() if tensor is not None)
        for name, value in module.__dict__.items():
            if name not in REGISTRIES:
                yield from _inside(prefix + name, value, seen, depth=3)


def _inside(path: str, value: object, seen: dict[int, int], depth: int) -> Iterator[Place]:
    """The tensors in a container, function, partial or other holder, down to the given depth."""
    if isinstance(value, torch.Tensor):
        yield Place(path, value, stands_apart=True)
        return
    items = _items_in(path, value)
    if items and depth > seen.get(id(value), 0):
        seen[id(value)] = depth
        for name, item in items:
            yield from _inside(name, item, seen, depth - 1)


def _items_in(path: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f"{path}[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    return [(path, item) for item in held_by(value)]
