"""How the numbers that a rewrite makes are computed: in float64, and cast back once."""

from __future__ import annotations

import torch


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """The values, without gradients, where float64 can be had: on the CPU if the device has none.

    An operation with float64 numbers takes them as they are and gives float64, unless it has more dims than those.
    """
    tensor = tensor.detach()
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def float64(tensor: torch.Tensor) -> torch.Tensor:
    """The values in float64, without gradients."""
    return exact(tensor).double()
