"""Passes as transactions: each one runs, its changes are checked in their places, and it is kept or rolled back.

Then the whole result is verified: the first pass after which it is wrong is found by bisection and rolled back.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from exporters.places import line_of_error
from optimize_export.errors import LoadError, OptimizeFailed, ParityError
from optimize_export.wording import first_line
from optimizer.faults import locate_in_module
from optimizer.model import (
    Call,
    Mode,
    Samples,
    Source,
    WorkingCopy,
    eager_only,
    is_script,
    named_tensors,
    pinned_settings,
    private_state,
    random_state,
    reachable_modules,
    seed_torch,
)
from optimizer.options import NO_BENCH
from optimizer.parity import (
    OriginalOutputs,
    ParityReport,
    Reference,
    RegionParity,
    check_change,
    judge,
    measure_reference,
)
from optimizer.report import PassRecord, PlaceRecord, Progress, ProgressFunction
from passes.base import Context, DeclaredError, Edit, ModelTree, Pass, PassResult, Place, Precision
from passes.casting.forwards import AutocastForward
from passes.errors import PassesError
from passes.graph.edits import taken_back
from passes.graph.forwards import standing_around
from passes.graph.trial import try_on_graphs

# Maximum number of runs of a pass. Each run leaves out the imprecise changes of the one before, but may make new ones.
_MOST_TRIES = 8


# ------------------------------------------------------------------------------------------------ runs of the copy

Way = Callable[[], AbstractContextManager[Any]]


class CopyRuns:
    """Runs the working copy itself, because passes know its modules by identity; each run leaves no trace."""

    def __init__(
        self,
        root: nn.Module,
        calls: Sequence[Call] = (),
        seeds: Sequence[int] = (),
        written: frozenset[str] = frozenset(),
    ) -> None:
        self.calls = list(calls)
        self.root = root
        self._seeds = seeds
        self._written = written

    def context(self, mode: Mode, device: torch.device) -> Context:
        """The context of passes: the example calls, and ways to run the copy on them."""
        calls = tuple((call.args, call.kwargs) for call in self.calls)
        if not calls:
            return Context(mode, device, calls)
        return Context(
            mode,
            device,
            calls,
            run_inside=self.run_inside,
            run_compiled=self._run_compiled,
            try_on_graphs=try_on_graphs,
            apart=self._apart,
        )

    def run_inside(self, watch: AbstractContextManager[Any], number: int = 0) -> str | None:
        """Run one call inside `watch`; return the error as text, or None if it runs."""
        seed = self._seeds[number] if self._seeds else 0
        return self._error_inside(watch, [(seed, self.calls[number])], eager=True)

    def _run_compiled(self, watch: AbstractContextManager[Any]) -> str | None:
        return self._error_inside(watch, list(enumerate(self.calls)), eager=False)

    def _error_inside(
        self, watch: AbstractContextManager[Any], calls: Sequence[tuple[int, Call]], *, eager: bool
    ) -> str | None:
        try:
            with self._quiet(calls[0][0], eager=eager), watch:
                for seed, call in calls:
                    seed_torch(seed)
                    copied = call.copied()
                    self.root(*copied.args, **copied.kwargs)
        except Exception as error:  # noqa: BLE001 - foreign code, and a compiler on it, may raise anything
            return f"{type(error).__name__}: {first_line(error)}"
        return None

    def seconds(self, ways: Sequence[Way], rounds: int) -> list[float]:
        """The seconds of the first example call in each way: the shortest of some rounds, in turn."""
        shortest = [math.inf] * len(ways)
        with self._quiet(eager=False):
            for _ in range(rounds):
                for place, way in enumerate(ways):
                    call = self.calls[0].copied()
                    with way():
                        started = time.perf_counter()
                        self.root(*call.args, **call.kwargs)
                        if torch.cuda.is_initialized():
                            torch.cuda.synchronize()
                        seconds = time.perf_counter() - started
                    shortest[place] = min(shortest[place], seconds)
        return shortest

    @contextmanager
    def _apart(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        call = self.calls[0].copied()
        parameters = list(self.root.parameters())
        gradients = [parameter.grad for parameter in parameters]
        try:
            with self._quiet(), torch.enable_grad():
                for parameter in parameters:
                    parameter.grad = None
                yield call.args, call.kwargs
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    @contextmanager
    def _quiet(self, seed: int = 0, *, eager: bool = True) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(random_state(seed))
            stack.enter_context(pinned_settings())
            stack.enter_context(eager_only() if eager else nullcontext())
            stack.enter_context(torch.no_grad())
            stack.enter_context(private_state(self.root, self._written))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield


# ---------------------------------------------------------------------------------------------------- transactions

# The reason why a result may be less precise than the original.
Lowered = Precision | DeclaredError


@dataclass
class AppliedPass:
    """A pass that ran and hasn't been rolled back."""

    number: int
    record: PassRecord
    result: PassResult
    declared: DeclaredError | None = None


