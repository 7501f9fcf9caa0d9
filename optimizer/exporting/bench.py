"""The candidates of one export, and their comparison with the original."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimize_export.gpu_settings import GpuSettings
from optimize_export.runtime import Route, Runner
from optimizer.exporting.copies import exportable
from optimizer.exporting.job import ExportJob
from optimizer.exporting.measuring import MeasuredExport
from optimizer.exporting.nonfinite import NonFinite
from optimizer.exporting.optional_passes import with_other_passes
from optimizer.exporting.writing import WrittenFiles
from optimizer.tuning import (
    EAGER,
    Benchmark,
    Candidate,
    Figure,
    Files,
    Opened,
    Refused,
    Run,
    available_memory,
    calling,
    opened_all,
    recommendation,
    timed,
)
from passes.compiling.compiler import import_inductor, missing_compiler

# How much memory open files take at most, as a multiple of their size: a timing opens each file at most twice, and a
# runtime copies the weights while it loads them. Tuning keeps more of them open.
_TIMED_COPIES, _TUNED_COPIES = 3, 6


@dataclass(frozen=True)
class Bench:
    """What the candidates of one export are made of.

    Attributes:
        eager: the original as it is.
        files: the proven files, with the example call.
        finished: waits for the device.
        settings: the user's, which the original runs under; None on a CPU.
        nonfinite: the original for inputs with NaN or infinity.
        lost: by route, how it differs from the original for such inputs, where that is allowed.
    """

    job: ExportJob
    measured: MeasuredExport
    eager: Candidate
    files: Files
    finished: Run
    settings: GpuSettings | None
    nonfinite: NonFinite
    lost: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, job: ExportJob, measured: MeasuredExport, written: WrittenFiles, folder: Path) -> Bench:
        call = job.samples.given
        args, kwargs = call.args, call.kwargs
        inputs = [tensor.detach().clone().to(job.target) for tensor in measured.adapter.flatten_inputs(args, kwargs)]
        entries = [
            {**entry, "bytes": sum((folder / path).stat().st_size for path in entry["files"])}
            for entry in written.entries
        ]
        args, kwargs = measured.adapter.call_arguments(inputs)
        original = exportable(measured.original, job.target, measured.reference.written)
        on_gpu = job.target.type == "cuda"
        files = Files(folder, entries, job.target.type, inputs)
        files.proven = files.own_routes
        settings = GpuSettings.now() if on_gpu else None
        return cls(
            job,
            measured,
            Candidate(EAGER, lambda: calling(original, args, kwargs, settings)),
            files,
            torch.cuda.synchronize if on_gpu else lambda: None,
            settings,
            NonFinite(measured, inputs),
        )

    def prove(self, route: Route) -> None:
        """Compare the outputs of a file with the original's; in its own runtime, it was proven when it was written.

        Raises:
            Refused: its outputs aren't proven, or it doesn't keep NaN and infinity.
        """
        is_own = route in self.files.own_routes
        runner = self.files.opened(route) if is_own else self.files.opened_for_proof(route)
        if not is_own:
            measurement, _ = self.measured.parity.measured_of(runner, self.measured.rows)
            parity = self.measured.parity.judged(measurement)
            if not parity.ok:
                raise Refused(f"it isn't proven: {parity.reason}")
        self.keep_nonfinite(route, runner)

    def keep_nonfinite(self, route: Route, runner: Runner) -> None:
        """Check that a file has NaN and infinity where the original has them.

        Raises:
            Refused: it doesn't, and the user doesn't allow it. Whoever allows integers allows it, because these have
                no NaN.
        """
        lost = self.nonfinite.lost_by(runner)
        if lost is None:
            return
        if not (self.job.finite_inputs or route.format.startswith("onnx-int")):
            raise Refused(f"{lost}; if inputs are always finite, allow it by `finite_inputs=True`")
        self.lost[str(route)] = lost

    def in_python(self) -> Candidate | None:
        """The optimized module as it is; None if no pass changed it."""
        job = self.job
        if job.provenance is None or not job.provenance.applied:
            return None
        return Candidate("the optimized module", lambda: self._calling(self._module(job.model)))

    def with_other_passes(self) -> Iterator[Candidate]:
        """The module with another optional pass, or without one that it has; neither is a file."""
        for other in with_other_passes(self.job):
            yield Candidate(other.name, lambda other=other: self._calling(self._module(other.made(self.job))))  # type: ignore[misc]

    def compiled(self) -> Candidate | None:
        """The module compiled by torch.compile, which is no file; None without a compiler."""

        def opened() -> Run:
            import_inductor()
            run = self._calling(torch.compile(self._module(self.job.model)))
            with warnings.catch_warnings():
                # Inductor recommends TF32 to whoever compiles without it.
                warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
                run()
            return run

        return Candidate("torch.compile", opened) if missing_compiler(self.job.target) is None else None

    def _module(self, model: nn.Module) -> nn.Module:
        return exportable(model, self.job.target, self.measured.reference.written)

    def _calling(self, call: Callable[..., Any]) -> Run:
        args, kwargs = self.measured.adapter.call_arguments(self.files.inputs)
        return calling(call, args, kwargs, self.settings)

    def opened_eager(self) -> Opened:
        """The original, ready to run.

        Raises:
            Refused: it can't run in inference mode.
        """
        ready, dropped = opened_all([self.eager])
        for figure in dropped:
            raise Refused(f"the original, to compare with: {figure.dropped}")
        return ready[0]

    def unmeasured(self, reason: str) -> Benchmark:
        """The outcome without figures and without a recommendation."""
        return Benchmark(self.batch_sizes, torch.get_num_threads(), 0, (), None, reason)

    def concluded(self, ready: Sequence[Opened], dropped: Sequence[Figure], seconds: float) -> Benchmark:
        """Time the candidates that are ready, and recommend one of the files; the simplest comes first.

        Raises:
            Refused: one of them fails.
        """
        candidates = [each.candidate for each in ready if each.candidate.route is not None]
        # Exact files before lossy ones; the sort is stable.
        files = [each.name for each in sorted(candidates, key=lambda each: each.accuracy is not None)]
        found = timed(ready, files, seconds, self.finished)
        return Benchmark(
            batch_sizes=self.batch_sizes,
            threads=torch.get_num_threads(),
            rounds=found.rounds,
            figures=(*found.figures, *dropped),
            recommended=next((figure.route for figure in found.figures if figure.name == found.chosen), None),
            reason=recommendation((*found.figures, *dropped), found.chosen),
            notes=(*found.notes, *self._notes(ready)),
        )

    def _notes(self, ready: Sequence[Opened]) -> list[str]:
        routes = ((each.candidate.name, str(each.candidate.route)) for each in ready)
        lost = [f"{name}: {self.lost[route]}" for name, route in routes if route in self.lost]
        settings = self.settings
        if settings is None or not (settings.matmul or settings.cudnn):
            return lost
        where = " and ".join(["matrix products"] * settings.matmul + ["the layers of cuDNN"] * settings.cudnn)
        return [
            *lost,
            f"eager runs under torch's settings, which allow TF32 in {where}; the files don't, unless named tf32",
        ]

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        size = self.job.samples.batch_size
        return () if size is None else (size,)

    @property
    def too_large(self) -> str | None:
        """Why the files aren't timed; None if they fit into memory side by side."""
        copies = _TUNED_COPIES if self.job.tune else _TIMED_COPIES
        needed, free = copies * sum(entry["bytes"] for entry in self.files.entries), available_memory()
        if free is None or needed < free:
            return None
        return (
            f"not measured: the files need up to {needed / 2**30:.1f} GiB side by side, and {free / 2**30:.1f} GiB are "
            "free; optimize-export --bench measures on another machine"
        )
