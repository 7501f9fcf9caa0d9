"""Compare candidates with the original by the scores of a user's `evaluate`.

The hashes of inputs divide the examples by content, so that copies of one example are never on both sides. The run of a
candidate ends when its test is decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from exporters.base import clones
from exporters.places import line_of_error
from optimize_export.errors import UsageError
from optimize_export.wording import a_type, error_summary
from optimizer.accuracy.drops import PairedTest
from optimizer.accuracy.rows import Flat, Hashes
from optimizer.accuracy.scores import (
    REPEATED,
    Aggregate,
    Block,
    CandidateRun,
    EvaluateError,
    Floats,
    NotScored,
    OriginalRun,
    Runner,
    Task,
)
from optimizer.model import Call
from optimizer.options import AccuracyBudget, points
from optimizer.parity import Metric

Part = Literal["search", "final"]

# One of this many examples is for the search; the others are for the final test.
_SEARCH = 4
# The largest number of changed examples that are told.
_LISTED = 20
# A drop of a share of right answers that is hardly meant.
_LARGE_SHARE = 0.1


class Evaluation:
    """The user's metric of the original and of candidates."""

    def __init__(self, task: Task) -> None:
        self.aggregate = None if task.aggregate is None else _checked(task.aggregate)
        # Sentences for the user, by what they are about.
        self._notes: dict[str, str] = {}
        self._task, self._original = task, OriginalRun(task)
        self._calibration: Hashes = np.zeros(0, np.uint64)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user."""
        return tuple(self._notes.values())

    @property
    def is_in_random_order(self) -> bool:
        """Whether the user says that the order of the examples says nothing about them."""
        return getattr(self._task.evaluate, "shuffled", False) is True

    def start(self) -> None:
        """Read the first scores of the original, so that what is wrong with `evaluate` is told early.

        Raises:
            EvaluateError: there are none, there are others in a second run, or they follow all calls or other calls than their
                own, so that they can't be divided.
        """
        first = self._original.block(0)
        if first is None:
            return
        self._refuse_other_scores(first)
        if first.by_row:
            return
        if self._original.block(1) is None:
            raise EvaluateError(
                f"evaluate yields {_counted(len(first.scores), 'score')} after {_counted(first.calls, 'call')} of run with "
                f"{_counted(len(first.rows), 'row')}, and none before: it must yield a score for each example, after the call "
                "of run that it comes from."
            )
        if self.aggregate is None and len(first.scores) == 1:
            self._notes["rows"] = (
                f"evaluate yields one score for {_counted(len(first.rows), 'row')}, which counts as one example: with a score for "
                "each row, fewer data decide"
            )
        if first.calls > 1:
            for by_row in (True, False):
                self._refuse_late_scores(by_row=by_row)

    def _refuse_other_scores(self, first: Block) -> None:
        """Raise if `evaluate` yields other first scores when it gets the same outputs again."""
        outputs, self._original.outputs = self._original.outputs or [], None
        if first.calls > REPEATED:
            return

        def replay(*tensors: torch.Tensor) -> Flat:
            return clones(outputs.pop(0) if outputs else self._task.adapter.run(tensors))

        with closing(CandidateRun(self._original, replay, "it")) as run:
            try:
                again = next(run.blocks(), None)
            except NotScored as error:
                raise EvaluateError(f"In its second run, {error}.") from error
        sizes = again and (again.calls, len(again.scores))
        alike = again is not None and (self.aggregate is not None or np.array_equal(first.scores, again.scores))
        if sizes != (first.calls, len(first.scores)) or not alike:
            raise EvaluateError(
                "evaluate yields other scores in its second run, for the same outputs: make random generators inside evaluate, "
                "and don't change the data in place."
            )

    def _refuse_late_scores(self, *, by_row: bool) -> None:
        """Raise if the last scores are too many by those that are missing after the first calls.

        If not, the first calls may be a gallery that the others are compared with.

        Args:
            by_row: whether an example is a row, and not a whole call.
        """
        missing: list[int] = []
        calls = 0
        while not any(missing[1:]) and (block := self._original.block(len(missing))) is not None:
            missing.append((len(block.rows) if by_row else block.calls - calls) - len(block.scores))
            calls = block.calls
        if missing[0] == -missing[-1] > 0 and self._original.block(len(missing)) is None:
            raise EvaluateError(
                "evaluate yields the scores of a call of run after the next call: it must yield them before it calls run again."
            )

    def calibration(self) -> list[Call]:
        """Inputs to calibrate with, from the start of the original's run."""
        return [Call(*self._task.adapter.call_arguments(call)) for call in self._original.calibration()]

    def exclude(self, calls: Iterable[Sequence[torch.Tensor]]) -> None:
        """Leave out examples with a row of these flat inputs, which files are calibrated with, and keep no inputs any more."""
        self._calibration = np.unique(np.concatenate([self._calibration, *map(self._task.rows.hashes, calls)]))
        self._original.forget_inputs()

    def metric(
        self,
        name: str,
        runner: Runner,
        test: PairedTest,
        part: Part,
        budget: AccuracyBudget,
        is_late: Callable[[], bool] = lambda: False,
    ) -> Metric:
        """Compare a candidate with the original on the examples of one part, until the test is decided.

        Args:
            name: of the candidate, for messages.
            runner: runs it, from flat inputs to flat outputs.
            is_late: whether the time is up, so that the examples so far must do.

        Raises:
            EvaluateError: the original has no score, or the two runs have other inputs or another number of scores.
            NotScored: the candidate has no score, or no example is left.
        """
        assert budget.drop is not None
        assert budget.confidence is not None
        own, changed, start = _Own(), _Changed(), 0
        try:
            with closing(CandidateRun(self._original, runner, name)) as run:
                for original, candidate in self._pairs(run, name):
                    chosen = self._chosen(original, part)
                    if len(chosen):
                        scores, weights = original.taken(chosen)
                        own.add(scores, weights)
                        others, _ = candidate.taken(chosen)
                        test.add(scores, others, weights)
                        if self.aggregate is None:
                            changed.add(start + chosen, scores, others)
                    start += len(original.scores)
                    if test.verdict is not None or (test.count and is_late()):
                        break
            if not test.count:
                raise NotScored(f"too few examples to decide: evaluate has none for the {part} part")
            test.finish()
        except UsageError as error:
            # The aggregate isn't finite.
            raise EvaluateError(str(error)) from error
        score = own.mean if self.aggregate is None else self.aggregate(own.statistics)
        self._check_score(score, test, part, is_constant=own.is_constant)
        if part == "final" and own.is_share and not budget.percent and budget.drop >= _LARGE_SHARE:
            self._notes["percent"] = (
                f"all scores are between 0 and 1, where drop<={budget.drop:g} is {points(budget.drop, percent=True)}: for "
                f"{budget.drop:g} points write drop<={budget.drop:g}%"
            )
        return Metric(
            score=score,
            drop=test.drop,
            upper=test.upper,
            confidence=budget.confidence if part == "final" else 1 - test.alpha,
            budget=budget.drop,
            percent=budget.percent,
            examples=test.count,
            of=self._count(part) if self._original.ended else None,
            needed=self._needed(test, part) if test.verdict is None else None,
            verdict=test.verdict or "undecided",
            part=part,
            changed=changed.largest,
            changed_count=changed.count if self.aggregate is None else None,
        )

    def close(self) -> None:
        """End the original's run."""
        self._original.close()

    def _pairs(self, run: CandidateRun, name: str) -> Iterator[tuple[Block, Block]]:
        """The blocks of the original and of a candidate, which must have the same calls and numbers of scores."""
        number = 0
        for number, block in enumerate(run.blocks(), 1):
            yield _alike(self._original.block(number - 1), block, name), block
        if (missing := self._original.block(number)) is not None:
            _alike(missing, None, name)

    def _chosen(self, block: Block, part: Part) -> npt.NDArray[np.int64]:
        """The numbers of the examples that belong to a part; those with a row of the calibration belong to none."""
        known, keys = np.isin(block.rows, self._calibration), block.rows
        if not block.by_row:
            count = len(block.scores)
            known, keys = np.full(count, known.any()), np.full(count, keys.sum(dtype=np.uint64))
        searched = keys % np.uint64(_SEARCH) == 0
        counts = True if block.weights is None else block.weights > 0
        return np.flatnonzero(~known & counts & (searched if part == "search" else ~searched))

    def _count(self, part: Part) -> int:
        return sum(len(self._chosen(block, part)) for block in self._original.kept)

    def _needed(self, test: PairedTest, part: Part) -> int | None:
        """About how many examples evaluate must yield for a decision; None if no number would do."""
        needed = test.needed()
        return (
            None if needed is None else math.ceil(needed * (_SEARCH if part == "search" else _SEARCH / (_SEARCH - 1)))
        )

    def _check_score(self, score: float, test: PairedTest, part: Part, *, is_constant: bool) -> None:
        said = f"the original's score is {score:g} in each of {test.count:,} examples" if is_constant else ""
        said = said or ("the original's metric is 0" if score == 0 else "")
        if said and (part == "final" or score == 0):
            self._notes["labels"] = f"{said}: check the labels that evaluate compares with"
        # A score such as -error can be 0, and is lower for the candidate then.
        if part == "final" and score == 0 and test.drop <= 0:
            raise NotScored(
                f"{said}, and no lower for the candidate, so a budget says nothing: check the labels that evaluate compares with"
            )


