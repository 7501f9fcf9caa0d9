"""The memory formats of feature maps: tensors of 4 or 5 dims, (batch, channels, …)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from passes.graph.storage import has_strides
from passes.torch_private import is_tracing, is_transformed, without_tracing

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


LAST = "channels_last"
CONTIGUOUS = "contiguous"
EITHER = "either"


def layout_of(value: Any) -> str | None:
    """The format of a feature map: `LAST`, `EITHER` if it is in both, else `CONTIGUOUS`; None for other values."""
    if not isinstance(value, torch.Tensor):
        return None
    if not has_strides(value) or value.dim() not in CHANNELS_LAST_FORMATS:
        return None
    if is_transformed(value):
        # It represents a batch of tensors with other dims.
        return None
    if value.is_contiguous():
        return EITHER if value.is_contiguous(memory_format=CHANNELS_LAST_FORMATS[value.dim()]) else CONTIGUOUS
    return LAST if is_channels_last(value) else CONTIGUOUS


def order_of(tensor: torch.Tensor) -> DimOrder | None:
    """The order of the dims of a tensor with strides, from the largest stride to the smallest.

    None for less than two dims, and for tensors with gaps or overlaps in memory.
    """
    if tensor.dim() < 2:
        return None
    dims, strides = range(tensor.dim()), tensor.stride()
    order = tuple(dims) if tensor.is_contiguous() else tuple(sorted(dims, key=lambda dim: -strides[dim]))
    return order if lies_in(tensor, order) else None


def lies_in(tensor: torch.Tensor, order: DimOrder) -> bool:
    """Whether the dims of a tensor are in this order in memory, without gaps; dims of size 1 fit anywhere."""
    return tensor.dim() == len(order) and tensor.permute(order).is_contiguous()
