"""Where the values of a tensor are stored: with strides, or in sparse, nested or mkldnn layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from passes.torch_private import is_tracing, is_transformed, without_subclasses, without_tracing

# Dtypes for which torch.equal is implemented everywhere.
_COMMON = frozenset({torch.float32, torch.float64, torch.int64, torch.bool})
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams, torch.per_channel_symmetric)
_PLAIN_INDICES = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}


def kind_of(tensor: torch.Tensor) -> str | None:
    """The layout of a tensor without strides, as in "it is sparse"; None for a tensor with strides."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is torch.strided:
        return None
    return "in mkldnn's own layout" if tensor.is_mkldnn else "sparse"


def has_strides(tensor: torch.Tensor) -> bool:
    """Whether the tensor has dims and strides that can be rearranged; tensors quantized per channel don't."""
    return kind_of(tensor) is None and not (tensor.is_quantized and tensor.qscheme() in _PER_CHANNEL)


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that hold all values of a tensor and, if it is sparse, their indices.

    The parts of a sparse or nested tensor are views of its memory; a sparse tensor is not made dense. A strided tensor
    is its own only part.
    """
    with without_subclasses():
        tensor = tensor.detach()
    if tensor.is_nested:
        return tuple(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _PLAIN_INDICES:
        return (*(indices(tensor) for indices in _PLAIN_INDICES[tensor.layout]), tensor.values())
    return (tensor.to_dense(),) if tensor.is_mkldnn else (tensor,)


class Extent(NamedTuple):
    """The byte range [start, end) of a storage that a tensor spans."""

    storage: int  # identifies the storage for as long as it lives
    start: int
    end: int


def storages_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The storages of `extents_of(tensor)`; most tensors have one."""
    if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided and not tensor.is_nested:
        return () if tensor.is_meta else (tensor.untyped_storage()._cdata,)
    return tuple(extent.storage for extent in extents_of(tensor))


def extents_of(tensor: torch.Tensor) -> tuple[Extent, ...]:
    """The byte ranges that hold the values of a tensor, one for each of its parts.

    Empty if the tensor has no values, is in mkldnn layout, or is of a class that may keep its values in other tensors
    (one with its own `__torch_dispatch__`).
    """
    if is_lazy(tensor) or tensor.is_meta:
        return ()
    # A nested tensor may be of such a class, but its rows are ordinary tensors.
    dispatches = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if not tensor.is_nested and (dispatches or tensor.is_mkldnn):
        return ()
    return tuple(_extent_of(part) for part in parts_of(tensor) if part.numel())


def _extent_of(tensor: torch.Tensor) -> Extent:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return Extent(tensor.untyped_storage()._cdata, start, start + (int(last) + 1) * tensor.element_size())


def same_values(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors have equal values, with NaN equal to NaN, and the same layout, shape and dtype.

    Tensors on the meta device have no values; they are equal if their shapes are.
    """
    if mine.dtype != theirs.dtype or mine.layout is not theirs.layout or mine.is_nested is not theirs.is_nested:
        return False
    if not mine.is_nested and mine.shape != theirs.shape:
        return False
    if mine.is_meta:
        return True
    parts, others = parts_of(mine), parts_of(theirs)
    return len(parts) == len(others) and all(map(_equal, parts, others))


def _equal(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if mine.shape != theirs.shape:
        return False
    # `torch.equal` takes half as long, and isn't implemented for all dtypes.
    if mine.dtype in _COMMON and torch.equal(mine, theirs):
        return True
    same = mine == theirs
    if bool(same.all()):
        return True
    # NaN != NaN.
    is_inexact = mine.is_floating_point() or mine.is_complex()
    return is_inexact and bool((same | ((mine != mine) & (theirs != theirs))).all())


# The tensor classes whose stored values torch's operations use unchanged.
PLAIN_TENSORS: frozenset[type[torch.Tensor]] = frozenset({torch.Tensor, nn.Parameter})
# Attributes and methods that don't read the values of a tensor.
METADATA = frozenset({
    "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_floating_point",
    "is_complex", "size", "dim", "ndimension", "numel", "nelement", "element_size", "itemsize", "nbytes", "get_device",
    "is_meta", "is_mkldnn", "is_nested", "requires_grad", "is_leaf", "stride", "is_contiguous", "__len__", "is_mps",
    "is_xpu", "names", "has_names", "is_tensor", "is_same_size", "grad_fn",
})  # fmt: skip


def name_of(func: Callable[..., Any]) -> str:
    """The name of a torch function, without its overload."""
    name = getattr(func, "__name__", "")
    # An overload in `torch.ops` is named, for example, `add.Tensor`.
    return name.split(".", 1)[0] if isinstance(name, str) else ""


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    """An argument given by name or by position."""
    return kwargs.get(name, args[index] if len(args) > index else default)


def moved_statistics(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The running statistics that a call of `batch_norm` or `instance_norm` updates in place."""
    flags = {"batch_norm": ("training", False), "instance_norm": ("use_input_stats", True)}
    if (flag := flags.get(name_of(func))) is None or not argument(args, kwargs, 5, *flag):
        return []
    # The statistics come after weight and bias in the functions of `torch`, and before them in those of
    # torch.nn.functional.
    first = 1 if getattr(func, "__module__", None) == "torch.nn.functional" else 3
    found = (argument(args, kwargs, first + i, name, None) for i, name in enumerate(("running_mean", "running_var")))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


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
