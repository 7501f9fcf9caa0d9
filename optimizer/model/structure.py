"""The tensors in a call or an output, by name, whatever contains them.

Tuples, lists, mappings (such as `ModelOutput` of Hugging Face), named tuples and dataclasses are opened. Any other
object with attributes is opened if it contains a tensor (a key-value cache, a user's own container class). No type has
to be registered, and `copy.deepcopy` rebuilds everything with other tensors.
"""

import copy
import dataclasses
import keyword
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from exporters.structure import holds_tensor, unique

_NEVER_OPENED = (
    *(str, bytes, int, float, complex, type(None), type, types.FunctionType, types.MethodType, types.ModuleType),
    *(nn.Module, torch.Generator, torch.dtype, torch.device, np.ndarray),
)


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The contents of a tree.

    Attributes:
        names: a unique label for each leaf; comparisons don't use it.
        values: the leaves, in the order of `names`, which are compared by position.
        structure: the tree without its leaves, JSON-serializable, which is compared as a whole.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    structure: Any

    def tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Names and tensors, in the order of the tree."""
        return tuple((name, value) for name, value in zip(self.names, self.values, strict=True) if is_tensor(value))


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def leaves_of(tree: Any, root: str = "output") -> Leaves:
    """Open a tree.

    A single tensor is named `root`. The items of a top-level sequence are named `root_0`, `root_1`, …, and those of a
    mapping or an object by their keys. Below that, names are joined with dots. If several places have the same name,
    numbers distinguish them, `x (1)` and `x (2)`: none is just `x`.
    """
    names: list[str] = []
    values: list[Any] = []

    def keep(name: str, value: Any) -> None:
        names.append(name or root)
        values.append(value)

    structure = _open(tree, "", root, keep, set())
    return Leaves(unique(_numbered(names)), tuple(values), structure)


def _numbered(names: Sequence[str]) -> Iterator[str]:
    total, seen = Counter(names), Counter[str]()
    for name in names:
        seen[name] += 1
        yield name if total[name] == 1 else f"{name} ({seen[name]})"


def rebuild(tree: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same tree with `replace(tensor)` for each tensor; a tensor in several places is replaced once.

    Containers are new, and their contents other than tensors are the same objects as before. An object that was opened
    for the tensors in its attributes is deep-copied: a cache that counts its tokens must not carry the count over.
    """
    memo: dict[int, Any] = {}
    for value in leaves_of(tree).values:
        if id(value) not in memo:
            memo[id(value)] = replace(value) if is_tensor(value) else value
    return memo[id(tree)] if id(tree) in memo else copy.deepcopy(tree, memo)


def clone(tree: Any) -> Any:
    """The same tree with a detached copy of each tensor, with the same `requires_grad`."""
    return rebuild(tree, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


def first_difference(expected: Any, got: Any, path: str = "") -> str | None:
    """A sentence about the first difference between two structures; None if they are equal."""
    if expected == got:
        return None
    where = path or "the output"
    kind, *parts = expected
    other_kind, *other_parts = got
    if kind != other_kind:
        return f"{where} is {_article(other_kind)}, but should be {_article(kind)}"
    if kind == "value":
        return f"{where} is {other_parts[0]}, but should be {parts[0]}"
    keys, other_keys = [key for key, _ in parts[0]], [key for key, _ in other_parts[0]]
    if keys != other_keys:
        return f"{where} contains {_listing(other_keys)}, but should contain {_listing(keys)}"
    for (key, child), (_, other) in zip(parts[0], other_parts[0], strict=True):
        if difference := first_difference(child, other, f"{path}.{key}" if path else str(key)):
            return difference
    return f"{where} has a different structure"


def _open(tree: Any, path: str, root: str, keep: Callable[[str, Any], None], opened: set[int]) -> Any:
    children = None if id(tree) in opened else _children(tree, opened)
    if children is None:
        keep(path, tree)
        return _leaf_structure(tree)
    opened = opened | {id(tree)}
    positional = isinstance(tree, list | tuple) and not hasattr(tree, "_fields")
    described = []
    for key, child in children:
        inner = f"{path}.{key}" if path else f"{root}_{key}" if positional else str(key)
        described.append([str(key) if positional else _spelled(key), _open(child, inner, root, keep, opened)])
    return [_class_name(tree), described]


def _children(tree: Any, opened: set[int]) -> list[tuple[Any, Any]] | None:
    """The parts of a container by key; None for a leaf."""
    if isinstance(tree, (torch.Tensor, *_NEVER_OPENED)):
        return None
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(field, getattr(tree, field)) for field in tree._fields]
    if isinstance(tree, list | tuple):
        return list(enumerate(tree))
    if isinstance(tree, Mapping):
        return list(tree.items())
    if dataclasses.is_dataclass(tree):
        return [
            (field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree) if hasattr(tree, field.name)
        ]
    attributes = getattr(tree, "__dict__", None)
    if not attributes:
        return None
    around = opened | {id(tree)}
    return [(key, child) for key, child in attributes.items() if holds_tensor(child, around, _NEVER_OPENED)] or None


def _spelled(key: Any) -> str:
    """The key as text, different from that of every other key: `logits`, `'1'`, `1`."""
    if isinstance(key, str):
        text = str.__str__(key)
        return text if text.isidentifier() and not keyword.iskeyword(text) else repr(text)
    return str(key) if isinstance(key, bool | int | float | None) else f"{type(key).__name__} {key}"


def _leaf_structure(leaf: Any) -> list[Any]:
    if isinstance(leaf, torch.Tensor):
        return ["tensor"]
    if isinstance(leaf, bool | int | str | bytes | Enum | torch.dtype | torch.device | None):
        return ["value", repr(leaf)]
    if isinstance(leaf, Set):
        return [
            _class_name(leaf),
            [[str(place), item] for place, item in enumerate(sorted(map(_leaf_structure, leaf)))],
        ]
    return [_class_name(leaf)]


def _class_name(tree: Any) -> str:
    # The exact class, also for torch.Size or a subclass of list. Messages are more readable without `builtins`.
    kind = type(tree)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _listing(keys: list[str]) -> str:
    return ", ".join(keys) if keys else "nothing"
