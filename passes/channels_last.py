"""Run convolutions in channels_last, the memory format that their kernels prefer."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.nn.parameter import is_lazy

from passes.base import Context, Skip
from passes.graph.layouts import CONTIGUOUS, EITHER, LAST, kind_of
from passes.graph_interface import (
    CHANNELS_LAST_FORMATS,
    Example,
    GraphPass,
    GraphRewriter,
    Layer,
    Layers,
    ModelTree,
    Node,
    Recording,
    is_channels_last,
    layout_of,
    operation_name,
)
from passes.module_interface import batch_norm_arguments, call_of, convolution_arguments, shape_of, tensor_of
from passes.torch_private import convolution_kernel

_CONVOLUTIONS = ("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d")
# The key in `node.meta` for the input of a convolution that stays contiguous.
_KEPT = "optimize_export_kept_contiguous"


def _convolutions_of(recording: Recording) -> list[Node]:
    return [node for node in recording.nodes() if operation_name(node) in _CONVOLUTIONS and convolution_arguments(node)]


@dataclass(frozen=True)
class ChannelsLast(GraphPass):
    """Run 2-D and 3-D convolutions in channels_last, and return outputs in their original memory format.

    The weights are converted: as tensors derived from the parameters, which stay as they are. A convolution with such a
    weight returns its output in channels_last, and pointwise operations, BatchNorm and pooling keep the format. So
    everything from the first convolution on runs in it.

    Where the old strides show, a value is copied to them: in the outputs of a graph, for random numbers, which fill
    memory in its order, and for operations such as `as_strided`, or a `view` that fails. Inputs are converted by the
    convolutions that read them. The caller's tensor stays as it is. The `remarks` of the pass name the operations that
    lose channels_last, and the convolutions that convert again.

    On a CPU, convolutions with large weights and small feature maps stay in contiguous format. Kernels for
    channels_last repack the weight at every call, and there that costs more than it saves. The map sizes are those of
    the example inputs. The kernels are those that torch selects for them with the current number of threads.

    On a CPU, torch's BatchNorm on batch statistics is less exact in channels_last than in contiguous format. So the
    parity check may refuse a model that has one, and then the pass is taken back.

    In training, each call converts the weights, and keeps the copies until the backward pass. The parameters keep their
    memory format, and their gradients have it too. A copy costs more than packing alone, so on a CPU more convolutions
    with large weights on small maps stay in contiguous format.

    Does not handle:

    - what torch.compile can't capture, and weights that depend on the inputs
    - training steps under the plan of insert-checkpoints, which runs the forward as it was written

    Without example inputs it changes nothing: only a run shows the sizes of the maps.
    """

    name: ClassVar[str] = "channels-last"
    needs_run: ClassVar[str] = ""

    VALID: ClassVar[Sequence[Example]] = (
        Example("conv(x)", (2, 3, 12, 12), {"conv": "nn.Conv2d(3, 8, 3)"}),
        Example("conv(x).view(len(x), -1)", (2, 3, 12, 12), {"conv": "nn.Conv2d(3, 8, 3)"}),
    )
    REFUSED: ClassVar[Sequence[Example]] = (
        Example(
            "F.conv2d(x, conv.weight * x.mean())",
            (2, 3, 12, 12),
            {"conv": "nn.Conv2d(3, 8, 3)"},
            "depends on the inputs",
        ),
        Example("conv(x)", (2, 16, 4, 4), {"conv": "nn.Conv2d(16, 64, 3)"}, "its weight is large"),
    )

    def is_for(self, recording: Recording) -> bool:
        """Whether channels_last may pay for a convolution of the run, by the sizes of its maps."""
        costs, is_free = [], []
        for node in _convolutions_of(recording):
            weight, maps = _weight_and_maps(node)
            if weight is None or maps is None or weight.device.type != "cpu":
                return True
            if _why_no_format(weight):
                continue
            is_free.append(not is_channels_last(weight))
            costs.append(_costs_of(_recorded_kernel(node, weight, maps[0]), weight, *maps, is_free=is_free[-1]))
            if is_free[-1] and _is_one_place(*maps, weight.dim() - 2):
                return True
        formats = cheapest_formats(costs)
        return any(is_last and free for is_last, free in zip(formats, is_free, strict=True))

    def left_out(self, tree: ModelTree, recording: Recording) -> list[Skip]:
        """See `GraphPass.left_out`."""
        found = []
        for node in _convolutions_of(recording):
            weight, maps = _weight_and_maps(node)
            if weight is None or maps is None or (weight.layout is torch.strided and is_channels_last(weight)):
                continue
            if not (reason := _why_no_format(weight)):
                kernel = _recorded_kernel(node, weight, maps[0])
                reason = _why_dear(_costs_of(kernel, weight, *maps, is_free=True), kernel)
            found.append(Skip(tree.path(call_of(node).module), reason))
        return found

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        """Convert the weights for which it is possible and pays."""
        layers, convolutions = Layers(graph), list[Layer]()
        for node in graph.calls(*_CONVOLUTIONS):
            layer = layers.layer_at(node)
            if layer is None:
                graph.skip(node, "its weight depends on the inputs of the forward, or is computed with side effects")
            else:
                convolutions.append(layer)
        reasons = {layer.node: _why_not(graph, layers, layer) for layer in convolutions}
        dear = _too_dear(graph, convolutions, reasons) if context.device.type == "cpu" else {}
        converted = [layer for layer in convolutions if reasons[layer.node] is None and layer.node not in dear]
        changed = []
        for layer in convolutions:
            if reason := reasons[layer.node]:
                graph.skip(layer.node, reason)
            elif layer.node in dear and not converted:
                graph.skip(layer.node, dear[layer.node])
            elif layer.node in dear or reasons[layer.node] is None:
                changed += _changed(graph, layers, layer, layer.node in dear)
        copies = graph.settle(changed)
        if changed:
            kept = {user for node in graph.nodes if _KEPT in node.meta for user in (node, *node.users)}
            for where, loss in _losses_in(graph, kept, copies).items():
                graph.remark(where, str(loss))


# Judge ----------------------------------------------------------------------------------------------------------------


def _why_not(graph: GraphRewriter, layers: Layers, layer: Layer) -> str | None:
    """The reason why the weight can't be converted; "" if it needs no change, None to convert it."""
    own = graph.value(layer.weight)
    if own is not None and (reason := _why_no_format(own)):
        return reason
    weight = graph.laid_out(layer.weight)
    if weight is None:
        return "its weight has no known strides"
    if is_channels_last(weight) or _is_kept(layer):
        return ""
    return layers.why_not_constant(layer)


