"""Run a user's `evaluate`, for the original and for candidates, and collect the scores, example by example.

`evaluate(run)` calls `run` as it would call the model, and yields a score for each example. The original's scores are
computed as far as a test needs them, and kept. A candidate's run starts anew and must have the same inputs. Of the inputs
only hashes are kept.

A *block* is the calls of `run` since the last score, and the scores until the next call. If it has as many scores as rows,
example i is row i. Otherwise each of its examples belongs to all of its rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from exporters.base import Adapter, clones, move_to
from exporters.places import line_of_error
from optimize_export.errors import LoadError, StructureError, UsageError
from optimize_export.wording import a_type, described, error_summary
from optimizer.accuracy.rows import Flat, Hashes, RowDims
from optimizer.model import OwnState, required_arguments, signature_of
from optimizer.options import AccuracyBudget

Evaluate = Callable[[Callable[..., Any]], Iterable[Any]]
"""Called with a function that runs the model; yields a score for each example, or a statistic for an aggregate."""
Aggregate = Callable[[Sequence[Any]], float]
"""The metric of a list of statistics."""
Runner = Callable[..., Sequence[torch.Tensor]]
"""Runs a model, from flat inputs to flat outputs."""
Floats = npt.NDArray[np.float64]

# The calibration takes every eighth row, until it has 64 of them or has read 1,024.
_CALIBRATION_STEP = 8
_CALIBRATION_ROWS = 64
_CALIBRATION_READ = 1024
# The largest number of calls whose outputs are kept to run evaluate again.
REPEATED = 8


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
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return f"{name} is an async function; it must be a plain one, {name}({takes})"
    if (signature := signature_of(function)) is None:
        return ""
    try:
        signature.bind(None)
    except TypeError:
        needed = required_arguments(function)
        return f"{name} takes {len(needed)} arguments; it must take one, {name}({takes})"
    return ""


@dataclass(frozen=True)
class Task:
    """The user's metric, and what its runs share."""

    evaluate: Evaluate
    aggregate: Aggregate | None
    """None if the metric is the mean of the scores."""
    adapter: Adapter
    """Wraps the original, with the inputs and outputs of the files."""
    device: torch.device
    """Of the original and of the candidates."""
    refuse: Callable[[Sequence[torch.Tensor]], None]
    """Raises `EvaluateError` for inputs of a call that the files don't take."""
    rows: RowDims
    """Of the inputs."""
    whole: bool
    """Whether the batch size is fixed, so that files are calibrated with whole calls."""


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
    inputs: tuple[Flat, ...] = ()
    """Some rows of the calls, while the calibration is gathered."""

    @property
    def by_row(self) -> bool:
        return len(self.rows) == len(self.scores)

    def taken(self, numbers: npt.NDArray[np.int64]) -> tuple[Any, Floats | None]:
        """The scores or statistics of some examples, and their weights."""
        if isinstance(self.scores, list):
            return [self.scores[number] for number in numbers], None
        return self.scores[numbers], None if self.weights is None else self.weights[numbers]


class _Run:
    """One run of `evaluate`."""

    # Who raises in it, for messages.
    _model = "the model"

    def __init__(self, task: Task, runner: Runner, state: OwnState) -> None:
        self.task, self.state = task, state
        self._runner = runner
        self._values: Iterator[Any] | None = None
        # The first error of a call of run.
        self._error: Exception | None = None
        self._calls = self._seen_rows = self._seen_scores = 0
        # The block that is being made, and the one that the last call ended.
        self._rows: list[Hashes] = []
        self._scores: list[Any] = []
        self._weights: list[Floats | None] = []
        self._inputs: list[Flat] = []
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
                    made: object = self.task.evaluate(self._run)
                    # An array without dims has no iterator, though it has the method.
                    is_one = isinstance(made, str | bytes) or getattr(made, "ndim", 1) == 0
                    if is_one or not isinstance(made, Iterable):
                        raise EvaluateError(f"evaluate returns {a_type(made)}: it must yield a score for each example.")
                    self._values = iter(made)
                found: tuple[Any, bool] = next(self._values), False
        except StopIteration:
            found = None, True
        except (EvaluateError, NotScored):
            raise
        except Exception as error:
            place = line_of_error(error)
            when = f"after call {self._calls} of run" if self._calls else "before it calls run"
            told = f"evaluate raises {when}: {error_summary(error)}"
            raise self._error or self._failed(f"{told} ({place})" if place else told) from error
        # evaluate may have caught it.
        if self._error is not None:
            raise self._error
        return found

    def _failed(self, clause: str) -> Exception:
        return EvaluateError(f"{clause}.")

    def _check_inputs(self, inputs: int) -> None:
        """Take the hash of a call's inputs."""
        raise NotImplementedError

    def _picked(self, tensors: Sequence[torch.Tensor]) -> list[Flat]:
        """The rows of a call to calibrate with."""
        return []

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """`run`, as the user's function calls it."""
        try:
            return self._called(args, kwargs)
        except Exception as error:
            self._error = self._error or error
            raise

    def _called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        task = self.task
        try:
            tensors = task.adapter.flatten_inputs(args, kwargs)
        except StructureError as error:
            raise EvaluateError(f"evaluate doesn't call run as the model is called: {error}") from error
        task.refuse(tensors)
        if self._scores:
            self._finish()
        rows = task.rows.hashes(tensors)
        self._check_inputs(hash(rows.tobytes()))
        self._inputs += self._picked(tensors)
        self._rows.append(rows)
        self._calls, self._seen_rows = self._calls + 1, self._seen_rows + len(rows)
        # The exported files are the model without the autocast that evaluate may have.
        with torch.no_grad(), torch.autocast(task.device.type, enabled=False):
            try:
                outputs = self._runner(*move_to(tensors, task.device))
            except Exception as error:
                raise self._failed(
                    f"{self._model} raises in call {self._calls} of run: {error_summary(error)}"
                ) from error
        home = tensors[0].device if tensors else task.device
        return task.adapter.outputs.rebuild(move_to(outputs, home))

    def _keep(self, value: Any) -> None:
        if self.task.aggregate is not None:
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
                number = self._seen_scores + place + 1
                raise self._failed(
                    f"evaluate yields {numbers[place]} as the {what} of example {number}: it must be finite"
                )
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
        scores: Any = self._scores if self.task.aggregate is not None else np.concatenate(self._scores)
        weights = None
        if any(each is not None for each in self._weights):
            pairs = zip(self._weights, self._scores, strict=True)
            weights = np.concatenate([np.ones(len(s)) if w is None else w for w, s in pairs])
        self._finished = Block(self._calls, rows, scores, weights, tuple(self._inputs))
        self._rows, self._scores, self._weights, self._inputs = [], [], [], []


