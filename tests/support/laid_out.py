"""Tensors in other layouts than the dense strided one, and an empty tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
}
NESTED: dict[str, Callable[[Tensor], Tensor]] = {
    "nested": lambda dense: torch.nested.as_nested_tensor([dense, dense[:1]]),
    "jagged": lambda dense: torch.nested.as_nested_tensor([dense, dense[:1]], layout=torch.jagged),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "mkldnn": lambda dense: dense.to_mkldnn(),
    "quantized": lambda dense: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
    "quantized per channel": lambda dense: torch.quantize_per_channel(
        dense, torch.full((len(dense),), 0.1), torch.zeros(len(dense), dtype=torch.long), 0, torch.qint8
    ),
    "empty": lambda dense: dense[:0].clone(),
}
LAYOUTS = {**SPARSE, **NESTED, **OTHERS}


def laid_out(layout: str, dense: Tensor) -> Tensor:
    """Convert a matrix of even sizes to another layout, without torch's warnings that some layouts are new."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LAYOUTS[layout](dense)


def numbers_in(tensor: Tensor) -> Tensor:
    """All elements of a tensor, in a new dense tensor."""
    if tensor.is_nested:
        return torch.cat([row.flatten() for row in tensor.unbind()])
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor.clone() if tensor.layout is torch.strided else tensor.to_dense()
