"""Compare the whole result with the original, at the precision that its passes leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from optimize_export.errors import LoadError
from optimize_export.wording import first_line
from optimizer.model import Mode, Samples
from optimizer.parity import OriginalOutputs, ParityReport, Reference, judge, measure_reference
from optimizer.report import PassRecord
from passes.base import DeclaredError, PassResult, Precision

Lowered = Precision | DeclaredError
"""The reason why a result may be less precise than the original."""


@dataclass
class AppliedPass:
    """A pass that ran and hasn't been rolled back."""

    number: int
    record: PassRecord
    result: PassResult
    declared: DeclaredError | None = None

    @property
    def lowered(self) -> tuple[Lowered, ...]:
        """The reasons why this pass makes the result less precise."""
        return tuple(one for one in (self.declared, self.result.precision) if one is not None)


def with_changes(applied: Iterable[AppliedPass]) -> list[AppliedPass]:
    """The passes that changed something."""
    return [one for one in applied if one.result.changes]


def lowered_by(applied: Iterable[AppliedPass]) -> tuple[Lowered, ...]:
    """The reasons why these passes make the result less precise."""
    return tuple(dict.fromkeys(lowered for one in with_changes(applied) for lowered in one.lowered))


class Comparer:
    """Compares the result with the original.

    A training result is compared in eval mode too. If it is wrong only there, that report is returned.

    Attributes:
        outputs: the outputs of the original.
        result: the working copy.
        mode: "inference" or "training".
        notes: the notes of the report; further notes are appended here.
    """

    def __init__(
        self,
        outputs: OriginalOutputs,
        original: nn.Module,
        result: nn.Module,
        samples: Samples,
        mode: Mode,
        batch_sizes: Sequence[int] | None,
        notes: list[str],
    ) -> None:
        self.outputs = outputs
        self.notes = notes
        self._original = original
        self.result = result
        self._samples = samples
        self.mode = mode
        self._batch_sizes = batch_sizes
        # None before it is measured; False if the original doesn't run in eval mode.
        self._in_eval: Reference | Literal[False] | None = None
        self._less_precise: dict[tuple[int, tuple[Lowered, ...]], Reference] = {}

    def report(self, applied: Sequence[AppliedPass]) -> ParityReport:
        """The report of the result as it is now.

        Args:
            applied: the passes whose changes it has.
        """
        lowered = lowered_by(applied)
        report = judge(self.reference(lowered).compare(self.result))
        if self.mode != "training" or report.verdict == "failed" or not with_changes(applied):
            return report
        in_eval = self._report_in_eval(lowered)
        return in_eval if in_eval is not None and in_eval.verdict == "failed" else report

    def reference(self, lowered: tuple[Lowered, ...] = ()) -> Reference:
        """The reference for a result that is less precise for these reasons."""
        return self._judging(self.outputs.reference(), lowered)

    def _judging(self, reference: Reference, lowered: tuple[Lowered, ...]) -> Reference:
        if not lowered:
            return reference
        key = id(reference), lowered
        if key not in self._less_precise:
            *before, last = lowered
            self._less_precise[key] = self._judging(reference, tuple(before)).less_precise(last)
        return self._less_precise[key]

    def _report_in_eval(self, lowered: tuple[Lowered, ...]) -> ParityReport | None:
        """The report with both in eval mode; None if the original doesn't run in eval mode."""
        if self._in_eval is None:
            try:
                self._in_eval = measure_reference(self._original, self._samples, batch_sizes=self._batch_sizes)
            except LoadError as error:
                self.notes.append(f"the result wasn't compared in eval: {first_line(error).rstrip('.')}")
                self._in_eval = False
        if self._in_eval is False:
            return None
        report = judge(self._judging(self._in_eval, lowered).compare(self.result))
        return replace(report, reason=f"In eval: {report.reason}")
