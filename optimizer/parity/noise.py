"""Measure the rounding noise of the original: its error against float64, and its response to a change of one ulp."""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Mapping

import torch

from optimize_export.elementwise import all_finite, is_exact, special, unit
from optimize_export.wording import append_once, dtype_name, error_summary
from optimizer.model import Call, first_difference, is_script, modules_of, pinned_settings
from optimizer.parity.differences import Pool, SliceNoise, Slices, floors, lost_in_noise, slice_noise
from optimizer.parity.observe import Observation
from optimizer.parity.original import Original, OriginalCall, shared_rows
from optimizer.parity.results import OutputNoise
from optimizer.parity.rounding import in_float64, perturbed, rounded, run_in
from optimizer.parity.ties import BrokenTies, find_ties
from optimizer.parity.verdict import FACTOR, SLICE_FACTOR, no_signal

logger = logging.getLogger(__name__)

# A region with fewer numbers in its outputs is perturbed twice.
_FEW = 1 << 14
# A slice with fewer numbers doesn't show its rounding error: all of them may happen to be exact.
_LEAST_SAMPLES = 16
# Further samples of rounding for a candidate whose error is a little larger than the first samples allow.
MORE_SAMPLES = 8


class _Gathered:
    """The values and differences of one output, pooled over all calls."""

    def __init__(self, *, sliced: bool) -> None:
        # Magnitudes of the values, and their distances to the float64 truth, to the outputs with inputs and weights off
        # by one ulp, and to a second plain run.
        self.size, self.own_error, self.response, self.again = (
            Pool(slices=Slices() if sliced else None) for _ in range(4)
        )
        self.elements = 0
        # The number of elements of an integer output that differ in float64, and in a perturbed run.
        self.truth_ties = 0
        self.own_ties = 0
        self.exact_differs_again = False


