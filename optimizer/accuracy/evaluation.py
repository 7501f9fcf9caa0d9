"""Run a user's `evaluate`: the scores of the original and of candidates, example by example.

`evaluate(run)` calls `run` as it would call the model, and yields a score for each example. The original's scores are
computed as far as a test needs them, and kept. A candidate's run starts anew, is compared with them, and ends when its
test is decided. Of the inputs only hashes are kept: they tell whether both runs have the same inputs, and divide the
examples by content, so that copies of one example are never on both sides.

A *block* is the calls of `run` since the last score, and the scores until the next call. If it has as many scores as rows,
example i is row i. Otherwise each of its examples belongs to all of its rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from exporters.base import Adapter, clones, move_to
from exporters.places import line_of_error
from optimize_export.errors import LoadError, StructureError, UsageError
from optimize_export.wording import a_type, described, error_summary
from optimizer.accuracy.drops import PairedTest
from optimizer.model import Call, OwnState, required_arguments, signature_of
from optimizer.options import AccuracyBudget, points
from optimizer.parity import Metric

Evaluate = Callable[[Callable[..., Any]], Iterable[Any]]
"""Called with a function that runs the model; yields a score for each example, or a statistic for an aggregate."""
Aggregate = Callable[[Sequence[Any]], float]
"""The metric of a list of statistics."""
Part = Literal["search", "final"]
Floats = npt.NDArray[np.float64]
Hashes = npt.NDArray[np.uint64]

# One of this many examples is for the search; the others are for the final test.
_SEARCH = 4
# The largest number of changed examples that are told.
_LISTED = 20
# The calibration takes every eighth row, until it has 64 of them or has read 1,024.
_CALIBRATION_STEP = 8
_CALIBRATION_ROWS = 64
_CALIBRATION_READ = 1024
# A drop of a share of right answers that is hardly meant.
_LARGE_SHARE = 0.1


class EvaluateError(LoadError):
    """The user's `evaluate` or `aggregate` can't be used."""


class NotScored(Exception):
    """A candidate has no score; the message is the reason, a clause."""


def check_evaluate(evaluate: object, aggregate: object, budget: AccuracyBudget) -> None:
    """Check the arguments of an export before any of the user's code runs.

    Raises:
        UsageError: one of them isn't a function of one argument, or one has no effect without another.
    """
    if budget.drop is None:
        if evaluate is not None or aggregate is not None:
            raise UsageError('evaluate has an effect only with a budget for the drop, such as `accuracy="drop<=0.5%"`.')
        return
    if evaluate is None:
        raise UsageError(
            "A budget for the drop of a metric needs `evaluate`: a function of `run`, which it calls as the model, and "
            "which yields a score for each example."
        )
    for name, function in (("evaluate", evaluate), ("aggregate", aggregate)):
        if function is not None and (wrong := misfit(name, function)):
            raise UsageError(f"{wrong}.")


def misfit(name: str, function: object) -> str:
    """Why `evaluate` or `aggregate` can't be called, as a clause; "" if it can."""
    takes = "run" if name == "evaluate" else "statistics"
    if not callable(function):
        return f"{name} is {a_type(function)}; it must be a function of one argument, {name}({takes})"
    if (signature := signature_of(function)) is None:
        return ""
    try:
        signature.bind(None)
    except TypeError:
        needed = required_arguments(function)
        return f"{name} takes {len(needed)} arguments; it must take one, {name}({takes})"
    return ""


