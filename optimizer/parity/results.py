"""The plain data of a comparison: measured noise and errors, and the judgement of them. JSON both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from optimize_export.wording import dtype_name
from optimizer.showing import fragment, parity_plot

_T = TypeVar("_T")
# Metadata of a field that the JSON leaves out while it is empty.
OMIT_IF_EMPTY = {"omit_if_empty": True}


class _Stored:
    def to_json(self) -> dict[str, Any]:
        return to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return from_json(cls, data)


@dataclass(frozen=True)
class OutputNoise(_Stored):
    """The error that rounding alone causes in one output, pooled over all calls of the original."""

    name: str
    kind: str
    """One of "output", "number" (an output that isn't a tensor), "input" (changed in place), "gradient" or "buffer"."""
    dtype: str
    scale: float
    rms: float
    """`scale` and `rms`: largest magnitude and root mean square of the reference."""
    own_error: float
    own_error_rms: float
    """`own_error`, `own_error_rms`: error of the original against the float64 reference; 0 where there is none."""
    response: float
    response_rms: float
    """`response`, `response_rms`: the largest change of the original's output when its inputs and weights change by one
    ulp, or when it runs again. Intermediate results change by one ulp too where the original computes in float64
    throughout, or where a candidate's error was larger than the other changes explain."""
    noise: float
    noise_rms: float
    """`noise`, `noise_rms`: the larger of error and response, and at least a floor. The floor of `noise` is four ulps
    of `scale`, or one in float16 and bfloat16; the floor of `noise_rms` is half as many ulps of `rms`. For a candidate
    of lower precision, both are at least the error of the original at that precision."""
    signal: str | None
    """None, or why the output proves nothing: "all zero", "the same for every input", …"""
    deterministic: bool
    """False where two runs of the original differ by more than rounding; the output isn't judged then."""
    tied: int
    """Number of elements of an integer output that the original itself changes within its noise; not compared."""
    declared: float = 0.0
    """The absolute error that passes declare for this output, allowed on top of rounding."""

    @classmethod
    def unknown(cls, name: str, value: torch.Tensor) -> OutputNoise:
        return cls(name, "output", dtype_name(value.dtype), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None, True, 0)

    @property
    def is_exact(self) -> bool:
        """Whether the output holds integers or booleans, for which any difference is an error."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return not (dtype.is_floating_point or dtype.is_complex)

    def allowed(self, factor: float) -> tuple[float, float]:
        return self.declared + factor * self.noise, self.declared + factor * self.noise_rms


@dataclass(frozen=True)
class CallErrors:
    """Error statistics of a candidate's output at one call, for people to read. The verdict doesn't depend on them."""

    batch_size: int | None
    draw: int
    max_error: float | None = None
    mean_error: float | None = None
    p999_error: float | None = None
    """`max_error`, `mean_error`, `p999_error`: the largest, the mean and the 99.9th percentile of the absolute errors
    against the reference, over the elements that are finite on both sides; None where there are none, and for
    integers."""
    cosine: float | None = None
    """The cosine of the angle between output and reference, both flattened; None in the same cases."""
    agreement: float | None = None
    """For an integer output the share of equal elements. For a float output of shape (rows, classes), or of shape
    (rows, positions, classes) with the name logits, the share of rows whose largest score is at the same class as in
    the reference. None for other outputs, and where every row is undecided."""
    undecided: int = 0
    """Number of rows, or of elements of an integer output, that the original itself decides either way within its
    noise; `agreement` leaves them out."""
    sizes: Mapping[str, int] = field(default_factory=dict, metadata=OMIT_IF_EMPTY)
    """The sizes of dynamic dims other than the batch, by name, where they differ from those of the given call."""


@dataclass(frozen=True)
class OutputDifference:
    """The errors of a candidate's output, pooled over all calls."""

    noise: OutputNoise
    max_error: float
    rms_error: float
    """`max_error`, `rms_error`: against the reference, over the elements that are finite on both sides."""
    mismatches: int
    """Number of elements of an integer output that differ; ties don't count."""
    problems: tuple[str, ...]
    """Sentences about a difference that no tolerance allows: shape, dtype, NaN or inf at other positions."""
    where: str
    """The call of the largest error: "batch size 3, draw 1"."""
    frontier: tuple[tuple[float, float], ...]
    """(difference from the original's own output, its magnitude) pairs that decide any atol, rtol."""
    slice: str = ""
    slice_error: float = 0.0
    slice_noise: float = 0.0
    """`slice`, `slice_error`, `slice_noise`: the channel, column or band of magnitude with the largest ratio of error
    to its own noise ("index 3 of dim 1", "a number below 256"), that error and that noise. "" and 0 where no slice is
    judged, because none is much quieter than the whole output."""
    calls: tuple[CallErrors, ...] = ()
    """The statistics of each call; empty if nobody reads them, as for a region."""


@dataclass(frozen=True)
class RowDifference:
    """How much the rows of one output change with the other rows of the batch, pooled over all runs."""

    name: str
    """The output's name in the reference."""
    max_difference: float = 0.0
    rms_difference: float = 0.0
    """`max_difference`, `rms_difference`: between two answers to one row, over the elements that are finite in both."""
    mismatches: int = 0
    """Number of elements of an integer output that differ, ties left out, and of answers with another shape or dtype, or
    with NaN or infinity in other places."""
    batch_size: int = 0
    row: int = 0
    how: str = ""
    """`batch_size`, `row`, `how`: place of the largest difference, or of the first mismatch: the row of the batch of
    that size, and the other run of the row: "alone", "at another position" or "among other rows"."""
    frontier: tuple[tuple[float, float], ...] = ()
    """(difference, magnitude) pairs that decide any atol, rtol."""


@dataclass(frozen=True)
class RowMeasurement:
    """The differences between runs of rows alone, at other positions and among other rows."""

    outputs: tuple[RowDifference, ...]
    batch_sizes: tuple[int, ...]
    alone: bool
    """False where the original or the candidate can't run at a batch of one."""
    without_rows: tuple[str, ...] = ()
    """Outputs whose dim 0 isn't the batch; they aren't compared."""
    problem: str | None = None
    """A sentence with the error that the candidate raised; None where it ran."""


@dataclass(frozen=True)
class Measurement(_Stored):
    """Everything that was measured when a candidate ran; `judge` needs nothing else."""

    outputs: tuple[OutputDifference, ...]
    problems: tuple[str, ...]
    """Sentences about a failure as a whole: the candidate raised, its output has another structure."""
    notes: tuple[str, ...]
    reference: str
    """Either "float64", or "own dtype" where `reference_reason` says why the original can't run in float64."""
    reference_reason: str
    mode: str
    device: str
    batch_sizes: tuple[int, ...]
    draws: int
    seed: int
    settings: dict[str, str]
    """The settings that were pinned on both sides while measuring."""
    precision: str = ""
    """Either "bfloat16" or "float16", where the noise is the error of the original when it computes in that dtype; else ""."""
    rows: RowMeasurement | None = None
    """How much rows change with the other rows of their batch; None where that wasn't measured."""
    reference_device: str = ""
    """`device`, `reference_device`: where the candidate and the original ran; the latter is "" for the same device."""


NOTHING_MEASURED = Measurement((), (), (), "golden", "", "inference", "cpu", (), 1, 0, {})


@dataclass(frozen=True)
class OutputParity:
    """The judgement of one output."""

    name: str
    kind: str
    """`name` and `kind` are as in `OutputNoise`."""
    ok: bool
    judged: bool
    """False where the original itself isn't deterministic in this output."""
    max_error: float
    rms_error: float
    noise: float
    noise_rms: float
    """`rms_error` and `noise_rms`: the root mean square of the errors, and of those that rounding alone causes."""
    tolerance: float
    """`max_error`, `noise`, `tolerance`: the candidate's largest error, the error that rounding alone causes, and the
    allowed error."""
    ratio: float
    """The larger of max_error / noise and rms_error / noise_rms; at most `factor` for a correct output. Where passes
    declare an error, `factor` times the larger ratio of error to allowed error."""
    tied: int
    signal: str | None
    """`tied` and `signal` are as in `OutputNoise`."""
    problem: str | None
    """One sentence; None for a correct output."""
    slice: str = ""
    slice_ratio: float = 0.0
    """`slice`, `slice_ratio`: the worst channel, column or band of magnitude, "index 3 of dim 1", and its error in
    units of its own noise; "" and 0 where no slice is judged."""
    mean_error: float | None = None
    p999_error: float | None = None
    cosine: float | None = None
    agreement: float | None = None
    """`mean_error`, `p999_error`, `cosine`, `agreement`: the worst of the calls, see `CallErrors`; `undecided`: the
    sum."""
    undecided: int = 0
    calls: tuple[CallErrors, ...] = ()
    by_user: bool = False
    """Whether the user gave a tolerance. It limits the difference from the original's own output."""
    max_difference: float | None = None
    """The largest of these differences; None for integers and for outputs that aren't judged."""


@dataclass(frozen=True)
class RowJudgement:
    """The judgement of one output's rows; `allowed` is the allowed difference between two answers to one row."""

    name: str
    ok: bool
    max_difference: float
    allowed: float
    problem: str | None


@dataclass(frozen=True)
class RowReport:
    """The judgement of all rows, which is part of the verdict of a `ParityReport`."""

    ok: bool
    outputs: tuple[RowJudgement, ...]
    batch_sizes: tuple[int, ...]
    alone: bool
    without_rows: tuple[str, ...]
    problem: str | None


@dataclass(frozen=True)
class ParityReport(_Stored):
    """The result of a comparison."""

    verdict: str
    """One of "ok", "failed", or "vacuous" where the outputs prove nothing."""
    reason: str
    """One sentence."""
    outputs: tuple[OutputParity, ...]
    notes: tuple[str, ...]
    """Sentences about what wasn't compared, and why."""
    reference: str
    """Either "float64", or "own dtype" where the original can't run in float64."""
    mode: str
    """Either "inference" or "training"."""
    device: str
    batch_sizes: tuple[int, ...]
    draws: int
    """The number of samples at each of the compared batch sizes."""
    factor: float
    """The allowed error, in multiples of an output's noise."""
    settings: dict[str, str]
    precision: str = ""
    """Either "bfloat16" or "float16", where the candidate was compared with the original's own error in that dtype; "" where it
    was compared with the original's rounding noise."""
    rows: RowReport | None = None
    """The judgement of rows that ran alone and among others; None where nobody asked for it."""
    reference_device: str = ""
    """`device`, `reference_device`: where the candidate and the original ran; the latter is "" for the same device."""

    @property
    def ok(self) -> bool:
        """Whether the verdict is "ok"; False for "failed" and for "vacuous"."""
        return self.verdict == "ok"

    @property
    def ratio(self) -> float:
        """The worst output's error in units of its noise; 0 where no output was judged."""
        return max((output.ratio for output in self.outputs if output.judged), default=0.0)

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}"

    def _repr_html_(self) -> str:
        data = self.to_json()
        return fragment("parity", parity=data, drawn=parity_plot(data))

    def to_json(self) -> dict[str, Any]:
        return {**to_json(self), "ok": self.ok}


