"""The rows of a call's tensors: their number, some of them, and a hash of each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from exporters.base import Adapter
from optimizer.model import Samples, leaves_of

Flat = tuple[torch.Tensor, ...]
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class RowDims:
    """Which dims of a call's tensors have the batch. A tensor without one, such as a table, belongs to each row."""

    dims: tuple[int | None, ...]
    """Of each tensor, in flat order; None without one."""

    @classmethod
    def of(cls, samples: Samples, adapter: Adapter) -> RowDims:
        """Those of the example inputs: the dims that are open as the batch, or have its size."""
        call = samples.given
        tensors = leaves_of((call.args, call.kwargs)).tensors()
        dims = {id(tensor): dims for (_, tensor), dims in zip(tensors, samples.row_dims, strict=True)}
        flat = adapter.flatten_inputs(call.args, call.kwargs)
        return cls(tuple(next(iter(dims[id(tensor)]), None) for tensor in flat))

    def count(self, call: Sequence[torch.Tensor]) -> int:
        """The number of rows; 1 if no tensor has rows."""
        sizes = (t.shape[dim] for t, dim in zip(call, self.dims, strict=True) if dim is not None and dim < t.dim())
        return next(sizes, 1)

    def taken(self, call: Sequence[torch.Tensor], rows: slice) -> Flat:
        """A call of some rows."""
        return tuple(
            tensor if dim is None else tensor.movedim(dim, 0)[rows].movedim(0, dim)
            for tensor, dim in zip(call, self._dims_of(call), strict=True)
        )

    def hashes(self, call: Sequence[torch.Tensor]) -> Hashes:
        """A hash of each row, which doesn't depend on the others."""
        found = np.zeros(self.count(call), np.uint64)
        for place, (tensor, dim) in enumerate(zip(call, self._dims_of(call), strict=True)):
            rows = (tensor[None] if dim is None else tensor.movedim(dim, 0)).detach().cpu().contiguous()
            pieces = rows.reshape(len(rows), rows.numel() // max(1, len(rows))).view(torch.uint8).numpy()
            # A sum, so that a tensor without rows counts alike where the batch is one row.
            found += np.array([_digest(piece, place) for piece in pieces], np.uint64)
        return found

    def _dims_of(self, call: Sequence[torch.Tensor]) -> list[int | None]:
        """The dims with rows of this call, whose tensors may be broadcast."""
        count = self.count(call)
        return [
            dim if dim is not None and dim < tensor.dim() and tensor.shape[dim] == count else None
            for tensor, dim in zip(call, self.dims, strict=True)
        ]


def _digest(piece: npt.NDArray[np.uint8], place: int) -> int:
    return int.from_bytes(hashlib.blake2b(piece.data, digest_size=8, key=bytes([place % 256])).digest(), "little")
