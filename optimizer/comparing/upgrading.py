"""Run the files of a bundle with other versions of their runtimes, before these are installed (`verify --with`).

Each file runs in two processes: one has the installed versions, the other those of the set. Both get the golden inputs, and
are then timed in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from exporters.errors import OtherMachine
from optimize_export.errors import DeviceError, OptimizeExportError, ParityError, UsageError
from optimize_export.manifest import plain
from optimize_export.runtime import SETTINGS, Route, is_installed, own_routes, processor, usable_cpus
from optimize_export.runtime.growth import Soak
from optimize_export.wording import quote
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
from optimizer.comparing.running import Place, RunningFile, Timing, arrays_of, not_in_numpy, route_of, timed
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
    """Whether its outputs equal those with the installed versions bit for bit; None if there are none to compare with."""
    timing: Timing | None = None
    """Next to the installed versions."""
    memory: Soak | None = None
    """None also where the system doesn't tell the memory of a process."""

    def to_json(self) -> dict[str, Any]:
        return {
            **self.figures.to_json(),
            "runtime": self.runtime,
            "identical": self.identical,
            "latency": self.timing and self.timing.to_json(),
            "memory": self.memory and {kind: vars(getattr(self.memory, kind)) for kind in ("resident", "heap")},
        }


@dataclass
class Environment:
    """The files of a bundle with the versions of one set, or with the installed ones."""

    path: Path
    """The bundle."""
    name: str
    """The requirements of the set, or "installed"."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """The versions."""
    files: list[RanFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences about files that weren't run, or not timed."""
    elsewhere: list[str] = field(default_factory=list)
    """Sentences about files for another machine; problems if no other file ran."""
    error: OptimizeExportError | None = None
    """Why there is no such environment."""

    @property
    def report(self) -> VerifyReport:
        """The report that `verify` would give if these versions were installed."""
        figures = tuple(each.figures for each in self.files)
        return VerifyReport(self.path, "cpu", (), figures, unproven=() if figures else tuple(self.elsewhere))

    @property
    def exit_code(self) -> int:
        if self.error is not None:
            return self.error.exit_code
        return 0 if self.report.ok else ParityError.exit_code

    @property
    def problems(self) -> tuple[str, ...]:
        return self.report.problems if self.error is None else (str(self.error),)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "exit_code": self.exit_code,
            "problems": self.problems,
            "libraries": self.libraries,
            "artifacts": [each.to_json() for each in self.files],
            "notes": [*self.notes, *self.elsewhere],
        }


@dataclass(frozen=True)
class Upgrade:
    """The outcome of `verify_with`."""

    checked: VerifyReport
    """The hashes and the golden data. If they have problems, no file was run."""
    installed: Environment
    sets: tuple[Environment, ...] = ()

    @property
    def exit_code(self) -> int:
        """The highest of the sets."""
        return max(each.exit_code for each in self.sets)

    @property
    def problems(self) -> list[str]:
        return [f"with {each.name}: {problem}" for each in self.sets for problem in each.problems]

    def to_json(self) -> dict[str, Any]:
        sets = [each.to_json() for each in self.sets]
        found = {"processor": processor(), "cpus": usable_cpus(), "installed": self.installed.to_json(), "sets": sets}
        return dict(plain(found))


def verify_with(
    path: str | Path, sets: Sequence[Sequence[str]], *, expect: str | None = None, seconds: float = 10.0
) -> Upgrade:
    """Verify a bundle on the CPU with other versions of its runtimes, each set in an environment of its own.

    Args:
        sets: the requirements of each set for pip, such as `["onnxruntime==1.24.1"]`. A file runs in the runtimes that its
            set names: ONNX files in onnxruntime and openvino, all others in torch.
        expect: as for `verify_bundle`.
        seconds: about how long the latency and the memory of each file are measured in each set.

    Returns:
        The outcome. A set that can't be installed has its error there, and the others are run.

    Raises:
        BundleError: there is no readable manifest.
        UsageError: a set names no runtime of any file.
    """
    checked = verify_bundle(path, expect=expect, run=False)
    installed = Environment(checked.path, "installed")
    if not checked.ok:
        return Upgrade(checked, installed)
    files = _Files(checked.path)
    tried = [Environment(checked.path, " ".join(each)) for each in sets]
    routes = [files.of(each) for each in sets]
    for made, own in zip(tried, routes, strict=True):
        if not own:
            raise UsageError(
                f"The set {made.name} names no runtime of the files in {path}: name {files.needed}, with a version."
            )
    pythons: dict[str, Path] = {}
    for made, requirements, own in zip(tried, sets, routes, strict=True):
        try:
            pythons[made.name] = environment(requirements, sorted({route.runtime for _, route in own}))
        except (UsageError, DeviceError) as error:
            made.error = error
    with ground_floor() as code:
        for artifact, route in files.routes:
            concerned = [
                (made, (pythons[made.name], code))
                for made, own in zip(tried, routes, strict=True)
                if (artifact, route) in own and made.error is None
            ]
            if concerned:
                files.run(artifact, route, installed, concerned, seconds)
    for made, own in zip(tried, routes, strict=True):
        others = {} if made.error else {artifact["path"]: route.runtime for artifact, route in reversed(files.routes)}
        for artifact, _ in own:
            others.pop(artifact["path"], None)
        made.notes += [f"{path} wasn't run: the set doesn't name {runtime}" for path, runtime in others.items()]
    return Upgrade(checked, installed, tuple(tried))


# The files ----------------------------------------------------------------------------------------------------------


class _Files:
    """The files of a bundle, each with its routes."""

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, open_bundle(path).manifest
        self._golden = self.manifest["golden"]
        if sentence := not_in_numpy(self.manifest):
            raise UsageError(f"The files of {path} can't be run with other versions: {sentence}.")
        self._calls = read_golden(path, self.manifest)
        self._factor = FACTOR * factor_between(self._golden["device"], describe_device("cpu"))
        self.routes: list[tuple[Artifact, Route]] = []
        for artifact in self.manifest["artifacts"]:
            own = own_routes([artifact["format"]])[0].runtime
            # OpenVINO reads ONNX files too.
            for runtime in dict.fromkeys((own, "openvino") if own == "onnxruntime" else (own,)):
                self.routes.append((artifact, route_of(self.manifest, artifact["format"], runtime)))
        self.needed = " or ".join(dict.fromkeys(route.runtime for _, route in self.routes))

    def of(self, requirements: Sequence[str]) -> list[tuple[Artifact, Route]]:
        """The files, each with a runtime that the requirements name."""
        names = {distribution_of(each) for each in requirements}
        # onnxruntime-gpu and others are builds of onnxruntime.
        named = {runtime for runtime in SETTINGS for name in names if f"{name}-".startswith(f"{runtime}-")}
        return [each for each in self.routes if each[1].runtime in named]

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
                        made.notes.append(f"{artifact['path']} wasn't timed: {quote(error, with_type=True)}")

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
            path, inputs = self.path / artifact["path"], arrays_of(self._calls[0])
            file = stack.enter_context(closing(RunningFile(path, route, inputs, what, place)))
            answers = file.outputs(self._calls)
            libraries, settings = file.measured("about")
            memory = file.measured("soak", (1 - _FOR_LATENCY) * seconds, seconds=seconds)
        except OtherMachine as error:
            made.elsewhere.append(f"{artifact['path']} wasn't run: {error}")
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
