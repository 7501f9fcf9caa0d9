"""Convert between a call of the original and the flat tensors of a file, by the structures in the manifest."""

from __future__ import annotations

import collections
import dataclasses
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from optimize_export.errors import BundleError, UsageError

Json = Mapping[str, Any]
_MISSING = object()
# isinstance checks concrete classes faster than abstract ones, so they come first.
_MAPPINGS = (dict, Mapping)
_SEQUENCES = (list, tuple, Sequence)
_CONTAINERS = (list, tuple, *_MAPPINGS)
# How constants are read whose value JSON can't hold. Those of other kinds stay text, such as "torch.float32".
_CONSTANTS: Mapping[Any, Callable[[str], Any]] = {"float": float, "complex": complex}
_DICTS: Mapping[str, type[dict[Any, Any]]] = {
    "builtins.dict": dict,
    "collections.OrderedDict": collections.OrderedDict,
    # Its factory isn't known.
    "collections.defaultdict": dict,
}


class Record(dict[Any, Any]):
    """The outputs of a class that isn't imported here: values by key, by attribute and by position.

    Transformers' output classes, for example, allow all three.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the output has no {name!r}; it has {', '.join(map(str, self))}") from None

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) or (isinstance(key, int) and key not in self.keys()):
            return tuple(self.values())[key]
        return super().__getitem__(key)


class Arguments:
    """Finds the tensors in the arguments of a call, by the manifest's `input_structure`.

    `positional` names the original's positional parameters, in order; by default those in the structure. `names` are the
    inputs of the file, in order. A structure that is broken or doesn't name them is a BundleError.
    """

    def __init__(self, structure: Json, positional: Sequence[str] | None, names: Sequence[str]) -> None:
        with _readable("input_structure"):
            self._items: dict[str, Json] = {str(name): child for name, child in structure["items"]}
            found = [name for child in self._items.values() for name in _tensors(child)]
        if found != list(names):
            raise BundleError(f"`input_structure` has the tensors {found}, but the file takes {list(names)}.")
        self._positional = tuple(self._items if positional is None else positional)
        # Most models take plain tensors: then the values are the tensors.
        self._flat = all("tensor" in child for child in self._items.values())
        self._in_order = self._flat and self._positional[: len(self._items)] == tuple(self._items)
        # A constant may be left out.
        self._required = frozenset(name for name, child in self._items.items() if "constant" not in child)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The tensors of a call, in the file's order.

        Raises:
            UsageError: an argument is missing, unknown or passed twice, or differs in structure or in a constant.
        """
        if self._in_order and not kwargs and len(args) == len(self._items):
            return list(args)
        given = dict(zip(self._positional, args, strict=False))
        if len(args) > len(self._positional):
            raise UsageError(
                f"{len(args)} positional arguments are given, and the model takes {len(self._positional)}."
            )
        if kwargs:
            if twice := given.keys() & kwargs.keys():
                raise UsageError(f"The argument `{min(twice)}` is given twice, by position and by name.")
            given.update(kwargs)
        if strange := [name for name in given if name not in self._items]:
            raise UsageError(f"The exported call has no argument `{min(strange)}`; it has {_listed(self._items)}.")
        if lacking := [name for name in self._required if name not in given]:
            raise UsageError(f"The argument `{min(lacking)}` is missing: the exported call has {_listed(self._items)}.")
        if self._flat:
            return [given[name] for name in self._items]
        found: list[Any] = []
        for name, child in self._items.items():
            if name in given:
                _match(child, given[name], (name,), found)
        return found


class Outputs:
    """Builds the original's output from the tensors that a file returns, by the manifest's `output_structure`.

    `names` are the outputs of the file, in order. A structure that is broken or doesn't name them is a BundleError.
    """

    def __init__(self, structure: Json, names: Sequence[str]) -> None:
        with _readable("output_structure"):
            found = list(_tensors(structure))
            self._build = _builder(structure)
        if found != list(names):
            raise BundleError(f"`output_structure` has the tensors {found}, but the file returns {list(names)}.")

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        return self._build(iter(tensors))


