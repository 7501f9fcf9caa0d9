"""The tree structure of a call's arguments or a model's outputs: its tensors in a fixed order, and how to rebuild it.

`Structure` is that of files: tensors are the file's inputs or outputs, all other leaves are its constants. Containers are
those of torch's pytree and dataclasses, in outputs also objects that hold tensors (a key-value cache).

`leaves_of` opens everything for comparisons: also mappings and objects that no file could take, with a name for each leaf.
No type has to be registered, and `copy.deepcopy` rebuilds everything with other tensors (`rebuild`).

`optimize_export.runtime.structure` reads what `Structure.describe` writes, without torch.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import keyword
import math
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from optimize_export.errors import StructureError

Key = str | int

# Types that a file can hold as constants. A value of any other type could hide a tensor.
CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    range,
    slice,
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)

# Types whose attributes aren't part of a model's output.
_NEVER_OPENED = (*CONSTANTS, type, types.FunctionType, types.MethodType, types.ModuleType, nn.Module, torch.Generator)


@dataclasses.dataclass(frozen=True)
class TensorNode:
    """A tensor, with its path in the tree."""

    path: tuple[Key, ...]


@dataclasses.dataclass(frozen=True)
class ConstantNode:
    """A value that is stored in the file and must be the same in every call."""

    path: tuple[Key, ...]
    value: Any


@dataclasses.dataclass(frozen=True)
class ContainerNode:
    """A dict, list, tuple, registered pytree, dataclass or object, with its children in a fixed order."""

    path: tuple[Key, ...]
    type: type
    keys: tuple[Key, ...]
    children: tuple[Node, ...]
    rebuild: Callable[[list[Any]], Any]


Node = TensorNode | ConstantNode | ContainerNode


class Structure:
    """The structure of an example value."""

    def __init__(self, example: Any, *, side: str) -> None:
        # "argument" or "output"; selects the wording of messages, and only outputs may contain arbitrary objects.
        self.side = side
        self.root = self._read(example, ())
        # The path of each tensor, in flat order.
        self.paths: tuple[tuple[Key, ...], ...] = tuple(
            node.path for node in _leaves(self.root) if isinstance(node, TensorNode)
        )

    def flatten(self, value: Any, *, constants: bool = True) -> tuple[torch.Tensor, ...]:
        """The tensors of `value`, in this structure's order.

        With `constants=False`, the constants of the example aren't compared: while a graph is recorded, a proxy may be
        in the place of one. A `value` that differs from the example is a StructureError.
        """
        flat: list[torch.Tensor] = []
        self._match(self.root, value, flat, constants)
        return tuple(flat)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Build a value of this structure from flat tensors."""
        remaining = iter(tensors)
        value = _rebuild(self.root, remaining)
        if next(remaining, None) is not None or len(tensors) != len(self.paths):
            raise StructureError(f"{len(tensors)} tensors were given, but the model takes {len(self.paths)}.")
        return value

    def describe(self, names: Sequence[str]) -> Any:
        """The structure as JSON: a tensor as its name, a constant as its value, a container as its type and items."""
        return _describe(self.root, iter(names))

    def numbers(self) -> Iterator[tuple[str, int | float | complex]]:
        """The numbers among the constants, as pairs of location (as a user would write it) and value."""
        for node in _leaves(self.root):
            if isinstance(node, ConstantNode) and type(node.value) in (int, float, complex):
                yield self.spell(node.path), node.value

    def spell(self, path: tuple[Key, ...]) -> str:
        """The location as a user would write it: argument `mask`, output `hidden[1]`."""
        if not path:
            return f"the {self.side}"
        first, *rest = path
        return f"{self.side} `{first}{''.join(f'[{key!r}]' for key in rest)}`"

    def _read(self, value: Any, path: tuple[Key, ...], around: tuple[Any, ...] = ()) -> Node:
        """Read the tree below a value; `around` holds the containers around it."""
        if isinstance(value, torch.Tensor):
            self._refuse_layout(value, path)
            return TensorNode(path)
        if isinstance(value, CONSTANTS):
            return ConstantNode(path, value)
        opened = None if any(value is each for each in around) else self._open(value, around)
        if opened is None:
            raise StructureError(self._unknown(value, path))
        keys, children, rebuild = opened
        around = (*around, value)
        nodes = tuple(self._read(child, (*path, key), around) for key, child in zip(keys, children, strict=True))
        return ContainerNode(path, type(value), keys, nodes, rebuild)

    def _refuse_layout(self, tensor: torch.Tensor, path: tuple[Key, ...]) -> None:
        kind = "quantized" if tensor.is_quantized else kind_without_strides(tensor)
        if kind is not None:
            way_out = "give" if self.side == "argument" else "return"
            raise StructureError(
                f"{self.spell(path)} is a {kind} tensor, which exported files can't represent; {way_out} a dense one."
            )

    def _match(
        self, node: Node, value: Any, flat: list[torch.Tensor], constants: bool, around: tuple[Any, ...] = ()
    ) -> None:
        if isinstance(node, TensorNode):
            if not isinstance(value, torch.Tensor):
                raise StructureError(f"{self.spell(node.path)} was a tensor when exported, but is {_kind(value)} here.")
            flat.append(value)
            return
        if isinstance(node, ConstantNode):
            if constants and not _same_constant(node.value, value):
                raise StructureError(
                    f"{self.spell(node.path)} was {node.value!r} when exported, but is {_kind(value)} here; only "
                    "tensors can change from call to call."
                )
            return
        opened = self._open(value, around)
        if opened is None or type(value) is not node.type:
            raise StructureError(
                f"{self.spell(node.path)} was a {node.type.__name__} when exported, but is {_kind(value)} here."
            )
        keys, children, _ = opened
        if set(keys) != set(node.keys):
            missing, extra = _listed(set(node.keys) - set(keys)), _listed(set(keys) - set(node.keys))
            difference = " and ".join(
                text for text in (missing and f"lacks {missing}", extra and f"adds {extra}") if text
            )
            raise StructureError(f"{self.spell(node.path)} {difference}, compared with the call that was exported.")
        by_key = dict(zip(keys, children, strict=True))
        for key, child in zip(node.keys, node.children, strict=True):
            self._match(child, by_key[key], flat, constants, (*around, value))

    def _open(self, value: Any, around: tuple[Any, ...]) -> _Opened | None:
        opened = _open(value)
        # Objects in arguments aren't opened: the model may write to them, and they hold more than tensors (how many
        # tokens a cache has seen).
        return _open_object(value, around) if opened is None and self.side == "output" else opened

    def _unknown(self, value: Any, path: tuple[Key, ...]) -> str:
        what = f"{self.spell(path)} is a {type(value).__name__}, which can't be flattened into tensors"
        if self.side == "argument":
            return f"{what}; pass tensors, numbers, strings, dicts, lists, tuples or dataclasses."
        if "Cache" in type(value).__name__:
            return f"{what}; leave it out of the outputs (for example with use_cache=False)."
        return f"{what}; leave it out of the outputs, or register it with torch.utils._pytree.register_pytree_node."


