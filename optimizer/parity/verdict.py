"""Judge a measurement: arithmetic on plain data, nothing is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optimize_export.errors import UsageError
from optimize_export.wording import listed
from optimizer.parity.results import (
    Measurement,
    OutputDifference,
    OutputNoise,
    OutputParity,
    ParityReport,
    RowDifference,
    RowJudgement,
    RowMeasurement,
    RowReport,
)

FACTOR = 4.0
# The allowed error of one channel, column or band of magnitude, in units of its own noise. An output has thousands of
# slices, and few numbers of each were measured. Errors below a ten-thousandth of the slice's scale pass.
SLICE_FACTOR = 256.0
Tolerance = float | Mapping[str, float] | None


def judge(
    measurement: Measurement,
    *,
    atol: Tolerance = None,
    rtol: Tolerance = None,
    factor: float = FACTOR,
    names: Mapping[str, str] | None = None,
) -> ParityReport:
    """The verdict on a measurement; nothing is run.

    Args:
        atol, rtol: allow `|candidate - original| <= atol + rtol * |original|` instead, elementwise. One number for all
            outputs, or a dict by output name. Outputs that the dict doesn't name are judged by the measured noise.
        factor: the allowed error of an output in units of its noise.
        names: the reference's own name of each output -> its name in the files. The report uses the latter, and `atol`
            and `rtol` may use either. By default the names of the measurement.

    Raises:
        UsageError: a tolerance is negative or names an unknown output.
    """
    if names is None:
        names = {output.noise.name: output.noise.name for output in measurement.outputs}
    absolute, relative = by_output("atol", atol, names), by_output("rtol", rtol, names)
    allowed = allowed_by((output.noise for output in measurement.outputs), names, absolute, relative)
    outputs = tuple(
        _judge_output(output, allowed[output.noise.name], factor, measurement.precision)
        for output in measurement.outputs
    )
    rows = None if measurement.rows is None else judge_rows(measurement.rows, allowed, factor)
    verdict, reason = _verdict(measurement, outputs, rows, factor)
    report = report_without_outputs(measurement, verdict, reason)
    return replace(report, outputs=outputs, factor=factor, rows=rows)


def report_without_outputs(measurement: Measurement, verdict: str, reason: str) -> ParityReport:
    """A report of a measurement, without its outputs."""
    return ParityReport(
        verdict=verdict,
        reason=reason,
        outputs=(),
        notes=measurement.notes,
        reference=measurement.reference,
        mode=measurement.mode,
        device=measurement.device,
        batch_sizes=measurement.batch_sizes,
        draws=measurement.draws,
        factor=FACTOR,
        settings=dict(measurement.settings),
        precision=measurement.precision,
        reference_device=measurement.reference_device,
    )


def why_vacuous(noises: Iterable[OutputNoise]) -> str | None:
    """Why outputs prove nothing about any candidate, as a clause; None where one of them proves something."""
    judged = [noise for noise in noises if noise.deterministic]
    if not judged:
        return "no output of the original is deterministic"
    if any(noise.signal is None for noise in judged if noise.kind != "buffer"):
        return None
    return no_signal({noise.name: noise.signal for noise in judged if noise.signal})


def no_signal(reasons: Mapping[str, str]) -> str:
    """The clause that none of these outputs carries a signal, each with its reason."""
    return f"the outputs carry no signal ({listed([f'{name} is {reason}' for name, reason in reasons.items()])})"


def by_output(label: str, tolerance: Tolerance, names: Mapping[str, str]) -> dict[str, float]:
    """The tolerance of each output that has one, by the reference's own names of the outputs.

    If one output has a name in the files, and another output has the same name in the reference, the former is meant.

    Args:
        label: "atol" or "rtol".
        names: as for `judge`.

    Raises:
        UsageError: the tolerance is negative, or names an unknown output, or one output by both its names.
    """
    if tolerance is None:
        return {}
    if not isinstance(tolerance, Mapping):
        return dict.fromkeys(names, _checked(label, tolerance))
    in_files = {name: own for own, name in names.items()}
    found: dict[str, float] = {}
    for name, value in tolerance.items():
        own = in_files.get(name, name)
        if own not in names:
            raise UsageError(f"{label} names the output {name!r}; the outputs are: {_listed(names) or 'none'}.")
        if own in found:
            raise UsageError(f"{label} names the output {names[own]} twice: it is {own} in the model.")
        found[own] = _checked(label, value)
    return found


def _checked(label: str, value: float) -> float:
    # Infinity would allow any difference, and True is an int.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise UsageError(f"{label} must be a number of 0 or more, not {value!r}.")
    return float(value)


def _listed(names: Mapping[str, str]) -> str:
    return ", ".join(name if name == own else f"{name} ({own} in the model)" for own, name in names.items())


def in_units_of(noise: float, error: float) -> float:
    """An error in units of its noise, at most 1e30."""
    # JSON needs a finite number; the noise is 0 only where the output is zero everywhere.
    ratio = 0.0 if error == 0 else error / noise if noise else math.inf
    return ratio if ratio <= 1e30 else 1e30


def ratio_of(noise: OutputNoise, largest: float, rms: float) -> float:
    """The larger ratio of two errors to their noise: of the largest error, and of the root mean square."""
    return max(in_units_of(noise.noise, largest), in_units_of(noise.noise_rms, rms))


@dataclass(frozen=True)
class Allowed:
    """The allowed error of one output in one run: by its noise, or by the user's tolerance if there is one."""

    name: str
    """The output's name in the report; `noise` has its name in the reference."""
    noise: OutputNoise
    atol: float | None
    rtol: float | None

    @property
    def by_user(self) -> bool:
        return self.atol is not None or self.rtol is not None

    def tolerance(self, size: float) -> float:
        """The user's tolerance for an element of that magnitude."""
        return (self.atol or 0.0) + (self.rtol or 0.0) * size

    def __str__(self) -> str:
        return f"atol {self.atol or 0.0:g} and rtol {self.rtol or 0.0:g}"


