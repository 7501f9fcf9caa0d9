"""Fold BatchNorm, and products and sums by channel, into the convolution or linear layer next to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from passes.base import Context
from passes.tensor_interface import (
    Affine,
    BatchNorm,
    ChannelScale,
    Convolution,
    Pair,
    TensorPass,
    TensorRewriter,
    are_finite,
    exact,
    float64,
    scale_of,
)

# The number of elements of a weight that are computed in float64 at a time: 2 MiB.
_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class FoldConvBn(TensorPass):
    """Fold BatchNorm into the preceding convolution or linear layer, or otherwise into the following one.

    With running statistics, a BatchNorm scales and shifts each channel, by s = w / sqrt(var + eps) and
    t = c - mean * s:

        BatchNorm(conv(x; W) + b)  ==  conv(x; W * s over output channels) + b * s + t
        conv(BatchNorm(x); W) + b  ==  conv(x; W * s over input channels) + b + sum of W * t over all but the outputs

    The first equation also folds products and sums with a parameter or buffer that has one number per output channel,
    or one for all channels. It holds for transposed convolutions too. The new weights are computed in float64 and cast
    back once.

    The second equation is exact only if the convolution pads no zeros, because the padding would have to be -t / s.
    Operations between the two that only move values (transpose, permute, flatten, view, dropout in eval) stay in place.

    Does not handle:

    - a BatchNorm that uses batch statistics
    - a BatchNorm before a convolution that pads zeros or is transposed
    - a linear layer on inputs of more than two dims, unless an operation between the two moves its features to or from
      dim 1
    - products and sums with numbers that each call computes from parameters and buffers, as FrozenBatchNorm does
    - an output with other users
    - modules with hooks or parametrizations, and tensors that other code reads
    - folded weights that aren't finite, or that lose too much to rounding in float16 and bfloat16
    - calls under autocast, except that of `cast-precision` around the whole model
    """

    name: ClassVar[str] = "fold-conv-bn"
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    def rewrite(self, model: TensorRewriter, context: Context) -> None:
        """Fold every BatchNorm that can be folded."""
        # First fold into preceding layers: a BatchNorm that is folded there no longer precedes the next layer.
        for in_front in (False, True):
            for pair in model.pairs(in_front=in_front):
                if reason := _why_not(model, pair):
                    model.skip(pair.affine, reason)
                    continue
                weight, bias = folded_tensors(pair)
                what = f"folded into {model.where(pair.conv)}"
                if are_finite(weight, bias):
                    with model.change(pair.affine, what, pair):
                        model.fold(pair, weight, bias)
                else:
                    model.skip(pair.affine, f"{what} would give weights that aren't finite")
        model.skip_the_rest()


def _why_not(model: TensorRewriter, pair: Pair) -> str | None:
    norm, where = pair.affine, model.where(pair.conv)
    if isinstance(norm, BatchNorm) and norm.uses_batch_statistics:
        return "it uses the statistics of the batch"
    reason = _why_not_in_front(model, pair) if norm.leads else model.why_not(pair)
    if reason is None:
        return None
    return (
        f"it isn't folded into {where} after it: {reason}"
        if norm.leads
        else f"the convolution {where} is unchanged: {reason}"
    )


def _why_not_in_front(model: TensorRewriter, pair: Pair) -> str | None:
    if pair.conv.transposed:
        return "the outputs of a transposed convolution near the border are sums of fewer products"
    if pair.conv.pads:
        return "the zero padding between them would have to be shifted too"
    if model.is_tied(pair.affine):
        return "it was already folded with the convolution before it"
    return model.why_not(pair)


def folded_tensors(pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """The new weight, in the layout and dtype of the old one, and the new bias, (out,), of the layer."""
    conv, norm = pair.conv, pair.affine
    weight = conv.weight.value
    assert weight is not None
    scale, shift = _scale_and_shift(conv, norm)
    old = None if conv.bias_value is None else exact(conv.bias_value)
    if norm.leads:
        bias = torch.zeros(conv.channels, dtype=torch.float64, device=shift.device)
        bias = bias if old is None else bias + old
    else:
        bias = shift if old is None else shift + old * scale
    values = exact(weight)
    # `empty_like` keeps the strides, so a channels_last weight stays channels_last.
    new = torch.empty_like(values)
    for rows in _row_slices(values):
        # Most weights are small and need no slices.
        part, place = (values, new) if rows is None else (values[rows], new[rows])
        place.copy_(exact(part) * _factors(conv, norm, scale, rows))
        if norm.leads:
            sums = (exact(part) * _factors(conv, norm, shift, rows)).flatten(1).sum(1)
            bias[slice(None) if rows is None else rows] += sums
    return new, bias.to(weight)


def _scale_and_shift(conv: Convolution, affine: Affine) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of each channel, and the shift that is added afterwards, both (channels,) in float64."""
    if isinstance(affine, ChannelScale):
        return _scale_or_shift(conv, affine)
    assert affine.mean is not None
    assert affine.mean.value is not None
    scale = scale_of(affine)
    if affine.weight is not None and (gain := affine.weight.value) is not None:
        scale = scale * exact(gain)
    shift = -scale * exact(affine.mean.value)
    if affine.bias is not None and (offset := affine.bias.value) is not None:
        shift = shift + exact(offset)
    return scale, shift


def _scale_or_shift(conv: Convolution, affine: ChannelScale) -> tuple[torch.Tensor, torch.Tensor]:
    assert affine.tensor.value is not None
    value = float64(affine.tensor.value).reshape(-1).expand(conv.channels)
    ones, zeros = torch.ones_like(value), torch.zeros_like(value)
    if affine.operation == "mul":
        return value, zeros
    if affine.operation == "div":
        return ones / value, zeros
    if affine.operation == "rsub":
        return -ones, value
    return ones, -value if affine.operation == "sub" else value


def _row_slices(weight: torch.Tensor) -> Sequence[slice | None]:
    """Slices of the rows of a large weight, to limit the memory for float64; None means the whole of a small weight."""
    count = max(1, _ELEMENTS * len(weight) // max(1, weight.numel()))
    if count >= len(weight):
        return (None,)
    return [slice(start, start + count) for start in range(0, len(weight), count)]


def _factors(conv: Convolution, norm: Affine, values: torch.Tensor, rows: slice | None) -> torch.Tensor:
    """The per-channel numbers of a BatchNorm, (channels,), in a shape that broadcasts with some rows of the weight."""
    weight = conv.weight.value
    assert weight is not None
    if norm.leads != conv.transposed:
        # The channels are in dim 1 of the weight: the rows of group g belong to the g-th block of channels.
        values = values.reshape(conv.groups, 1, -1).expand(-1, len(weight) // conv.groups, -1).flatten(0, 1)
    found = values if rows is None else values[rows]
    return found.reshape(*found.shape, *[1] * (weight.dim() - found.dim()))
