"""Passes as transactions: each one runs, each change is checked in its place, and the pass is kept or rolled back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from optimize_export.errors import OptimizeFailed
from optimizer.model import WorkingCopy
from optimizer.pipeline.applied import AppliedPass, CheckedChanges, is_lossy
from optimizer.pipeline.attempts import attempt, judge_change
from optimizer.pipeline.comparer import Comparer
from optimizer.pipeline.copy_runs import CopyRuns
from optimizer.pipeline.culprits import find_wrong_after
from optimizer.report import PassRecord, Progress, ProgressFunction
from passes.base import Context, Pass, PassResult
from passes.graph.changes import Place
from passes.graph.model_tree import ModelTree

# Maximum number of runs of a pass. Each run leaves out the imprecise changes of the one before, but may make new ones.
_MOST_TRIES = 8


class Transactions:
    """Runs the passes in order, keeps their records, and rolls them back.

    Attributes:
        passes: the passes in their order.
        records: the records of the passes that ran.
        runs: runs the working copy.
        comparer: compares the result with the original; None without samples.
        applied: the passes that weren't rolled back so far, including those that changed nothing.
        left_alone: by number of the pass, the places that it must leave alone, each with the reason.
        wrong: by number of the pass, the reason to roll it back whatever it does.
    """

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
        self.applied: list[AppliedPass] = []
        self.left_alone: dict[int, dict[Place, str]] = {}
        self.wrong: dict[int, str] = {}
        self.runs = CopyRuns(copy.root)
        self.comparer: Comparer | None = None
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

    def run_from(self, first: int) -> None:
        """Run the passes from this number on.

        Raises:
            OptimizeFailed: a pass fails or is rolled back, with `strict` or if it is a guarantee.
        """
        for number, item in enumerate(self.passes[first:], first):
            if is_lossy(item) and self.comparer is not None:
                find_wrong_after(self, self.comparer, number)
            self.run_numbered(number)

    def run_numbered(self, number: int) -> None:
        """Run one pass; keep it or roll it back.

        Raises:
            OptimizeFailed: as for `run_from`.
        """
        item = self.passes[number]
        self._progress(Progress("optimize", number, len(self.passes) + 1, item.name, item.name))
        context = replace(self.context(), left_alone=self.left_alone.get(number, {}), explain=self._explain)
        if context.example_calls:
            context = replace(context, judge=partial(judge_change, self._copy.root, item.declared_error))
        for tries_left in reversed(range(_MOST_TRIES)):
            ran = attempt(item, context, self._copy, self._original, self._tree)
            record, result = ran.record, ran.result
            if result is None:
                self.records.append(record)
                if self._strict or item.is_guarantee:
                    raise OptimizeFailed(f"{item.name} failed ({record.reason}).") from ran.error
                return
            if (reason := self.wrong.get(number)) is not None and result.changes:
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

    def run_again(self, first: AppliedPass) -> None:
        """Take back this pass and the later ones, and run them again."""
        self.take_back_from(first.number)
        self.run_from(first.number)

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
