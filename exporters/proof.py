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
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from exporters.base import Limit, LoadedArtifact, clones, outputs_of
from exporters.errors import RouteRefused, RuntimeCrashed, StructureError, WrongFile
from exporters.evidence import BATCH, TOGETHER, Evidence, Shapes, Size, Sizes, TooLarge
from exporters.exported_program import Condition, guards_in_force, guards_refuse
from exporters.isolation import refusing, silent, undisturbed
from exporters.trace_conditions import conditions_at
from optimize_export.elementwise import distance, is_exact, special, unit, wide
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

# Every size up to the first number is checked, then powers of two up to the second. Numbers near these and near hints are
# checked, too.
_EVERY_SIZE_TO = 64
_LARGEST = 1 << 20

# Once the model has raised at more breaking sizes than this, assume that it raises at all of them.
_MOST_RAISED = 4

# Maximum number of conditions to add from captures at other sizes. The first ones already expose a wrong path.
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
        conditions: on the open sizes, as `conditions_of_program` returns them; none for a file without a capture.
        limits: gets the conditions that break only at inputs too large to try; with None, these are refused.

    Raises:
        RouteRefused: the file fails, or its shapes, dtypes or values differ from the model's.
    """
    prove_at_calls(evidence, loaded, files)
    prove_beyond(evidence, loaded, conditions, limits=limits)


def prove_at_calls(evidence: Evidence, loaded: LoadedArtifact, files: Sequence[Path] = ()) -> None:
    """Prove a loaded file by the request's own proof; if there is none, or it refuses, run the file at every call."""
    with evidence.undisturbed(), silent():
        proof = evidence.request.proof
        if proof is not None and proof(loaded, files):
            return
        # No other comparison is left for the outputs that only the request's own proof compares.
        by_place = replace(evidence, request=replace(evidence.request, undecided={}))
        for call in range(len(evidence.inputs)):
            _compare_at(by_place, loaded, call)


def _compare_at(evidence: Evidence, loaded: LoadedArtifact, call: int) -> list[float]:
    """Compare a file with the model at a call; return the error of each output, relative to its largest value."""
    inputs = evidence.inputs[call]
    try:
        return _compare(evidence, loaded, inputs, evidence.outputs[call])
    except WrongFile:
        if not evidence.outputs_given:
            raise
        # The caller's outputs may come from the model before a pass damaged it. Then the route is right.
        with undisturbed(evidence.adapter), silent():
            expected = evidence.adapter.run(inputs)
        return _compare(evidence, loaded, inputs, expected)


def prove_beyond(
    evidence: Evidence,
    loaded: LoadedArtifact,
    conditions: Sequence[Condition],
    guards: Sequence[str] = (),
    limits: list[Limit] | None = None,
) -> tuple[Shapes, ...]:
    """Compare a file, or a program from which one will be written, with the model at sizes that break its conditions.

    Args:
        guards: the guards of the capture, of which the file keeps those that hold wherever the program is right. They
            refuse sizes that are too large to try: on a GPU, torch compares the batch of each BatchNorm with 880801.
        limits: as for `prove_file`; also gets the conditions that these guards enforce.

    Returns:
        The input shapes at which they agree. Those of the calls are among them: `prove_at_calls` compares the file there.

    Raises:
        RouteRefused: they differ, or sizes that break a condition are too large to try.
    """
    beyond = _Beyond(evidence, loaded)
    with evidence.undisturbed(), silent():
        beyond.explore(conditions, {})
        # Some conditions change only where two or more sizes are 1, such as whether a feature map has several positions.
        small = [size.name for size in evidence.sizes if size.name != TOGETHER and None not in size.lines.values()]
        for count in range(2, min(len(small), _MOST_AT_ONE) + 1):
            for names in itertools.combinations(small[:_MOST_AT_ONE], count):
                beyond.agree_at(dict.fromkeys(names, 1))
    agreed = tuple(shapes for shapes, answers in beyond.found.items() if answers)
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
    return agreed


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


@dataclass(frozen=True)
class _Untried:
    """The first size that breaks a condition and is too large to try, with the refusal if nothing excludes it."""

    shapes: Shapes
    refusal: RouteRefused
    limit: Limit
    # Whether the other sizes are those of the calls.
    is_alone: bool


