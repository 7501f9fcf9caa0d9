"""Where the numbers of tensors lie: in strides, or not, as those of sparse and nested ones and of mkldnn's own layout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from passes.program.weights import PLAIN_TENSORS

_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams, torch.per_channel_symmetric)
_PLAIN_INDICES = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}


def kind_of(tensor: torch.Tensor) -> str | None:
    """What a tensor without strides is, as in "it is sparse"; None for one that has them."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is torch.strided:
        return None
    return "in mkldnn's own layout" if tensor.is_mkldnn else "sparse"


def has_strides(tensor: torch.Tensor) -> bool:
    """Whether dims and strides can be asked for and rearranged; those of one quantized per channel can't."""
    return kind_of(tensor) is None and not (tensor.is_quantized and tensor.qscheme() in _PER_CHANNEL)


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors with strides that hold all its numbers, and for a sparse one their places; nothing becomes dense by it.

    Those of a sparse or nested tensor lie in its own memory. A tensor with strides is its only part.
    """
    tensor = tensor.detach()
    if tensor.is_nested:
        return tuple(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _PLAIN_INDICES:
        return (*(indices(tensor) for indices in _PLAIN_INDICES[tensor.layout]), tensor.values())
    return (tensor.to_dense(),) if tensor.is_mkldnn else (tensor,)


class Extent(NamedTuple):
    """The bytes of a storage from the first to behind the last that a tensor reaches.

    Attributes:
        storage: tells storages apart for as long as they live.
    """

    storage: int
    start: int
    end: int


def storages_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The storages of `extents_of`, which most tensors have one of."""
    if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided and not tensor.is_nested:
        return () if tensor.is_meta else (tensor.untyped_storage()._cdata,)
    return tuple(extent.storage for extent in extents_of(tensor))


def extents_of(tensor: torch.Tensor) -> tuple[Extent, ...]:
    """The bytes that the numbers of a tensor lie in, one extent for each of its parts.

    None for a tensor that has no numbers, keeps them where torch doesn't show them (mkldnn's layout), or leaves them to
    other tensors, as a class with a dispatch of its own may.
    """
    if is_lazy(tensor) or tensor.is_meta:
        return ()
    # A nested tensor may be of such a class; its rows are tensors of their own.
    dispatches = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if not tensor.is_nested and (dispatches or tensor.is_mkldnn):
        return ()
    return tuple(_extent_of(part) for part in parts_of(tensor) if part.numel())


def _extent_of(tensor: torch.Tensor) -> Extent:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return Extent(tensor.untyped_storage()._cdata, start, start + (int(last) + 1) * tensor.element_size())


def same_values(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN in the same places, in the same layout, shape and dtype.

    Tensors on the meta device hold none, and are the same where their shapes are.
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
    same = mine == theirs
    if bool(same.all()):
        return True
    # NaN differs from itself.
    is_inexact = mine.is_floating_point() or mine.is_complex()
    return is_inexact and bool((same | ((mine != mine) & (theirs != theirs))).all())
