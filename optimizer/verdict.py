"""What a comparison measured, and the judgement of it: plain data and arithmetic, nothing is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from optimizer.errors import UsageError
from optimizer.row_verdict import Allowed, RowMeasurement, RowReport, judge_rows
from optimizer.sentences import listed

FACTOR = 4.0
# How many times its own noise one channel, column or band of magnitude may be off. Outputs have thousands of slices, of each
# few numbers were seen: what is off by more than rounding is found at a ten-thousandth of the slice's size, not before.
SLICE_FACTOR = 256.0
Tolerance = float | Mapping[str, float] | None


@dataclass(frozen=True)
class OutputNoise:
    """What rounding alone does to one output, pooled over all calls of the original.

    Attributes:
        kind: "output", "input" (changed in place), "gradient" or "buffer".
        dtype: the output's dtype, such as "float32".
        scale, rms: largest magnitude and root mean square of the reference.
        own_error, own_error_rms: the original against the float64 reference; 0 where there is none.
        response, response_rms: the original against itself with inputs and weights off by one unit in the last place,
            and against itself run again; with results inside off by one too where it computes in float64 throughout, or
            where a candidate was off by more than the rest explains.
        noise, noise_rms: the larger of the two, and at least four units in the last place of the output's own scale,
            for float16 and bfloat16 one, for gradients in float64 sixty-four (for the root mean square half of that, of the
            root mean square). In kind, no less than what the original is off by that computes in the half precision.
        signal: None, or why the output proves nothing: "all zero", "the same for every input", …
        deterministic: False where the original differs from itself by more than rounding: it is not judged.
        tied: elements of an integer output which the original itself changes within its noise: they are not compared.
        declared: the absolute error that passes declare for this output, allowed on top of rounding.
    """

    name: str
    kind: str
    dtype: str
    scale: float
    rms: float
    own_error: float
    own_error_rms: float
    response: float
    response_rms: float
    noise: float
    noise_rms: float
    signal: str | None
    deterministic: bool
    tied: int
    declared: float = 0.0

    def allowed(self, factor: float) -> tuple[float, float]:
        """The largest absolute error and the largest root mean square of errors that the output may have."""
        return self.declared + factor * self.noise, self.declared + factor * self.noise_rms

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OutputNoise:
        return cls(**_read(cls, data))


@dataclass(frozen=True)
class CallFigures:
    """How far a candidate's output is off at one call: what a person looks at. The verdict doesn't go by it.

    Attributes:
        batch_size, draw: the call.
        max_error, mean_error, p999_error: the largest, the mean and the 99.9th percentile of the absolute errors against
            the reference, over the elements that are finite on both sides; None where there are none, and for integers.
        cosine: of the angle between the output and the reference, both as one long vector; None likewise.
        agreement: the share of rows in which the largest score stands at the class where the reference has it, for a float
            output of shape (rows, classes), or (rows, positions, classes) that is called logits; for an integer output the
            share of elements that are equal. None for other outputs, and where every row is left out.
        undecided: rows, or elements of an integer output, that the original itself decides either way within its noise:
            they are left out of `agreement`.
        sizes: of open dims beside the batch, by name, where they are other than in the given call.
    """

    batch_size: int | None
    draw: int
    max_error: float | None = None
    mean_error: float | None = None
    p999_error: float | None = None
    cosine: float | None = None
    agreement: float | None = None
    undecided: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        return data if self.sizes else {name: value for name, value in data.items() if name != "sizes"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CallFigures:
        return cls(**_read(cls, data))


@dataclass(frozen=True)
class OutputDifference:
    """A candidate's output against the reference, pooled over all calls.

    Attributes:
        max_error, rms_error: against the reference, over the elements that are finite on both sides.
        mismatches: elements of an integer output that differ, ties left out.
        problems: sentences about a difference that no tolerance forgives: shape, dtype, NaN or inf in other places.
        where: the call of the largest error: "batch size 3, draw 1".
        frontier: (difference from the original's own output, that output's magnitude) pairs that decide any atol, rtol.
        slice, slice_error, slice_noise: the channel, column or band of magnitude whose error is largest beside its own
            noise: "index 3 of dim 1" or "a number below 256", that error, that noise; "" and 0 where no slice is so much
            quieter than the whole that it is judged.
        calls: the figures of each call; none where nobody looks at them, as of a region.
    """

    noise: OutputNoise
    max_error: float
    rms_error: float
    mismatches: int
    problems: tuple[str, ...]
    where: str
    frontier: tuple[tuple[float, float], ...]
    slice: str = ""
    slice_error: float = 0.0
    slice_noise: float = 0.0
    calls: tuple[CallFigures, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "noise": self.noise.to_json(),
            "frontier": [list(point) for point in self.frontier],
            "calls": [call.to_json() for call in self.calls],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OutputDifference:
        nested = {
            "noise": OutputNoise.from_json(data["noise"]),
            "problems": tuple(data["problems"]),
            "frontier": tuple((_figure(error), _figure(size)) for error, size in data["frontier"]),
            "calls": _calls_of(data),
        }
        return cls(**_read(cls, data) | nested)


@dataclass(frozen=True)
class Measurement:
    """All that was seen when a candidate ran beside the reference; `judge` needs nothing else.

    Attributes:
        problems: sentences about what went wrong as a whole: the candidate raised, its output has another structure.
        reference: "float64", or "own dtype" where `reference_reason` says why float64 couldn't be had.
        settings: what was pinned on both sides while measuring.
        precision: "bfloat16" or "float16" where the noise is what the original is off by that computes so; "" else.
        rows: how far rows move with the other rows of their batch; None where that wasn't looked at.
        device: where the candidate ran; reference_device: where the original did, "" for the same.
    """

    outputs: tuple[OutputDifference, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    reference: str
    reference_reason: str
    mode: str
    device: str
    batch_sizes: tuple[int, ...]
    draws: int
    seed: int
    settings: dict[str, str]
    precision: str = ""
    rows: RowMeasurement | None = None
    reference_device: str = ""

    def to_json(self) -> dict[str, Any]:
        rows = None if self.rows is None else self.rows.to_json()
        return {**asdict(self), "outputs": [output.to_json() for output in self.outputs], "rows": rows}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        return cls(
            outputs=tuple(OutputDifference.from_json(output) for output in data["outputs"]),
            problems=tuple(data["problems"]),
            notes=tuple(data["notes"]),
            reference=data["reference"],
            reference_reason=data["reference_reason"],
            mode=data["mode"],
            device=data["device"],
            batch_sizes=tuple(data["batch_sizes"]),
            draws=data["draws"],
            seed=data["seed"],
            settings=dict(data["settings"]),
            precision=data.get("precision", ""),
            rows=None if data.get("rows") is None else RowMeasurement.from_json(data["rows"]),
            reference_device=data.get("reference_device", ""),
        )


@dataclass(frozen=True)
class OutputParity:
    """The judgement of one output.

    Attributes:
        max_error: the candidate's largest error; noise: what rounding alone does; tolerance: what was allowed.
        ratio: the larger of max_error / noise and rms_error / noise_rms; at most `factor` where the output is right. Where
            passes declare an error, `factor` times the larger share of the allowed errors.
        problem: None where it is right, else one sentence.
        judged: False where the original itself isn't deterministic in this output.
        slice, slice_ratio: the worst channel, column or band of magnitude, "index 3 of dim 1", and its error in units of its
            own noise; "" and 0 where no slice is judged for itself.
        mean_error, p999_error, cosine, agreement: the worst over all calls of what `CallFigures` has; undecided: the sum.
        calls: the figures of each call.
        by_user: whether a tolerance of the user's was gone by; it allows a difference from the original's own output, of
            which `max_difference` is the largest. None where the output isn't made of floats, or isn't deterministic.
    """

    name: str
    kind: str
    ok: bool
    judged: bool
    max_error: float
    rms_error: float
    noise: float
    noise_rms: float
    tolerance: float
    ratio: float
    tied: int
    signal: str | None
    problem: str | None
    slice: str = ""
    slice_ratio: float = 0.0
    mean_error: float | None = None
    p999_error: float | None = None
    cosine: float | None = None
    agreement: float | None = None
    undecided: int = 0
    calls: tuple[CallFigures, ...] = ()
    by_user: bool = False
    max_difference: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"calls": [call.to_json() for call in self.calls]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OutputParity:
        return cls(**_read(cls, data) | {"calls": _calls_of(data)})


@dataclass(frozen=True)
class ParityReport:
    """The verdict: "ok", "failed", or "vacuous" where the outputs prove nothing. Only "ok" is `.ok`.

    Attributes:
        precision: "bfloat16" or "float16" where it was judged in kind, by what the original is off by that computes so;
            "" where by its rounding alone.
        rows: the judgement of rows that were run alone and among others; None where that wasn't asked for.
        device: where the candidate ran; reference_device: where the original did, "" for the same.
    """

    verdict: str
    reason: str
    outputs: tuple[OutputParity, ...]
    notes: tuple[str, ...]
    reference: str
    mode: str
    device: str
    batch_sizes: tuple[int, ...]
    draws: int
    factor: float
    settings: dict[str, str]
    precision: str = ""
    rows: RowReport | None = None
    reference_device: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict == "ok"

    @property
    def ratio(self) -> float:
        """The worst output's error in units of its noise; 0 where nothing was judged."""
        return max((output.ratio for output in self.outputs if output.judged), default=0.0)

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        rows = None if self.rows is None else self.rows.to_json()
        outputs = [output.to_json() for output in self.outputs]
        return {**asdict(self), "ok": self.ok, "outputs": outputs, "rows": rows}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ParityReport:
        return cls(
            verdict=data["verdict"],
            reason=data["reason"],
            outputs=tuple(OutputParity.from_json(output) for output in data["outputs"]),
            notes=tuple(data["notes"]),
            reference=data["reference"],
            mode=data["mode"],
            device=data["device"],
            batch_sizes=tuple(data["batch_sizes"]),
            draws=data["draws"],
            factor=data["factor"],
            settings=dict(data["settings"]),
            precision=data.get("precision", ""),
            rows=None if data.get("rows") is None else RowReport.from_json(data["rows"]),
            reference_device=data.get("reference_device", ""),
        )


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
        atol, rtol: allow `|candidate - original| <= atol + rtol * |original|` instead, elementwise; one number for all
            outputs or a dict by output name (outputs that it doesn't name keep the measured noise).
        factor: how many times its noise an output may be off.
        names: the reference's own name of each output -> its name in the files. The report goes by the latter, and `atol`
            and `rtol` may go by either. By default those of the measurement are all that there are.

    Raises:
        UsageError: a tolerance is negative or names an output that there isn't.
    """
    if names is None:
        names = {output.noise.name: output.noise.name for output in measurement.outputs}
    absolute, relative = by_output("atol", atol, names), by_output("rtol", rtol, names)
    precision = measurement.precision
    outputs = tuple(
        _judge_output(
            output,
            names.get(output.noise.name, output.noise.name),
            absolute.get(output.noise.name),
            relative.get(output.noise.name),
            factor,
            precision,
        )
        for output in measurement.outputs
    )
    rows = None
    if measurement.rows is not None:
        noises = (output.noise for output in measurement.outputs)
        rows = judge_rows(measurement.rows, allowed_by(noises, names, absolute, relative), factor)
    verdict, reason = _verdict(measurement, outputs, rows, factor)
    report = report_without_outputs(measurement, verdict, reason)
    return replace(report, outputs=outputs, factor=factor, rows=rows)


def report_without_outputs(measurement: Measurement, verdict: str, reason: str) -> ParityReport:
    """A report of a measurement, but for its outputs."""
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
    """Why outputs prove nothing of any candidate, as a clause; None where one of them does prove something."""
    judged = [noise for noise in noises if noise.deterministic]
    if not judged:
        return "no output of the original is deterministic"
    if any(noise.signal is None for noise in judged if noise.kind != "buffer"):
        return None
    return no_signal({noise.name: noise.signal for noise in judged if noise.signal})


def no_signal(reasons: Mapping[str, str]) -> str:
    """The clause that none of these outputs carries a signal, each with the reason."""
    return f"the outputs carry no signal ({listed([f'{name} is {reason}' for name, reason in reasons.items()])})"


def allowed_by(
    noises: Iterable[OutputNoise], names: Mapping[str, str], atol: Mapping[str, float], rtol: Mapping[str, float]
) -> dict[str, Allowed]:
    """What one answer to each deterministic output may be off by, by its name in the reference.

    Args:
        names: as for `judge`.
        atol, rtol: by the names in the reference.
    """
    return {
        noise.name: Allowed(
            names.get(noise.name, noise.name),
            noise.noise,
            noise.noise_rms,
            noise.scale,
            atol.get(noise.name),
            rtol.get(noise.name),
        )
        for noise in noises
        if noise.deterministic
    }


def by_output(label: str, tolerance: Tolerance, names: Mapping[str, str]) -> dict[str, float]:
    """A tolerance by the reference's own names of the outputs: of those alone that it is given for.

    A name that is one output's in the files and another's in the reference means the former.

    Args:
        label: "atol" or "rtol".
        names: as for `judge`.

    Raises:
        UsageError: the tolerance is negative, or names an output that there isn't, or one output by both its names.
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
            raise UsageError(f"{label} names the output {name!r}; there are: {_listed(names) or 'none'}.")
        if own in found:
            raise UsageError(f"{label} names the output {names[own]} twice: it is {own} in the model.")
        found[own] = _checked(label, value)
    return found


def _checked(label: str, value: float) -> float:
    # With infinity whatever differs would pass, and true is no number.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise UsageError(f"{label} must be a number of 0 or more, not {value!r}.")
    return float(value)


def _listed(names: Mapping[str, str]) -> str:
    return ", ".join(name if name == own else f"{name} ({own} in the model)" for own, name in names.items())


def _judge_output(
    output: OutputDifference, name: str, atol: float | None, rtol: float | None, factor: float, precision: str
) -> OutputParity:
    noise = replace(output.noise, name=name)
    its_noise = f"its error in {precision} of" if precision else "its rounding noise of"
    by_user = atol is not None or rtol is not None
    allowed, allowed_rms = noise.allowed(factor)
    if noise.declared:
        ratio = factor * max(in_units_of(allowed, output.max_error), in_units_of(allowed_rms, output.rms_error))
    else:
        ratio = max(in_units_of(noise.noise, output.max_error), in_units_of(noise.noise_rms, output.rms_error))
    problem: str | None = None
    if not noise.deterministic:
        problem = None
    elif output.problems:
        problem = f"{noise.name}: {output.problems[0]}"
    elif output.mismatches:
        problem = f"{noise.name}: {output.mismatches} elements differ, first at {output.where}"
    elif by_user:
        problem = _beyond(output, name, atol or 0.0, rtol or 0.0)
    elif noise.declared:
        if not (output.max_error <= allowed and output.rms_error <= allowed_rms):
            problem = (
                f"{noise.name} is off by {output.max_error:.2e} at {output.where}, and passes declare an error of at most"
                f" {noise.declared:.2e} ({noise.declared / noise.scale:.2g} of its largest magnitude)"
            )
    elif not output.max_error <= factor * noise.noise:  # not a number is no small one
        problem = (
            f"{noise.name} is off by {output.max_error:.2e} at {output.where}, {_times(output.max_error, noise.noise)} "
            f"{its_noise} {noise.noise:.1e} ({factor:g} times is allowed)"
        )
    elif not output.rms_error <= factor * noise.noise_rms:
        problem = (
            f"{noise.name} is off by {output.rms_error:.2e} in the root mean square, "
            f"{_times(output.rms_error, noise.noise_rms)} {its_noise} {noise.noise_rms:.1e} "
            f"({factor:g} times is allowed)"
        )
    elif not output.slice_error <= factor / FACTOR * SLICE_FACTOR * output.slice_noise:
        problem = (
            f"{noise.name} is off by {output.slice_error:.2e} at {output.slice}, "
            f"{_times(output.slice_error, output.slice_noise)} the rounding noise there of {output.slice_noise:.1e} "
            f"({factor / FACTOR * SLICE_FACTOR:g} times is allowed)"
        )
    return OutputParity(
        name=noise.name,
        kind=noise.kind,
        ok=problem is None,
        judged=noise.deterministic,
        max_error=output.max_error,
        rms_error=output.rms_error,
        noise=noise.noise,
        noise_rms=noise.noise_rms,
        tolerance=(atol or 0.0) + (rtol or 0.0) * noise.scale if by_user else allowed,
        ratio=ratio,
        tied=noise.tied,
        signal=noise.signal,
        problem=problem,
        slice=output.slice,
        slice_ratio=in_units_of(output.slice_noise, output.slice_error),
        mean_error=_worst(max, (call.mean_error for call in output.calls)),
        p999_error=_worst(max, (call.p999_error for call in output.calls)),
        cosine=_worst(min, (call.cosine for call in output.calls)),
        agreement=_worst(min, (call.agreement for call in output.calls)),
        undecided=sum(call.undecided for call in output.calls),
        calls=output.calls,
        by_user=by_user,
        max_difference=_worst(max, (error for error, _ in output.frontier)),
    )


def _verdict(
    measurement: Measurement, outputs: Sequence[OutputParity], rows: RowReport | None, factor: float
) -> tuple[str, str]:
    if measurement.problems:
        return "failed", _sentence(measurement.problems[0])
    wrong = [output for output in outputs if not output.ok]
    if wrong:
        worst = max(wrong, key=lambda output: output.ratio)
        more = f" ({len(wrong)} outputs differ)" if len(wrong) > 1 else ""
        return "failed", _sentence(f"{worst.problem}{more}")
    if rows is not None and not rows.ok:
        return "failed", _sentence(str(rows.problem))
    if not outputs:
        return "vacuous", "The model gives no tensors: there is nothing to compare."
    judged = [output for output in outputs if output.judged]
    if unbounded := [
        output.name for output in judged if not (output.by_user or math.isfinite(output.noise + output.noise_rms))
    ]:
        return "vacuous", f"The noise of {unbounded[0]} is infinite, so any error would be allowed."
    noises = (replace(seen.noise, name=output.name) for seen, output in zip(measurement.outputs, outputs, strict=True))
    if (why := why_vacuous(noises)) is not None:
        return "vacuous", _sentence(why[0].upper() + why[1:])
    ratio = max(output.ratio for output in judged)
    apart = "" if rows is None else " No row depends on the other rows of its batch."
    if any(seen.noise.declared for seen in measurement.outputs):
        return "ok", f"All outputs agree: the largest error is {ratio / factor:.2g} of what passes declare.{apart}"
    measure = (
        f"the error of the original in {measurement.precision}"
        if measurement.precision
        else "the rounding noise of the original"
    )
    return "ok", f"All outputs agree: the largest error is {ratio:.2g} times {measure}.{apart}"


def _beyond(output: OutputDifference, name: str, atol: float, rtol: float) -> str | None:
    for error, size in output.frontier:
        if not error <= atol + rtol * size:
            return (
                f"{name} differs from the original by {error:.2e} where it is {size:.2e}, more than "
                f"atol {atol:g} and rtol {rtol:g} allow"
            )
    return None


def _read(cls: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that there are; what an older version didn't write keeps its default."""
    known = (item for item in fields(cls) if item.name in data)
    return {item.name: _figure(data[item.name]) if "float" in str(item.type) else data[item.name] for item in known}


def _figure(value: Any) -> Any:
    """A number as the manifest has it, "NaN" and "Infinity" included."""
    return float(value) if isinstance(value, str) else value


def _calls_of(data: Mapping[str, Any]) -> tuple[CallFigures, ...]:
    """The figures per call of an output; none in what an older version wrote."""
    return tuple(CallFigures.from_json(call) for call in data.get("calls", ()))


def _worst(pick: Callable[[list[float]], float], figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return pick(known) if known else None


def in_units_of(noise: float, error: float) -> float:
    """An error in units of its noise, at most 1e30."""
    # A finite number for JSON; noise is 0 only where the output is zero everywhere.
    ratio = 0.0 if error == 0 else error / noise if noise else math.inf
    return ratio if ratio <= 1e30 else 1e30


def _times(error: float, noise: float) -> str:
    return f"{error / noise:.3g} times" if noise else "any number of times"


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
