"""Move biases into BatchNorms: BatchNorm(conv(x) + b) == BatchNorm'(conv(x)), with running_mean' = running_mean - b."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from passes.base import Context
from passes.tensor_interface import BatchNorm, Pair, TensorPass, TensorRewriter, are_finite, mean_without, scale_of


@dataclass(frozen=True)
class FoldConvBias(TensorPass):
    """Move the bias of a convolution into the running mean of the following BatchNorm.

    With y = conv(x) + b, a BatchNorm that uses running statistics computes

        (y - mean) / sqrt(var + eps) * w + c  ==  (conv(x) - (mean - b)) / sqrt(var + eps) * w + c

    So the bias is removed and subtracted from the mean, and nothing else changes. The same holds for linear layers and
    transposed convolutions. A BatchNorm that uses batch statistics subtracts b again with the batch mean, and the
    running mean that it updates stays smaller by b. This saves one addition per output element if the convolution can't
    fuse it. In training, it also saves the sum that computes the gradient of the bias.

    In training, outputs, all other gradients and statistics are those of the original. The running mean becomes a
    buffer of the result; all other tensors stay the caller's. The `state_dict` keeps an entry of zeros for the bias. It
    can be loaded into the original, and is correct there. A checkpoint of the original can be loaded into the result,
    whatever its bias.

    The original's bias has a gradient of zero, except for rounding. Weight decay moves the bias nevertheless, and so
    does an optimizer that divides by the size of the gradient. The original's running mean follows this only in part:
    after 20 steps of AdamW in float32, the original's outputs in eval mode had an error of 3e-3. The result has no such
    bias and doesn't drift.

    Does not handle:

    - In inference: a BatchNorm that uses batch statistics but keeps running ones.
    - In training: a BatchNorm in eval mode, unless the bias is frozen too (otherwise the bias gets a real gradient); a
      bias or mean that shares its memory with another tensor; a bias with hooks; layers in plain containers or
      registered under two paths; convolutions that are called as functions.
    - In both: an output with other users; modules with hooks or parametrizations; tensors that other code reads; a mean
      or scale that isn't finite.
    """

    name: ClassVar[str] = "fold-conv-bias"

    def rewrite(self, model: TensorRewriter, context: Context) -> None:
        """Move every bias for which this is possible."""
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
    # Without running statistics, it subtracts the batch mean in training and in eval mode.
    if norm.mean is not None and norm.uses_batch_statistics and model.mode != "training":
        return f"the BatchNorm {model.where(norm)} uses the statistics of the batch"
    return None


def _why_not_trained(model: TensorRewriter, pair: Pair, norm: BatchNorm) -> str | None:
    """The reason why training depends on the bias, as a clause; None if it doesn't."""
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
    """The reason why the pair can't be guarded in training, or can't be loaded from checkpoints; None if it can.

    A checkpoint must have each of the two tensors under exactly one name.
    """
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
