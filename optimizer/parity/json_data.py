"""Write dataclasses as JSON data and read them back, by their fields and type hints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
# Metadata of a field that the JSON leaves out while it is empty.
OMIT_IF_EMPTY = {"omit_if_empty": True}


def to_json(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass instance, in their order; nested dataclasses become dicts, tuples become lists."""
    written: dict[str, Any] = {}
    for field in fields(instance):
        value = getattr(instance, field.name)
        if value or not field.metadata.get("omit_if_empty", False):
            written[field.name] = _written(value)
    return written


def from_json(cls: type[_T], data: Mapping[str, Any]) -> _T:
    """A dataclass instance from the data that `to_json` wrote, before or after a round trip through a JSON file.

    Data of an older version may lack fields that have a default. Fields that the class doesn't have are ignored. Floats
    may be the strings "NaN", "Infinity" and "-Infinity".

    Args:
        cls: a dataclass; its fields are numbers, strings, such dataclasses, tuples, `Mapping[str, X]`, or `X | None`.

    Raises:
        TypeError: the data lacks a field without a default.
        ValueError: a float is another string, or a tuple of fixed length has another length.
    """
    instance: _T = _read(cls, data)
    return instance


def _written(value: Any) -> Any:
    if is_dataclass(value):
        return to_json(value)
    if isinstance(value, tuple | list):
        return [_written(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _written(item) for key, item in value.items()}
    return value


@cache
def _hints_of(cls: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _read(hint: Any, value: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (present,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else _read(present, value)
    if origin is tuple:
        of_any_length = arguments[-1] is Ellipsis
        items = ((arguments[0], item) for item in value) if of_any_length else zip(arguments, value, strict=True)
        return tuple(_read(argument, item) for argument, item in items)
    if origin in (dict, Mapping):
        return {key: _read(arguments[1], item) for key, item in value.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return hint(**{name: _read(own, value[name]) for name, own in _hints_of(hint).items() if name in value})
    # JSON has no NaN and no infinities. Other numbers stay as they are, so an integer is written back as an integer.
    return float(value) if hint is float and isinstance(value, str) else value