class _Beyond:
    """The comparison of a file with the model at sizes outside the calls.

    Where the model raises, the file can't be wrong, and the next size is tried. Where they agree, the model still took
    another path. That path may depend on conditions that the capture hasn't seen, so these are checked too.
    """

    def __init__(self, evidence: Evidence, loaded: LoadedArtifact) -> None:
        self.untried: list[_Untried] = []
        self._evidence = evidence
        self._loaded = loaded
        self._calls = frozenset(tuple(tuple(tensor.shape) for tensor in tensors) for tensors in evidence.inputs)
        # Whether file and model agree on inputs of these shapes; False where the model raises.
        self.found: dict[Shapes, bool] = dict.fromkeys(self._calls, True)
        # The conditions that were checked, by the name of the size that changes.
        self._seen: set[tuple[str, Any]] = set()

    def explore(self, conditions: Sequence[Condition], fixed: Sizes) -> None:
        """Change each size by itself, from the sizes of the first call and those that are `fixed`.

        Where it breaks a condition, the model may read further sizes, as in `if batch > 20 and time > 30`. So these are
        changed from there on.
        """
        sizes = self._free(fixed)
        new = {
            size.name: [each for each in conditions if each.follows(size) and (size.name, each.key) not in self._seen]
            for size in sizes
        }
        self._seen |= {(name, each.key) for name, own in new.items() for each in own}
        largest: dict[str, int] = {}
        corners: list[Sizes] = []
        for size in sizes:
            own = new[size.name][: _MOST_FURTHER if fixed else None]
            agreed = self._break_each(own, size, fixed)
            # Calls may break conditions too, as a batch of one does.
            calls = [
                next((value for value in size.values if not self._holds(condition, size, fixed, value)), None)
                for condition in own
            ]
            corners += ({**fixed, size.name: value} for value in dict.fromkeys((*agreed, *calls)) if value is not None)
            if agreed and size.name != TOGETHER:
                largest[size.name] = max(agreed)
        for corner in corners:
            if self._free(corner):
                self.explore(conditions_at(self._evidence, corner), corner)
        # The model may have decided on each of two sizes before, and only here on both.
        for two in itertools.combinations(largest.items(), 2):
            both = {**fixed, **dict(two)}
            if max(map(math.prod, self._evidence.shapes_at(both))) <= _LARGEST_OF_BOTH:
                self.agree_at(both)

    def _free(self, fixed: Sizes) -> list[Size]:
        """The sizes that can still change, and all of these together."""
        if TOGETHER in fixed:
            return []
        held = {place for size in self._evidence.sizes if size.name in fixed for place in size.lines}
        free = [size for size in self._evidence.sizes if size.name not in (*fixed, TOGETHER)]
        together = [
            replace(size, lines={place: line for place, line in size.lines.items() if place not in held})
            for size in self._evidence.sizes
            if size.name == TOGETHER and len(free) > 1
        ]
        return [*free, *together]

    def _break_each(self, conditions: Sequence[Condition], size: Size, fixed: Sizes) -> list[int]:
        """The values of a size outside the calls at which file and model agree, at most two for each condition."""
        agreed: list[int] = []
        waiting, known = list(conditions), {condition.key for condition in conditions}
        for condition in waiting:  # grows inside the loop
            for value in self._break(condition, size, fixed, agreed):
                agreed.append(value)
                for further in conditions_at(self._evidence, {**fixed, size.name: value}):
                    is_new = further.follows(size) and further.key not in known
                    if is_new and len(waiting) < len(conditions) + _MOST_FURTHER:
                        known.add(further.key)
                        waiting.append(further)
        return agreed

    def _break(self, condition: Condition, size: Size, fixed: Sizes, known: Sequence[int]) -> list[int]:
        """The first value of a size that breaks the condition and that the model takes, and one at least twice as large.

        The first value that is too large to try is added to `untried`. But two values of other conditions suffice if they
        break this one too; `known` are those at which file and model agree.
        """
        holds, hints = partial(self._holds, condition, size, fixed), condition.hints(size)
        answered: list[int] = []
        raised = 0
        for value in breaks(holds, hints):
            there = {**fixed, size.name: value}
            shapes = self._evidence.shapes_at(there)
            if shapes in self._calls or not self.found.get(shapes, True) or (answered and value < 2 * answered[0]):
                continue
            try:
                answers = self.agree_at(there, f", because of {condition.what}")
            except TooLarge as refusal:
                broken = [each for each in (*known, *answered) if not holds(each)]
                # Sizes that grow together soon need too much memory. Each of them was checked by itself.
                if size.name != TOGETHER and (not broken or max(broken) < 2 * min(broken)):
                    limit = Limit(condition.relation, size.name, next(breaks(holds, hints)) - 1)
                    self.untried.append(_Untried(shapes, refusal, limit, not fixed))
                break
            if answers:
                answered.append(value)
            else:
                raised += 1
            if raised > _MOST_RAISED or len(answered) == 2:
                break
        return answered

    def _holds(self, condition: Condition, size: Size, fixed: Sizes, value: int) -> bool:
        return condition.holds(self._evidence.shapes_at({**fixed, size.name: value}))

    def agree_at(self, sizes: Sizes, because: str = "") -> bool:
        """Whether file and model agree at these sizes; False where the model raises."""
        shapes = self._evidence.shapes_at(sizes)
        if shapes not in self.found:
            errors = self._errors
            try:
                self.found[shapes] = self._agree_on(self._evidence.inputs_at(sizes), errors)
            except RuntimeCrashed:
                raise
            except RouteRefused as refusal:
                at, last = self._evidence.at(sizes), list(self._evidence.named(sizes))[-1]
                reason = f"at {at} the model takes a different path than the captured one{because}: {refusal}"
                if isinstance(refusal, WrongFile):
                    raise WrongFile(reason, refusal.inputs, size=last) from refusal
                raise type(refusal)(reason, size=last) from refusal
        return self.found[shapes]

    @cached_property
    def _errors(self) -> list[float]:
        """The error of each output at the smallest call, from which the bound beyond the calls is derived."""
        calls = range(len(self._evidence.inputs))
        smallest = min(calls, key=lambda call: sum(tensor.numel() for tensor in self._evidence.inputs[call]))
        return _compare_at(self._evidence, self._loaded, smallest)

    def _agree_on(self, inputs: tuple[torch.Tensor, ...], errors: Sequence[float]) -> bool:
        try:
            with undisturbed(self._evidence.adapter), silent():
                expected = self._evidence.adapter.run(inputs)
        except (MemoryError, torch.OutOfMemoryError, StructureError):
            raise
        except Exception as error:
            if "allocate memory" in str(error):
                raise
            return False
        _compare(self._evidence, self._loaded, inputs, expected, errors)
        return True


