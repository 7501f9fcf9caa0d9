"""Lossy candidates: how they are made, and how they are judged against the user's budget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from exporters.base import Adapter, ExportRequest
from exporters.errors import ExporterError, StructureError
from exporters.onnx_quantization import KINDS, QuantizedFile, quantized
from exporters.onnx_sensitivity import within_budget
from exporters.registry import exported_format, half_of
from optimize_export.errors import DeviceError, UsageError
from optimize_export.runtime import Route, Runner, open_route, own_routes
from optimize_export.wording import described
from optimizer.exporting import MeasuredExport, remove
from optimizer.model import Call, Samples, errors_of_model
from optimizer.options import AccuracyBudget
from optimizer.parity import WITHIN_BUDGET, Accuracy, accuracy_between, accuracy_of
from optimizer.tuning.benchmark import Candidate, Refused
from optimizer.tuning.candidates import Files, open_in_child
from optimizer.tuning.further_files import FurtherFiles

CalibrationCall = torch.Tensor | tuple[Any, ...] | Mapping[str, Any] | Call
"""One call: a tensor, a tuple of positional arguments, a dict of keyword arguments, or a `Call` of both.

A call with more rows than the example inputs is split.
"""

# The number of random calls to calibrate with; each has the batch size of the example inputs.
_RANDOM = 8
# The draws from this number on are used for nothing else.
_FIRST_DRAW = 1000
# One of this many calls is held out.
_HELD_OUT = 4


def is_lossy(route: Route) -> bool:
    """Whether a route loses more than rounding."""
    return exported_format(route.format) != route.format or route.is_lowered


@dataclass(frozen=True)
class Recipe:
    """How a lossy file was made."""

    kind: str
    """One of `exporters.onnx_quantization`, or the half precision."""
    kept: tuple[str, ...] = ()
    """What stays in float: the names of nodes, or for half precision the paths of modules."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any], format: str) -> Recipe:
        """The recipe that a manifest records for a file of this format; KeyError, TypeError or ValueError if none."""
        kinds: tuple[str | None, ...] = KINDS.get(format, (half_of(format),))
        if data["kind"] not in kinds:
            raise ValueError(f"{format} isn't made as {data['kind']}")
        return cls(data["kind"], tuple(map(str, data["kept"])))

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "kept": list(self.kept)}


