"""Where a file first computes something else than the model: the module, the line and the operation.

A file's program (`exporters.steps`) is what it was made from, one operation at a time. The file is run once, giving all its
values, and each operation is computed again from what the file itself has for the inputs: in float64, which is the truth, in
the original's dtype, and with inputs and weights off by one unit, which are the noise, as for the outputs. So a value is
compared with what should have followed from the values before it. An error that only flows through is not seen behind the
operation that brought it in, and one that fades on the way is as large there as it ever was.

What the file doesn't have (an operation that was merged into another) is computed on the way; where the value behind it is
wrong it may be either, and both are named.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from exporters.base import Artifact
from exporters.steps import FileValues, Place, Program, Seen, Step
from optimizer.difference import all_finite, distance, floors, is_exact, special, wide
from optimizer.float64 import off_by_one_ulp, raised, random_signs
from optimizer.observe import Flatten
from optimizer.preserve import random_state
from optimizer.reference import Reference
from optimizer.sentences import quote
from optimizer.verdict import FACTOR, Measurement
from passes.graph.storage import has_strides, same_values

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Divergence:
    """The first operation of a file that doesn't give what follows from its inputs.

    Attributes:
        module, call, line, operation: where it stands in the model, as in `exporters.steps.Place`.
        error, noise: the largest error, and what rounding alone does there; 0 where `problem` is no matter of size.
        problem: what is wrong, in words.
        where: the call it was found at: "batch size 3, draw 1".
        value: the name of the wrong value in the file.
        also: other places, in the order of the model, that the file has no values between: it may be any of them.
    """

    module: str
    call: int
    line: str
    operation: str
    error: float
    noise: float
    problem: str
    where: str
    value: str
    also: tuple[Place, ...] = ()

    @property
    def place(self) -> Place:
        return Place(self.module, self.call, self.line, self.operation)

    def __str__(self) -> str:
        return f"first differs at {self.place}: {self.problem}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "also": [asdict(place) for place in self.also]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Divergence:
        return cls(**{**data, "also": tuple(Place(**place) for place in data["also"])})


@dataclass(frozen=True)
class Located:
    """What was found, or in `note` why nothing was."""

    divergence: Divergence | None
    note: str = ""

    def __str__(self) -> str:
        if self.divergence is None:
            return f"Where it first differs isn't known: {self.note}."
        return f"It {self.divergence}."

    def to_json(self) -> dict[str, Any]:
        return {
            "divergence": None if self.divergence is None else self.divergence.to_json(),
            "divergence_note": self.note,
        }


@dataclass(frozen=True)
class Judged:
    """One value of a file beside what should follow from its inputs there."""

    step: Step
    error: float
    noise: float
    ratio: float
    problem: str
    between: tuple[Place, ...]


def first_divergence(
    program: Program, values: FileValues, calls: Iterable[tuple[str, Sequence[torch.Tensor]]]
) -> Divergence | None:
    """The first divergence at the first of the calls that shows one; None where each value follows from those before it.

    Args:
        values: the file, ready to give all values of the program that it has.
        calls: in words, with the inputs of the file.
    """
    for where, tensors in calls:
        seen = values.run(tensors)
        for judged in judged_values(program, seen, tensors):
            if judged.problem:
                return _divergence(program, judged, where)
        if seen.stopped_at:
            return _raising(program, seen, where)
    return None


def judged_values(program: Program, seen: Seen, tensors: Sequence[torch.Tensor]) -> Iterator[Judged]:
    """Each value that the file has, in the order of the program, until a shape is wrong and nothing can follow from it."""
    replay = _Replay(program, tensors)
    for number, step in enumerate(program.steps):
        name = program.name_in_file(step)
        value = seen.values.get(name) if step.is_tensor else None
        if value is None and name in seen.stopped_at:
            return
        if value is None:
            replay.compute(step)
        elif step.repeats or replay.repeats(step):
            judged = replay.judge(step, value)
            yield judged
            if judged.problem and not judged.noise:
                return
            replay.take(step, value)
        else:
            replay.take(step, value)
        replay.forget(number)


class _Replay:
    """The values of the program three times over: in its own dtypes, in float64, and off by one unit."""

    def __init__(self, program: Program, tensors: Sequence[torch.Tensor]) -> None:
        self._signs = random_signs(torch.Generator().manual_seed(0))
        self._constants = program.constants
        self._own: dict[str, Any] = {}
        self._truth: dict[str, Any] = {}
        self._off: dict[str, Any] = {}
        # The places of the operations that were merged into a value, or will be.
        self._between: dict[str, tuple[Place, ...]] = {}
        self._last: dict[str, int] = {name: number for number, step in enumerate(program.steps) for name in step.inputs}
        for name, tensor in zip(program.inputs, tensors, strict=True):
            self._set(name, tensor.detach().cpu())

    def judge(self, step: Step, value: torch.Tensor) -> Judged:
        own, truth, off = self._computed(step)
        between = (*self._between_inputs(step), step.place)
        if not isinstance(own, torch.Tensor):
            return Judged(step, 0.0, 0.0, 0.0, "", between)
        problem = _another_kind(own, value)
        if problem:
            return Judged(step, 0.0, 0.0, 0.0, problem, between)
        if is_exact(own):
            wrong = int(((own != value) & (own == truth) & (own == off)).sum())
            return Judged(step, 0.0, 0.0, 0.0, f"{wrong} of {own.numel()} elements differ" if wrong else "", between)
        return _judged_floats(step, value, own, truth, off, between)

    def repeats(self, step: Step) -> bool:
        """Whether a step that may draw random numbers gives the same with others: dropout in eval draws none."""
        drawn = []
        for seed in (0, 1):
            with random_state(seed):
                drawn.append(self._computed(step)[0])
        return isinstance(drawn[0], torch.Tensor) and same_values(*drawn)

    def take(self, step: Step, value: torch.Tensor) -> None:
        """Go on from what the file has."""
        self._set(step.name, value)
        self._between.pop(step.name, None)

    def compute(self, step: Step) -> None:
        """Go on from what follows from the values before; the file has none of its own."""
        own, truth, off = self._computed(step)
        self._own[step.name], self._truth[step.name], self._off[step.name] = own, _raised(truth), off
        self._between[step.name] = (*self._between_inputs(step), step.place)

    def forget(self, number: int) -> None:
        """Let go of what no step behind this one reads."""
        for name in [name for name in self._own if self._last.get(name, -1) <= number]:
            del self._own[name], self._truth[name], self._off[name]

    def _set(self, name: str, value: torch.Tensor) -> None:
        self._own[name], self._truth[name] = value, _raised(value)
        self._off[name] = self._shaken(value)

    def _shaken(self, value: torch.Tensor) -> torch.Tensor:
        inexact = value.is_floating_point() or value.is_complex()
        return off_by_one_ulp(value, self._signs) if inexact and value.numel() and has_strides(value) else value

    def _computed(self, step: Step) -> tuple[Any, Any, Any]:
        held = {name: _on_cpu(self._constants[name]) for name in step.inputs if name in self._constants}
        above = {name: _raised(value) for name, value in held.items()}
        beside = {name: self._shaken(v) if isinstance(v, torch.Tensor) else v for name, v in held.items()}
        with torch.no_grad():
            return tuple(
                step.compute({name: known.get(name, given.get(name)) for name in step.inputs})
                for known, given in ((self._own, held), (self._truth, above), (self._off, beside))
            )

    def _between_inputs(self, step: Step) -> tuple[Place, ...]:
        return tuple(dict.fromkeys(place for name in step.inputs for place in self._between.get(name, ())))


def _judged_floats(
    step: Step,
    value: torch.Tensor,
    own: torch.Tensor,
    truth: torch.Tensor,
    off: torch.Tensor,
    between: tuple[Place, ...],
) -> Judged:
    plain = torch.ones(own.shape, dtype=torch.bool)
    if not all_finite(own, value, truth, off):
        odd = special(own)
        other = (odd != special(value)) & (odd == special(truth)) & (odd == special(off))
        if count := int(other.sum()):
            return Judged(step, 0.0, 0.0, 0.0, f"NaN or inf in {count} other places", between)
        plain = (odd == 0) & (special(value) == 0) & (special(truth) == 0) & (special(off) == 0)
    if not bool(plain.any()):
        return Judged(step, 0.0, 0.0, 0.0, "", between)
    right = wide(own)[plain]
    error, *noises = (distance(a, b)[plain] for a, b in ((value, truth), (own, truth), (off, own)))
    least, least_rms = floors(own.dtype, float(right.abs().max()), _rms(right.abs()))
    noise = max(least, *(float(figures.max()) for figures in noises))
    noise_rms = max(least_rms, *map(_rms, noises))
    largest = float(error.max())
    ratio = max(_times(largest, noise), _times(_rms(error), noise_rms))
    problem = f"off by {largest:.2e}, {ratio:.3g} times its rounding noise" if ratio > FACTOR else ""
    return Judged(step, largest, noise, ratio, problem, between)


def _divergence(program: Program, judged: Judged, where: str) -> Divergence:
    place = judged.step.place
    return Divergence(
        **asdict(place),
        error=judged.error,
        noise=judged.noise,
        problem=f"{judged.problem} at {where}",
        where=where,
        value=program.name_in_file(judged.step),
        also=tuple(other for other in dict.fromkeys(judged.between) if other != place),
    )


def _raising(program: Program, seen: Seen, where: str) -> Divergence | None:
    """The operation that raised; what it was given is right."""
    step = next((step for step in program.steps if program.name_in_file(step) in seen.stopped_at), None)
    if step is None:
        return None
    return _divergence(program, Judged(step, 0.0, 0.0, 0.0, "raises", (step.place,)), where)


def _another_kind(own: torch.Tensor, value: torch.Tensor) -> str:
    if own.shape != value.shape:
        return f"its shape is {list(value.shape)} in place of {list(own.shape)}"
    return (
        f"its dtype is {value.dtype} in place of {own.dtype}".replace("torch.", "") if own.dtype != value.dtype else ""
    )


def _raised(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_raised, value))
    return _on_cpu(value).to(raised(value.dtype)) if isinstance(value, torch.Tensor) else value


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _rms(figures: torch.Tensor) -> float:
    return float(figures.square().mean().sqrt())


def _times(error: float, noise: float) -> float:
    return 0.0 if error == 0 else min(error / noise, 1e30) if noise else 1e30


def located(
    artifact: Artifact,
    reference: Reference,
    measurement: Measurement,
    flatten: Flatten,
    device: str,
) -> Located:
    """Where an artifact that failed against the reference first differs.

    Args:
        measurement: of the artifact; the calls that it names are looked at first.
        flatten: gives the artifact's tensors of (args, kwargs).

    Nothing that goes wrong on the way is raised: it would stand in the place of what failed.
    """
    program, values = artifact.program, artifact.values
    if program is None or values is None:
        return Located(None, f"what a file was made from can't be told on the way {artifact.route!r}")
    names = [program.name_in_file(step) for step in program.steps if step.is_tensor]
    try:
        found = first_divergence(program, values(artifact.path, device, names), _calls(reference, measurement, flatten))
    except Exception as error:  # foreign code runs here too, and the failure that is looked at is to be told
        logger.debug("locating raised", exc_info=True)
        return Located(None, f"looking for it raised {type(error).__name__}: {quote(error)}")
    if found is None:
        return Located(
            None, "each operation in the file gives what follows from its inputs, so what was captured is another model"
        )
    return Located(found)


def _calls(
    reference: Reference, measurement: Measurement, flatten: Flatten
) -> Iterator[tuple[str, Sequence[torch.Tensor]]]:
    """The calls of the reference, those first that a measurement names."""
    told = (*measurement.problems, *(text for each in measurement.outputs for text in (*each.problems, each.where)))
    calls = sorted(reference.calls(), key=lambda call: not any(call[0] in text for text in told))
    return ((where, tuple(flatten(call.args, call.kwargs))) for where, call in calls)