class _Changed:
    """The examples whose score a candidate changes: their number, and those with the largest drops."""

    def __init__(self) -> None:
        self.count = 0
        self.largest: tuple[tuple[int, float, float], ...] = ()

    def add(self, numbers: npt.NDArray[np.int64], original: Floats, candidate: Floats) -> None:
        places = np.flatnonzero(original != candidate)
        self.count += len(places)
        new = [(int(numbers[each]), float(original[each]), float(candidate[each])) for each in places]
        self.largest = tuple(sorted([*self.largest, *new], key=lambda each: each[2] - each[1])[:_LISTED])


class _Own:
    """What is told of the original's scores in one test."""

    def __init__(self) -> None:
        self.statistics: list[Any] = []
        self._total = self._weights = 0.0
        self._lowest, self._highest = math.inf, -math.inf

    def add(self, scores: Any, weights: Floats | None) -> None:
        if isinstance(scores, list):
            self.statistics += scores
            return
        given = np.ones(len(scores)) if weights is None else weights
        self._total, self._weights = self._total + float(scores @ given), self._weights + float(given.sum())
        self._lowest, self._highest = min(self._lowest, scores.min()), max(self._highest, scores.max())

    @property
    def mean(self) -> float:
        return self._total / self._weights

    @property
    def is_constant(self) -> bool:
        return self._lowest == self._highest

    @property
    def is_share(self) -> bool:
        return self._lowest >= 0 and self._highest <= 1


