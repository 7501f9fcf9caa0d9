"""The reference for candidates: the original's outputs, their float64 truth and their rounding noise."""

from __future__ import annotations

import copy
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from optimize_export.elementwise import all_finite, distance, is_exact, special
from optimize_export.errors import ParityError, UsageError
from optimizer.model import Call, Runs, Sizes, is_script, one_at_a_time, pinned_settings
from optimizer.parity.comparison import DOUBTFUL, Comparison, is_beyond
from optimizer.parity.differences import Pool
from optimizer.parity.half_precision import errors_at, noise_at
from optimizer.parity.noise import MORE_SAMPLES, RoundingNoise
from optimizer.parity.observe import Flatten, Observation, observe
from optimizer.parity.orders import Orders, RowOrder, find_orders
from optimizer.parity.original import Original, OriginalCall, without_warnings
from optimizer.parity.results import Measurement, OutputNoise, RowMeasurement
from optimizer.parity.rounding import ModeOf, in_float64, perturbed, run_in
from optimizer.parity.rows import Batch, Rows, measure_rows
from optimizer.parity.verdict import FACTOR, allowed_by, judge_rows, ratio_of
from passes.base import DeclaredError, Precision

logger = logging.getLogger(__name__)

# The numbers of further samples start here; those of the first samples are smaller.
_OTHER_SEEDS = 1000


