"""Arithmetic for new weights: computed in float64, and cast back once."""

from __future__ import annotations

import math

import torch


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gradients, in its own dtype; a tensor on MPS, which has no float64, is copied to the CPU.

    A product or sum with a float64 tensor is then computed in float64, without a float64 copy of a large weight. This
    doesn't hold for a float64 scalar tensor, unless this tensor is a scalar too.
    """
    tensor = tensor.detach()
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def float64(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor in float64, without gradients; on the CPU if its device has no float64."""
    return exact(tensor).double()


def why_not_finite(tensor: torch.Tensor) -> str | None:
    """The reason not to use the tensor, as a clause, if it holds NaN or infinity; None otherwise.

    A rewrite that reorders operations isn't exact on such tensors.
    """
    # A NaN or an infinity makes the sum non-finite. The sum of finite values may overflow too, so check them one by one
    # then.
    is_finite = math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())
    return None if is_finite else "the new weights wouldn't be finite"
