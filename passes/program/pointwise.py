"""Operations that compute each element by itself, and groups of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from passes.program.captured import is_tensor, name_of
from passes.program.effects import is_repeatable
from passes.program.operations import schemas

# Names that Python's operators, and torch's functions in Python, have of operations that torch tags by another name.
_SAME_AS = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "floordiv": "floor_divide",
    "mod": "remainder", "and_": "bitwise_and", "or_": "bitwise_or", "xor": "bitwise_xor", "inv": "bitwise_not",
    "invert": "bitwise_not", "logsigmoid": "log_sigmoid",
}  # fmt: skip
# Composed of pointwise operations, which alone are tagged.
_COMPOSED = frozenset({"hardswish", "log_sigmoid", "softsign", "tanhshrink", "floor_divide", "rsub"})
_CASTS = frozenset({"float", "half", "bfloat16", "double", "to"})


@dataclass(frozen=True)
class PointwiseGroup:
    """Nodes that compute one value element by element; the values of all others are used inside alone.

    Attributes:
        nodes: in the order of the forward; the last one gives the value.
        inputs: what comes in, in the order of its use.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]


def pointwise_groups(nodes: Sequence[fx.Node], settings: Mapping[fx.Node, int]) -> Iterator[PointwiseGroup]:
    """The largest groups of two operations or more, in the order of the forward.

    A node is in the group of its users where these are all in one, and under the same settings. Takes time linear in the
    nodes.
    """
    home: dict[fx.Node, fx.Node] = {}
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        if not is_pointwise(node):
            continue
        homes = {home.get(user) for user in node.users}
        alike = {settings[user] for user in node.users} == {settings[node]}
        if len(homes) == 1 and None not in homes and alike:
            home[node] = found = next(filter(None, homes))
            members[found].append(node)
        elif not _is_cast(node) and node.users:
            # What only casts may give what it is given: nobody outside is to be given that.
            home[node], members[node] = node, [node]
    for last in nodes:
        group = tuple(reversed(members.get(last, ())))
        if sum(not _is_cast(node) for node in group) >= 2:
            inside = set(group)
            inputs = dict.fromkeys(source for node in group for source in node.all_input_nodes if source not in inside)
            yield PointwiseGroup(group, tuple(inputs))


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the node's value, one tensor, is made of those at its place, and nothing else is done."""
    if not node.all_input_nodes or not all(map(is_tensor, node.all_input_nodes)) or not is_repeatable(node):
        return False
    if _is_cast(node):
        return True
    return is_tensor(node) and "out" not in node.kwargs and _is_tagged(name_of_pointwise(node))


def name_of_pointwise(node: fx.Node) -> str:
    """What torch calls the operation."""
    name = name_of(node).strip("_")
    return _SAME_AS.get(name, name)


def is_linear(node: fx.Node) -> bool:
    """Whether the gradients of what a pointwise operation is given don't depend on the numbers in that."""
    name = name_of_pointwise(node)
    if name in ("mul", "div"):
        # By a number: not one by the tensor.
        return len(node.args) == 2 and not isinstance(node.args[1], fx.Node)
    return name in ("add", "sub", "neg") or _is_cast(node)


@functools.lru_cache(maxsize=4096)
def _is_tagged(name: str) -> bool:
    return name in _COMPOSED or any(torch.Tag.pointwise in operation.tags for operation in schemas(name) or ())


def _is_cast(node: fx.Node) -> bool:
    """Whether the node brings a tensor into another dtype, and to no other device."""
    if node.op != "call_method" or node.target not in _CASTS or node.kwargs:
        return False
    wanted = node.args[1:]
    return len(wanted) == 1 and isinstance(wanted[0], torch.dtype) if node.target == "to" else not wanted