class Reference:
    """The outputs of the original with their truth and noise; any number of candidates can be compared with it.

    Outputs are kept on the CPU; inputs are made again from the samples.
    """

    def __init__(self, original: Original, rounding: RoundingNoise, settings: dict[str, str], draws: int) -> None:
        rounding.measure()
        self.original = original
        self.target = original.target
        # The names of the parameters that the original writes to in forward.
        self.written = original.runs.written
        self.noises = rounding.of_outputs()
        # The noises of channels, columns and bands that are judged separately.
        self.slices = rounding.of_slices(self.noises)
        # The sizes of open dims at which the original ran.
        self.taken = original.taken
        self._rounding = rounding
        self._precision: Precision | None = None
        # The noises before `refine_noise`; None if it wasn't called.
        self._first_noises: dict[str, OutputNoise] | None = None
        blank = original.blank(settings, draws)
        self.blank = replace(
            blank,
            notes=(
                *blank.notes,
                *rounding.notes,
                *original.notes_on_failures(),
                *rounding.note_on_reference(),
                *_notes_on_outputs(original, self.noises),
            ),
            reference="own dtype" if rounding.refused or rounding.is_least else "float64",
            reference_reason=rounding.refused,
        )

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return self.blank.batch_sizes

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(name for name, noise in self.noises.items() if noise.kind == "output")

    @property
    def precision(self) -> str:
        """ "bfloat16" or "float16" if the noise is the original's error at that precision; "" otherwise."""
        return self.blank.precision

    @property
    def truth_in_float64(self) -> bool:
        """Whether the truth is the original in float64 and not in its own dtype."""
        return self.blank.reference == "float64"

    @property
    def draws_random_numbers(self) -> bool:
        return any(one.own.draws for one in self.original.calls)

    @property
    def undecided(self) -> dict[int, float | None]:
        """The outputs that equal scores put in order or choose, by index.

        If they choose elements of an output, its value is the share of undecided elements, else None.
        """
        names, chosen, counts, elements = self.output_names, set[str](), Counter[str](), Counter[str]()
        for one in self.original.calls:
            chosen |= one.excluded.keys()
            for name in names:
                if name in one.own.values:
                    counts[name] += int(one.undecided(name).count_nonzero())
                    elements[name] += one.own.values[name].numel()
        shares = {i: counts[name] / elements[name] for i, name in enumerate(names) if counts[name]}
        return {i: share if names[i] in chosen else None for i, share in shares.items()}

    def why_not(self, size: str | None) -> str | None:
        """The first error of the original at another size, with its place; None if there was none.

        Args:
            size: the name of the size; None for the batch.
        """
        return self.original.why.get(() if size is None else (size,))

    def less_precise(self, by: Precision | DeclaredError) -> Reference:
        """The reference for a candidate that computes at another precision, or has an error that a pass declares."""
        return self.allowing(by) if isinstance(by, DeclaredError) else self.at_precision(by)

    def at_precision(self, precision: Precision) -> Reference:
        """The reference for a candidate in half precision, whose noise is the original's error at that precision.

        The truth stays, and so does the noise where it is larger.

        Raises:
            UsageError: the original isn't a module, so its float32 parts have no paths.
        """
        # Close scores are equal at that precision.
        twin = self.in_orders(self.find_orders().rows)
        with one_at_a_time:
            errors = errors_at(twin._rounding, precision)
        for name, noise in self.noises.items():
            twin.noises[name] = noise_at(twin._rounding, precision, noise, errors.get(name))
        notes = (*self.blank.notes, *twin._rounding.notes)
        twin.blank = replace(self.blank, precision=precision.name, notes=notes)
        twin.slices = {
            name: noise.raised_to(errors[name].slices) for name, noise in self.slices.items() if name in errors
        }
        twin._precision = precision
        return twin

    def allowing(self, declared: DeclaredError) -> Reference:
        """The reference for a candidate with an error that a pass declares, on top of rounding."""
        twin = self._twin()
        for name, noise in self.noises.items():
            if not noise.is_exact:
                twin.noises[name] = replace(noise, declared=noise.declared + declared.max_error * noise.scale)
        note = f"{declared.by} declares an error of at most {declared.max_error:g} of an output's largest magnitude."
        twin.blank = replace(self.blank, notes=(*self.blank.notes, note))
        twin.slices = {}
        return twin

    def _twin(self) -> Reference:
        twin = copy.copy(self)
        twin.original = self.original.twin()
        twin._rounding = self._rounding.of(twin.original)
        twin._rounding.notes = []
        twin.noises, twin._first_noises = dict(self.noises), None
        return twin

    def compare(
        self, candidate: Callable[..., Any], *, flatten: Flatten | None = None, rows: Rows | None = None
    ) -> Measurement:
        """Run a candidate at the same calls with the same random seeds; an exception becomes a problem in the result.

        Args:
            rows: from `independent_rows`; these rows are also run alone and among other rows.
            flatten: maps (args, kwargs) to flat tensors, for a candidate that takes flat tensors and returns one tensor
                or a tuple of them. Outputs are then matched by their order, and the structure isn't compared.
        """
        # Further samples are used only if the candidate's errors need them. Regions need no details, because no user
        # sets a tolerance for them.
        noises, in_detail = self.first_noises(), self.original.samples is not None
        comparison = Comparison(noises, flat=flatten is not None, in_detail=in_detail, slices=self.slices)
        runs = self.runs_of(candidate)
        with one_at_a_time, pinned_settings() as settings:
            for one in self.original.calls:
                training = self.original.with_gradients(one.draw) and flatten is None
                comparison.run(runs, one, self.original.inputs_of(one), flatten, training=training)
            if flatten is None and self.truth_in_float64:
                judge_gradients_in_float64(self._rounding, runs, comparison)
        seen = None if rows is None or comparison.problems else self.measure_rows(runs, rows, flatten)
        if not self._rounding.is_least and (comparison.is_doubtful() or rows_may_be_rounding(seen, self.noises)):
            self.refine_noise()
            comparison.noises, comparison.slices = dict(self.noises), self.slices
            if flatten is None and self._precision is None and self._first_noises and self.truth_in_float64:
                judge_again_in_float64(self._rounding, self._first_noises, runs, comparison)
        return replace(comparison.finish(self.blank), rows=seen, settings=settings)

    def measure_rows(self, runs: Runs, rows: Rows, flatten: Flatten | None = None) -> RowMeasurement:
        return measure_rows(rows, runs, flatten, names=self.output_names, seed=self.blank.seed)

    def refine_noise(self) -> None:
        """Measure the noise at all batch sizes and in more samples, the first time that a candidate needs it.

        Rounding errors before a division by a small number have a long-tailed distribution, as in a BatchNorm over a
        few similar rows: one sample may be ten times as large as the three before it.
        """
        if self._first_noises is not None:
            return
        self._first_noises, found = self.noises, dict(self.noises)
        with one_at_a_time, pinned_settings():
            for name, more in self._rounding.measure_the_rest().items():
                before = found[name]
                largest, rms = max(before.noise, more.noise), max(before.noise_rms, more.noise_rms)
                found[name] = replace(before, noise=largest, noise_rms=rms)
            if self._precision is None:
                seen = self._rounding.more_samples()
            else:
                seen = errors_at(self._rounding, self._precision, MORE_SAMPLES)
        self.noises = found | {name: _at_least(found[name], pool) for name, pool in seen.items()}
        slices = self.slices.items()
        self.slices = {name: each.raised_to(seen[name].slices) if name in seen else each for name, each in slices}

    def first_noises(self) -> dict[str, OutputNoise]:
        return self._first_noises or self.noises

    def runs_of(self, target: Callable[..., Any]) -> Runs:
        return Runs(target, in_eval=self.original.runs.in_eval, written=self.written)

    def find_orders(self) -> Orders:
        """The outputs that the original chooses or orders by scores, from runs of its largest call."""
        if not self._rounding.chooses:
            return Orders()
        one = max(
            self.original.calls, key=lambda one: sum(one.own.values[n].numel() for n in one.own.of_kind("output"))
        )
        call = self.original.inputs_of(one)

        def run(mode: ModeOf) -> dict[str, torch.Tensor]:
            try:
                seen = run_in(mode, self.original, one, call=call, training=False)
            except Exception as error:  # noqa: BLE001 - foreign code may raise where it gets rows in another order
                logger.debug("the run with rows in another order raised: %s", error)
                return {}
            return {name: seen.values[name] for name in seen.of_kind("output")}

        with one_at_a_time, pinned_settings():
            return find_orders(run)

    def in_orders(self, orders: Sequence[RowOrder]) -> Reference:
        """The reference for a lossy candidate, which may order rows with close scores otherwise."""
        twin = self._twin()
        for one in twin.original.calls:
            one.orders = orders
        return twin

    def run(self, call: Call) -> Observation:
        """The original's outputs at a further call, in the mode and under the settings of the compared calls."""
        with one_at_a_time, pinned_settings(), without_warnings(), self.original.runs.fresh() as module:
            return observe(module, call, seed=self.blank.seed)

    def outputs_at(self, asked: Sequence[tuple[int | None, Sizes]]) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        """The original's outputs at draw 0 of these batch sizes and sizes, in the order of the output's tree.

        None if it didn't run at one of them, isn't deterministic, or returns different structures.

        Args:
            asked: each a batch size, and the sizes of other open dims that differ from the given call.
        """
        at = {(one.batch_size, frozenset(one.sizes)): one for one in self.original.calls if one.draw == 0}
        found = [at.get((batch, frozenset(sizes))) for batch, sizes in asked]
        runs = [one.own for one in found if one is not None]
        changes = self.draws_random_numbers or not all(noise.deterministic for noise in self.noises.values())
        if changes or len(runs) < len(found) or any(own.structure != runs[0].structure for own in runs):
            return None
        return tuple(tuple(own.values[name] for name in own.of_kind("output")) for own in runs)

    def varying_dims(self) -> frozenset[tuple[int, int]]:
        """The dims of outputs whose sizes differ between calls of equal sizes; each is an output's index and a dim."""
        first: dict[Any, list[torch.Size]] = {}
        found: set[tuple[int, int]] = set()
        for one in self.original.calls:
            shapes = [one.own.values[name].shape for name in one.own.of_kind("output")]
            known = first.setdefault((one.batch_size, frozenset(one.sizes)), shapes)
            for index, (shape, other) in enumerate(zip(shapes, known, strict=False)):
                found |= {(index, dim) for dim, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b}
        return frozenset(found)

    def calls(self) -> Iterator[tuple[str, Call]]:
        """Each call with its batch size and draw in words."""
        return ((one.where, self.original.inputs_of(one)) for one in self.original.calls)

    def call_at(self, where: str) -> OriginalCall:
        """The call with this description, such as "batch size 3, draw 1"."""
        return next(one for one in self.original.calls if one.where == where)