_Opened = tuple[tuple[Key, ...], list[Any], Callable[[list[Any]], Any]]


def _open(value: Any) -> _Opened | None:
    """Keys, children and rebuild function of a container; None for other values."""
    # Not the value itself: torch's function leaves a cycle, which would keep the tensors until the next collection.
    own = id(value)
    children, spec = pytree.tree_flatten(value, is_leaf=lambda node: id(node) != own)
    if not (len(children) == 1 and children[0] is value):
        return _keys(value, len(children)), children, lambda parts: pytree.tree_unflatten(parts, spec)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return _with_attributes(value, tuple(field.name for field in dataclasses.fields(value)))


def _open_object(value: Any, around: tuple[Any, ...]) -> _Opened | None:
    """Open an object by those attributes that contain a tensor, as `leaves_of` does; None if none does."""
    held = () if isinstance(value, _NEVER_OPENED) else _attributes_with_tensors(value, set(map(id, around)))
    return _with_attributes(value, held) if held else None


def _with_attributes(value: Any, names: tuple[str, ...]) -> _Opened:
    def rebuild(parts: list[Any]) -> Any:
        # Not through __init__: its parameters may differ from the attributes, or it may compute these.
        new = copy.copy(value)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(new, name, part)
        return new

    return names, [getattr(value, name) for name in names], rebuild


def _attributes_with_tensors(
    value: Any, around: Collection[int], never: tuple[type, ...] = _NEVER_OPENED
) -> tuple[str, ...]:
    """The names of the attributes of an object that contain a tensor; the arguments are those of `_holds_tensor`."""
    ids = {*around, id(value)}
    return tuple(name for name, child in getattr(value, "__dict__", {}).items() if _holds_tensor(child, ids, never))


def _holds_tensor(value: Any, around: Collection[int], never: tuple[type, ...]) -> bool:
    """Whether a tensor is reachable from a value by a path that avoids the containers around the value.

    Each object is visited once: objects that refer to each other have too many paths between them to follow all.
    `around` are the ids of the containers around the value, `never` the types of objects to skip.
    """
    # Keeps the objects alive, so that no new object reuses an id.
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            return True
        if id(each) in seen or id(each) in around or isinstance(each, never):
            continue
        seen[id(each)] = each
        if isinstance(each, list | tuple | set | frozenset):
            waiting.extend(each)
        else:
            waiting.extend((each if isinstance(each, Mapping) else getattr(each, "__dict__", {})).values())
    return False


def _keys(value: Any, count: int) -> tuple[Key, ...]:
    if isinstance(value, Mapping):
        keys = tuple(key if isinstance(key, int) else str(key) for key in value)
    elif hasattr(value, "_fields"):
        keys = tuple(value._fields)
    elif dataclasses.is_dataclass(value) and len(dataclasses.fields(value)) == count:
        keys = tuple(field.name for field in dataclasses.fields(value))
    else:
        keys = tuple(range(count))
    return keys if len(set(keys)) == count else tuple(range(count))


