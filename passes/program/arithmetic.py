"""How the numbers that a rewrite makes are computed: in float64, and cast back once."""

from __future__ import annotations

import math

import torch

from passes.program.matching import BatchNorm


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """The values, without gradients, where float64 can be had: on the CPU if the device has none.

    An operation with float64 numbers takes them as they are and gives float64, unless it has more dims than those.
    """
    tensor = tensor.detach()
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def float64(tensor: torch.Tensor) -> torch.Tensor:
    """The values in float64, without gradients."""
    return exact(tensor).double()


def scale_of(norm: BatchNorm) -> torch.Tensor:
    """What the BatchNorm multiplies each channel by before its own weight, (channels,), in float64."""
    assert norm.var is not None
    assert norm.var.value is not None
    return (float64(norm.var.value) + norm.eps).rsqrt_()


def are_finite(*tensors: torch.Tensor) -> bool:
    """Whether no tensor holds a NaN or an infinity: with one, the order of the operations changes what comes out."""
    return all(map(_is_finite, tensors))


def _is_finite(tensor: torch.Tensor) -> bool:
    # A NaN or an infinity makes the sum non-finite. The sum of finite values may overflow too, so check them one by one
    # then.
    return math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())
