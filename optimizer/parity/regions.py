"""Compare a rewritten part of a model with the part before, on recorded inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from optimizer.errors import LoadError, UsageError
from optimizer.model import Call, clone, one_at_a_time, pinned_settings
from optimizer.parity.float64 import Float64Mode
from optimizer.parity.noise import RoundingNoise
from optimizer.parity.original import Original
from optimizer.parity.reference import Reference
from optimizer.parity.results import OutputNoise, ParityReport
from optimizer.parity.rounding import off_by_one_ulp, random_signs
from optimizer.parity.tensors import HALF, floors, half_as_float32
from optimizer.parity.verdict import FACTOR, judge
from passes.base import DeclaredError

Region = Callable[..., Any]

# A region with fewer numbers in its outputs runs again, to show its rounding; at most `_MOST_NEIGHBORS` times.
_ENOUGH_NUMBERS = 128
_MOST_NEIGHBORS = 32


@dataclass(frozen=True)
class RegionParity:
    """The judgement of one rewritten region; the numbers are those of its worst output.

    Attributes:
        scale: largest magnitude of that output.
    """

    ok: bool
    error: float
    noise: float
    ratio: float
    reason: str
    reference: str
    report: ParityReport | None = None
    scale: float = 0.0


class RegionReference:
    """A region, run once on recorded inputs; any number of rewritten regions can be compared with it.

    Attributes:
        in_float64: whether the truth is the region in float64 and not in its own dtype.
    """

    def __init__(self, reference: Reference | LoadError) -> None:
        self._reference = reference
        self.in_float64 = isinstance(reference, Reference) and reference.truth_in_float64

    @classmethod
    def measure(
        cls, old: Region, inputs: Sequence[tuple[Any, ...]], *, seed: int = 0, least_noise: bool = False
    ) -> RegionReference:
        """Run the old region on each of the inputs.

        Args:
            least_noise: take the least noise of the dtype in place of a measured one, which is never smaller.

        Raises:
            UsageError: no inputs.
        """
        if not inputs:
            raise UsageError("A region can't be checked without recorded inputs.")
        original = Original(old, "region", seed)
        original.ran_twice = least_noise
        with one_at_a_time, pinned_settings() as settings:
            for number, args in enumerate(inputs):
                original.run(number, 0, Call(tuple(args), {}), keep_call=True, label=f"recorded input {number}")
            try:
                original.check()
                rounding = RoundingNoise(original, frozenset() if least_noise else None)
                return cls(Reference(original, rounding, settings, 1))
            except LoadError as error:
                return cls(error)

    def allowing(self, declared: DeclaredError) -> RegionReference:
        """The reference for a region with an error that its pass declares, on top of rounding."""
        reference = self._reference
        return RegionReference(reference.allowing(declared) if isinstance(reference, Reference) else reference)

    def compare(self, new: Region, *, factor: float = FACTOR, by_own_error: bool = False) -> RegionParity:
        """Compare a rewritten region by the rule of `judge`.

        Outputs without signal are no failure here: a region may well answer zero.

        Args:
            by_own_error: leave the response to one ulp out of the noise; the old region's own error alone is allowed. In half
                precision one ulp of a weight is more than rounding does where products cancel.
        """
        if isinstance(self._reference, LoadError):
            return RegionParity(False, math.inf, 0.0, math.inf, str(self._reference), "none")
        measurement = self._reference.compare(new)
        if by_own_error:
            outputs = (replace(output, noise=_own_error_alone(output.noise)) for output in measurement.outputs)
            measurement = replace(measurement, outputs=tuple(outputs))
        report = judge(measurement, factor=factor)
        failed = report.verdict == "failed"
        judged = [output for output in report.outputs if output.judged]
        worst = max(judged, key=lambda output: (not output.ok, output.ratio), default=None)
        scales = {output.noise.name: output.noise.scale for output in measurement.outputs}
        return RegionParity(
            ok=not failed and worst is not None,
            error=worst.max_error if worst else 0.0,
            noise=worst.noise if worst else 0.0,
            ratio=worst.ratio if worst else 0.0,
            reason=report.reason if failed or worst is not None else "there is no deterministic output to compare",
            reference=report.reference,
            report=report,
            scale=scales.get(worst.name, 0.0) if worst else 0.0,
        )


def check_region(
    old: Region, new: Region, inputs: Sequence[tuple[Any, ...]], *, factor: float = FACTOR, seed: int = 0
) -> RegionParity:
    """Compare a rewritten region with the old one on recorded inputs.

    Raises:
        UsageError: no inputs.
    """
    return RegionReference.measure(old, inputs, seed=seed).compare(new, factor=factor)


def check_change(
    old: Region,
    new: Region,
    values: tuple[Any, ...],
    *,
    declared: DeclaredError | None = None,
    autocast: torch.dtype | None = None,
) -> list[tuple[RegionParity, RegionParity | None]]:
    """Check one change of a pass: its algebra, and in half precision its rounding too.

    Most changes are as close to the old region as the least noise allows, which one run of each shows. For the others the
    noise is measured. A rewrite may sum in another order, and a few elements show too little of that to judge it. In float64
    what is left is the algebra, and the rounding of the new weights, which the old region's noise covers. In half precision
    the noise covers too much: there the new region must be about as close to float64 as the old one. The whole model is
    judged afterwards.

    Args:
        values: inputs of the region.
        declared: an error that the pass declares.
        autocast: the dtype of an autocast around the whole model.

    Returns:
        For each way to compute the region, its algebra and its rounding; None where rounding isn't judged.
    """
    given = values
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    if torch.float32 in dtypes and dtypes & HALF and not _runs(old, values):
        # Under autocast the region casts what it reads; by itself it computes in float32.
        values = tuple(map(half_as_float32, values))
    with pinned_settings():
        found = [_check(old, new, values, declared)]
        if autocast is not None and found[0][0].ok:
            in_half = _allowing(_reference_in_half(_under(autocast, old), given), declared)
            found.append((found[0][0], in_half.compare(_under(autocast, new), by_own_error=True)))
    return found


def _check(
    old: Region, new: Region, values: tuple[Any, ...], declared: DeclaredError | None
) -> tuple[RegionParity, RegionParity | None]:
    def in_float64(*values: Any) -> Any:
        # The region may write to its inputs.
        copies = clone(values)
        with Float64Mode():
            outputs = new(*values)
        # In the dtypes of its own outputs, which may differ from those of its inputs.
        return pytree.tree_map(_as_dtype_of, outputs, new(*copies))

    is_half = any(isinstance(value, torch.Tensor) and value.dtype in HALF for value in values)
    if not is_half:
        at_once = _allowing(RegionReference.measure(old, [values], least_noise=True), declared).compare(new)
        if at_once.ok:
            return at_once, None
    reference = _reference_in_half(old, values) if is_half else RegionReference.measure(old, [values])
    reference = _allowing(reference, declared)
    if not reference.in_float64:
        return reference.compare(new), None
    algebra = reference.compare(in_float64)
    return algebra, reference.compare(new, by_own_error=True) if is_half and algebra.ok else None


def _allowing(reference: RegionReference, declared: DeclaredError | None) -> RegionReference:
    return reference if declared is None else reference.allowing(declared)


def _reference_in_half(old: Region, values: tuple[Any, ...]) -> RegionReference:
    return RegionReference.measure(old, [values, *_neighbors(old, values)])


def _neighbors(region: Region, values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Inputs that are off by one ulp, as many as show the rounding error of the region.

    The rounding of a single number is chance: few outputs may have no error at all. Without float inputs there are none.
    """
    if not any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values):
        return
    with torch.no_grad():
        outputs = pytree.tree_leaves(region(*values))
    numbers = sum(leaf.numel() for leaf in outputs if isinstance(leaf, torch.Tensor))
    generator = torch.Generator().manual_seed(0)
    for _ in range(min(_MOST_NEIGHBORS, _ENOUGH_NUMBERS // max(numbers, 1))):
        signs = random_signs(generator)
        yield tuple(
            off_by_one_ulp(value, signs) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for value in values
        )


def _under(autocast: torch.dtype, region: Region) -> Region:
    def run(*values: Any) -> Any:
        tensors = (value for value in values if isinstance(value, torch.Tensor))
        device = next((tensor.device.type for tensor in tensors), "cpu")
        with torch.autocast(device, autocast, cache_enabled=False):
            return region(*values)

    return run


def _runs(region: Region, values: tuple[Any, ...]) -> bool:
    try:
        with torch.no_grad():
            region(*clone(values))
    except RuntimeError:
        return False
    return True


def _own_error_alone(noise: OutputNoise) -> OutputNoise:
    """The noise without the response to changes of one ulp."""
    floor, floor_rms = floors(getattr(torch, noise.dtype), noise.scale, noise.rms)
    largest, rms = max(noise.own_error, floor), max(noise.own_error_rms, floor_rms)
    return replace(noise, noise=largest, noise_rms=rms)


def _as_dtype_of(leaf: Any, other: Any) -> Any:
    return leaf.to(other.dtype) if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor) else leaf
