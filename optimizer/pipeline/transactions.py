"""Passes as transactions: each one runs, its changes are checked in their places, and it is kept or rolled back.

Then the whole result is verified: the first pass after which it is wrong is found by bisection and rolled back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from exporters.places import line_of_error
from optimize_export.errors import LoadError, OptimizeFailed, ParityError
from optimize_export.wording import first_line
from optimizer.faults import locate_in_module
from optimizer.model import Mode, Samples, Source, WorkingCopy, is_script, reachable_modules
from optimizer.parity import (
    OriginalOutputs,
    ParityReport,
    Reference,
    RegionParity,
    check_change,
    judge,
    measure_reference,
)
from optimizer.pipeline.copy_runs import CopyRuns
from optimizer.report import PassRecord, PlaceRecord, Progress, ProgressFunction
from passes.base import Change, Context, DeclaredError, Edit, ModelTree, Pass, PassResult, Place, Precision
from passes.casting.forwards import AutocastForward
from passes.errors import PassesError
from passes.graph.edits import taken_back
from passes.graph.forwards import standing_around
from passes.graph.memory import same_values

# Maximum number of runs of a pass. Each run leaves out the imprecise changes of the one before, but may make new ones.
_MOST_TRIES = 8


# The reason why a result may be less precise than the original.
Lowered = Precision | DeclaredError


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


class Transactions:
    """Runs the passes in order, keeps their records, and rolls them back."""

    def __init__(
        self,
        copy: WorkingCopy,
        original: nn.Module,
        tree: ModelTree,
        device: torch.device,
        *,
        strict: bool,
        explain: bool,
        progress: ProgressFunction,
    ) -> None:
        self.passes: Sequence[Pass] = ()
        self.records: list[PassRecord] = []
        # The passes that weren't rolled back so far, including those that changed nothing.
        self.applied: list[AppliedPass] = []
        # By number of the pass, the reason to roll it back whatever it does.
        self._wrong: dict[int, str] = {}
        # The numbers of the passes that don't run now.
        self._left_out: set[int] = set()
        self.runs = CopyRuns(copy.root)
        self.comparer: Comparer | None = None  # None without samples
        self._copy = copy
        self._original = original
        self._tree = tree
        self._device = device
        self._strict = strict
        self._explain = explain
        self._progress = progress

    def context(self) -> Context:
        """The context of passes."""
        return self.runs.context(self._copy.mode, self._device)

    def run_all(self) -> None:
        """Run the passes in order.

        Judged together with a lossy pass, the error of another pass might be a hundredth of the error that the lossy one
        allows. So all others are compared without it first. Passes that compile are left out there: they generate other
        code for other dtypes.

        Raises:
            OptimizeFailed: a pass fails or is rolled back, with `strict` or if it is a guarantee.
        """
        first = next((number for number, item in enumerate(self.passes) if is_lossy(item)), None)
        if first is None or self.comparer is None:
            self.run_from(0)
            return
        later = enumerate(self.passes[first:], first)
        self._left_out = {number for number, item in later if is_lossy(item) or item.is_barrier}
        self.run_from(0)
        if with_changes(self.applied):
            verify_and_roll_back(self, self.comparer)
        records = enumerate(self.records[first:], first)
        self._wrong = {number: record.reason for number, record in records if record.status == "rolled-back"}
        self.take_back_from(first)
        self._left_out = set()
        self.run_from(first)

    def run_from(self, first: int) -> None:
        """Run the passes from this number on; errors as for `run_all`."""
        for number, item in enumerate(self.passes[first:], first):
            if number in self._left_out:
                self.records.append(PassRecord(item.name, item.options, "unchanged"))
            else:
                self._run_numbered(number)

    def _run_numbered(self, number: int) -> None:
        item = self.passes[number]
        self._progress(Progress("optimize", number, len(self.passes) + 1, item.name, item.name))
        context = replace(self.context(), explain=self._explain)
        if context.example_calls:
            context = replace(context, judge=partial(judge_change, self._copy.root, item.declared_error))
        for tries_left in reversed(range(_MOST_TRIES)):
            record, result, error = attempt(item, context, self._copy, self._original, self._tree)
            if result is None:
                self.records.append(record)
                if self._strict or item.is_guarantee:
                    raise OptimizeFailed(f"{item.name} failed ({record.reason}).") from error
                return
            if (reason := self._wrong.get(number)) is not None and result.changes:
                self.records.append(record)
                self._roll_back(item, record, result, reason)
                return
            found = CheckedChanges.of(record, result)
            if found.wrong is None and not found.imprecise:
                self.records.append(record)
                self.applied.append(AppliedPass(number, record, result, item.declared_error))
                return
            new = {place: reason for place, reason in found.imprecise.items() if place not in context.left_alone}
            if found.wrong is not None or not new or not tries_left:
                # The pass is wrong, ignores `left_alone`, or keeps finding new places: roll back all of it.
                self.records.append(record)
                self._roll_back(item, record, result, found.wrong or next(iter(found.imprecise.values())))
                return
            result.rewriter.roll_back()
            context = replace(context, left_alone={**context.left_alone, **new})

    def take_back(self, culprit: AppliedPass, reason: str) -> None:
        """Roll this pass back and run the later ones again."""
        self.take_back_from(culprit.number + 1)
        # The culprit is the last pass now. Its record stays.
        self.applied.pop()
        self._roll_back(self.passes[culprit.number], culprit.record, culprit.result, reason)
        self.run_from(culprit.number + 1)

    def take_back_from(self, number: int) -> None:
        """Undo the pass of this number and the later ones, and forget their records."""
        for done in reversed(self.applied):
            if done.number >= number:
                done.result.rewriter.roll_back()
        self.applied = [done for done in self.applied if done.number < number]
        self.records = self.records[:number]

    def _roll_back(self, item: Pass, record: PassRecord, result: PassResult, reason: str) -> None:
        result.rewriter.roll_back()
        record.status, record.reason, record.remarks, record.detail = "rolled-back", reason, (), None
        if self._strict or item.is_guarantee:
            raise OptimizeFailed(f"{record.name} was rolled back: {reason}")


def verify_and_roll_back(transactions: Transactions, comparer: Comparer) -> ParityReport:
    """Roll back each pass that makes the result wrong, until it is right; return the final report.

    Raises:
        OptimizeFailed: a pass is rolled back, with `strict` or if it is a guarantee.
        ParityError: the result is wrong without any pass.
    """
    while (report := comparer.report(transactions.applied)).verdict == "failed":
        applied = with_changes(transactions.applied)
        if not applied:
            raise ParityError(
                f"Even without any pass, the copy doesn't compute the same as the model ({report.reason}): the model "
                "or a pass writes to the model's weights."
            )
        culprit, reason = _bisect(comparer, applied, report.reason)
        transactions.take_back(culprit, f"{reason}{_place_of(transactions, comparer, culprit)}")
    return report


def _bisect(comparer: Comparer, applied: Sequence[AppliedPass], reason: str) -> tuple[AppliedPass, str]:
    """The first wrong pass by bisection, with the reason; `reason` is why the result with all of them is wrong."""
    # The result is right with the first `low` passes and wrong with the first `high` ones.
    low, high = 0, len(applied)
    while high - low > 1:
        middle = (low + high) // 2
        with taken_back(edits_of(applied[middle:])):
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
        found = locate_in_module(reference, reference.compare(comparer.result), comparer.result)
    return f" {found}" if found.divergence is not None else ""


def attempt(
    item: Pass, context: Context, copy: WorkingCopy, original: nn.Module, tree: ModelTree
) -> tuple[PassRecord, PassResult | None, Exception | None]:
    """Run a pass on the tree of the working copy; if it raises, restore the tree and return the error.

    Raises:
        PassesError: the pass can't do its one job.
        OptimizeFailed: it wrote to a tensor of the caller's model.
    """
    started = time.perf_counter()
    before = TreeState(tree.modules())
    sources = _CallersTensors(copy, original, tree)
    try:
        result = item.run(tree, context)
    except PassesError:
        raise
    except Exception as error:  # noqa: BLE001 - a pass of another package may raise anything; the record says so
        # The passes of this project undo their edits, but those of other packages may not.
        before.restore()
        tree.refresh()
        sources.refuse_writes(item)
        line = line_of_error(error)
        reason = f"{type(error).__name__}: {first_line(error)}{f' ({line})' if line else ''}"
        seconds = time.perf_counter() - started
        return PassRecord(item.name, item.options, "failed", reason, seconds=seconds), None, error
    sources.refuse_writes(item)
    record = PassRecord(
        item.name,
        item.options,
        "applied" if result.changes else "unchanged",
        max_error=item.max_error,
        changes=tuple(PlaceRecord(change.where, change.what) for change in result.changes),
        skips=tuple(PlaceRecord(skip.where, skip.reason) for skip in result.skips),
        remarks=tuple(PlaceRecord(remark.where, remark.text) for remark in result.remarks),
        detail=result.detail,
        seconds=time.perf_counter() - started,
    )
    return record, result, None


def judge_change(
    root: nn.Module,
    declared: DeclaredError | None,
    old: Callable[..., Any],
    new: Callable[..., Any],
    values: tuple[Any, ...],
) -> list[tuple[RegionParity, RegionParity | None]]:
    """As `Context.judge`, for a change of a pass that may declare an error."""
    cast = standing_around(root, AutocastForward)
    return check_change(old, new, values, declared=declared, autocast=None if cast is None else cast.dtype)


class Comparer:
    """Compares the result with the original.

    A training result is compared in eval mode too. If it is wrong only there, that report is returned.

    Args:
        result: the working copy.
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
        """The report of the result as it is now, with the changes of these passes."""
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


