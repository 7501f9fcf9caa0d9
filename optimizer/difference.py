"""How far apart two tensors are, and how far apart rounding alone puts them.

Everything is pooled: one `Pool` gathers the differences of one output over all calls. Two norms are kept side by side.
The largest difference finds one element that is wrong; the root mean square finds a small error in many elements, which
hides behind the one element where rounding happened to be worst.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

# Points of a frontier beyond this can't be needed for any tolerance that a person writes down.
_FRONTIER = 256


@dataclass
class Pool:
    """Largest value and root mean square of non-negative figures, gathered bit by bit."""

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0

    def add(self, figures: torch.Tensor) -> None:
        """Gather the elements of a float64 tensor of any shape."""
        if figures.numel() == 0:
            return
        self.largest = max(self.largest, float(figures.max()))
        self.squares += float(figures.square().sum())
        self.count += figures.numel()

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0


def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b| in float64, elementwise; complex numbers by their modulus."""
    return (wide(a) - wide(b)).abs()


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64 or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def is_exact(tensor: torch.Tensor) -> bool:
    """Integers and booleans: equal or not, nothing between."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def unit(dtype: torch.dtype) -> float:
    """The spacing of a float dtype at 1; 0 for integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def least_noise(dtype: torch.dtype) -> float:
    """What a right answer may always be off by, in units in the last place of the output's scale.

    float32 and float64 sum in themselves: a bias that a folded convolution adds before its 300 products, and not after
    them, was seen to cost 6 units, which the original's own rounding doesn't show. The half precisions sum in float32
    and round once.
    """
    return 1.0 if dtype in (torch.float16, torch.bfloat16) else 4.0


def special(tensor: torch.Tensor) -> torch.Tensor:
    """0 where a number is finite, else which kind of not finite it is: NaN, +inf, -inf."""
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
    # One pass without a temporary: what isn't finite makes the sum not finite. A sum that overflows is looked at closely.
    total = tensor.sum(dtype=torch.float64)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


def frontier(
    errors: torch.Tensor, sizes: torch.Tensor, known: Iterable[tuple[float, float]]
) -> tuple[tuple[float, float], ...]:
    """The (error, size) pairs that decide whether `error <= atol + rtol * size` holds everywhere, for any atol and rtol.

    A pair is left out where another one has at least its error at no more than its size.
    """
    if errors.numel():
        order = torch.argsort(sizes.flatten())
        error, size = errors.flatten()[order], sizes.flatten()[order]
        running = torch.cummax(error, 0).values
        leads = torch.ones_like(error, dtype=torch.bool)
        leads[1:] = error[1:] > running[:-1]
        points = list(zip(error[leads].tolist(), size[leads].tolist(), strict=True))
    else:
        points = []
    kept: list[tuple[float, float]] = []
    for error_here, size_here in sorted([*known, *points], key=lambda point: (point[1], -point[0])):
        if not kept or error_here > kept[-1][0]:
            kept.append((error_here, size_here))
    # The largest errors are what a tolerance is about; a dropped one would be below all that stay.
    return tuple(kept[-_FRONTIER:])