def to_json(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass instance, in their order; nested dataclasses become dicts, tuples become lists."""
    written: dict[str, Any] = {}
    for each in fields(instance):
        value = getattr(instance, each.name)
        if value or not each.metadata.get("omit_if_empty", False):
            written[each.name] = _written(value)
    return written


def from_json(cls: type[_T], data: Mapping[str, Any]) -> _T:
    """A dataclass instance from the data that `to_json` wrote, before or after a round trip through a JSON file.

    Data of an older version may lack fields that have a default. Fields that the class doesn't have are ignored. Floats
    may be the strings "NaN", "Infinity" and "-Infinity".

    Args:
        cls: a dataclass; its fields are numbers, strings, such dataclasses, tuples, `Mapping[str, X]`, or `X | None`.

    Raises:
        TypeError: the data lacks a field without a default.
        ValueError: a float is another string, or a tuple of fixed length has another length.
    """
    instance: _T = _read(cls, data)
    return instance


def _written(value: Any) -> Any:
    if is_dataclass(value):
        return to_json(value)
    if isinstance(value, tuple | list):
        return [_written(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _written(item) for key, item in value.items()}
    return value


@cache
def _hints_of(cls: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {each.name: hints[each.name] for each in fields(cls)}


def _read(hint: Any, value: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (present,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else _read(present, value)
    if origin is tuple:
        of_any_length = arguments[-1] is Ellipsis
        items = ((arguments[0], item) for item in value) if of_any_length else zip(arguments, value, strict=True)
        return tuple(_read(argument, item) for argument, item in items)
    if origin in (dict, Mapping):
        return {key: _read(arguments[1], item) for key, item in value.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return hint(**{name: _read(own, value[name]) for name, own in _hints_of(hint).items() if name in value})
    # JSON has no NaN and no infinities. Other numbers stay as they are, so an integer is written back as an integer.
    return float(value) if hint is float and isinstance(value, str) else value