@dataclass
class CheckedChanges:
    """The judgement of one pass's changes."""

    # The largest error of a change, in units of the noise there; None if no change was compared.
    worst: float | None = None
    # The largest error of a change, as a share of the largest magnitude there.
    error: float | None = None
    # The sentence about a change that computes something else; None if there is none.
    wrong: str | None = None
    # The changes that lose too much to rounding, each with the reason.
    imprecise: dict[Place, str] = field(default_factory=dict)

    @classmethod
    def of(cls, record: PassRecord, result: PassResult) -> CheckedChanges:
        """Judge the changes up to the first one that computes something else; store their errors in the record."""
        found = cls()
        for change, pairs in result.checked:
            for algebra, rounding in pairs:
                found._add(change, algebra, rounding)
                record.parity, record.error = found.worst, found.error
                if found.wrong is not None:
                    return found
        return found

    def _add(self, change: Change, algebra: RegionParity, rounding: RegionParity | None) -> None:
        self.worst = max(self.worst or 0.0, algebra.ratio)
        self.error = max(self.error or 0.0, algebra.error / algebra.scale if algebra.scale else 0.0)
        if not algebra.ok:
            self.wrong = f"{change.where or 'the root'} ({change.what}): {algebra.reason}"
        elif rounding is not None and not rounding.ok:
            reason = rounding.reason.rstrip(".")
            self.imprecise[change.place] = f"undone ({change.what}), because it loses too much to rounding: {reason}"
        elif rounding is not None:
            self.worst = max(self.worst, rounding.ratio)