def _leaves(node: Node) -> Iterator[TensorNode | ConstantNode]:
    if isinstance(node, ContainerNode):
        for child in node.children:
            yield from _leaves(child)
    else:
        yield node


def _rebuild(node: Node, tensors: Any) -> Any:
    if isinstance(node, TensorNode):
        return next(tensors, None)
    if isinstance(node, ConstantNode):
        return node.value
    return node.rebuild([_rebuild(child, tensors) for child in node.children])


def _describe(node: Node, names: Any) -> Any:
    if isinstance(node, TensorNode):
        return {"tensor": next(names)}
    if isinstance(node, ConstantNode):
        # JSON has no infinity and no NaN.
        plain = node.value is None or type(node.value) in (bool, int, str)
        plain = plain or (type(node.value) is float and math.isfinite(node.value))
        return {"constant": node.value} if plain else {"constant": repr(node.value), "kind": type(node.value).__name__}
    items = [[key, _describe(child, names)] for key, child in zip(node.keys, node.children, strict=True)]
    kind = {"kind": "namedtuple"} if issubclass(node.type, tuple) and hasattr(node.type, "_fields") else {}
    return {"type": f"{node.type.__module__}.{node.type.__qualname__}", **kind, "items": items}


def _same_constant(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    return bool(left == right) or (left != left and right != right)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    return repr(value) if isinstance(value, CONSTANTS) else f"a {type(value).__name__}"


def _listed(keys: Iterable[Key]) -> str:
    return ", ".join(f"`{key}`" for key in sorted(keys, key=str))


def kind_without_strides(tensor: torch.Tensor) -> str | None:
    """The kind of a tensor without strides, as in "a sparse tensor"; None for a strided one."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is torch.strided:
        return None
    return "mkldnn" if tensor.is_mkldnn else "sparse"


# -------------------------------------------------------------------------------------------------- leaves for comparisons

# What comparisons take as a leaf even if it has attributes.
_LEAVES = (
    *(str, bytes, int, float, complex, type(None), type, types.FunctionType, types.MethodType, types.ModuleType),
    *(nn.Module, torch.Generator, torch.dtype, torch.device, np.ndarray),
)


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The contents of a tree."""

    # A unique label for each leaf; comparisons don't use it.
    names: tuple[str, ...]
    # The leaves, in the order of `names`, which are compared by position.
    values: tuple[Any, ...]
    # The tree without its leaves, JSON-serializable, which is compared as a whole.
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

    structure = _describe_leaves(tree, "", root, keep, set())
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
        return f"{where} contains {_keys_listed(other_keys)}, but should contain {_keys_listed(keys)}"
    for (key, child), (_, other) in zip(parts[0], other_parts[0], strict=True):
        if difference := first_difference(child, other, f"{path}.{key}" if path else str(key)):
            return difference
    return f"{where} has a different structure"


def _describe_leaves(tree: Any, path: str, root: str, keep: Callable[[str, Any], None], opened: set[int]) -> Any:
    children = None if id(tree) in opened else _children(tree, opened)
    if children is None:
        keep(path, tree)
        return _leaf_structure(tree)
    opened = opened | {id(tree)}
    positional = isinstance(tree, list | tuple) and not hasattr(tree, "_fields")
    described = []
    for key, child in children:
        inner = f"{path}.{key}" if path else f"{root}_{key}" if positional else str(key)
        described.append(
            [str(key) if positional else _spelled(key), _describe_leaves(child, inner, root, keep, opened)]
        )
    return [_class_name(tree), described]


def _children(tree: Any, opened: set[int]) -> list[tuple[Any, Any]] | None:
    """The parts of a container by key; None for a leaf."""
    if isinstance(tree, (torch.Tensor, *_LEAVES)):
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
    return [(name, vars(tree)[name]) for name in _attributes_with_tensors(tree, opened, _LEAVES)] or None


def _spelled(key: Any) -> str:
    """The key as text, different from that of every other key: `logits`, `'1'`, `1`."""
    if isinstance(key, str):
        text = str.__str__(key)
        return text if text.isidentifier() and not keyword.iskeyword(text) else repr(text)
    return str(key) if isinstance(key, bool | int | float | None) else f"{type(key).__name__} {key}"


def _leaf_structure(leaf: Any) -> list[Any]:
    if isinstance(leaf, torch.Tensor):
        return ["tensor"]
    if isinstance(leaf, bool | int | str | bytes | enum.Enum | torch.dtype | torch.device | None):
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


def _keys_listed(keys: list[str]) -> str:
    return ", ".join(keys) if keys else "nothing"


def unique(names: Iterable[str], taken: Iterable[str] = ()) -> tuple[str, ...]:
    """The names, with a number appended to repeated and `taken` ones: `x`, `x_1`."""
    used, unique = set(taken), []
    for name in names:
        candidate, count = name, 0
        while candidate in used:
            count += 1
            candidate = f"{name}_{count}"
        used.add(candidate)
        unique.append(candidate)
    return tuple(unique)