def _is_kept(layer: Layer) -> bool:
    return _KEPT in layer.input.meta


def _too_dear(
    graph: GraphRewriter, convolutions: Sequence[Layer], reasons: Mapping[Node, str | None]
) -> dict[Node, str]:
    """The convolutions that are faster in contiguous format, each with the reason: see `cheapest_formats`.

    Convolutions on maps with one position, as in squeeze-and-excitation, are left out: such maps are in both formats.
    """
    layers, is_training = {layer.node: layer for layer in convolutions}, graph.mode == "training"
    steps, costs, kernels = list[Node](), list[Costs](), list[str]()
    for node in graph.calls():
        layer, made = layers.get(node), graph.laid_out(node)
        kernel = ""
        if layer is not None:
            given, weight = map(graph.laid_out, (layer.input, layer.weight))
            if given is None or made is None or weight is None or _is_one_place(given, made, layer.dims):
                continue
            kernel = _kernel_of(layer.arguments, weight, given.shape, layer.transposed)
            is_free = reasons[node] is None
            if _is_kept(layer):
                cost = Costs(math.inf, 0, given.numel())
            else:
                cost = _costs_of(kernel, weight, given, made, is_free=is_free, is_training=is_training)
        elif is_training and made is not None and batch_norm_arguments(node) is not None:
            # Measured: with its backward pass, it takes twice as long on contiguous maps.
            cost = Costs(0, made.numel(), math.inf)
        else:
            continue
        steps.append(node)
        kernels.append(kernel)
        costs.append(cost)
    return {
        node: _why_dear(cost, kernel)
        for node, cost, kernel, is_last in zip(steps, costs, kernels, cheapest_formats(costs), strict=True)
        if not is_last and node in layers and not _is_kept(layers[node])
    }


def _weight_and_maps(node: Node) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
    """The weight of a recorded convolution, and its input and output as meta tensors; None where one isn't known."""
    named: Any = convolution_arguments(node)
    ref, given, made = tensor_of(named["weight"]), shape_of(named["input"]), shape_of(node)
    weight = None if ref is None else ref.value
    if given is None or made is None:
        return weight, None
    return weight, (torch.empty(given.sizes, device="meta"), torch.empty(made.sizes, device="meta"))


def _recorded_kernel(node: Node, weight: torch.Tensor, given: torch.Tensor) -> str:
    named: Any = convolution_arguments(node)
    return _kernel_of(named, weight, given.shape, "transpose" in operation_name(node))


def _is_one_place(given: torch.Tensor, made: torch.Tensor, dims: int) -> bool:
    return all(one.shape[-dims:].numel() == 1 for one in (given, made))


# What it costs on a CPU, as numbers of moved elements ------------------------------------------------------------------

