"""Differences of tensors: of each element, and over all calls of the whole output and of each slice of it.

A `Pool` keeps two norms. The largest error finds a single wrong element. The root mean square finds a small error in
many elements, which the element with the worst rounding hides from the first norm.

Both norms miss an error in a channel of small numbers next to one of large numbers (scores next to box coordinates). So
`Slices` keeps the largest error of each channel and of each column. A mask of -1e9 in every column hides all other
numbers of that column. So `Slices` also keeps the largest error of each band of magnitude.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import torch

from optimize_export.elementwise import HALF, all_finite, distance, special, unit, wide

# Number of elements in the sample that bounds a percentile.
_SAMPLE = 1 << 16
PIECE = 1 << 18
"""Number of elements to convert to float64 at once.

Larger pieces leave the cache, and the memory for each is mapped anew: on a language model's logits, most operations take
ten times as long.
"""


def least_noise(dtype: torch.dtype) -> float:
    """The error that a correct output may always have, in ulps of the output's scale.

    float32 and float64 accumulate in their own precision. A folded convolution that adds its bias before its 300
    products, and not after them, had an error of 6 ulps, which the original's own rounding doesn't show. The half
    precisions accumulate in float32 and round once.
    """
    return 1.0 if dtype in HALF else 4.0


def floors(dtype: torch.dtype, scale: float, rms: float) -> tuple[float, float]:
    """The errors that a correct output may always have: the largest error, and the root mean square of its errors.

    Args:
        scale: the output's largest magnitude.
        rms: the output's root mean square.
    """
    least = least_noise(dtype) * unit(dtype)
    return least * scale, least * rms / 2


def where_finite(*tensors: torch.Tensor) -> torch.Tensor | None:
    """The elements at which every tensor is finite, as bools of their shape; None if these are all elements."""
    if all_finite(*tensors):
        return None
    return functools.reduce(operator.and_, (special(tensor) == 0 for tensor in tensors))


def lost_in_noise(rms: float, noise_rms: float) -> bool:
    """Whether rounding noise is a quarter of the values or more, in the root mean square."""
    return 4 * noise_rms > rms


# The key of the bands of magnitude among the dims: numbers below 2**8, from 2**8 to 2**16, and so on; the last band has
# no upper end.
_BANDS = -1
_BITS_PER_BAND = 8
_BAND_COUNT = 16
Place = EllipsisType | tuple[slice, ...]
"""An index of a piece: the whole tensor, or a part of dim 0, or a part of dim 1 of a part of dim 0."""


def pieces_of(tensor: torch.Tensor) -> Iterator[Place]:
    """Indices that cut a tensor into pieces along dim 0, and along dim 1 where an element of dim 0 is large."""
    if tensor.numel() <= PIECE or not tensor.dim():
        yield ...
        return
    row = tensor.numel() // tensor.shape[0]
    for rows in _cuts(tensor.shape[0], row):
        if row <= PIECE or tensor.dim() == 1:
            yield (rows,)
        else:
            yield from ((rows, columns) for columns in _cuts(tensor.shape[1], row // tensor.shape[1]))


def _cuts(length: int, each: int) -> Iterator[slice]:
    """Cut a dim of this length, each element of which has `each` numbers."""
    step = max(1, PIECE // each)
    yield from (slice(start, min(start + step, length)) for start in range(0, length, step))


class Slices:
    """The largest of non-negative values per index of dim 1 and of the last dim, and per band of magnitude.

    All calls are pooled. Dim 0, the batch, has no slices. A dim whose size differs between calls is dropped. The bands
    have the key -1.
    """

    def __init__(self) -> None:
        # By dim, float64 of shape (size of the dim,); NaN for a band without numbers.
        self.largest: dict[int, torch.Tensor] = {}
        # By dim, the number of values in each of its slices, int64 of the same shape.
        self.samples: dict[int, torch.Tensor] = {}
        self._dropped: set[int] = set()

    def add(self, values: torch.Tensor, of: torch.Tensor, where: torch.Tensor | None = None, at: Place = ...) -> None:
        """Add the elements of a float64 tensor of any shape; all calls have the same number of dims.

        Args:
            of: the original's output; its magnitudes choose the bands.
            where: bool, shape of `values`, the elements to add; `of` is finite there.
            at: the piece of `of` that has the shape of `values`.
        """
        self._add_dims(values if where is None else torch.where(where, values, 0.0), of.shape, at)
        inside = of[at]
        self._add_bands(*((values, inside) if where is None else (values[where], inside[where])))

    def _add_dims(self, values: torch.Tensor, shape: torch.Size, at: Place) -> None:
        if values.numel() == 0:
            return
        for dim in {1, len(shape) - 1} - {-1, 0} - self._dropped if len(shape) > 1 else ():
            if dim not in self.largest:
                self.largest[dim] = torch.zeros(shape[dim], dtype=torch.float64)
                self.samples[dim] = torch.zeros(shape[dim], dtype=torch.int64)
            elif len(self.largest[dim]) != shape[dim]:
                self._dropped.add(dim)
                del self.largest[dim], self.samples[dim]
                continue
            part = at[dim] if isinstance(at, tuple) and dim < len(at) else slice(None)
            largest = values.amax([other for other in range(len(shape)) if other != dim])
            self.largest[dim][part] = torch.maximum(self.largest[dim][part], largest)
            self.samples[dim][part] += values.numel() // len(largest)

    def _add_bands(self, values: torch.Tensor, of: torch.Tensor) -> None:
        if values.numel() == 0:
            return
        largest = self.largest.setdefault(_BANDS, torch.full((_BAND_COUNT,), math.nan, dtype=torch.float64))
        samples = self.samples.setdefault(_BANDS, torch.zeros(_BAND_COUNT, dtype=torch.int64))
        sizes = of.abs()
        if float(sizes.max()) < 2**_BITS_PER_BAND:
            parts = [(0, values)]
        else:
            exponents = torch.frexp(wide(sizes)).exponent - 1
            bands = exponents.div(_BITS_PER_BAND, rounding_mode="floor").clamp(0, _BAND_COUNT - 1)
            parts = [(int(band), values[bands == band]) for band in bands.unique()]
        for band, inside in parts:
            # fmax ignores the NaN of a band that had no numbers yet.
            largest[band] = torch.fmax(largest[band], inside.max())
            samples[band] += inside.numel()


@dataclass
class Pool:
    """The largest and the root mean square of non-negative values over all calls; with `slices`, per slice too."""

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0
    slices: Slices | None = None

    def add(
        self, values: torch.Tensor, where: torch.Tensor | None = None, *, of: torch.Tensor, at: Place = ...
    ) -> None:
        """Add the elements of a float64 tensor of any shape.

        Args:
            where: bool, same shape, the elements to add; by default all.
            of: the original's output.
            at: the piece of `of` that has the shape of `values`.
        """
        if self.slices is not None:
            self.slices.add(values, of, where, at)
        values = values if where is None else values[where]
        if values.numel() == 0:
            return
        self.largest = max(self.largest, float(values.max()))
        self.squares += float(torch.linalg.vector_norm(values)) ** 2
        self.count += values.numel()

    def add_distance(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the distances between two tensors of one shape, where both are finite; `a` is the original's."""
        for at in pieces_of(a):
            self.add(distance(a[at], b[at]), where_finite(a[at], b[at]), of=a, at=at)

    def add_sizes(self, a: torch.Tensor) -> None:
        """Add the magnitudes of the finite elements of a tensor."""
        for at in pieces_of(a):
            self.add(wide(a[at]).abs(), where_finite(a[at]), of=a, at=at)

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0


