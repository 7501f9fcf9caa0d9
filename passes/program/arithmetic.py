"""Arithmetic for new weights: computed in float64, and cast back once."""

from __future__ import annotations

import math

import torch

from passes.program.matching import BatchNorm
from passes.program.weights import bare


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gradients, in its own dtype; a tensor on MPS, which has no float64, is copied to the CPU.

    A product or sum with a float64 tensor is then computed in float64, without a float64 copy of a large weight. This
    doesn't hold for a float64 scalar tensor, unless this tensor is a scalar too.
    """
    tensor = bare(tensor)
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def float64(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor in float64, without gradients; on the CPU if its device has no float64."""
    return exact(tensor).double()


def scale_of(norm: BatchNorm) -> torch.Tensor:
    """1 / sqrt(var + eps) of a BatchNorm with running statistics: its scale without its weight, (channels,), float64."""
    assert norm.var is not None
    assert norm.var.value is not None
    return (float64(norm.var.value) + norm.eps).rsqrt_()


def are_finite(*tensors: torch.Tensor) -> bool:
    """Whether no tensor holds NaN or infinity. A rewrite that reorders operations isn't exact on tensors that do."""
    return all(map(_is_finite, tensors))


def _is_finite(tensor: torch.Tensor) -> bool:
    # A NaN or an infinity makes the sum non-finite. The sum of finite values may overflow too, so check them one by one
    # then.
    return math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())
