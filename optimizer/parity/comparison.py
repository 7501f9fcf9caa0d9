"""Gather the errors of a candidate over all calls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optimize_export.elementwise import all_finite, distance, is_exact, special, unit, wide
from optimize_export.errors import LoadError
from optimize_export.wording import append_once, dtype_name, error_summary
from optimizer.model import Call, Runs, first_difference
from optimizer.parity.differences import (
    Pool,
    SliceNoise,
    Slices,
    WorstSlice,
    cosine,
    error_statistics,
    has_classes,
    integer_agreement,
    lost_in_noise,
    pieces_of,
    top1_agreement,
)
from optimizer.parity.observe import Flatten, Observation, observe
from optimizer.parity.original import OriginalCall
from optimizer.parity.results import CallErrors, Measurement, OutputDifference, OutputNoise
from optimizer.parity.verdict import FACTOR, SLICE_FACTOR, ratio_of

# An error that is larger than allowed by at most this factor may be rounding that only further samples show.
DOUBTFUL = 64.0
# Kinks may explain the RMS error of a gradient, relative to the gradient's own RMS, up to this multiple of sqrt(unit).
# A number with an error of n units crosses a kink with a probability of about n units.
_MOST_EXPLAINED = 64
# If a sum of gradients is zero, rounding may leave at most this number of units of the largest gradient.
_LEFT_OF_A_SUM = 16
OTHER_ROWS = "another number of rows is chosen"
"""The start of a problem of a lossy candidate that chooses by scores; only the user's metric can judge it."""
# A frontier has at most this number of pairs: one for each 1/64 of a binade of sizes (1.1 %), or for coarser steps.
_FRONTIER = 256
_FINEST_STEPS = 64


@dataclass
class _Compared:
    """The errors of one output over all calls."""

    error: Pool
    mismatches: int = 0
    problems: list[str] = field(default_factory=list)
    where: str = ""
    frontier: tuple[tuple[float, float], ...] = ()
    calls: list[CallErrors] = field(default_factory=list)


