"""Find where a file first diverges from the model: the module, the line and the operation.

A file's program (`exporters.steps`) lists the operations that the file was made from. The file runs once and returns
all its intermediate values. Then each operation is recomputed from the file's own values of its inputs: in float64,
which is the truth, in the original's dtype, and with inputs and weights off by one ulp. The last two give the noise, as
for the outputs. So each value is compared with the result that follows from the values before it. An error that is only
propagated isn't reported after the operation that caused it. An error that fades later is found at its full size.

The file lacks some values, because their operations were merged into others. Those values are computed from the values
before them. If the next value that the file has is wrong, any of these operations may be at fault, and all are named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from exporters.base import Artifact
from exporters.steps import FileValues, Place, Program, Seen, Step
from optimizer.faults.divergence import Divergence, Off, how_far_off
from optimizer.faults.locating_modules import first_wrong_module, first_wrong_part
from optimizer.faults.locating_values import first_module_without_value
from optimizer.model import Call, random_state
from optimizer.parity import Flatten, Measurement, Reference, off_by_one_ulp, raised, random_signs
from optimizer.wording import quote
from passes.program.storage import has_strides, same_values

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Located:
    """The result of a search: the divergence, or the reason in `note` why none was found."""

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
    """The comparison of one value of a file with the result that follows from the file's values before it.

    Attributes:
        between: the places that may be at fault: the step itself, and before it the steps whose values the file lacks.
    """

    step: Step
    off: Off
    between: tuple[Place, ...]


def first_divergence(
    program: Program, values: FileValues, calls: Iterable[tuple[str, Sequence[torch.Tensor]]]
) -> Divergence | None:
    """Find the first divergence, at the first call that shows one; None if each value follows from those before it.

    Args:
        program: the operations that the file was made from.
        values: returns the values of the file.
        calls: the description of each call, and the inputs of the file.
    """
    for where, tensors in calls:
        seen = values.run(tensors)
        for judged in judged_values(program, seen, tensors):
            if judged.off.problem:
                return _divergence(program, judged, where)
        if seen.stopped_at:
            return _raising(program, seen, where)
    return None


def judged_values(program: Program, seen: Seen, tensors: Sequence[torch.Tensor]) -> Iterator[Judged]:
    """Judge each value that the file has, in the order of the program.

    Ends after a wrong value whose noise is 0 (such as a wrong shape), because the next values can't be computed from
    it. Also ends at the operation where the file raised. Values that depend on random numbers aren't judged.
    """
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
            if judged.off.problem and not judged.off.noise:
                return
            replay.take(step, value)
        else:
            replay.take(step, value)
        replay.forget(number)


class _Replay:
    """Recomputes a program in three versions: in its own dtypes, in float64, and off by one ulp."""

    def __init__(self, program: Program, tensors: Sequence[torch.Tensor]) -> None:
        self._signs = random_signs(torch.Generator().manual_seed(0))
        self._constants = program.constants
        self._own: dict[str, Any] = {}
        self._truth: dict[str, Any] = {}
        self._off: dict[str, Any] = {}
        # For each value that the file lacks: the places of its step and of the steps before it that the file lacks too.
        self._between: dict[str, tuple[Place, ...]] = {}
        self._last: dict[str, int] = {name: number for number, step in enumerate(program.steps) for name in step.inputs}
        for name, tensor in zip(program.inputs, tensors, strict=True):
            self._set(name, tensor.detach().cpu())

    def judge(self, step: Step, value: torch.Tensor) -> Judged:
        own, truth, off = self._computed(step)
        between = (*self._between_inputs(step), step.place)
        if not isinstance(own, torch.Tensor):
            return Judged(step, Off(), between)
        return Judged(step, how_far_off(value, own, truth, off), between)

    def repeats(self, step: Step) -> bool:
        """Whether a step that may draw random numbers returns the same with another seed, like dropout in eval."""
        drawn = []
        for seed in (0, 1):
            with random_state(seed):
                drawn.append(self._computed(step)[0])
        return isinstance(drawn[0], torch.Tensor) and same_values(*drawn)

    def take(self, step: Step, value: torch.Tensor) -> None:
        """Continue with the file's value."""
        self._set(step.name, value)
        self._between.pop(step.name, None)

    def compute(self, step: Step) -> None:
        """Continue with a recomputed value, because the file doesn't have it."""
        own, truth, off = self._computed(step)
        self._own[step.name], self._truth[step.name], self._off[step.name] = own, _raised(truth), off
        self._between[step.name] = (*self._between_inputs(step), step.place)

    def forget(self, number: int) -> None:
        """Drop the values that no later step reads."""
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


def _divergence(program: Program, judged: Judged, where: str) -> Divergence:
    place = judged.step.place
    return Divergence(
        **asdict(place),
        error=judged.off.error,
        noise=judged.off.noise,
        problem=f"{judged.off.problem} at {where}",
        where=where,
        value=program.name_in_file(judged.step),
        also=tuple(other for other in dict.fromkeys(judged.between) if other != place),
    )


def _raising(program: Program, seen: Seen, where: str) -> Divergence | None:
    """The divergence at the operation that raised. Its inputs were right."""
    step = next((step for step in program.steps if program.name_in_file(step) in seen.stopped_at), None)
    if step is None:
        return None
    return _divergence(program, Judged(step, Off(problem="raises"), (step.place,)), where)


