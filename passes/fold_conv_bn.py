"""BatchNorm(conv(x)) == conv'(x), with the scale of the one in the weights of the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from passes.base import GraphPass
from passes.folding import are_finite, float64, scale_of, why_not
from passes.graph.match import BatchNorm, Convolution, TensorRef, conv_bn_chains
from passes.graph.program import Program
from passes.graph.rewriter import Rewriter


@dataclass(frozen=True)
class FoldConvBn(GraphPass):
    """Fold a BatchNorm into the convolution, transposed convolution or linear layer before it.

    On running statistics a BatchNorm is a scale and a shift of each channel, s = w / sqrt(var + eps):

        (conv(x; W) + b - mean) * s + c  ==  conv(x; W * s) + (b - mean) * s + c

    Computed in float64 and cast back once. Operations between the two that only move values (transpose, permute,
    flatten, view, dropout in eval) stay where they are.

    Does not handle: a BatchNorm on batch statistics, a BatchNorm before the convolution, a linear layer on input of
    more than two dims whose features nothing brings to the second, an output with other users, shared or parametrized
    modules, modules with hooks, tensors that something else reads or may read in a branch of its code, folded weights
    that aren't finite.
    """

    name: ClassVar[str] = "fold-conv-bn"
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    def rewrite(self, graph: Rewriter) -> None:
        """Fold every BatchNorm that can be folded."""
        for conv, norm in conv_bn_chains(graph.program):
            if reason := _why_not(graph.program, conv, norm):
                graph.skip(norm.node, reason)
                continue
            tensors = folded_tensors(conv, norm)
            if are_finite(*tensors):
                _fold(graph, conv, norm, tensors)
            else:
                graph.skip(
                    norm.node, f"folded into {graph.program.where(conv.node)}, it gives weights that aren't finite"
                )


def _why_not(program: Program, conv: Convolution, norm: BatchNorm) -> str | None:
    if norm.uses_batch_statistics:
        return "it uses the statistics of the batch"
    if norm.mean is None or norm.var is None:
        return "it keeps no running statistics"
    if reason := why_not(program, conv, norm):
        return f"the convolution {program.where(conv.node)} stays as it is: {reason}"
    return None


def _fold(graph: Rewriter, conv: Convolution, norm: BatchNorm, tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
    weight, bias = tensors
    what = f"folded into {graph.program.where(conv.node)}"
    with graph.change(graph.program.where(norm.node), what, (conv.node, *norm.moves, norm.node)) as change:
        change.sources += [conv.weight, *([conv.bias] if conv.bias and conv.bias_value is not None else [])]
        change.sources += norm.tensors
        graph.set_tensor(change, conv.weight, weight)
        graph.set_bias(change, conv, bias)
        graph.carry_norm(change, conv, norm)


def folded_tensors(conv: Convolution, norm: BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight, in the layout and dtype of the old one, and bias, (out,), of the convolution that does both."""
    weight = conv.weight.value
    assert weight is not None
    mean = _float64(norm.mean)
    assert mean is not None
    scale = scale_of(norm)
    shift = -mean * scale
    if (gain := _float64(norm.weight)) is not None:
        scale, shift = scale * gain, shift * gain
    if (offset := _float64(norm.bias)) is not None:
        shift = shift + offset
    if (old := _float64(conv.bias)) is not None:
        shift = shift + old * scale
    wide = float64(weight)
    if conv.transposed:
        # (in, out / groups, …): the input channels of group g make the g-th run of output channels.
        per_group = scale.reshape(conv.groups, 1, conv.channels // conv.groups, *[1] * conv.dims)
        wide = (wide.reshape(conv.groups, -1, *wide.shape[1:]) * per_group).reshape(wide.shape)
    else:
        wide = wide * scale.reshape(-1, *[1] * (wide.dim() - 1))
    # `empty_like` keeps the strides, and with them a channels_last layout.
    new = torch.empty_like(weight.detach()).copy_(wide)
    return new, shift.to(weight)


def _float64(ref: TensorRef | None) -> torch.Tensor | None:
    value = None if ref is None else ref.value
    return None if value is None else float64(value)