class Comparison:
    """Gathers the errors of a candidate, call by call."""

    def __init__(
        self,
        noises: Mapping[str, OutputNoise],
        *,
        flat: bool,
        in_detail: bool = True,
        slices: Mapping[str, SliceNoise] | None = None,
        who: str = "the candidate",
    ) -> None:
        self.noises = noises
        # Whether the candidate returns flat tensors, which are matched by their order.
        self.flat = flat
        # Whether to keep the errors of each call, and the frontier that decides any `atol` and `rtol`.
        self.in_detail = in_detail
        self.slices = slices or {}
        self.who = who
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._compared: dict[str, _Compared] = {}
        self._lacking: dict[str, None] = {}
        # Inputs that the original changes in place, which the outputs of a file don't show.
        self._unmatched: dict[str, None] = {}

    def run(self, runs: Runs, one: OriginalCall, call: Call, flatten: Flatten | None, *, training: bool) -> None:
        """Run the candidate at a call and add its errors; an exception becomes a problem of the candidate.

        Args:
            training: compare gradients and buffers too.
        """
        try:
            with runs.fresh() as module:
                got = observe(module, call, seed=one.seed, training=training, flatten=flatten, names=one.names)
        except LoadError:
            raise
        except Exception as error:  # noqa: BLE001 - the candidate is foreign code; what it raises is a result
            append_once(self.problems, f"{self.who.capitalize()} raises at {one.where}: {error_summary(error)}")
            return
        self.add(one, got)

    def add(self, one: OriginalCall, got: Observation) -> None:
        """Add the errors of one call."""
        if not self.flat and (difference := first_difference(one.own.structure, got.structure)):
            append_once(self.problems, f"The outputs have a different structure: {difference}")
            return
        for name, value in one.aligned(dict(self._matched(one, got))).items():
            self._compare(one, name, value)
        for name in got.of_kind("input"):
            if one.own.kinds.get(name) != "input":
                append_once(self.problems, f"{_changed(name)} by {self.who} only")

    def is_doubtful(self) -> bool:
        """Whether further samples of rounding may explain all errors that are too large."""
        if self.problems or any(one.problems or one.mismatches for one in self._compared.values()):
            return False
        beyond = [
            ratio_of(noise, one.error.largest, one.error.rms)
            for name, one in self._compared.items()
            if (noise := self.noises[name]).deterministic and not noise.declared
        ]
        worst = (self._worst_slice(name, one) for name, one in self._compared.items())
        beyond += [FACTOR * each.error / (SLICE_FACTOR * each.noise) for each in worst if each is not None]
        return FACTOR < max(beyond, default=0.0) <= DOUBTFUL * FACTOR

    def beyond(self, noises: Mapping[str, OutputNoise]) -> set[str]:
        """The outputs whose errors are larger than these noises allow."""
        compared = ((noises[name], one.error) for name, one in self._compared.items())
        return {
            noise.name
            for noise, error in compared
            if noise.kind == "output" and noise.deterministic and is_beyond(error, noise)
        }

    def gradients_to_judge_in_float64(self) -> set[str]:
        """The gradients whose errors kinks may explain; empty if anything else is wrong by more than rounding."""
        found = set[str]()
        for name, one in self._compared.items():
            noise = self.noises[name]
            if not noise.deterministic:
                continue
            if one.problems or one.mismatches:
                return set()
            beyond = ratio_of(noise, one.error.largest, one.error.rms)
            if noise.kind == "gradient" and one.error.rms <= self._largest_explained(name):
                if beyond > FACTOR:
                    found.add(name)
            elif beyond > FACTOR * DOUBTFUL:
                return set()
        return set() if self.problems else found

    def settle(self, errors: Mapping[str, Pool]) -> None:
        """Replace errors that kinks may explain by the errors in float64."""
        for name, error in errors.items():
            self._compared[name].error = error
        first, *others = (name for name in self._compared if name in errors)
        which = f"{first} and {len(others)} more" if others else first
        why = "rounding at a kink (as of ReLU at 0) or in a long sum may explain the error"
        self.notes.append(f"Judged in float64, because {why}: {which}.")

    def finish(self, blank: Measurement) -> Measurement:
        """Return the measurement with all errors.

        Args:
            blank: a measurement without outputs, which says how the calls were run.
        """
        if self._lacking:
            self.notes.append(f"Not compared, because the candidate lacks them: {', '.join(self._lacking)}.")
        for name in self._unmatched:
            self.notes.append(
                f"{_changed(name)} by the original, which files can't show: return the changed tensor if you need it."
            )
        return replace(
            blank,
            outputs=tuple(self._difference(name, one) for name, one in self._compared.items()),
            problems=tuple(self.problems),
            notes=(*blank.notes, *self.notes),
        )

    def _largest_explained(self, name: str) -> float:
        """The largest RMS error of a gradient that rounding in the backward pass may explain."""
        noise = self.noises[name]
        root = math.sqrt(unit(getattr(torch, noise.dtype)))
        largest = max(other.rms for other in self.noises.values() if other.kind == noise.kind)
        # The gradient of a bias before a BatchNorm is a sum that is zero, so its value is only rounding error.
        return max(_MOST_EXPLAINED * root * noise.rms, root * largest if self._is_rounding(name) else 0.0)

    def _is_rounding(self, name: str) -> bool:
        """Whether a gradient is only the rounding error of a sum that is zero."""
        noise = self.noises[name]
        if noise.signal is not None or lost_in_noise(noise.rms, noise.noise_rms):
            return True
        # If the original itself computes in float64, its noise is one sample of few numbers. So compare with the other
        # gradients, which are as large as the terms of the sum.
        step = unit(getattr(torch, noise.dtype))
        largest = max(other.rms for other in self.noises.values() if other.kind == noise.kind)
        return step <= unit(torch.float32) and noise.rms <= _LEFT_OF_A_SUM * step * largest

    def _difference(self, name: str, one: _Compared) -> OutputDifference:
        worst = self._worst_slice(name, one)
        return OutputDifference(
            noise=self.noises[name],
            max_error=one.error.largest,
            rms_error=one.error.rms,
            mismatches=one.mismatches,
            problems=tuple(one.problems),
            where=one.where,
            frontier=one.frontier,
            calls=tuple(one.calls),
            slice=worst.where if worst else "",
            slice_error=worst.error if worst else 0.0,
            slice_noise=worst.noise if worst else 0.0,
        )

    def _worst_slice(self, name: str, one: _Compared) -> WorstSlice | None:
        slices = one.error.slices
        return self.slices[name].worst(slices) if slices is not None and name in self.slices else None

    def _matched(self, one: OriginalCall, got: Observation) -> Iterator[tuple[str, torch.Tensor]]:
        """The candidate's values by the original's names."""
        expected = one.own.of_kind("output")
        if self.flat:
            values = [got.values[name] for name in got.of_kind("output")]
            if len(values) != len(expected):
                append_once(
                    self.problems, f"The candidate returns {len(values)} tensors, and the original {len(expected)}"
                )
                return
            yield from zip(expected, values, strict=True)
        else:
            yield from ((name, got.values[name]) for name in expected)
        for name, kind in one.own.kinds.items():
            if kind == "output":
                continue
            if kind == "number" and self.flat:
                # In a file, the number is a constant.
                continue
            if kind == "input" and self.flat:
                self._unmatched[name] = None
            elif name in got.values:
                yield name, got.values[name]
            elif kind == "input":
                append_once(self.problems, f"{_changed(name)} by the original only")
            else:
                self._lacking[name] = None

    def _compare(self, one: OriginalCall, name: str, value: torch.Tensor) -> None:
        slices = Slices() if name in self.slices else None
        compared = self._compared.setdefault(name, _Compared(Pool(slices=slices)))
        own, truth = one.own.values[name], one.truth.values[name]
        if problem := _incomparable(own, value):
            if any(name in order.names and order.has_other_rows(own, value) for order in one.orders):
                problem = f"{OTHER_ROWS}: {problem}"
            append_once(compared.problems, f"{problem} at {one.where}")
            return
        if is_exact(own):
            self._compare_integers(compared, one, value, own, one.unstable[name])
            return
        plain: torch.Tensor | None = None
        target = truth
        if not all_finite(own, value, truth):
            odd_own, odd_value = special(own), special(value)
            if count := int(((odd_own != odd_value) & ~one.unstable[name]).count_nonzero()):
                where = f"({count} at {one.where})"
                append_once(compared.problems, f"NaN or inf in different places than in the original {where}")
            plain = (odd_own == 0) & (odd_value == 0)
            # Where the float64 number isn't finite, use the original's own number.
            target = torch.where(special(truth) == 0, wide(truth), wide(own))
        before = compared.error.largest
        # The errors of the whole output, for its statistics.
        errors = torch.empty(own.shape if self.in_detail else (), dtype=torch.float64)
        for at in pieces_of(own):
            finite = None if plain is None else plain[at]
            piece = distance(value[at], target[at])
            compared.error.add(piece, finite, of=own, at=at)
            if self.in_detail:
                errors[at] = piece
                marked: Any = ... if finite is None else finite
                difference, size = distance(value[at], own[at]), wide(own[at]).abs()
                compared.frontier = frontier(difference[marked], size[marked], compared.frontier)
        if compared.error.largest > before:
            compared.where = one.where
        if not self.in_detail:
            return
        everywhere: Any = ... if plain is None else plain
        statistics: dict[str, Any] = error_statistics(errors[everywhere], value[everywhere], target[everywhere])
        orders = [order for order in one.orders if name in order.names]
        for order in orders:
            if order.scores == name and statistics:
                # Coordinates next to the scores are larger, and would hide their error.
                alone = (order.scores_in(each).flatten().nan_to_num() for each in (value, target))
                statistics["cosine"] = min(statistics["cosine"], cosine(*alone))
        # The largest of sorted scores is the first one, and rows of other numbers have no classes.
        if one.own.kinds.get(name) == "output" and not orders and has_classes(name, value):
            agreement, undecided = top1_agreement(value, target, self.noises[name].noise)
            statistics |= {"agreement": agreement, "undecided": undecided}
        compared.calls.append(CallErrors(one.batch_size, one.draw, **statistics, sizes=dict(one.sizes)))

    def _compare_integers(
        self, compared: _Compared, one: OriginalCall, value: torch.Tensor, own: torch.Tensor, ties: torch.Tensor
    ) -> None:
        wrong = int(((own != value) & ~ties).count_nonzero())
        compared.mismatches += wrong
        compared.where = compared.where or (one.where if wrong else "")
        if self.in_detail:
            agreement, undecided = integer_agreement(value, own, ties)
            compared.calls.append(
                CallErrors(one.batch_size, one.draw, agreement=agreement, undecided=undecided, sizes=dict(one.sizes))
            )


