"""How far apart two tensors are, and how far apart rounding alone puts them.

Everything is pooled: one `Pool` gathers the differences of one output over all calls. Two norms are kept side by side.
The largest difference finds one element that is wrong; the root mean square finds a small error in many elements, which
hides behind the one element where rounding happened to be worst.

`Slices` keeps the largest figure of each channel and of each column apart: an error in one that is a million times smaller
than the largest hides behind the others in both norms. So it does with numbers of each order of magnitude: a mask of -1e9
in every column hides all else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

# A frontier of more points than this is thinned: its sizes are taken in steps of 1/64 of a binade (1.1 %), or in coarser ones.
_FRONTIER = 256
_FINEST_STEPS = 64
# More pairs than this aren't sorted before those are left out that a few of them stand above.
_SORTED_AT_ONCE = 1 << 16
# Stands among the dims for the bands of magnitude: numbers below 2**8, from there to 2**16, and so on, the last one open.
_BY_SIZE = -1
_BITS = 8
_BANDS = 16


class Slices:
    """The largest of non-negative figures per index of dim 1 and of the last dim, and per band of magnitude, over all calls.

    A dim whose size isn't the same in every call is dropped, and dim 0, the batch, is none. The bands stand as dim -1.

    Attributes:
        largest: dim -> float64 tensor of shape (size of the dim,); NaN for a band without numbers.
        samples: dim -> how many figures each of its slices has, int64 of the same shape.
    """

    def __init__(self) -> None:
        self.largest: dict[int, torch.Tensor] = {}
        self.samples: dict[int, torch.Tensor] = {}
        self._dropped: set[int] = set()

    def add(self, figures: torch.Tensor, of: torch.Tensor, where: torch.Tensor | None = None) -> None:
        """Gather the elements of a float64 tensor of any shape; all calls have the same number of dims.

        Args:
            of: what the original gave, whose magnitudes make the bands.
            where: bool, the elements to gather; those of `of` are finite.
        """
        self._add_dims(figures if where is None else torch.where(where, figures, 0.0))
        self._add_bands(*((figures, of) if where is None else (figures[where], of[where])))

    def _add_dims(self, figures: torch.Tensor) -> None:
        if figures.numel() == 0:
            return
        for dim in {1, figures.dim() - 1} - {-1, 0} - self._dropped if figures.dim() > 1 else ():
            others = [other for other in range(figures.dim()) if other != dim]
            largest = figures.amax(others)
            known = self.largest.get(dim)
            if known is not None and known.shape != largest.shape:
                self._dropped.add(dim)
                del self.largest[dim], self.samples[dim]
                continue
            self.largest[dim] = largest if known is None else torch.maximum(known, largest)
            more = torch.full(largest.shape, figures.numel() // len(largest))
            self.samples[dim] = self.samples.get(dim, 0) + more

    def _add_bands(self, figures: torch.Tensor, of: torch.Tensor) -> None:
        if figures.numel() == 0:
            return
        largest = self.largest.setdefault(_BY_SIZE, torch.full((_BANDS,), math.nan, dtype=torch.float64))
        samples = self.samples.setdefault(_BY_SIZE, torch.zeros(_BANDS, dtype=torch.int64))
        sizes = of.abs()
        if float(sizes.max()) < 2**_BITS:
            parts = [(0, figures)]
        else:
            bands = (torch.frexp(wide(sizes)).exponent - 1).div(_BITS, rounding_mode="floor").clamp(0, _BANDS - 1)
            parts = [(int(band), figures[bands == band]) for band in bands.unique()]
        for band, inside in parts:
            # fmax takes the number where the other is NaN.
            largest[band] = torch.fmax(largest[band], inside.max())
            samples[band] += inside.numel()


@dataclass
class Pool:
    """Largest value and root mean square of non-negative figures, gathered bit by bit; with `slices`, per slice too."""

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0
    slices: Slices | None = None

    def add(self, figures: torch.Tensor, where: torch.Tensor | None = None, *, of: torch.Tensor) -> None:
        """Gather the elements of a float64 tensor of any shape; with `where` (bool, same shape) those that it marks.

        `of` is what the original gave, in the same shape.
        """
        if self.slices is not None:
            self.slices.add(figures, of, where)
        figures = figures if where is None else figures[where]
        if figures.numel() == 0:
            return
        self.largest = max(self.largest, float(figures.max()))
        self.squares += float(figures.square().sum())
        self.count += figures.numel()

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0


@dataclass(frozen=True)
class WorstSlice:
    """The slice whose error is largest beside its own noise."""

    where: str
    error: float
    noise: float


@dataclass
class SliceNoise:
    """What rounding alone does to each slice of one output: dim -> float64 tensor of shape (size of the dim,).

    Slices of fewer than `least_samples` numbers, those that are all zero in the original, and bands of magnitude that one of
    the measurements has no number of, aren't in it (NaN).
    """

    noise: dict[int, torch.Tensor] = field(default_factory=dict)

    def worst(self, errors: Slices) -> WorstSlice | None:
        found: WorstSlice | None = None
        for dim, noise in self.noise.items():
            error = errors.largest.get(dim)
            if error is None or error.shape != noise.shape:
                continue
            ratios = torch.nan_to_num(error / noise, nan=-1.0)
            index = int(ratios.argmax())
            if float(ratios[index]) < 0:
                continue
            here = WorstSlice(_place(dim, index), float(error[index]), float(noise[index]))
            if found is None or here.error * found.noise > found.error * here.noise:
                found = here
        return found

    def raise_to(self, more: Slices) -> None:
        """Take another measurement of the noise in: the larger of the two stays."""
        for dim, noise in self.noise.items():
            other = more.largest.get(dim)
            if other is None or other.shape != noise.shape:
                noise.fill_(math.nan)
            else:
                self.noise[dim] = torch.where(noise.isnan(), noise, torch.maximum(noise, other))

    def raised_to(self, more: Pool) -> SliceNoise:
        """A copy that takes another measurement in."""
        twin = SliceNoise({dim: noise.clone() for dim, noise in self.noise.items()})
        twin.raise_to(more.slices or Slices())
        return twin

    def least(self) -> float:
        """The noise of the quietest slice; infinite where there is none."""
        figures = [noise[~noise.isnan()] for noise in self.noise.values()]
        return min((float(figure.min()) for figure in figures if figure.numel()), default=math.inf)


def _place(dim: int, index: int) -> str:
    if dim != _BY_SIZE:
        return f"index {index} of dim {dim}"
    low, high = (f"{2.0 ** (_BITS * bound):g}" for bound in (index, index + 1))
    return f"a number below {high}" if index == 0 else f"a number from {low}" + f" to {high}" * (index < _BANDS - 1)


def slice_noise(size: Slices, noises: Iterable[Slices], dtype: torch.dtype, *, least_samples: int) -> SliceNoise:
    """The noise of each slice: the largest of what was measured in it, and no less than rounding to its own scale gives.

    Args:
        size: the magnitudes of the original.
        noises: each way in which its noise was measured.
    """
    result = SliceNoise()
    measured = list(noises)
    for dim, largest in size.largest.items():
        floor = least_noise(dtype) * unit(dtype) * largest + torch.finfo(dtype).smallest_normal
        judged = (largest > 0) & (size.samples[dim] >= least_samples)
        result.noise[dim] = torch.where(judged, floor, math.nan)
    for slices in measured:
        result.raise_to(slices)
    return result


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


def floors(dtype: torch.dtype, scale: float, rms: float) -> tuple[float, float]:
    """What an output of that largest magnitude and root mean square may always be off by: at most, and in the root mean
    square."""
    least = least_noise(dtype) * unit(dtype)
    return least * scale, least * rms / 2


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

    A pair is left out where another one has at least its error at no more than its size. Of very many, those of nearly one
    size become one with the largest error and the smallest size: no tolerance that a left-out pair breaks holds for what
    stays, and one may be refused that is kept by the width of a step.
    """
    points = list(zip(*(values.tolist() for values in _leading(errors.flatten(), sizes.flatten())), strict=True))
    kept: list[tuple[float, float]] = []
    for error_here, size_here in sorted([*known, *points], key=lambda point: (point[1], -point[0])):
        if not kept or error_here > kept[-1][0]:
            kept.append((error_here, size_here))
    # Halved, steps nest: what was thinned before moves no further than to the coarsest one.
    steps: float = _FINEST_STEPS
    while len(kept) > _FRONTIER:
        kept, steps = _thinned(kept, steps), steps / 2
    return tuple(kept)


