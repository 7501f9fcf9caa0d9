"""What a forward may change while it runs: attributes, containers, what it keeps for later."""

from __future__ import annotations

import dis
import enum
import functools
import gc
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

# The order matters: the methods of `dict` break an `OrderedDict`.
_CONTAINERS = (OrderedDict, dict, list, set, deque)
# Objects of these types have no attributes that a forward would keep its state in.
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
# What objects of these packages hold belongs to other threads as well: putting it back would have one wait forever.
_SHARED = frozenset({"threading", "queue", "logging", "concurrent", "multiprocessing", "asyncio"})
# What torch.nn.Module keeps its tensors and children in.
REGISTRIES = ("_parameters", "_buffers", "_modules")
# Most attributes of modules are of these types, which hold nothing that could be put back.
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, tuple, torch.Tensor, torch.Size, nn.Parameter})
# The values of these types hold no module either.
_WITHOUT_MODULES = PLAIN - {tuple}
# Most containers of a module are empty and of these types, whose own methods are those of the containers.
STOCK = frozenset({OrderedDict, dict, list, set})
_GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState)


def named_values(function: types.FunctionType) -> Iterator[Any]:
    """The values of the globals that the code of a function names, and of the variables that it closes over."""
    for name in globals_in(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # A variable that has no value yet.
            continue


def with_helpers(function: types.FunctionType | None, owner: type, depth: int = 2) -> list[types.FunctionType]:
    """A function of a class, and those functions and methods of its own package that its code names, so many calls deep.

    Torch's own are left out.
    """
    found: dict[types.FunctionType, None] = {}
    waiting = [] if function is None else [function]
    for _ in range(depth + 1):
        new = [one for one in waiting if one not in found]
        found.update(dict.fromkeys(new))
        waiting = [helper for one in new for helper in _helpers_of(one, owner)]
    return list(found)


def _helpers_of(function: types.FunctionType, owner: type) -> Iterator[types.FunctionType]:
    names = names_in(function.__code__)
    values = list(named_values(function))
    scopes = [*(vars(cls) for cls in owner.__mro__), *(vars(v) for v in values if type(v) is types.ModuleType)]
    for value in (*values, *(scope[name] for scope in scopes for name in names if name in scope)):
        plain = plain_function(value)
        if type(plain) is types.FunctionType and package_of(plain) == package_of(function) != "torch":
            yield plain


def package_of(function: types.FunctionType) -> str:
    """The top level package that a function is written in."""
    return (function.__module__ or "").partition(".")[0]


def plain_function(value: Any) -> Any:
    """The function under a method of whatever kind, or behind a property; any other value as it is."""
    if type(value) in (staticmethod, classmethod, types.MethodType):
        return value.__func__
    return value.fget if type(value) is property else value


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in a code and in the functions defined in it."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def globals_in(code: types.CodeType) -> frozenset[str]:
    """The names in a code, and in the functions defined in it, that aren't attributes."""
    loaded = (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    inner = [globals_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(loaded).union(*inner)


@functools.lru_cache(maxsize=4096)
def assigned_outside(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    """What a code assigns, itself or in a function defined in it, that outlives its call: of what kind, and its name."""
    found = []
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            found.append(("global", step.argval))
        elif step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars:
            found.append(("outer variable", step.argval))
    for constant in (each for each in code.co_consts if isinstance(each, types.CodeType)):
        # The variables of this code itself don't outlive the call.
        found += (place for place in assigned_outside(constant) if place[0] == "global" or place[1] in code.co_freevars)
    return tuple(found)


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


def _kind_of(value: Any) -> _Kind:
    kind: Any = type(value)
    return _kind_of_class(kind)


@functools.lru_cache(maxsize=4096)
def _kind_of_class(kind: Any) -> _Kind:
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    is_opaque = issubclass(kind, _OPAQUE) or str(kind.__module__).partition(".")[0] in _SHARED
    descriptor = next((vars(cls)["__dict__"] for cls in kind.__mro__ if "__dict__" in vars(cls)), None)
    plain = descriptor if isinstance(descriptor, types.GetSetDescriptorType | types.MemberDescriptorType) else None
    slots = (item for cls in kind.__mro__ if "__slots__" in vars(cls) for item in vars(cls).items())
    readers = tuple((name, slot.__get__) for name, slot in slots if type(slot) is types.MemberDescriptorType)
    return _Kind(base, is_opaque, None if plain is None else plain.__get__, readers)


def _base(value: Any) -> Any:
    return _kind_of(value).base


def contents_of(value: Any) -> Any:
    """The container itself, or the attributes of a plain object; None where there is nothing to look into."""
    kind = _kind_of(value)
    if kind.base is not None:
        return value
    return None if kind.is_opaque else attributes_of(value)


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes of a plain object that its class has slots for, as far as they are set."""
    kind = _kind_of(value)
    found = {}
    for name, read in () if kind.is_opaque else kind.slots:
        with suppress(AttributeError):
            found[name] = read(value)
    return found


def holds_no_module(value: Any) -> bool:
    """Whether that shows at once: most of what a layer has is plain or empty."""
    kind = type(value)
    return kind in _WITHOUT_MODULES or ((kind in STOCK or kind is tuple) and not value)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object; None where it has none."""
    read = _kind_of(value).attributes
    attributes = None if read is None else read(value)
    return attributes if type(attributes) is dict else None


# The methods below are those of the containers themselves: a class of the user's may do anything in its own.


def items_of(container: Any) -> list[Any]:
    """What stands in a container, in its order; of a mapping the keys, then the values."""
    if type(container) in (dict, OrderedDict):
        return [*container, *container.values()]
    base = _base(container)
    items = list(base.__iter__(container))
    if base is dict:
        return [*items, *dict.values(container)]
    return [*items, *(dict.__getitem__(container, key) for key in items)] if base is OrderedDict else items


def values_in(container: Any) -> list[Any]:
    """What stands in a container; of a mapping the values."""
    items = items_of(container)
    return items[len(items) // 2 :] if issubclass(type(container), dict) else items


def refill(container: Any, before: list[Any]) -> None:
    """Have a container hold what `items_of` gave."""
    base = _base(container)
    base.clear(container)
    if issubclass(base, dict):
        half = len(before) // 2
        for key, value in zip(before[:half], before[half:], strict=True):
            base.__setitem__(container, key, value)
    else:
        (base.update if base is set else base.extend)(container, before)


def refill_slots(holder: Any, before: dict[str, Any]) -> None:
    """Have an object hold what `slots_of` gave."""
    for name in slots_of(holder).keys() - before.keys():
        object.__delattr__(holder, name)
    for name, item in before.items():
        object.__setattr__(holder, name, item)


def random_state() -> tuple[Any, ...]:
    """The states of the global generators of torch (CPU), Python and numpy, to be compared and put back."""
    kind, keys, *rest = numpy.random.get_state()
    return bytes(torch.random.get_rng_state().numpy()), random.getstate(), (kind, numpy.asarray(keys).tobytes(), *rest)


def set_random_state(state: tuple[Any, ...]) -> None:
    """Put the generators back."""
    torch.random.set_rng_state(torch.frombuffer(bytearray(state[0]), dtype=torch.uint8))
    random.setstate(state[1])
    kind, keys, *rest = state[2]
    numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def holds_generator(module: nn.Module) -> bool:
    """Whether the module has a generator of its own, whose draws nobody sees."""
    return any(issubclass(type(value), _GENERATORS) for value in module.__dict__.values())


def names_generator(function: types.FunctionType) -> bool:
    """Whether the code of a function names such a generator, as a global or as what it closes over."""
    return any(issubclass(type(value), _GENERATORS) for value in named_values(function))


def contains(value: Any, kind: type, depth: int = 6) -> bool:
    """Whether a value of that type stands in a value, its containers or the attributes of plain objects."""
    if issubclass(type(value), kind):
        return True
    contents = value if isinstance(value, tuple) else contents_of(value)
    if not depth or contents is None:
        return False
    items = contents if isinstance(contents, tuple) else items_of(contents)
    return any(contains(item, kind, depth - 1) for item in items)


def forget(values: list[Any]) -> None:
    """Take values out of every container, attribute and `lru_cache` of the process that holds them.

    The heap is looked through once for all of them, which takes its time.
    """
    wanted = {id(value) for value in values}
    cached = type(functools.lru_cache(len))
    for wrapper in [item for item in gc.get_objects() if type(item) is cached]:
        if wrapper.cache_info().currsize and _reaches(wrapper, wanted, depth=4):
            wrapper.cache_clear()
    holders = [holder for holder in gc.get_referrers(*values) if holder is not values]
    tuples = [holder for holder in holders if isinstance(holder, tuple)]
    _drop_from(holders, wanted)
    if tuples:
        around = gc.get_referrers(*tuples)
        _drop_from([outer for outer in around if outer is not holders and outer is not tuples], set(map(id, tuples)))


def _reaches(holder: Any, wanted: set[int], depth: int) -> bool:
    return any(
        id(item) in wanted or (depth > 1 and not _kind_of(item).is_opaque and _reaches(item, wanted, depth - 1))
        for item in gc.get_referents(holder)
    )


def _drop_from(holders: list[Any], wanted: set[int]) -> None:
    for holder in holders:
        # A plain object may hold its attributes without a dictionary, until that is asked for.
        contents = holder if _base(holder) is not None else attributes_of(holder)
        if contents is None:
            continue
        items = items_of(contents)
        if not issubclass(type(contents), dict):
            refill(contents, [item for item in items if id(item) not in wanted])
            continue
        half = len(items) // 2
        pairs = zip(items[:half], items[half:], strict=True)
        left = [(key, item) for key, item in pairs if id(key) not in wanted and id(item) not in wanted]
        refill(contents, [*(key for key, _ in left), *(item for _, item in left)])
