"""The ways to run the files of a bundle, as candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from exporters.child_process import InChild, can_start
from optimize_export.gpu_settings import GpuSettings
from optimize_export.runtime import Route, Runner, open_route, own_routes, require_runtime
from optimizer.parity import Accuracy
from optimizer.tuning.benchmark import Candidate, Run


@dataclass
class Files:
    """The files of a bundle, with an example call.

    Attributes:
        folder: of the bundle.
        entries: the manifest's `artifacts`, each with its size in `bytes`.
        device: "cpu" or "cuda".
        inputs: the flat inputs of the call, on the device.
        proven: the routes whose files have run: they are opened without a child process.
    """

    folder: Path
    entries: Sequence[Mapping[str, Any]]
    device: str
    inputs: Sequence[torch.Tensor]
    proven: Sequence[Route] = ()
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

    def opened_for_proof(self, route: Route) -> Runner:
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
            self.opened_for_proof(route)(*inputs)
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