def _thinned(points: list[tuple[float, float]], steps: float) -> list[tuple[float, float]]:
    """The points, both figures rising, with those between two steps of so many per binade of size taken together."""
    by_step: dict[float, tuple[float, float]] = {}
    for error, size in points:
        step = math.floor(math.log2(size) * steps) if size else -math.inf
        by_step[step] = error, by_step.get(step, (error, size))[1]
    return list(by_step.values())


def _leading(error: torch.Tensor, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of two tensors of shape (pairs,) that `frontier` keeps, by rising size, with some of equal size.

    Sorting the tens of millions of logits of a language model takes longer than all else that is done with them. What
    leads among one pair in many already stands above nearly all others, so few are left to sort.
    """
    if len(error) > _SORTED_AT_ONCE:
        step = -(-len(error) // _SORTED_AT_ONCE)
        known, at = _leading(error[::step], size[::step])
        # The largest known error among sizes strictly below: a pair at or under it is behind one that leads. Of the pairs
        # with the size of a known one nothing is dropped here, among them that one itself.
        bound = torch.cat([known.new_full((1,), -1.0), known])[torch.bucketize(size, at, out_int32=True)]
        ahead = error > bound
        error, size = error[ahead], size[ahead]
    order = torch.argsort(size)
    error, size = error[order], size[order]
    leads = torch.ones_like(error, dtype=torch.bool)
    leads[1:] = error[1:] > torch.cummax(error, 0).values[:-1]
    return error[leads], size[leads]