def allowed_by(
    noises: Iterable[OutputNoise], names: Mapping[str, str], atol: Mapping[str, float], rtol: Mapping[str, float]
) -> dict[str, Allowed]:
    """The allowed error of each output in one run, by the output's name in the reference.

    Args:
        names: as for `judge`.
        atol, rtol: by the names in the reference.
    """
    named = {noise.name: noise for noise in noises}
    return {
        name: Allowed(names.get(name, name), noise, atol.get(name), rtol.get(name)) for name, noise in named.items()
    }


def _judge_output(output: OutputDifference, by: Allowed, factor: float, precision: str) -> OutputParity:
    noise = output.noise
    allowed, allowed_rms = noise.allowed(factor)
    if noise.declared:
        ratio = factor * max(in_units_of(allowed, output.max_error), in_units_of(allowed_rms, output.rms_error))
    else:
        ratio = ratio_of(noise, output.max_error, output.rms_error)
    problem = _problem_of(output, by, factor, precision)
    return OutputParity(
        name=by.name,
        kind=noise.kind,
        ok=problem is None,
        judged=noise.deterministic,
        max_error=output.max_error,
        rms_error=output.rms_error,
        noise=noise.noise,
        noise_rms=noise.noise_rms,
        tolerance=by.tolerance(noise.scale) if by.by_user else allowed,
        ratio=ratio,
        tied=noise.tied,
        signal=noise.signal,
        problem=problem,
        slice=output.slice,
        slice_ratio=in_units_of(output.slice_noise, output.slice_error),
        mean_error=worst_of(max, (call.mean_error for call in output.calls)),
        p999_error=worst_of(max, (call.p999_error for call in output.calls)),
        cosine=worst_of(min, (call.cosine for call in output.calls)),
        agreement=worst_of(min, (call.agreement for call in output.calls)),
        undecided=sum(call.undecided for call in output.calls),
        calls=output.calls,
        by_user=by.by_user,
        max_difference=worst_of(max, (error for error, _ in output.frontier)),
    )


