"""Fold BatchNorm, and products and sums by channel, into the convolution or linear layer next to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from passes.base import Context
from passes.graph_interface import (
    Affine,
    BatchNorm,
    ChannelScale,
    Example,
    GraphPass,
    GraphRewriter,
    Layer,
    Layers,
    Node,
    Pair,
    RecordedLayers,
    Recording,
    exact,
    float64,
    operation_name,
    why_not_finite,
)

# The number of elements of a weight that are computed in float64 at a time: 2 MiB.
_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class FoldConvBn(GraphPass):
    """Fold BatchNorm into the preceding convolution or linear layer, or otherwise into the following one.

    With running statistics, a BatchNorm scales and shifts each channel, by s = w / sqrt(var + eps) and
    t = c - mean * s:

        BatchNorm(conv(x; W) + b)  ==  conv(x; W * s over output channels) + b * s + t
        conv(BatchNorm(x); W) + b  ==  conv(x; W * s over input channels) + b + sum of W * t over all but the outputs

    The first equation also folds products and sums with constant numbers, one per output channel or one for all, as in
    FrozenBatchNorm. Constant are parameters and buffers, and values that are computed from them only. The equation
    holds for transposed convolutions too. The new weights are computed in float64 and cast back once. They are derived
    tensors: the parameters stay as they are, and the new weights are computed again when the parameters change.

    The second equation is exact only if the convolution pads no zeros, because the padding would have to be -t / s.
    Operations between the two that only move values (transpose, permute, flatten, view, dropout in eval) stay in place.

    Does not handle:

    - a BatchNorm that uses batch statistics
    - a BatchNorm before a convolution that pads zeros or is transposed
    - a linear layer on inputs of more than two dims, unless an operation between the two moves its features to or from
      dim 1
    - an output with other users
    - tensors that the forward may write to, and tensors of other classes than torch's own
    - folded weights that aren't finite, or that lose too much to rounding in float16 and bfloat16
    - calls under autocast, except that of `cast-precision` around the whole model
    """

    name: ClassVar[str] = "fold-conv-bn"
    # In the preset, which also takes models without example inputs.
    needs_run: ClassVar[str] = ""
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    VALID: ClassVar[Sequence[Example]] = (
        Example("norm(conv(x))", (2, 3, 8, 8), {"conv": "nn.Conv2d(3, 8, 3)", "norm": "nn.BatchNorm2d(8)"}),
        Example("conv(norm(x))", (2, 3, 8, 8), {"conv": "nn.Conv2d(3, 8, 3)", "norm": "nn.BatchNorm2d(3)"}),
        Example(
            "conv(x) * scale", (2, 3, 8), {"conv": "nn.Conv1d(3, 8, 3)", "scale": "nn.Parameter(torch.rand(8, 1))"}
        ),
        Example(
            "norm(linear(x).transpose(1, 2))", (2, 5, 3), {"linear": "nn.Linear(3, 8)", "norm": "nn.BatchNorm1d(8)"}
        ),
    )
    REFUSED: ClassVar[Sequence[Example]] = (
        Example(
            "conv(norm(x))",
            (2, 3, 8, 8),
            {"conv": "nn.Conv2d(3, 8, 3, padding=1)", "norm": "nn.BatchNorm2d(3)"},
            "the zero padding between them would have to be shifted too",
        ),
        Example(
            "norm(conv(x))",
            (2, 3, 8, 8),
            {"conv": "nn.Conv2d(3, 8, 3)", "norm": "nn.BatchNorm2d(8, track_running_stats=False)"},
            "it uses the statistics of the batch",
        ),
        Example(
            "(y := conv(x)) + norm(y)",
            (2, 3, 8, 8),
            {"conv": "nn.Conv2d(3, 8, 3)", "norm": "nn.BatchNorm2d(8)"},
            "its output is also used by",
        ),
    )

    def is_for(self, recording: Recording) -> bool:
        """See `GraphPass.is_for`."""
        layers = RecordedLayers(recording.graph)
        return any(
            operation_name(node) == "batch_norm" or ((scale := layers.scale_at(node)) and layers.layer_before(scale))
            for node in recording.nodes()
        )

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        """Fold every BatchNorm, product and sum that can be folded."""
        layers = Layers(graph)
        reasons: dict[Node, str] = {}
        for node in graph.calls():
            if (affine := layers.affine_at(node)) is None:
                continue
            pair = layers.pair_before(affine)
            reason = _why_not(graph, layers, pair) if pair else ""
            if pair and reason is None:
                _fold(graph, layers, pair)
            else:
                reasons[node] = reason or ""
        # From the last one to the first, so that several in a row reach the layer after them.
        for node in reversed([*reasons]):
            norm = layers.batch_norm_at(node)
            pair = layers.pair_after(norm) if norm else None
            if pair is None:
                continue
            reason = _why_not(graph, layers, pair)
            if reason is None:
                _fold(graph, layers, pair)
                del reasons[node]
            else:
                reasons[node] = reasons[node] or reason
        for node in graph.calls():
            if reason := reasons.get(node) or layers.why_alone(node):
                graph.skip(node, reason)
            elif node in reasons and (affine := layers.affine_at(node)) is not None:
                graph.explain(node, layers.why_unmatched(affine))


# Judge ----------------------------------------------------------------------------------------------------------------


def _why_not(graph: GraphRewriter, layers: Layers, pair: Pair) -> str | None:
    affine, where = pair.affine, graph.where(pair.layer.node)
    if isinstance(affine, BatchNorm) and (affine.uses_batch_statistics or affine.mean is None or affine.var is None):
        return "it uses the statistics of the batch"
    reason = _why_not_after(pair) if pair.affine_first else None
    reason = reason or layers.why_not(pair) or layers.why_not_derived(pair.layer, affine)
    if reason is None:
        return None
    return (
        f"it isn't folded into {where} after it: {reason}" if pair.affine_first else f"{where} is unchanged: {reason}"
    )


def _why_not_after(pair: Pair) -> str | None:
    if pair.layer.transposed:
        return "the outputs of a transposed convolution near the border are sums of fewer products"
    return "the zero padding between them would have to be shifted too" if pair.layer.pads else None


# Rewrite --------------------------------------------------------------------------------------------------------------


def _fold(graph: GraphRewriter, layers: Layers, pair: Pair) -> None:
    layer = pair.layer
    with graph.change(pair.affine.node, f"folded into {graph.where(layer.node)}"):
        numbers, tensors = _numbers_of(pair.affine, layer)
        weight, *sources = map(layers.derived_from, (layer.weight, *tensors))
        folded = FoldedWeight(numbers, layer.transposed, layer.groups, pair.affine_first)
        new_weight = layer.weight
        if not numbers.shifts_only:
            new_weight = _derived(graph, layer.node, folded, weight, *sources, what="the folded weight")
        if layer.bias is not None:
            sources = [layers.derived_from(layer.bias), *sources]
        folded_bias = FoldedBias(folded, layer.bias is not None)
        new_bias = _derived(graph, layer.node, folded_bias, weight, *sources, what="the folded bias")
        layers.replace(pair.way[-1], layers.without_affine(pair, weight=new_weight, bias=new_bias))


def _derived(
    graph: GraphRewriter, layer: Node, function: Callable[..., torch.Tensor], *sources: Node, what: str
) -> Node:
    return graph.derived(layer, function, *sources, what=what, usable=why_not_finite, in_autocast=False)


def _numbers_of(affine: Affine, layer: Layer) -> tuple[Numbers, Sequence[Node]]:
    if isinstance(affine, ChannelScale):
        return ScaleNumbers(affine.operation, layer.channels), [affine.numbers]
    numbers = NormNumbers(affine.eps, affine.weight is not None, affine.bias is not None)
    return numbers, list(affine.tensors.values())


@dataclass(frozen=True)
class NormNumbers:
    """The scale of each channel, and the shift that is added afterwards, both (channels,) in float64, of a BatchNorm."""

    eps: float
    has_weight: bool
    has_bias: bool

    shifts_only: ClassVar[bool] = False

    def __call__(
        self, mean: torch.Tensor, var: torch.Tensor, *affine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute both from the BatchNorm's statistics, and its weight and bias as far as it has them."""
        scale = (float64(var) + self.eps).rsqrt()
        if self.has_weight:
            scale = scale * exact(affine[0])
        shift = -scale * exact(mean)
        return scale, shift + exact(affine[-1]) if self.has_bias else shift