def breaks(holds: Callable[[int], bool], hints: Iterable[int]) -> Iterator[int]:
    """The sizes that break a condition, in ascending order; `hints` are sizes near which it may turn.

    Above 64, only some candidates are checked. If the condition holds at one candidate and breaks at the next,
    bisection finds the first size that breaks it.
    """
    yield from (size for size in range(1, _EVERY_SIZE_TO + 1) if not holds(size))
    held = _EVERY_SIZE_TO if holds(_EVERY_SIZE_TO) else 0
    powers = (1 << power for power in range(_EVERY_SIZE_TO.bit_length(), _LARGEST.bit_length()))
    candidates = {power + step for power in powers for step in (-1, 0, 1)}
    candidates |= {hint + step for hint in hints for step in (-1, 0, 1, 2)}
    for size in sorted(candidate for candidate in candidates if candidate > _EVERY_SIZE_TO):
        if holds(size):
            held = size
        elif held == 0:
            yield size
        else:
            yield bisect.bisect_left(range(size), True, held, key=lambda each: not holds(each))
            held = 0


def _compare(
    evidence: Evidence,
    loaded: LoadedArtifact,
    inputs: tuple[torch.Tensor, ...],
    expected: tuple[torch.Tensor, ...],
    known: Sequence[float] | None = None,
) -> list[float]:
    """Run the file and check its outputs against the model's; return the error of each, relative to its largest value.

    `known` are the errors at a call, which bound those elsewhere.
    """
    request = evidence.request
    sizes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
    try:
        with refusing(f"the file fails on inputs of {sizes}"):
            outputs = outputs_of(loaded, *clones(inputs))
    except RuntimeCrashed:
        # Not a WrongFile, whose first wrong operation is located in this process.
        raise
    except RouteRefused as refusal:
        raise WrongFile(str(refusal), inputs) from refusal
    if len(outputs) != len(expected):
        raise WrongFile(f"the file returns {len(outputs)} outputs, the model {len(expected)}", inputs)
    errors = []
    for index, (name, ours, theirs) in enumerate(zip(evidence.adapter.output_names, expected, outputs, strict=True)):
        allowed = _allowed(evidence, inputs, ours.dtype, None if known is None else known[index])
        compared = index not in evidence.unstable
        if compared and index in request.undecided and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype):
            if (share := request.undecided[index]) is not None:
                compared = _differ_in_more(ours, theirs, share, allowed)
            else:
                # Equal scores leave the order free, so the values are compared without it.
                ours, theirs = (tensor.flatten().sort().values for tensor in (ours, theirs))
        problem, error = difference(ours, theirs, allowed, values=compared)
        if problem:
            raise WrongFile(f"output `{name}` is wrong on inputs of {sizes}: {problem}", inputs)
        errors.append(error)
    return errors