def _problem_of(output: OutputDifference, by: Allowed, factor: float, precision: str) -> str | None:
    """Why an output is wrong, as a clause; None for a correct output, and for one that isn't judged."""
    if not output.noise.deterministic:
        return None
    if output.problems:
        return f"{by.name}: {output.problems[0]}"
    if output.mismatches:
        return f"{by.name}: {output.mismatches} elements differ, first at {output.where}"
    if by.by_user:
        return _beyond_tolerance(output, by)
    if output.noise.declared:
        return _beyond_declared(output, by.name, factor)
    return _beyond_noise(output, by.name, factor, precision)


def _beyond_tolerance(output: OutputDifference, by: Allowed) -> str | None:
    for error, size in output.frontier:
        if not error <= by.tolerance(size):
            return f"{by.name} differs from the original by {error:.2e} where it is {size:.2e}, more than {by} allow"
    return None


def _beyond_declared(output: OutputDifference, name: str, factor: float) -> str | None:
    noise = output.noise
    allowed, allowed_rms = noise.allowed(factor)
    if output.max_error <= allowed and output.rms_error <= allowed_rms:
        return None
    return (
        f"{name} is off by {output.max_error:.2e} at {output.where}, but passes declare an error of at most "
        f"{noise.declared:.2e} ({noise.declared / noise.scale:.2g} of its largest magnitude)"
    )


def _beyond_noise(output: OutputDifference, name: str, factor: float, precision: str) -> str | None:
    noise, slice_factor = output.noise, factor / FACTOR * SLICE_FACTOR
    its_noise = f"its error in {precision} of" if precision else "its rounding noise of"
    # Written as "not at most", the conditions hold for NaN too.
    if not output.max_error <= factor * noise.noise:
        return (
            f"{name} is off by {output.max_error:.2e} at {output.where}, {_times(output.max_error, noise.noise)} "
            f"{its_noise} {noise.noise:.1e} ({factor:g} times is allowed)"
        )
    if not output.rms_error <= factor * noise.noise_rms:
        return (
            f"{name} has an RMS error of {output.rms_error:.2e}, {_times(output.rms_error, noise.noise_rms)} "
            f"{its_noise} {noise.noise_rms:.1e} ({factor:g} times is allowed)"
        )
    if not output.slice_error <= slice_factor * output.slice_noise:
        return (
            f"{name} is off by {output.slice_error:.2e} at {output.slice}, "
            f"{_times(output.slice_error, output.slice_noise)} the rounding noise there of {output.slice_noise:.1e} "
            f"({slice_factor:g} times is allowed)"
        )
    return None


def _times(error: float, noise: float) -> str:
    return f"{error / noise:.3g} times" if noise else "infinitely many times"