class TreeState:
    """The attributes, tensors and children of every module, by reference."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = [
            (holder, dict(holder))
            for module in modules
            if not is_script(module)
            for holder in (module.__dict__, module._parameters, module._buffers, module._modules)
        ]

    def restore(self) -> None:
        for holder, before in self._kept:
            holder.clear()
            holder.update(before)


def is_lossy(item: Pass) -> bool:
    """Whether a pass makes the result less precise on purpose."""
    return item.lowers_precision or item.max_error is not None


def edits_of(applied: Iterable[AppliedPass]) -> list[Edit]:
    """All edits of these passes, in order."""
    return [edit for one in applied for edit in one.result.rewriter.edits]


class _CallersTensors:
    """The caller's tensors before a pass runs, with their versions.

    A run writes to the buffers of scripted modules and restores them, which changes their versions. So their values are
    kept too.
    """

    def __init__(self, copy: WorkingCopy, original: nn.Module, tree: ModelTree) -> None:
        named = [*original.named_parameters(), *original.named_buffers()]
        for path, module in tree.unregistered:
            own = copy.originals[id(module)]
            tensors = (*own.named_parameters(recurse=False), *own.named_buffers(recurse=False))
            named += ((f"{path}.{name}", tensor) for name, tensor in tensors)
        scripted = (module for module in reachable_modules(copy.root) if is_script(module))
        put_back = {id(tensor) for module in scripted for tensor in module.buffers(recurse=False)}
        self._before: list[tuple[Source, torch.Tensor | None]] = [
            (Source.of(name, tensor), tensor.detach().clone() if id(tensor) in put_back else None)
            for name, tensor in named
            if not is_lazy(tensor)
        ]

    def refuse_writes(self, item: Pass) -> None:
        """Raise `OptimizeFailed` if the pass wrote to one of them, because that can't be undone."""
        written = [
            source.path
            for source, values in self._before
            if not source.unchanged and (values is None or not same_values(source.tensor, values))
        ]
        if written:
            raise OptimizeFailed(
                f"The pass {item.name} wrote in place to {written[0]}, which belongs to the caller's model: a pass "
                "must create a new tensor, so leave out the pass and load the model's weights again."
            )