def independent_rows(reference: Reference, *, atol: Mapping[str, float], rtol: Mapping[str, float]) -> Rows:
    """The rows of the calls, after a check that in the original no row depends on the other rows of its batch.

    Args:
        atol, rtol: the user's tolerances, by the reference's names of the outputs.

    Raises:
        UsageError: there is no batch of two rows or more, or no output that has rows.
        ParityError: a row of the original depends on the others.
    """
    rows = _rows_of(reference)
    seen = reference.measure_rows(reference.original.runs, rows)
    if rows_may_be_rounding(seen, reference.noises):
        reference.refine_noise()
    names = {name: name for name in reference.noises}
    report = judge_rows(seen, allowed_by(reference.noises.values(), names, atol, rtol), FACTOR)
    if not report.ok:
        raise ParityError(
            f"{report.problem}, in the original itself: its rows aren't independent, so leave out row independence, "
            "or fix the model."
        )
    return rows


def outputs_on(reference: Reference, call: Call) -> dict[str, torch.Tensor] | None:
    """The outputs of the original on a call, by name; None if it raises."""
    try:
        seen = reference.run(call)
    except Exception as error:  # noqa: BLE001 - the original is foreign code, and may refuse other sizes and values
        logger.debug("the original raises on another call: %s", error)
        return None
    return {name: seen.values[name] for name in seen.of_kind("output")}


