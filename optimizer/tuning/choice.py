"""Choose the file of an export or bundle and the way to run it: by timing, by tuning, or as chosen earlier."""

from __future__ import annotations

import gc
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from exporters.aoti import AotiExporter
from exporters.child_process import one_child
from exporters.errors import ExportError
from exporters.registry import exported_format
from optimize_export.errors import BundleError, ExportFailed, ParityError, UsageError
from optimize_export.manifest import MANIFEST, damage_of, read_json, read_manifest, sums_problem
from optimize_export.runtime import Route, is_installed
from optimize_export.wording import quote
from optimizer.accuracy import Evaluation
from optimizer.bundle import open_bundle
from optimizer.exporting import ExportJob, MeasuredExport, WrittenFiles, remove
from optimizer.model import random_state, release_memory
from optimizer.options import AccuracyBudget
from optimizer.parity import Accuracy
from optimizer.tuning.benchmark import Benchmark, Figure, Opened, Refused, budget_text, open_all, timed
from optimizer.tuning.calibration import Calibration
from optimizer.tuning.candidates import Bench, Files, frozen
from optimizer.tuning.lossy import Lossy, Recipe, is_lossy
from optimizer.tuning.tuner import Tuner

# Seconds for all rounds of the timing that every export ends with.
_SECONDS = 3.0


@dataclass(frozen=True)
class Choices:
    """A route that was chosen earlier."""

    path: Path
    """The manifest."""
    route: Route
    recipe: Recipe | None = None
    """How its file is made, if it is a quantized one or one in half precision."""


def choose(
    job: ExportJob,
    measured: MeasuredExport,
    calibration: Calibration | None,
    written: WrittenFiles,
    folder: Path,
    choices: Choices | None = None,
    evaluation: Evaluation | None = None,
) -> Benchmark | None:
    """Recommend one of the files; None if nobody asks for it. One that tuning made is added to those written.

    Args:
        calibration: None if nothing lossy is allowed.
        choices: a route that was chosen earlier, which is proven instead of timing.
        evaluation: the user's metric, whose drop the budget limits; None without one.
    """
    if not (job.bench or job.tune or choices):
        return None
    # Once, because a collection takes long after an export: it visits all objects of torch's exporters.
    gc.collect()
    bench = Bench(job, measured, written, folder)
    lossy = None if calibration is None else Lossy(measured, job.budget, calibration, bench.further, evaluation)
    try:
        # The timed model may draw random numbers.
        with random_state():
            if choices is not None:
                return _repeat_choice(bench, lossy, written, choices)
            if (reason := bench.too_large) is not None:
                return bench.unmeasured(reason)
            return _tune(bench, lossy, written) if job.tune else _timed(bench)
    finally:
        bench.end_compiling()
        if bench.settings is not None:
            bench.settings.put_in_force()
        release_memory()


def _timed(bench: Bench) -> Benchmark:
    """Time each file in its own runtime next to the original."""
    bench.job.progress("bench", 0, 1, "latency and memory")
    candidates = [bench.files.candidate(route) for route in bench.files.own_routes]

    def proven(opened: Opened) -> Opened:
        assert opened.candidate.route is not None
        bench.prove(opened.candidate.route)
        return opened

    candidates += [bench.files.candidate(route) for each in candidates if (route := frozen(each.route)) is not None]
    try:
        eager = bench.open_eager()
        ready, dropped = open_all(candidates, proven)
        return bench.conclude([eager, *ready], dropped, _SECONDS)
    except Refused as reason:
        return bench.unmeasured(f"not measured: {reason}")


def _tune(bench: Bench, lossy: Lossy | None, written: WrittenFiles) -> Benchmark:
    """Recommend one of the files. If tuning made it, it is added to those written; the others it made are removed."""
    tuner = Tuner(bench, lossy, bench.job.tune_seconds)
    try:
        found = tuner.run()
    except Refused as reason:
        found = bench.unmeasured(f"not measured: {reason}")
    chosen = tuner.entries.pop("" if found.recommended is None else found.recommended.format, None)
    if chosen is not None:
        _add(chosen, bench, written)
    for entry in tuner.entries.values():
        remove(bench.files.folder / name for name in entry["files"])
    return replace(found, notes=(*found.notes, *(() if lossy is None else lossy.notes)))


