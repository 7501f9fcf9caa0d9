"""Run rows of a batch alone, at other positions and among other rows, and measure how much their answers change.

A server that gathers requests into batches puts other requests next to each request. A model may mix them: a BatchNorm
with batch statistics, a mean over dim 0, noise drawn by position. A file may mix them even if its model doesn't.

Rows are dim 0 of every input and of every output whose dim 0 equals the batch size at every batch size that is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from optimize_export.wording import error_summary
from optimizer.model import Call, Runs, leaves_of, one_at_a_time, pinned_settings, rebuild
from optimizer.parity.comparison import Comparison
from optimizer.parity.observe import Flatten, Observation, observe
from optimizer.parity.original import OriginalCall, without_warnings
from optimizer.parity.results import NOTHING_MEASURED, OutputDifference, OutputNoise, RowDifference, RowMeasurement

# Number of rows of a larger batch that are run alone, the first and the last included. All are run at other positions.
_ALONE = 8

Run = Callable[[Call], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Batch:
    """A batch whose rows are run alone, at other positions and among other rows."""

    size: int
    call: Call
    other: Call
    """A call of that size with other values."""
    ties: Mapping[str, torch.Tensor]
    """Bool masks by output: the elements that the original itself changes within its noise."""


class Rows:
    """The rows of several batches.

    Args:
        batches: of different sizes, each above 1.
        outputs: the original's outputs for each batch.
    """

    def __init__(self, batches: Sequence[Batch], outputs: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self.batches = batches
        each = [_tensors(batch.call) for batch in batches]
        sizes = [batch.size for batch in batches]
        self._inputs = [all(map(_has_rows, same, sizes)) for same in zip(*each, strict=True)]
        shared = [name for name in outputs[0] if all(name in seen for seen in outputs)]
        # The outputs whose dim 0 is the batch, and the other outputs.
        self.with_rows = tuple(name for name in shared if all(map(_has_rows, (seen[name] for seen in outputs), sizes)))
        self.without_rows = tuple(name for name in outputs[0] if name not in self.with_rows)
        self._kinds = dict.fromkeys(self.with_rows, "output")
        self._noises = {name: OutputNoise.unknown(name, outputs[0][name]) for name in self.with_rows}
        # Whether the original runs on one row; the caller sets it to False where it doesn't.
        self.alone = True

    def measure(self, run: Run) -> RowMeasurement:
        """Measure how much the rows change; errors of `run` are not caught.

        Args:
            run: returns the outputs of a call by their names in the reference.
        """
        seen = Comparison(self._noises, flat=True)
        # Where each compared row is: its batch size, its number and the kind of run.
        places: dict[str, tuple[int, int, str]] = {}
        for batch in self.batches:
            whole = run(batch.call)
            for how, taken, call in self._variants(batch):
                answers = run(call)
                # A call of one row alone has one row; every other call is as large as its batch.
                size = 1 if how == "alone" else batch.size
                for row, place in taken:
                    label = f"row {row} of {batch.size}, {how}"
                    places[label] = batch.size, row, how
                    seen.add(self._row_of(whole, row, batch, label), self._answer_of(answers, place, size))
        return RowMeasurement(
            outputs=tuple(_change(each, places) for each in seen.finish(NOTHING_MEASURED).outputs),
            batch_sizes=tuple(batch.size for batch in self.batches),
            alone=self.alone,
            without_rows=self.without_rows,
        )

    def _row_of(self, whole: Mapping[str, torch.Tensor], row: int, batch: Batch, label: str) -> OriginalCall:
        own = Observation({name: whole[name][row : row + 1] for name in self.with_rows}, self._kinds)
        unstable = {name: batch.ties[name][row : row + 1] for name in self.with_rows}
        return OriginalCall(batch.size, 0, 0, None, own, own, label=label, unstable=unstable)

    def _answer_of(self, answers: Mapping[str, torch.Tensor], place: int, size: int) -> Observation:
        # An answer that lacks rows is compared as an empty one, whose shape is wrong.
        lacking = torch.empty(0)
        values = {name: answers.get(name, lacking) for name in self.with_rows}
        rows = {name: value[place : place + 1] if _has_rows(value, size) else lacking for name, value in values.items()}
        return Observation(rows, self._kinds)

    def one_row(self) -> Call:
        return self._taken(self.batches[0], [0])

    def _variants(self, batch: Batch) -> Iterator[tuple[str, list[tuple[int, int]], Call]]:
        """Calls that run rows of the batch differently.

        Yields:
            The kind of run, the (row of the batch, row of the call) pairs to compare, and the call.
        """
        size = batch.size
        moved = [(row + 1) % size for row in range(size)]
        yield "at another position", [(row, at) for at, row in enumerate(moved)], self._taken(batch, moved)
        for parity in (0, 1):
            own = [row for row in range(size) if row % 2 == parity]
            mixed = [row if row in own else size + row for row in range(size)]
            yield "among other rows", [(row, row) for row in own], self._taken(batch, mixed)
        step = max(1, (size - 1) / (_ALONE - 1))
        rows = dict.fromkeys(round(number * step) for number in range(min(size, _ALONE)))
        for row in rows if self.alone else ():
            yield "alone", [(row, 0)], self._taken(batch, [row])

    def _taken(self, batch: Batch, rows: Sequence[int]) -> Call:
        """A call of these rows of the batch; numbers from `batch.size` on are rows of the other call."""
        pairs = zip(_tensors(batch.call), _tensors(batch.other), self._inputs, strict=True)
        others = {id(own): other for own, other, has_rows in pairs if has_rows}
        index = torch.tensor(rows)

        def take(tensor: torch.Tensor) -> torch.Tensor:
            if (other := others.get(id(tensor))) is None:
                return tensor
            return torch.cat([tensor.detach(), other.detach()]).index_select(0, index.to(tensor.device))

        args, kwargs = rebuild((batch.call.args, batch.call.kwargs), take)
        return Call(args, kwargs)


def _change(seen: OutputDifference, places: Mapping[str, tuple[int, int, str]]) -> RowDifference:
    told = seen.problems[0] if seen.problems else seen.where
    where = next((place for label, place in places.items() if label in told), (0, 0, ""))
    wrong = seen.mismatches + len(seen.problems)
    return RowDifference(seen.noise.name, seen.max_error, seen.rms_error, wrong, *where, seen.frontier)


def _tensors(call: Call) -> list[torch.Tensor]:
    return [tensor for _, tensor in leaves_of((call.args, call.kwargs)).tensors()]


def _has_rows(tensor: torch.Tensor, size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size


def measure_rows(rows: Rows, runs: Runs, flatten: Flatten | None, *, names: Sequence[str], seed: int) -> RowMeasurement:
    """The difference between rows that run together and rows that run alone or among others.

    Args:
        runs: of the original or of a candidate; an exception becomes a problem in the result.
        names: the original's output names, by which flat outputs are matched.
        seed: of the random numbers in each run.
    """

    def run(call: Call) -> dict[str, torch.Tensor]:
        with runs.fresh() as target:
            seen = observe(target, call, seed=seed, flatten=flatten)
        given = seen.of_kind("output")
        return {name: seen.values[own] for name, own in zip(given if flatten is None else names, given, strict=True)}

    with one_at_a_time, pinned_settings(), without_warnings():
        try:
            return rows.measure(run)
        except Exception as error:  # noqa: BLE001 - the candidate is foreign code; what it raises is a result
            problem = f"Running rows alone or among other rows raises: {error_summary(error)}"
            sizes = tuple(batch.size for batch in rows.batches)
            return RowMeasurement((), sizes, rows.alone, rows.without_rows, problem)
