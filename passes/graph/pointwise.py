"""Operations that compute each element by itself, and groups of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from passes.graph.effects import is_repeatable
from passes.graph.match import is_stock, only_tensor
from passes.graph.operations import schemas
from passes.graph.program import Program, operation_name
from passes.graph.tracing import IS_TENSOR

# Names that Python's operators, and torch's functions in Python, have of operations that torch tags by another name.
_SAME_AS = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "floordiv": "floor_divide",
    "mod": "remainder", "and_": "bitwise_and", "or_": "bitwise_or", "xor": "bitwise_xor", "inv": "bitwise_not",
    "invert": "bitwise_not", "logsigmoid": "log_sigmoid",
}  # fmt: skip
# Composed of pointwise operations, which alone are tagged.
_COMPOSED = frozenset({"hardswish", "log_sigmoid", "softsign", "tanhshrink", "floor_divide", "rsub"})
_CASTS = frozenset({"float", "half", "bfloat16", "double", "to"})

# The functions of layers that compute each element by itself, with the attributes that these read.
_LAYERS: Mapping[type[nn.Module], tuple[Callable[..., Any], tuple[str, ...]]] = {
    nn.ReLU: (F.relu, ()),
    nn.ReLU6: (F.relu6, ()),
    nn.GELU: (F.gelu, ("approximate",)),
    nn.SiLU: (F.silu, ()),
    nn.Mish: (F.mish, ()),
    nn.Sigmoid: (torch.sigmoid, ()),
    nn.LogSigmoid: (F.logsigmoid, ()),
    nn.Tanh: (torch.tanh, ()),
    nn.Tanhshrink: (F.tanhshrink, ()),
    nn.Hardswish: (F.hardswish, ()),
    nn.Hardsigmoid: (F.hardsigmoid, ()),
    nn.Hardtanh: (F.hardtanh, ("min_val", "max_val")),
    nn.LeakyReLU: (F.leaky_relu, ("negative_slope",)),
    nn.ELU: (F.elu, ("alpha",)),
    nn.Softplus: (F.softplus, ("beta", "threshold")),
    nn.Softsign: (F.softsign, ()),
}


@dataclass(frozen=True)
class PointwiseGroup:
    """Nodes that compute one value element by element; the values of all others are used inside alone.

    Attributes:
        nodes: in the order of the forward; the last one gives the value.
        inputs: what comes in, in the order of its use.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]


def pointwise_groups(program: Program, graph: fx.Graph) -> Iterator[PointwiseGroup]:
    """The largest groups of two operations or more, in the order of the forward.

    A node is in the group of its users where these are all in one. Takes time linear in the nodes.
    """
    home: dict[fx.Node, fx.Node] = {}
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if not is_pointwise(program, node):
            continue
        homes = {home.get(user) for user in node.users}
        if len(homes) == 1 and None not in homes:
            home[node] = found = next(filter(None, homes))
            members[found].append(node)
        elif not _is_cast(node) and node.users:
            # What only casts may give what it is given: nobody outside is to be given that.
            home[node], members[node] = node, [node]
    for last in graph.nodes:
        nodes = tuple(reversed(members.get(last, ())))
        if sum(not _is_cast(node) for node in nodes) >= 2:
            inside = set(nodes)
            inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
            yield PointwiseGroup(nodes, tuple(inputs))


def is_pointwise(program: Program, node: fx.Node) -> bool:
    """Whether each element of the node's value, one tensor, is made of those at its place, and nothing else is done."""
    if not all(IS_TENSOR in source.meta or _is_layer(program, source) for source in node.all_input_nodes):
        return False
    if node.op == "call_module":
        return _is_layer(program, node)
    if node.op not in ("call_function", "call_method") or not is_repeatable(program, node) or not node.all_input_nodes:
        return False
    if _is_cast(node):
        return True
    return IS_TENSOR in node.meta and "out" not in node.kwargs and _is_tagged(name_of_pointwise(node))


def _is_layer(program: Program, node: fx.Node) -> bool:
    child = program.module_of(node)
    return child is not None and only_tensor(node) is not None and function_of(child) is not None


def name_of_pointwise(node: fx.Node) -> str:
    """What torch calls the operation."""
    name = operation_name(node).strip("_")
    return _SAME_AS.get(name, name)


def is_linear(node: fx.Node) -> bool:
    """Whether the gradients of what a pointwise operation is given don't depend on the numbers in that."""
    name = name_of_pointwise(node)
    if name in ("mul", "div"):
        # By a number: not one by the tensor.
        return len(node.args) == 2 and not isinstance(node.args[1], fx.Node)
    return name in ("add", "sub", "neg") or _is_cast(node)


def function_of(layer: nn.Module) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The function that a stock layer is of its one input, with its keyword arguments; None for other modules.

    None, too, for one that writes to its input.
    """
    if not is_stock(layer, tuple(_LAYERS)) or getattr(layer, "inplace", False):
        return None
    function, names = _LAYERS[type(layer)]
    return function, {name: getattr(layer, name) for name in names}


def attributes_of(layer: nn.Module) -> tuple[str, ...]:
    """The attributes that the function of a layer depends on."""
    return (*_LAYERS[type(layer)][1], *(("inplace",) if hasattr(layer, "inplace") else ()))


@functools.lru_cache(maxsize=4096)
def _is_tagged(name: str) -> bool:
    return name in _COMPOSED or any(torch.Tag.pointwise in operation.tags for operation in schemas(name) or ())


def _is_cast(node: fx.Node) -> bool:
    """Whether the node brings a tensor into another dtype, and to no other device."""
    if node.op != "call_method" or node.target not in _CASTS or node.kwargs:
        return False
    wanted = node.args[1:]
    return len(wanted) == 1 and isinstance(wanted[0], torch.dtype) if node.target == "to" else not wanted