def _raised(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_raised, value))
    return _on_cpu(value).to(raised(value.dtype)) if isinstance(value, torch.Tensor) else value


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def located(
    artifact: Artifact,
    reference: Reference,
    measurement: Measurement,
    exported: nn.Module,
    flatten: Flatten,
    device: str,
) -> Located:
    """Find where an artifact that failed the comparison with the reference first diverges.

    An exception in the search goes into the note and isn't raised, because it would hide the failure of the artifact.

    Args:
        measurement: of the artifact; the calls that it names are searched first.
        exported: the module that the artifact was made from.
        flatten: returns the artifact's input tensors for (args, kwargs).
    """
    wheres = named_first(reference, measurement)

    def find() -> Divergence | None:
        found = _in_file(artifact, reference, exported, wheres, flatten, device)
        if found is None and exported is not reference.target:
            found = first_wrong_module(reference, exported, wheres)
        return found

    return _looked_for(find, _nowhere(artifact))


def _nowhere(artifact: Artifact) -> str:
    """The reason why nothing was found in a file, as a clause."""
    if artifact.values is not None:
        return "each part of the file gives what follows from its inputs"
    if artifact.parts is not None:
        return "each module of the file that takes one tensor gives what it should"
    if artifact.source is not None:
        return (
            "a package of machine code has no values to look at, and the program that it was compiled from is right, so that it"
            " was made wrong by the compiler, or written to since"
        )
    return f"a file of the format {artifact.format} gives nothing but its outputs"


def place_in_refused(
    artifact: Artifact,
    tensors: Sequence[torch.Tensor],
    *,
    reference: Reference,
    exported: nn.Module,
    flatten: Flatten,
    device: str,
) -> str:
    """Find where a file that its exporter refused first diverges at given inputs of the file.

    An exception in the search isn't raised, as in `located`.

    Returns:
        A clause; "" if no divergence was found.
    """

    def find() -> Divergence | None:
        known = ((where, tuple(flatten(call.args, call.kwargs))) for where, call in reference.calls())
        wheres = [
            where for where, given in known if all(same_values(*pair) for pair in zip(given, tensors, strict=True))
        ]
        if wheres:
            return _in_file(artifact, reference, exported, wheres[:1], flatten, device)
        sizes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        return _in_steps(artifact, [(f"inputs of {sizes}", tensors)], device)

    found = _looked_for(find, "").divergence
    return "" if found is None else str(found)


def located_module(reference: Reference, measurement: Measurement, candidate: nn.Module) -> Located:
    """Find where a module that failed the comparison first diverges; an exception goes into the note."""
    wheres = named_first(reference, measurement)
    return _looked_for(
        lambda: first_wrong_module(reference, candidate, wheres), "no module gives anything else than the original's"
    )


def fault_of_runtime(artifact: Artifact, is_right: Callable[[Artifact], bool]) -> str:
    """Test whether a failed artifact is right without its runtime's graph optimizations.

    An exception of that run goes into the sentence and isn't raised, as in `located`.

    Returns:
        A sentence; "" if the artifact can't be loaded without optimizations.
    """
    if artifact.unoptimized is None:
        return ""
    try:
        right = is_right(replace(artifact, loader=artifact.unoptimized))
    except Exception as error:  # the runtime is foreign code, and its error must not hide the failure
        logger.debug("the run without optimizations raised", exc_info=True)
        return f"Run without the runtime's graph optimizations, it raised {type(error).__name__}: {quote(error)}."
    if right:
        return "Without the runtime's graph optimizations the file is right: they are at fault, and not the file."
    return "Without the runtime's graph optimizations it is wrong too."


def _looked_for(find: Callable[[], Divergence | None], nowhere: str) -> Located:
    """The result of a search; the note is `nowhere` if it found nothing, or the exception that it raised."""
    try:
        found = find()
    except Exception as error:  # the search runs foreign code, whose error must not hide the failure
        logger.debug("locating raised", exc_info=True)
        return Located(None, f"looking for it raised {type(error).__name__}: {quote(error)}")
    return Located(found, nowhere if found is None else "")


def _in_file(
    artifact: Artifact,
    reference: Reference,
    exported: nn.Module,
    wheres: Sequence[str],
    flatten: Flatten,
    device: str,
) -> Divergence | None:
    if artifact.parts is not None:
        return first_wrong_part(reference, exported, artifact.parts(artifact.path, device), wheres)

    def inputs(call: Call) -> tuple[torch.Tensor, ...]:
        return tuple(flatten(call.args, call.kwargs))

    if artifact.source is not None:
        return first_module_without_value(reference, exported, artifact.source(device), inputs, wheres)
    if artifact.values is None:
        return None
    calls = dict(reference.calls())
    if (found := _in_steps(artifact, ((where, inputs(calls[where])) for where in wheres), device)) is not None:
        return found
    # The program of the file is unknown, or is wrong itself.
    everything = artifact.values(artifact.path, device, None)
    return first_module_without_value(reference, exported, everything, inputs, wheres)


def _in_steps(
    artifact: Artifact, calls: Iterable[tuple[str, Sequence[torch.Tensor]]], device: str
) -> Divergence | None:
    program, values = artifact.program, artifact.values
    if program is None or values is None:
        return None
    names = [program.name_in_file(step) for step in program.steps if step.is_tensor]
    return first_divergence(program, values(artifact.path, device, names), calls)


def named_first(reference: Reference, measurement: Measurement) -> list[str]:
    """The calls of the reference; those that a measurement names come first."""
    told = (*measurement.problems, *(text for each in measurement.outputs for text in (*each.problems, each.where)))
    return sorted((where for where, _ in reference.calls()), key=lambda where: not any(where in text for text in told))