@contextmanager
def _readable(field: str) -> Iterator[None]:
    """Turn the errors of a structure that isn't as this program writes it into a BundleError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BundleError(f"`{field}` of the manifest is broken: {type(error).__name__} {error}.") from error


def _tensors(node: Json) -> Iterator[str]:
    if "tensor" in node:
        yield node["tensor"]
    elif "constant" not in node:
        for _, child in node["items"]:
            yield from _tensors(child)


def _match(node: Json, value: Any, path: tuple[Any, ...], found: list[Any]) -> None:
    if "tensor" in node:
        if not hasattr(value, "shape"):
            raise UsageError(f"{_spelled(path)} was a tensor when the model was exported, but is {_shown(value)} here.")
        found.append(value)
        return
    if "constant" in node:
        wanted = node["constant"]
        same = type(value).__name__ == node.get("kind", type(wanted).__name__)
        if not (same and (repr(value) if "kind" in node else value) == wanted):
            fixed = wanted if "kind" in node else repr(wanted)
            raise UsageError(
                f"{_spelled(path)} is fixed in the file at {fixed}, but is {_shown(value)} here; export the model again with it."
            )
        return
    items = node["items"]
    if isinstance(value, _CONTAINERS) and len(value) != len(items):
        raise UsageError(f"{_spelled(path)} has {len(value)} items, but had {len(items)} when the model was exported.")
    for key, child in items:
        _match(child, _item(value, key, path), (*path, key), found)


def _spelled(path: tuple[Any, ...]) -> str:
    return f"`{path[0]}`{''.join(f'[{key!r}]' for key in path[1:])}"


def _shown(value: Any) -> str:
    """A value for a message; of anything but a plain constant only the type, since a tensor's text has many lines."""
    plain = value is None or isinstance(value, bool | int | float | str)
    return reprlib.repr(value) if plain else f"of type {type(value).__name__}"


def _item(value: Any, key: Any, path: tuple[Any, ...]) -> Any:
    if isinstance(key, int) and isinstance(value, _SEQUENCES):
        found = value[key] if key < len(value) else _MISSING
    elif isinstance(value, _MAPPINGS):
        found = value.get(key, _MISSING)
        if found is _MISSING:
            # The manifest has the text of a key that is neither a text nor a number.
            found = next((each for own, each in value.items() if str(own) == key), _MISSING)
    else:
        found = _MISSING if isinstance(key, int) else getattr(value, key, _MISSING)
    if found is _MISSING:
        raise UsageError(f"{_spelled(path)} lacks {key!r}, which it had when the model was exported.")
    return found


def _builder(node: Json) -> Callable[[Iterator[Any]], Any]:
    if "tensor" in node:
        return next
    if "constant" in node:
        constant = _CONSTANTS.get(node.get("kind"), lambda text: text)(node["constant"])
        return lambda tensors: constant
    keys = tuple(key for key, _ in node["items"])
    children = tuple(_builder(child) for _, child in node["items"])
    make = _maker(node["type"], node.get("kind"), keys)
    return lambda tensors: make([child(tensors) for child in children])


def _maker(type_name: str, kind: str | None, keys: tuple[Any, ...]) -> Callable[[list[Any]], Any]:
    if type_name == "builtins.list":
        return list
    if type_name == "builtins.tuple":
        return tuple
    if type_name in _DICTS:
        dictionary = _DICTS[type_name]
        return lambda values: dictionary(zip(keys, values, strict=True))
    # A class is only used if it is of a kind that the original may have returned. A manifest must not choose which code
    # runs.
    cls = _imported(type_name)
    make: Any = cls
    if kind == "namedtuple":
        if not (issubclass(cls, tuple) and getattr(cls, "_fields", None) == keys):
            like: Any = collections.namedtuple
            make = like(type_name.rpartition(".")[2], keys, rename=True)
        return make._make
    if cls.__module__ == "torch.return_types" and make.n_fields == len(keys):
        return cls
    if dataclasses.is_dataclass(cls) and {field.name for field in dataclasses.fields(cls)}.issuperset(keys):
        if issubclass(make, Mapping):
            return lambda values: make(**dict(zip(keys, values, strict=True)))
        return lambda values: _with_attributes(make, keys, values)
    if all(isinstance(key, int) for key in keys):
        return tuple
    return lambda values: Record(zip(keys, values, strict=True))


def _imported(type_name: str) -> type:
    """The class of that name if its module is already imported, otherwise `object`. Nothing is imported for it."""
    parts = type_name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        if (found := sys.modules.get(".".join(parts[:cut]))) is not None:
            for name in parts[cut:]:
                # Not by getattr, because some modules import what they are asked for.
                found = getattr(found, "__dict__", {}).get(name)
            return found if isinstance(found, type) else object
    return object


def _with_attributes(cls: Any, keys: Sequence[str], values: Sequence[Any]) -> Any:
    # Not through __init__: its parameters may differ from the attributes, or it may compute these.
    new: Any = object.__new__(cls)
    for key, value in zip(keys, values, strict=True):
        object.__setattr__(new, key, value)
    return new


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)
