"""Run the files of a bundle with other versions of their runtimes, before these are installed (`verify --with`).

Each file runs in two processes: one has the installed versions, the other those of the set. Both get the golden inputs, and
are then timed in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from exporters.errors import OtherMachine
from optimize_export.errors import BundleError, DeviceError, OptimizeExportError, ParityError, UsageError
from optimize_export.manifest import plain
from optimize_export.runtime import SETTINGS, Route, is_installed, own_routes, processor, usable_cpus
from optimize_export.runtime.growth import Soak
from optimize_export.wording import listed, quote
from optimizer.bundle import (
    ArtifactFigures,
    VerifyReport,
    describe_device,
    factor_between,
    failed_artifact,
    judge_answers,
    open_bundle,
    read_golden,
    verify_bundle,
)
from optimizer.comparing.environments import environment, ground_floor
from optimizer.comparing.running import Place, RunningFile, Timing, arrays_of, not_in_numpy, route_of, running, timed
from optimizer.option_texts import distribution_of
from optimizer.parity import FACTOR

# The share of the time of a file for its latency; the rest is for its memory.
_FOR_LATENCY = 0.4
Artifact = Mapping[str, Any]
Answers = list[tuple[torch.Tensor, ...]]


@dataclass
class RanFile:
    """A file in one environment."""

    figures: ArtifactFigures
    runtime: str
    identical: bool | None = None
    """Whether its outputs have the bits of those with the installed versions; None where nothing ran to compare with."""
    timing: Timing | None = None
    memory: Soak | None = None
    """None also where the system doesn't tell the memory of a process."""

    def to_json(self) -> dict[str, Any]:
        memory = self.memory
        return {
            **self.figures.to_json(),
            "runtime": self.runtime,
            "identical": self.identical,
            "latency": self.timing and self.timing.to_json(),
            "memory": memory and {name: vars(getattr(memory, name)) for name in ("resident", "heap")},
        }


@dataclass
class Environment:
    """The files of a bundle with the versions of one set, or with the installed ones."""

    name: str
    """The requirements of the set, or "installed"."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """The versions."""
    files: list[RanFile] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Sentences about files that weren't run."""
    unproven: list[str] = field(default_factory=list)
    """Sentences about files that can't run on this machine or with these versions; problems only if no other file ran."""
    error: OptimizeExportError | None = None
    """Why there is no such environment."""

    def report(self, path: Path) -> VerifyReport:
        """As `verify` would report, if these versions were installed."""
        figures = tuple(each.figures for each in self.files)
        unproven = () if figures else tuple(self.unproven)
        return VerifyReport(path, "cpu", (), figures, () if unproven else tuple(self.unproven), unproven)

    def exit_code(self, path: Path) -> int:
        if self.error is not None:
            return self.error.exit_code
        return 0 if self.report(path).ok else ParityError.exit_code

    def problems(self, path: Path) -> list[str]:
        """The problems, each with the name of the set."""
        told = [str(self.error)] if self.error is not None else self.report(path).problems
        return [f"with {self.name}: {problem}" for problem in told]

    def to_json(self, path: Path) -> dict[str, Any]:
        return {
            "name": self.name,
            "libraries": dict(self.libraries),
            "exit_code": self.exit_code(path),
            "problems": self.problems(path),
            "files": [each.to_json() for each in self.files],
            "left_out": [*self.left_out, *self.unproven],
        }


@dataclass(frozen=True)
class Upgrade:
    """The outcome of `verify_with`."""

    checked: VerifyReport
    """The hashes and the golden data. If they have problems, nothing was run."""
    installed: Environment | None = None
    sets: tuple[Environment, ...] = ()

    @property
    def exit_code(self) -> int:
        """The highest of the sets; a damaged bundle has that of `verify`."""
        if not self.checked.ok:
            return ParityError.exit_code if self.checked.intact else BundleError.exit_code
        return max(each.exit_code(self.checked.path) for each in self.sets)

    @property
    def problems(self) -> tuple[str, ...]:
        return (
            *self.checked.problems,
            *(problem for each in self.sets for problem in each.problems(self.checked.path)),
        )

    def to_json(self) -> dict[str, Any]:
        path = self.checked.path
        found = {
            "processor": processor(),
            "cpus": usable_cpus(),
            "installed": self.installed and self.installed.to_json(path),
            "sets": [each.to_json(path) for each in self.sets],
        }
        return dict(plain(found))


