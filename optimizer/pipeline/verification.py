"""Verify the whole result: roll back passes, or single changes, until it is right."""

from __future__ import annotations

from optimize_export.errors import ParityError
from optimizer.parity import ParityReport
from optimizer.pipeline.applied import with_changes
from optimizer.pipeline.comparer import Comparer
from optimizer.pipeline.culprits import take_back_culprit, wrong_before_a_lossy_pass
from optimizer.pipeline.transactions import Transactions


def verified(transactions: Transactions, comparer: Comparer) -> ParityReport:
    """Roll back everything that makes the result wrong: passes, or single changes. Return the final report.

    Raises:
        OptimizeFailed: a pass is rolled back, with `strict` or if it is a guarantee.
        ParityError: the result is wrong without any pass.
    """
    while True:
        report = comparer.report(transactions.applied)
        if report.verdict != "failed":
            if (wrong := wrong_before_a_lossy_pass(transactions, comparer)) is None:
                return report
            take_back_culprit(transactions, comparer, *wrong)
            continue
        if not with_changes(transactions.applied):
            raise ParityError(
                f"Even without any pass, the copy doesn't compute the same as the model ({report.reason}): the model "
                "or a pass writes to the model's weights."
            )
        take_back_culprit(transactions, comparer, report)
