"""The original, run once and kept, and candidates run beside it."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from exporters.places import place_of_error
from optimizer.difference import (
    Pool,
    SliceNoise,
    Slices,
    all_finite,
    distance,
    floors,
    frontier,
    is_exact,
    least_noise,
    slice_noise,
    special,
    unit,
    wide,
)
from optimizer.errors import LoadError, ParityError, UsageError
from optimizer.figures import agreement_of_integers, errors_between, has_classes, top1_agreement
from optimizer.float64 import (
    Float64Mode,
    Layout,
    MaskedLayouts,
    PerturbedMode,
    RoundedMode,
    off_by_one_ulp,
    random_signs,
    stands_for_infinity,
)
from optimizer.in_kind import computing_as, share
from optimizer.inputs import Call, Samples, Sizes
from optimizer.module_tree import modules_of, reachable_modules
from optimizer.observe import Flatten, Observation, input_names, observe, own_dtype, own_name
from optimizer.preserve import eager_only, one_at_a_time, pinned_settings
from optimizer.recorded_runs import RecordedRuns
from optimizer.row_independence import Batch, Rows
from optimizer.row_verdict import RowMeasurement, judge_rows
from optimizer.runs import AsItIs, Runs
from optimizer.sentences import lack_of_memory
from optimizer.sizes import ENOUGH, Taken, ladder
from optimizer.structure import first_difference, leaves_of, rebuild
from optimizer.verdict import (
    FACTOR,
    SLICE_FACTOR,
    CallFigures,
    Measurement,
    OutputDifference,
    OutputNoise,
    ParityReport,
    allowed_by,
    no_signal,
    report_without_outputs,
)
from optimizer.written_parameters import Source, named_tensors
from passes.base import DeclaredError, Precision
from passes.program.moved_bias import moved_biases
from passes.program.shared_memory import groups_of, places_in
from passes.program.storage import same_values
from passes.program.weights import bare

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

BATCH_SIZES = (1, 2, 3, 5, 8)
_FEW = 1 << 14
# A tensor of fewer dims than a batch of maps has comes in one layout from any kernel.
_LEAST_DIMS_OF_A_MAP = 3
# Of fewer numbers it can't be told what rounding does to a slice: all of them may happen to come out exact.
_LEAST_SAMPLES = 16
# How often rounding is sampled again at each call when a candidate is off by more than the first samples explain, and by
# no more than so many times what is allowed.
_MORE_SAMPLES = 8
_DOUBTFUL = 64.0
# The first samples have smaller numbers.
_OTHER_SEEDS = 1000
Mode = Literal["inference", "training"]


@dataclass(frozen=True)
class GoldenEntry:
    """One call to be stored: the inputs, and what any faithful candidate answers.

    Attributes:
        outputs: name -> the float64 reference rounded once to the output's own dtype.
        tied: name -> bool tensor, True where an integer output is a tie and not to be compared.
        sizes: of open dims beside the batch, where they are other than in the given call.
        seed: of torch's random numbers, where the original draws any; None where it draws none.
    """

    batch_size: int | None
    draw: int
    call: Call
    outputs: dict[str, torch.Tensor]
    tied: dict[str, torch.Tensor]
    sizes: Sizes = ()
    seed: int | None = None


@dataclass
class Kept:
    """One call of the original: what came out, the truth, and which elements the original itself changes.

    Attributes:
        measured: whether it was run in float64 and off by one unit; if not, its truth is what came out.
        recorded: whether what came out is of a run that was recorded, which may take other kernels than a plain one.
    """

    batch_size: int | None
    draw: int
    seed: int
    call: Call | None
    own: Observation
    truth: Observation
    names: Sequence[str] = ()
    label: str = ""
    measured: bool = False
    recorded: bool = False
    unstable: dict[str, torch.Tensor] = field(default_factory=dict)
    sizes: Sizes = ()

    @property
    def where(self) -> str:
        if self.label:
            return self.label
        batch = "" if self.batch_size is None else f"batch size {self.batch_size}, "
        return f"{batch}{_spelt(self.sizes)}draw {self.draw}"


@dataclass(frozen=True)
class Reruns:
    """Four ways to run one call once more, without gradients: the original three times over, and a candidate.

    Attributes:
        original, beside: what gives the copies that they are run on, to be watched.
    """

    original: Runs
    beside: Runs
    own: Callable[[], object]
    in_float64: Callable[[], object]
    off_by_one: Callable[[], object]
    candidate: Callable[[], object]


class _Gathered:
    """The figures of one output while the original runs."""

    def __init__(self, *, sliced: bool) -> None:
        self.size, self.own_error, self.response, self.again = (
            Pool(slices=Slices() if sliced else None) for _ in range(4)
        )
        self.elements = 0
        self.truth_ties = 0
        self.own_ties = 0
        self.exact_differs_again = False


class Reference:
    """The original, run once and kept: its outputs, the float64 truth and the noise, per batch size and draw.

    Any number of candidates can be compared with it. Outputs are kept on the CPU; inputs are made again from the samples.
    """

    def __init__(
        self,
        original: Original,
        noises: dict[str, OutputNoise],
        slices: dict[str, SliceNoise],
        measured: Measurement,
        samples: Samples | None,
    ) -> None:
        self._original = original
        self._blank = measured
        self._samples = samples
        # The noises before many more samples were taken; None where that wasn't done.
        self._few_samples: dict[str, OutputNoise] | None = None
        self._precision: Precision | None = None
        self.taken = Taken(None, {})
        self.noises = noises
        self.slices = slices

    @property
    def written(self) -> frozenset[str]:
        """The names of the parameters that the original writes to in forward."""
        return self._original.runs.written

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes at which the original could be run."""
        return self._blank.batch_sizes

    def why_not(self, size: str | None) -> str | None:
        """What the original raised first at other sizes of that name (None for the batch), and where; None for nothing."""
        return self._original.why.get(() if size is None else (size,))

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of what the original gives, in the order of its output's tree."""
        return tuple(name for name, noise in self.noises.items() if noise.kind == "output")

    @property
    def precision(self) -> str:
        """ "bfloat16" or "float16" where the noise is what the original is off by that computes so; "" else."""
        return self._blank.precision

    @property
    def truth_in_float64(self) -> bool:
        """Whether the truth is the original in float64, and not in its own dtype."""
        return self._blank.reference == "float64"

    @classmethod
    def measure(
        cls,
        reference: Callable[..., Any],
        samples: Samples,
        *,
        batch_sizes: Sequence[int] | None = None,
        draws: int | None = None,
        mode: Mode = "inference",
        known: RanOriginal | None = None,
    ) -> Reference:
        """Run the original at each batch size and draw, and at two batch sizes also in float64 and off by one unit.

        What has integers, NaN or infinite numbers in its outputs is run in all ways at each size, to know the ties there.

        Args:
            batch_sizes: None is 1, 2, 3, 5, 8 and the given one (in training the given one and the next); where the batch
                can't be changed, the given one alone, whatever is asked.
            draws: inputs per batch size; None is one, or two where there is one batch size.
            known: earlier runs of the same original, which aren't made again where they still hold.

        Raises:
            LoadError: the original raises at every batch size.
            UsageError: no batch sizes or no draws.
        """
        ran = RanOriginal.run(reference, samples, batch_sizes=batch_sizes, draws=draws, mode=mode, known=known)
        return ran.measured()

    def in_kind(self, precision: Precision) -> Reference:
        """The same for a candidate that isn't as precise, and may be off by as much as the original is that computes so.

        The truth stays, and so does the noise where it is larger.

        Raises:
            UsageError: the original is no module, in which parts could be told to stay in float32.
        """
        if not isinstance(self._original.target, nn.Module):
            raise UsageError(
                "Only a module can be compared in kind: which of its parts are how precise is told by path."
            )
        original = self._original.twin()
        twin = Reference(original, dict(self.noises), {}, self._blank, self._samples)
        twin._precision, twin.taken = precision, self.taken
        with one_at_a_time:
            errors = original.errors_in(precision, self._samples)
        for name, noise in self.noises.items():
            twin.noises[name] = original.noise_in(precision, noise, errors.get(name))
        twin._blank = replace(self._blank, precision=precision.name, notes=(*self._blank.notes, *original.notes))
        twin.slices = {name: noise.raised_to(errors[name]) for name, noise in self.slices.items() if name in errors}
        return twin

    def allowing(self, declared: DeclaredError) -> Reference:
        """The same for a candidate that may be off by an error that a pass declares, on top of rounding."""
        original = self._original.twin()
        twin = Reference(original, dict(self.noises), {}, self._blank, self._samples)
        twin._precision, twin.taken = self._precision, self.taken
        for name, noise in self.noises.items():
            if not is_exact(torch.empty(0, dtype=getattr(torch, noise.dtype))):
                twin.noises[name] = replace(noise, declared=noise.declared + declared.max_error * noise.scale)
        note = f"{declared.by} declares an error of at most {declared.max_error:g} of an output's largest magnitude."
        twin._blank = replace(self._blank, notes=(*self._blank.notes, note))
        return twin

    def less_precise(self, by: Precision | DeclaredError) -> Reference:
        """The same for a candidate that computes in another precision, or has an error that a pass declares."""
        return self.allowing(by) if isinstance(by, DeclaredError) else self.in_kind(by)

    def compare(
        self,
        candidate: Callable[..., Any],
        *,
        flatten: Flatten | None = None,
        rows: Rows | None = None,
    ) -> Measurement:
        """Run a candidate on the same calls under the same random seeds.

        Args:
            rows: what `independent_rows` gave: run rows alone and among others, too.
            flatten: for a candidate that takes flat tensors and returns a tensor or a flat tuple of them: makes its
                tensors from (args, kwargs). Outputs are then matched by their order and the structure is not compared.

        What the candidate raises is a failure in the result.
        """
        moved = self._moved_in(candidate)
        # A region is judged by its noise alone: nobody gives a tolerance for one, nor looks at its figures.
        # What more samples showed for another candidate is for those alone that are off by as little as that one was.
        comparison = Comparison(
            self._noises_less(moved, self._few_samples or self.noises),
            flat=flatten is not None,
            in_detail=self._samples is not None,
            slices=self.slices,
            moved=moved,
        )
        runs = self._runs_of(candidate)
        with one_at_a_time, pinned_settings() as settings:
            for kept in self._original.kept:
                comparison.run(runs, kept, self._call(kept), flatten, training=self._blank.mode == "training")
            if flatten is None:
                self._look_past_kinks(runs, comparison)
        seen = None if rows is None or comparison.problems else self._moved_rows(runs, rows, flatten)
        if comparison.is_doubtful() or self._may_be_rounding(seen):
            self._look_closely()
            comparison.noises = self._noises_less(moved, self.noises)
            if flatten is None:
                self._hold_to_algebra(runs, comparison)
        return replace(comparison.finish(self._blank), rows=seen, settings=settings)

    def _runs_of(self, target: Callable[..., Any]) -> Runs:
        """Runs of another target like those of the original."""
        return Runs(target, in_eval=self._original.runs.in_eval, written=self.written)

    def in_turn(self) -> Measurement:
        """The original beside itself, where one copy answers calls one after another, and the first of them once more."""
        with self._one_after_another() as settings:
            comparison = self._original.runs.first(self._going_on)
        if comparison.is_doubtful():
            self._look_closely()
            comparison.noises = self.noises
        return replace(comparison.finish(self._blank), settings=settings)

    def after_all_calls(
        self, look: Callable[[nn.Module], _T], before: Callable[[nn.Module], object] = lambda module: None
    ) -> _T:
        """What `look` gives for a copy of the original that has answered the calls of `in_turn`.

        Args:
            before: called with the copy first.
        """
        with self._one_after_another(), self._original.runs.fresh() as module:
            assert isinstance(module, nn.Module)
            before(module)
            self._going_on(module)
            return look(module)

    @contextmanager
    def _one_after_another(self) -> Iterator[dict[str, str]]:
        with one_at_a_time, pinned_settings() as settings, eager_only(), _silent():
            yield settings

    def _going_on(self, module: Callable[..., Any]) -> Comparison:
        comparison = Comparison(
            self._few_samples or self.noises, flat=False, in_detail=False, slices=self.slices, who="the model"
        )
        going_on = AsItIs(module, in_eval=True)
        calls = self._original.measured
        for kept in (*calls, calls[0]):
            comparison.run(going_on, kept, self._call(kept), None, training=False)
        return comparison

    def independent_rows(self, *, atol: Mapping[str, float], rtol: Mapping[str, float]) -> Rows:
        """The rows of the calls, once the original is seen to answer each whatever the other rows of its batch are.

        Args:
            atol, rtol: the user's tolerances, by the names of the outputs here.

        Raises:
            UsageError: there is no batch of two rows or more, or no output that has rows.
            ParityError: a row of the original depends on the others.
        """
        rows = self._rows()
        seen = self._moved_rows(self._original.runs, rows, None)
        if self._may_be_rounding(seen):
            self._look_closely()
        names = {name: name for name in self.noises}
        report = judge_rows(seen, allowed_by(self.noises.values(), names, atol, rtol), FACTOR)
        if not report.ok:
            raise ParityError(
                f"{report.problem}, in the original itself: nothing can be claimed of its rows, so leave row independence"
                " out, or mend the model."
            )
        return rows

    def _rows(self) -> Rows:
        kept = [one for one in self._original.kept if one.draw == 0 and not one.sizes and (one.batch_size or 0) > 1]
        if not kept or self._samples is None:
            raise UsageError("Whether rows depend on each other shows in a batch of two rows or more: give one.")
        batches = [
            Batch(one.batch_size or 0, self._call(one), self._samples.at(one.batch_size, 1), one.unstable)
            for one in kept
        ]
        outputs = [{name: one.own.values[name] for name in one.own.of_kind("output")} for one in kept]
        rows = Rows(batches, outputs)
        if not rows.with_rows:
            raise UsageError("No output has as many rows as the batch, so that there are none to look at.")
        # Where the batch is fixed no file can be run on one row.
        rows.alone = len(self.batch_sizes) > 1 and (1 in self.batch_sizes or self.runs_on(rows.one_row()))
        return rows

    def runs_on(self, call: Call) -> bool:
        """Whether the original doesn't raise at a call."""
        with one_at_a_time, pinned_settings(), _silent():
            try:
                with self._original.runs.fresh() as module:
                    observe(module, call, seed=self._blank.seed)
            except Exception as error:  # noqa: BLE001 - the original is foreign code: it may need more than one row
                logger.debug("the original raises at another size: %s", error)
                return False
        return True

    def _moved_rows(self, runs: Runs, rows: Rows, flatten: Flatten | None) -> RowMeasurement:
        def run(call: Call) -> dict[str, torch.Tensor]:
            with runs.fresh() as target:
                seen = observe(target, call, seed=self._blank.seed, flatten=flatten)
            given = seen.of_kind("output")
            names = given if flatten is None else self.output_names
            return {name: seen.values[own] for name, own in zip(names, given, strict=True)}

        with one_at_a_time, pinned_settings(), _silent():
            try:
                return rows.measure(run)
            except Exception as error:  # noqa: BLE001 - the candidate is foreign code; what it raises is a result
                problem = f"Rows that are run otherwise raise: {_first_line(error)}"
                sizes = tuple(batch.size for batch in rows.batches)
                return RowMeasurement((), sizes, rows.alone, rows.without_rows, problem)

    def _may_be_rounding(self, seen: RowMeasurement | None) -> bool:
        """Whether rows that move by more than is allowed may do so by rounding that few samples don't show."""
        if seen is None or seen.problem or any(one.mismatches for one in seen.outputs):
            return False
        beyond = [
            max(_times_off(one.max_difference, noise.noise), _times_off(one.rms_difference, noise.noise_rms))
            for one in seen.outputs
            if (noise := self.noises[one.name]).deterministic
        ]
        return 2 * FACTOR < max(beyond, default=0.0) <= _DOUBTFUL * FACTOR

    def _look_past_kinks(self, candidate: Runs, comparison: Comparison) -> None:
        """Judge by their algebra the gradients that are off as they are where a number fell on the other side of a kink.

        Where a slope jumps (ReLU at zero, the largest of a window), what rounds otherwise has another gradient, which is as
        right as the original's; one number in a million is as near to a kink as float32 rounds, and one is enough. Long
        sums that a kernel takes one by one are as rare in the samples of rounding. In float64 there is neither, and the
        candidate's gradients have to be the truth's.
        """
        names = comparison.kinked()
        if not names or not self.truth_in_float64:
            return
        errors = self._original.errors_in_float64(candidate, self._samples, names, training=True)
        if errors:
            comparison.settle(errors)

    def _hold_to_algebra(self, candidate: Runs, comparison: Comparison) -> None:
        """Take no error for rounding inside that a module makes in float64 too, where there is none.

        More samples of rounding inside allow for more; what is off by as much may be a weight that isn't the original's. In
        float64 the weights of a right candidate are off by one rounding and no more, and its outputs by what changes of one
        unit do.
        """
        few = self._few_samples
        if (
            few is None
            or self._precision is not None
            or any(one.declared for one in few.values())
            or not self.truth_in_float64
            or self._blank.mode != "inference"
        ):
            return
        if not isinstance(candidate.target, nn.Module) or isinstance(candidate.target, torch.jit.ScriptModule):
            return
        excused = comparison.beyond(few) - comparison.beyond(comparison.noises)
        if not excused:
            return
        with one_at_a_time, pinned_settings():
            errors = self._original.errors_in_float64(candidate, self._samples, excused, training=False)
            moved = self._original.more_response(self._samples, excused) if errors else {}
        noises = {name: _at_least(few[name], moved[name]) for name in excused & errors.keys() & moved.keys()}
        wrong = {name: noise for name, noise in noises.items() if _is_beyond(errors[name], noise)}
        comparison.noises = {**comparison.noises, **wrong}
        if wrong:
            why = "it isn't rounding inside, as it is the same in float64"
            comparison.notes.append(f"Held to the answer to changes of one unit ({why}): {', '.join(wrong)}.")

    def _look_closely(self) -> None:
        """Measure the noise at all batch sizes and by many more samples; once, as a candidate needs it.

        Rounding in front of a division by something small (a BatchNorm over a few rows that hardly differ) has long tails:
        two or three samples of it may all be a tenth of what the next one is.
        """
        if self._few_samples is not None:
            return
        self._few_samples = dict(self.noises)
        with one_at_a_time, pinned_settings():
            for name, noise in self._original.measure_the_rest(self._samples).items():
                before = self.noises[name]
                largest, rms = max(before.noise, noise.noise), max(before.noise_rms, noise.noise_rms)
                self.noises[name] = replace(before, noise=largest, noise_rms=rms)
            if self._precision is None:
                seen = self._original.more_noise(self._samples)
            else:
                seen = self._original.errors_in(self._precision, self._samples, _MORE_SAMPLES)
        for name, pool in seen.items():
            self.noises[name] = _at_least(self.noises[name], pool)

    def _noises_less(self, moved: MovedBiases, noises: Mapping[str, OutputNoise]) -> dict[str, OutputNoise]:
        less = {name: self._noise_less(name, bias, noises[name]) for name, bias in moved.means.items()}
        return {**noises, **less}

    def _moved_in(self, candidate: Callable[..., Any]) -> MovedBiases:
        """The biases that the candidate says to have in its running means, with the values that the original has."""
        found = MovedBiases()
        if not isinstance(candidate, nn.Module) or not isinstance(self._original.target, nn.Module):
            return found
        own = dict(self._original.target.named_parameters())
        for bias_path, mean_path in moved_biases(candidate):
            if bias_path not in own:
                # The original has none either.
                continue
            found.gradients.add(f"gradient of {own_name(bias_path)}")
            if mean_path is None or (mean_name := f"buffer {own_name(mean_path)}") not in self.noises:
                continue
            bias = found.means[mean_name] = wide(bare(own[bias_path]).cpu())
            mean, rest = self._original.target.get_buffer(mean_path).cpu(), candidate.get_buffer(mean_path).cpu()
            # A step with a momentum of one leaves nothing of what the mean was before.
            allowed = unit(rest.dtype) * (wide(mean).abs() + bias.abs())
            if bool((distance(rest, wide(mean) - bias) > allowed).any()):
                found.problems.append(f"{mean_path} isn't the original's less {bias_path}, and stands for it")
        return found

    def _noise_less(self, name: str, bias: torch.Tensor, noise: OutputNoise) -> OutputNoise:
        """The noise of a running mean that is kept less a bias: at least the rounding of that number."""
        rest = [wide(kept.truth.values[name]) - bias for kept in self._original.kept if name in kept.truth.values]
        pool = Pool()
        for values in rest:
            pool.add(values.abs(), (special(values) == 0) if not all_finite(values) else None, of=values)
        dtype: torch.dtype = getattr(torch, noise.dtype)
        step = least_noise(dtype) * unit(dtype)
        return replace(
            noise,
            noise=max(noise.noise, step * pool.largest),
            noise_rms=max(noise.noise_rms, step * pool.rms / 2),
        )

    def outputs_at(self, asked: Sequence[tuple[int | None, Sizes]]) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        """What the original gave at draw 0 of these batch sizes and sizes, each in the order of its output's tree.

        None where it wasn't run at one of them, or gives something else each time.

        Args:
            asked: each a batch size, and the sizes of other open dims that differ from the given call.
        """
        at = {(kept.batch_size, frozenset(kept.sizes)): kept for kept in self._original.kept if kept.draw == 0}
        found = [at.get((batch, frozenset(sizes))) for batch, sizes in asked]
        runs = [kept.own for kept in found if kept is not None]
        changes = self.draws or not all(noise.deterministic for noise in self.noises.values())
        if changes or len(runs) < len(found) or any(own.structure != runs[0].structure for own in runs):
            return None
        return tuple(tuple(own.values[name] for name in own.of_kind("output")) for own in runs)

    def calls(self) -> Iterator[tuple[str, Call]]:
        """Each call that candidates are compared at, with its batch size and draw in words."""
        return ((kept.where, self._call(kept)) for kept in self._original.kept)

    def reruns(self, where: str, candidate: Runs | nn.Module) -> Reruns:
        """One call again, to be watched; `where` is one of `calls`."""
        kept = next(kept for kept in self._original.kept if kept.where == where)
        call, original = self._call(kept), self._original
        beside = candidate if isinstance(candidate, Runs) else self._runs_of(candidate)

        def plain(runs: Runs) -> Callable[[], object]:
            def run() -> object:
                with runs.fresh() as target:
                    return observe(target, call, seed=kept.seed, names=kept.names)

            return run

        return Reruns(
            original=original.runs,
            beside=beside,
            own=plain(original.runs),
            in_float64=lambda: original.in_float64(original.runs, call, kept, training=False),
            off_by_one=lambda: original.off_by_one(call, kept, 0, training=False),
            candidate=plain(beside),
        )

    def of(self, target: nn.Module, where: str) -> Reference:
        """The same measured of another module at one of `calls` alone, for reruns of it.

        Raises:
            LoadError: it raises there.
        """
        assert self._samples is not None
        kept = next(kept for kept in self._original.kept if kept.where == where)
        mode: Mode = "inference"
        original = Original(target, mode, self._samples.seed)
        with one_at_a_time, pinned_settings() as settings:
            original.run(kept.batch_size, kept.draw, self._call(kept), label=kept.label, sizes=kept.sizes)
            return original.finish(self._samples, settings, kept.draw + 1)

    @property
    def target(self) -> Callable[..., Any]:
        """The original itself."""
        return self._original.target

    @property
    def draws(self) -> bool:
        """Whether the original draws random numbers."""
        return any(kept.own.draws for kept in self._original.kept)

    def golden_at(self, where: str) -> GoldenEntry:
        """One of `calls`, with the outputs that any faithful candidate gives there."""
        return self._golden(next(kept for kept in self._original.kept if kept.where == where))

    def golden_entries(self, limit: int = 3) -> tuple[GoldenEntry, ...]:
        """Up to `limit` calls of different batch sizes, two of other sizes of each open dim beside the batch, and all of the
        user's own, with the outputs that any faithful candidate gives."""
        asked = self._original.asked
        own = [kept for kept in self._original.kept if (kept.batch_size, kept.draw) in asked and not kept.sizes]
        drawn = [kept for kept in self._original.kept if kept.draw == 0 and kept not in own]
        rows = [kept for kept in drawn if not kept.sizes][: max(1, limit - len(own))]
        resized = [
            kept
            for name in self.taken.given
            for kept in [one for one in drawn if [named for named, _ in one.sizes] == [name]][:2]
        ]
        return tuple(map(self._golden, (*rows, *resized, *own)))

    def _golden(self, kept: Kept) -> GoldenEntry:
        outputs, tied = {}, {}
        for name in kept.own.of_kind("output"):
            own, truth = kept.own.values[name], kept.truth.values[name]
            if is_exact(own):
                outputs[name] = own
                if bool(kept.unstable[name].any()):
                    tied[name] = kept.unstable[name]
                continue
            rounded = truth.to(own.dtype)
            plain = (special(own) == 0) & (special(rounded) == 0)
            outputs[name] = torch.where(plain, rounded, own)
        seed = kept.seed if kept.own.draws else None
        return GoldenEntry(kept.batch_size, kept.draw, self._call(kept), outputs, tied, kept.sizes, seed)

    def _call(self, kept: Kept) -> Call:
        return self._original.call_of(kept, self._samples)


