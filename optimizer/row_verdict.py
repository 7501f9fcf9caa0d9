"""Whether a row of an output depends on the other rows of its batch: what was measured, and the judgement; nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

# Two answers to one row are compared, each of which may be off by what one answer may be.
_ANSWERS = 2.0


@dataclass(frozen=True)
class RowDifference:
    """How far the rows of one output move with the other rows of the batch, pooled over all runs.

    Attributes:
        name: of the output, in the reference.
        max_difference, rms_difference: between two answers to one row, over the elements that are finite in both.
        mismatches: elements of an integer output that differ, ties left out; for others where NaN or infinity are; all of
            a row whose answer has another shape.
        batch_size, row, how: where the largest difference is, or the first mismatch: the row as it is in the batch of that
            size, and what else it was run as: "alone", "in another place" or "among other rows".
        frontier: (difference, magnitude) pairs that decide any atol, rtol.
    """

    name: str
    max_difference: float = 0.0
    rms_difference: float = 0.0
    mismatches: int = 0
    batch_size: int = 0
    row: int = 0
    how: str = ""
    frontier: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class RowMeasurement:
    """What was seen when rows were run alone, in other places and among other rows.

    Attributes:
        batch_sizes: those whose rows were run.
        alone: False where nothing can be run at a batch of one.
        without_rows: outputs whose dim 0 isn't the batch's: they aren't compared.
        problem: what the candidate raised, a sentence; None where it ran.
    """

    outputs: tuple[RowDifference, ...]
    batch_sizes: tuple[int, ...]
    alone: bool
    without_rows: tuple[str, ...] = ()
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        outputs = [{**asdict(one), "frontier": [list(point) for point in one.frontier]} for one in self.outputs]
        return {**asdict(self), "outputs": outputs}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RowMeasurement:
        return cls(
            outputs=tuple(_difference(output) for output in data["outputs"]),
            batch_sizes=tuple(data["batch_sizes"]),
            alone=data["alone"],
            without_rows=tuple(data["without_rows"]),
            problem=data["problem"],
        )


def _difference(data: Mapping[str, Any]) -> RowDifference:
    known = {item.name: data[item.name] for item in fields(RowDifference)}
    figures = {name: float(known[name]) for name in ("max_difference", "rms_difference")}
    frontier = tuple((float(error), float(size)) for error, size in known["frontier"])
    return RowDifference(**known | figures | {"frontier": frontier})


@dataclass(frozen=True)
class RowJudgement:
    """The judgement of one output's rows: `allowed` is what two answers to one row may be apart."""

    name: str
    ok: bool
    max_difference: float
    allowed: float
    problem: str | None


@dataclass(frozen=True)
class RowReport:
    """The judgement of all rows; the verdict of a `ParityReport` goes by it too."""

    ok: bool
    outputs: tuple[RowJudgement, ...]
    batch_sizes: tuple[int, ...]
    alone: bool
    without_rows: tuple[str, ...]
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RowReport:
        outputs = tuple(RowJudgement(**output) for output in data["outputs"])
        sequences = {name: tuple(data[name]) for name in ("batch_sizes", "without_rows")}
        return cls(**{**data, **sequences, "outputs": outputs})


@dataclass(frozen=True)
class Allowed:
    """What one answer to one output may be off by."""

    name: str
    noise: float
    noise_rms: float
    scale: float
    atol: float | None
    rtol: float | None


def judge_rows(measured: RowMeasurement, allowed: Mapping[str, Allowed], factor: float) -> RowReport:
    """The verdict on what rows do; nothing is run.

    Args:
        allowed: by the reference's names of the outputs; one that isn't in it isn't judged.
        factor: how many times its noise one answer may be off.
    """
    judged = tuple(_judge(one, allowed[one.name], factor) for one in measured.outputs if one.name in allowed)
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


def _judge(one: RowDifference, by: Allowed, factor: float) -> RowJudgement:
    by_user = by.atol is not None or by.rtol is not None
    atol, rtol = by.atol or 0.0, by.rtol or 0.0
    largest = _ANSWERS * (atol + rtol * by.scale if by_user else factor * by.noise)
    told = f"Row {one.row} of {by.name} at batch size {one.batch_size} depends on the other rows"
    why: str | None = None
    if one.mismatches:
        why = f"it differs where it is run {one.how}"
    elif by_user:
        if any(not error <= _ANSWERS * (atol + rtol * size) for error, size in one.frontier):
            why = f"it moves by {one.max_difference:.2e} where it is run {one.how}, more than atol {atol:g} and rtol {rtol:g} allow"
    elif not one.max_difference <= largest:
        why = (
            f"it moves by {one.max_difference:.2e} where it is run {one.how}, and {largest:.1e} is allowed for rounding"
        )
    elif not one.rms_difference <= (rms := _ANSWERS * factor * by.noise_rms):
        why = (
            f"where rows are run otherwise they move by {one.rms_difference:.2e} in the root mean square, and {rms:.1e} is"
            " allowed for rounding"
        )
    return RowJudgement(by.name, why is None, one.max_difference, largest, None if why is None else f"{told}: {why}")