def _differ_in_more(expected: torch.Tensor, got: torch.Tensor, share: float, allowed: float) -> bool:
    """Whether more elements differ than twice the share that equal scores choose, and not only a few."""
    if expected.is_complex():
        return False
    left, right = (wide(_real(tensor)).nan_to_num() for tensor in (expected, got))
    error = allowed * float(left.abs().max()) if left.numel() else 0.0
    return int((distance(left, right) > error).sum()) > 2 * share * left.numel() + _FEW


def _allowed(evidence: Evidence, inputs: tuple[torch.Tensor, ...], dtype: torch.dtype, error: float | None) -> float:
    """The largest error of an output that rounding could explain, relative to its largest value.

    `error` is that of the output at a call, or None for these inputs of a call.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    half = evidence.request.computes_in
    computed = dtype if half is None else max(dtype, half, key=unit)
    loose = _ROUNDING.get(computed, _ROUNDING_ELSEWHERE)
    if error is None:
        return loose
    # Each addition has an error of at most half an ulp of the partial sum (Higham, Accuracy and Stability of Numerical
    # Algorithms, 4.2).
    summing = _longest_sum(evidence, inputs) * unit(computed) / 2
    return min(loose, max(_ROUNDING_VARIES_BY * max(error, _LEAST_UNITS * unit(computed)), summing))


def _longest_sum(evidence: Evidence, inputs: tuple[torch.Tensor, ...]) -> int:
    """The number of terms added sequentially over open dims: positions of a sequence or feature map, not rows."""
    places: dict[int, int] = {}
    # Open dims that the request doesn't name are rows.
    for index, dim in evidence.declared:
        if evidence.input_specs[index].shape[dim] != BATCH:
            places[index] = places.get(index, 1) * inputs[index].shape[dim]
    return min(evidence.in_a_row, max(places.values(), default=1))


def difference(expected: torch.Tensor, got: torch.Tensor, allowed: float, *, values: bool = True) -> tuple[str, float]:
    """How `got` differs from `expected` beyond rounding, "" if it doesn't; and the error relative to the largest value.

    Args:
        allowed: the largest error of floats, relative to the largest value.
        values: whether to compare values, and not only shape and dtype.
    """
    if got.shape != expected.shape:
        return f"its shape is {list(got.shape)} instead of {list(expected.shape)}", 0.0
    if got.dtype != expected.dtype:
        return f"its dtype is {dtype_name(got.dtype)} instead of {dtype_name(expected.dtype)}", 0.0
    if not values or expected.numel() == 0:
        return "", 0.0
    if is_exact(expected):
        wrong = int((expected.cpu() != got.cpu()).sum())
        # Rounding can flip ties, which changes single elements of an argmax. A wrong capture changes many.
        return f"{wrong} of {expected.numel()} elements differ" if wrong > expected.numel() // 100 else "", 0.0
    left, right = _real(expected), _real(got)
    odd, odd_got = special(left), special(right)
    if bool(((odd != odd_got) & (odd != 0)).any()):
        return "NaN or infinity occur in different places", 0.0
    finite = left.isfinite()
    if not finite.any():
        return "", 0.0
    error, scale = float(distance(left[finite], right[finite]).max()), float(wide(left[finite]).abs().max())
    # Written so that NaN fails the comparison.
    within = error <= allowed * scale + 1e-30
    problem = "" if within else f"its largest error is {error:.2g}, where the model's largest value is {scale:.2g}"
    return problem, error / scale if scale else 0.0


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU; complex numbers as pairs of real ones."""
    tensor = tensor.detach().cpu()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