# Kernels that read a channels_last weight without packing it.
_READING_CHANNELS_LAST = frozenset({"Slow2d", "SlowDilated2d", "SlowTranspose2d"})
# Kernels that return contiguous maps for inputs in any format.
_CONTIGUOUS_KERNELS = frozenset({"Slow3d", "SlowDilated3d", "SlowTranspose3d"})


@dataclass(frozen=True)
class Costs:
    """The cost of one convolution, or BatchNorm in training, as a number of moved elements."""

    channels_last: float  # the cost in channels_last
    contiguous: float  # the cost in contiguous format
    change: float  # the cost of converting its input from one format to the other


def cheapest_formats(costs: Sequence[Costs]) -> list[bool]:
    """For each layer, in the order of execution, whether it is in channels_last in the cheapest run.

    In channels_last, oneDNN packs the weight at every call, in a slow way. In contiguous format, it converts the input
    to a blocked layout and the output back. Measured on a ResNet-50, both take equally long for equal numbers of
    elements. torch's own kernels, which it selects for small inputs, pack nothing. Between two convolutions of
    different formats, the input is converted. The cheapest formats for the whole run are the shortest path through two
    states per convolution.
    """
    # The costs of the cheapest runs up to here that end in contiguous format and in channels_last. `origins` has, for
    # each layer and each of these ends, whether the layer before it is in channels_last.
    totals = (0.0, math.inf)
    origins: list[tuple[bool, bool]] = []
    for cost in costs:
        contiguous, last = totals
        origin = (last + cost.change < contiguous, last <= contiguous + cost.change)
        origins.append(origin)
        totals = (
            min(contiguous, last + cost.change) + cost.contiguous,
            min(last, contiguous + cost.change) + cost.channels_last,
        )
    is_last = totals[1] <= totals[0]
    formats = []
    for origin in reversed(origins):
        formats.append(is_last)
        is_last = origin[is_last]
    return formats[::-1]


def _why_dear(cost: Costs, kernel: str) -> str:
    """Why a convolution with this cost, which this kernel computes, is contiguous in the cheapest run."""
    if kernel in _CONTIGUOUS_KERNELS:
        return "its kernel returns contiguous maps for inputs in any format"
    if cost.channels_last > cost.contiguous:
        return "its weight is large compared with its maps: channels_last would cost more at every call than it saves"
    return (
        "the convolutions around it are faster in contiguous format, and converting between the formats would cost more "
        "than it saves"
    )