@dataclass(frozen=True)
class ScaleNumbers:
    """As `NormNumbers`, of a product or sum."""

    operation: str
    channels: int

    @property
    def shifts_only(self) -> bool:
        """Whether each scale is 1."""
        return self.operation in ("add", "sub")

    def __call__(self, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute both from the other operand of the product or sum."""
        value = float64(other).reshape(-1).expand(self.channels)
        ones, zeros = torch.ones_like(value), torch.zeros_like(value)
        if self.operation == "mul":
            return value, zeros
        if self.operation == "div":
            return ones / value, zeros
        if self.operation == "rsub":
            return -ones, value
        return ones, -value if self.operation == "sub" else value


Numbers = NormNumbers | ScaleNumbers


@dataclass(frozen=True)
class FoldedWeight:
    """Computes the new weight of a layer, in the layout and dtype of the old one."""

    numbers: Numbers  # computes the scale and the shift of each channel
    # transposed, groups: as in `Layer`
    transposed: bool
    groups: int
    affine_first: bool  # whether the channels are the layer's inputs, and not its outputs

    def __call__(self, weight: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Scale the weight by channel."""
        scale, _ = self.numbers(*tensors)
        # `empty_like` keeps the strides, so a channels_last weight stays channels_last.
        new, old = torch.empty_like(weight), exact(weight)
        for rows in _row_slices(weight):
            new[rows].copy_(old[rows] * self.factors(scale, weight, rows))
        return new

    def factors(self, values: torch.Tensor, weight: torch.Tensor, rows: slice) -> torch.Tensor:
        """Numbers by channel, (channels,), in a shape that broadcasts with some rows of the weight."""
        if self.affine_first != self.transposed:
            # The channels are in dim 1 of the weight: the rows of group g belong to the g-th block of channels.
            values = values.reshape(self.groups, 1, -1).expand(-1, len(weight) // self.groups, -1).flatten(0, 1)
        values = values[rows]
        return values.reshape(*values.shape, *[1] * (weight.dim() - values.dim()))


@dataclass(frozen=True)
class FoldedBias:
    """Computes the new bias of a layer, (out,), in the dtype of its weight."""

    weight: FoldedWeight
    has_bias: bool

    def __call__(self, weight: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Scale and shift the bias. The tensors are the old bias, if there is one, and those of the numbers."""
        old, tensors = (exact(tensors[0]), tensors[1:]) if self.has_bias else (None, tensors)
        scale, shift = self.weight.numbers(*tensors)
        if not self.weight.affine_first:
            bias = shift if old is None else shift + old * scale
            return bias.to(weight)
        values = exact(weight)
        products = (values[rows] * self.weight.factors(shift, weight, rows) for rows in _row_slices(weight))
        bias = torch.cat([product.flatten(1).sum(1) for product in products])
        return (bias if old is None else bias + old).to(weight)


def _row_slices(weight: torch.Tensor) -> Sequence[slice]:
    """Slices of the rows of a weight, to limit the memory for float64."""
    count = max(1, _ELEMENTS * len(weight) // max(1, weight.numel()))
    return [slice(start, start + count) for start in range(0, len(weight), count)]