def _rows_of(reference: Reference) -> Rows:
    original, samples = reference.original, reference.original.samples
    calls = [one for one in original.calls if one.draw == 0 and not one.sizes and (one.batch_size or 0) > 1]
    if not calls or samples is None:
        raise UsageError("Row independence needs a batch of two rows or more: add one.")
    batches = [
        Batch(one.batch_size or 0, original.inputs_of(one), samples.at(one.batch_size, 1), one.unstable)
        for one in calls
    ]
    outputs = [{name: one.own.values[name] for name in one.own.of_kind("output")} for one in calls]
    rows = Rows(batches, outputs)
    if not rows.with_rows:
        raise UsageError("No output has as many rows as the batch, so there are no rows to check.")
    # A file with a fixed batch can't be run on one row.
    sizes = reference.batch_sizes
    rows.alone = len(sizes) > 1 and (1 in sizes or outputs_on(reference, rows.one_row()) is not None)
    return rows


def rows_may_be_rounding(seen: RowMeasurement | None, noises: Mapping[str, OutputNoise]) -> bool:
    """Whether rounding that the first samples don't show may explain a difference between rows."""
    if seen is None or seen.problem or any(one.mismatches for one in seen.outputs):
        return False
    beyond = [
        ratio_of(noise, one.max_difference, one.rms_difference)
        for one in seen.outputs
        if (noise := noises[one.name]).deterministic
    ]
    return 2 * FACTOR < max(beyond, default=0.0) <= DOUBTFUL * FACTOR


def judge_gradients_in_float64(noise: RoundingNoise, candidate: Runs, comparison: Comparison) -> None:
    """Judge gradients in float64 if a kink may explain their error.

    At a kink (ReLU at zero, the maximum of a window) the slope jumps. If a number rounds to the other side, its
    gradient changes, and is as right as the original's. One number in a million is that close to a kink, and one is
    enough. Large errors of long sums that a kernel adds sequentially are as rare in the samples of rounding. Neither
    occurs in float64, so there the candidate's gradients must equal the true ones.
    """
    names = comparison.gradients_to_judge_in_float64()
    if not names:
        return
    errors = _errors_in_float64(noise, candidate, names, training=True)
    if errors:
        comparison.settle(errors)


def judge_again_in_float64(
    noise: RoundingNoise, few: Mapping[str, OutputNoise], candidate: Runs, comparison: Comparison
) -> None:
    """Judge an error more strictly again if float64 has it too, because internal rounding can't explain it then.

    More samples allow larger errors, and an error of that size may also come from a wrong weight. In float64, the
    weights of a correct candidate are wrong by one rounding at most, and its outputs by their response to one ulp.

    Args:
        few: the noises before more samples were taken.
    """
    if any(one.declared for one in few.values()) or noise.original.mode == "training":
        return
    if not isinstance(candidate.target, nn.Module) or is_script(candidate.target):
        return
    excused = comparison.beyond(few) - comparison.beyond(comparison.noises)
    if not excused:
        return
    with one_at_a_time, pinned_settings():
        errors = _errors_in_float64(noise, candidate, excused, training=False)
        responses = _more_response(noise, excused) if errors else {}
    noises = {name: _at_least(few[name], responses[name]) for name in excused & errors.keys() & responses.keys()}
    wrong = {name: each for name, each in noises.items() if is_beyond(errors[name], each)}
    comparison.noises = {**comparison.noises, **wrong}
    if wrong:
        why = "float64 has the same error, so rounding inside the model can't explain it"
        comparison.notes.append(
            f"Judged only by the response to changes of one ulp, because {why}: {', '.join(wrong)}."
        )


