"""The values of tensors of any layout: where they are stored, and whether they are equal."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from passes.base import PLAIN_TENSORS
from passes.torch_private import without_subclasses

# Dtypes for which torch.equal is implemented everywhere.
_COMMON = frozenset({torch.float32, torch.float64, torch.int64, torch.bool})
_PLAIN_INDICES = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}


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


def storages_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """What identifies the storages that hold the values of a tensor, while they live; most tensors have one.

    Empty if the tensor has no values, is in mkldnn layout, or is of a class that may keep its values in other tensors
    (one with its own `__torch_dispatch__`).
    """
    if is_lazy(tensor) or tensor.is_meta:
        return ()
    if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided and not tensor.is_nested:
        return (tensor.untyped_storage()._cdata,)
    # A nested tensor may be of such a class, but its rows are ordinary tensors.
    dispatches = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if not tensor.is_nested and (dispatches or tensor.is_mkldnn):
        return ()
    return tuple(part.untyped_storage()._cdata for part in parts_of(tensor) if part.numel())


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