@dataclass(frozen=True)
class WorstSlice:
    """The slice with the largest ratio of error to noise."""

    where: str
    """As "index 3 of dim 1" or "a number below 256"."""
    error: float
    noise: float
    """The error that rounding alone causes there; `error` is the largest."""


@dataclass
class SliceNoise:
    """The error that rounding alone causes in each slice of one output.

    NaN marks a slice that isn't judged: it has fewer numbers than `least_samples`, it is all zero in the original, or
    it is a band of magnitude without numbers in one of the measurements.
    """

    noise: dict[int, torch.Tensor] = field(default_factory=dict)
    """By dim, float64 of shape (size of the dim,), with the keys of `Slices`."""

    def worst(self, errors: Slices) -> WorstSlice | None:
        """The slice with the largest ratio of error to noise; None if no slice is judged."""
        found: WorstSlice | None = None
        for dim, noise in self.noise.items():
            error = errors.largest.get(dim)
            if error is None or error.shape != noise.shape:
                continue
            ratios = torch.nan_to_num(error / noise, nan=-1.0)
            index = int(ratios.argmax())
            if float(ratios[index]) < 0:
                continue
            here = WorstSlice(_name_of(dim, index), float(error[index]), float(noise[index]))
            if found is None or here.error * found.noise > found.error * here.noise:
                found = here
        return found

    def raised_to(self, more: Slices | None) -> SliceNoise:
        """The larger of this and another measurement of each noise; NaN if the other one lacks the dim."""
        raised = {}
        for dim, noise in self.noise.items():
            other = None if more is None else more.largest.get(dim)
            if other is None or other.shape != noise.shape:
                raised[dim] = torch.full_like(noise, math.nan)
            else:
                raised[dim] = torch.where(noise.isnan(), noise, torch.maximum(noise, other))
        return SliceNoise(raised)

    def least(self) -> float:
        """The noise of the quietest slice; infinite if no slice is judged."""
        judged = [noise[~noise.isnan()] for noise in self.noise.values()]
        return min((float(noise.min()) for noise in judged if noise.numel()), default=math.inf)


