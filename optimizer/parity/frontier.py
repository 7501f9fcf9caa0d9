"""The (error, size) pairs that decide any absolute and relative tolerance.

A measurement keeps them, so it can be judged again by other tolerances without the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

# A frontier with more pairs is thinned: sizes are grouped in steps of 1/64 of a binade (1.1 %), or in coarser steps.
_FRONTIER = 256
_FINEST_STEPS = 64
# With more pairs than this, those that a sample of the pairs dominates are dropped before sorting.
_SORTED_AT_ONCE = 1 << 12


def frontier(
    errors: torch.Tensor, sizes: torch.Tensor, known: Iterable[tuple[float, float]]
) -> tuple[tuple[float, float], ...]:
    """The (error, size) pairs that decide for any atol and rtol whether `error <= atol + rtol * size` everywhere.

    A pair is dropped if another pair has at least its error at no more than its size. If too many pairs remain, pairs
    of nearly equal size are merged into one with their largest error and their smallest size. If a dropped pair
    violates a tolerance, a kept pair violates it too. Merging may refuse a tolerance that holds by less than one step.

    Args:
        errors, sizes: float64 of one shape, non-negative.
        known: the frontier of the calls so far.
    """
    points = list(zip(*(values.tolist() for values in _leading(errors.flatten(), sizes.flatten())), strict=True))
    kept: list[tuple[float, float]] = []
    for error_here, size_here in sorted([*known, *points], key=lambda point: (point[1], -point[0])):
        if not kept or error_here > kept[-1][0]:
            kept.append((error_here, size_here))
    # Each coarser step contains whole finer ones, so repeated merging moves a pair by no more than one coarsest step.
    steps: float = _FINEST_STEPS
    while len(kept) > _FRONTIER:
        kept, steps = _thinned(kept, steps), steps / 2
    return tuple(kept)


def _thinned(points: list[tuple[float, float]], steps: float) -> list[tuple[float, float]]:
    """Merge the points of each step of size; errors and sizes rise along the points.

    Args:
        steps: number of steps per binade of size.
    """
    by_step: dict[float, tuple[float, float]] = {}
    for error, size in points:
        step = math.floor(math.log2(size) * steps) if size else -math.inf
        by_step[step] = error, by_step.get(step, (error, size))[1]
    return list(by_step.values())


def _leading(error: torch.Tensor, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of two tensors of shape (pairs,) that `frontier` keeps, sorted by size; sizes may be equal.

    Sorting the tens of millions of logits of a language model takes longer than all other work on them. The leading
    pairs of a small sample already dominate nearly all other pairs, so few pairs are left to sort.
    """
    if len(error) > _SORTED_AT_ONCE:
        step = -(-len(error) // _SORTED_AT_ONCE)
        known, at = _leading(error[::step], size[::step])
        # The largest known error at strictly smaller sizes: a pair with no larger error is dominated. The bound ignores
        # known pairs of the same size, so it drops no known pair itself.
        bound = torch.cat([known.new_full((1,), -1.0), known])[torch.bucketize(size, at, out_int32=True)]
        ahead = error > bound
        error, size = error[ahead], size[ahead]
    order = torch.argsort(size)
    error, size = error[order], size[order]
    leads = torch.ones_like(error, dtype=torch.bool)
    leads[1:] = error[1:] > torch.cummax(error, 0).values[:-1]
    return error[leads], size[leads]