class RoundingNoise:
    def __init__(self, original: Original, measured_at: frozenset[int | None] | None = None) -> None:
        self.original = original
        # The batch sizes that are run in float64 and perturbed; None for all.
        self.measured_at = measured_at
        # Whether `measured_at` is empty. Then nothing is measured, and the noise is the least of each dtype.
        self.is_least = measured_at is not None and not measured_at
        # The reason why the truth is the original in its own dtype and not in float64; "" for float64.
        self.refused = ""
        # Functions whose results weren't float64 in the float64 runs.
        self.lowered: set[str] = set()
        # Machine epsilon of the coarsest dtype in the original; 0 if it computes in float64 throughout.
        self.coarsest = 0.0
        self.notes: list[str] = []
        # Whether the original runs with inputs and weights off by one ulp.
        self.can_be_perturbed = True
        # Whether the original chooses or orders elements by scores, and whether equal scores may decide there, both as far as
        # it is known.
        self.chooses = self._may_meet_ties = False
        self._gathered: dict[str, _Gathered] = {}
        # The response to rounding at every operator, if the original computes in float64 and has no error against it.
        self._inside: dict[str, Pool] = {}

    def of(self, original: Original) -> RoundingNoise:
        """A copy for a twin of the original, which measures the further calls of the twin."""
        twin = copy.copy(self)
        twin.original, twin.notes, twin.lowered = original, list(self.notes), set(self.lowered)
        twin._gathered = copy.deepcopy(self._gathered)
        return twin

    @property
    def calls(self) -> list[OriginalCall]:
        """The calls that were run in float64 and perturbed."""
        return [one for one in self.original.calls if one.measured]

    def measure(self) -> None:
        """Run the chosen calls in float64 and perturbed, and the first call a second time.

        Calls that were measured before aren't run again. Afterwards, the unstable elements of each call are known, and
        the truth of the chosen calls.
        """
        original = self.original
        original.confirm_recorded()
        for one in original.calls:
            if one.unstable.keys() != one.own.values.keys():
                self._gather(one)
        if original.calls and not original.ran_twice:
            original.ran_twice = True
            self._run_again(original.calls[0])
        for one in original.calls:
            if not self.is_least and not one.measured and self._is_to_be_measured(one):
                self._measure(one)
        for one in original.calls:
            self._find_ties(one)
        original.check()
        self._refuse_another_computation()
        if self.refused:
            for one in original.calls:
                one.truth = one.own
            for gathered in self._gathered.values():
                gathered.own_error = Pool()
        for one in original.calls:
            for name, own in one.own.values.items():
                if is_exact(own):
                    one.unstable[name] |= own != one.truth.values[name]
        if self.calls and not self.refused and not self.coarsest:
            self._inside = self._rounded_inside()

    def note_on_reference(self) -> list[str]:
        """A note if the reference isn't float64 throughout."""
        if self.refused:
            return [f"The reference is the original in its own dtype, because {self.refused}."]
        if self.lowered:
            names = ", ".join(sorted(self.lowered))
            return [f"Computed in a lower precision than float64 in the reference: {names}."]
        return []

    def measure_the_rest(self) -> dict[str, OutputNoise]:
        """Measure the other calls too, and return the noise over all calls; empty if there are no others."""
        rest = [one for one in self.original.calls if not one.measured]
        for one in rest:
            self._measure(one)
        return self.of_outputs() if rest and not self.refused else {}

    def of_outputs(self) -> dict[str, OutputNoise]:
        return {name: self._noise_of(name, gathered) for name, gathered in self._gathered.items()}

    def of_slices(self, noises: Mapping[str, OutputNoise]) -> dict[str, SliceNoise]:
        """The noise of channels, columns and bands of magnitude, for outputs where some are far quieter than the whole.

        Empty if the noise can't be measured: without float64 or perturbation, or in TorchScript.
        """
        if self.refused or not self.can_be_perturbed or any(map(is_script, modules_of(self.original.target))):
            return {}
        found: dict[str, SliceNoise] = {}
        for name, gathered in self._gathered.items():
            own = next(one.own.values[name] for one in self.original.calls if name in one.own.values)
            pools = (gathered.own_error, gathered.response, gathered.again, self._inside.get(name, Pool()))
            measured = [pool.slices for pool in pools if pool.slices and pool.slices.largest]
            if is_exact(own) or gathered.size.slices is None or not noises[name].deterministic:
                continue
            noise = slice_noise(gathered.size.slices, measured, own.dtype, least_samples=_LEAST_SAMPLES)
            if SLICE_FACTOR * noise.least() < FACTOR * noises[name].noise:
                found[name] = noise
        return found

    def more_samples(self) -> dict[str, Pool]:
        """The response of each output to rounding at every operator, in several samples of all measured calls.

        Empty for half precisions, because their kernels round once at the end and not at each step.
        """
        return {} if self.coarsest > unit(torch.float32) else self._rounded_inside(MORE_SAMPLES)

    def _is_to_be_measured(self, one: OriginalCall) -> bool:
        if one.sizes or one.key in self.original.asked:
            return True
        if self.measured_at is None or one.batch_size in self.measured_at or not self.calls:
            return True
        # Ties and the places of NaN differ from call to call.
        return any(is_exact(value) or not all_finite(value) for value in one.own.values.values())

    def _find_ties(self, one: OriginalCall) -> None:
        """Find the outputs of a call that equal scores choose or put in order, if the original chooses by scores."""
        if not self._may_meet_ties or one.knows_ties or self.original.mode != "inference":
            return
        one.knows_ties = True
        call, modes = self.original.inputs_of(one), [BrokenTies(last=True), BrokenTies(last=False)]
        seen: list[Observation] = []
        try:
            for mode in modes:
                seen.append(run_in(lambda module, mode=mode: mode, self.original, one, call=call, training=False))  # type: ignore[misc]
                if not mode.met:
                    self._may_meet_ties = mode.chooses
                    return
        except Exception as error:  # noqa: BLE001 - foreign code may raise because each operator is watched
            logger.debug("the run with other ties raised: %s", error)
            return
        last, first = (each.values for each in seen)
        outputs = {name: one.own.values[name] for name in one.own.of_kind("output")}
        one.ties, one.excluded = find_ties(outputs, first, last, modes[1].met)
        one.excluded_by = tuple(dict.fromkeys(tie.by for tie in modes[1].met))
        for name, mask in one.excluded.items():
            if is_exact(one.own.values[name]):
                one.unstable[name] |= mask

    def _gather(self, one: OriginalCall) -> None:
        for name, own in one.own.values.items():
            gathered = self._gathered.setdefault(name, _Gathered(sliced=one.own.kinds[name] == "output"))
            one.unstable[name] = torch.zeros(own.shape, dtype=torch.bool)
            if is_exact(own):
                gathered.elements += own.numel()
                continue
            gathered.size.add_sizes(own)

    def _run_again(self, one: OriginalCall) -> None:
        try:
            other = self.original.run_again(one)
        except Exception as error:  # noqa: BLE001 - the original is foreign code; the reason is reported
            self.notes.append(f"The original raises when it is run twice: {error_summary(error)}")
            return
        for name, own in one.own.values.items():
            value, gathered = other.values.get(name), self._gathered[name]
            if value is None or value.shape != own.shape:
                gathered.exact_differs_again = True
            elif is_exact(own):
                gathered.exact_differs_again |= not torch.equal(own, value)
            else:
                gathered.again.add_distance(own, value)

    def _measure(self, one: OriginalCall) -> None:
        one.measured = True
        call, training = self.original.inputs_of(one), self.original.with_gradients(one.draw)
        if not self.refused:
            one.truth = self._truth_of(one, call, training) or one.own
        self._find_ties(one)
        if one.truth is not one.own:
            one.truth.values = dict(one.aligned(one.truth.values))
        for name, own in one.own.values.items():
            gathered, truth = self._gathered[name], one.truth.values[name]
            if is_exact(own):
                gathered.truth_ties += int((own != truth).count_nonzero())
            else:
                gathered.own_error.add_distance(own, truth)
        # One perturbed run of a small region moves too few numbers to show the effect of rounding.
        is_small = sum(value.numel() for value in one.own.values.values()) < _FEW
        for number in range(2 if self.original.mode == "region" and is_small else 1):
            self._perturb(one, call, number, training)

    def _truth_of(self, one: OriginalCall, call: Call, training: bool) -> Observation | None:
        try:
            mode, truth = in_float64(self.original, one, call, training=training)
        except Exception as error:  # noqa: BLE001 - the original is foreign code; the reason is reported
            self.refused = f"the float64 run raised: {error_summary(error)}"
            # It may have raised before it came to such an operation.
            self.chooses = self._may_meet_ties = True
            return None
        self.lowered |= mode.lowered
        self.coarsest = max(self.coarsest, mode.coarsest)
        self.chooses |= mode.chooses
        self._may_meet_ties |= mode.chooses
        if reason := _another_answer(one.own, truth):
            self.refused = f"the float64 run computes something different: {reason}"
            return None
        truth.values = {name: _within_range(one.own.values[name], value) for name, value in truth.values.items()}
        return truth

    def _perturb(self, one: OriginalCall, call: Call, number: int, training: bool) -> None:
        if not self.can_be_perturbed:
            return
        try:
            other = perturbed(self.original, one, call, number, training=training)
        except Exception as error:  # noqa: BLE001 - the original is foreign code; the reason is reported
            self.can_be_perturbed = False
            self.notes.append(f"The response to a change of one ulp couldn't be measured: {error_summary(error)}")
            return
        if _another_answer(one.own, other) is not None:
            return
        values = one.aligned(other.values)
        for name, own in one.own.values.items():
            value, gathered = values[name], self._gathered[name]
            if is_exact(own):
                one.unstable[name] |= own != value
                gathered.own_ties += int((own != value).count_nonzero())
                continue
            one.unstable[name] |= special(own) != special(value)
            gathered.response.add_distance(own, value)

    def _refuse_another_computation(self) -> None:
        """Refuse the float64 run if rounding can't explain its difference, as when it draws other random numbers."""
        if self.refused:
            return
        explained: dict[str, Pool] | None = None
        for name, gathered in self._gathered.items():
            if not self._repeats(gathered):
                continue
            # Ties are rare: many of them mean a different computation.
            if gathered.truth_ties > 8 + gathered.elements / 50 + 8 * gathered.own_ties:
                self.refused = (
                    f"the float64 run computes something different: {name} differs in {gathered.truth_ties} of "
                    f"{gathered.elements} elements"
                )
                return
            rounding = max(gathered.response.rms, gathered.again.rms, self.coarsest * gathered.size.rms)
            own = gathered.own_error.rms
            if own <= max(64 * rounding, math.sqrt(self.coarsest) * gathered.size.rms):
                continue
            # Where numbers cancel, rounding at the operators has a far larger effect than at inputs and weights.
            explained = self._rounded_inside() if explained is None else explained
            rounding = max(rounding, explained.get(name, Pool()).rms)
            if own > 64 * rounding:
                self.refused = (
                    f"the float64 run computes something different: {name} differs by {own:.1e}, and rounding "
                    f"explains only {rounding:.1e}"
                )
                return

    def _rounded_inside(self, times: int = 1) -> dict[str, Pool]:
        """The response of each output to rounding at every operator, at all measured calls, `times` samples each."""
        responses: dict[str, Pool] = {}
        for one, number in itertools.product(self.calls, range(times)):
            if not self.can_be_perturbed:
                return {}
            call = self.original.inputs_of(one)
            try:
                with pinned_settings():
                    count, other = rounded(self.original, one, call, number)
            except Exception as error:  # noqa: BLE001 - the original is foreign code; the reason is reported
                note = f"The response to internal rounding couldn't be measured: {error_summary(error)}"
                append_once(self.notes, note)
                continue
            values = one.aligned(other.values)
            for name, own in one.own.values.items() if count else ():
                value = values.get(name)
                if value is not None and not is_exact(own) and value.shape == own.shape:
                    responses.setdefault(name, Pool(slices=Slices())).add_distance(own, value)
        return responses

    def _repeats(self, gathered: _Gathered) -> bool:
        """Whether an output is deterministic, apart from sums in a different order, as on a GPU."""
        eps = self.coarsest or unit(torch.float32)
        bound = max(8 * eps, 0.1 * math.sqrt(eps)) * gathered.size.rms
        return not gathered.exact_differs_again and gathered.again.rms <= bound

    def _noise_of(self, name: str, gathered: _Gathered) -> OutputNoise:
        calls = self.original.calls
        sample = next(one for one in calls if name in one.own.values)
        own = sample.own.values[name]
        scale, rms = gathered.size.largest, gathered.size.rms
        floor, floor_rms = floors(own.dtype, scale, rms)
        deterministic = self._repeats(gathered)
        again = gathered.again if deterministic else Pool()
        responses = (gathered.response, self._inside.get(name, Pool()), again)
        response, response_rms = max(one.largest for one in responses), max(one.rms for one in responses)
        noise_rms = max(gathered.own_error.rms, response_rms, floor_rms)
        return OutputNoise(
            name=name,
            kind=sample.own.kinds[name],
            dtype=dtype_name(own.dtype),
            scale=scale,
            rms=rms,
            own_error=gathered.own_error.largest,
            own_error_rms=gathered.own_error.rms,
            response=response,
            response_rms=response_rms,
            noise=max(gathered.own_error.largest, response, floor),
            noise_rms=noise_rms,
            signal=missing_signal(self.original, name, rms, noise_rms),
            deterministic=deterministic,
            tied=sum(int(one.unstable[name].count_nonzero()) for one in calls if name in one.unstable),
        )