def _add(entry: dict[str, Any], bench: Bench, written: WrittenFiles) -> None:
    """Add a file that was made here to those of the export."""
    written.entries.append(entry)
    written.reports |= {name: report for name, report in bench.further.reports.items() if name == entry["format"]}


def _repeat_choice(bench: Bench, lossy: Lossy | None, written: WrittenFiles, choices: Choices) -> Benchmark:
    """Take the route that was chosen earlier, and prove it again; nothing is timed."""
    try:
        accuracy = _proven_again(bench, lossy, written, choices)
    except Refused as refused:
        raise ParityError(
            f"{choices.route}, which {choices.path} chooses, can't be used: {refused}. If it was chosen for another "
            "model, tune this one."
        ) from refused
    found = bench.unmeasured(f"ship {choices.route}, as chosen earlier{budget_text(accuracy)}")
    figures = () if accuracy is None else (Figure(str(choices.route), choices.route, accuracy=accuracy),)
    notes = [*(f"{route}: {lost}" for route, lost in bench.lost.items()), *(() if lossy is None else lossy.notes)]
    return replace(found, recommended=choices.route, figures=figures, notes=tuple(notes))


def _proven_again(bench: Bench, lossy: Lossy | None, written: WrittenFiles, choices: Choices) -> Accuracy | None:
    """Prove a route. If the export doesn't write its file, it is made before, and added to those written afterwards.

    Returns:
        The accuracy of a lossy route; None for an exact one.

    Raises:
        Refused: it isn't proven, or is outside the budget. No file is left then.
        ExportFailed: its file couldn't be exported.
    """
    route = choices.route
    needed = exported_format(route.format)
    if needed in written.missing:
        raise ExportFailed(
            f"{choices.path} chooses {route}, and its file couldn't be exported: {written.missing[needed]}"
        )
    if not is_lossy(route):
        if all(entry["format"] != route.format for entry in written.entries):
            try:
                entry = bench.further.write(route.format, bench.files.folder)
            except Refused as refused:
                if not isinstance(refused.__cause__, ExportError):
                    raise
                raise ExportFailed(
                    f"{choices.path} chooses {route}, and its file couldn't be exported: {refused}."
                ) from refused
            bench.files.entries = [*bench.files.entries, entry]
            _add(entry, bench, written)
        bench.prove(route)
        return None
    assert lossy is not None
    made = [] if needed == route.format else [lossy.made(route.format, bench.files, choices.recipe)]
    files = replace(bench.files, entries=[*bench.files.entries, *made])
    try:
        accuracy = lossy.shipped(lossy.proven(files.candidate(route), files), files).accuracy
        assert accuracy is not None
        made = [entry | lossy.judged(accuracy) for entry in made]
        bench.keep_nonfinite(route, files.open_for_proof(route))
    except BaseException:
        remove(files.folder / name for entry in made for name in entry["files"])
        raise
    written.entries.extend(made)
    return accuracy