def _kernel_of(named: Mapping[str, Any], weight: torch.Tensor, given: torch.Size, transposed: bool) -> str:
    """The name of the kernel that torch selects for an input of this shape.

    Args:
        named: the further arguments of the convolution by name; those left to their defaults may be missing.
    """
    dims = weight.dim() - 2
    batched = given if len(given) == weight.dim() else (1, *given)

    def each(name: str, default: int) -> list[int]:
        value = named.get(name, default)
        return [value] * dims if isinstance(value, int) else list(value)

    dilation = each("dilation", 1)
    padding = named.get("padding", 0)
    if padding == "same":
        padding = [step * (size - 1) // 2 for step, size in zip(dilation, weight.shape[2:], strict=True)]
    no_values = torch.empty((), dtype=weight.dtype)
    return convolution_kernel(
        no_values.expand(batched),
        no_values.expand(weight.shape),
        stride=each("stride", 1),
        padding=[0] * dims if padding == "valid" else [padding] * dims if isinstance(padding, int) else list(padding),
        dilation=dilation,
        transposed=transposed,
        output_padding=each("output_padding", 0),
        groups=named.get("groups", 1),
    )


def _why_no_format(weight: torch.Tensor) -> str | None:
    """The reason why a weight has no memory format, as a clause; None if it has one."""
    if is_lazy(weight):
        return "its weight is not initialised yet: run the model once first"
    if kind := kind_of(weight):
        return f"its weight is {kind}"
    return None


def _costs_of(
    kernel: str,
    weight: torch.Tensor,
    given: torch.Tensor,
    made: torch.Tensor,
    *,
    is_free: bool,
    is_training: bool = False,
) -> Costs:
    """The costs of a convolution; one that isn't free has the format of its weight."""
    both = given.numel() + made.numel()
    if kernel in _CONTIGUOUS_KERNELS and is_free:
        return Costs(2 * both, 0, given.numel())
    moved = 0 if kernel in _READING_CHANNELS_LAST else weight.numel()
    if is_training:
        # The weight is copied for the forward and the backward pass, and so is its gradient; packing takes most of it.
        moved = 0 if weight[0, 0].numel() == 1 else max(4 * moved, weight.numel())
    return Costs(moved, both if is_free else math.inf, given.numel())


# Rewrite --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _InChannelsLast:
    """Returns a weight in channels_last; without a copy if its values lie alike in both formats."""

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        memory_format = CHANNELS_LAST_FORMATS[weight.dim()]
        if weight.is_contiguous(memory_format=memory_format):
            # A convolution takes its format from the strides of its weight, and `contiguous` wouldn't change these.
            count, channels, *kernel = weight.shape
            return weight.view(count, *kernel, channels).movedim(-1, 1)
        return weight.contiguous(memory_format=memory_format)


def _changed(graph: GraphRewriter, layers: Layers, layer: Layer, is_dear: bool) -> list[Node]:
    """Convert the weight, or make the input contiguous if that is cheaper; returns the node if one was done.

    A graph for other sizes may find another format cheaper than the one in which the convolution was proven. It gets
    the latter.
    """
    for keep in (is_dear, not is_dear):
        if (_keep_contiguous if keep else _convert)(graph, layers, layer):
            return [layer.node]
    return []


def _convert(graph: GraphRewriter, layers: Layers, layer: Layer) -> bool:
    memory_format = CHANNELS_LAST_FORMATS[layer.dims + 2]
    what = f"weight in {str(memory_format).removeprefix('torch.')}"
    with graph.change(layer.node, what) as change:
        source = layers.derived_from(layer.weight)
        weight = graph.derived(layer.node, _InChannelsLast(), source, what=what, in_autocast=False)
        graph.redirect(layer.node, layer.weight, weight)
        graph.drop_unused(layer.weight)
    return not change.left_alone


def _keep_contiguous(graph: GraphRewriter, layers: Layers, layer: Layer) -> bool:
    # torch chooses the format of a convolution by its input as well as by its weight.
    with graph.change(layer.node, "kept in contiguous format") as change:
        value = graph.call(layer.node, "contiguous", (layer.input,))
        value.meta[_KEPT] = True
        graph.redirect(layer.node, layer.input, value)
    return not change.left_alone


@dataclass
class _Loss:
    """An operation that returns feature maps in contiguous format, which convolutions convert back."""

    elements: int = 0  # the number of elements of these maps, over all calls
    converted: int = 0  # the number of elements that later convolutions convert back to channels_last
    convolutions: dict[str, None] = field(default_factory=dict)  # the paths of these convolutions

    def __str__(self) -> str:
        first, *others = self.convolutions
        which = f"{first} and {len(others)} more" if others else first
        back = f"{which} convert{'' if others else 's'} {self.converted:,} elements back"
        return f"channels_last is lost here for {self.elements:,} elements: {back}"


def _losses_in(graph: GraphRewriter, kept: Collection[Node], copies: Mapping[Node, Node]) -> dict[str, _Loss]:
    """The losses by the path of the module and the operation, those with the most converted elements first.

    Args:
        kept: values that are contiguous on purpose, like everything that is computed from them.
        copies: the copies that `GraphRewriter.settle` made, each with the operation that needs it.
    """
    found: dict[str, _Loss] = {}
    values = {node: value for node in graph.nodes if (value := graph.laid_out(node)) is not None}
    # The loss that a contiguous map comes from, and the rank of the channels_last map that a value is computed from.
    lost: dict[Node, _Loss] = {}
    ranks: dict[Node, int] = {}
    meant = set(kept)
    for node, value in values.items():
        layout = layout_of(value)
        if graph.name_of(node) in _CONVOLUTIONS and (loss := lost.get(graph.argument(node, 0, "input"))):
            weight = values.get(graph.argument(node, 1, "weight"))
            if weight is not None and is_channels_last(weight):
                loss.converted += values[graph.argument(node, 0, "input")].numel()
                loss.convolutions[graph.path_of(node) or "the root"] = None
        if node in meant or (layout == CONTIGUOUS and not meant.isdisjoint(node.all_input_nodes)):
            meant.add(node)
        elif layout == LAST:
            ranks[node] = value.dim()
        elif value.dim() > 2 and layout != EITHER and (before := [s for s in node.all_input_nodes if s in ranks]):
            ranks[node] = ranks[before[0]]
            if layout == CONTIGUOUS and value.dim() == ranks[node]:
                user = copies.get(node, node)
                where = f"{graph.path_of(user) or 'the root'} ({graph.name_of(user)})"
                known = (lost[source] for source in node.all_input_nodes if source in lost)
                if (loss := next(known, None)) is None:
                    loss = found.setdefault(where, _Loss())
                    loss.elements += value.numel()
                lost[node] = loss
    losses = sorted(found.items(), key=lambda item: (-item[1].converted, -item[1].elements))
    return {where: loss for where, loss in losses if loss.converted}