def _another_answer(own: Observation, other: Observation) -> str | None:
    """The first difference in structure, shape or kind of dtype; None where there is none."""
    if difference := first_difference(own.structure, other.structure):
        return difference
    for name, value in own.values.items():
        twin = other.values.get(name)
        if twin is None:
            return f"{name} is missing"
        if twin.shape != value.shape:
            return f"{name} has the shape {tuple(twin.shape)} instead of {tuple(value.shape)}"
        if is_exact(twin) != is_exact(value) or twin.is_complex() != value.is_complex():
            return f"{name} is {twin.dtype} instead of {value.dtype}"
    return None


def _within_range(own: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """The truth, with the original's finite numbers in place of numbers beyond the range of the original's dtype.

    A mask filled with `torch.finfo(x.dtype).min` has another value in float64.
    """
    if is_exact(own) or own.dtype == truth.dtype or not own.numel():
        return truth
    sizes = truth.abs()
    if not bool((beyond := sizes > torch.finfo(own.dtype).max).any()):
        return truth
    return torch.where(beyond & sizes.isfinite() & own.isfinite(), own.to(truth.dtype), truth)


def missing_signal(original: Original, name: str, rms: float, noise_rms: float) -> str | None:
    """Why an output proves nothing; None if it proves something.

    Args:
        rms: root mean square of the output, 0 for integers; infinite if it isn't known.
        noise_rms: of its rounding noise.
    """
    here = [one for one in original.calls if name in one.own.values]
    values = [one.own.values[name] for one in here]
    exact = is_exact(values[0])
    if sum(value.numel() for value in values) == 0:
        return "empty"
    if exact and all(
        (mask := one.unstable.get(name)) is not None and bool(mask.all())
        for one, value in zip(here, values, strict=True)
        if is_exact(value) and value.numel()
    ):
        return "decided by rounding alone in every element"
    if not exact and all(name in one.excluded and bool(one.excluded[name].all()) for one in here):
        return "chosen by equal scores alone in every element"
    if not exact and all(
        not all_finite(value) and bool((special(value) != 0).all()) for value in values if value.numel()
    ):
        return "NaN or infinite in every element"
    if rms in (0.0, math.inf) and all(not bool(value.any()) for value in values):
        return "all zero"
    if not exact and lost_in_noise(rms, noise_rms):
        return "hardly larger than its rounding noise"
    if (
        not original.inputs_vary
        or len(original.calls) < 2
        or original.calls[0].own.kinds.get(name) not in ("output", "number")
    ):
        return None
    changed = _change(original, name)
    if changed is None:
        return None
    if changed.largest == 0:
        return "the same for every input"
    return "changed less by its inputs than by rounding" if not exact and changed.rms <= noise_rms else None


def why_no_signal(original: Original) -> str | None:
    """Why the outputs prove nothing, as far as it shows without measured noise; None if they may prove something."""
    own = original.calls[0].own
    names = [*own.of_kind("output"), *own.of_kind("number")]
    reasons = {name: why for name in names if (why := missing_signal(original, name, math.inf, 0.0)) is not None}
    return no_signal(reasons) if reasons and len(reasons) == len(names) else None


def gives_the_same(original: Original) -> bool:
    """Whether an output is the same at all calls, though their inputs differ."""
    if not original.inputs_vary or not original.calls:
        return False
    changes = (_change(original, name) for name in original.calls[0].own.of_kind("output"))
    return any(change is not None and change.largest == 0 for change in changes)


def _change(original: Original, name: str) -> Pool | None:
    """The change of an output between successive calls, in the rows that they share; None if the other dims differ."""
    here = [one.own.values[name] for one in original.calls if name in one.own.values and not one.sizes]
    pairs = [shared_rows(a, b) for a, b in itertools.pairwise(here)]
    change = Pool()
    for pair in pairs:
        if pair is None:
            return None
        if is_exact(pair[0]):
            change.add((pair[0] != pair[1]).to(torch.float64), of=pair[0])
        else:
            change.add_distance(*pair)
    return change if pairs else None
