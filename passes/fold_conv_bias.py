"""BatchNorm(conv(x) + b) == BatchNorm'(conv(x)), with running_mean' = running_mean - b."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from passes.base import Context
from passes.tensor_interface import BatchNorm, Pair, TensorPass, TensorRewriter, are_finite, mean_without, scale_of


@dataclass(frozen=True)
class FoldConvBias(TensorPass):
    """Move a convolution's bias into the running mean of the BatchNorm behind it.

    With y = conv(x) + b, a BatchNorm on running statistics gives

        (y - mean) / sqrt(var + eps) * w + c  ==  (conv(x) - (mean - b)) / sqrt(var + eps) * w + c

    so the bias goes, the mean moves by it, and nothing else changes. A BatchNorm on the statistics of the batch takes b
    out again with the mean of the batch, and the running mean that it keeps goes on being less by b. One addition per
    output element is saved where the convolution can't fuse it, and in training the sum that is the bias' gradient.

    In training, outputs, all other gradients and statistics are those of the original; the running mean is a buffer of
    the result's own, where all others stay the caller's. The `state_dict` keeps an entry for the bias, which is zero:
    it loads into the original and is right there, and one of the original loads into the result, whatever its bias.
    The original's bias has a gradient of zero but for rounding. Weight decay moves it all the same, and so does an
    optimizer that divides by the size of the gradient: after 20 steps of AdamW in float32 it had moved by 3e-3, which
    the original's running mean follows only in part. The result has nothing that could drift so.

    Does not handle: in inference, a BatchNorm on the statistics of the batch that keeps running ones; in training, a
    BatchNorm in eval (its bias does get a gradient) unless the bias is frozen too, a bias or mean in the memory of
    another tensor, and convolutions that are called as functions; an output with other users, modules with hooks or
    parametrizations, tensors that something else reads, a mean or scale that isn't finite.
    """

    name: ClassVar[str] = "fold-conv-bias"

    def rewrite(self, model: TensorRewriter, context: Context) -> None:
        """Move every bias that can be moved."""
        for pair in model.pairs():
            conv, norm = pair.conv, pair.affine
            if not isinstance(norm, BatchNorm) or conv.bias_value is None:
                continue
            if reason := _why_not(model, pair) or model.why_not(pair):
                model.skip(conv, reason)
                continue
            bias, mean = conv.bias_value, None if norm.mean is None else norm.mean.value
            assert bias is not None
            moved = None if mean is None else mean_without(mean, bias)
            if are_finite(*([bias] if moved is None else [moved, scale_of(norm)])):
                _move(model, pair, norm, moved)
            elif moved is None:
                model.skip(conv, "its bias isn't finite")
            else:
                model.skip(conv, f"the mean or scale of {model.where(norm)} wouldn't be finite")


def _why_not(model: TensorRewriter, pair: Pair) -> str | None:
    for one in model.runs_of(pair):
        assert isinstance(one.affine, BatchNorm)
        if reason := _why_not_statistics(model, one.affine) or _why_not_trained(model, one, one.affine):
            return reason
    return _why_not_saved(model, pair) if model.mode == "training" else None


def _why_not_statistics(model: TensorRewriter, norm: BatchNorm) -> str | None:
    # Without running statistics it takes off the mean of the batch in training and in eval.
    if norm.mean is not None and norm.uses_batch_statistics and model.mode != "training":
        return f"the BatchNorm {model.where(norm)} uses the statistics of the batch"
    return None


def _why_not_trained(model: TensorRewriter, pair: Pair, norm: BatchNorm) -> str | None:
    """Whether somebody counts on the bias being trained."""
    bias = pair.conv.bias_value
    if model.mode != "training" or bias is None or not bias.requires_grad:
        return None
    if not norm.uses_batch_statistics and model.is_as_given(norm):
        where = model.where(norm)
        other = "" if norm.module is None else f"put {where} in training before optimize(), or "
        return f"the BatchNorm {where} uses running statistics, so the bias is trained: {other}freeze the bias"
    if bias._backward_hooks or getattr(bias, "_post_accumulate_grad_hooks", None):
        return "its bias has hooks, which see its gradient"
    return None


def _why_not_saved(model: TensorRewriter, pair: Pair) -> str | None:
    """Whether a result that is trained on can't keep the two together, or checkpoints don't hold them under one name."""
    assert isinstance(pair.affine, BatchNorm)
    if pair.conv.module is None:
        return (
            "it is called as a function, and its weight belongs to the caller in training: nothing can guard its output"
        )
    for owner in (ref.owner for ref in (pair.conv.bias, pair.affine.mean) if ref is not None):
        where, aliases = model.tree.path(owner), model.tree.aliases(owner)
        if not model.tree.is_registered(owner):
            return f"{where} is in a plain container, where checkpoints don't find it: put it into an nn.ModuleList"
        if aliases:
            return f"checkpoints hold its tensors under two names, {where} and {aliases[0]}"
    return None


def _move(model: TensorRewriter, pair: Pair, norm: BatchNorm, moved: torch.Tensor | None) -> None:
    into = model.where(norm)
    what = (
        f"bias moved into the running mean of {into}"
        if norm.mean
        else f"bias dropped, because {into} subtracts it again"
    )
    assert pair.conv.bias_value is not None
    trained = model.mode == "training" and norm.mean is not None and pair.conv.bias_value.requires_grad
    with model.change(pair.conv, what, pair):
        model.move_bias(pair, moved, trained=trained)
