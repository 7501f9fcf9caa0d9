"""Find the pass that makes the result wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from optimizer.faults import located_module
from optimizer.parity import ParityReport
from optimizer.pipeline.applied import AppliedPass, edits_of, is_lossy, lowered_by, with_changes
from optimizer.pipeline.comparer import Comparer
from passes.graph.edits import taken_back

if TYPE_CHECKING:
    from optimizer.pipeline.transactions import Transactions


def take_back_culprit(
    transactions: Transactions, comparer: Comparer, report: ParityReport, among: Sequence[AppliedPass] | None = None
) -> None:
    """Roll back the first pass after which the result is wrong, and run the later ones again.

    Args:
        report: of the wrong result.
        among: the first passes, if these alone make the result wrong; None for all passes.
    """
    applied = with_changes(transactions.applied) if among is None else among
    culprit, reason = _first(transactions, comparer, applied, report.reason)
    transactions.take_back(culprit, f"{reason}{_place_of(transactions, comparer, culprit)}")


def wrong_before_a_lossy_pass(
    transactions: Transactions, comparer: Comparer
) -> tuple[ParityReport, list[AppliedPass]] | None:
    """The passes before the first lossy one, with their report, if they make the result wrong; otherwise None.

    Judged together with the lossy pass, their error might be a hundredth of the error that it allows.
    """
    applied = with_changes(transactions.applied)
    first = next((n for n, done in enumerate(applied) if done.lowered), 0)
    if not first:
        return None
    with taken_back(edits_of(applied[first:])):
        report = comparer.report(applied[:first])
    return (report, applied[:first]) if report.verdict == "failed" else None


def find_wrong_after(transactions: Transactions, comparer: Comparer, number: int) -> None:
    """Find the passes after a lossy one that are wrong by themselves, in runs without the lossy one.

    Judged together with the lossy pass, their error might be a hundredth of the error that it allows. Passes that
    compile are left out: they generate other code for other dtypes, so a run without the lossy pass shows nothing.
    """
    later = [
        each
        for each, item in enumerate(transactions.passes[number:], number)
        if not (is_lossy(item) or item.is_barrier or each in transactions.wrong)
    ]
    before = len(with_changes(transactions.applied))
    while later:
        for each in later:
            transactions.run_numbered(each)
            if transactions.records[-1].status == "rolled-back":
                transactions.wrong[each] = transactions.records[-1].reason
        found = _wrong_after(transactions, comparer, before)
        transactions.take_back_from(number)
        if found is None:
            return
        culprit, reason = found
        transactions.wrong[culprit.number] = reason
        later.remove(culprit.number)


def _wrong_after(transactions: Transactions, comparer: Comparer, before: int) -> tuple[AppliedPass, str] | None:
    """The first wrong pass after the first `before` ones; None if the result is right, or wrong because of these."""
    applied = with_changes(transactions.applied)
    if len(applied) == before or (report := comparer.report(applied)).verdict != "failed":
        return None
    if before:
        with taken_back(edits_of(applied[before:])):
            if comparer.report(applied[:before]).verdict == "failed":
                # An earlier pass is wrong; the check of the whole result will find it.
                return None
    return _first(transactions, comparer, applied, report.reason, right=before)


def _first(
    transactions: Transactions, comparer: Comparer, applied: Sequence[AppliedPass], reason: str, *, right: int = 0
) -> tuple[AppliedPass, str]:
    """The first wrong pass by bisection, with the reason.

    Args:
        reason: why the result with all of them is wrong.
        right: a number of first passes with which the result is right.
    """
    everything = with_changes(transactions.applied)
    # The result is right with the first `low` passes and wrong with the first `high` ones.
    low, high = right, len(applied)
    while high - low > 1:
        middle = (low + high) // 2
        with taken_back(edits_of(everything[middle:])):
            seen = comparer.report(applied[:middle])
        if seen.verdict == "failed":
            high, reason = middle, seen.reason
        else:
            low = middle
    return applied[high - 1], reason


def _place_of(transactions: Transactions, comparer: Comparer, culprit: AppliedPass) -> str:
    """A sentence on the first module that is wrong with this pass and without later ones; "" if none is found."""
    if comparer.mode != "inference":
        return ""
    later = edits_of(done for done in transactions.applied if done.number > culprit.number)
    reference = comparer.reference(lowered_by([culprit]))
    with taken_back(later):
        found = located_module(reference, reference.compare(comparer.result), comparer.result)
    return f" {found}" if found.divergence is not None else ""