def worst_of(pick: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """The value that `max` or `min` picks; None if no value is known."""
    known = [value for value in values if value is not None]
    return pick(known) if known else None


def _verdict(
    measurement: Measurement, outputs: Sequence[OutputParity], rows: RowReport | None, factor: float
) -> tuple[str, str]:
    """The verdict and the sentence that gives its reason."""
    if measurement.problems:
        return "failed", _sentence(measurement.problems[0])
    if wrong := [output for output in outputs if not output.ok]:
        worst = max(wrong, key=lambda output: output.ratio)
        more = f" ({len(wrong)} outputs differ)" if len(wrong) > 1 else ""
        return "failed", _sentence(f"{worst.problem}{more}")
    if rows is not None and not rows.ok:
        return "failed", _sentence(str(rows.problem))
    if not outputs:
        return "vacuous", "The model returns no tensors, so there is nothing to compare."
    judged = [output for output in outputs if output.judged]
    if unbounded := [
        output.name for output in judged if not (output.by_user or math.isfinite(output.noise + output.noise_rms))
    ]:
        return "vacuous", f"The noise of {unbounded[0]} is infinite, so any error would be allowed."
    noises = (replace(seen.noise, name=output.name) for seen, output in zip(measurement.outputs, outputs, strict=True))
    if (why := why_vacuous(noises)) is not None:
        return "vacuous", _sentence(why[0].upper() + why[1:])
    ratio = max(output.ratio for output in judged)
    independent = "" if rows is None else " No row depends on the other rows of its batch."
    if any(seen.noise.declared for seen in measurement.outputs):
        bound = f"{ratio / factor:.2g} of what passes declare"
    elif measurement.precision:
        bound = f"{ratio:.2g} times the error of the original in {measurement.precision}"
    else:
        bound = f"{ratio:.2g} times the rounding noise of the original"
    return "ok", f"All outputs agree: the largest error is {bound}.{independent}"


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def judge_rows(measured: RowMeasurement, allowed: Mapping[str, Allowed], factor: float) -> RowReport:
    """The verdict on a measurement of rows; nothing is run.

    Args:
        allowed: by the reference's names of the outputs; other outputs aren't judged, nor those that aren't deterministic.
        factor: the allowed error of one run in units of its noise.
    """
    judged = tuple(
        _judge_rows_of(one, by, factor)
        for one in measured.outputs
        if (by := allowed.get(one.name)) is not None and by.noise.deterministic
    )
    wrong = [one.problem for one in judged if one.problem]
    problem = measured.problem or (wrong[0] if wrong else None)
    return RowReport(
        ok=problem is None,
        outputs=judged,
        batch_sizes=measured.batch_sizes,
        alone=measured.alone,
        without_rows=tuple(allowed[name].name if name in allowed else name for name in measured.without_rows),
        problem=problem,
    )


def _judge_rows_of(one: RowDifference, by: Allowed, factor: float) -> RowJudgement:
    # Two runs are compared, and each of them may have the allowed error.
    allowed = 2.0 * (by.tolerance(by.noise.scale) if by.by_user else factor * by.noise.noise)
    allowed_rms = 2.0 * factor * by.noise.noise_rms
    why: str | None = None
    if one.mismatches:
        why = f"it differs when run {one.how}"
    elif by.by_user:
        if any(not error <= 2.0 * by.tolerance(size) for error, size in one.frontier):
            why = f"it changes by {one.max_difference:.2e} when run {one.how}, more than {by} allow"
    elif not one.max_difference <= allowed:
        why = (
            f"it changes by {one.max_difference:.2e} when run {one.how}, but only {allowed:.1e} is allowed for rounding"
        )
    elif not one.rms_difference <= allowed_rms:
        why = (
            f"rows change by an RMS of {one.rms_difference:.2e} when run differently, but only {allowed_rms:.1e} is "
            "allowed for rounding"
        )
    place = f"Row {one.row} of {by.name} at batch size {one.batch_size}"
    problem = None if why is None else f"{place} depends on the other rows: {why}"
    return RowJudgement(by.name, why is None, one.max_difference, allowed, problem)


def allowed_share(parity: Mapping[str, Any]) -> float | None:
    """The largest error as a share of the allowed error; None if no output was judged by its noise.

    An output counts with the larger share of two: that of the whole output, and that of its worst channel, column or
    band.

    Args:
        parity: a `ParityReport` as JSON.
    """
    factor = parity.get("factor", FACTOR)
    judged = [each for each in parity.get("outputs", ()) if each.get("judged", True) and not each.get("by_user")]
    return max((_share(output, factor) for output in judged), default=None)


def _share(output: Mapping[str, Any], factor: float) -> float:
    whole, part = (float(output.get(name) or 0) for name in ("ratio", "slice_ratio"))
    return max(whole / factor, part / (factor / FACTOR * SLICE_FACTOR))
