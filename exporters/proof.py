"""Compare an exported file with the model at every call: the loose check that chooses between routes.

It detects wrong captures (a frozen batch size or branch, a missing output), so that the next route is tried. It does
not judge numerical accuracy.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from exporters.base import Limit, LoadedArtifact, clones
from exporters.errors import RouteRefused, RuntimeCrashed, StructureError, WrongFile
from exporters.evidence import BATCH, Evidence, Shapes, TooLarge, by_place
from exporters.exported_program import Condition, guards_in_force, guards_refuse
from exporters.isolation import refusing, silent, undisturbed
from exporters.trace_conditions import conditions_at
from optimize_export.elementwise import distance, is_exact, special, wide
from optimize_export.relations import Relation
from optimize_export.wording import dtype_name

# Largest error that rounding could explain, relative to the largest value of the output.
_ROUNDING = {torch.float16: 2e-2, torch.bfloat16: 6e-2}
_ROUNDING_ELSEWHERE = 1e-3

# Largest error allowed at other batches, as a multiple of the error at the calls. A larger error means a different
# computation, even if the values are close (tanh GELU instead of erf GELU).
_ROUNDING_VARIES_BY = 64
# Every file is allowed this error at the calls, in ulps, when the bound for other batches is computed.
_LEAST_UNITS = 4

# Every batch up to the first number is checked, then powers of two up to the second. Numbers near these and near
# hints are checked, too.
_EVERY_BATCH_TO = 64
_LARGEST = 1 << 20

# Once the model has raised at more breaking batches than this, assume that it raises at all of them.
_MOST_RAISED = 4

# Maximum number of conditions to add from captures at other batches. The first ones already expose a wrong path.
_MOST_FURTHER = 16

# At most this number of elements may differ by another choice among equal scores, even where the calls had fewer.
_FEW = 8

# Where two sizes are outside the calls, an input of more elements may need too much memory.
_LARGEST_OF_BOTH = 2**20

# Only this many open sizes are combined when two or more sizes are set to 1.
_MOST_AT_ONE = 4


def prove_file(
    evidence: Evidence,
    loaded: LoadedArtifact,
    files: Sequence[Path],
    conditions: Sequence[Condition],
    limits: list[Limit] | None = None,
) -> None:
    """Compare a loaded file with the model at every call, and at sizes that break a condition of its capture.

    Args:
        loaded: the artifact, loaded from `files`.
        conditions: on the open sizes, as `conditions_of_program` returns them.
        limits: gets the conditions that break only at inputs too large to try; with None, these are refused.

    Raises:
        RouteRefused: the file fails, or its shapes, dtypes or values differ from the model's.
    """
    _prove_beyond(evidence, loaded, conditions, prove_at_calls(evidence, loaded, files), limits=limits)


def prove_at_calls(evidence: Evidence, loaded: LoadedArtifact, files: Sequence[Path] = ()) -> tuple[float, ...] | None:
    """Prove a loaded file by the request's own proof; if there is none, or it refuses, run the file at every call.

    Returns:
        Each output's error, relative to its largest value; None if the request's own proof accepts the file.
    """
    with evidence.undisturbed(), silent():
        proof = evidence.request.proof
        if proof is not None and proof(loaded, files):
            return None
        # No other comparison is left for the outputs that only the request's own proof compares.
        by_values = replace(evidence, request=by_place(evidence.request))
        return _compare_at(by_values, loaded, range(len(evidence.inputs)))


def prove_program(
    evidence: Evidence,
    loaded: LoadedArtifact,
    conditions: Sequence[Condition],
    guards: Sequence[str],
    limits: list[Limit] | None = None,
) -> tuple[Shapes, ...]:
    """Compare a program, from which a file will be written, with the model at sizes that break its conditions.

    If the request has no proof of its own, the program is compared at every call, too. Otherwise only at the smallest
    one: `prove_at_calls` applies that proof to the file itself.

    Args:
        guards: the guards of the capture, of which the file keeps those that hold wherever the program is right. They
            refuse batches that are too large to try: on a GPU, torch compares the batch of each BatchNorm with 880801.
        limits: as for `prove_file`; also gets the conditions that these guards enforce.

    Returns:
        The input shapes at which they agree, including those of the calls.
    """
    calls = range(len(evidence.inputs)) if evidence.request.proof is None else [_smallest(evidence)]
    with evidence.undisturbed(), silent():
        errors = _compare_at(evidence, loaded, calls)
    return _prove_beyond(evidence, loaded, conditions, errors, guards, limits)


def _smallest(evidence: Evidence) -> int:
    return min(range(len(evidence.inputs)), key=lambda call: sum(each.numel() for each in evidence.inputs[call]))


def _compare_at(evidence: Evidence, loaded: LoadedArtifact, calls: Iterable[int]) -> tuple[float, ...]:
    errors = []
    for inputs, expected in ((evidence.inputs[call], evidence.outputs[call]) for call in calls):
        try:
            outputs = _compare(evidence, loaded, inputs, expected)
        except WrongFile:
            if not evidence.outputs_given:
                raise
            # The caller's outputs may come from the model before a pass damaged it. Then the route is right.
            with undisturbed(evidence.adapter), silent():
                expected = evidence.adapter.run(inputs)
            outputs = _compare(evidence, loaded, inputs, expected)
        errors.append([_relative_error(*pair) for pair in zip(expected, outputs, strict=True)])
    return tuple(map(max, zip(*errors, strict=True)))


def _prove_beyond(
    evidence: Evidence,
    loaded: LoadedArtifact,
    conditions: Sequence[Condition],
    errors: Sequence[float] | None,
    guards: Sequence[str] = (),
    limits: list[Limit] | None = None,
) -> tuple[Shapes, ...]:
    """Compare file and model at batches that break each condition of the capture.

    Two batches per condition are compared: the first that the model accepts, and one at least twice as large. Return
    the input shapes at which they agree, including those of the calls.

    Where the model raises, the file can't be wrong, and the next batch is tried. Where they agree, the model still took
    another path. That path may depend on conditions that the capture hasn't seen, so these are checked too.

    Args:
        conditions: the conditions of each view in `evidence.along`; `Condition.along` is the index of the view.
        errors: the error of each output at the calls, from which the error bound here is derived; None to run the
            smallest call for it where it is needed.
    """

    @cache
    def known() -> Sequence[float]:
        return _compare_at(evidence, loaded, [_smallest(evidence)]) if errors is None else errors

    agreed: list[Shapes] = [[tuple(tensor.shape) for tensor in tensors] for tensors in evidence.inputs]
    beyond = _Beyond(loaded, known)
    with evidence.undisturbed(), silent():
        agreed += beyond.prove(evidence, conditions)
        for inputs in _several_at_one(evidence):
            if beyond.agree_on(evidence, inputs):
                agreed.append([tuple(tensor.shape) for tensor in inputs])
    kept = guards_in_force(guards, evidence, agreed)
    for each in beyond.untried:
        if not each.is_alone and not all(_holds_at(limit, evidence, [each.shapes]) for limit in limits or ()):
            continue
        can_be_declared = limits is not None and _holds_at(each.limit, evidence, agreed)
        # Where the file refuses a size, it can't be wrong.
        if not (can_be_declared or guards_refuse(kept, evidence, each.shapes)):
            raise each.refusal
        if limits is not None and can_be_declared and not any(_implies(other, each.limit) for other in limits):
            limits.append(each.limit)
    return tuple(agreed)


def _implies(limit: Limit, other: Limit) -> bool:
    """Whether a limit declares another one too: torch gives the range of a size in addition to its relations."""
    if other.condition != f"{limit.size} <= {limit.largest}":
        return limit == other
    return Relation(limit.condition).names == (limit.size,)


def _holds_at(limit: Limit, evidence: Evidence, agreed: Iterable[Shapes]) -> bool:
    """Whether the condition can be declared and holds wherever file and model agree."""

    def sizes(shapes: Shapes) -> dict[str, int]:
        named = zip(evidence.input_specs, shapes, strict=True)
        pairs = (pair for spec, shape in named for pair in zip(spec.shape, shape, strict=True))
        return {name: size for name, size in pairs if isinstance(name, str)}

    return bool(limit.condition) and all(Relation(limit.condition).holds(sizes(shapes)) for shapes in agreed)


def _several_at_one(evidence: Evidence) -> Iterator[tuple[torch.Tensor, ...]]:
    """Inputs in which two or more sizes are 1 and the others are those of the first call.

    Some conditions change only there, such as whether a feature map has more than one position.
    """
    views = [view for view in evidence.along if not view.steps and all(view.line(*place) for place in view.open_dims)]
    views = views[:_MOST_AT_ONE]
    for count in range(2, len(views) + 1):
        for chosen in itertools.combinations(views, count):
            made = list(evidence.inputs[0])
            for view in chosen:
                shapes = view.shapes_at(1)
                for index, dim in view.open_dims:
                    made[index] = made[index].narrow(dim, 0, min(max(shapes[index][dim], 0), made[index].shape[dim]))
            yield tuple(made)


@dataclass(frozen=True)
class _Untried:
    """The first batch that breaks a condition and is too large to try, with the refusal if nothing excludes it."""

    shapes: Shapes
    refusal: RouteRefused
    limit: Limit
    # Whether the other sizes are those of the calls.
    is_alone: bool


class _Beyond:
    """The comparison of a file with the model at sizes outside the calls."""

    def __init__(self, loaded: LoadedArtifact, errors: Callable[[], Sequence[float]]) -> None:
        self.untried: list[_Untried] = []
        self._loaded = loaded
        self._errors = errors
        # The conditions that were checked from other sizes on, by the size that changes.
        self._seen: set[tuple[str, str]] = set()

    def prove(self, evidence: Evidence, conditions: Sequence[Condition]) -> list[Shapes]:
        """The input shapes outside the calls at which file and model agree.

        Each size is changed by itself. Where it breaks a condition, the model may read further sizes, as in
        `if batch > 20 and time > 30`. So these are changed from there on.
        """
        views = evidence.along
        self._seen |= {(views[condition.along].size, condition.what) for condition in conditions}
        agreed: list[Shapes] = []
        largest: list[tuple[Evidence, int]] = []
        corners: list[tuple[Evidence, tuple[Condition, ...]]] = []
        for number, view in enumerate(views):
            own = [condition for condition in conditions if condition.along == number]
            batches = []
            for batch, others in self._prove_along(evidence, view, own):
                batches.append(batch)
                if (beyond := evidence.fixing(view, batch)) is not None:
                    corners.append((beyond, others))
            # Calls may break conditions too, as a batch of one does.
            breaking = (next((batch for batch in view.batches if not each.holds(batch)), None) for each in own)
            corners += (
                (beyond, conditions_at(view, called, beyond)[1])
                for called in dict.fromkeys(breaking)
                if called is not None and (beyond := evidence.fixing(view, called)) is not None
            )
            agreed += map(view.shapes_at, batches)
            if not view.steps and batches:
                largest.append((view, max(batches)))
        for beyond, others in corners:
            sizes = [view.size for view in beyond.along]
            new = [condition for condition in others if (sizes[condition.along], condition.what) not in self._seen]
            if new:
                agreed += self.prove(beyond, new[:_MOST_FURTHER])
        for (one, first), (other, second) in itertools.combinations(largest, 2):
            for view in () if (beyond := evidence.fixing(one, first)) is None else beyond.along:
                if view.open_dims == other.open_dims:
                    agreed += self._prove_at_both(view, second)
        return agreed

    def _prove_at_both(self, evidence: Evidence, batch: int) -> list[Shapes]:
        """The shapes at which two sizes have values outside the calls, if file and model agree there.

        The model may have decided on each of them before, and only here on both.
        """
        shapes = evidence.shapes_at(batch)
        if max(math.prod(shape) for shape in shapes) > _LARGEST_OF_BOTH:
            return []
        try:
            answers = self.agree_on(evidence, evidence.inputs_at(batch))
        except WrongFile as refusal:
            reason = f"at {evidence.at(batch)} the model takes a different path than the captured one: {refusal}"
            raise WrongFile(reason, refusal.inputs, refusal.output, size=evidence.size) from refusal
        return [shapes] if answers else []

    def _prove_along(
        self, evidence: Evidence, view: Evidence, conditions: Sequence[Condition]
    ) -> list[tuple[int, tuple[Condition, ...]]]:
        """The batches outside the calls at which file and model agree, and the conditions on the other sizes there."""
        tried = set(view.batches)
        agreed: list[tuple[int, tuple[Condition, ...]]] = []
        waiting = list(conditions)
        known = {(condition.what, condition.hints) for condition in conditions}
        for condition in waiting:  # grows inside the loop
            for batch in self._prove_where_it_breaks(view, condition, tried, [batch for batch, _ in agreed]):
                own, others = conditions_at(view, batch, evidence.fixing(view, batch))
                agreed.append((batch, others))
                for further in own:
                    key = (further.what, further.hints)
                    if key not in known and len(waiting) < len(conditions) + _MOST_FURTHER:
                        known.add(key)
                        waiting.append(further)
        return agreed

    def _prove_where_it_breaks(
        self, evidence: Evidence, condition: Condition, tried: set[int], known: Sequence[int]
    ) -> list[int]:
        """At most two batches that break the condition and at which file and model agree; adds all batches to `tried`.

        The first batch that is too large to try is added to `untried`, with the refusal if the file doesn't refuse it.
        But two batches of other conditions suffice if they break this one too; `known` are those at which file and
        model agree.
        """
        answered: list[int] = []
        raised = 0
        for batch in breaks(condition):
            if batch in tried or (answered and batch < 2 * answered[0]):
                continue
            tried.add(batch)
            try:
                answers = self.agree_on(evidence, evidence.inputs_at(batch))
            except RuntimeCrashed:
                raise
            except RouteRefused as refusal:
                if evidence.steps and isinstance(refusal, TooLarge):
                    # Sizes that grow together soon need too much memory. Each of them was checked by itself.
                    break
                reason = (
                    f"at {evidence.at(batch)} the model takes a different path than the captured one, because of "
                    f"{condition.what}: {refusal}"
                )
                if isinstance(refusal, WrongFile):
                    raise WrongFile(reason, refusal.inputs, refusal.output, size=evidence.size) from refusal
                refused = RouteRefused(reason, size=evidence.size)
                if not isinstance(refusal, TooLarge):
                    raise refused from refusal
                broken = [each for each in (*known, *answered) if not condition.holds(each)]
                if not broken or max(broken) < 2 * min(broken):
                    limit = Limit(condition.relation, evidence.size, next(breaks(condition)) - 1)
                    self.untried.append(_Untried(evidence.shapes_at(batch), refused, limit, not evidence.fixed))
                break
            if answers:
                answered.append(batch)
            else:
                raised += 1
            if raised > _MOST_RAISED or len(answered) == 2:
                break
        return answered

    def agree_on(self, evidence: Evidence, inputs: tuple[torch.Tensor, ...]) -> bool:
        """Compare file and model on inputs outside the calls; return False where the model raises."""
        errors = self._errors()
        try:
            with undisturbed(evidence.adapter), silent():
                expected = evidence.adapter.run(inputs)
        except (MemoryError, torch.OutOfMemoryError, StructureError):
            raise
        except Exception as error:
            if "allocate memory" in str(error):
                raise
            return False
        _compare(evidence, self._loaded, inputs, expected, errors)
        return True


def breaks(condition: Condition) -> Iterator[int]:
    """The batches that break a condition, in ascending order.

    Above 64, only some candidates are checked. If the condition holds at one candidate and breaks at the next,
    bisection finds the first batch that breaks it.
    """
    yield from (batch for batch in range(1, _EVERY_BATCH_TO + 1) if not condition.holds(batch))
    held = _EVERY_BATCH_TO if condition.holds(_EVERY_BATCH_TO) else 0
    for batch in _far_batches(condition.hints):
        if condition.holds(batch):
            held = batch
        elif held == 0:
            yield batch
        else:
            candidates = range(held, batch)
            yield held + bisect.bisect_left(candidates, True, key=lambda each: not condition.holds(each))
            held = 0


def _far_batches(hints: Iterable[int]) -> list[int]:
    powers = (1 << power for power in range(_EVERY_BATCH_TO.bit_length(), _LARGEST.bit_length()))
    found = {power + step for power in powers for step in (-1, 0, 1)}
    found |= {hint + step for hint in hints for step in (-1, 0, 1, 2)}
    return sorted(batch for batch in found if batch > _EVERY_BATCH_TO)


def _compare(
    evidence: Evidence,
    loaded: LoadedArtifact,
    inputs: tuple[torch.Tensor, ...],
    expected: tuple[torch.Tensor, ...],
    errors: Sequence[float] | None = None,
) -> Sequence[torch.Tensor]:
    """Run the file and check its outputs against the model's; `errors` are the errors of the outputs at the calls."""
    request = evidence.request
    sizes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
    try:
        with refusing(f"the file fails on inputs of {sizes}"):
            outputs = loaded(*clones(inputs))
    except RuntimeCrashed:
        # Not a WrongFile, whose first wrong operation is located in this process.
        raise
    except RouteRefused as refusal:
        raise WrongFile(str(refusal), inputs) from refusal
    if len(outputs) != len(expected):
        raise WrongFile(f"the file returns {len(outputs)} outputs, the model {len(expected)}", inputs)
    for index, (name, ours, theirs) in enumerate(zip(evidence.adapter.output_names, expected, outputs, strict=True)):
        allowed = _rounding(evidence, ours.dtype)
        if errors is not None:
            allowed = _allowed_beyond(evidence, inputs, ours.dtype, errors[index])
        compared = index not in evidence.unstable
        if compared and index in request.undecided and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype):
            if index in request.chosen:
                compared = _differ_in_more(ours, theirs, request.chosen[index], allowed)
            else:
                # Equal scores leave the order free, so the values are compared without it.
                ours, theirs = (tensor.flatten().sort().values for tensor in (ours, theirs))
        if problem := difference(ours, theirs, values=compared, allowed=allowed):
            raise WrongFile(f"output `{name}` is wrong on inputs of {sizes}: {problem}", inputs, name)
    return outputs


