"""Check the inputs of a loaded program before it runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exporters.base import TensorSpec
from exporters.evidence import dtype_name


def refuse_unfit(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if the number, dtype or shape of inputs is wrong; dims with one name must have one size."""
    if len(tensors) != len(specs):
        raise ValueError(f"The file takes {len(specs)} tensors, not {len(tensors)}.")
    sizes: dict[str, int] = {}
    for spec, tensor in zip(specs, tensors, strict=True):
        dtype, shape = dtype_name(tensor), list(tensor.shape)
        fits = len(shape) == len(spec.shape) and all(
            size == (sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
            for wanted, size in zip(spec.shape, shape, strict=True)
        )
        if dtype != spec.dtype or not fits:
            wanted = ", ".join(str(sizes.get(size, size) if isinstance(size, str) else size) for size in spec.shape)
            raise ValueError(f"Input `{spec.name}` of the file is {spec.dtype}[{wanted}], but got {dtype}{shape}.")
