"""The memory of tensors: where their values are stored, which tensors share it, and copies that overlap alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from passes.base import PLAIN_TENSORS
from passes.graph.layouts import kind_of
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


def groups_of(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group the tensors, each once, so that different groups share no bytes; most groups have one tensor."""
    distinct = {id(tensor): tensor for tensor in tensors}
    groups = {key: [key] for key in distinct}
    by_storage: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in distinct.values():
        for storage in storages_of(tensor):
            by_storage[storage].append(tensor)
    for storage, sharing in by_storage.items():
        # Most storages hold one tensor.
        spans = ((extent, id(tensor)) for tensor in sharing for extent in extents_of(tensor)) if sharing[1:] else ()
        end = last = 0
        for extent, key in sorted(span for span in spans if span[0].storage == storage):
            if extent.start < end and groups[key] is not groups[last]:
                joined = groups[last] + groups[key]
                groups.update((each, joined) for each in joined)
            if extent.end > end:
                end, last = extent.end, key
    found: dict[int, list[torch.Tensor]] = defaultdict(list)
    for key, tensor in distinct.items():
        found[id(groups[key])].append(tensor)
    return list(found.values())


def copied_together(group: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the tensors of a group of `groups_of` so that a write to one copy shows in the others, as in the originals.

    If one of them has no strides or is of a foreign class, all are copied separately.
    """
    if len(group) == 1 or not all(map(_can_be_laid_anew, group)):
        return [tensor.detach().clone() for tensor in group]
    extents = [extent for tensor in group for extent in extents_of(tensor)]
    # A multiple of the alignment of every dtype.
    first = min(extent.start for extent in extents) // 16 * 16
    size = max(extent.end for extent in extents) - first
    memory = _over(group[0].untyped_storage(), torch.uint8, group[0], first, (size,), (1,)).clone().untyped_storage()
    return [
        _over(memory, tensor.dtype, tensor, (extent.start - first) // tensor.element_size(), tensor.shape,
              tensor.stride())
        for tensor, extent in zip(group, extents, strict=True)
    ]  # fmt: skip


def _can_be_laid_anew(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in PLAIN_TENSORS and kind_of(tensor) is None
    return is_plain and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    like: torch.Tensor,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """Make a tensor over a storage. It is not a view, so that a forward may write to it."""
    return torch.empty(0, dtype=dtype, device=like.device).set_(storage, offset, tuple(shape), tuple(strides))