def _alike(original: Block | None, candidate: Block | None, name: str) -> Block:
    """The original's block, if the candidate's has the same calls and as many scores; otherwise raise `EvaluateError`."""
    sizes = [None if block is None else (block.calls, len(block.scores)) for block in (original, candidate)]
    if original is not None and candidate is not None and sizes[0] == sizes[1]:
        own, other = (
            np.ones(len(each.scores)) if each.weights is None else each.weights for each in (original, candidate)
        )
        if not np.array_equal(own, other):
            raise EvaluateError(
                f"evaluate yields other weights for {name} than for the original, up to call {original.calls} of run: a weight "
                "must not depend on the outputs. Use an `aggregate` for such a metric, as a precision."
            )
        return original
    calls = max(size[0] for size in sizes if size is not None)
    counts = [0 if size is None else size[1] for size in sizes]
    raise EvaluateError(
        f"evaluate yields {counts[0]} scores for the original and {counts[1]} for {name} up to call {calls} of run: it must "
        "yield one for each example, whatever the outputs are."
    )


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _checked(aggregate: Aggregate) -> Aggregate:
    def checked(statistics: Sequence[Any]) -> float:
        try:
            value: Any = aggregate(statistics)
        except Exception as error:
            place = line_of_error(error)
            told = f"aggregate raises on {len(statistics)} statistics: {error_summary(error)}"
            raise EvaluateError(f"{told} ({place})." if place else f"{told}.") from error
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise EvaluateError(f"aggregate returns {a_type(value)}: it must return a number.") from error

    return checked
