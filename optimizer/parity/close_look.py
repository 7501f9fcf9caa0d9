"""Further measurements for a candidate whose error is a little larger than the first samples of rounding allow."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Set
from dataclasses import replace

from torch import nn

from optimizer.model import Runs, is_script, one_at_a_time, pinned_settings
from optimizer.parity.at_precision import errors_at
from optimizer.parity.comparison import DOUBTFUL, Comparison, is_beyond
from optimizer.parity.modes import in_float64, perturbed
from optimizer.parity.noise import MORE_SAMPLES, RoundingNoise
from optimizer.parity.pools import Pool
from optimizer.parity.results import OutputNoise, RowMeasurement
from optimizer.parity.tensors import all_finite, distance
from optimizer.parity.verdict import FACTOR, in_units_of
from passes.base import Precision

logger = logging.getLogger(__name__)

# The numbers of further samples start here; those of the first samples are smaller.
_OTHER_SEEDS = 1000


def closer_noises(
    noise: RoundingNoise, noises: Mapping[str, OutputNoise], precision: Precision | None
) -> tuple[dict[str, OutputNoise], dict[str, Pool]]:
    """The noises over all calls and over more samples; and the response in these samples alone.

    Args:
        precision: the half precision of the candidate; None if it has none.
    """
    found = dict(noises)
    with one_at_a_time, pinned_settings():
        for name, more in noise.measure_the_rest().items():
            before = found[name]
            largest, rms = max(before.noise, more.noise), max(before.noise_rms, more.noise_rms)
            found[name] = replace(before, noise=largest, noise_rms=rms)
        seen = noise.more_samples() if precision is None else errors_at(noise, precision, MORE_SAMPLES)
    return found | {name: _at_least(found[name], pool) for name, pool in seen.items()}, seen


def settle_kinks(noise: RoundingNoise, candidate: Runs, comparison: Comparison) -> None:
    """Judge gradients in float64 if a kink may explain their error.

    At a kink (ReLU at zero, the maximum of a window) the slope jumps. If a number rounds to the other side, its
    gradient changes, and is as right as the original's. One number in a million is that close to a kink, and one is
    enough. Large errors of long sums that a kernel adds sequentially are as rare in the samples of rounding. Neither
    occurs in float64, so there the candidate's gradients must equal the true ones.
    """
    names = comparison.kinked()
    if not names:
        return
    errors = _errors_in_float64(noise, candidate, names, training=True)
    if errors:
        comparison.settle(errors)


def hold_to_algebra(
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
        moved = _more_response(noise, excused) if errors else {}
    noises = {name: _at_least(few[name], moved[name]) for name in excused & errors.keys() & moved.keys()}
    wrong = {name: each for name, each in noises.items() if is_beyond(errors[name], each)}
    comparison.noises = {**comparison.noises, **wrong}
    if wrong:
        why = "float64 has the same error, so rounding inside the model can't explain it"
        comparison.notes.append(
            f"Judged only by the response to changes of one ulp, because {why}: {', '.join(wrong)}."
        )


def rows_may_be_rounding(seen: RowMeasurement | None, noises: Mapping[str, OutputNoise]) -> bool:
    """Whether rounding that the first samples don't show may explain a difference between rows."""
    if seen is None or seen.problem or any(one.mismatches for one in seen.outputs):
        return False
    beyond = [
        max(in_units_of(noise.noise, one.max_difference), in_units_of(noise.noise_rms, one.rms_difference))
        for one in seen.outputs
        if (noise := noises[one.name]).deterministic
    ]
    return 2 * FACTOR < max(beyond, default=0.0) <= DOUBTFUL * FACTOR


def _at_least(noise: OutputNoise, moved: Pool) -> OutputNoise:
    """The noise, raised to the response in further samples."""
    return replace(
        noise,
        response=max(noise.response, moved.largest),
        response_rms=max(noise.response_rms, moved.rms),
        noise=max(noise.noise, moved.largest),
        noise_rms=max(noise.noise_rms, moved.rms),
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
        values = one.settled(seen.values)
        for name in names & one.own.values.keys():
            own, truth, value = one.own.values[name], one.truth.values[name], values.get(name)
            if value is None or value.shape != own.shape or not all_finite(own, truth, value):
                return {}
            errors[name].add(distance(value, truth), of=own)
    return errors


def _more_response(noise: RoundingNoise, names: Set[str]) -> dict[str, Pool]:
    """The response to one ulp in inputs and parameters, in several samples; empty if it can't be measured."""
    moved = {name: Pool() for name in names}
    for one, number in itertools.product(noise.calls, range(MORE_SAMPLES)):
        if not noise.can_be_perturbed:
            return {}
        call = noise.original.inputs_of(one)
        other = one.settled(perturbed(noise.original, one, call, _OTHER_SEEDS + number, training=False).values)
        for name in names & one.own.values.keys():
            moved[name].add_distance(one.own.values[name], other[name])
    return moved
