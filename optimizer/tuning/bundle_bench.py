"""Time the files of a finished bundle on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from exporters.child_process import one_child
from optimize_export.errors import BundleError
from optimize_export.manifest import damage_of
from optimize_export.runtime import Route, is_installed
from optimizer.bundle import open_bundle
from optimizer.parity import Accuracy
from optimizer.tuning.benchmark import Benchmark, Refused, opened_all, timed
from optimizer.tuning.files import Files, frozen


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
    ready, dropped = opened_all([files.candidate(route, _accuracy_of(bundle.manifest, route)) for route in routes])
    threads, sizes = torch.get_num_threads(), () if call.batch_size is None else (call.batch_size,)
    if not ready:
        return Benchmark(sizes, threads, 0, tuple(dropped), None, "no file runs here")
    finished = torch.cuda.synchronize if device == "cuda" else lambda: None
    try:
        found = timed(ready, [each.candidate.name for each in ready], seconds, finished)
    except Refused as refused:
        return Benchmark(sizes, threads, 0, tuple(dropped), None, f"not measured: {refused}")
    route = next(figure.route for figure in found.figures if figure.name == found.chosen)
    first = ready[0].candidate.name
    reason = f"run {found.chosen}: no simpler file is as fast here, and no other is surely faster"
    reason += f"; the speed-ups are over {first}" if len(ready) > 1 else ""
    return Benchmark(sizes, threads, found.rounds, (*found.figures, *dropped), route, reason, found.notes)


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
