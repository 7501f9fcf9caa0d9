"""What a forward may change while it runs: attributes, containers, what it keeps for later."""

from __future__ import annotations

import enum
import functools
import gc
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import nn

_CONTAINERS = (list, dict, set, deque)
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
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """The containers that a forward can reach by a name, each with a shallow copy.

    These are the attributes of the module, the containers and plain objects among them (two levels deep), and the
    containers and objects that the code of the forward names as globals or closes over.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any] | None = None) -> None:
        self._kept: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._keep(module.__dict__)
        for name, value in module.__dict__.items():
            self._descend(value, 1 if name in _REGISTRIES else 2)
        for value in named_values(function):
            self._descend(value, 1)

    def _descend(self, value: Any, depth: int) -> None:
        if not depth:
            return
        contents = _contents(value)
        if contents is None or id(contents) in self._seen:
            return
        self._seen.add(id(contents))
        self._keep(contents)
        if depth > 1:
            for item in contents.values() if isinstance(contents, dict) else contents:
                self._descend(item, depth - 1)

    def _keep(self, container: Any) -> None:
        # An empty container of plain type, of which a tree has many, is known by its length alone.
        self._kept.append((container, container.copy() if container else ()))

    def restore(self) -> bool:
        """Put back what changed; true where anything did."""
        changed = False
        for container, before in self._kept:
            if not _same_items(container, before):
                changed = True
                _refill(container, before)
        return changed


def named_values(function: Any) -> Iterator[Any]:
    """The values of the globals that the code of a function names, and of the variables that it closes over."""
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name in names_in(code):
        if name in function.__globals__:
            yield function.__globals__[name]
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # A variable that has no value yet.
            continue


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in a code and in the functions defined in it."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _contents(value: Any) -> Any:
    """The container itself, or the attributes of a plain object; None where there is nothing to look into."""
    if isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, _OPAQUE):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict else None


def _same_items(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        return all(key in before and before[key] is value for key, value in container.items())
    if isinstance(container, set):
        return all(item in before for item in container)
    return all(mine is theirs for mine, theirs in zip(container, before, strict=True))


def _refill(container: Any, before: Any) -> None:
    if isinstance(container, dict):
        known = dict(before)
        for key in [key for key in container if key not in known]:
            del container[key]
        container.update(known)
        return
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(before)


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
    return any(
        isinstance(value, random.Random | numpy.random.Generator | numpy.random.RandomState)
        for value in module.__dict__.values()
    )


def contains(value: Any, kind: type, depth: int = 4) -> bool:
    """Whether a value of that type stands in a value, its containers or the attributes of plain objects."""
    if isinstance(value, kind):
        return True
    contents = value if isinstance(value, tuple) else _contents(value)
    if not depth or contents is None:
        return False
    items: Iterable[Any] = [*contents, *contents.values()] if isinstance(contents, dict) else contents
    return any(contains(item, kind, depth - 1) for item in items)


def forget(values: list[Any]) -> None:
    """Take values out of every container, attribute and `lru_cache` of the process that holds them."""
    wanted = {id(value) for value in values}
    cached = type(functools.lru_cache(len))
    for wrapper in [item for item in gc.get_objects() if type(item) is cached]:
        if wrapper.cache_info().currsize and _reaches(wrapper, wanted, depth=4):
            wrapper.cache_clear()
    for value in values:
        for holder in gc.get_referrers(value):
            if holder is not values:
                _drop(holder, wanted)


def _reaches(holder: Any, wanted: set[int], depth: int) -> bool:
    return any(
        id(item) in wanted or (depth > 1 and not isinstance(item, _OPAQUE) and _reaches(item, wanted, depth - 1))
        for item in gc.get_referents(holder)
    )


def _drop(holder: Any, wanted: set[int]) -> None:
    if isinstance(holder, tuple):
        for outer in gc.get_referrers(holder):
            if isinstance(outer, _CONTAINERS):
                _drop(outer, {id(holder)})
    elif isinstance(holder, dict):
        for key in [key for key, item in holder.items() if id(item) in wanted or id(key) in wanted]:
            del holder[key]
    elif isinstance(holder, set):
        holder.difference_update([item for item in holder if id(item) in wanted])
    elif isinstance(holder, list | deque):
        remaining = [item for item in holder if id(item) not in wanted]
        holder.clear()
        holder.extend(remaining)
