"""Stand-ins for the clock and for quantization, so that tests of tuning know every time and every error.

`prepare` exports a small model once, and `chooser` makes choices for its files.
"""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import onnx
import pytest
import torch
from onnx import numpy_helper
from tiny_models import enliven
from torch import nn

import optimizer.api
from exporters.errors import ExporterError
from exporters.onnx_quantization import QuantizedFile
from optimizer import export, optimize
from optimizer.options import parse_accuracy
from optimizer.tuning import Benchmark, CalibrationCalls, calibration_of, candidates, choose
from optimizer.tuning.benchmark import Latency

ROUNDS = 21


@dataclass
class Speeds:
    """Gives each candidate a time by the first part of its name that matches; 1 second if none does."""

    seconds: dict[str, float] = field(default_factory=dict)
    timed: list[str] = field(default_factory=list)

    def of(self, name: str) -> float:
        return next((seconds for part, seconds in self.seconds.items() if part in name), 1.0)

    def interleaved(self, calls: Mapping[str, Callable[[], object]], *_: object) -> dict[str, Latency]:
        for name, call in calls.items():
            call()
            self.timed.append(name)
        return {name: Latency(self.of(name), self.of(name), (self.of(name),) * ROUNDS) for name in calls}


@dataclass
class Rounding:
    """Rounds the weights of an ONNX file to a number of levels; with nodes kept, to `finer` times as many.

    Attributes:
        levels: by kind; a kind that isn't named can't be quantized.
        calibrated: the calibration calls of each quantization.
    """

    levels: dict[str, int] = field(default_factory=dict)
    finer: int = 100
    calibrated: list[Sequence[Mapping[str, Any]]] = field(default_factory=list)

    def quantized(
        self,
        source: Path,
        target: Path,
        kind: Any,
        calibration: Sequence[Mapping[str, Any]] = (),
        *,
        keep: Collection[str] = (),
    ) -> QuantizedFile:
        self.calibrated.append(calibration)
        if kind not in self.levels:
            raise ExporterError(f"the file has nothing for {kind}")
        levels = self.levels[kind] * (self.finer if keep else 1)
        model = onnx.load(source)
        for tensor in model.graph.initializer:
            value = numpy_helper.to_array(tensor)
            if value.dtype == numpy.float32 and value.size and abs(value).max() > 0:
                step = abs(value).max() / levels
                rounded = (numpy.round(value / step) * step).astype(numpy.float32)
                tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
        onnx.save(model, target)
        return QuantizedFile((target,), kind, tuple(keep), ())

    def within_budget(
        self,
        source: Path,
        target: Path,
        kind: str,
        calibration: Sequence[Mapping[str, Any]],
        accept: Callable[[Path], bool],
        check: Callable[[], None],
    ) -> SimpleNamespace:
        for keep in ((), ("head",)):
            made = self.quantized(source, target, kind, calibration, keep=keep)
            if accept(target):
                return SimpleNamespace(accepted=made, errors={"head": 0.01} if keep else {})
        return SimpleNamespace(accepted=None, errors={})  # and the last file stays


def fake_clock(monkeypatch: pytest.MonkeyPatch) -> Speeds:
    speeds = Speeds()
    for module in ("optimizer.tuning.benchmark", "optimizer.tuning.tuner"):
        monkeypatch.setattr(f"{module}.interleaved", speeds.interleaved)
    return speeds


def fake_quantization(monkeypatch: pytest.MonkeyPatch) -> Rounding:
    rounding = Rounding()
    for name in ("quantized", "within_budget"):
        monkeypatch.setattr(f"optimizer.tuning.lossy.{name}", getattr(rounding, name))
    return rounding


def opening(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], Any]) -> None:
    """Let `change(runner, route)` replace each runner that a choice opens."""
    # A child process doesn't see the change.
    monkeypatch.setattr(candidates, "can_start", lambda: False)
    real = candidates.open_route
    monkeypatch.setattr(candidates, "open_route", lambda path, route, device: change(real(path, route, device), route))


class Wrong:
    """A runner whose outputs are off by a hundredth."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(output + 0.01 for output in self._runner(*tensors))


class Finite(Wrong):
    """A runner that computes NaN and infinity as numbers."""

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._runner(*(tensor.nan_to_num(0.0, 1.0, -1.0) for tensor in tensors))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        # A frozen TorchScript file would compute a ReLU of NaN as 0.
        return self.head(nn.functional.gelu(self.norm(self.conv(image))).mean((2, 3)))


def images(rows: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


Prepared = tuple[Any, Any, Any, Path]


def prepare(folder: Path, formats: Sequence[str], model: nn.Module | None = None) -> Prepared:
    """Export a model, by default a `ConvNet`, and return the arguments of `choose`: the job, the measured export, the files, their folder."""
    found: list[Any] = []

    def keep(job: Any, measured: Any, calibration: Any, written: Any, staging: Path, *rest: Any) -> None:
        shutil.copytree(staging, folder / "files")
        found.extend((job, measured, written))

    torch.manual_seed(0)
    fast = optimize(model or enliven(ConvNet()).eval(), example_inputs=(images(),))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(optimizer.api, "choose", keep)
        export(fast, example_inputs=(images(),), output=folder / "bundle", formats=formats)
    job, measured, written = found
    return job, measured, written, folder / "files"


@dataclass
class Chosen:
    """The outcome of one choice, with what is left in the folder."""

    benchmark: Benchmark
    entries: dict[str, Any]
    folder: Path

    @property
    def route(self) -> str:
        return str(self.benchmark.recommended)

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}

    @property
    def dropped(self) -> dict[str, str]:
        return {figure.name: figure.dropped for figure in self.benchmark.figures if figure.dropped}

    @property
    def timed(self) -> list[str]:
        return [figure.name for figure in self.benchmark.figures if figure.seconds is not None and not figure.dropped]


Choose = Callable[..., Chosen]


def chooser(prepared: Prepared, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Choices for copies of the prepared files, without OpenVINO, which may be missing.

    Other passes and torch.compile are left out too, because they take long and give no file.
    """
    monkeypatch.setattr("optimizer.tuning.candidates.missing_compiler", lambda device: "none here")
    monkeypatch.setattr("optimizer.tuning.candidates.with_other_passes", lambda job: ())
    monkeypatch.setattr("optimizer.tuning.tuner.is_installed", lambda runtime: False)
    number = iter(range(100))

    def choosing(
        tune: bool = False,
        accuracy: str = "exact",
        calibration: CalibrationCalls | None = None,
        static: bool = False,
        tune_seconds: float = 600.0,
        finite_inputs: bool = False,
    ) -> Chosen:
        job, measured, written, files = prepared
        budget = parse_accuracy(accuracy)
        job = replace(job, bench=True, tune=tune, accuracy=accuracy, tune_seconds=tune_seconds)
        job = replace(job, finite_inputs=finite_inputs)
        written = replace(written, entries=list(written.entries), missing=dict(written.missing))
        copy = folder / f"folder{next(number)}"
        shutil.copytree(files, copy)
        calls = None
        if not budget.is_exact:
            request = replace(measured.request, dynamic_batch=not static)
            calls = calibration_of(calibration, job.samples, measured.adapter, request)
        benchmark = choose(job, measured, calls, written, copy)
        assert benchmark is not None
        return Chosen(benchmark, {entry["format"]: entry for entry in written.entries}, copy)

    return choosing
