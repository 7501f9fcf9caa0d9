"""The ways to run the files of a bundle, as candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exporters.gpu_settings import GpuSettings
from optimizer.parity import Accuracy
from optimizer.runtime import Route, Runner, open_route, own_routes
from optimizer.tuning.benchmark import Candidate, Run


@dataclass
class Files:
    """The files of a bundle, with an example call.

    Attributes:
        folder: of the bundle.
        entries: the manifest's `artifacts`, each with its size in `bytes`.
        device: "cpu" or "cuda".
        inputs: the flat inputs of the call, on the device.
    """

    folder: Path
    entries: Sequence[Mapping[str, Any]]
    device: str
    inputs: Sequence[torch.Tensor]

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

    def candidate(self, route: Route, accuracy: Accuracy | None = None) -> Candidate:
        entry = self.entry(route.format)
        return Candidate(_name(entry, route), lambda: self._run(route), route, entry["bytes"], accuracy, self.device)

    def _run(self, route: Route) -> Run:
        runner, inputs = self.opened(route), tuple(self.inputs)
        return lambda: runner(*inputs)


def frozen(route: Route | None) -> Route | None:
    """The route of a TorchScript file that is optimized for the machine after loading; None for other formats."""
    if route is None or route.format != "torchscript":
        return None
    return Route(route.format, route.runtime, {**route.settings, "freeze": True})


def _name(entry: Mapping[str, Any], route: Route) -> str:
    said = str(route).removeprefix(f"{route.format} ")
    return f"{entry['path']} {said}"


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