def with_changes(applied: Iterable[AppliedPass]) -> list[AppliedPass]:
    return [one for one in applied if one.result.changes]


def lowered_by(applied: Iterable[AppliedPass]) -> tuple[Lowered, ...]:
    """The reasons why these passes make the result less precise."""
    reasons = (reason for one in with_changes(applied) for reason in (one.declared, one.result.precision))
    return tuple(dict.fromkeys(reason for reason in reasons if reason is not None))


class Transactions:
    """Runs the passes in order, keeps their records, and rolls them back."""

    def __init__(
        self,
        copy: WorkingCopy,
        original: nn.Module,
        tree: ModelTree,
        device: torch.device,
        passes: Sequence[Pass],
        *,
        strict: bool,
        explain: bool,
        progress: ProgressFunction,
    ) -> None:
        self.passes = passes
        self.records: list[PassRecord] = []
        # The passes that weren't rolled back so far, including those that changed nothing.
        self.applied: list[AppliedPass] = []
        # By number of the pass, the reason to roll it back whatever it does.
        self._wrong: dict[int, str] = {}
        # The numbers of the passes that don't run now.
        self._left_out: set[int] = set()
        self.runs = CopyRuns(copy.root)
        self.comparer: Comparer | None = None  # None without samples
        self.copy, self.original, self.tree, self.progress = copy, original, tree, progress
        self._device, self._strict, self._explain = device, strict, explain

    def context(self) -> Context:
        return self.runs.context(self.copy.mode, self._device)

    def run_all(self) -> None:
        """Run the passes in order.

        Judged together with a lossy pass, the error of another pass might be a hundredth of the error that the lossy one
        allows. So all others are compared without it first. Passes that compile are left out there: they generate other
        code for other dtypes.
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
        self.progress(Progress("optimize", number, len(self.passes) + 1, item.name, item.name))
        context = replace(self.context(), explain=self._explain, may_time=not os.environ.get(NO_BENCH))
        if context.example_calls:
            context = replace(context, judge=partial(judge_change, self.copy.root, item.declared_error))
        for tries_left in reversed(range(_MOST_TRIES)):
            record, result, error = attempt(item, context, self.original, self.tree)
            if result is None:
                self.records.append(record)
                if self._strict or item.is_guarantee:
                    raise OptimizeFailed(f"{item.name} failed ({record.reason}).") from error
                return
            if (reason := self._wrong.get(number)) is not None and result.changes:
                self.records.append(record)
                self._roll_back(item, record, result, reason)
                return
            wrong, imprecise = check_changes(record, result)
            if wrong is None and not imprecise:
                self.records.append(record)
                self.applied.append(AppliedPass(number, record, result, item.declared_error))
                return
            new = {place: reason for place, reason in imprecise.items() if place not in context.left_alone}
            if wrong is not None or not new or not tries_left:
                # The pass is wrong, ignores `left_alone`, or keeps finding new places: roll back all of it.
                self.records.append(record)
                self._roll_back(item, record, result, wrong or next(iter(imprecise.values())))
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
    """Roll back each pass that makes the result wrong, until it is right; return the final report."""
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
    item: Pass, context: Context, original: nn.Module, tree: ModelTree
) -> tuple[PassRecord, PassResult | None, Exception | None]:
    """Run a pass on the tree of the working copy; if it raises, restore the tree and return the error."""
    started = time.perf_counter()
    holders = [
        holder
        for module in tree.modules()
        if not is_script(module)
        for holder in (module.__dict__, module._parameters, module._buffers, module._modules)
    ]
    before = [dict(holder) for holder in holders]
    sources = _callers_tensors(original)
    try:
        result = item.run(tree, context)
    except PassesError:
        raise
    except Exception as error:  # noqa: BLE001 - a pass of another package may raise anything; the record says so
        # The passes of this project undo their edits, but those of other packages may not.
        for holder, held in zip(holders, before, strict=True):
            holder.clear()
            holder.update(held)
        tree.refresh()
        _refuse_writes(item, sources)
        line = line_of_error(error)
        reason = f"{type(error).__name__}: {first_line(error)}{f' ({line})' if line else ''}"
        seconds = time.perf_counter() - started
        return PassRecord(item.name, item.options, "failed", reason, seconds=seconds), None, error
    _refuse_writes(item, sources)
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
            return None
        report = judge(self._judging(self._in_eval, lowered).compare(self.result))
        return replace(report, reason=f"In eval: {report.reason}")

    @cached_property
    def _in_eval(self) -> Reference | None:
        try:
            return measure_reference(self._original, self._samples, batch_sizes=self._batch_sizes)
        except LoadError as error:
            self.notes.append(f"the result wasn't compared in eval: {first_line(error).rstrip('.')}")
            return None


def check_changes(record: PassRecord, result: PassResult) -> tuple[str | None, dict[Place, str]]:
    """Judge a pass's changes up to the first one that computes something else; store their errors in the record.

    Returns:
        The sentence about the change that computes something else, or None; and the changes that lose too much to
        rounding, each with the reason.
    """
    imprecise: dict[Place, str] = {}
    for change, pairs in result.checked:
        for algebra, rounding in pairs:
            record.parity = max(record.parity or 0.0, algebra.ratio)
            record.error = max(record.error or 0.0, algebra.error / algebra.scale if algebra.scale else 0.0)
            if not algebra.ok:
                return f"{change.where or 'the root'} ({change.what}): {algebra.reason}", imprecise
            if rounding is None:
                continue
            if rounding.ok:
                record.parity = max(record.parity, rounding.ratio)
            else:
                reason = rounding.reason.rstrip(".")
                imprecise[change.place] = f"undone ({change.what}), because it loses too much to rounding: {reason}"
    return None, imprecise


def is_lossy(item: Pass) -> bool:
    return item.lowers_precision or item.max_error is not None


def edits_of(applied: Iterable[AppliedPass]) -> list[Edit]:
    return [edit for one in applied for edit in one.result.rewriter.edits]


def _callers_tensors(model: nn.Module) -> list[Source]:
    """The tensors of the caller's model, with their versions.

    Buffers of scripted modules are left out: a run in training mode writes to their buffers, and restores them.
    """
    scripted = {
        id(tensor)
        for module in reachable_modules(model)
        if is_script(module)
        for tensor in module.buffers(recurse=False)
    }
    return [Source.of(name, tensor) for name, tensor in named_tensors(model) if id(tensor) not in scripted]


def _refuse_writes(item: Pass, sources: Iterable[Source]) -> None:
    """Raise `OptimizeFailed` if the pass wrote to one of the caller's tensors, because that can't be undone."""
    if written := [source.path for source in sources if not source.unchanged]:
        raise OptimizeFailed(
            f"The pass {item.name} wrote in place to {written[0]}, which belongs to the caller's model: a pass "
            "must create a new tensor, so leave out the pass and load the model's weights again."
        )