def _differ_in_more(expected: torch.Tensor, got: torch.Tensor, share: float, allowed: float) -> bool:
    """Whether more elements differ than twice the share that equal scores choose, and not only a few."""
    if expected.is_complex():
        return False
    left, right = (wide(_real(tensor)).nan_to_num() for tensor in (expected, got))
    error = allowed * float(left.abs().max()) if left.numel() else 0.0
    return int((distance(left, right) > error).sum()) > 2 * share * left.numel() + _FEW


def _rounding(evidence: Evidence, dtype: torch.dtype) -> float:
    """The largest error of an output of this dtype that rounding could explain, relative to its largest value."""
    own = _ROUNDING.get(dtype, _ROUNDING_ELSEWHERE)
    half = evidence.request.computes_in
    return own if half is None else max(own, _ROUNDING[half])


def _allowed_beyond(evidence: Evidence, inputs: tuple[torch.Tensor, ...], dtype: torch.dtype, error: float) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    least = _LEAST_UNITS * _unit(evidence, dtype)
    # Each addition has an error of at most half an ulp of the partial sum (Higham, Accuracy and Stability of Numerical
    # Algorithms, 4.2).
    summing = _longest_sum(evidence, inputs) * _unit(evidence, dtype) / 2
    return min(_rounding(evidence, dtype), max(_ROUNDING_VARIES_BY * max(error, least), summing))