@dataclass(frozen=True)
class Block:
    """The calls of `run` since the last score, and the scores until the next call."""

    calls: int
    """The number of calls up to here."""
    rows: Hashes
    """The hash of each row of the calls."""
    scores: Floats | list[Any]
    """Scores, or statistics of an aggregate."""
    weights: Floats | None
    inputs: tuple[tuple[torch.Tensor, ...], ...] = ()
    """Some rows of the calls, while the calibration is gathered."""

    @property
    def by_row(self) -> bool:
        return len(self.rows) == len(self.scores)

    def of_part(self, part: Part, calibration: Hashes) -> npt.NDArray[np.int64]:
        """The numbers of the examples that belong to a part; those with a row of the calibration belong to none."""
        known, keys = np.isin(self.rows, calibration), self.rows
        if not self.by_row:
            count = len(self.scores)
            known, keys = np.full(count, known.any()), np.full(count, keys.sum(dtype=np.uint64))
        searched = keys % np.uint64(_SEARCH) == 0
        counts = True if self.weights is None else self.weights > 0
        return np.flatnonzero(~known & counts & (searched if part == "search" else ~searched))

    def taken(self, numbers: npt.NDArray[np.int64]) -> tuple[Any, Floats | None]:
        """The scores or statistics of some examples, and their weights."""
        if isinstance(self.scores, list):
            return [self.scores[number] for number in numbers], None
        return self.scores[numbers], None if self.weights is None else self.weights[numbers]