def _name_of(dim: int, index: int) -> str:
    if dim != _BANDS:
        return f"index {index} of dim {dim}"
    low, high = (f"{2.0 ** (_BITS_PER_BAND * bound):g}" for bound in (index, index + 1))
    if index == 0:
        return f"a number below {high}"
    return f"a number from {low}" + (f" to {high}" if index < _BAND_COUNT - 1 else "")


def slice_noise(size: Slices, noises: Iterable[Slices], dtype: torch.dtype, *, least_samples: int) -> SliceNoise:
    """The noise of each slice: its largest measured noise, and at least the rounding error at the slice's own scale.

    It is never below `unit(dtype)`. A kernel may compute sigmoid, softmax or tanh with that absolute error, and not
    with an error of one ulp of each value, so slices aren't judged more strictly than that.

    Args:
        size: the magnitudes of the original.
        noises: the measurements of its noise.
        least_samples: the number of values that a slice needs to be judged.
    """
    result = SliceNoise()
    for dim, largest in size.largest.items():
        floor = least_noise(dtype) * unit(dtype) * largest + torch.finfo(dtype).smallest_normal
        judged = (largest > 0) & (size.samples[dim] >= least_samples)
        result.noise[dim] = torch.where(judged, floor.clamp(min=unit(dtype)), math.nan)
    for slices in noises:
        result = result.raised_to(slices)
    return result


