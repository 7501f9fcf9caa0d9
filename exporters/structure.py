"""The tree structure of a call's arguments or a model's outputs: flatten it to tensors and rebuild it."""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import keyword
import math
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from exporters.errors import StructureError

Key = str | int

# Types that a file can hold as constants. A value of any other type could hide a tensor.
_CONSTANTS = (
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
_NEVER_OPENED = (*_CONSTANTS, type, types.FunctionType, types.MethodType, types.ModuleType, nn.Module, torch.Generator)


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
    """The structure of an example value.

    Attributes:
        side: "argument" or "output"; selects the wording of messages, and only outputs may contain arbitrary objects.
        paths: the path of each tensor, in flat order.
    """

    def __init__(self, example: Any, *, side: str) -> None:
        self.side = side
        self.root = self._read(example, ())
        self.paths: tuple[tuple[Key, ...], ...] = tuple(
            node.path for node in _leaves(self.root) if isinstance(node, TensorNode)
        )

    def flatten(self, value: Any, *, constants: bool = True) -> tuple[torch.Tensor, ...]:
        """The tensors of `value`, in this structure's order.

        With `constants=False`, the constants of the example aren't compared: while a graph is recorded, a proxy may be
        in the place of one.

        Raises:
            StructureError: the structure or a constant of `value` differs from the example.
        """
        flat: list[torch.Tensor] = []
        self._match(self.root, value, flat, constants)
        return tuple(flat)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Build a value of this structure from flat tensors.

        Raises:
            StructureError: the number of tensors is wrong.
        """
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
        if isinstance(value, _CONSTANTS):
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


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the model's signature, in the order in which they were passed.

    Raises:
        StructureError: an argument is passed both by position and by name.
    """
    names = _positional_names(model, len(args), kwargs)
    bound = dict(zip(names, args, strict=True))
    for name, value in kwargs.items():
        if name in bound:
            raise StructureError(f"argument `{name}` is given twice, by position and by name.")
        bound[name] = value
    return bound


def input_names(paths: Iterable[tuple[Key, ...]]) -> tuple[str, ...]:
    """Identifiers for arguments: `mask`, `past_key_values_0_1`."""
    return unique(_identifier(path) for path in paths)


def output_names(paths: Iterable[tuple[Key, ...]], taken: Sequence[str]) -> tuple[str, ...]:
    """Identifiers for outputs: `logits`, `hidden_states_1`, `output`, `output_0`; never one of `taken`."""
    names = []
    for path in paths:
        unnamed = not path or isinstance(path[0], int)
        name = _identifier(("output", *path) if unnamed else path)
        names.append(f"{name}_out" if name in taken else name)
    return unique(names, taken)


def _positional_names(model: nn.Module, count: int, by_name: Collection[str]) -> list[str]:
    """A name for each of the first `count` arguments.

    Arguments that can't be passed by name get names that no other argument has.
    """
    parameters = _forward_parameters(model)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "input")
    either_way = [p.name for p in named if p.kind is p.POSITIONAL_OR_KEYWORD]
    before = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
    behind = [f"{rest}_{i}" for i in range(count - len(named))]
    others = unique([*before, *behind], {*either_way, *by_name})
    return [*others[: len(before)], *either_way, *others[len(before) :]]


def positional_parameters(model: nn.Module) -> list[str]:
    """The names of forward's parameters that take an argument by position, in order."""
    taken = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in _forward_parameters(model) if parameter.kind in taken]


def _forward_parameters(model: nn.Module) -> list[inspect.Parameter]:
    if isinstance(model, torch.jit.ScriptModule):
        scripted: Any = model.forward
        arguments = scripted.schema.arguments[1:]
        return [inspect.Parameter(argument.name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for argument in arguments]
    # Prefer the forward of the class: one set on the instance often takes only *args.
    of_class = type(model).forward is not nn.Module.forward
    try:
        parameters = list(inspect.signature(type(model).forward if of_class else model.forward).parameters.values())
    except (TypeError, ValueError):  # forward isn't a Python function, so the names are unknown
        return []
    return parameters[1:] if of_class else parameters


_Opened = tuple[tuple[Key, ...], list[Any], Callable[[list[Any]], Any]]


def _open(value: Any) -> _Opened | None:
    """Keys, children and rebuild function of a container; None for other values."""
    children, spec = pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
    if not (len(children) == 1 and children[0] is value):
        return _keys(value, len(children)), children, lambda parts: pytree.tree_unflatten(parts, spec)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return _with_attributes(value, tuple(field.name for field in dataclasses.fields(value)))


def _open_object(value: Any, around: tuple[Any, ...]) -> _Opened | None:
    """Open an object by those attributes that contain a tensor; None if none does.

    The comparison of outputs opens objects in the same way, so it lists the tensors in the same order.
    """
    ids = {id(each) for each in (*around, value)}
    held = tuple(name for name, child in getattr(value, "__dict__", {}).items() if holds_tensor(child, ids))
    return _with_attributes(value, held) if held and not isinstance(value, _NEVER_OPENED) else None


def _with_attributes(value: Any, names: tuple[str, ...]) -> _Opened:
    def rebuild(parts: list[Any]) -> Any:
        # Not through __init__: its parameters may differ from the attributes, or it may compute these.
        new = copy.copy(value)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(new, name, part)
        return new

    return names, [getattr(value, name) for name in names], rebuild


def holds_tensor(value: Any, around: Collection[int], never: tuple[type, ...] = _NEVER_OPENED) -> bool:
    """Whether a tensor is reachable from a value by a path that avoids the containers around the value.

    Each object is visited once: objects that refer to each other have too many paths between them to follow all.

    Args:
        around: the ids of the containers around the value.
        never: types of objects to skip.
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
    return repr(value) if isinstance(value, _CONSTANTS) else f"a {type(value).__name__}"


def _listed(keys: Iterable[Key]) -> str:
    return ", ".join(f"`{key}`" for key in sorted(keys, key=str))


def identifier(name: str) -> str:
    """Turn `name` into a Python identifier."""
    name = re.sub(r"\W", "_", name, flags=re.ASCII) or "_"
    return f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def _identifier(path: tuple[Key, ...]) -> str:
    return identifier("_".join(str(key) for key in path))


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


def kind_without_strides(tensor: torch.Tensor) -> str | None:
    """The kind of a tensor without strides, as in "a sparse tensor"; None for a strided one.

    The passes have their own version of this, since neither package imports the other.
    """
    if tensor.is_nested:
        return "nested"
    if tensor.layout is torch.strided:
        return None
    return "mkldnn" if tensor.is_mkldnn else "sparse"