def read_choices(path: str | Path, formats: Collection[str], budget: AccuracyBudget) -> Choices:
    """Read the route that a bundle or its manifest recommends, for an export with these formats and this budget."""
    place = Path(os.path.expanduser(path))
    is_bundle = place.is_dir()
    file = place / MANIFEST if is_bundle else place
    try:
        manifest = read_manifest(place) if is_bundle else read_json(file, follow=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else quote(error)
        raise UsageError(f"The choices {file} can't be read: {reason}.") from error
    if is_bundle and (problem := sums_problem(place, manifest)):
        raise BundleError(f"{place} is damaged: {problem}")
    benchmark = manifest.get("benchmark") if isinstance(manifest, dict) else None
    recommended = benchmark.get("recommended") if isinstance(benchmark, dict) else None
    if not isinstance(recommended, dict):
        raise UsageError(f"{file} recommends no file: pass a bundle that was tuned or timed, or its {MANIFEST}.")
    try:
        route = Route.from_json(recommended)
    except BundleError as error:
        raise UsageError(f"{file} recommends a route that can't be used: {error}") from error
    needed = exported_format(route.format)
    if needed not in formats and needed != AotiExporter.name:
        raise UsageError(f"{file} chooses {route}, which needs the format {needed}: add it to the formats.")
    if is_lossy(route) and budget.is_exact:
        raise UsageError(f"{file} chooses {route}, which is lossy: add a budget, such as `accuracy=0.999`.")
    return Choices(file, route, _recipe(manifest, route.format, file))


def _recipe(manifest: Mapping[str, Any], format: str, file: Path) -> Recipe | None:
    if exported_format(format) == format:
        return None
    try:
        artifact = next(each for each in manifest["artifacts"] if each["format"] == format)
        return Recipe.from_json(artifact["quantization"], format)
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise UsageError(f"{file} doesn't say how its {format} file was made: pass a whole {MANIFEST}.") from error


# ---------------------------------------------------------------------------------------------------- a finished bundle


@one_child()
def bench_bundle(path: str | Path, *, device: str = "cpu", seconds: float = 5.0) -> Benchmark:
    """Time the files of a bundle side by side, in every runtime that is installed, on the first golden call.

    The original isn't there, so speed-ups are relative to the first file: the recommended one, if there is one. The
    bundle isn't changed.

    Args:
        path: the bundle.
        device: "cpu" or "cuda".
        seconds: for all rounds.

    Raises:
        BundleError: there is no bundle, or a file was changed.
    """
    bundle = open_bundle(path)
    if damage := damage_of(bundle.path, bundle.manifest):
        raise BundleError(f"{bundle.path} is damaged, and no file is run: {next(iter(damage.values()))}")
    call = bundle.golden()[0]
    inputs = [tensor.to(device) for tensor in call.inputs.values()]
    files = Files(bundle.path, bundle.manifest["artifacts"], device, inputs)
    routes = _routes(files, bundle.manifest)
    ready, dropped = open_all([files.candidate(route, _accuracy_of(bundle.manifest, route)) for route in routes])
    threads, sizes = torch.get_num_threads(), () if call.batch_size is None else (call.batch_size,)
    if not ready:
        return Benchmark(sizes, threads, 0, tuple(dropped), None, "no file runs here")
    finished = torch.cuda.synchronize if device == "cuda" else lambda: None
    try:
        found = timed(ready, [each.candidate.name for each in ready], seconds, finished)
    except Refused as refused:
        return Benchmark(sizes, threads, 0, tuple(dropped), None, f"not measured: {refused}")
    first = ready[0].candidate.name
    reason = f"run {found.chosen}: no simpler file is as fast here, and no other is surely faster"
    reason += f"; the speed-ups are over {first}" if len(ready) > 1 else ""
    return Benchmark(sizes, threads, found.rounds, (*found.figures, *dropped), found.route, reason, found.notes)


def _routes(files: Files, manifest: Mapping[str, Any]) -> list[Route]:
    found = files.own_routes
    found += [route for each in found if (route := frozen(each)) is not None]
    if files.device == "cpu" and is_installed("openvino"):
        found += [Route(each.format, "openvino") for each in found if each.runtime == "onnxruntime"]
    recommended = (manifest.get("benchmark") or {}).get("recommended")
    return found if recommended is None else list({str(r): r for r in (Route.from_json(recommended), *found)}.values())


def _accuracy_of(manifest: Mapping[str, Any], route: Route) -> Accuracy | None:
    """The accuracy of a lossy route, as the export measured it."""
    artifact = next(each for each in manifest["artifacts"] if each["format"] == route.format)
    figures = (manifest.get("benchmark") or {}).get("figures", ())
    found = [figure["accuracy"] for figure in figures if figure["route"] == route.to_json()]
    accuracy = next(filter(None, [*found, artifact.get("accuracy")]), None)
    return None if accuracy is None else Accuracy.from_json(accuracy)
