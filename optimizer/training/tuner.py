"""`tune_training`: measure each choice next to the step as it is, prove those that pay, and combine them.

alone ─▶ each candidate is timed in turn with the step as it is; those that pay are proven
combined ─▶ in the order of their gains, each stays if it still pays on top of the others
the whole ─▶ the combination is timed and proven again
compiled ─▶ compilers, each on top of the best so far, because compiling takes too long to do it twice
curve ─▶ time against peak memory, where it is asked for
batches ─▶ the largest batch that fits, the wished one, and the loader (`batches.py`)
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import operator
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import nn

from optimize_export.errors import LoadError, OptimizeExportError, UsageError
from optimize_export.wording import a_type
from optimizer.model import (
    check_model,
    clone,
    in_turn,
    moved,
    on_device,
    optimizer_over,
    outside_inference_mode,
    random_state,
    rare_collection,
    resolved_device,
    unsynchronised,
)
from optimizer.report import Progress, ProgressFunction, no_progress
from optimizer.training.batches import BatchTuning, LoaderTuning, bytes_to_use, compared_job, generator_kept, timed
from optimizer.training.choices import CHECKPOINTS, Choice, choices_for, conflict, curve_points
from optimizer.training.proof import Proof
from optimizer.training.results import DECLARED, NOT_PROVEN, ORIGINAL, REFUSED, Candidate, TrainingTuning
from optimizer.training.setup import HALF, Setup
from optimizer.training.showing import RECOMMENDED
from optimizer.training.stepping import (
    MakeOptimizer,
    RunnableStep,
    Step,
    TrainingJob,
    Unavailable,
    blocks_of,
    check_optimizer,
    loss_of,
    made_model,
    made_step,
    raises,
    rows_of,
    with_rows,
)
from optimizer.tuning import Latency, ratio
from passes.base import device_of
from passes.compiling.compiler import missing_compiler
from passes.torch_private import COMPILED_CALL

# The shares of the time: of each run of the proof, of the combination, and of batch sizes and the loader if there are any.
_PROOF_SHARE = 1 / 300
_SHARE_OF_COMBINATION = 0.35
_SHARE_OF_BATCHES = 0.15
_SHARE_OF_CURVE = 0.3
_LONGEST_TIMING = 8.0
# The number of batches of the proof, and the least rows of each where all are compared at more: a BatchNorm needs two.
_BATCHES = 3
_LEAST_ROWS = 2
_SEEDS = 3
# A choice whose step takes this many times as long, and this many seconds, isn't timed further.
_FAR_SLOWER, _LONG_SECONDS = 3, 0.3
# A note tells of a peak that is at most this share of the original's.
_LOWER_PEAK = 0.9


@in_turn
def tune_training(
    model: nn.Module,
    step: Step,
    batch: Any = None,
    *,
    loader: Iterable[Any] | None = None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    memory: int | str | None = None,
    batch_size: int | None = None,
    tune_seconds: float = 180.0,
    steps: int = 0,
    curve: bool = False,
    device: torch.device | str | None = None,
    progress: ProgressFunction | None = None,
) -> TrainingTuning:
    """Measure which settings make a training step faster here, prove that its numbers stay right, and combine them.

    The caller's model, optimizer, gradients, random state and settings of torch stay as they are: all runs use copies.

    Args:
        model: the module to train, in the mode in which it is trained.
        step: `step(model, batch) -> loss`: the forward and the loss, a scalar that needs a gradient; or a mapping or
            object with `loss`, or a tuple whose first item is the loss. Backward, optimizer and zero_grad are run
            around it.
        batch: one batch, as the step takes it; by default the first of the loader.
        loader: a DataLoader, or another iterable of batches.
        optimizer: over the model's parameters, or a function of them that makes it; by default AdamW.
        memory: the bytes that training may use, or a size such as "16GiB". The largest batch that fits is found,
            without and with checkpoints.
        batch_size: the rows of one optimizer step that you wish for. The fastest way to them within `memory` is
            recommended: one batch, gradient accumulation, or checkpoints.
        tune_seconds: about how long tuning may take, in seconds.
        steps: for lossy choices, the loss after this many steps from one state is compared too, over three seeds.
        curve: measure time and peak of the step in less and less memory, too: with our checkpoints, uniform ones, and
            torch.compile's own budget.
        device: where to run; by default the model's device. For another device, the weights are copied.
        progress: as for `optimize`.

    Raises:
        UsageError: an argument is invalid; the step returns no loss, or trains by itself; or the optimizer needs a
            closure, or isn't over the model's parameters.
        LoadError: the model can't be copied, or the step raises.
        DeviceError: the device is a GPU, and torch finds none.
    """
    started = time.perf_counter()
    check_model(model, runs=True)
    if any(isinstance(vars(each).get(COMPILED_CALL), FunctionType) for each in model.modules()):
        raise UsageError("The model is compiled: pass it as it was before compile(), which is one of the choices here.")
    if not callable(step):
        raise UsageError(f"step must be a function of the model and a batch, not {a_type(step)}.")
    if batch is None and loader is None:
        raise UsageError("tune_training() needs a batch or a loader.")
    for name, number in (("batch_size", batch_size), ("steps", steps)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
            raise UsageError(f"{name} must be a whole number, not {number!r}.")
    if not isinstance(tune_seconds, int | float) or not tune_seconds > 0:
        raise UsageError(f"tune_seconds must be a number above 0, not {tune_seconds!r}.")
    limit = None if memory is None else bytes_to_use(memory)
    target = device_of(model) if device is None else resolved_device(str(device), require_gpu=False)
    with (
        outside_inference_mode(),
        torch.enable_grad(),
        random_state(),
        generator_kept(loader),
        unsynchronised(),
        rare_collection(),
    ):
        own = check_optimizer(model, optimizer)
        batches, notes = _first_batches(batch, loader, target)
        if optimizer is None:
            notes.append("No optimizer was given, so AdamW with its defaults is used.")
        placed = on_device(model, target)
        if placed is not model:
            own = optimizer_over(own, model, placed)
        job, told = compared_job(TrainingJob(placed, step, own, batches[0], target), model)
        tuner = _Tuner(job, batches, notes + told, started, tune_seconds, progress or no_progress)
        return tuner.tuned(loader, limit, batch_size or None, steps, curve=curve)


def _first_batches(batch: Any, loader: Iterable[Any] | None, device: torch.device) -> tuple[list[Any], list[str]]:
    """The batch, and some of the loader after it, on the device."""
    found: list[Any] = [] if batch is None else [batch]
    notes: list[str] = []
    if loader is not None:
        try:
            source = iter(loader)
        except TypeError as error:
            raise UsageError(f"loader must be a DataLoader or an iterable of batches, not {a_type(loader)}.") from error
        if source is loader:
            notes.append(f"The loader can be read only once: its first batches were taken, at most {_BATCHES}.")
        try:
            found += itertools.islice(source, _BATCHES)
        except Exception as error:  # the data set is foreign code
            raise LoadError(f"The loader {raises(error)}.") from error
    if not found:
        raise UsageError("The loader has no batch.")
    return [moved(clone(each), device) for each in found], notes


# ----------------------------------------------------------------------------------------------------------- the tuner


class _Tuner:
    def __init__(
        self,
        job: TrainingJob,
        batches: Sequence[Any],
        notes: list[str],
        started: float,
        seconds: float,
        progress: ProgressFunction,
    ) -> None:
        self.job, self.batches, self.notes, self.seconds, self.progress = job, batches, notes, seconds, progress
        self.started = started
        self.rounds = 0
        try:
            self.original = made_step(job, Setup())
        except Unavailable as error:
            raise LoadError(f"A step of {type(job.optimizer).__name__} can't be made: {error}") from error
        self.step_seconds = min(self._once(self.original), self._once(self.original))
        # Of the step as it is, by the row that it was timed with.
        self.latencies = {"": Latency(self.step_seconds, self.step_seconds, (self.step_seconds,))}
        self.proof = Proof(self.job, self._batches_of_proof())
        self.notes += self.proof.notes
        self.every = list(choices_for(self.job))
        self.choices = [each for each in self.every if not each.compiles and each.name != CHECKPOINTS]
        self.peak = self.original.peak()
        # The measured seconds of making each, and its row, by the name of the choice.
        self.making: dict[str, float] = {}
        self.rows: dict[str, Candidate] = {}

    def left(self) -> float:
        """The seconds that are left for everything."""
        return self.started + self.seconds - time.perf_counter()

    def tuned(
        self, loader: Iterable[Any] | None, limit: int | None, wished: int | None, steps: int, *, curve: bool
    ) -> TrainingTuning:
        for_batches = _SHARE_OF_BATCHES * (limit is not None or wished is not None or loader is not None)
        for_rest = for_batches + _SHARE_OF_CURVE * curve
        self._try_alone(steps, _SHARE_OF_COMBINATION * self.seconds, for_rest * self.seconds)
        taken, whole = self._combined()
        taken, whole = self._compiled(taken, whole, for_rest * self.seconds)
        for each in (each for each in self.every if each.name == CHECKPOINTS):
            self.rows[each.name] = self._tried(each, self.left() - for_rest * self.seconds, 1)
        # Times of different moments can't be compared, so it has those of the timing with the recommended row.
        latency = self.latencies[whole.name] if whole is not None else list(self.latencies.values())[-1]
        first = Candidate("as it is", Setup(), latency, None, self._samples(latency), self.peak, ORIGINAL)
        last = first if whole is None else whole
        recommended = last.setup
        after = self._curve(for_batches * self.seconds) if curve else []
        if limit is not None or wished is not None:
            planning, whole_batch = self._planning(), self.batches[0]
            batches = BatchTuning(self.job, self.proof, last, self.original, limit, planning, self.left, whole_batch)
            last = batches.tuned(wished) or last
            after += batches.rows
            self.notes += batches.notes
            recommended = last.setup
        if loader is not None:
            loading = LoaderTuning(self.job, loader, recommended, self.left)
            recommended |= loading.tuned()
            after += loading.rows
            self.notes += loading.notes
        tried = [replace(self.rows[each.name], taken=each.name in taken) for each in self.every]
        table = [first, *tried, *after]
        if recommended != Setup():
            # Where it is one of the rows, that row is the last.
            own = next((each for each in table if each.setup == recommended), None)
            if own is not None:
                table.remove(own)
            table.append(replace(last if own is None else own, setup=recommended, taken=True))
            if own is None:
                table[-1] = replace(table[-1], name=RECOMMENDED, note="")
        return TrainingTuning(
            model=type(self.job.model).__name__,
            device=torch.cuda.get_device_name(self.job.device) if self.job.device.type == "cuda" else "cpu",
            batch=rows_of(self.batches[0]),
            threads=torch.get_num_threads(),
            rounds=self.rounds,
            seconds=time.perf_counter() - self.started,
            candidates=tuple(table),
            recommended=recommended,
            notes=tuple(self.notes),
            optimizer=type(self.job.optimizer).__name__,
            loss=self.job.loss_place,
            example=self.job.example if recommended.passes else ("example_inputs",),
            blocks=tuple(blocks_of(self.job.model)) if recommended.compile == "blocks" else (),
        )

    # ---------------------------------------------------------------------------------------------------- preparation

    def _once(self, step: RunnableStep) -> float:
        started = time.perf_counter()
        step()
        self.job.finish()
        return time.perf_counter() - started

    def _batches_of_proof(self) -> list[Any]:
        """Batches of the loader, or parts of the one batch; with fewer rows where the proof would take too long."""
        # The number of batches that one run of the proof may take, as a share for a part of one.
        affordable = _PROOF_SHARE * self.seconds / self.step_seconds
        batches = list(self.batches)
        if not self.job.can_be_cut or not all(map(rows_of, batches)):
            return batches[: max(1, min(_BATCHES, int(affordable)))]
        least = min(_LEAST_ROWS, self.job.rows)
        count = max(1, min(_BATCHES, int(affordable * self.job.rows / least)))
        if len(batches) == 1:
            rows = rows_of(batches[0])
            count = max(1, min(count, rows // least))
            batches = [with_rows(batches[0], n * rows // count, (n + 1) * rows // count) for n in range(count)]
        batches = batches[:count]
        most = max(least, int(affordable * self.job.rows / len(batches)))
        model = self.job.copied_model()
        found = [self._first_rows(model, each, most) for each in batches]
        if all(part is not None for part in found):
            return found
        # A loader's batch is shown as it is, so that the proof tells what is wrong with it.
        if len(self.batches) == 1:
            return [self.job.batch]
        return [each if part is None else part for each, part in zip(batches, found, strict=True)]

    def _first_rows(self, model: nn.Module, batch: Any, count: int) -> Any:
        """The first `count` rows of a batch, or as many more as a finite loss needs; None if all rows give none.

        Args:
            model: a copy of the model, since the step may change its buffers.
        """
        while True:
            part = with_rows(batch, 0, min(count, rows_of(batch)))
            try:
                with random_state(0):
                    if loss_of(self.job.step, model, part).isfinite():
                        return part
            except OptimizeExportError:
                # Such as a step that needs more rows than these.
                pass
            if count >= rows_of(batch):
                return None
            count *= 2

    # -------------------------------------------------------------------------------------------------- each one alone

    def _try_alone(self, steps: int, for_combination: float, for_rest: float) -> None:
        for number, choice in enumerate(self.choices):
            self.progress(Progress("tune", number, len(self.choices), choice.name, choice.name))
            allowed = self.left() - for_rest - for_combination
            if all(row.latency is None for row in self.rows.values()):
                # So far there is nothing to combine, so the first that is tried may use the time for that if it needs it.
                needed = _seconds_for(choice.seconds, self.step_seconds)
                allowed = max(allowed, min(needed, self.left() - for_rest))
            row = self._tried(choice, allowed, len(self.choices) - number)
            if steps and row.standing == DECLARED:
                row = self._after_steps(row, steps)
            self.rows[choice.name] = row
            gc.collect()

    def _why_not(self, choice: Choice, row: Candidate, allowed: float) -> Candidate | None:
        """The row of a choice that can't be tried here, or not in the time; None if it can."""
        if choice.setup.compile and (lack := missing_compiler(self.job.device)):
            return replace(row, standing=REFUSED, note=f"torch.compile isn't available here: {lack}.")
        needed = _seconds_for(choice.seconds, self.step_seconds)
        if needed <= allowed:
            return None
        takes, left = math.ceil(needed), max(0, math.floor(allowed))
        note = f"Not tried: it takes about {takes} s, and {left} s are left for it; allow more seconds."
        return replace(row, note=note)

    def _tried(self, choice: Choice, allowed: float, waiting: int) -> Candidate:
        row = Candidate(choice.name, choice.setup)
        if (untried := self._why_not(choice, row, allowed)) is not None:
            return untried
        started = time.perf_counter()
        try:
            step = made_step(self.job, choice.setup)
            self.making[choice.name] = time.perf_counter() - started
            if (far := self._far_slower(step)) is not None:
                # Such as bfloat16 on a processor without instructions for it. Rounds of it would take most of the time.
                alone, times = far
                row = replace(row, latency=Latency(alone, alone, (alone,)), samples=self._samples_in(alone))
                return replace(
                    row, note=f"Not taken: one step takes {times:.1f} times as long, so it wasn't timed further."
                )
            row = self._timed(row, step, max(0.0, allowed - choice.seconds) / (2 * waiting))
            return self._proven(row, "it isn't surely faster")
        except Unavailable as error:
            return replace(row, standing=REFUSED, note=str(error))

    def _far_slower(self, step: RunnableStep) -> tuple[float, float] | None:
        """The seconds of a step that is far slower than the step as it is, and how many times; None for another."""
        alone, base = self._once(step), self.step_seconds
        if alone > max(_FAR_SLOWER * base, _LONG_SECONDS):
            # Other work on the machine may have delayed it.
            alone, base = min(alone, self._once(step)), self._once(self.original)
        return (alone, alone / base) if alone > max(_FAR_SLOWER * base, _LONG_SECONDS) else None

    def _timed(self, row: Candidate, step: RunnableStep, seconds: float) -> Candidate:
        """The row with the times of a step next to the step as it is, and its peak."""
        found = timed({"original": self.original, "other": step}, min(seconds, _LONGEST_TIMING), self.job)
        base, latency = found["original"], found["other"]
        self.latencies[row.name] = base
        self.rounds, gain = len(latency.rounds), ratio(base, latency)
        return replace(row, latency=latency, speedup=gain, samples=self._samples(latency), peak=step.peak())

    def _proven(self, row: Candidate, otherwise: str) -> Candidate:
        """The row with the judgement of its setup, if it pays."""
        if row.speedup is None or not row.speedup.pays:
            lower = _lower(row.peak, self.peak)
            return replace(row, note=f"Not taken: {otherwise}{lower}.")
        found = self.proof.judge(row.setup)
        return replace(row, standing=found.standing, differences=found.differences, note=found.note)

    def _planning(self) -> float:
        """About how long it takes to plan the fewest values to keep: seen at twice the time of half the peak."""
        estimate = sum(choice.seconds for choice in self.every if choice.name == CHECKPOINTS)
        return 2 * self.making.get(CHECKPOINTS, estimate)

    def _samples(self, latency: Latency) -> float | None:
        return self._samples_in(latency.median)

    def _samples_in(self, seconds: float) -> float | None:
        return self.job.rows / seconds if self.job.rows else None

    def _curve(self, reserved: float) -> list[Candidate]:
        """The rows of the step in less and less memory, each proven, whether it is faster or not."""
        points = list(curve_points(self.job, self.making.get(CHECKPOINTS)))
        rows: list[Candidate] = []
        for number, point in enumerate(points):
            self.progress(Progress("tune", number, len(points), point.name, point.name))
            row = self._tried(point, self.left() - reserved, len(points) - number)
            if row.latency is not None and row.standing == NOT_PROVEN:
                found = self.proof.judge(row.setup)
                row = replace(row, standing=found.standing, differences=found.differences, note=found.note)
            rows.append(row)
            gc.collect()
        return rows

    # ----------------------------------------------------------------------------------------------------- combination

    def _combined(self) -> tuple[set[str], Candidate | None]:
        """The names of the choices that pay together, and the row of their combination; None if nothing pays."""
        paying = [each for each in self.rows.values() if each.standing not in (REFUSED, NOT_PROVEN)]
        paying.sort(key=lambda each: -each.speedup.median if each.speedup else 0.0)
        taken: list[Candidate] = paying[:1]
        for each in paying[1:]:
            if reason := self._why_not_with(taken, each):
                self._note(each, reason)
            else:
                taken.append(each)
        if any(one.setup.precision in HALF for one in taken):
            # In half precision, kernels are others, and so are the formats that suit them.
            again = [each for each in self.rows.values() if each.setup.channels_last or each.setup.cudnn_benchmark]
            for each in again:
                if each not in taken and each.speedup is not None and not self._why_not_with(taken, each):
                    self._note(each, f"It pays on top of {_names(taken)}.")
                    taken.append(self.rows[each.name])
        while len(taken) > 1:
            self.progress(Progress("tune", len(self.choices), len(self.choices), "the combination", "the combination"))
            try:
                row = Candidate("combined", _setup_of(taken), taken=True)
                row = self._timed(row, made_step(self.job, row.setup), self._for_timing())
                row = self._proven(row, "it isn't surely faster than the step as it is")
            except Unavailable as error:
                row = replace(row, standing=REFUSED, note=str(error))
            if row.standing not in (REFUSED, NOT_PROVEN):
                return {each.name for each in taken}, row
            dropped = taken.pop()
            self._note(dropped, f"Not taken: of its combination with {_names(taken)}: {row.note}")
        return {each.name for each in taken}, taken[0] if taken else None

    def _compiled(self, taken: set[str], whole: Candidate | None, reserved: float) -> tuple[set[str], Candidate | None]:
        """Try each compiler on top of the best so far; returns the names of what pays, and its row, as `_combined`."""
        for choice in (each for each in self.every if each.compiles):
            self.progress(Progress("tune", len(self.choices), len(self.choices), choice.name, choice.name))
            before = [each for each in self.every if each.name in taken]
            rivals = [each.name for each in before if conflict(each.setup, choice.setup)]
            # A model is compiled in one way, and then has no passes.
            kept = [each for each in before if not choice.setup.compile or each.name not in rivals]
            on_top = f" with {_names(kept)}" if kept else ""
            row = Candidate(f"{choice.name}{on_top}", _setup_of(kept) | choice.setup)
            if rivals and not choice.setup.compile:
                row = Candidate(choice.name, choice.setup, note=f"Not tried: {rivals[0]}, which is taken, excludes it.")
            elif (untried := self._why_not(choice, row, self.left() - reserved)) is not None:
                row = untried
            else:
                row = self._on_top(row, Setup() if whole is None else whole.setup)
            self.rows[choice.name] = row
            if row.standing not in (REFUSED, NOT_PROVEN):
                taken, whole = {choice.name, *(each.name for each in kept)}, row
            gc.collect()
        return taken, whole

    def _on_top(self, row: Candidate, best: Setup) -> Candidate:
        """The row with its times, and its judgement if it pays compared with the best so far."""
        try:
            steps = {"original": self.original, "other": made_step(self.job, row.setup)}
            if best != Setup():
                steps["best"] = made_step(self.job, best)
            found = timed(steps, self._for_timing(), self.job)
            base, latency = found["original"], found["other"]
            self.latencies[row.name], self.rounds = base, len(latency.rounds)
            peak, gain = steps["other"].peak(), ratio(base, latency)
            row = replace(row, latency=latency, speedup=gain, samples=self._samples(latency), peak=peak)
            if not ratio(found.get("best", base), latency).pays:
                return replace(row, note=f"Not taken: it isn't surely faster{_lower(peak, self.peak)}.")
            return self._proven(row, "it isn't surely faster than the step as it is")
        except Unavailable as error:
            return replace(row, standing=REFUSED, note=str(error))

    def _why_not_with(self, taken: Sequence[Candidate], each: Candidate) -> str:
        """Why a choice isn't taken in addition to others, as a sentence; "" if it pays on top of them."""
        if rival := next((one for one in taken if conflict(one.setup, each.setup)), None):
            return f"Not taken: {rival.name}, which excludes it, gains more."
        seconds = {choice.name: choice.seconds for choice in self.every}
        needed = 2 * sum(seconds[one.name] for one in taken) + seconds[each.name]
        if _seconds_for(needed, self.step_seconds) > self.left():
            return f"Not taken: no time was left to try it with {_names(taken)}; allow more seconds."
        try:
            steps = {
                "best": made_step(self.job, _setup_of(taken)),
                "more": made_step(self.job, _setup_of([*taken, each])),
            }
            found = timed(steps, self._for_timing(), self.job)
        except Unavailable as error:
            return f"Not taken: with {_names(taken)}: {error}"
        is_faster = ratio(found["best"], found["more"]).pays
        return "" if is_faster else f"Not taken: it isn't surely faster on top of {_names(taken)}."

    def _note(self, row: Candidate, note: str) -> None:
        self.rows[row.name] = replace(row, note=note)

    def _for_timing(self) -> float:
        return min(_LONGEST_TIMING, max(0.0, self.left()) / 8)

    # -------------------------------------------------------------------------------------------- the loss after steps

    def _after_steps(self, row: Candidate, steps: int) -> Candidate:
        """The row with the difference of its loss from the original's after some steps, over seeds."""
        needed = 2 * _SEEDS * steps * self.step_seconds
        if needed > self.left() / 2:
            return replace(row, note=f"The loss after {steps} steps wasn't compared, which takes about {needed:.0f} s.")
        own, others = ([self._loss_after(each, steps, n) for n in range(_SEEDS)] for each in (Setup(), row.setup))
        if not all(map(math.isfinite, others)):
            return replace(row, standing=REFUSED, note=f"Its loss isn't finite after {steps} steps.")
        scale = max(abs(sum(own)) / _SEEDS, 1e-30)
        change, spread = (sum(others) - sum(own)) / _SEEDS / scale, (max(own) - min(own)) / scale
        return replace(row, differences={**row.differences, "loss_change": change, "loss_spread": spread})

    def _loss_after(self, setup: Setup, steps: int, seed: int) -> float:
        """The mean loss of the last steps, as many as there are batches; the seed orders the batches."""
        batches = [each for each in self.batches if rows_of(each) == rows_of(self.batches[0])]
        step = RunnableStep(self.job, setup, made_model(self.job, setup), batches[0], learns=True)
        losses: list[float] = []
        order = random.Random(seed)
        with random_state(seed):
            while len(losses) < steps:
                order.shuffle(batches)
                losses += [float(step(clone(each))) for each in batches]
        last = losses[:steps][-len(batches) :]
        return sum(last) / len(last)


def _lower(peak: int | None, before: int | None) -> str:
    if peak is None or before is None or peak > _LOWER_PEAK * before:
        return ""
    return f", but its peak is {1 - peak / before:.0%} lower"


def _setup_of(taken: Sequence[Candidate | Choice]) -> Setup:
    return functools.reduce(operator.or_, (each.setup for each in taken), Setup())


def _names(taken: Sequence[Candidate | Choice]) -> str:
    return " and ".join(each.name for each in taken)


def _seconds_for(making: float, step_seconds: float) -> float:
    """What a candidate takes: making it, timing it next to another, and making it again for the proof."""
    return 1.5 * making + 12 * step_seconds
