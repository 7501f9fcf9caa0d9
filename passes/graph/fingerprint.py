"""What tells the values apart that a graph was made from, whatever objects they are."""

from __future__ import annotations

import enum
import functools
import math
import numbers
import pathlib
import types
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn

from passes.graph.side_effects import contents_of, slots_of
from passes.graph.structure import CONSTANTS


class _Word:
    """Stands where there is no value; copies and pickles of it are the one object of this module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> str:
        return self.name


ABSENT = _Word("ABSENT")
UNKNOWN = _Word("UNKNOWN")

_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType)
IMMUTABLE = (*CONSTANTS, *_FUNCTIONS, enum.Enum, range, torch.memory_format)
# The order matters: the methods of `dict` don't know the order of an `OrderedDict`.
_CONTAINERS = (OrderedDict, dict, types.MappingProxyType, list, tuple, set, frozenset, deque)
# Values that can't change, and that their text tells from others of their type.
_WRITTEN = (numbers.Number, numpy.generic, pathlib.PurePath)
# How deep in containers and plain objects values are compared, and how many of them, at most.
_DEPTH = 32
_MOST = 4096


class TooMuch(Exception):
    """A value of more parts, or deeper ones, than are compared."""


def is_of(value: Any, kinds: Any) -> bool:
    """`isinstance` by what the object is: its class may answer anything when it is asked, or raise."""
    return issubclass(type(value), kinds)


def cannot_change(value: Any) -> bool:
    """Whether the value is the same for good, as the object that it is."""
    return is_of(value, IMMUTABLE) or (type(value) is tuple and all(map(cannot_change, value)))


def fingerprint(value: Any) -> Any:
    """What tells the value from others: equal for equal values of the same types, whatever objects they are.

    A tensor is the same as any other and a module as any of its class, since a graph reads the ones and calls the others
    anew at every call.

    Raises:
        TooMuch: it holds so much that comparing it at every call would be work.
    """
    return _print(value, (), _Walk())


def kind_without_parts(value: Any, but: tuple[type, ...]) -> type | None:
    """The class of an object in the value, or of itself, of which a fingerprint tells no more than that; None without.

    Args:
        but: classes that are passed over, without those that are made of them.

    Raises:
        TooMuch: as `fingerprint` does.
    """
    walk = _Walk()
    _print(value, (), walk)
    return next((kind for kind in walk.without_parts if kind not in but), None)


@dataclass
class _Walk:
    """What was met on the way through one value.

    Attributes:
        count: the values that were looked at.
        without_parts: the classes of those that nothing but their class is known of.
    """

    count: int = 0
    without_parts: list[type] = field(default_factory=list)


def _print(value: Any, around: tuple[int, ...], walk: _Walk) -> Any:
    """The fingerprint of a value that stands in others, the outermost first, by identity."""
    walk.count += 1
    if walk.count > _MOST:
        raise TooMuch
    kind = type(value)
    if issubclass(kind, float):
        # Neither of NaN and -0.0 does `==` tell what it is.
        return kind, math.copysign(1.0, value), value if value == value else None
    if issubclass(kind, complex):
        return kind, _print(value.real, around, walk), _print(value.imag, around, walk)
    if issubclass(kind, _FUNCTIONS):
        # Not their kind, which pickle doesn't find by its name.
        return None, value
    if issubclass(kind, IMMUTABLE):
        return kind, value
    if issubclass(kind, nn.Module):
        return nn.Module, kind
    if issubclass(kind, torch.Tensor):
        return torch.Tensor, None
    if issubclass(kind, functools.partial):
        return kind, _joined([value.func, value.args, value.keywords], (*around, id(value)), walk)
    if issubclass(kind, types.MethodType):
        return None, value.__func__, _joined([value.__self__], (*around, id(value)), walk)
    if issubclass(kind, _WRITTEN):
        return kind, repr(value)
    if id(value) in around:
        return kind, len(around) - around.index(id(value))
    if len(around) == _DEPTH:
        raise TooMuch
    if (parts := parts_of(value)) is not None:
        return kind, _joined(parts, (*around, id(value)), walk)
    if value is ABSENT:
        return value, None
    walk.without_parts.append(kind)
    return kind, None


def _joined(parts: Any, around: tuple[int, ...], walk: _Walk) -> Any:
    if isinstance(parts, dict):
        return tuple((_print(key, around, walk), _print(item, around, walk)) for key, item in parts.items())
    return parts if isinstance(parts, frozenset) else tuple([_print(item, around, walk) for item in parts])


def parts_of(value: Any) -> Any:
    """What stands in a container or in a plain object, by the containers' own methods; None for anything else."""
    if is_of(value, numpy.ndarray):
        return _parts_of_array(value)
    base: Any = next((base for base in _CONTAINERS if is_of(value, base)), None)
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
