"""Run files in processes of their own, with the installed versions or those of another environment, and time two in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from exporters.child_process import OwnChild
from optimize_export.runtime import Route, own_routes
from optimize_export.runtime.growth import MeasuredFile, Packed, packed, unpacked
from optimize_export.runtime.route import NUMPY_DTYPES
from optimizer.bundle import GoldenCall
from optimizer.tuning import Ratio, in_turn, ratio

# Seconds beyond its planned time after which a measurement counts as hanging.
_HANGS = 600.0

Place = tuple[Path, Path]
"""The Python of an environment, and the folder of the packages of this program for it."""


@dataclass(frozen=True)
class Timing:
    """Two files that were timed in turn: the median of a call of each, in seconds."""

    seconds: float
    before: float
    ratio: Ratio
    """The latency over that before."""

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "before": self.before, "ratio": vars(self.ratio)}


class RunningFile(OwnChild):
    """A file of a bundle that is open in a process of its own, on the CPU."""

    def __init__(
        self, path: Path, route: Route, inputs: Sequence[Packed], what: str, place: Place | None = None
    ) -> None:
        """Open the file.

        Args:
            inputs: for its latency and its memory.
            what: names the process in errors.
            place: the environment; None for the installed versions.

        Raises:
            RuntimeCrashed: the runtime crashes on the file; each method may raise it too.
            Exception: whatever the runtime raises; also the methods.
        """
        python, code = place or (None, None)
        super().__init__(partial(MeasuredFile, path, route, inputs), what, python, [code] if code else None)

    def outputs(self, calls: Sequence[GoldenCall]) -> list[tuple[torch.Tensor, ...]]:
        """The outputs at each call, in the file's order."""
        found = [self.measured("outputs", arrays_of(call), call.seed) for call in calls]
        return [tuple(torch.from_numpy(unpacked(array)) for array in arrays) for arrays in found]

    def latencies(self, count: int) -> list[float]:
        return list(self.measured("latencies", count))

    def measured(self, kind: str, *args: Any, seconds: float = 0.0) -> Any:
        """The result of a method of `MeasuredFile` that is planned to take these seconds."""
        return self(kind, *args, longest=seconds + _HANGS)


def timed(file: RunningFile, before: RunningFile, seconds: float) -> Timing:
    """Time two files in turn, for about this time."""
    found = in_turn({"file": file.latencies, "before": before.latencies}, seconds)
    return Timing(found["file"].median, found["before"].median, ratio(found["file"], found["before"]))


def arrays_of(call: GoldenCall) -> list[Packed]:
    return [packed(tensor.numpy()) for tensor in call.inputs.values()]


def not_in_numpy(manifest: Mapping[str, Any]) -> str | None:
    """A clause about a tensor of the files that can't be sent to a process; None if there is none."""
    artifact = manifest["artifacts"][0]
    found = (each for each in (*artifact["inputs"], *artifact["outputs"]) if each["dtype"] not in NUMPY_DTYPES)
    return next((f"`{each['name']}` is {each['dtype']}, which numpy lacks" for each in found), None)


def route_of(manifest: Mapping[str, Any], format: str, runtime: str | None = None) -> Route:
    """The route of a file in a runtime: with the settings of the recommended one, unless those lower its precision."""
    own = own_routes([format])[0]
    plain = Route(format, runtime or own.runtime)
    recommended = (manifest.get("benchmark") or {}).get("recommended")
    route = plain if recommended is None else Route.from_json(recommended)
    return route if (route.format, route.runtime) == (format, plain.runtime) and not route.is_lowered else plain
