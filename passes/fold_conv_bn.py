"""BatchNorm(conv(x)) == conv'(x), so are scale * conv(x) + shift, and conv(BatchNorm(x)) where no zeros are padded."""

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

# How much of a weight is computed in float64 at a time: 2 MiB.
_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class FoldConvBn(TensorPass):
    """Fold a BatchNorm into the convolution, transposed convolution or linear layer before it, or else behind it.

    On running statistics a BatchNorm is a scale and a shift of each channel, s = w / sqrt(var + eps) and
    t = c - mean * s:

        BatchNorm(conv(x; W) + b)  ==  conv(x; W * s over output channels) + b * s + t
        conv(BatchNorm(x); W) + b  ==  conv(x; W * s over input channels) + b + sum of W * t over all but the outputs

    Products and sums with a parameter or buffer that has one number for each output channel, or one for all, go the
    first way too. Computed in float64 and cast back once.

    The second is exact only where the convolution pads no zeros, which would have to be -t / s. Operations between the
    two that only move values (transpose, permute, flatten, view, dropout in eval) stay where they are.

    Does not handle: a BatchNorm on batch statistics, one in front of a convolution that pads zeros or is transposed, a
    linear layer on input of more than two dims whose features nothing brings to the second, an output with other users,
    modules with hooks or parametrizations, tensors that something else reads, folded weights that aren't finite or, in
    float16 and bfloat16, lose too much to rounding, anything under autocast.
    """

    name: ClassVar[str] = "fold-conv-bn"
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    def rewrite(self, model: TensorRewriter, context: Context) -> None:
        """Fold every BatchNorm that can be folded."""
        # Those behind a layer first: what is folded there is no BatchNorm in front of the next one any more.
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
    """Weight, in the layout and dtype of the old one, and bias, (out,), of the layer that does both."""
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
    # `empty_like` keeps the strides, and with them a channels_last layout.
    new = torch.empty_like(values)
    for rows in _row_slices(values):
        # Most weights are small, and taken whole.
        part, place = (values, new) if rows is None else (values[rows], new[rows])
        place.copy_(exact(part) * _factors(conv, norm, scale, rows))
        if norm.leads:
            sums = (exact(part) * _factors(conv, norm, shift, rows)).flatten(1).sum(1)
            bias[slice(None) if rows is None else rows] += sums
    return new, bias.to(weight)


def _scale_and_shift(conv: Convolution, affine: Affine) -> tuple[torch.Tensor, torch.Tensor]:
    """What each channel is multiplied by, and what is added to it then, both (channels,) in float64."""
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
    """The rows of a large weight in slices, of which little is in float64 at a time; None for all of a small one."""
    count = max(1, _ELEMENTS * len(weight) // max(1, weight.numel()))
    if count >= len(weight):
        return (None,)
    return [slice(start, start + count) for start in range(0, len(weight), count)]


def _factors(conv: Convolution, norm: Affine, values: torch.Tensor, rows: slice | None) -> torch.Tensor:
    """Of one number for each channel of the BatchNorm, (channels,), those that belong to some rows of the weight."""
    weight = conv.weight.value
    assert weight is not None
    if norm.leads != conv.transposed:
        # Its columns are the channels: the rows of group g go with the g-th run of them.
        values = values.reshape(conv.groups, 1, -1).expand(-1, len(weight) // conv.groups, -1).flatten(0, 1)
    found = values if rows is None else values[rows]
    return found.reshape(*found.shape, *[1] * (weight.dim() - found.dim()))