class Evaluation:
    """The user's metric of the original and of candidates.

    Args:
        evaluate, aggregate: the user's functions; without an aggregate, the metric is the mean of the scores.
        original: wraps the original, with the inputs and outputs of the files.
        device: the device of the original and of the candidates.
        refuse: raises `EvaluateError` for inputs of a call that the files don't take.
        whole: whether the batch size is fixed, so that files are calibrated with whole calls.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        aggregate: Aggregate | None,
        original: Adapter,
        device: torch.device,
        refuse: Callable[[Sequence[torch.Tensor]], None],
        *,
        whole: bool,
    ) -> None:
        self.evaluate, self.adapter, self.device, self.refuse = evaluate, original, device, refuse
        self.aggregate = None if aggregate is None else _checked(aggregate)
        self._whole = whole
        # Sentences for the user.
        self.notes: list[str] = []
        self._calibration: Hashes = np.zeros(0, np.uint64)
        # Of each call of the original's run.
        self._hashes: list[int] = []
        self._blocks: list[Block] = []
        # Copies, because evaluate may write to an output that the model holds.
        self._run = _Run(self, lambda *tensors: clones(original.run(tensors)), "", OwnState(device))
        self._run.picks = _picked_call if whole else _picked_rows
        self._rest = self._run.blocks()
        self._ended = False

    @property
    def is_in_random_order(self) -> bool:
        """Whether the user says that the order of the examples says nothing about them."""
        return getattr(self.evaluate, "shuffled", False) is True

    def start(self) -> None:
        """Read the first scores of the original, so that what is wrong with `evaluate` is told early.

        Raises:
            EvaluateError: there are none, or all of them follow all calls, so that they can't be divided.
        """
        first = self._block(0)
        if first is not None and not first.by_row and self._block(1) is None:
            raise EvaluateError(
                f"evaluate yields {_counted(len(first.scores), 'score')} after {_counted(first.calls, 'call')} of run with "
                f"{_counted(len(first.rows), 'row')}, and none before: it must yield a score for each example, after the call "
                "of run that it comes from."
            )

    def calibration(self) -> list[Call]:
        """Inputs to calibrate with, from the start of the original's run."""
        found: list[tuple[torch.Tensor, ...]] = []
        rows = read = number = 0
        while rows < _CALIBRATION_ROWS and read < _CALIBRATION_READ and (block := self._block(number)) is not None:
            # Without rows of its own, an example is lost with each row of its calls.
            if self._whole or block.by_row or number % _CALIBRATION_STEP == 0:
                found += block.inputs
                rows += sum(map(_rows, block.inputs))
            read, number = read + len(block.rows), number + 1
        return [Call(*self.adapter.call_arguments(call)) for call in found]

    def exclude(self, calls: Iterable[Sequence[torch.Tensor]]) -> None:
        """Leave out examples with a row of these flat inputs, which files are calibrated with, and keep no inputs any more."""
        self._calibration = np.unique(np.concatenate([self._calibration, *map(row_hashes, calls)]))
        self._run.picks = None
        self._blocks = [replace(block, inputs=()) for block in self._blocks]

    def metric(
        self,
        name: str,
        runner: Callable[..., Sequence[torch.Tensor]],
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
            with closing(_Run(self, runner, name, OwnState(self.device, self._run.state))) as run:
                for original, candidate in self._pairs(run, name):
                    chosen = original.of_part(part, self._calibration)
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
        if part == "final":
            self._check_score(score, test, is_constant=own.is_constant)
            if own.is_share and not budget.percent and budget.drop >= _LARGE_SHARE:
                self.notes.append(
                    f"all scores are between 0 and 1, where drop<={budget.drop:g} is {points(budget.drop, percent=True)}: "
                    f"for {budget.drop:g} points write drop<={budget.drop:g}%"
                )
        return Metric(
            score=score,
            drop=test.drop,
            upper=test.upper,
            confidence=budget.confidence if part == "final" else 1 - test.alpha,
            budget=budget.drop,
            percent=budget.percent,
            examples=test.count,
            of=self._count(part) if self._ended else None,
            needed=self._needed(test, part) if test.verdict is None else None,
            verdict=test.verdict or "undecided",
            part=part,
            changed=changed.largest,
            changed_count=changed.count if self.aggregate is None else None,
        )

    def close(self) -> None:
        """End the original's run."""
        self._run.close()

    def _pairs(self, run: _Run, name: str) -> Iterator[tuple[Block, Block]]:
        """The blocks of the original and of a candidate, which must have the same calls and numbers of scores."""
        number = 0
        for number, block in enumerate(run.blocks(), 1):
            yield _alike(self._block(number - 1), block, name), block
        if (missing := self._block(number)) is not None:
            _alike(missing, None, name)

    def call_hash(self, number: int) -> int | None:
        """The hash of the inputs of a call of the original's run; None if it has fewer calls."""
        while len(self._hashes) <= number and self._advance():
            pass
        return self._hashes[number] if number < len(self._hashes) else None

    def keep_hash(self, hash: int) -> None:
        self._hashes.append(hash)

    def _advance(self) -> bool:
        """Read the next block of the original; return whether there is one."""
        block = None if self._ended else next(self._rest, None)
        if block is None:
            self._ended = True
            if not self._blocks:
                raise EvaluateError("evaluate yields nothing: it must yield a score for each example.")
            return False
        self._blocks.append(block)
        return True

    def _block(self, number: int) -> Block | None:
        while len(self._blocks) <= number and self._advance():
            pass
        return self._blocks[number] if number < len(self._blocks) else None

    def _count(self, part: Part) -> int:
        return sum(len(block.of_part(part, self._calibration)) for block in self._blocks)

    def _needed(self, test: PairedTest, part: Part) -> int | None:
        """About how many examples evaluate must yield for a decision; None if no number would do."""
        needed = test.needed()
        return (
            None if needed is None else math.ceil(needed * (_SEARCH if part == "search" else _SEARCH / (_SEARCH - 1)))
        )

    def _check_score(self, score: float, test: PairedTest, *, is_constant: bool) -> None:
        said = f"the original's score is {score:g} in each of {test.count:,} examples" if is_constant else ""
        said = said or ("the original's metric is 0" if score == 0 else "")
        if said:
            self.notes.append(f"{said}: check the labels that evaluate compares with")
        # A score such as -error can be 0, and is lower for the candidate then.
        if score == 0 and test.drop <= 0:
            raise NotScored(
                f"{said}, and no lower for the candidate, so a budget says nothing: check the labels that evaluate compares with"
            )


class _Run:
    """One run of `evaluate`, of the original if it has no name."""

    def __init__(
        self, evaluation: Evaluation, runner: Callable[..., Sequence[torch.Tensor]], name: str, state: OwnState
    ) -> None:
        self.state = state
        self.picks: Callable[[Sequence[torch.Tensor], int, int], tuple[torch.Tensor, ...] | None] | None = None
        self._of, self._runner, self._name = evaluation, runner, name
        self._values: Iterator[Any] | None = None
        self._calls = self._seen_rows = self._seen_scores = 0
        # The block that is being made, and the one that the last call ended.
        self._rows: list[Hashes] = []
        self._scores: list[Any] = []
        self._weights: list[Floats | None] = []
        self._inputs: list[tuple[torch.Tensor, ...]] = []
        self._finished: Block | None = None

    def blocks(self) -> Iterator[Block]:
        is_last = False
        while not is_last:
            value, is_last = self._next()
            # A call that came before this value has ended the block before it.
            if (finished := self._finished) is not None:
                self._finished = None
                yield finished
            if not is_last:
                self._keep(value)
                if not self._calls:
                    raise EvaluateError(
                        "evaluate yields a score before it calls run: a score must be of run's outputs."
                    )
        if self._scores:
            self._finish()
            assert self._finished is not None
            yield self._finished

    def close(self) -> None:
        close = getattr(self._values, "close", None)
        if close is not None:
            with self.state.step():
                close()

    def _next(self) -> tuple[Any, bool]:
        """The next value of the user's function, and whether there was none any more."""
        try:
            with self.state.step():
                if self._values is None:
                    made: object = self._of.evaluate(self._called)
                    # An array without dims has no iterator, though it has the method.
                    is_one = isinstance(made, str | bytes) or getattr(made, "ndim", 1) == 0
                    if is_one or not isinstance(made, Iterable):
                        raise EvaluateError(f"evaluate returns {a_type(made)}: it must yield a score for each example.")
                    self._values = iter(made)
                return next(self._values), False
        except StopIteration:
            return None, True
        except (EvaluateError, NotScored):
            raise
        except Exception as error:
            place = line_of_error(error)
            told = f"evaluate raises after call {self._calls} of run: {error_summary(error)}"
            raise self._failed(f"{told} ({place})" if place else told) from error

    def _failed(self, clause: str) -> Exception:
        # Before its first call, a candidate has no part in it.
        if not self._name or not self._calls:
            return EvaluateError(f"{clause}.")
        # If the original fails there too, that is raised: it isn't the candidate's fault.
        self._of.call_hash(self._calls)
        return NotScored(clause)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """`run`, as the user's function calls it."""
        evaluation = self._of
        try:
            tensors = evaluation.adapter.flatten_inputs(args, kwargs)
        except StructureError as error:
            raise EvaluateError(f"evaluate doesn't call run as the model is called: {error}") from error
        evaluation.refuse(tensors)
        if self._scores:
            self._finish()
        rows = row_hashes(tensors)
        self._compare(hash(rows.tobytes()))
        if self.picks is not None and sum(map(_rows, self._inputs)) < _CALIBRATION_ROWS:
            picked = self.picks(tensors, self._calls, self._seen_rows)
            self._inputs += [] if picked is None else [picked]
        self._rows.append(rows)
        self._calls, self._seen_rows = self._calls + 1, self._seen_rows + len(rows)
        # The exported files are the model without the autocast that evaluate may have.
        with torch.no_grad(), torch.autocast(evaluation.device.type, enabled=False):
            outputs = self._runner(*move_to(tensors, evaluation.device))
        home = tensors[0].device if tensors else evaluation.device
        return evaluation.adapter.outputs.rebuild(move_to(outputs, home))

    def _compare(self, inputs: int) -> None:
        if not self._name:
            self._of.keep_hash(inputs)
            return
        known = self._of.call_hash(self._calls)
        if known is None:
            raise EvaluateError(
                f"evaluate calls run {self._calls} times for the original, and more often for {self._name}."
            )
        if known != inputs:
            raise EvaluateError(
                f"evaluate gives run other inputs in its second run (call {self._calls + 1}), so scores can't be compared "
                "example by example: make random generators inside evaluate, don't change the data in place, and use no "
                "persistent workers."
            )

    def _keep(self, value: Any) -> None:
        if self._of.aggregate is not None:
            self._scores.append(value)
            self._seen_scores += 1
            return
        weights: Floats | None = None
        if isinstance(value, tuple):
            if len(value) != 2:
                raise EvaluateError(
                    f"evaluate yields a tuple of {len(value)} values: it must yield a score, or a pair (score, weight)."
                )
            value, weight = value
            weights = _numbers(weight, "weight")
        scores = _numbers(value, "score")
        for what, numbers in (("score", scores), ("weight", scores[:0] if weights is None else weights)):
            if not np.isfinite(numbers).all():
                place = int(np.flatnonzero(~np.isfinite(numbers))[0])
                raise self._failed(f"the {what} of example {self._seen_scores + place + 1} is {numbers[place]}")
        if weights is not None:
            if len(weights) not in (1, len(scores)) or (weights < 0).any():
                raise EvaluateError(
                    f"evaluate yields {len(weights)} weights for {len(scores)} scores, or a weight below 0: each example "
                    "needs one weight of 0 or more."
                )
            weights = np.broadcast_to(weights, scores.shape)
        self._scores.append(scores)
        self._weights.append(weights)
        self._seen_scores += len(scores)

    def _finish(self) -> None:
        """End the block: further calls belong to the next one."""
        rows = np.concatenate(self._rows) if self._rows else np.zeros(0, np.uint64)
        scores: Any = self._scores if self._of.aggregate is not None else np.concatenate(self._scores)
        weights = None
        if any(each is not None for each in self._weights):
            pairs = zip(self._weights, self._scores, strict=True)
            weights = np.concatenate([np.ones(len(s)) if w is None else w for w, s in pairs])
        self._finished = Block(self._calls, rows, scores, weights, tuple(self._inputs))
        self._rows, self._scores, self._weights, self._inputs = [], [], [], []


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


def row_hashes(tensors: Sequence[torch.Tensor]) -> Hashes:
    """A hash of each row of a call: of dim 0 of its first tensor with dims. What has no rows belongs to each."""
    count = _rows(tensors)
    found = np.zeros(count, np.uint64)
    for place, tensor in enumerate(tensors):
        plain = tensor.detach().cpu().contiguous()
        rows = count if plain.dim() and plain.shape[0] == count else 1
        if rows:
            pieces = plain.reshape(rows, plain.numel() // rows).view(torch.uint8).numpy()
            # A sum, so that a tensor without rows counts alike where the batch is one row.
            found += np.array([_digest(piece, place) for piece in pieces], np.uint64)
    return found


def _digest(piece: npt.NDArray[np.uint8], place: int) -> int:
    return int.from_bytes(hashlib.blake2b(piece.data, digest_size=8, key=bytes([place % 256])).digest(), "little")


def _rows(call: Sequence[torch.Tensor]) -> int:
    return next((tensor.shape[0] for tensor in call if tensor.dim()), 1)


def _picked_rows(tensors: Sequence[torch.Tensor], call: int, before: int) -> tuple[torch.Tensor, ...] | None:
    """Every eighth row, counted over all calls."""
    count, start = _rows(tensors), -before % _CALIBRATION_STEP
    if start >= count:
        return None
    return tuple(
        _kept(tensor[start::_CALIBRATION_STEP] if tensor.dim() and tensor.shape[0] == count else tensor)
        for tensor in tensors
    )


def _picked_call(tensors: Sequence[torch.Tensor], call: int, before: int) -> tuple[torch.Tensor, ...] | None:
    """Every eighth call."""
    return None if call % _CALIBRATION_STEP else tuple(map(_kept, tensors))


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


def _numbers(value: Any, what: str) -> Floats:
    """A number, or a tensor, array or list of them, as an array of one dim."""
    if isinstance(value, torch.Tensor):
        shown, value = described(value), value.detach().cpu()
        found = (value if value.is_complex() else value.double()).numpy()
    else:
        if isinstance(value, list):
            value = [each.item() if isinstance(each, torch.Tensor) and each.numel() == 1 else each for each in value]
        shown = a_type(value)
        try:
            found = np.asarray(value)
        except ValueError:  # lists of different lengths
            found = np.zeros((0, 0))
    if (found.dtype.kind not in "biuf" and found.size) or found.ndim > 1:
        raise EvaluateError(
            f"evaluate yields {shown} as a {what}: it must yield a number, or a tensor, array or list of one dim with a number "
            "for each example."
        )
    return found.astype(np.float64).reshape(-1)


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
            return float(aggregate(statistics))
        except Exception as error:
            place = line_of_error(error)
            told = f"aggregate raises on {len(statistics)} statistics: {error_summary(error)}"
            raise EvaluateError(f"{told} ({place})." if place else f"{told}.") from error

    return checked
