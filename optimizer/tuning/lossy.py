"""Lossy candidates: how they are made, and how they are judged against the user's budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from exporters.errors import ExporterError
from exporters.onnx_quantization import KINDS, QuantizedFile, kinds, quantized
from exporters.onnx_sensitivity import within_budget
from exporters.registry import exported_format, half_of
from optimize_export.errors import DeviceError
from optimize_export.runtime import Route, Runner, open_route, own_routes
from optimize_export.wording import listed
from optimizer.accuracy import Evaluation, NotScored, PairedTest, Search
from optimizer.exporting import ArtifactParity, MeasuredExport, remove
from optimizer.model import Call, errors_of_model
from optimizer.options import AccuracyBudget
from optimizer.parity import WITHIN_BUDGET, Accuracy, RowOrder, accuracy_between, accuracy_of
from optimizer.tuning.benchmark import Candidate, Refused
from optimizer.tuning.calibration import Calibration
from optimizer.tuning.candidates import Files, open_in_child
from optimizer.tuning.further_files import FurtherFiles

# The longest time of a quick test of the metric, as a share of what is left.
_QUICK_TEST = 0.1


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
        known: tuple[str | None, ...] = KINDS.get(format, (half_of(format),))
        if data["kind"] not in known:
            raise ValueError(f"{format} isn't made as {data['kind']}")
        return cls(data["kind"], tuple(map(str, data["kept"])))

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "kept": list(self.kept)}


class Lossy:
    """Makes lossy candidates, and judges them at the golden calls and at the calls held out of the calibration.

    Where the budget limits the drop of the user's metric, a quick test of it on examples for the search decides which of
    them are candidates, and a final one on other examples whether the chosen one is shipped.
    """

    def __init__(
        self,
        measured: MeasuredExport,
        budget: AccuracyBudget,
        calibration: Calibration,
        further: FurtherFiles,
        evaluation: Evaluation | None = None,
    ) -> None:
        self.budget = budget
        self.calibration = calibration
        self._notes: tuple[str, ...] = ()
        # The seconds that are left for making files; None for no limit.
        self.left: Callable[[], float | None] = lambda: None
        # Times a call of a file outside the budget, given its format.
        self.seconds_of: Callable[[str, Runner], float | None] = lambda format, runner: None
        # Whether candidates are searched for, and not just one of an earlier search proven again.
        self.searches = False
        self._measured, self._further, self._evaluation = measured, further, evaluation
        self._search = None
        if evaluation is not None and budget.drop is not None and budget.confidence is not None:
            alpha, is_random = 1 - budget.confidence, evaluation.is_in_random_order
            self._search = Search(budget.drop, alpha, evaluation.aggregate, random_order=is_random)
        # By route without the settings that change no precision: quick tests.
        self._tested: dict[str, Accuracy] = {}
        # By route, the accuracies of files that were made here: they are judged then.
        self._accuracies: dict[str, Accuracy] = {}

    def proven(self, candidate: Candidate, files: Files) -> Candidate:
        """The candidate with its accuracy.

        Raises:
            Refused: it is outside the budget.
        """
        assert candidate.route is not None
        known = self._accuracies.get(str(candidate.route))
        accuracy = self._judged_by(files.open_for_proof(candidate.route), candidate.route) if known is None else known
        if (reason := accuracy.why_not(self.budget)) is not None:
            raise self._refused(reason, accuracy)
        return replace(candidate, accuracy=accuracy)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user."""
        return (*self._notes, *(() if self._evaluation is None else self._evaluation.notes))

    @property
    def tests_last(self) -> bool:
        """Whether `shipped` may refuse a candidate."""
        return self._search is not None

    def shipped(self, candidate: Candidate, files: Files, *, is_last: bool = True) -> Candidate:
        """The candidate with the final test of the metric, if the budget limits its drop.

        Args:
            is_last: whether no other kind of file may be tested after this one.

        Raises:
            Refused: it is outside the budget, or the examples are too few to decide.
        """
        assert candidate.route is not None
        assert candidate.accuracy is not None
        if self._search is None:
            return candidate
        runner = files.open_for_proof(candidate.route)
        test = self._search.final(is_last=is_last)
        accuracy = self._with_metric(candidate.accuracy, runner, candidate.route, test, "final")
        if (reason := accuracy.why_not(self.budget)) is not None:
            # A problem is a clause of its own.
            raise self._refused(reason if accuracy.problem else f"{reason} in the final test", accuracy)
        return replace(candidate, accuracy=accuracy)

    def is_judged(self, candidate: Candidate) -> bool:
        """Whether the accuracy is known, because the file was judged when it was made."""
        return str(candidate.route) in self._accuracies

    def accuracy(self, runner: Runner) -> Accuracy:
        """The worst figures of a runner over all calls, or over those held out if they are outside the budget already."""
        names = self._measured.adapter.output_names
        apart = [tuple(tensor.to(runner.device) for tensor in call) for call in self.calibration.held_out]
        answers = ((runner(*call), target) for call, target in zip(apart, self._originals, strict=True))
        rows, _ = self._orders
        held_out = accuracy_between(names, answers, orders=rows)
        if held_out.is_below(self.budget):
            return held_out
        measurement, _ = self._parity.measure_loaded(runner, None)
        return accuracy_of(measurement, names).and_worse(held_out)

    def _judged_by(self, runner: Runner, route: Route, *, anew: bool = False) -> Accuracy:
        """The accuracy of a runner, with a quick test of the metric if it is within the rest of the budget.

        Args:
            anew: its file was written again under the same route.
        """
        accuracy = self.accuracy(runner)
        if self._search is None or not self.searches or accuracy.why_not(self.budget) is not None:
            return accuracy
        kind = str(alike(route))
        known = self._tested.get(kind)
        if known is None or anew:
            left = self.left()
            until = math.inf if left is None else time.monotonic() + _QUICK_TEST * left
            known = self._with_metric(accuracy, runner, route, self._search.quick(), "search", until)
            self._tested[kind] = known
        return replace(accuracy, metric=known.metric, problem=known.problem)

    def _with_metric(
        self,
        accuracy: Accuracy,
        runner: Runner,
        route: Route,
        test: PairedTest,
        part: Literal["search", "final"],
        until: float = math.inf,
    ) -> Accuracy:
        assert self._evaluation is not None
        try:
            metric = self._evaluation.metric(
                str(route), runner, test, part, self.budget, lambda: time.monotonic() > until
            )
        except NotScored as error:
            return replace(accuracy, problem=f"it has no score: {error}")
        return replace(accuracy, metric=metric)

    @cached_property
    def _orders(self) -> tuple[tuple[RowOrder, ...], dict[str, str]]:
        """The outputs whose rows scores put in order, and the operation that chooses an output, by names in the files."""
        reference = self._measured.reference
        found = reference.find_orders()
        names = dict(zip(reference.output_names, self._measured.adapter.output_names, strict=False))
        chosen = {names[name]: by for name, by in found.chosen.items() if name in names}
        return tuple(order.renamed(names) for order in found.rows), chosen

    @cached_property
    def _parity(self) -> ArtifactParity:
        """Compares rows that scores put in order as sets, where the scores are equal for the candidate."""
        names = dict(zip(self._measured.adapter.output_names, self._measured.reference.output_names, strict=False))
        rows = [order.renamed(names) for order in self._orders[0]]
        return replace(self._measured.parity, reference=self._measured.reference.in_orders(rows))

    def _refused(self, told: str, accuracy: Accuracy, seconds: float | None = None) -> Refused:
        """The refusal of a file, with the ways out where scores choose what the file is judged by."""
        reason = _refusal(accuracy, told)
        rows, chosen = self._orders
        chosen = {**chosen, **{name: order.by for order in rows for name in order.names}}
        names = [output.name for output in accuracy.outputs if output.name in chosen and output.is_below(self.budget)]
        if self.budget.top1 is not None and self.budget.cosine is None and self.budget.drop is None:
            names = names or [name for order in accuracy.orders for name in order.unjudged]
        if names:
            names = [name for name in names if chosen[name] == chosen[names[0]]]
            reason += (
                f"; {chosen[names[0]]} chooses what {listed(names)} has, and where scores are close another choice may be as "
                "good, which this budget can't tell: judge the model by its metric (`evaluate` with `--accuracy "
                '"drop<=0.5%"`), or export it before its post-processing, without this operation'
            )
        return Refused(reason, accuracy, seconds)

    def made(self, format: str, files: Files, recipe: Recipe | None = None) -> dict[str, Any]:
        """Make a quantized file, or one in half precision, within the budget; return its entry for the manifest.

        Args:
            recipe: how to quantize it; None to find the fastest way. In half precision, layers are measured again.

        Raises:
            Refused: the file can't be made, or is outside the budget even with the most sensitive nodes or layers in
                float. No file is left then.
        """
        if format == "onnx-int8" and self.calibration.random:
            self._notes = ("int8 was calibrated with random inputs: pass real ones as the calibration",)
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
        accuracy = self._judged_by(open_in_child(path, route, files.device, files.inputs), route)
        if accuracy.why_not(self.budget) is not None:
            seconds = self.seconds_of(format, open_route(path, route, files.device))
            raise self._refused(_figures("it has", accuracy, self.budget), accuracy, seconds)
        self._accuracies[str(route)] = accuracy
        return {**entry, **self.judged(accuracy)}

    def _quantized(self, format: str, files: Files, recipe: Recipe | None) -> dict[str, Any]:
        source = files.folder / files.entry("onnx")["path"]
        # Such as `model.int8.onnx`.
        target = source.with_suffix(format.removeprefix("onnx").replace("-", ".", 1) + source.suffix)
        (route,) = own_routes([format])
        if route.runtime == "openvino":
            route = files.in_openvino(format)
        found: list[Accuracy] = []
        # The best file outside the budget, with the time of a call.
        best, seconds = Accuracy(problem="it wasn't judged"), None

        def accept(path: Path) -> bool:
            nonlocal best, seconds
            found.append(self._judged_by(open_in_child(path, route, files.device, files.inputs), route, anew=True))
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
        made: QuantizedFile | None = None
        errors: Mapping[str, float] = {}
        for kind in (kind for kind in kinds(format, source) if recipe is None or kind == recipe.kind):
            if recipe is None and kind == last:
                search = within_budget(source, target, last, self._rows, accept, check=stop_if_late)
                made, errors = search.accepted, search.errors
            else:
                file = quantized(source, target, kind, self._rows, keep=() if recipe is None else recipe.kept)
                made = file if accept(target) else None
            if made is not None:
                break
        else:
            raise self._refused(_figures("the best has", best, self.budget), best, seconds)
        self._accuracies[str(route)] = found[-1]
        entry = self._entry(format, files, made, found[-1])
        if errors:
            entry["quantization"]["why"] = [_cost(errors[name]) for name in made.kept]
        return entry

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
            **self.judged(accuracy),
            "quantization": Recipe(made.kind, made.kept).to_json(),
        }

    def judged(self, accuracy: Accuracy) -> dict[str, Any]:
        """The fields of an entry on its accuracy."""
        told = {
            "ok": True,
            "verdict": WITHIN_BUDGET,
            "reason": f"{accuracy} (budget: {self.budget})",
            "outputs": [output.to_json() for output in accuracy.outputs],
        }
        budget = {"budget": self.budget.to_json(), **accuracy.to_json()}
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


def _closeness(accuracy: Accuracy) -> tuple[bool, float, float]:
    drop = math.inf if accuracy.metric is None else accuracy.metric.drop
    return accuracy.problem is None, -drop, accuracy.cosine or 0.0


def _cost(error: float) -> str:
    """What it would cost to quantize a node, from its error in `onnx_sensitivity`."""
    return f"quantized alone, it changes the outputs by {100 * math.sqrt(error):.2g} %"


def _figures(start: str, accuracy: Accuracy, budget: AccuracyBudget) -> str:
    # What is told of a metric has the reason.
    return f"{start} {accuracy}" if accuracy.metric is not None else f"{start} {accuracy}: {accuracy.why_not(budget)}"


def _refusal(accuracy: Accuracy, told: str) -> str:
    """Why a candidate isn't used: it is outside the budget, with what is told of it; or the examples are too few to say."""
    metric = accuracy.metric
    if metric is not None and metric.verdict == "undecided" and metric.part == "final":
        return metric.why_not or ""
    return f"outside the budget: {told}"


def alike(route: Route) -> Route:
    """The route without the settings that change only how fast it is."""
    return replace(route, settings={k: v for k, v in route.settings.items() if k in ("precision", "tf32")})
