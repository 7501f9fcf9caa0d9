"""Move biases into BatchNorms: BatchNorm(conv(x) + b) == BatchNorm'(conv(x)), with running_mean' = running_mean - b."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from passes.base import Context
from passes.graph_interface import (
    BatchNorm,
    Example,
    GraphPass,
    GraphRewriter,
    Layers,
    Node,
    Pair,
    Recording,
    exact,
    float64,
    operation_name,
    why_not_finite,
)


@dataclass(frozen=True)
class FoldConvBias(GraphPass):
    """Move the bias of a convolution into the running mean of the following BatchNorm.

    With y = conv(x) + b, a BatchNorm that uses running statistics computes

        (y - mean) / sqrt(var + eps) * w + c  ==  (conv(x) - (mean - b)) / sqrt(var + eps) * w + c

    So the bias is left out and subtracted from the mean, which becomes a derived tensor. The same holds for linear
    layers and transposed convolutions. A BatchNorm that uses batch statistics subtracts b again with the batch mean.
    Only the running mean that it updates depends on b:

        mean'  =  (1 - momentum) * mean + momentum * batch mean of conv(x)  +  momentum * b

    This saves one addition per output element if the convolution can't fuse it. In training, it also saves the sum that
    computes the gradient of the bias.

    Parameters, buffers and the state dict stay the original's. In training, outputs, statistics and all other gradients
    are those of the original. The gradient of the bias is exactly zero; the original's is zero except for rounding.

    Does not handle:

    - in inference, a BatchNorm that uses batch statistics
    - in training, a BatchNorm in eval mode, unless the bias is frozen: there the bias has a real gradient
    - an output with other users
    - tensors that other operations of the forward may write to, and tensors of other classes than torch's own
    - in inference, a mean or bias that isn't finite
    - a BatchNorm that uses running statistics in calls under autocast
    - a layer under an autocast of the forward, except that of `cast-precision` around the whole model
    """

    name: ClassVar[str] = "fold-conv-bias"
    # In the preset, which also takes models without example inputs.
    needs_run: ClassVar[str] = ""

    VALID: ClassVar[Sequence[Example]] = (
        Example("norm(conv(x))", (2, 3, 8, 8), {"conv": "nn.Conv2d(3, 8, 3)", "norm": "nn.BatchNorm2d(8)"}),
        Example("norm(linear(x))", (2, 3), {"linear": "nn.Linear(3, 8)", "norm": "nn.BatchNorm1d(8)"}),
    )
    REFUSED: ClassVar[Sequence[Example]] = (
        Example(
            "norm(conv(x))",
            (2, 3, 8, 8),
            {"conv": "nn.Conv2d(3, 8, 3)", "norm": "nn.BatchNorm2d(8, track_running_stats=False)"},
            "uses the statistics of the batch",
        ),
        Example(
            "torch.cat([y := conv(x), norm(y)])",
            (2, 3, 8, 8),
            {"conv": "nn.Conv2d(3, 8, 3)", "norm": "nn.BatchNorm2d(8)"},
            "its output is also used by",
        ),
    )

    def is_for(self, recording: Recording) -> bool:
        """See `GraphPass.is_for`."""
        return any(operation_name(node) == "batch_norm" for node in recording.nodes())

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        """Move every bias for which this is possible."""
        layers = Layers(graph)
        for node in graph.calls("batch_norm"):
            norm = layers.batch_norm_at(node)
            pair = None if norm is None else layers.pair_before(norm)
            if norm is None or pair is None:
                if reason := layers.why_alone(node):
                    graph.skip(node, reason)
                else:
                    graph.explain(node, layers.why_unmatched(norm) if norm else "it isn't recognized")
                continue
            if pair.layer.bias is None:
                graph.explain(pair.layer.node, "it has no bias")
                continue
            trained = context.mode == "training" and graph.example(pair.layer.bias).requires_grad
            reason = _why_not(graph, norm, context.mode, trained=trained) or layers.why_not(pair)
            if reason is None and norm.uses_batch_statistics:
                reason = layers.why_not_constant(pair.layer)
            elif reason is None:
                reason = layers.why_not_derived(pair.layer, norm)
            if reason is not None:
                graph.skip(pair.layer.node, reason)
            else:
                _move(graph, layers, pair, norm, pair.layer.bias, trained=trained)


# Judge ----------------------------------------------------------------------------------------------------------------


def _why_not(graph: GraphRewriter, norm: BatchNorm, mode: str, *, trained: bool) -> str | None:
    where = graph.where(norm.node)
    if mode == "inference" and norm.uses_batch_statistics:
        return f"the BatchNorm {where} uses the statistics of the batch"
    if norm.uses_batch_statistics and not (norm.mean is None or graph.is_parameter(norm.mean)):
        return f"the running mean of {where} is computed at every call"
    if trained and not norm.uses_batch_statistics:
        return (
            f"the BatchNorm {where} uses running statistics, so the bias is trained: put {where} in training before "
            "optimize(), or freeze the bias"
        )
    return None


# Rewrite --------------------------------------------------------------------------------------------------------------


def _move(graph: GraphRewriter, layers: Layers, pair: Pair, norm: BatchNorm, bias: Node, *, trained: bool) -> None:
    where = graph.where(norm.node)
    what = f"bias dropped, because {where} subtracts it again"
    if norm.mean is not None:
        what = f"bias moved into the running mean of {where}"
    with graph.change(pair.layer.node, what):
        changed: dict[str, Any] = {}
        if trained:
            changed["bias"] = _with_zero_gradient(graph, norm, bias)
        if norm.mean is not None and norm.uses_batch_statistics:
            # A copy, because the BatchNorm keeps the running mean that it updates for the backward pass.
            changed["running_mean"] = graph.call(norm.node, torch.clone, (norm.mean,))
        elif norm.mean is not None:
            sources = map(layers.derived_from, (norm.mean, bias))
            changed["running_mean"] = graph.derived(
                pair.layer.node,
                ShiftedMean(),
                *sources,
                what="the shifted running mean",
                usable=why_not_finite,
                in_autocast=False,
            )
        new = layers.call_with(norm, norm.node, input=layers.without_affine(pair, bias=None), **changed)
        if norm.mean is not None and norm.uses_batch_statistics:
            shift = graph.call(norm.node, torch.detach, (bias,))
            mean = graph.call(norm.node, torch.add, (changed["running_mean"], shift), {"alpha": norm.momentum})
            graph.call(norm.node, "copy_", (norm.mean, mean))
        layers.replace(norm.node, new)


def _with_zero_gradient(graph: GraphRewriter, norm: BatchNorm, bias: Node) -> Node:
    """The shift of the BatchNorm plus 0 * bias: with no gradient at all, DistributedDataParallel waits for one forever."""
    if norm.bias is None:
        return graph.call(norm.node, torch.mul, (bias, 0))
    return graph.call(norm.node, torch.add, (norm.bias, bias), {"alpha": 0})


@dataclass(frozen=True)
class ShiftedMean:
    """Computes the running mean without the bias of the layer before, in the dtype of the mean."""

    def __call__(self, mean: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Subtract the bias, (channels,), from the mean, (channels,)."""
        return (float64(mean) - exact(bias)).to(mean)
