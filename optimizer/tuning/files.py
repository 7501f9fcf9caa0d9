"""Files as candidates: open them in runtimes, and time those of a finished bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from exporters.child_process import InChild, can_start, one_child
from optimize_export.errors import BundleError
from optimize_export.gpu_settings import GpuSettings
from optimize_export.manifest import damage_of
from optimize_export.runtime import Route, Runner, is_installed, open_route, own_routes, require_runtime
from optimizer.bundle import open_bundle
from optimizer.parity import Accuracy
from optimizer.tuning.benchmark import Benchmark, Candidate, Refused, Run, open_all, timed


@dataclass
class Files:
    """The files of a bundle, with an example call."""

    folder: Path
    """The folder of the bundle."""
    entries: Sequence[Mapping[str, Any]]
    """The manifest's `artifacts`, each with its size in `bytes`."""
    device: str
    """"cpu" or "cuda"."""
    inputs: Sequence[torch.Tensor]
    """The flat inputs of the call, on the device."""
    proven: Sequence[Route] = ()
    """The routes whose files have run: they are opened without a child process."""
    # The last route that was opened in the child, and its runner there: a proof mostly follows.
    _in_child: tuple[Route, Runner] | None = field(default=None, init=False, repr=False)

    @property
    def own_routes(self) -> list[Route]:
        """Each file in the runtime that its format is made for, the simplest to ship first."""
        return own_routes(entry["format"] for entry in self.entries)

    def entry(self, format: str) -> Mapping[str, Any]:
        return next(each for each in self.entries if each["format"] == format)

    def opened(self, route: Route) -> Runner:
        """Open the file of a route.

        Raises:
            DeviceError: the runtime isn't installed, or it can't use the device.
        """
        return open_route(self.folder / self.entry(route.format)["path"], route, self.device)

    def open_for_proof(self, route: Route) -> Runner:
        """Open the file of a route in a child process, where a crash does no harm, as far as `open_in_child` can."""
        if self._in_child is None or self._in_child[0] != route:
            # One at a time, since each holds the weights.
            self._in_child = None
            path = self.folder / self.entry(route.format)["path"]
            self._in_child = route, open_in_child(path, route, self.device, self.inputs)
        return self._in_child[1]

    def candidate(self, route: Route, accuracy: Accuracy | None = None) -> Candidate:
        entry = self.entry(route.format)
        return Candidate(
            candidate_name(entry["path"], route), lambda: self._run(route), route, entry["bytes"], accuracy, self.device
        )

    def _run(self, route: Route) -> Run:
        inputs = tuple(self.inputs)
        if route not in self.proven and _crashes_alone(route, self.device, inputs):
            self.open_for_proof(route)(*inputs)
        runner = self.opened(route)
        return lambda: runner(*inputs)


def open_in_child(path: Path, route: Route, device: str, inputs: Sequence[torch.Tensor]) -> Runner:
    """Open a file in a child process, or in this one where that can't be: on a GPU, in torch, or in bfloat16.

    On a GPU a child would take a second context with its memory. torch runs the operators that the original ran.

    Raises:
        DeviceError: as `open_route`.
        RuntimeCrashed: the runtime crashes on the file, hangs or is killed.
    """
    if not _crashes_alone(route, device, inputs):
        return open_route(path, route, device)
    require_runtime(route.runtime)
    return InChild(path, partial(open_route, path, route, device), route.runtime)


def _crashes_alone(route: Route, device: str, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a child process can run a route, so that a crash ends only the child."""
    plain = all(tensor.dtype != torch.bfloat16 for tensor in inputs)
    return route.runtime != "torch" and device == "cpu" and plain and can_start()


def frozen(route: Route | None) -> Route | None:
    """The route of a TorchScript file that is optimized for the machine after loading; None for other formats."""
    if route is None or route.format != "torchscript":
        return None
    return Route(route.format, route.runtime, {**route.settings, "freeze": True})


def candidate_name(path: str | Path, route: Route) -> str:
    """The name of a file's candidate in tables, such as "model.onnx in openvino"."""
    return f"{path} {str(route).removeprefix(f'{route.format} ')}"


def calling(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], settings: GpuSettings | None = None
) -> Run:
    """A call of a module in inference mode.

    Args:
        settings: to run under; None for those in force. Files that run in between set their own.
    """

    def run() -> object:
        if settings is not None:
            settings.put_in_force()
        with torch.inference_mode():
            return call(*args, **kwargs)

    return run


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
