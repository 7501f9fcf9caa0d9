"""Numbers of tensors, element by element: distances, and what is finite. Shared by all comparisons of outputs."""

from __future__ import annotations

import math

import torch

HALF = frozenset({torch.float16, torch.bfloat16})
"""The dtypes of 16-bit floats."""


def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b| in float64, elementwise; for complex numbers the modulus."""
    difference = wide(a) - wide(b)
    # In place, because a second tensor of a language model's logits takes as long to allocate as to compute.
    return difference.abs() if difference.is_complex() else difference.abs_()


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64 or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def is_exact(tensor: torch.Tensor) -> bool:
    """Whether elements are integers or booleans, which are equal or wrong: rounding excuses no difference."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def unit(dtype: torch.dtype) -> float:
    """The spacing of a float dtype at 1; 0 for integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def special(tensor: torch.Tensor) -> torch.Tensor:
    """An int8 code per element: 0 where it is finite, and one code for each kind of NaN, inf and -inf."""
    if all_finite(tensor):
        return torch.zeros((), dtype=torch.int8).expand(tensor.shape)
    parts = (tensor.real, tensor.imag) if tensor.is_complex() else (tensor,)
    code = torch.zeros(tensor.shape, dtype=torch.int8)
    for place, part in enumerate(parts):
        values = part.to(torch.float64)
        if bool(values.isfinite().all()):
            continue
        kind = torch.where(
            values.isnan(), 1, torch.where(values == math.inf, 2, torch.where(values == -math.inf, 3, 0))
        )
        code += kind.to(torch.int8) * 4**place
    return code


def all_finite(*tensors: torch.Tensor) -> bool:
    """Whether every element of every tensor is finite."""
    return all(_finite(torch.view_as_real(t) if t.is_complex() else t) for t in tensors)


def _finite(tensor: torch.Tensor) -> bool:
    # The sum needs one pass and no temporary, and one element that isn't finite makes it not finite. A sum of finite
    # elements may overflow too, so then the elements are checked. A sum in another dtype would convert element by element.
    total = tensor.sum(dtype=torch.float32 if tensor.dtype in HALF else None)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())