class Lossy:
    """Makes lossy candidates, and judges them at the golden calls and at the calls held out of the calibration."""

    def __init__(
        self, measured: MeasuredExport, budget: AccuracyBudget, calibration: Calibration, further: FurtherFiles
    ) -> None:
        self.budget = budget
        self.calibration = calibration
        # Sentences for the user.
        self.notes: tuple[str, ...] = ()
        # The seconds that are left for making files; None for no limit.
        self.left: Callable[[], float | None] = lambda: None
        # Times a call of a file outside the budget, given its format.
        self.seconds_of: Callable[[str, Runner], float | None] = lambda format, runner: None
        self._measured, self._further = measured, further
        # By route, the accuracies of files that were made here: they are judged then.
        self._accuracies: dict[str, Accuracy] = {}

    def proven(self, candidate: Candidate, files: Files) -> Candidate:
        """The candidate with its accuracy.

        Raises:
            Refused: it is outside the budget.
        """
        assert candidate.route is not None
        known = self._accuracies.get(str(candidate.route))
        accuracy = self.accuracy(files.open_for_proof(candidate.route)) if known is None else known
        if (reason := accuracy.why_not(self.budget)) is not None:
            raise Refused(f"outside the budget: {reason}", accuracy)
        return replace(candidate, accuracy=accuracy)

    def is_judged(self, candidate: Candidate) -> bool:
        """Whether the accuracy is known, because the file was judged when it was made."""
        return str(candidate.route) in self._accuracies

    def accuracy(self, runner: Runner) -> Accuracy:
        """The worst figures of a runner over all calls, or over those held out if they are outside the budget already."""
        names = self._measured.adapter.output_names
        apart = [tuple(tensor.to(runner.device) for tensor in call) for call in self.calibration.held_out]
        answers = ((runner(*call), target) for call, target in zip(apart, self._originals, strict=True))
        held_out = accuracy_between(names, answers)
        if held_out.is_below(self.budget):
            return held_out
        measurement, _ = self._measured.parity.measure_loaded(runner, None)
        return accuracy_of(measurement, names).and_worse(held_out)

    def made(self, format: str, files: Files, recipe: Recipe | None = None) -> dict[str, Any]:
        """Make a quantized file, or one in half precision, within the budget; return its entry for the manifest.

        Args:
            recipe: how to quantize it; None to find the fastest way. In half precision, layers are measured again.

        Raises:
            Refused: the file can't be made, or is outside the budget even with the most sensitive nodes or layers in
                float. No file is left then.
        """
        if format == "onnx-int8" and self.calibration.random:
            self.notes = ("int8 was calibrated with random inputs: pass real ones as the calibration",)
        before = set(files.folder.iterdir())
        try:
            return self._quantized(format, files, recipe) if half_of(format) is None else self._in_half(format, files)
        except (ExporterError, DeviceError, Refused) as error:
            remove(set(files.folder.iterdir()) - before)
            if isinstance(error, Refused):
                raise
            # The reason is a clause, the error a sentence.
            raise Refused(f"it can't be made: {str(error).rstrip('.')}") from error

    def _in_half(self, format: str, files: Files) -> dict[str, Any]:
        entry = self._further.write(format, files.folder, self.left())
        (route,) = own_routes([format])
        path = files.folder / entry["path"]
        accuracy = self.accuracy(open_in_child(path, route, files.device, files.inputs))
        if accuracy.why_not(self.budget) is not None:
            seconds = self.seconds_of(format, open_route(path, route, files.device))
            raise Refused(f"outside the budget: it has {accuracy}", accuracy, seconds)
        self._accuracies[str(route)] = accuracy
        return {**entry, **self._judged(accuracy)}

    def _quantized(self, format: str, files: Files, recipe: Recipe | None) -> dict[str, Any]:
        source = files.folder / files.entry("onnx")["path"]
        # Such as `model.int8.onnx`.
        target = source.with_suffix(format.removeprefix("onnx").replace("-", ".", 1) + source.suffix)
        route = Route(format, "onnxruntime")
        found: list[Accuracy] = []
        # The best file outside the budget, with the time of a call.
        best, seconds = Accuracy(problem="it wasn't judged"), None

        def accept(path: Path) -> bool:
            nonlocal best, seconds
            found.append(self.accuracy(open_in_child(path, route, files.device, files.inputs)))
            if found[-1].why_not(self.budget) is None:
                return True
            if _closeness(found[-1]) >= _closeness(best):
                best, seconds = found[-1], self.seconds_of(format, open_route(path, route, files.device))
            stop_if_late()
            return False

        def stop_if_late() -> None:
            if (left := self.left()) is not None and left < 0:
                raise Refused(f"the time was up, and the best so far has {best}", best, seconds)

        last = KINDS[format][-1]
        made = None
        for kind in (kind for kind in KINDS[format] if recipe is None or kind == recipe.kind):
            if recipe is None and kind == last:
                made = within_budget(source, target, last, self._rows, accept, check=stop_if_late).accepted
            else:
                file = quantized(source, target, kind, self._rows, keep=() if recipe is None else recipe.kept)
                made = file if accept(target) else None
            if made is not None:
                break
        else:
            raise Refused(f"outside the budget: the best has {best}", best, seconds)
        self._accuracies[str(route)] = found[-1]
        return self._entry(format, files, made, found[-1])

    def _entry(self, format: str, files: Files, made: QuantizedFile, accuracy: Accuracy) -> dict[str, Any]:
        return {
            **files.entry("onnx"),
            "format": format,
            "path": made.files[0].name,
            "files": [path.name for path in made.files],
            "bytes": sum(path.stat().st_size for path in made.files),
            "route": made.kind,
            "refused": [],
            "notes": [],
            "placement": None,
            **self._judged(accuracy),
            "quantization": Recipe(made.kind, made.kept).to_json(),
        }

    def _judged(self, accuracy: Accuracy) -> dict[str, Any]:
        """The fields of an entry on its accuracy."""
        told = {
            "ok": True,
            "verdict": WITHIN_BUDGET,
            "reason": f"{accuracy} (budget: {self.budget})",
            "outputs": [output.to_json() for output in accuracy.outputs],
        }
        budget = {"budget": asdict(self.budget), **accuracy.to_json()}
        return {"parity": told, "measurement": None, "accuracy": budget}

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        names = self._measured.adapter.input_names
        try:
            return [
                {name: tensor.numpy() for name, tensor in zip(names, call, strict=True)}
                for call in self.calibration.used
            ]
        except TypeError as error:
            raise Refused("it can't be made: calibration uses numpy, which lacks the dtype of an input") from error

    @cached_property
    def _originals(self) -> list[tuple[torch.Tensor, ...]]:
        """The original's outputs at the calls held out of the calibration."""
        reference, found = self._measured.reference, []
        for call in self.calibration.held_out:
            tensors = [tensor.to(reference.original.device) for tensor in call]
            given = Call(*self._measured.adapter.call_arguments(tensors))
            with errors_of_model(given, "a calibration call"):
                seen = reference.run(given)
            found.append(tuple(seen.values[name] for name in seen.of_kind("output")))
        return found