def _unit(evidence: Evidence, dtype: torch.dtype) -> float:
    """The machine epsilon of the precision in which an output of this dtype is computed."""
    eps = torch.finfo(dtype).eps
    half = evidence.request.computes_in
    return eps if half is None else max(eps, torch.finfo(half).eps)


def _longest_sum(evidence: Evidence, inputs: tuple[torch.Tensor, ...]) -> int:
    """The number of terms added sequentially over open dims: positions of a sequence or feature map, not rows."""
    places: dict[int, int] = {}
    # Open dims that the request doesn't name are rows.
    for index, dim in evidence.declared:
        if evidence.input_specs[index].shape[dim] != BATCH:
            places[index] = places.get(index, 1) * inputs[index].shape[dim]
    return min(evidence.in_a_row, max(places.values(), default=1))


def _relative_error(expected: torch.Tensor, got: torch.Tensor) -> float:
    if expected.shape != got.shape or is_exact(expected):
        return 0.0
    error, scale = _largest(_real(expected), _real(got))
    return error / scale if scale else 0.0


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU; complex numbers as pairs of real ones."""
    tensor = tensor.detach().cpu()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _largest(expected: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """The largest error and the largest expected value where that is finite; 0 if it is finite nowhere."""
    where = torch.isfinite(expected)
    if not where.any():
        return 0.0, 0.0
    left, right = expected[where], got[where]
    return distance(left, right).max().item(), wide(left).abs().max().item()


def difference(
    expected: torch.Tensor, got: torch.Tensor, *, values: bool = True, allowed: float | None = None
) -> str | None:
    """Describe how `got` differs from `expected` beyond rounding; None if it doesn't.

    Args:
        values: whether to compare values, and not only shape and dtype.
        allowed: the largest error of floats, relative to the largest value; None for the loose bound of the dtype.
    """
    if got.shape != expected.shape:
        return f"its shape is {list(got.shape)} instead of {list(expected.shape)}"
    if got.dtype != expected.dtype:
        return f"its dtype is {dtype_name(got.dtype)} instead of {dtype_name(expected.dtype)}"
    if not values or expected.numel() == 0:
        return None
    if is_exact(expected):
        wrong = int((expected.cpu() != got.cpu()).sum())
        # Rounding can flip ties, which changes single elements of an argmax. A wrong capture changes many.
        return f"{wrong} of {expected.numel()} elements differ" if wrong > expected.numel() // 100 else None
    left, right = _real(expected), _real(got)
    odd, odd_got = special(left), special(right)
    if bool(((odd != odd_got) & (odd != 0)).any()):
        return "NaN or infinity occur in different places"
    error, scale = _largest(left, right)
    allowed = _ROUNDING.get(expected.dtype, _ROUNDING_ELSEWHERE) if allowed is None else allowed
    # Written so that NaN fails the comparison.
    within = error <= allowed * scale + 1e-30
    return None if within else f"its largest error is {error:.2g}, where the model's largest value is {scale:.2g}"