class RanOriginal:
    """The original, run at all calls, of which nothing but the outputs is known: what rounding does is measured once asked for.

    Attributes:
        samples: what the calls are made of.
    """

    def __init__(
        self, original: Original, samples: Samples, settings: dict[str, str], draws: int, taken: Taken
    ) -> None:
        self.samples = samples
        self._original = original
        self._settings = settings
        self._draws = draws
        self._taken = taken
        self._reference: Reference | None = None

    @classmethod
    def run(
        cls,
        target: Callable[..., Any],
        samples: Samples,
        *,
        batch_sizes: Sequence[int] | None = None,
        draws: int | None = None,
        mode: Mode = "inference",
        measured_sizes: int = 2,
        known: RanOriginal | None = None,
        recorded: RecordedRuns | None = None,
    ) -> RanOriginal:
        """Run the original at each batch size and draw.

        Args:
            batch_sizes, draws, known: as for `Reference.measure`.
            measured_sizes: at how many batch sizes rounding is measured, 1 or 2.
            recorded: how the first run of a call is made where it is recorded.

        Raises:
            LoadError: the original raises at every batch size.
            UsageError: no batch sizes or no draws.
        """
        sizes = _sizes_of(samples, batch_sizes, mode)
        count = _draws_of(draws, sizes)
        drawn = ((size, draw) for size in sizes for draw in range(count))
        calls = list(dict.fromkeys((*drawn, *samples.further)))
        # A batch of one takes other kernels than any other size does, and is the cheapest.
        other = 1 if 1 in sizes[1:] else sizes[min(1, len(sizes) - 1)]
        measured_at = frozenset((sizes[0], other)[:measured_sizes])
        if known is not None and known._holds_for(target, samples, calls, mode):
            original = known._original.going_on(measured_at)
        else:
            original = Original(
                target,
                mode,
                samples.seed,
                asked=frozenset(samples.further),
                measured_at=measured_at,
                recorded=recorded,
            )
        if not samples.dynamic and batch_sizes is not None and set(batch_sizes) != {samples.batch_size}:
            original.notes.append("The batch size of these inputs can't be changed: only the given inputs were run.")
        with one_at_a_time, pinned_settings() as settings:
            original.run_at(calls, samples)
            if draws is None and original.gives_the_same():
                # Few rows of labels are the same by chance.
                count = 2
                original.run_at([(size, 1) for size in sizes], samples)
            taken = original.run_other_sizes(samples)
        # These hold the working copy, and a whole call.
        original.recorded = original.previous_inputs = None
        original.check()
        return cls(original, samples, settings, count, taken)

    def measured(self) -> Reference:
        """What candidates are compared with: the same runs with the float64 truth and the noise."""
        if self._reference is None:
            with one_at_a_time, pinned_settings():
                self._reference = self._original.finish(self.samples, self._settings, self._draws)
            self._reference.taken = self._taken
        return self._reference

    @property
    def written(self) -> frozenset[str]:
        """The names of the parameters that the original writes to in forward."""
        return self._original.runs.written

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes at which the original could be run."""
        return self._original.batch_sizes

    def unchanged(self, reason: str) -> ParityReport:
        """The report of a result that can't differ from the original; vacuous where the outputs show that they prove nothing."""
        original = self._original
        blank = original.blank(self._settings, self._draws)
        blank = replace(blank, notes=(*blank.notes, *original.notes_on_failures()))
        why = original.why_vacuous()
        if why is None:
            return report_without_outputs(blank, "ok", reason)
        return report_without_outputs(blank, "vacuous", f"{why[0].upper()}{why[1:]}.")

    def seed_of(self, batch_size: int | None, draw: int) -> int:
        """The seed of the random numbers that a call starts from."""
        return self._original.seed_of(batch_size, draw)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the outputs that are kept."""
        seen = (values for kept in self._original.kept for values in (kept.own.values, kept.truth.values))
        return sum(tensor.numel() * tensor.element_size() for values in seen for tensor in values.values())

    def _holds_for(
        self, target: Callable[..., Any], samples: Samples, calls: Sequence[tuple[int | None, int]], mode: Mode
    ) -> bool:
        """Whether these are runs of the target as it is now, on some of these calls (batch size and draw) of the samples."""
        original = self._original
        if target is not original.target or mode != original.mode:
            return False
        if (samples.seed, samples.further) != (self.samples.seed, self.samples.further):
            return False
        kept = original.kept
        if not original.has_run_only(calls):
            return False
        mine = [(one, _call_of(one, self.samples)) for one in kept]
        if not all(call and _are_same_calls(call, samples.at(one.batch_size, one.draw)) for one, call in mine):
            return False
        first, call = mine[0]
        # The run shows a change of what is no tensor, such as a number that the forward reads.
        if call is None or not original.is_as_it_was():
            return False
        with one_at_a_time, pinned_settings():
            return original.confirm(first, call)


class Original:
    """Runs the original and gathers."""

    def __init__(
        self,
        target: Callable[..., Any],
        mode: str,
        seed: int,
        *,
        asked: frozenset[tuple[int | None, int]] = frozenset(),
        measured_at: frozenset[int | None] | None = None,
        recorded: RecordedRuns | None = None,
    ) -> None:
        self.target = target
        self.runs = Runs(target, in_eval=mode == "inference")
        self.recorded = recorded
        self.mode = mode
        self.seed = seed
        # The batch sizes and draws that are calls of the user's own, beside the first: none of them is left out.
        self.asked = asked
        # The batch sizes at which it is run in float64 and off by one unit too; None for all.
        self.measured_at = measured_at
        self._ran_again = False
        self.kept: list[Kept] = []
        self.notes: list[str] = []
        # What was noted before anything was concluded from the runs; None until then.
        self._notes_of_runs: list[str] | None = None
        self._sources = _sources_of(target)
        self.failures: list[tuple[str, Exception]] = []
        # What it raised first, and where in its source: by the sizes of open dims that were others, none for the batch's.
        self.why: dict[tuple[str, ...], str] = {}
        # The batch size at which other sizes are run one by one.
        self.base_batch: int | None = None
        self.dropped: set[int | None] = set()
        self.refused = ""
        self.lowered: set[str] = set()
        self.coarsest = 0.0
        self.inside: dict[str, Pool] = {}
        self.perturbed = True
        self.gathered: dict[str, _Gathered] = {}
        self.inputs_vary = False
        self.previous_inputs: list[torch.Tensor] | None = None
        self.device = "cpu"

    @property
    def training(self) -> bool:
        return self.mode == "training"

    def run(
        self,
        batch_size: int | None,
        draw: int,
        call: Call,
        *,
        keep_call: bool = False,
        label: str = "",
        sizes: Sizes = (),
    ) -> bool:
        """Run it once; false where it raises."""
        if batch_size in self.dropped and (batch_size, draw) not in self.asked:
            return False
        # Gradients are as many numbers as the model has weights: one draw per batch size is enough of them.
        training = self.training and draw == 0
        seed = self.seed_of(batch_size, draw, sizes)
        self.device = _device_of(self.target, call)
        names = input_names(self.target, call)
        is_first = not self.kept and not self.failures
        own = None if sizes else self._recorded_run(batch_size, draw, call, seed, names, is_first=is_first)
        is_recorded = own is not None
        if own is None:
            if is_first:
                self._find_written(call, seed, training, names)
                if self.recorded is not None:
                    self.recorded.runs.written = self.runs.written
            own = self._first_run(batch_size, draw, call, seed, training, names, sizes)
        if own is None:
            return False
        own_call = call if keep_call else None
        kept = Kept(batch_size, draw, seed, own_call, own, own, names, label, recorded=is_recorded, sizes=sizes)
        self._varies(call)
        self.kept.append(kept)
        return True

    def seed_of(self, batch_size: int | None, draw: int, sizes: Sizes = ()) -> int:
        """The seed of the random numbers that a call starts from."""
        return _mixed(self.seed, batch_size or 0, draw, *(size for _, size in sizes))

    def measure(self, samples: Samples | None) -> None:
        """Run it in float64 and off by one unit, where that wasn't done and is to be; and once more at the first call."""
        self._confirm(samples)
        self._gather_all()
        if self.kept and not self._ran_again:
            self._ran_again = True
            self._again(self.call_of(self.kept[0], samples), self.kept[0])
        for kept in self.kept:
            if not kept.measured and self._is_to_be_measured(kept):
                self._measure(kept, self.call_of(kept, samples))

    def why_vacuous(self) -> str | None:
        """Why the outputs prove nothing, as far as they tell without a measurement of noise; None where they may."""
        self._gather_all()
        names = self.kept[0].own.of_kind("output")
        reasons = {name: reason for name in names if (reason := self._no_signal(name, 0.0)) is not None}
        return no_signal(reasons) if reasons and len(reasons) == len(names) else None

    def _gather_all(self) -> None:
        for kept in self.kept:
            if kept.unstable.keys() != kept.own.values.keys():
                self._gather(kept)

    def measure_the_rest(self, samples: Samples | None) -> dict[str, OutputNoise]:
        """Run it in all ways at the other calls too; the noise by all of them, nothing where there are no others."""
        rest = [kept for kept in self.kept if not kept.measured]
        for kept in rest:
            self._measure(kept, self.call_of(kept, samples))
        return {name: self._noise(name) for name in self.gathered} if rest and not self.refused else {}

    def call_of(self, kept: Kept, samples: Samples | None) -> Call:
        """The inputs of a run, as they are kept or made again."""
        call = _call_of(kept, samples)
        assert call is not None
        return call

    def _recorded_run(
        self,
        batch_size: int | None,
        draw: int,
        call: Call,
        seed: int,
        names: Sequence[str],
        *,
        is_first: bool,
    ) -> Observation | None:
        """What comes out of a recorded run; None where there is none."""
        if self.recorded is None or batch_size in self.dropped:
            return None
        with _silent():
            own = self.recorded.run(batch_size, draw, call, seed=seed, names=names, is_first=is_first)
        if is_first and own is not None:
            self.runs.written = self.recorded.runs.written
            self._note_written()
        return own

    def _confirm(self, samples: Samples | None) -> None:
        """See that plain runs give what recorded ones do; else take what they give.

        Torch takes other kernels in some modules while calls are watched: a transformer's layers set padding to zero by one
        and not by the other.
        """
        recorded = [kept for kept in self.kept if kept.recorded]
        if not recorded or self.confirm(recorded[0], self.call_of(recorded[0], samples)):
            return
        for kept in recorded:
            call = self.call_of(kept, samples)
            own = self._first_run(kept.batch_size, kept.draw, call, kept.seed, False, kept.names, ())
            if own is not None:
                kept.own, kept.truth, kept.recorded = own, own, False

    def confirm(self, kept: Kept, call: Call) -> bool:
        """Whether it gives the same numbers at a call again, run plainly."""
        if not self._answers_as_before(kept, call):
            return False
        if kept.recorded:
            # So it repeats itself, too.
            self._ran_again = True
            for one in self.kept:
                one.recorded = False
        return True

    def _measure(self, kept: Kept, call: Call) -> None:
        kept.measured = True
        training = self.training and kept.draw == 0
        if not self.refused:
            kept.truth = self._float64(call, kept, training) or kept.own
        for name, own in kept.own.values.items():
            gathered, truth = self.gathered[name], kept.truth.values[name]
            if is_exact(own):
                gathered.truth_ties += int((own != truth).sum())
            else:
                _pool_finite(gathered.own_error, own, truth)
        for number in range(2 if self.mode == "region" and _is_small(kept.own) else 1):
            self._perturb(call, kept, number, training)

    def _is_to_be_measured(self, kept: Kept) -> bool:
        if kept.sizes or (kept.batch_size, kept.draw) in self.asked:
            return True
        if self.measured_at is None or kept.batch_size in self.measured_at or not self.measured:
            return True
        # Which of these rounding decides differs from call to call.
        return any(is_exact(value) or not all_finite(value) for value in kept.own.values.values())

    @property
    def measured(self) -> list[Kept]:
        """The calls that were run in float64 and off by one unit too."""
        return [kept for kept in self.kept if kept.measured]

    def run_other_sizes(self, samples: Samples) -> Taken:
        """Run it at other sizes of each open dim beside the batch, one by one, and at some where all grow together."""
        batches = [kept.batch_size for kept in self.kept if kept.batch_size is not None]
        larger = sorted(size for size in batches if size > 1)
        batch = samples.batch_size if samples.batch_size in larger or not larger else larger[0]
        taken = Taken(batch, samples.sizes)
        self.base_batch = batch
        if not self.kept:
            return taken
        for name, given in samples.sizes.items():
            worked = taken.alone.setdefault(name, [])
            for size in ladder(given):
                if len(worked) < ENOUGH and self._run_sized(samples, batch, ((name, size),)):
                    worked.append(size)
        step, steps = taken.steps(batch, batches)
        if samples.sizes and (step > 0) + sum(size > 0 for size in steps.values()) > 1:
            for count in (1, 2):
                sizes = tuple((name, taken.base(name) + count * size) for name, size in steps.items())
                rows = None if batch is None else batch + count * step
                if not self._run_sized(samples, rows, sizes):
                    break
                taken.together.append((rows, sizes))
        self._note_sizes(taken)
        return taken

    def _run_sized(self, samples: Samples, batch_size: int | None, sizes: Sizes) -> bool:
        return self.run(batch_size, 0, samples.at(batch_size, 0, sizes), sizes=sizes)

    def _note_sizes(self, taken: Taken) -> None:
        for name, worked in taken.alone.items():
            sizes = ", ".join(map(str, sorted({taken.given[name], *worked})))
            self.notes.append(f"{name} was looked at in the sizes {sizes}.")

    def check(self) -> None:
        """See that it could be run.

        Raises:
            LoadError: it raises at every call.
            UsageError: there is no call.
        """
        if self.kept:
            return
        if not self.failures:
            raise UsageError("Nothing to compare: there is no call to make.")
        where, error = self.failures[0]
        raise LoadError(f"The model raises on the example inputs ({where}): {_first_line(error)}") from error

    def notes_on_failures(self) -> list[str]:
        """A sentence on the sizes that were left out, as it raises there."""
        if not self.failures:
            return []
        raised_at = ", ".join(where for where, _ in self.failures)
        why = "; ".join(dict.fromkeys(each.partition(": ")[2] for each in self.why.values()))
        return [f"The original raises at {raised_at}, which was left out: {why}"]

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes at which it was run."""
        sizes = (kept.batch_size for kept in self.kept if kept.batch_size is not None and not kept.sizes)
        return tuple(dict.fromkeys(sizes))

    def blank(self, settings: dict[str, str], draws: int, *, reference: str = "none", reason: str = "") -> Measurement:
        """A measurement of nothing, with what was run and how."""
        return Measurement(
            outputs=(),
            problems=(),
            notes=tuple(self.notes),
            reference=reference,
            reference_reason=reason,
            mode="inference" if self.mode == "region" else self.mode,
            device=self.device,
            batch_sizes=self.batch_sizes,
            draws=draws,
            seed=self.seed,
            settings=settings,
        )

    def finish(self, samples: Samples | None, settings: dict[str, str], draws: int) -> Reference:
        self.check()
        self.measure(samples)
        self.check()
        self._notes_of_runs = list(self.notes)
        self.notes += self.notes_on_failures()
        self._distrust(samples)
        if self.refused:
            for kept in self.kept:
                kept.truth = kept.own
            for gathered in self.gathered.values():
                gathered.own_error = Pool()
        for kept in self.kept:
            for name, own in kept.own.values.items():
                if is_exact(own):
                    kept.unstable[name] |= own != kept.truth.values[name]
        if self._is_most_exact():
            # What rounding does inside can't be seen in its own error.
            self.inside = self._rounded_inside(samples)
        noises = {name: self._noise(name) for name in self.gathered}
        slices = self._slice_noises(noises, samples)
        self._note(noises)
        reference = "own dtype" if self.refused else "float64"
        blank = self.blank(settings, draws, reference=reference, reason=self.refused)
        return Reference(self, noises, slices, blank, samples)

    def more_noise(self, samples: Samples | None) -> dict[str, Pool]:
        """How far rounding inside moves each output, in several samples of all calls; empty where that can't be seen.

        A half precision isn't looked at: its kernels round once at the end, and not at each step inside.
        """
        return {} if self.coarsest > unit(torch.float32) else self._rounded_inside(samples, _MORE_SAMPLES)

    def more_response(self, samples: Samples | None, names: Set[str]) -> dict[str, Pool]:
        """How far outputs move as inputs and parameters are off by one unit, in several samples of all calls; empty where
        that can't be seen."""
        moved = {name: Pool() for name in names}
        for kept, number in itertools.product(self.measured, range(_MORE_SAMPLES)):
            call = _call_of(kept, samples)
            if call is None or not self.perturbed:
                return {}
            other = self.off_by_one(call, kept, _OTHER_SEEDS + number, training=False)
            for name in names & kept.own.values.keys():
                _pool_finite(moved[name], kept.own.values[name], other.values[name])
        return moved

    def errors_in_float64(
        self, candidate: Runs, samples: Samples | None, names: Set[str], *, training: bool
    ) -> dict[str, Pool]:
        """How far a candidate's values are off in float64; empty where they aren't all finite, where it can't be computed so,
        or rounds to fewer digits somewhere, which doesn't show there."""
        errors = {name: Pool() for name in names}
        for kept in self.measured:
            if not names & kept.own.values.keys():
                continue
            call = self.call_of(kept, samples)
            try:
                mode, seen = self.in_float64(candidate, call, kept, training=training)
            except Exception as error:  # noqa: BLE001 - the candidate is foreign code: it is judged by what it gave
                logger.debug("the candidate raised in float64: %s", error)
                return {}
            if mode.coarsest > self.coarsest:
                return {}
            for name in names & kept.own.values.keys():
                own, truth, value = kept.own.values[name], kept.truth.values[name], seen.values.get(name)
                if value is None or value.shape != own.shape or not all_finite(own, truth, value):
                    return {}
                errors[name].add(distance(value, truth), of=own)
        return errors

    def twin(self) -> Original:
        """The same with calls of its own, of which other elements may be ties."""
        twin = copy.copy(self)
        twin.kept = [replace(kept, unstable={k: v.clone() for k, v in kept.unstable.items()}) for kept in self.kept]
        twin.notes = []
        return twin

    def going_on(self, measured_at: frozenset[int | None]) -> Original:
        """The same, to be run at further calls and measured at these batch sizes."""
        twin = self.twin()
        twin.measured_at = measured_at
        twin.notes = list(self.notes if self._notes_of_runs is None else self._notes_of_runs)
        twin.gathered = copy.deepcopy(self.gathered)
        twin.failures, twin.why, twin.dropped = list(self.failures), dict(self.why), set(self.dropped)
        return twin

    def run_at(self, calls: Sequence[tuple[int | None, int]], samples: Samples) -> None:
        """Run it at these batch sizes and draws, but for those at which it was run."""
        for batch_size, draw in calls:
            if not any((kept.batch_size, kept.draw) == (batch_size, draw) and not kept.sizes for kept in self.kept):
                self.run(batch_size, draw, samples.at(batch_size, draw))
        order = {call: number for number, call in enumerate(calls)}
        self.kept.sort(key=lambda kept: order.get((kept.batch_size, kept.draw), -1))

    def has_run_only(self, calls: Sequence[tuple[int | None, int]]) -> bool:
        """Whether it was run at no others than these batch sizes and draws."""
        ran = {(kept.batch_size, kept.draw) for kept in self.kept}
        return (
            ran <= set(calls)
            and self.dropped <= {size for size, _ in calls}
            and not any(kept.sizes for kept in self.kept)
        )

    def is_as_it_was(self) -> bool:
        """Whether none of its tensors was replaced or written to since the first run."""
        now = _sources_of(self.target)
        pairs = zip(self._sources, now, strict=False)
        same = len(now) == len(self._sources) and all(old.tensor is new.tensor for old, new in pairs)
        return same and all(source.unchanged for source in self._sources)

    def _answers_as_before(self, kept: Kept, call: Call) -> bool:
        try:
            with _silent():
                seen = self._run_again(kept, call)
        except Exception as error:  # noqa: BLE001 - the original is foreign code; running it anew tells what it raises
            logger.debug("the original raises where it didn't before: %s", error)
            return False
        own = kept.own
        if seen.structure != own.structure or seen.values.keys() != own.values.keys():
            return False
        return all(same_values(value, seen.values[name]) for name, value in own.values.items())

    def errors_in(self, precision: Precision, samples: Samples | None, times: int = 0) -> dict[str, Pool]:
        """How far each output is off where the original computes as the precision says, at all calls.

        What becomes of integers that come from floats is taken for a tie.

        Args:
            times: samples of each call beside the plain one, with inputs and parameters a little off before they are
                rounded.
        """
        errors: dict[str, Pool] = {}
        seeds = [None, *range(times)] if not times else range(times)
        for kept, number in itertools.product(self.measured, seeds):
            seed = None if number is None else _mixed(kept.seed, 4, number)
            seen = self._computed(kept, samples, precision, seed)
            for name, own in kept.own.values.items():
                value = seen.get(name)
                if value is None or value.shape != own.shape:
                    continue
                if is_exact(own):
                    kept.unstable[name] |= own != value
                    continue
                error = distance(value, kept.truth.values[name]) * share(precision)
                plain = None if all_finite(own, value, error) else own.isfinite() & error.isfinite()
                errors.setdefault(name, Pool(slices=Slices())).add(error, plain, of=own)
        return errors

    def _computed(
        self, kept: Kept, samples: Samples | None, precision: Precision, seed: int | None
    ) -> Mapping[str, torch.Tensor]:
        """What the original gives in a precision; nothing where it raises."""
        assert isinstance(self.target, nn.Module)
        call = self.call_of(kept, samples)
        training = self.training and kept.draw == 0
        # What can't be computed in the dtype everywhere can be under autocast, which is off by less.
        for kind in dict.fromkeys((precision, replace(precision, everywhere=False))):
            try:
                with pinned_settings():
                    seen = self._observed(
                        call, kept, training, functools.partial(computing_as, precision=kind, seed=seed)
                    ).values
                    if precision.dtype is torch.float16 and any(map(is_exact, kept.own.values.values())):
                        # Fewer integers are ties than in bfloat16: those that float16 decides otherwise too.
                        finer = self._observed(
                            call,
                            kept,
                            training,
                            functools.partial(computing_as, precision=kind, seed=seed, dtype=torch.float16),
                        ).values
                        seen = {
                            name: _nearer(kept.own.values.get(name), value, finer.get(name))
                            for name, value in seen.items()
                        }
                    return seen
            except Exception as error:  # noqa: BLE001 - the original is foreign code; the reason is reported
                reason = f"The original couldn't be run in {precision.name}: {_first_line(error)}"
        _append_once(self.notes, reason)
        return {}

    def noise_in(self, precision: Precision, noise: OutputNoise, error: Pool | None) -> OutputNoise:
        """The noise of an output in kind: no less than rounding the output itself once, where there is an error."""
        if error is None:
            tied = sum(int(kept.unstable[noise.name].sum()) for kept in self.kept if noise.name in kept.unstable)
            if tied > noise.tied:
                more = f"{tied - noise.tied} elements of {noise.name} are decided otherwise by the original in"
                self.notes.append(f"{more} {precision.name}, and were not compared.")
            return replace(noise, tied=tied, signal=self._no_signal(noise.name, noise.noise_rms))
        least = torch.finfo(precision.dtype).eps / 2
        largest = max(noise.noise, error.largest, least * noise.scale)
        rms = max(noise.noise_rms, error.rms, least * noise.rms / 2)
        return replace(noise, noise=largest, noise_rms=rms, signal=self._no_signal(noise.name, rms))

    def _written_in(self, module: Any) -> list[nn.Parameter]:
        """The parameters of a copy that the model writes to."""
        if not isinstance(module, nn.Module):
            return []
        named = module.named_parameters(remove_duplicate=False)
        return [parameter for name, parameter in named if name in self.runs.written]

    def _find_written(self, call: Call, seed: int, training: bool, names: Sequence[str]) -> None:
        """Find the parameters that the model writes to in a run that is watched, as no second copy of all is made."""
        if not isinstance(self.target, nn.Module):
            return
        with eager_only(), _silent():
            try:
                self.runs.first(lambda module: observe(module, call, seed=seed, training=training, names=names))
            except LoadError:
                raise
            except Exception as error:  # noqa: BLE001 - the original is foreign code; the first run records what it raises
                logger.debug("the watched run raised: %s", error)
        self._note_written()

    def _note_written(self) -> None:
        if self.runs.written:
            written = ", ".join(sorted(self.runs.written))
            self.notes.append(f"The model writes to its own parameters in forward: {written}.")

    def _first_run(
        self,
        batch_size: int | None,
        draw: int,
        call: Call,
        seed: int,
        training: bool,
        names: Sequence[str],
        sizes: Sizes,
    ) -> Observation | None:
        ran: Callable[..., Any] = self.target
        try:
            with self.runs.fresh() as ran:
                return observe(ran, call, seed=seed, training=training, names=names)
        except LoadError:
            # A sentence of this program about the model: it says all itself.
            raise
        except Exception as error:
            # The traceback holds the modules of the copy.
            place = place_of_error(error, ran)
            why = f"{_first_line(error)}, at {place}" if place else _first_line(error)
            where = "" if batch_size is None else f"batch size {batch_size}"
            if sizes:
                rows = f"{where}, " if where and batch_size != self.base_batch else ""
                where = f"{rows}{_spelt(sizes)}".removesuffix(", ")
            self.why.setdefault(tuple(name for name, _ in sizes), f"{where or 'the given inputs'}: {why}")
            if sizes:
                self.failures.append((where, error))
                return None
            if (batch_size, draw) in self.asked:
                where = f"batch size {batch_size}, draw {draw}"
                raise LoadError(f"The model raises on further inputs ({where}): {_first_line(error)}.") from error
            self.dropped.add(batch_size)
            self.kept = [
                kept
                for kept in self.kept
                if kept.batch_size != batch_size or (kept.batch_size, kept.draw) in self.asked
            ]
            self.failures.append((f"batch size {batch_size}" if batch_size is not None else "the given inputs", error))
            return None

    def _float64(self, call: Call, kept: Kept, training: bool) -> Observation | None:
        try:
            mode, truth = self.in_float64(self.runs, call, kept, training=training)
        except Exception as error:  # noqa: BLE001 - the original is foreign code; the reason is reported
            self.refused = f"the float64 run raised: {_first_line(error)}"
            return None
        self.lowered |= mode.lowered
        self.coarsest = max(self.coarsest, mode.coarsest)
        if reason := _another_answer(kept.own, truth):
            self.refused = f"the float64 run gave something else: {reason}"
            return None
        truth.values = {name: _within_range(kept.own.values[name], value) for name, value in truth.values.items()}
        return truth

    def in_float64(self, runs: Runs, call: Call, kept: Kept, *, training: bool) -> tuple[Float64Mode, Observation]:
        """What the original, or a candidate, gives with every call raised to float64."""
        mode, seen = self._raised(runs, call, kept, training, ())
        if any(len(layout.shape) > _LEAST_DIMS_OF_A_MAP for layout in mode.masked):
            own = MaskedLayouts()
            self._observed(call, kept, training, lambda module: own, runs)
            if own.masked != mode.masked:
                mode, seen = self._raised(runs, call, kept, training, own.masked)
        return mode, seen

    def _raised(
        self, runs: Runs, call: Call, kept: Kept, training: bool, masks: Sequence[Layout]
    ) -> tuple[Float64Mode, Observation]:
        modes: list[Float64Mode] = []

        def raising(module: Callable[..., Any]) -> Float64Mode:
            mode = Float64Mode(
                own_dtype=own_dtype(module, call),
                leaf_parameters=training,
                written=self._written_in(module),
                together=_together(module),
                masks=masks,
            )
            modes.append(mode)
            return mode

        seen = self._observed(call, kept, training, raising, runs)
        return modes[-1], seen

    def _observed(
        self,
        call: Call,
        kept: Kept,
        training: bool,
        mode: Callable[[Any], AbstractContextManager[Any]],
        runs: Runs | None = None,
    ) -> Observation:
        """One run of the original, or of a candidate, in the mode that is made for the copy."""
        with eager_only(), _silent(), (runs or self.runs).fresh() as module:
            return observe(module, call, seed=kept.seed, training=training, mode=mode(module), names=kept.names)

    def off_by_one(self, call: Call, kept: Kept, number: int, *, training: bool) -> Observation:
        """What the original gives with inputs and parameters off by one unit in the last place."""
        seed = _mixed(kept.seed, 1, number)
        signs = random_signs(torch.Generator().manual_seed(seed))

        def perturb(tensor: torch.Tensor) -> torch.Tensor:
            if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
                return tensor
            value = bare(tensor)
            off = off_by_one_ulp(value, signs)
            if value.layout is torch.strided and not value.is_nested:
                off = torch.where(stands_for_infinity(value), value, off)
            return off.requires_grad_(tensor.requires_grad)

        args, kwargs = rebuild((call.args, call.kwargs), perturb)
        return self._observed(
            Call(args, kwargs), kept, training, lambda module: PerturbedMode(seed, written=self._written_in(module))
        )

    def _perturb(self, call: Call, kept: Kept, number: int, training: bool) -> None:
        if not self.perturbed:
            return
        try:
            other = self.off_by_one(call, kept, number, training=training)
        except Exception as error:  # noqa: BLE001 - the original is foreign code; the reason is reported
            self.perturbed = False
            self.notes.append(f"The answer to changes of one unit couldn't be measured: {_first_line(error)}")
            return
        if _another_answer(kept.own, other) is None:
            self._respond(kept, other, lambda gathered: gathered.response)

    def _run_again(self, kept: Kept, call: Call) -> Observation:
        training = self.training and kept.draw == 0
        with self.runs.fresh() as module:
            return observe(module, call, seed=kept.seed, training=training, names=kept.names)

    def _again(self, call: Call, kept: Kept) -> None:
        try:
            other = self._run_again(kept, call)
        except Exception as error:  # noqa: BLE001 - the original is foreign code; the reason is reported
            self.notes.append(f"The original raises when it is run twice: {_first_line(error)}")
            return
        for name, own in kept.own.values.items():
            value = other.values.get(name)
            if value is None or value.shape != own.shape:
                self.gathered[name].exact_differs_again = True
            elif is_exact(own):
                self.gathered[name].exact_differs_again |= not torch.equal(own, value)
            else:
                _pool_finite(self.gathered[name].again, own, value)

    def _respond(self, kept: Kept, other: Observation, pool: Callable[[_Gathered], Pool]) -> None:
        for name, own in kept.own.values.items():
            value = other.values.get(name)
            if value is None:
                continue
            if is_exact(own):
                kept.unstable[name] |= own != value
                self.gathered[name].own_ties += int((own != value).sum())
                continue
            kept.unstable[name] |= special(own) != special(value)
            _pool_finite(pool(self.gathered[name]), own, value)

    def _gather(self, kept: Kept) -> None:
        for name, own in kept.own.values.items():
            gathered = self.gathered.setdefault(name, _Gathered(sliced=kept.own.kinds[name] == "output"))
            kept.unstable[name] = torch.zeros(own.shape, dtype=torch.bool)
            if is_exact(own):
                gathered.elements += own.numel()
                continue
            plain = None if all_finite(own) else special(own) == 0
            gathered.size.add(wide(own).abs(), plain, of=own)

    def _varies(self, call: Call) -> None:
        """Note whether any two calls of one shape differ in their inputs: else constant outputs prove nothing."""
        tensors = [tensor for _, tensor in leaves_of((call.args, call.kwargs)).tensors()]
        previous, self.previous_inputs = self.previous_inputs, tensors
        if previous is None or len(previous) != len(tensors):
            return
        pairs = [_shared_rows(a, b) for a, b in zip(previous, tensors, strict=True)]
        self.inputs_vary |= any(pair is not None and not _equal(*pair) for pair in pairs)

    def _distrust(self, samples: Samples | None) -> None:
        """Refuse a float64 run that is no more exact version of the original but another computation."""
        if self.refused:
            return
        explained: dict[str, Pool] | None = None
        for name, gathered in self.gathered.items():
            if not self._repeats(gathered):
                continue
            # A tie is rare: many of them at once are another computation, such as another stream of random numbers.
            if gathered.truth_ties > 8 + gathered.elements / 50 + 8 * gathered.own_ties:
                self.refused = (
                    f"the float64 run gave something else: {name} differs in {gathered.truth_ties} of "
                    f"{gathered.elements} elements"
                )
                return
            rounding = max(gathered.response.rms, gathered.again.rms, self.coarsest * gathered.size.rms)
            own = gathered.own_error.rms
            if own <= max(64 * rounding, math.sqrt(self.coarsest) * gathered.size.rms):
                continue
            # Rounding inside may be far larger than at the ends: numbers that cancel each other.
            explained = self._rounded_inside(samples) if explained is None else explained
            rounding = max(rounding, explained.get(name, Pool()).rms)
            if own > 64 * rounding:
                self.refused = (
                    f"the float64 run gave something else: {name} differs by {own:.1e} where rounding explains "
                    f"{rounding:.1e}"
                )
                return

    def _rounded_inside(self, samples: Samples | None, times: int = 1) -> dict[str, Pool]:
        """How far each output moves when every number is rounded on the way, at all calls, so many times each; empty where
        that fails."""
        moved: dict[str, Pool] = {}
        for kept, number in itertools.product(self.measured, range(times)):
            rounded, seed = RoundedMode(_mixed(kept.seed, 3, number)), _mixed(kept.seed, 2, number)

            def both(module: Any, rounded: RoundedMode = rounded, seed: int = seed) -> AbstractContextManager[None]:
                return _all_of((PerturbedMode(seed, written=self._written_in(module)), rounded))

            for name, values in self._moved_at(kept, samples, both).items():
                if rounded.calls:
                    _pool_finite(moved.setdefault(name, Pool(slices=Slices())), *values)
        return moved

    def _rounded_to_scale(self, samples: Samples | None) -> dict[str, Pool]:
        """How far each output moves when results are off by a unit of their largest number, at the first call."""
        kept, moved = self.kept[0], {}
        modes: list[PerturbedMode] = []

        def moving(module: Any) -> PerturbedMode:
            modes.append(PerturbedMode(_mixed(kept.seed, 2), results=True, written=self._written_in(module)))
            return modes[-1]

        for name, values in self._moved_at(kept, samples, moving).items():
            if modes[-1].calls:
                moved[name] = Pool(slices=Slices())
                _pool_finite(moved[name], *values)
        return moved

    def _moved_at(
        self, kept: Kept, samples: Samples | None, mode: Callable[[Any], AbstractContextManager[Any]]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The inexact values of one call, as they were and as they are in a mode; empty where it raises in them."""
        call = _call_of(kept, samples)
        if call is None or not self.perturbed:
            return {}
        try:
            with pinned_settings():
                other = self._observed(call, kept, self.training and kept.draw == 0, mode)
        except Exception as error:  # noqa: BLE001 - the original is foreign code; the reason is reported
            _append_once(self.notes, f"The answer to rounding inside couldn't be measured: {_first_line(error)}")
            return {}
        pairs = ((name, own, other.values.get(name)) for name, own in kept.own.values.items() if not is_exact(own))
        return {name: (own, value) for name, own, value in pairs if value is not None and value.shape == own.shape}

    def _slice_noises(self, noises: Mapping[str, OutputNoise], samples: Samples | None) -> dict[str, SliceNoise]:
        """What rounding does to each channel and column of the outputs, where that says more than the whole's noise.

        The original's own error and its answer to changes of one unit are known per element. But a kernel may keep to the
        scale of what it computes and not to each number: one takes sigmoid(-30) for 1e-8, not 1e-13, and is right. So what
        one unit of the whole result does, at every call that is no plain arithmetic, is measured too. Nothing is judged by
        slices where that can't be seen.
        """
        if self.refused or not self.perturbed or any(_is_opaque(module) for module in modules_of(self.target)):
            return {}
        found: dict[str, SliceNoise] = {}
        for name, gathered in self.gathered.items():
            own = next(kept.own.values[name] for kept in self.kept if name in kept.own.values)
            pools = (gathered.own_error, gathered.response, gathered.again, self.inside.get(name, Pool()))
            measured = [pool.slices for pool in pools if pool.slices]
            if is_exact(own) or gathered.size.slices is None or not noises[name].deterministic:
                continue
            noise = slice_noise(gathered.size.slices, measured, own.dtype, least_samples=_LEAST_SAMPLES)
            if SLICE_FACTOR * noise.least() < FACTOR * noises[name].noise:
                found[name] = noise
        if not found:
            return {}
        rounded = self._rounded_to_scale(samples)
        for name, noise in found.items():
            noise.raise_to(pool.slices if (pool := rounded.get(name)) and pool.slices else Slices())
        return found

    def _is_most_exact(self) -> bool:
        """Whether the original computes in float64 throughout: there is no truth beside it."""
        return not self.refused and not self.coarsest

    def _repeats(self, gathered: _Gathered) -> bool:
        """Whether an output is deterministic, but for sums in another order as a GPU may take them."""
        eps = self.coarsest or unit(torch.float32)
        bound = max(8 * eps, 0.1 * math.sqrt(eps)) * gathered.size.rms
        return not gathered.exact_differs_again and gathered.again.rms <= bound

    def _noise(self, name: str) -> OutputNoise:
        gathered = self.gathered[name]
        sample = next(kept for kept in self.kept if name in kept.own.values)
        own = sample.own.values[name]
        scale, rms = gathered.size.largest, gathered.size.rms
        floor, floor_rms = floors(own.dtype, scale, rms)
        inside = self.inside.get(name, Pool())
        rounding = max(gathered.own_error.largest, gathered.response.largest, inside.largest, floor)
        deterministic = self._repeats(gathered)
        again = gathered.again if deterministic else Pool()
        response = max(gathered.response.largest, inside.largest, again.largest)
        response_rms = max(gathered.response.rms, inside.rms, again.rms)
        noise_rms = max(gathered.own_error.rms, response_rms, floor_rms)
        tied = sum(int(kept.unstable[name].sum()) for kept in self.kept if name in kept.unstable)
        return OutputNoise(
            name=name,
            kind=sample.own.kinds[name],
            dtype=str(own.dtype).removeprefix("torch."),
            scale=scale,
            rms=rms,
            own_error=gathered.own_error.largest,
            own_error_rms=gathered.own_error.rms,
            response=response,
            response_rms=response_rms,
            noise=max(rounding, again.largest),
            noise_rms=noise_rms,
            signal=self._no_signal(name, noise_rms),
            deterministic=deterministic,
            tied=tied,
        )

    def _no_signal(self, name: str, noise_rms: float) -> str | None:
        """Why an output proves nothing; None where it does prove something."""
        kept_here = [kept for kept in self.kept if name in kept.own.values]
        values = [(kept.own.values[name], kept.unstable[name]) for kept in kept_here]
        if sum(value.numel() for value, _ in values) == 0:
            return "empty"
        if all(bool(unstable.all()) for value, unstable in values if is_exact(value) and value.numel()) and is_exact(
            values[0][0]
        ):
            return "tied in every element"
        if not is_exact(values[0][0]) and all(bool((special(value) != 0).all()) for value, _ in values):
            return "NaN or infinite in every element"
        if all(not bool(value.any()) for value, _ in values):
            return "all zero"
        if not is_exact(values[0][0]) and _is_hardly_more(self.gathered[name].size.rms, noise_rms):
            return "hardly larger than its rounding noise"
        if not self.inputs_vary or len(self.kept) < 2 or self.kept[0].own.kinds.get(name) != "output":
            return None
        exact, changed = is_exact(values[0][0]), self._changed(name)
        if changed is None:
            return None
        if changed.largest == 0:
            return "the same for every input"
        if not exact and changed.rms <= noise_rms:
            return "less moved by its inputs than by rounding"
        return None

    def _changed(self, name: str) -> Pool | None:
        """How far an output is moved by other inputs, in the rows that two calls in turn both have; None where that can't be
        told."""
        in_rows = [kept.own.values[name] for kept in self.kept if name in kept.own.values and not kept.sizes]
        pairs = [_shared_rows(a, b) for a, b in itertools.pairwise(in_rows)]
        changed = Pool()
        for pair in pairs:
            if pair is None:
                return None
            if is_exact(pair[0]):
                changed.add((pair[0] != pair[1]).to(torch.float64), of=pair[0])
            else:
                _pool_finite(changed, *pair)
        return changed if pairs else None

    def gives_the_same(self) -> bool:
        """Whether an output was the same at all calls, which had other inputs."""
        if not self.inputs_vary or not self.kept:
            return False
        changed = (self._changed(name) for name in self.kept[0].own.of_kind("output"))
        return any(one is not None and one.largest == 0 for one in changed)

    def _note(self, noises: dict[str, OutputNoise]) -> None:
        if self.refused:
            self.notes.append(f"The reference is the original in its own dtype, because {self.refused}.")
        elif self.lowered:
            self.notes.append(f"Not raised to float64 inside: {', '.join(sorted(self.lowered))}.")
        for noise in noises.values():
            if not noise.deterministic:
                self.notes.append(f"{noise.name} is not deterministic in the original and was not judged.")
            if noise.signal is not None and noise.kind == "output":
                self.notes.append(f"{noise.name} is {noise.signal} and proves nothing.")
            if noise.tied:
                self.notes.append(
                    f"{noise.tied} elements of {noise.name} are ties that the original itself breaks either way."
                )
        for name in noises:
            odd = sum(
                int((special(kept.own.values[name]) == 1).sum())
                for kept in self.kept
                if name in kept.own.values and not is_exact(kept.own.values[name])
            )
            if odd:
                self.notes.append(f"{name} of the original has NaN in {odd} elements on these inputs.")


@dataclass
class MovedBiases:
    """Biases that a candidate has no more, as its running means are less by them.

    A bias b and a running mean m are right together: what both sides have to agree on is m - b. The candidate's b is zero.

    Attributes:
        means: for each running mean, by its name in the comparison, the original's bias, in float64 on the CPU.
        gradients: the names of the gradients of such biases, which have to be nothing but rounding in the original.
        problems: sentences about means that aren't less by their bias before anything is run.
    """

    means: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


@dataclass
class _Compared:
    error: Pool
    mismatches: int = 0
    problems: list[str] = field(default_factory=list)
    where: str = ""
    frontier: tuple[tuple[float, float], ...] = ()
    calls: list[CallFigures] = field(default_factory=list)


# Of so many square roots of a unit may a gradient be off, in the root mean square and of its own, where kinks are to
# explain it: of numbers that are as many units off as there are roundings before them, that share is beside a kink.
_KINKED = 64
# As many units of the largest gradient may be left of a sum of gradients that is zero.
_LEFT_OF_A_SUM = 16


class Comparison:
    """Gathers a candidate's differences from the reference."""

    def __init__(
        self,
        noises: Mapping[str, OutputNoise],
        *,
        flat: bool,
        in_detail: bool = True,
        slices: Mapping[str, SliceNoise] | None = None,
        moved: MovedBiases | None = None,
        who: str = "the candidate",
    ) -> None:
        self.moved = moved or MovedBiases()
        # Told in sentences on what is compared.
        self.who = who
        self.in_detail = in_detail
        self.slices = slices or {}
        self.noises = noises
        self.flat = flat
        self.compared: dict[str, _Compared] = {}
        self.problems: list[str] = [*self.moved.problems]
        self.notes: list[str] = []
        self.lacking: dict[str, None] = {}
        # Inputs that the original changes, beside a file.
        self.unmatched: dict[str, None] = {}
        # Gradients of biases that the candidate has no more.
        self.without: dict[str, None] = {}

    def run(self, runs: Runs, kept: Kept, call: Call, flatten: Flatten | None, *, training: bool) -> None:
        training = training and kept.draw == 0 and not self.flat
        try:
            with runs.fresh() as module:
                got = observe(module, call, seed=kept.seed, training=training, flatten=flatten, names=kept.names)
        except LoadError:
            raise
        except Exception as error:  # noqa: BLE001 - the candidate is foreign code; what it raises is a result
            self._problem(f"{self.who.capitalize()} raises at {kept.where}: {_first_line(error)}")
            return
        self.add(kept, got)

    def add(self, kept: Kept, got: Observation) -> None:
        if not self.flat and (difference := first_difference(kept.own.structure, got.structure)):
            self._problem(f"The outputs have another structure: {difference}")
            return
        for name, value in self._matched(kept, got):
            self._compare(kept, name, value)
        for name in got.of_kind("input"):
            if kept.own.kinds.get(name) != "input":
                self._problem(f"{name.replace(' (changed', ' is changed').rstrip(')')} by {self.who} only")

    def is_doubtful(self) -> bool:
        """Whether all that is wrong may be rounding, which more samples of it would explain."""
        if self.problems or any(compared.problems or compared.mismatches for compared in self.compared.values()):
            return False
        if self._trained():
            return True
        beyond = [
            max(compared.error.largest / noise.noise, compared.error.rms / noise.noise_rms)
            for name, compared in self.compared.items()
            if (noise := self.noises[name]).deterministic and noise.noise > 0 and not noise.declared
        ]
        return FACTOR < max(beyond, default=0.0) <= _DOUBTFUL * FACTOR

    def beyond(self, noises: Mapping[str, OutputNoise]) -> set[str]:
        """The outputs that are off by more than noises allow."""
        compared = ((noises[name], one.error) for name, one in self.compared.items())
        return {
            noise.name
            for noise, error in compared
            if noise.kind == "output" and noise.deterministic and _is_beyond(error, noise)
        }

    def kinked(self) -> set[str]:
        """The gradients that are off by more than the samples of rounding, and so little that kinks may be why; none where
        something else is off by more than further samples could explain."""
        found = set[str]()
        for name, compared in self.compared.items():
            noise = self.noises[name]
            if not noise.deterministic:
                continue
            if compared.problems or compared.mismatches:
                return set()
            beyond = max(
                _times_off(compared.error.largest, noise.noise), _times_off(compared.error.rms, noise.noise_rms)
            )
            if noise.kind == "gradient" and compared.error.rms <= self._rounded_rms(name):
                if beyond > FACTOR:
                    found.add(name)
            elif beyond > FACTOR * _DOUBTFUL:
                return set()
        return set() if self.problems else found

    def _rounded_rms(self, name: str) -> float:
        """How far a gradient may be off, in the root mean square, where rounding in the backward pass is to explain it."""
        noise = self.noises[name]
        root = math.sqrt(unit(getattr(torch, noise.dtype)))
        largest = max(other.rms for other in self.noises.values() if other.kind == noise.kind)
        # Of a sum that is zero, as the gradient of a bias in front of a BatchNorm, rounding is all there is.
        return max(_KINKED * root * noise.rms, root * largest if self._is_rounding(name) else 0.0)

    def settle(self, errors: Mapping[str, Pool]) -> None:
        """Put the errors in float64 in the place of those that kinks may explain."""
        for name, error in errors.items():
            self.compared[name].error = error
        first, *others = (name for name in self.compared if name in errors)
        which = f"{first} and {len(others)} more" if others else first
        why = "a kink (of ReLU, say) or a long sum rounds otherwise"
        self.notes.append(f"Judged in float64, as {why}: {which}.")

    def _trained(self) -> list[str]:
        """Biases that train in the original and that the candidate has no more."""
        return [name for name in self.without if not self._is_rounding(name)]

    def finish(self, blank: Measurement) -> Measurement:
        for name in self._trained():
            bias = name.removeprefix("gradient of ")
            self._problem(f"The candidate trains without {bias}, which has a gradient in the original")
        if self.lacking:
            self.notes.append(f"The candidate lacks, not compared: {', '.join(self.lacking)}.")
        for name in self.unmatched:
            written = name.replace(" (changed", " is changed").rstrip(")")
            self.notes.append(
                f"{written} by the original, and whether a file does so wasn't looked at: take its outputs."
            )
        outputs = tuple(self._difference(name, compared) for name, compared in self.compared.items())
        data = {item.name: getattr(blank, item.name) for item in fields(blank)}
        data |= {"outputs": outputs, "problems": tuple(self.problems), "notes": (*blank.notes, *self.notes)}
        return Measurement(**data)

    def _difference(self, name: str, compared: _Compared) -> OutputDifference:
        slices = compared.error.slices
        worst = self.slices[name].worst(slices) if slices is not None else None
        return OutputDifference(
            noise=self.noises[name],
            max_error=compared.error.largest,
            rms_error=compared.error.rms,
            mismatches=compared.mismatches,
            problems=tuple(compared.problems),
            where=compared.where,
            frontier=compared.frontier,
            calls=tuple(compared.calls),
            slice=worst.where if worst else "",
            slice_error=worst.error if worst else 0.0,
            slice_noise=worst.noise if worst else 0.0,
        )

    def _matched(self, kept: Kept, got: Observation) -> Iterator[tuple[str, torch.Tensor]]:
        expected = kept.own.of_kind("output")
        if self.flat:
            values = [got.values[name] for name in got.of_kind("output")]
            if len(values) != len(expected):
                self._problem(f"The candidate gives {len(values)} tensors and the original {len(expected)}")
                return
            yield from zip(expected, values, strict=True)
        else:
            yield from ((name, got.values[name]) for name in expected)
        for name, kind in kept.own.kinds.items():
            if kind == "output":
                continue
            if kind == "input" and self.flat:
                # What a file is measured by, here and from its bundle, are its outputs.
                self.unmatched[name] = None
            elif name in got.values:
                yield name, got.values[name]
            elif kind == "input":
                self._problem(f"{name.replace(' (changed', ' is changed').rstrip(')')} by the original only")
            elif name in self.moved.gradients:
                self.without[name] = None
            else:
                self.lacking[name] = None

    def _is_rounding(self, name: str) -> bool:
        """Whether a gradient is nothing but what rounding leaves of a sum that is zero."""
        noise = self.noises[name]
        if noise.signal is not None or _is_hardly_more(noise.rms, noise.noise_rms):
            return True
        # Where nothing more exact than the original is known, its noise is one sample of few numbers; what is summed is of
        # the size of other gradients.
        step = unit(getattr(torch, noise.dtype))
        largest = max(other.rms for other in self.noises.values() if other.kind == noise.kind)
        return step <= unit(torch.float32) and noise.rms <= _LEFT_OF_A_SUM * step * largest

    def _compare(self, kept: Kept, name: str, value: torch.Tensor) -> None:
        slices = Slices() if name in self.slices else None
        compared = self.compared.setdefault(name, _Compared(Pool(slices=slices)))
        own, truth, unstable = kept.own.values[name], kept.truth.values[name], kept.unstable[name]
        if problem := _incomparable(own, value):
            _append_once(compared.problems, f"{problem} at {kept.where}")
            return
        if (bias := self.moved.means.get(name)) is not None:
            own, truth = (wide(own) - bias).to(own.dtype), wide(truth) - bias
        if is_exact(own):
            wrong = int(((own != value) & ~unstable).sum())
            compared.mismatches += wrong
            compared.where = compared.where or (kept.where if wrong else "")
            if self.in_detail:
                agreement, undecided = agreement_of_integers(value, own, unstable)
                compared.calls.append(
                    CallFigures(
                        kept.batch_size, kept.draw, agreement=agreement, undecided=undecided, sizes=dict(kept.sizes)
                    )
                )
            return
        plain: torch.Tensor | None = None
        target = truth
        if not all_finite(own, value, truth):
            odd_own, odd_value = special(own), special(value)
            other = (odd_own != odd_value) & ~unstable
            if count := int(other.sum()):
                where = f"({count} at {kept.where})"
                _append_once(compared.problems, f"NaN or inf in other places than the original {where}")
            plain = (odd_own == 0) & (odd_value == 0)
            # Where only the float64 run overflows or doesn't, the original's own number is the best there is.
            target = torch.where(special(truth) == 0, wide(truth), wide(own))
        before = compared.error.largest
        errors = distance(value, target)
        compared.error.add(errors, plain, of=own)
        if compared.error.largest > before:
            compared.where = kept.where
        if self.in_detail:
            marked: Any = ... if plain is None else plain
            compared.calls.append(
                CallFigures(
                    kept.batch_size,
                    kept.draw,
                    **errors_between(errors[marked], value[marked], target[marked]),
                    **self._agreement(kept, name, value, target),
                    sizes=dict(kept.sizes),
                )
            )
            del errors
            compared.frontier = frontier(distance(value, own)[marked], wide(own)[marked].abs(), compared.frontier)

    def _agreement(self, kept: Kept, name: str, value: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        if kept.own.kinds.get(name) != "output" or not has_classes(name, value):
            return {}
        agreement, undecided = top1_agreement(value, target, self.noises[name].noise)
        return {"agreement": agreement, "undecided": undecided}

    def _problem(self, sentence: str) -> None:
        _append_once(self.problems, sentence)


def _times_off(error: float, noise: float) -> float:
    return error / noise if noise else math.inf if error else 0.0


def _is_beyond(error: Pool, noise: OutputNoise) -> bool:
    largest, rms = noise.allowed(FACTOR)
    return error.largest > largest or error.rms > rms


def _at_least(noise: OutputNoise, moved: Pool) -> OutputNoise:
    """The noise, no less than what more samples moved."""
    return replace(
        noise,
        response=max(noise.response, moved.largest),
        response_rms=max(noise.response_rms, moved.rms),
        noise=max(noise.noise, moved.largest),
        noise_rms=max(noise.noise_rms, moved.rms),
    )


def _is_hardly_more(rms: float, noise_rms: float) -> bool:
    return 4 * noise_rms > rms


def _sizes_of(samples: Samples, batch_sizes: Sequence[int] | None, mode: str) -> list[int | None]:
    """The batch sizes to run, the given one first unless others are asked for."""
    if batch_sizes is not None and not batch_sizes:
        raise UsageError("batch_sizes is empty: there would be nothing to compare.")
    given = samples.batch_size
    if not samples.dynamic or given is None:
        return [given]
    if batch_sizes is not None:
        return list(dict.fromkeys(batch_sizes))
    return [given, given + 1] if mode == "training" else list(dict.fromkeys((given, *BATCH_SIZES)))


def _draws_of(draws: int | None, sizes: Sequence[int | None]) -> int:
    if draws is None:
        # Of one call alone it can't be told whether the outputs go by the inputs.
        return 1 if len(sizes) > 1 else 2
    if not isinstance(draws, int) or draws < 1:
        raise UsageError(f"draws must be 1 or more, not {draws!r}.")
    return draws


def _together(module: Any) -> list[list[torch.Tensor]]:
    """The buffers and attributes of a module that lie in each other's memory, without any that has gradients."""
    modules = reachable_modules(module) if isinstance(module, nn.Module) else []
    held = [place.tensor for place in places_in(("", module) for module in modules)]
    groups = groups_of(tensor for tensor in held if not isinstance(tensor, nn.Parameter))
    return [group for group in groups if len(group) > 1 and not any(one.requires_grad for one in group)]


@contextmanager
def _all_of(modes: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


@contextmanager
def _silent() -> Iterator[None]:
    """The extra runs don't repeat the warnings of the first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _another_answer(own: Observation, other: Observation) -> str | None:
    if difference := first_difference(own.structure, other.structure):
        return difference
    for name, value in own.values.items():
        twin = other.values.get(name)
        if twin is None:
            return f"{name} is missing"
        if twin.shape != value.shape:
            return f"{name} has the shape {tuple(twin.shape)} and not {tuple(value.shape)}"
        if is_exact(twin) != is_exact(value) or twin.is_complex() != value.is_complex():
            return f"{name} is {twin.dtype} beside {value.dtype}"
    return None


def _within_range(own: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """The truth, with the original's own numbers where they are finite and those of float64 beyond its dtype.

    A mask filled with `torch.finfo(x.dtype).min` is of another size in float64.
    """
    if is_exact(own) or own.dtype == truth.dtype or not own.numel():
        return truth
    sizes = truth.abs()
    if not bool((beyond := sizes > torch.finfo(own.dtype).max).any()):
        return truth
    return torch.where(beyond & sizes.isfinite() & own.isfinite(), own.to(truth.dtype), truth)


def _incomparable(own: torch.Tensor, value: torch.Tensor) -> str | None:
    if value.shape != own.shape:
        return f"the shape is {tuple(value.shape)} and should be {tuple(own.shape)}"
    if value.dtype != own.dtype:
        return f"the dtype is {_short(value.dtype)} and should be {_short(own.dtype)}"
    return None


def _is_opaque(module: nn.Module) -> bool:
    """Whether no function mode sees what a module computes."""
    return isinstance(module, torch.jit.ScriptModule)


def _is_small(observation: Observation) -> bool:
    """Whether one perturbed run moves too few numbers to tell how far rounding moves them."""
    return sum(value.numel() for value in observation.values.values()) < _FEW


def _nearer(own: torch.Tensor | None, value: torch.Tensor, finer: torch.Tensor | None) -> torch.Tensor:
    """Integers of a coarse run, with the original's own where a finer one gives those."""
    if own is None or finer is None or not is_exact(own) or not own.shape == value.shape == finer.shape:
        return value
    return torch.where(own == finer, own, value)


def _pool_finite(pool: Pool, own: torch.Tensor, other: torch.Tensor) -> None:
    plain = None if all_finite(own, other) else (special(own) == 0) & (special(other) == 0)
    pool.add(distance(own, other), plain, of=own)


def _sources_of(target: object) -> list[Source]:
    return [Source.of(*named) for named in named_tensors(target)] if isinstance(target, nn.Module) else []


def _are_same_calls(a: Call, b: Call) -> bool:
    first, second = (leaves_of((call.args, call.kwargs)) for call in (a, b))
    if first.structure != second.structure:
        return False
    pairs = zip(first.tensors(), second.tensors(), strict=True)
    return all(same_values(one, other) for (_, one), (_, other) in pairs)


def _shared_rows(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The rows that two tensors of different batch sizes both have; None where they can't be compared."""
    if a.shape == b.shape:
        return a, b
    if a.layout is not torch.strided or a.dim() == 0 or b.dim() == 0 or a.shape[1:] != b.shape[1:]:
        return None
    rows = min(len(a), len(b))
    return a[:rows], b[:rows]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is torch.strided and b.layout is torch.strided:
        return torch.equal(a, b)
    # A sparse tensor may be far larger than memory: only what it holds is looked at.
    first, second = (tensor.to_sparse_coo().coalesce() for tensor in (a, b))
    return torch.equal(first.indices(), second.indices()) and torch.equal(first.values(), second.values())


def _device_of(target: Any, call: Call) -> str:
    parameters = target.parameters() if isinstance(target, nn.Module) else ()
    inputs = (tensor for _, tensor in leaves_of((call.args, call.kwargs)).tensors())
    return next((str(tensor.device) for tensor in itertools.chain(parameters, inputs)), "cpu")


def _mixed(*numbers: int) -> int:
    """One seed from several numbers; neighbours give unlike seeds."""
    seed = 0
    for number in numbers:
        seed = (seed * 1000003 + number + 0x9E3779B9) % (1 << 62)
    return seed


def _spelt(sizes: Sizes) -> str:
    return "".join(f"{name} {size}, " for name, size in sizes)


def _call_of(kept: Kept, samples: Samples | None) -> Call | None:
    if kept.call is not None or samples is None:
        return kept.call
    return samples.at(kept.batch_size, kept.draw, kept.sizes)


def _first_line(error: BaseException) -> str:
    if lack := lack_of_memory(error):
        return lack
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # TorchScript says what happened at the end, below its own trace.
    line = lines[-1] if "TorchScript interpreter" in lines[0] else lines[0]
    return f"{type(error).__name__}: {line.rstrip('.')}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _append_once(sentences: list[str], sentence: str) -> None:
    if sentence not in sentences:
        sentences.append(sentence)