def error_statistics(errors: torch.Tensor, value: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    """The statistics of a float output over the elements that are finite on both sides; empty where there are none.

    Args:
        errors: |value - target|, float64; all three have one shape.
        value, target: the outputs of the candidate and of the reference, of any float or complex dtype.
    """
    if errors.numel() == 0:
        return {}
    errors, value, target = errors.reshape(-1), value.reshape(-1), target.reshape(-1)
    return {
        "max_error": float(errors.max()),
        "mean_error": float(errors.mean()),
        "p999_error": percentile_999(errors),
        "cosine": cosine(value, target),
    }


def percentile_999(errors: torch.Tensor) -> float:
    """The 99.9th percentile of a float64 tensor of shape (elements,): 999 of 1000 elements don't exceed it.

    Only elements above a bound are sorted, of which a sample suggests that there are enough: `kthvalue` of all takes
    quadratic time on errors in descending order, as those of sorted scores may be.
    """
    above = errors.numel() // 1000 + 1
    sample = errors[:: -(-errors.numel() // _SAMPLE)]
    larger = errors[errors > sample.sort().values[int(0.995 * (sample.numel() - 1))]]
    return float((larger if larger.numel() >= above else errors).topk(above).values[-1])


def cosine(value: torch.Tensor, target: torch.Tensor) -> float:
    """The cosine of the angle between two tensors of shape (elements,), in float64; 1 if both are zero, 0 if one is."""
    scales = [max(_largest(piece) for piece in tensor.split(PIECE)) for tensor in (value, target)]
    if 0.0 in scales:
        return 1.0 if scales == [0.0, 0.0] else 0.0
    both = own = other = 0.0
    for pieces in zip(value.split(PIECE), target.split(PIECE), strict=True):
        # Without the scales, the squares of large numbers overflow and those of small numbers underflow.
        a, b = (wide(piece) / scale for piece, scale in zip(pieces, scales, strict=True))
        both += float(torch.vdot(a, b).real)
        own += float(torch.vdot(a, a).real)
        other += float(torch.vdot(b, b).real)
    return max(-1.0, min(1.0, both / math.sqrt(own * other)))


def _largest(piece: torch.Tensor) -> float:
    # Magnitudes of real numbers are exact in any dtype.
    return float((wide(piece) if piece.is_complex() else piece).abs().max())


def integer_agreement(value: torch.Tensor, own: torch.Tensor, ties: torch.Tensor) -> tuple[float | None, int]:
    """The share of equal elements, None where all are ties, and the number of ties, which are not compared.

    Args:
        value, own: the outputs of the candidate and of the original, integers or booleans of one shape.
        ties: bool, same shape, the elements that the original itself changes within its noise.
    """
    compared = own.numel() - int(ties.count_nonzero())
    equal = int(((value == own) & ~ties).count_nonzero())
    return equal / compared if compared else None, own.numel() - compared


def has_classes(name: str, value: torch.Tensor) -> bool:
    """Whether the last dim of an output holds one score per class.

    True for a float output of shape (rows, classes), and for one of shape (rows, positions, classes) whose name ends in
    "logits".
    """
    dims = (2, 3) if name.rpartition(".")[2].endswith("logits") else (2,)
    return value.is_floating_point() and value.dim() in dims and value.shape[-1] > 1


def top1_agreement(value: torch.Tensor, target: torch.Tensor, noise: float) -> tuple[float | None, int]:
    """The share of rows whose largest score is at the same class on both sides, and the number of undecided rows.

    A row is undecided, and not compared, where the two largest scores of the reference differ by no more than twice the
    noise, or where it has no largest score (NaN, several infinite scores). A candidate's row with NaN doesn't agree.

    Args:
        value, target: the outputs of the candidate and of the reference, shape (…, classes) each.
        noise: the error that rounding alone causes in a score.
    """
    classes = target.shape[-1]
    rows, decided, agreeing = target.numel() // classes, 0, 0
    step = max(1, PIECE // classes)
    for start in range(0, rows, step):
        mine, theirs = (wide(tensor.reshape(rows, classes)[start : start + step]) for tensor in (value, target))
        top = theirs.topk(2)
        clear = top.values[:, 0] - top.values[:, 1] > 2 * noise
        same = (mine.argmax(1) == top.indices[:, 0]) & ~mine.isnan().any(1)
        decided += int(clear.count_nonzero())
        agreeing += int((clear & same).count_nonzero())
    return agreeing / decided if decided else None, rows - decided
