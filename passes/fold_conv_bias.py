"""BatchNorm(conv(x) + b) == BatchNorm'(conv(x)), with running_mean' = running_mean - b."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from passes.base import GraphPass
from passes.folding import are_finite, float64, scale_of, why_not
from passes.graph.match import BatchNorm, Convolution, conv_bn_chains, way_of
from passes.graph.program import Program
from passes.graph.rewriter import Rewriter


@dataclass(frozen=True)
class FoldConvBias(GraphPass):
    """Move a convolution's bias into the running mean of the BatchNorm behind it.

    With y = conv(x) + b, a BatchNorm on running statistics gives

        (y - mean) / sqrt(var + eps) * w + c  ==  (conv(x) - (mean - b)) / sqrt(var + eps) * w + c

    so the bias goes, the mean moves by it, and nothing else changes. One addition per output element is saved where the
    convolution can't fuse it.

    Does not handle: a BatchNorm on batch statistics (its own mean cancels the bias, but what becomes of the bias'
    entry in a checkpoint is another matter), an output with other users, shared or parametrized modules, modules with
    hooks, tensors that something else reads or may read in a branch of its code, a mean or scale that isn't finite.
    """

    name: ClassVar[str] = "fold-conv-bias"
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    def rewrite(self, graph: Rewriter) -> None:
        """Fold every bias that can be folded."""
        for conv, norm in conv_bn_chains(graph.program):
            if conv.bias_value is None:
                continue
            if reason := _why_not(graph.program, conv, norm):
                graph.skip(conv.node, reason)
                continue
            moved = _moved_mean(conv, norm)
            if are_finite(moved, scale_of(norm)):
                _fold(graph, conv, norm, moved)
            else:
                graph.skip(conv.node, f"the mean or scale of {graph.program.where(norm.node)} wouldn't be finite")


def _why_not(program: Program, conv: Convolution, norm: BatchNorm) -> str | None:
    if norm.uses_batch_statistics:
        return f"the BatchNorm {program.where(norm.node)} uses the statistics of the batch"
    if norm.mean is None or norm.var is None:
        return f"the BatchNorm {program.where(norm.node)} keeps no running statistics"
    return why_not(program, conv, norm)


def _moved_mean(conv: Convolution, norm: BatchNorm) -> torch.Tensor:
    bias, mean = conv.bias_value, norm.mean.value if norm.mean is not None else None
    assert bias is not None
    assert mean is not None
    return (float64(mean) - float64(bias)).to(mean)


def _fold(graph: Rewriter, conv: Convolution, norm: BatchNorm, moved: torch.Tensor) -> None:
    assert conv.bias is not None
    assert norm.mean is not None
    into = graph.program.where(norm.node)
    what = f"bias moved into the running mean of {into}"
    with graph.change(graph.program.where(conv.node), what, way_of(conv, norm)) as change:
        change.sources += [conv.bias, norm.mean]
        graph.set_tensor(change, norm.mean, moved)
        graph.drop_bias(change, conv)
        graph.tie(change, conv, norm)