class OriginalRun(_Run):
    """The run of the original, which goes on as far as the tests need it, and keeps its scores."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, self._run_model, OwnState(task.device))
        self.outputs: list[Flat] | None = []
        """Of the first calls, to run `evaluate` on them again; None after that."""
        self.kept: list[Block] = []
        self.ended = False
        # Of each call.
        self._hashes: list[int] = []
        self._rest = self.blocks()
        self._picks = True

    def _run_model(self, *tensors: torch.Tensor) -> Flat:
        # Copies, because evaluate may write to an output that the model holds.
        outputs = clones(self.task.adapter.run(tensors))
        if self.outputs is not None and len(self.outputs) < REPEATED:
            self.outputs.append(clones(outputs))
        return outputs

    def block(self, number: int) -> Block | None:
        """A block, by its number; None if there are fewer."""
        while len(self.kept) <= number and self._advance():
            pass
        return self.kept[number] if number < len(self.kept) else None

    def call_hash(self, number: int) -> int | None:
        """The hash of the inputs of a call; None if there are fewer calls."""
        while len(self._hashes) <= number and self._advance():
            pass
        return self._hashes[number] if number < len(self._hashes) else None

    def calibration(self) -> list[Flat]:
        """Inputs to calibrate with, from the start of the run."""
        found: list[Flat] = []
        rows = read = number = 0
        while rows < _CALIBRATION_ROWS and read < _CALIBRATION_READ and (block := self.block(number)) is not None:
            # Without rows of its own, an example is lost with each row of its calls.
            if self.task.whole or block.by_row or number % _CALIBRATION_STEP == 0:
                found += block.inputs
                rows += sum(map(self.task.rows.count, block.inputs))
            read, number = read + len(block.rows), number + 1
        return found

    def forget_inputs(self) -> None:
        """Keep no inputs any more, because the calibration is known."""
        self._picks = False
        self.kept = [replace(block, inputs=()) for block in self.kept]

    def _advance(self) -> bool:
        """Read the next block; return whether there is one."""
        block = None if self.ended else next(self._rest, None)
        if block is None:
            self.ended = True
            if not any(len(block.scores) for block in self.kept):
                raise EvaluateError("evaluate yields nothing: it must yield a score for each example.")
            return False
        self.kept.append(block)
        return True

    def _check_inputs(self, inputs: int) -> None:
        self._hashes.append(inputs)

    def _picked(self, tensors: Sequence[torch.Tensor]) -> list[Flat]:
        if not self._picks or sum(map(self.task.rows.count, self._inputs)) >= _CALIBRATION_ROWS:
            return []
        if self.task.whole:
            picked = slice(None)
            if self._calls % _CALIBRATION_STEP:
                return []
        else:
            # Every eighth row, counted over all calls.
            picked = slice(-self._seen_rows % _CALIBRATION_STEP, None, _CALIBRATION_STEP)
        call = tuple(tensor.detach().cpu().clone() for tensor in self.task.rows.taken(tensors, picked))
        return [call] if self.task.rows.count(call) else []


class CandidateRun(_Run):
    """The run of a candidate, which must have the original's inputs."""

    _model = "it"

    def __init__(self, original: OriginalRun, runner: Runner, name: str) -> None:
        super().__init__(original.task, runner, OwnState(original.task.device, original.state))
        self._original, self._name = original, name

    def _failed(self, clause: str) -> Exception:
        # Before its first call, a candidate has no part in it.
        if not self._calls:
            return super()._failed(clause)
        # If the original fails there too, that is raised: it isn't the candidate's fault.
        self._original.call_hash(self._calls)
        return NotScored(clause)

    def _check_inputs(self, inputs: int) -> None:
        known = self._original.call_hash(self._calls)
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