def _at_least(noise: OutputNoise, response: Pool) -> OutputNoise:
    """The noise, raised to the response in further samples."""
    return replace(
        noise,
        response=max(noise.response, response.largest),
        response_rms=max(noise.response_rms, response.rms),
        noise=max(noise.noise, response.largest),
        noise_rms=max(noise.noise_rms, response.rms),
    )


def _errors_in_float64(noise: RoundingNoise, candidate: Runs, names: Set[str], *, training: bool) -> dict[str, Pool]:
    """The errors of a candidate that runs in float64.

    Empty if it raises there, if a value is missing or isn't finite, or if it computes in a coarser dtype than the
    original, which float64 would hide.
    """
    errors = {name: Pool() for name in names}
    for one in noise.calls:
        if not names & one.own.values.keys():
            continue
        call = noise.original.inputs_of(one)
        try:
            mode, seen = in_float64(noise.original, one, call, training=training, runs=candidate)
        except Exception as error:  # noqa: BLE001 - the candidate is foreign code: its plain outputs are judged
            logger.debug("the candidate raised in float64: %s", error)
            return {}
        if mode.coarsest > noise.coarsest:
            return {}
        values = one.aligned(seen.values)
        for name in names & one.own.values.keys():
            own, truth, value = one.own.values[name], one.truth.values[name], values.get(name)
            if value is None or value.shape != own.shape or not all_finite(own, truth, value):
                return {}
            errors[name].add(distance(value, truth), of=own)
    return errors


def _more_response(noise: RoundingNoise, names: Set[str]) -> dict[str, Pool]:
    """The response to one ulp in inputs and parameters, in several samples; empty if it can't be measured."""
    responses = {name: Pool() for name in names}
    for one, number in itertools.product(noise.calls, range(MORE_SAMPLES)):
        if not noise.can_be_perturbed:
            return {}
        call = noise.original.inputs_of(one)
        other = one.aligned(perturbed(noise.original, one, call, _OTHER_SEEDS + number, training=False).values)
        for name in names & one.own.values.keys():
            responses[name].add_distance(one.own.values[name], other[name])
    return responses


def _notes_on_outputs(original: Original, noises: Mapping[str, OutputNoise]) -> list[str]:
    """Notes on outputs that aren't compared or prove nothing."""
    notes = []
    for noise in noises.values():
        if not noise.deterministic:
            notes.append(f"{noise.name} is not deterministic in the original and was not judged.")
        if noise.signal is not None and noise.kind == "output":
            notes.append(f"{noise.name} is {noise.signal} and proves nothing.")
        excluded = sum(
            int(one.excluded[noise.name].count_nonzero()) for one in original.calls if noise.name in one.excluded
        )
        if count := noise.tied - excluded * noise.is_exact:
            notes.append(
                f"{count} elements of {noise.name} weren't compared: rounding alone changes them in the original."
            )
    notes += _notes_on_ties(original.calls)
    for name in noises:
        values = (one.own.values[name] for one in original.calls if name in one.own.values)
        odd = (value for value in values if not is_exact(value) and not all_finite(value))
        if count := sum(int((special(value) == 1).count_nonzero()) for value in odd):
            notes.append(f"{name} of the original has NaN in {count} elements on these inputs.")
    return notes


def _notes_on_ties(calls: Sequence[OriginalCall]) -> list[str]:
    ordered, chosen, by = Counter[str](), Counter[str](), dict[str, set[str]]()
    for one in calls:
        for tie in one.ties:
            for name in tie.names:
                ordered[name] += int(tie.spread(tie.groups > 0, one.own.values[name]).count_nonzero())
                by.setdefault(name, set()).add(tie.by)
        for name, mask in one.excluded.items():
            chosen[name] += int(mask.count_nonzero())
            by.setdefault(name, set()).update(one.excluded_by)
    return [
        *(
            f"{count} elements of {name} were compared as sets: equal scores ({', '.join(sorted(by[name]))}) put "
            "them in order, and the original doesn't decide how."
            for name, count in ordered.items()
            if count
        ),
        *(
            f"{count} elements of {name} weren't compared: equal scores ({', '.join(sorted(by[name]))}) choose "
            "or order them, and the original doesn't decide how."
            for name, count in chosen.items()
        ),
    ]
