"""The memory formats of feature maps: tensors of 4 or 5 dims, (batch, channels, …)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from passes.torch_private import is_tracing, without_tracing

# The dims of a tensor, ordered from the largest stride to the smallest: (0, 1, 2, 3) is contiguous, (0, 2, 3, 1)
# channels_last.
DimOrder = tuple[int, ...]

CHANNELS_LAST_FORMATS: Mapping[int, torch.memory_format] = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels_last memory format for tensors of each number of dims; other numbers have none."""
# The order of dims in each of these formats.
ORDERS: Mapping[int, DimOrder] = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether torch treats a tensor of 4 or 5 dims as channels_last, with or without gaps in memory.

    torch checks only the strides (c10's `is_channels_last_strides_2d` and `_3d`). A tensor with one channel or one
    spatial position is in both formats, but its strides still show one of them.
    """
    shape, strides = _untraced_shape(tensor), tensor.stride()
    if strides[1] == 0:
        return False
    smallest = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < smallest or (dim == 0 and smallest == strides[1]):
            return False
        smallest = strides[dim] * max(shape[dim], 1)
    return True


def _untraced_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape as plain ints.

    Under a trace, sizes would be recorded as tensors. The memory format affects no value, so plain ints are correct
    here.
    """
    if torch.compiler.is_compiling() or not is_tracing():
        return tensor.shape
    with without_tracing():
        return tuple(tensor.shape)