def verify_with(
    path: str | Path, sets: Sequence[Sequence[str]], *, expect: str | None = None, seconds: float = 10.0
) -> Upgrade:
    """Verify a bundle on the CPU with other versions of its runtimes, each set in an environment of its own.

    Args:
        sets: the requirements of each set for pip, such as `["onnxruntime==1.24.1"]`. A file runs in the runtimes that its
            set names: ONNX files in onnxruntime and openvino, all others in torch.
        expect: as for `verify_bundle`.
        seconds: for the latency and the memory of each file in each set, about.

    Returns:
        The outcome. A set that can't be installed has its error there, and the others are run.

    Raises:
        BundleError: there is no readable manifest.
        UsageError: a set names no runtime of any file.
    """
    checked = verify_bundle(path, expect=expect, run=False)
    if not checked.ok:
        return Upgrade(checked)
    files = _Files(checked.path)
    tried = [(Environment(" ".join(each)), files.of(each)) for each in sets]
    for made, routes in tried:
        if not routes:
            raise UsageError(
                f"No file of {path} runs in what the set {made.name} names: name {files.needed()}, such as "
                "onnxruntime==1.24.1."
            )
    installed = Environment("installed")
    with ground_floor() as code:
        pythons: dict[str, Path] = {}
        for (made, _), requirements in zip(tried, sets, strict=True):
            try:
                pythons[made.name] = environment(requirements)
            except (UsageError, DeviceError) as error:
                made.error = error
        for artifact, route in files.routes:
            concerned = [made for made, routes in tried if (artifact, route) in routes and made.error is None]
            if concerned:
                files.run(
                    artifact, route, installed, [(made, (pythons[made.name], code)) for made in concerned], seconds
                )
    for made, routes in tried:
        if made.error is not None:
            continue
        ran = {artifact["path"] for artifact, _ in routes}
        others = [each["path"] for each in files.manifest["artifacts"] if each["path"] not in ran]
        if others:
            made.left_out.append(f"not run with {made.name}, which names no runtime of it: {listed(others)}")
    return Upgrade(checked, installed, tuple(made for made, _ in tried))


# The files ----------------------------------------------------------------------------------------------------------


class _Files:
    """The files of a bundle, each with its routes."""

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, open_bundle(path).manifest
        self._golden = self.manifest["golden"]
        self._calls = read_golden(path, self.manifest)
        self._factor = FACTOR * factor_between(self._golden["device"], describe_device("cpu"))
        self.left_out: list[str] = []
        self.routes: list[tuple[Artifact, Route]] = []
        for artifact in self.manifest["artifacts"]:
            if sentence := not_in_numpy(artifact):
                self.left_out.append(sentence)
                continue
            own = own_routes([artifact["format"]])[0].runtime
            # OpenVINO reads ONNX files too.
            for runtime in dict.fromkeys((own, "openvino") if own == "onnxruntime" else (own,)):
                self.routes.append((artifact, route_of(self.manifest, artifact["format"], runtime)))

    def of(self, requirements: Sequence[str]) -> list[tuple[Artifact, Route]]:
        """Those that run in what the requirements name."""
        names = {distribution_of(each) for each in requirements}
        # onnxruntime-gpu and others are builds of onnxruntime.
        named = {runtime for runtime in SETTINGS for name in names if f"{name}-".startswith(f"{runtime}-")}
        return [each for each in self.routes if each[1].runtime in named]

    def needed(self) -> str:
        return " or ".join(dict.fromkeys(route.runtime for _, route in self.routes)) or "none, since none can be run so"

    def run(
        self,
        artifact: Artifact,
        route: Route,
        installed: Environment,
        sets: Sequence[tuple[Environment, Place]],
        seconds: float,
    ) -> None:
        """Run a file with the installed versions, and next to them with those of each set."""
        with ExitStack() as stack:
            before, answers = None, None
            if is_installed(route.runtime):
                before, answers = self._ran(stack, artifact, route, installed, None, seconds)
            for made, place in sets:
                with ExitStack() as own:
                    file, found = self._ran(own, artifact, route, made, place, seconds)
                    if file is None or found is None or before is None or answers is None:
                        continue
                    made.files[-1].identical = _are_identical(found, answers)
                    try:
                        made.files[-1].timing = timed(file, before, _FOR_LATENCY * seconds)
                    # It ran before, so it fails for another reason, such as for lack of memory.
                    except Exception as error:  # noqa: BLE001
                        made.left_out.append(f"{artifact['path']} wasn't timed: {quote(error, with_type=True)}")

    def _ran(
        self,
        stack: ExitStack,
        artifact: Artifact,
        route: Route,
        made: Environment,
        place: Place | None,
        seconds: float,
    ) -> tuple[RunningFile | None, Answers | None]:
        """Run a file in an environment, and add its figures; the process ends with the stack."""
        what = f"{route.runtime} ({made.name})"
        try:
            file = stack.enter_context(
                running(self.path / artifact["path"], route, arrays_of(self._calls[0]), what, place)
            )
            answers = file.outputs(self._calls)
            libraries, settings = file.about()
            memory = file.soak((1 - _FOR_LATENCY) * seconds)
        except OtherMachine as error:
            made.unproven.append(f"{artifact['path']} wasn't run: {error}")
            return None, None
        # Any exception of a runtime that can't load or run a file is a failure of the artifact, and is reported as one.
        except Exception as error:  # noqa: BLE001
            problem = f"it can't be loaded or run: {quote(error, with_type=True)}"
            made.files.append(RanFile(failed_artifact(artifact, self._calls, "cpu", problem), route.runtime))
            return None, None
        made.libraries = libraries
        figures = judge_answers(artifact, self._golden, self._calls, answers, self._factor, "cpu", settings)
        made.files.append(RanFile(figures, route.runtime, memory=memory))
        return file, answers


def _are_identical(answers: Answers, others: Answers) -> bool:
    """Whether all outputs have the same shapes, dtypes and bits."""
    pairs = [pair for each in zip(answers, others, strict=True) for pair in zip(*each, strict=True)]
    return all(
        (one.dtype, one.shape) == (other.dtype, other.shape) and one.numpy().tobytes() == other.numpy().tobytes()
        for one, other in pairs
    )
