"""Find pointwise operations, which compute each element separately, and group them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from passes.graph.captured import is_tensor, name_of
from passes.graph.effects import is_repeatable, schemas

# Names of Python operators and torch functions whose operation torch tags under another name.
_SAME_AS = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "floordiv": "floor_divide",
    "mod": "remainder", "and_": "bitwise_and", "or_": "bitwise_or", "xor": "bitwise_xor", "inv": "bitwise_not",
    "invert": "bitwise_not", "logsigmoid": "log_sigmoid",
}  # fmt: skip
# Pointwise operations without torch's tag: composed of tagged ones, or not tagged before torch 2.12 (leaky_relu).
_UNTAGGED = frozenset({"hardswish", "log_sigmoid", "softsign", "tanhshrink", "floor_divide", "rsub", "leaky_relu"})
_CASTS = frozenset({"float", "half", "bfloat16", "double", "to"})


@dataclass(frozen=True)
class PointwiseGroup:
    """Pointwise nodes that together compute one value; the values of the other nodes are only used inside."""

    nodes: tuple[fx.Node, ...]  # in the order of execution; the last one computes the value
    inputs: tuple[fx.Node, ...]  # the nodes from outside, in the order of their first use


def pointwise_groups(nodes: Sequence[fx.Node], settings: Mapping[fx.Node, int]) -> Iterator[PointwiseGroup]:
    """Yield the largest groups of two or more operations, in the order of execution.

    A node joins the group of its users if all of them are in one group and run under the same settings. The time is
    linear in the number of nodes.
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
            # A cast can't end a group: it may return its input, which nothing outside must receive.
            home[node], members[node] = node, [node]
    for last in nodes:
        group = tuple(reversed(members.get(last, ())))
        if sum(not _is_cast(node) for node in group) >= 2:
            inside = set(group)
            inputs = dict.fromkeys(source for node in group for source in node.all_input_nodes if source not in inside)
            yield PointwiseGroup(group, tuple(inputs))


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the value depends only on the input elements at its position, without side effects."""
    if not node.all_input_nodes or not all(map(is_tensor, node.all_input_nodes)) or not is_repeatable(node):
        return False
    if _is_cast(node):
        return True
    return is_tensor(node) and "out" not in node.kwargs and computes_each_element(name_of_pointwise(node))


def name_of_pointwise(node: fx.Node) -> str:
    """torch's name of the operation."""
    name = name_of(node).strip("_")
    return _SAME_AS.get(name, name)


def is_linear(node: fx.Node) -> bool:
    """Whether the gradients of a pointwise operation don't depend on the values of its inputs."""
    name = name_of_pointwise(node)
    if name in ("mul", "div"):
        # Only a product with, or a quotient by, a number is linear.
        return len(node.args) == 2 and not isinstance(node.args[1], fx.Node)
    return name in ("add", "sub", "neg") or _is_cast(node)


@functools.lru_cache(maxsize=4096)
def computes_each_element(name: str) -> bool:
    """Whether operations of that name compute each element from the elements at its position."""
    name = _SAME_AS.get(name, name)
    return name in _UNTAGGED or any(torch.Tag.pointwise in operation.tags for operation in schemas(name) or ())


def _is_cast(node: fx.Node) -> bool:
    """Whether the node only casts a tensor to another dtype."""
    if node.op != "call_method" or node.target not in _CASTS or node.kwargs:
        return False
    wanted = node.args[1:]
    return len(wanted) == 1 and isinstance(wanted[0], torch.dtype) if node.target == "to" else not wanted
