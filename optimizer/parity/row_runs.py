"""Run rows of a batch alone and among other rows: first the original, then candidates."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from optimize_export.errors import ParityError, UsageError
from optimize_export.wording import error_summary
from optimizer.model import Call, Runs, one_at_a_time, pinned_settings
from optimizer.parity.close_look import rows_may_be_rounding
from optimizer.parity.observe import Flatten, observe
from optimizer.parity.original import without_warnings
from optimizer.parity.results import RowMeasurement
from optimizer.parity.rows import Batch, Rows
from optimizer.parity.verdict import FACTOR, allowed_by, judge_rows

if TYPE_CHECKING:
    from optimizer.parity.reference import Reference

logger = logging.getLogger(__name__)


def independent_rows(reference: Reference, *, atol: Mapping[str, float], rtol: Mapping[str, float]) -> Rows:
    """The rows of the calls, after a check that in the original no row depends on the other rows of its batch.

    Args:
        atol, rtol: the user's tolerances, by the reference's names of the outputs.

    Raises:
        UsageError: there is no batch of two rows or more, or no output that has rows.
        ParityError: a row of the original depends on the others.
    """
    rows = _rows_of(reference)
    seen = measure_rows(reference, reference.original.runs, rows, None)
    if rows_may_be_rounding(seen, reference.noises):
        reference.look_closely()
    names = {name: name for name in reference.noises}
    report = judge_rows(seen, allowed_by(reference.noises.values(), names, atol, rtol), FACTOR)
    if not report.ok:
        raise ParityError(
            f"{report.problem}, in the original itself: its rows aren't independent, so leave out row independence, "
            "or fix the model."
        )
    return rows


def runs_on(reference: Reference, call: Call) -> bool:
    """Whether the original runs on a call without an error."""
    return outputs_on(reference, call) is not None


def outputs_on(reference: Reference, call: Call) -> dict[str, torch.Tensor] | None:
    """The outputs of the original on a call, by name; None if it raises."""
    try:
        seen = reference.run(call)
    except Exception as error:  # noqa: BLE001 - the original is foreign code, and may refuse other sizes and values
        logger.debug("the original raises on another call: %s", error)
        return None
    return {name: seen.values[name] for name in seen.of_kind("output")}


def measure_rows(reference: Reference, runs: Runs, rows: Rows, flatten: Flatten | None) -> RowMeasurement:
    """The difference between rows that run together and rows that run alone or among others."""

    def run(call: Call) -> dict[str, torch.Tensor]:
        with runs.fresh() as target:
            seen = observe(target, call, seed=reference.blank.seed, flatten=flatten)
        given = seen.of_kind("output")
        names = given if flatten is None else reference.output_names
        return {name: seen.values[own] for name, own in zip(names, given, strict=True)}

    with one_at_a_time, pinned_settings(), without_warnings():
        try:
            return rows.measure(run)
        except Exception as error:  # noqa: BLE001 - the candidate is foreign code; what it raises is a result
            problem = f"Running rows alone or among other rows raises: {error_summary(error)}"
            sizes = tuple(batch.size for batch in rows.batches)
            return RowMeasurement((), sizes, rows.alone, rows.without_rows, problem)


def _rows_of(reference: Reference) -> Rows:
    original, samples = reference.original, reference.original.samples
    calls = [one for one in original.calls if one.draw == 0 and not one.sizes and (one.batch_size or 0) > 1]
    if not calls or samples is None:
        raise UsageError("Row independence needs a batch of two rows or more: add one.")
    batches = [
        Batch(one.batch_size or 0, original.inputs_of(one), samples.at(one.batch_size, 1), one.unstable)
        for one in calls
    ]
    outputs = [{name: one.own.values[name] for name in one.own.of_kind("output")} for one in calls]
    rows = Rows(batches, outputs)
    if not rows.with_rows:
        raise UsageError("No output has as many rows as the batch, so there are no rows to check.")
    # A file with a fixed batch can't be run on one row.
    sizes = reference.batch_sizes
    rows.alone = len(sizes) > 1 and (1 in sizes or runs_on(reference, rows.one_row()))
    return rows
