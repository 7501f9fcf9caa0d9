"""The batch of a tuned step: the largest that fits into memory, the way to a wished size, and the loader's settings."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from optimize_export.errors import OptimizeExportError, UsageError
from optimize_export.runtime import usable_cpus
from optimize_export.wording import error_summary
from optimizer.model import clone, leaves_of, moved, random_state
from optimizer.training.proof import Judgement, Proof
from optimizer.training.results import BIT_IDENTICAL, NOT_PROVEN, REFUSED, Candidate
from optimizer.training.setup import Setup
from optimizer.training.stepping import (
    RunnableStep,
    TrainingJob,
    Unavailable,
    check_step,
    loss_of,
    made_model,
    made_step,
    raises,
    rows_of,
    with_rows,
)
from optimizer.tuning import Latency, Ratio, interleaved, ratio
from passes.checkpointing.budget import bytes_of, shown
from passes.graph.memory import same_values
from passes.torch_private import AnyBatchNorm

_LEAST = "insert-checkpoints:memory_budget=min"
# Checkpoints are planned for two sizes, and for the proof.
_PLANS = 3
# The share of the time that is left which measuring one batch size, or one way to load, may take.
_SHARE = 0.25
# The share of a step that waits for its batch, from which on the loader is tuned.
_LEAST_WAIT = 0.05
_LOADER_ROUNDS = 3
_MOST_BATCHES = 20
# Where a step takes longer, all are compared at fewer rows.
_SLOW_SECONDS = 1.0
# Fewer rows must make a step at least this many times as fast.
_LEAST_SAVING = 2
# A step takes about this many times as long as its forward.
_STEP_OF_FORWARD = 3


def timed(steps: Mapping[str, RunnableStep], seconds: float, job: TrainingJob) -> dict[str, Latency]:
    """Time steps in turn.

    Raises:
        Unavailable: one of them raises, as for lack of memory.
    """
    try:
        return interleaved(steps, seconds, job.finish)
    except Exception as error:  # the step is foreign code
        raise Unavailable(f"It raises {error_summary(error)}.") from error


def compared_job(whole: TrainingJob, caller: nn.Module) -> tuple[TrainingJob, list[str]]:
    """The step with the batch on which everything is compared, and notes on it: fewer rows where a step takes long.

    Args:
        caller: as in `check_step`, which also raises for it.
    """
    rows, seconds = _rows_to_compare(whole)
    for fewer in (rows, 2 * rows):
        if fewer >= whole.rows:
            break
        part = replace(whole, batch=with_rows(whole.batch, 0, fewer), is_part=True)
        try:
            notes = check_step(part, caller)
        except OptimizeExportError:
            # Such as a contrastive loss, which one row gives no gradient. What is wrong with the step itself shows at
            # the whole batch, too.
            continue
        compared = (
            f"all are compared at {fewer} row{'s' if fewer > 1 else ''}, where the optimizer's update weighs more"
        )
        return part, [f"A step of {whole.rows} rows takes about {seconds:.0f} s, so {compared}.", *notes]
    return whole, check_step(whole, caller)


def _rows_to_compare(job: TrainingJob) -> tuple[int, float]:
    """The rows whose step takes about `_SLOW_SECONDS` at most, and an estimate of a step of all rows in seconds.

    Forwards of 1, 2, 4, … rows are timed: a step of all of them may take longer than all there is. Part of the time may be
    the same for any number of rows, so it takes two of them to tell what a row adds.
    """
    model, measured = job.copied_model(), dict[int, float]()
    for rows in itertools.takewhile(lambda count: count < job.rows, (1 << n for n in itertools.count())):
        batch = with_rows(job.batch, 0, rows)
        try:
            # The first forward makes kernels ready.
            for _ in range(1 if measured else 2):
                started = time.perf_counter()
                with random_state(0):
                    loss = loss_of(job.step, model, batch)
                job.finish()
                seconds = _STEP_OF_FORWARD * (time.perf_counter() - started)
        except OptimizeExportError:
            # Such as a BatchNorm, which needs more than one row.
            continue
        if not loss.isfinite():
            # Such as the mean over rows that are all padding.
            continue
        measured[rows] = seconds
        if seconds > _SLOW_SECONDS and len(measured) > 1:
            break
    if not measured:
        return job.rows, 0.0
    least, most = min(measured), max(measured)
    of_row = (measured[most] - measured[least]) / (most - least) if most > least else measured[least] / least
    estimate = measured[most] + max(0.0, of_row) * (job.rows - most)
    found = max((rows for rows, seconds in measured.items() if seconds <= _SLOW_SECONDS), default=least)
    saves = estimate > max(_SLOW_SECONDS, _LEAST_SAVING * measured[found])
    return (found if saves else job.rows), estimate


def bytes_to_use(memory: int | str) -> int:
    """The bytes of the argument `memory`.

    Raises:
        UsageError: it is no size.
    """
    try:
        found = bytes_of(memory, 0)
    except ValueError as error:
        raise UsageError(f"memory must be a size such as '16GiB': {error}.") from error
    if found is None or found <= 1:
        raise UsageError(f"memory must be a number of bytes or a size such as '16GiB', not {memory!r}.")
    return found


class BatchTuning:
    """Finds the largest batch within a limit of memory, and the fastest way to a wished number of rows."""

    def __init__(
        self,
        job: TrainingJob,
        proof: Proof,
        best: Candidate,
        original: RunnableStep,
        limit: int | None,
        planning: float,
        left: Callable[[], float],
        whole_batch: Any,
    ) -> None:
        """Take what was found before.

        Args:
            best: the recommended setup so far.
            limit: bytes, for everything: parameters, gradients, the optimizer's state, the batch, and the peak.
            planning: about how many seconds it takes to plan checkpoints.
            left: tells the seconds that are left.
            whole_batch: the user's, of which the job may have a part.
        """
        self.whole_batch = whole_batch
        self.planning = planning
        self.judgements: dict[Setup, Judgement] = {}
        self.job, self.proof, self.best, self.original, self.limit, self.left = job, proof, best, original, limit, left
        self.rows: list[Candidate] = []
        self.notes: list[str] = []
        self.seconds = best.latency.median if best.latency is not None else 0.0

    def tuned(self, wished: int | None) -> Candidate | None:
        """The row of the fastest way to the wished rows; None if there is none, or nothing was wished."""
        if not self.job.can_be_cut:
            why = (
                "the step raises on fewer rows"
                if self.job.rows > 1
                else "its tensors have no common dim 0 of two or more"
            )
            self.notes.append(f"No other batch size can be made of the batch: {why}.")
            return None
        checkpoints = replace(self.best.setup, compile="") | Setup(passes=(_LEAST,))
        most = self._largest("largest batch", self.best.setup)
        most_with = self._largest("largest batch with checkpoints", checkpoints)
        return None if wished is None else self._reached(wished, most, most_with)

    # ------------------------------------------------------------------------------------------------ the largest batch

    def _largest(self, name: str, setup: Setup) -> int | None:
        """The number of rows that fit; None without a limit, or if it can't be known."""
        if self.limit is None:
            return None
        row = Candidate(name, setup)
        planning = self.planning if _LEAST in setup.passes else 0.0
        if planning and _PLANS * planning > self.left():
            note = f"Not tried: planning checkpoints {_PLANS} times takes about {_PLANS * planning:.0f} s; allow more seconds."
            self.rows.append(replace(row, note=note))
            return None
        try:
            # A part of the user's batch has as few rows as the step runs on.
            low = self.job.rows if self.job.is_part else -(-self.job.rows // 2)
            high = max(low + 1, 2 * low if self.job.is_part else self.job.rows)
            (_, small), (kept, large) = (self._use(setup, rows) for rows in (low, high))
            of_row = (large - small) / (high - low)
            if of_row <= 0:
                raise Unavailable(f"Its memory doesn't grow with the batch: {low} and {high} rows need the same.")
            count = high + math.floor((self.limit - large) / of_row)
            if count < 1:
                raise Unavailable(
                    f"No row fits into {shown(self.limit)}: {shown(kept)} are needed from step to step, and "
                    f"{shown(int(of_row))} for each row."
                )
            how = f"computed from {low} and {high} rows"
            if planning + self.seconds * count / self.job.rows * 4 < _SHARE * self.left():
                used = self._use(setup, count)[1]
                while used > self.limit and count > 1:
                    count = max(1, min(count - 1, math.floor(count * self.limit / used)))
                    used = self._use(setup, count)[1]
                how = f"measured: {shown(used)}"
            standing = self.best.standing
            if setup != self.best.setup:
                found = self._judged(setup)
                standing = found.standing
                if standing == REFUSED:
                    raise Unavailable(found.note)
        except Unavailable as error:
            self.rows.append(replace(row, standing=REFUSED, note=str(error)))
            return None
        note = f"{count} rows fit into {shown(self.limit)}, {how}."
        self.rows.append(replace(row, setup=setup | Setup(batch_size=count), standing=standing, note=note))
        return count

    def _judged(self, setup: Setup) -> Judgement:
        if setup not in self.judgements:
            self.judgements[setup] = self.proof.judge(setup)
        return self.judgements[setup]

    def _use(self, setup: Setup, rows: int) -> tuple[int, int]:
        """The bytes that stay from step to step, and all bytes at the peak of a step of so many rows."""
        step = made_step(self._at(rows), setup)
        peak = step.peak()
        if peak is None:
            raise Unavailable("This system doesn't tell the memory of a compiled step.")
        batch = sum(tensor.numel() * tensor.element_size() for _, tensor in leaves_of(step.batch).tensors())
        return step.kept_bytes, step.kept_bytes + batch + peak

    def _at(self, rows: int) -> TrainingJob:
        return replace(self.job, batch=with_rows(self.job.batch, 0, rows))

    # ------------------------------------------------------------------------------------------------- the wished batch

    def _reached(self, wished: int, most: int | None, most_with: int | None) -> Candidate | None:
        ways = list(self._ways(wished, most, most_with))
        ways = [each for each in map(self._proven, ways) if not self._is_refused(each)]
        if not ways:
            self.notes.append(f"No way to a batch of {wished} rows was found.")
            return None
        needed = 6 * self.seconds * wished / self.job.rows * len(ways)
        needed += self.planning * sum(_LEAST in each.setup.passes for each in ways)
        if needed > self.left():
            note = "Not timed, because no time was left for it."
            self.rows += [replace(each, note=each.note or note) for each in ways]
            return ways[0]
        try:
            job = self._at(wished)
            steps = {each.name: made_step(job, each.setup) for each in ways}
            found = timed({"original": self.original, **steps}, _SHARE * self.left(), job)
        except Unavailable as error:
            self.rows += [replace(each, standing=REFUSED, note=str(error)) for each in ways]
            return None
        base = _of_a_row(found["original"], self.job.rows)
        for number, each in enumerate(ways):
            latency = found[each.name]
            gain = ratio(base, _of_a_row(latency, wished))
            samples, peak = wished / latency.median, steps[each.name].peak()
            ways[number] = replace(each, latency=latency, speedup=gain, samples=samples, peak=peak)
        self.rows += ways
        return max(ways, key=lambda each: each.samples or 0.0)

    def _ways(self, wished: int, most: int | None, most_with: int | None) -> Iterator[Candidate]:
        """The ways to a batch, the one that is probably fastest first."""
        best = self.best.setup
        if self.limit is None or (most is not None and wished <= most):
            yield Candidate(f"batch of {wished} rows", best | Setup(batch_size=wished), standing=self.best.standing)
        parts = math.ceil(wished / (rows_of(self.whole_batch) if self.limit is None else most or 0.5))
        # Parts of the same size, as a loader makes them, where it doesn't take many more.
        parts = next((number for number in range(parts, 2 * parts + 1) if not wished % number), parts)
        if 1 < parts <= wished:
            setup = best | Setup(batch_size=wished, accumulate=parts)
            yield Candidate(f"accumulation of {parts} parts", setup)
        if self.limit is not None and (most is None or wished > most) and most_with is not None and wished <= most_with:
            setup = replace(best, compile="") | Setup(passes=(_LEAST,), batch_size=wished)
            yield Candidate(f"checkpoints at {wished} rows", setup)

    def _proven(self, row: Candidate) -> Candidate:
        if row.standing != NOT_PROVEN:
            return row
        setup = replace(row.setup, batch_size=None)
        try:
            if setup.accumulate > 1:
                if any(isinstance(each, AnyBatchNorm) and each.training for each in self.job.model.modules()):
                    note = "Its BatchNorm takes the statistics of each part, and not of the whole batch."
                    return replace(row, standing=REFUSED, note=note)
                found = self._proof_of_parts().judge(replace(setup, accumulate=2))
            else:
                found = self._judged(setup)
        except Unavailable as error:
            return replace(row, standing=REFUSED, note=str(error))
        note = found.note
        if note and row.setup.accumulate > 1:
            note = f"The losses of the parts don't add up to that of the batch, whose mean over rows it must be: {note}"
        return replace(row, standing=found.standing, differences=found.differences, note=note)

    def _proof_of_parts(self) -> Proof:
        """The proof, in eval mode if the step draws random numbers, since parts draw other ones."""
        batches = [each for each in self.proof.batches if rows_of(each) > 1]
        batches = batches or [with_rows(self.whole_batch, 0, 2)]
        if not self.proof.reference.draws_random_numbers:
            # One row has no two parts.
            is_whole = len(batches) == len(self.proof.batches) and rows_of(self.proof.batches[0]) > 1
            return self.proof if is_whole else Proof(self.job, batches)
        self.notes.append("Accumulation was proven in eval mode, because parts of a batch draw other random numbers.")
        model = self.job.copied_model().eval()
        return Proof(replace(self.job, model=model, optimizer=self.job.copied_optimizer(model, Setup())), batches)

    def _is_refused(self, row: Candidate) -> bool:
        if row.standing == REFUSED:
            self.rows.append(row)
        return row.standing == REFUSED


def _of_a_row(latency: Latency, rows: int) -> Latency:
    return Latency(latency.median / rows, latency.p95 / rows, tuple(each / rows for each in latency.rounds))


# ---------------------------------------------------------------------------------------------------------- the loader


class LoaderTuning:
    """Measures how much of a step waits for the loader, and if that is much, which of its settings load faster."""

    def __init__(self, job: TrainingJob, loader: Iterable[Any], best: Setup, left: Callable[[], float]) -> None:
        self.job, self.loader, self.left = job, loader, left
        # The loader has its own batch size.
        self.setup = replace(best, batch_size=None, accumulate=1)
        self.rows: list[Candidate] = []
        self.notes: list[str] = []
        # The first batch that was read last, and the names of the rows whose first batch isn't that of the loader as it is.
        self.first: Any = None
        self.differing = set[str]()

    def tuned(self) -> Setup:
        """The settings of the DataLoader that load faster; the defaults if it stays as it is."""
        if isinstance(self.loader, Iterator):
            # Its first batches are gone.
            return Setup()
        try:
            return self._tuned()
        except Exception as error:  # noqa: BLE001 - the data set and the step are foreign code, on later batches
            self.rows = []
            self.notes.append(f"The loader stays as it is: reading it with a step for each batch {raises(error)}.")
            return Setup()

    def _tuned(self) -> Setup:
        step = RunnableStep(self.job, self.setup, made_model(self.job, self.setup), self.job.batch)
        seconds, waiting = self._iterated(self.loader, step, pin=False)
        if not seconds:
            self.notes.append("The loader has one batch, so how long a step waits for it can't be told.")
            return Setup()
        share = waiting / seconds
        self.notes.append(f"The step waits {share:.0%} of its time for the loader.")
        if share < _LEAST_WAIT:
            return Setup()
        if not isinstance(self.loader, DataLoader):
            self.notes.append("Only a DataLoader has settings to tune.")
            return Setup()
        ways = list(self._ways(self.loader))
        rounds: dict[str, list[float]] = {"": []}
        for _ in range(_LOADER_ROUNDS):
            rounds[""].append(self._iterated(self.loader, step, pin=False)[0])
            first = self.first
            for name, setup in ways:
                try:
                    made = _with_settings(self.loader, setup)
                    rounds.setdefault(name, []).append(self._iterated(made, step, pin=setup.pin_memory)[0])
                    if not _are_same(first, self.first):
                        self.differing.add(name)
                except Exception as error:  # noqa: BLE001 - the data set is foreign code, which may not run in a worker
                    rounds[name] = []
                    self.rows.append(
                        Candidate(name, setup, standing=REFUSED, note=f"It raises {error_summary(error)}.")
                    )
            ways = [(name, setup) for name, setup in ways if rounds[name]]
            if self.left() < 0:
                break
        chosen, most = Setup(), 1.0
        for name, setup in ways:
            gain = self._add_row(name, setup, rounds[""], rounds[name])
            if gain.pays and gain.median > most:
                chosen, most = setup, gain.median
        self.rows = [replace(each, taken=each.setup == chosen) for each in self.rows]
        return chosen

    def _add_row(self, name: str, setup: Setup, before: list[float], after: list[float]) -> Ratio:
        base, latency = (
            Latency(sorted(each)[len(each) // 2], max(each), tuple(each)) for each in (before[: len(after)], after)
        )
        gain = ratio(base, latency)
        samples = self.job.rows / latency.median if self.job.rows else None
        note = "" if gain.pays else "Not taken: it isn't surely faster."
        standing = BIT_IDENTICAL
        if gain.pays and name in self.differing:
            standing, note = NOT_PROVEN, "Its batches differ: each worker draws its own random numbers."
        self.rows.append(Candidate(name, setup, latency, gain, samples, None, standing, note=note))
        return gain

    def _ways(self, loader: DataLoader[Any]) -> Iterator[tuple[str, Setup]]:
        cores = usable_cpus()
        pins = self.job.device.type == "cuda"
        if pins and not loader.pin_memory:
            yield "pin_memory", Setup(pin_memory=True)
        if isinstance(loader.dataset, IterableDataset) and not loader.num_workers:
            self.notes.append(
                "Workers weren't tried: each of them would read all of the IterableDataset, unless it gives each its part."
            )
            return
        for workers in sorted({2, 4, cores}):
            if workers <= cores and workers != loader.num_workers:
                yield f"{workers} workers{' and pin_memory' if pins else ''}", Setup(workers=workers, pin_memory=pins)

    def _iterated(self, loader: Iterable[Any], step: RunnableStep, *, pin: bool) -> tuple[float, float]:
        """The mean seconds of a batch with its step, and those of them that wait for the batch.

        The first batch isn't counted, for which workers start.
        """
        until = time.perf_counter() + max(1.0, _SHARE * self.left() / (2 * _LOADER_ROUNDS))
        waited = total = 0.0
        count = 0
        with random_state(0), generator_kept(self.loader):
            source = iter(loader)
            for number in range(_MOST_BATCHES + 1):
                started = time.perf_counter()
                batch = next(source, None)
                if batch is None:
                    break
                waiting = time.perf_counter() - started
                if not number:
                    # A step may write to it.
                    self.first = clone(batch)
                step(moved(batch, self.job.device, non_blocking=pin))
                self.job.finish()
                if number:
                    waited += waiting
                    total += time.perf_counter() - started
                    count += 1
                if count and time.perf_counter() > until:
                    break
        return (total / count, waited / count) if count else (0.0, 0.0)


def _are_same(batch: Any, other: Any) -> bool:
    tensors, others = ([tensor for _, tensor in leaves_of(each).tensors()] for each in (batch, other))
    return len(tensors) == len(others) and all(map(same_values, tensors, others))


def _with_settings(loader: DataLoader[Any], setup: Setup) -> DataLoader[Any]:
    """The same loader with other settings."""
    batching: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if loader.batch_sampler is None:
        batching = {"batch_size": None, "sampler": loader.sampler}
    if isinstance(loader.dataset, IterableDataset):
        batching = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers if setup.workers is None else setup.workers,
        collate_fn=loader.collate_fn,
        pin_memory=setup.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **batching,
    )


@contextmanager
def generator_kept(loader: Any) -> Iterator[None]:
    """Restore the state of a DataLoader's own generators, which the order of its samples comes from."""
    found = (getattr(each, "generator", None) for each in (loader, getattr(loader, "sampler", None)))
    states = [(each, each.get_state()) for each in found if isinstance(each, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
