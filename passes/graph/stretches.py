"""Where values may keep the channels that padded layers add: from the layers that make them to those that take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx, nn

from passes.graph.capture import ModuleGraph, is_atom
from passes.graph.effects import is_dropout_off
from passes.graph.guards import FoldedConvForward, is_carried
from passes.graph.hooks import has_hooks
from passes.graph.match import is_stock
from passes.graph.padded import PaddedForward, wide_forward
from passes.graph.program import Program, operation_name
from passes.graph.tracing import IS_TENSOR

# They do to each number of a tensor what they do to any other, and give a tensor of its shape. What they make of zeros is all
# one: the layer that takes them puts zeros there again.
_MODULES: tuple[type[nn.Module], ...] = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_FUNCTIONS = frozenset({
    "abs", "celu", "clamp", "clip", "elu", "erf", "exp", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
    "leaky_relu", "log", "logsigmoid", "mish", "neg", "pow", "reciprocal", "relu", "relu6", "rsqrt", "selu", "sigmoid",
    "silu", "softplus", "softshrink", "softsign", "sqrt", "square", "tanh", "tanhshrink", "threshold",
    "add", "div", "mul", "sub", "truediv",
})  # fmt: skip


@dataclass(frozen=True)
class Stretch:
    """Operations of one graph between which values may keep the channels that were added.

    Attributes:
        nodes: all of them, in order.
        layers: for those that are padded layers, how many channels that were added they take, and how many they give.
        dims: how many dims there are behind that of the channels.
    """

    nodes: tuple[fx.Node, ...]
    layers: Mapping[fx.Node, tuple[int, int]]
    dims: int

    @property
    def links(self) -> int:
        """How often a layer takes what needn't be cut and padded."""
        return sum(taken > 0 for taken, _ in self.layers.values())


# How many channels a value has, how many are added to these, and how many dims there are behind them.
_Width = tuple[int, int, int]


def stretches_in(program: Program, home: ModuleGraph) -> Iterator[Stretch]:
    """The stretches of a graph that stands in for a forward; as long as they can be."""
    layers = {node: forward for node in home.graph.nodes if (forward := _layer_at(program, node)) is not None}
    wide: dict[fx.Node, _Width] = {}
    for node in home.graph.nodes:
        if node in layers:
            if layers[node].outputs:
                wide[node] = layers[node].made, layers[node].outputs, layers[node].dims
        elif (width := _common_width(node, wide)) is not None and _is_pointwise(program, node):
            wide[node] = width
    _leave_narrow(wide, layers)
    yield from _joined(home, wide, layers)


def _layer_at(program: Program, node: fx.Node) -> PaddedForward | None:
    module = program.module_of(node)
    forward = None if module is None else wide_forward(module)
    if module is None or forward is None or len(node.args) != 1 or node.kwargs or has_hooks(module):
        return None
    is_fed_sealed = isinstance(forward.inner, FoldedConvForward) and forward.inner.front is not None
    return None if is_fed_sealed or not isinstance(node.args[0], fx.Node) else forward


def _common_width(node: fx.Node, wide: Mapping[fx.Node, _Width]) -> _Width | None:
    widths = {wide.get(source) for source in node.all_input_nodes}
    return widths.pop() if len(widths) == 1 else None


def _leave_narrow(wide: dict[fx.Node, _Width], layers: Mapping[fx.Node, PaddedForward]) -> None:
    """Take out, one after the other, the values that somebody uses who needs their own channels alone."""

    def is_needless(node: fx.Node) -> bool:
        if node not in layers and _common_width(node, wide) != wide[node]:
            return True
        return not node.users or any(not _takes(user, wide[node]) for user in node.users)

    def _takes(user: fx.Node, width: _Width) -> bool:
        layer = layers.get(user)
        return user in wide if layer is None else (layer.given, layer.inputs, layer.dims) == width

    waiting = list(wide)
    while waiting:
        node = waiting.pop()
        if node in wide and is_needless(node):
            del wide[node]
            waiting += [other for other in (*node.all_input_nodes, *node.users) if other in wide]


def _joined(
    home: ModuleGraph, wide: Mapping[fx.Node, _Width], layers: Mapping[fx.Node, PaddedForward]
) -> Iterator[Stretch]:
    """The values that are left with those that take them: what hangs together is one stretch."""
    parents: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while parents.setdefault(node, node) is not node:
            parents[node] = node = parents[parents[node]]
        return node

    for node in wide:
        for user in node.users:
            parents[root(user)] = root(node)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in home.graph.nodes:
        if node in parents:
            groups.setdefault(root(node), []).append(node)
    for nodes in groups.values():
        sides = {
            node: (layers[node].inputs if node.args[0] in wide else 0, layers[node].outputs if node in wide else 0)
            for node in nodes
            if node in layers
        }
        yield Stretch(tuple(nodes), sides, layers[next(iter(sides))].dims)


def _is_pointwise(program: Program, node: fx.Node) -> bool:
    """Whether the operation does the same to each number of the values that it is given, and gives one of their shape."""
    module = program.module_of(node)
    if module is not None:
        return len(node.args) == 1 and not node.kwargs and _is_pointwise_module(program, module)
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs:
        return False
    others = (leaf for leaf in (*node.args, *node.kwargs.values()) if not isinstance(leaf, fx.Node))
    if not all(isinstance(leaf, bool | int | float | str | None) for leaf in others):
        return False
    name = operation_name(node)
    if name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        return is_dropout_off(node)
    plain = name.strip("_") if node.op == "call_function" else name.rstrip("_")
    return IS_TENSOR in node.meta and plain in _FUNCTIONS and _is_torchs(node)


def _is_torchs(node: fx.Node) -> bool:
    home = getattr(node.target, "__module__", None) or "torch"
    return node.op == "call_method" or home == "_operator" or home.startswith("torch")


def _is_pointwise_module(program: Program, module: nn.Module) -> bool:
    if has_hooks(module) or type(module).__call__ is not nn.Module.__call__:
        return False
    if is_carried(module):
        return True
    if is_atom(module):
        is_off = is_stock(module, _DROPOUTS) and not module.training
        return is_off or is_stock(module, _MODULES)
    inner = program.graphs.get(id(module))
    if inner is None or not inner.shows_every_call or inner.unwatched() is not None or "forward" in module.__dict__:
        return False
    first, *others, output = inner.graph.nodes
    if first.op != "placeholder" or not others or not inner.outputs.is_leaf() or output.args[0] != [others[-1]]:
        return False
    # An activation of the user's: each operation on the value of one before, or on the input.
    return all(node.op != "placeholder" and node.op != "get_attr" and _is_pointwise(program, node) for node in others)