def _closeness(accuracy: Accuracy) -> tuple[bool, float]:
    return accuracy.problem is None, accuracy.cosine or 0.0


@dataclass(frozen=True)
class Calibration:
    """Flat inputs of the files, on the CPU."""

    used: tuple[tuple[torch.Tensor, ...], ...]
    """Calls to calibrate with."""
    held_out: tuple[tuple[torch.Tensor, ...], ...]
    """Calls to judge the result with, in addition to the golden calls."""
    random: bool
    """Whether they were drawn at random, because the user has given none."""


def calibration_of(
    given: Iterable[CalibrationCall] | None, samples: Samples, adapter: Adapter, request: ExportRequest
) -> Calibration:
    """Take the user's calibration calls, or draw random ones. Every fourth call is held out."""
    if given is None:
        calls = [samples.at(samples.batch_size, _FIRST_DRAW + number) for number in range(_RANDOM)]
        flat = [adapter.flatten_inputs(call.args, call.kwargs) for call in calls]
    else:
        example = adapter.flatten_inputs(samples.given.args, samples.given.kwargs)
        flat = []
        for number, call in enumerate(given):
            named = call.file if isinstance(call, Call) and call.file else f"Calibration call {number}"
            whole = _flat(call, named, adapter)
            parts = _split(whole, example, open_batch=request.dynamic_batch)
            if _rows(whole) == 0 and _rows(example):
                raise UsageError(f"{named} has a batch of no rows: use at least one row.")
            for name, tensor, part, other in zip(adapter.input_names, whole, parts[0], example, strict=True):
                has_batch = request.dynamic_batch and other.dim() and other.shape[0] == _rows(example)
                free = (*request.open_dims.get(name, ()), *([0] if has_batch else []))
                _refuse_misfit(f"{named}: `{name}`", tensor, part, other, free)
            flat += parts
    if not flat:
        raise UsageError("calibration is empty: pass at least one call.")
    flat = [tuple(tensor.detach().cpu() for tensor in call) for call in flat]
    held_out = flat[_HELD_OUT - 1 :: _HELD_OUT]
    used = [call for number, call in enumerate(flat) if number % _HELD_OUT != _HELD_OUT - 1]
    return Calibration(tuple(used), tuple(held_out), given is None)


def _flat(call: CalibrationCall, named: str, adapter: Adapter) -> tuple[torch.Tensor, ...]:
    if isinstance(call, Mapping):
        call = Call((), dict(call))
    elif isinstance(call, torch.Tensor | tuple | list):
        call = Call((call,) if isinstance(call, torch.Tensor) else tuple(call))
    elif not isinstance(call, Call):
        raise UsageError(
            f"{named} is of type {type(call).__name__}: pass a tensor, a tuple of arguments or a dict "
            "of keyword arguments."
        )
    try:
        return adapter.flatten_inputs(call.args, call.kwargs)
    except StructureError as error:
        raise UsageError(f"{named} doesn't fit the model: {error}") from error


def _refuse_misfit(
    named: str, whole: torch.Tensor, part: torch.Tensor, other: torch.Tensor, free: Collection[int]
) -> None:
    """Compare the first part of a calibration input with the example input, whose `free` dims may have any size."""
    sizes = zip(part.shape, other.shape, strict=False)
    fits = part.dim() == other.dim() and all(a == b or dim in free for dim, (a, b) in enumerate(sizes))
    if part.dtype != other.dtype or not fits:
        raise UsageError(f"{named} is {described(whole)}, but the example input is {described(other)}.")
    # A mask may contain infinity.
    if bool(other.isfinite().all()) and not bool(whole.isfinite().all()):
        raise UsageError(f"{named} contains NaN or infinity: leave out this call.")


def _rows(call: Sequence[torch.Tensor]) -> int | None:
    return next((tensor.shape[0] for tensor in call if tensor.dim()), None)


def _split(
    call: tuple[torch.Tensor, ...], example: Sequence[torch.Tensor], *, open_batch: bool
) -> list[tuple[torch.Tensor, ...]]:
    """Split a call with more rows than the example into calls with as many.

    The last one has fewer rows; it is left out if the batch size is fixed.
    """
    rows, batch = _rows(call), _rows(example)
    if not batch or rows is None or rows <= batch:
        return [call]
    starts = range(0, rows if open_batch else rows - batch + 1, batch)
    return [
        tuple(each[start : start + batch] if each.dim() and each.shape[0] == rows else each for each in call)
        for start in starts
    ]
