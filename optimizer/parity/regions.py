"""Compare parts of a model at one call: a region that a pass rewrote, and the values inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from optimize_export.elementwise import HALF
from optimize_export.errors import LoadError
from optimizer.model import Call, clone, eager_only, one_at_a_time, pinned_settings
from optimizer.parity.differences import floors
from optimizer.parity.float64 import Float64Mode
from optimizer.parity.half_precision import half_as_float32
from optimizer.parity.noise import RoundingNoise
from optimizer.parity.observe import observe
from optimizer.parity.original import Original
from optimizer.parity.reference import Reference
from optimizer.parity.results import OutputNoise, OutputParity
from optimizer.parity.verdict import judge
from passes.base import DeclaredError

Region = Callable[..., Any]


@dataclass(frozen=True)
class RegionParity:
    """The judgement of one rewritten region; `error`, `ratio` and the largest magnitude `scale` are those of its worst output."""

    ok: bool
    reason: str
    error: float = 0.0
    ratio: float = 0.0
    scale: float = 0.0


def reference_at(
    target: Callable[..., Any],
    call: Call,
    where: str,
    *,
    seed: int = 0,
    mode: str = "inference",
    least_noise: bool = False,
) -> Reference:
    """A reference of a callable at one call.

    Args:
        where: the call in words.
        seed: of the random numbers in the call.
        mode: "region" for a part of a model.
        least_noise: use the least noise of the dtype instead of a measured one, which is never smaller.

    Raises:
        LoadError: the callable raises there.
    """
    original = Original(target, mode, seed)
    original.ran_twice = least_noise
    with one_at_a_time, pinned_settings() as settings:
        original.run(None, 0, call, label=where, seed=seed)
        original.check()
        return Reference(original, RoundingNoise(original, frozenset() if least_noise else None), settings, 1)


def region_at(
    old: Region, values: Sequence[Any], *, declared: DeclaredError | None = None, least_noise: bool = False
) -> Reference:
    """The reference of a region at its recorded inputs; any number of rewritten regions can be compared with it.

    Args:
        declared: an error that the pass declares.
        least_noise: as for `reference_at`, whose errors this raises.
    """
    call = Call(tuple(values), {})
    reference = reference_at(old, call, "the recorded inputs", mode="region", least_noise=least_noise)
    return reference if declared is None else reference.allowing(declared)


def compare_region(reference: Reference, new: Region, *, by_own_error: bool = False) -> RegionParity:
    """Compare a rewritten region by the rule of `judge`.

    Outputs without signal aren't a failure here: a region may return zeros.

    Args:
        by_own_error: the noise is only the old region's own error, without its response to one ulp. In half precision,
            one ulp of a weight has a larger effect than rounding where products cancel.
    """
    measurement = reference.compare(new)
    if by_own_error:
        outputs = (replace(output, noise=_own_error_alone(output.noise)) for output in measurement.outputs)
        measurement = replace(measurement, outputs=tuple(outputs))
    report = judge(measurement)
    failed = report.verdict == "failed"
    judged = [output for output in report.outputs if output.judged]
    if not judged:
        return RegionParity(False, report.reason if failed else "there is no deterministic output to compare")
    worst = max(judged, key=lambda output: (not output.ok, output.ratio))
    scale = next(each.noise.scale for each in measurement.outputs if each.noise.name == worst.name)
    return RegionParity(not failed, report.reason, worst.max_error, worst.ratio, scale)


def check_change(
    old: Region,
    new: Region,
    values: tuple[Any, ...],
    *,
    declared: DeclaredError | None = None,
    autocast: torch.dtype | None = None,
) -> list[tuple[RegionParity, RegionParity | None]]:
    """Check one change of a pass: its algebra, and in half precision also its rounding.

    Most changes are within the least noise, and one run of each region shows this. For the others, the noise is
    measured, and the algebra is judged in float64. A rewrite may sum in another order, and a few elements show too
    little of that rounding to judge it. In float64, only errors of the algebra are left, and the rounding of the new
    weights, which the old region's noise covers. In half precision, the noise covers too much, so the new region must
    also be about as close to float64 as the old one. The whole model is judged afterwards.

    Args:
        values: inputs of the region.
        declared: an error that the pass declares.
        autocast: the dtype of an autocast around the whole model.

    Returns:
        For the region itself, and for the region under `autocast` if that is passed: the judgements of its algebra and
        of its rounding; the latter is None if rounding isn't judged.
    """
    given = values
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    if torch.float32 in dtypes and dtypes & HALF and not _runs(old, values):
        # The region runs only under autocast, which casts its inputs. Without autocast it computes in float32.
        values = tuple(map(half_as_float32, values))
    try:
        with pinned_settings():
            found = [_check(old, new, values, declared)]
            if autocast is not None and found[0][0].ok:
                in_half = region_at(_under(autocast, old), given, declared=declared)
                found.append((found[0][0], compare_region(in_half, _under(autocast, new), by_own_error=True)))
    except LoadError as error:
        return [(RegionParity(False, str(error), math.inf, math.inf), None)]
    return found


def _check(
    old: Region, new: Region, values: tuple[Any, ...], declared: DeclaredError | None
) -> tuple[RegionParity, RegionParity | None]:
    def in_float64(*values: Any) -> Any:
        # The region may write to its inputs, which it does only in their own dtype.
        copies = clone(values)
        with Float64Mode():
            outputs = new(*copies)
        # Cast to the dtypes of the region's own outputs, which may differ from those of its inputs.
        return pytree.tree_map(_as_dtype_of, outputs, new(*values))

    is_half = any(isinstance(value, torch.Tensor) and value.dtype in HALF for value in values)
    if not is_half:
        at_once = compare_region(region_at(old, values, declared=declared, least_noise=True), new)
        if at_once.ok:
            return at_once, None
    reference = region_at(old, values, declared=declared)
    if not reference.truth_in_float64:
        return compare_region(reference, new), None
    algebra = compare_region(reference, in_float64)
    return algebra, compare_region(reference, new, by_own_error=True) if is_half and algebra.ok else None


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


def rerun(
    reference: Reference, where: str, target: nn.Module, watch: Callable[[nn.Module], AbstractContextManager[None]]
) -> None:
    """Run a module at one call of the reference, without gradients, and watch the copy that runs.

    Args:
        where: one of the reference's `calls`.
    """
    one = reference.call_at(where)
    call, runs = reference.original.inputs_of(one), reference.runs_of(target)
    runs.watch = watch
    with one_at_a_time, pinned_settings(), eager_only(), runs.fresh() as module:
        observe(module, call, seed=one.seed, names=one.names)


def judged_values(reference: Reference, values: Sequence[torch.Tensor | None]) -> list[OutputParity | None]:
    """Judge values by the outputs of a reference with one call; problems call each value "it".

    Args:
        values: on the CPU, one for each output; None for an unknown value, which isn't judged.
    """
    own = reference.original.calls[0].own
    expected = [own.values[name] for name in own.of_kind("output")]
    filled = tuple(right if value is None else value for right, value in zip(expected, values, strict=True))
    measurement = reference.compare(lambda *_: filled, flatten=lambda args, kwargs: ())
    report = judge(measurement, names=dict.fromkeys(reference.noises, "it"))
    return [None if value is None else each for value, each in zip(values, report.outputs, strict=True)]