def is_beyond(error: Pool, noise: OutputNoise) -> bool:
    largest, rms = noise.allowed(FACTOR)
    return error.largest > largest or error.rms > rms


def _incomparable(own: torch.Tensor, value: torch.Tensor) -> str | None:
    if value.shape != own.shape:
        return f"the shape is {tuple(value.shape)}, but should be {tuple(own.shape)}"
    if value.dtype != own.dtype:
        return f"the dtype is {dtype_name(value.dtype)}, but should be {dtype_name(own.dtype)}"
    return None


def _changed(name: str) -> str:
    """The start of a sentence about an input: "x (changed in place)" gives "x is changed in place"."""
    return name.replace(" (changed", " is changed").rstrip(")")


def frontier(
    errors: torch.Tensor, sizes: torch.Tensor, known: Sequence[tuple[float, float]], steps: int = _FINEST_STEPS
) -> tuple[tuple[float, float], ...]:
    """The (error, size) pairs that decide for any atol and rtol whether `error <= atol + rtol * size` everywhere.

    Each step of size gives one pair, with its largest error and its smallest size. The pair is dropped if one of smaller
    size has at least its error. If an element violates a tolerance, a kept pair violates it too. The reverse holds to
    within one step of size.

    Args:
        errors, sizes: float64 of one shape, non-negative.
        known: the frontier of the calls so far.
        steps: the number of steps per binade of size; fewer if too many pairs remain.
    """
    pairs = torch.tensor(known, dtype=torch.float64).reshape(-1, 2)
    errors, sizes = torch.cat([errors.flatten(), pairs[:, 0]]), torch.cat([sizes.flatten(), pairs[:, 1]])
    if not sizes.numel():
        return ()
    places = sizes.log2().mul_(steps).floor_()
    # Zeros have a step of their own, below the others.
    places = (places - places[sizes > 0].amin() + 1 if sizes.any() else places).clamp_(min=0).long()
    count = int(places.max()) + 1
    worst = sizes.new_full((count,), -1.0).scatter_reduce_(0, places, errors, "amax")
    least = sizes.new_full((count,), math.inf).scatter_reduce_(0, places, sizes, "amin")
    leads = worst > torch.cat([worst.new_full((1,), -1.0), worst.cummax(0).values[:-1]])
    kept = tuple(zip(worst[leads].tolist(), least[leads].tolist(), strict=True))
    return kept if len(kept) <= _FRONTIER else frontier(errors[:0], sizes[:0], kept, steps // 2)
