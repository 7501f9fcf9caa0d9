"""The candidates of one export: the original, its files, the module in Python; and the proof of each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimize_export.gpu_settings import GpuSettings
from optimize_export.runtime import Route, Runner
from optimizer.exporting import ExportJob, MeasuredExport, WrittenFiles, copy_for_export, optimize_again
from optimizer.model import Call, keeps_values
from optimizer.parity import outputs_on
from optimizer.pipeline import report_of
from optimizer.tuning.benchmark import (
    EAGER,
    Benchmark,
    Candidate,
    Figure,
    Opened,
    Refused,
    Run,
    open_all,
    recommendation,
    timed,
)
from optimizer.tuning.files import Files, calling
from optimizer.tuning.timing import available_memory
from passes.base import Pass
from passes.compiling.compiler import import_inductor, missing_compiler
from passes.registry import parse_pass

# How much memory open files take at most, as a multiple of their size: a timing opens each file at most twice, and a
# runtime copies the weights while it loads them. Tuning keeps more of them open.
_TIMED_COPIES, _TUNED_COPIES = 3, 6
_VALUES = {"NaN": math.nan, "infinity": math.inf}
# Exact passes that make some models faster on some devices, and others slower.
_OPTIONAL = ("channels-last", "merge-linears", "pad-channels", "jit-fusion")


@dataclass(frozen=True)
class Bench:
    """What the candidates of one export are made of."""

    job: ExportJob
    measured: MeasuredExport
    eager: Candidate
    """The original as it is."""
    files: Files
    """The proven files, with the example call."""
    finished: Run
    """Waits for the device."""
    settings: GpuSettings | None
    """The user's, which the original runs under; None on a CPU."""
    nonfinite: NonFinite
    """The original for inputs with NaN or infinity."""
    lost: dict[str, str] = field(default_factory=dict)
    """By route, how it differs from the original for such inputs, where that is allowed."""

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
        original = copy_for_export(measured.original, job.target, measured.reference.written)
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
        runner = self.files.opened(route) if is_own else self.files.open_for_proof(route)
        if not is_own:
            measurement, _ = self.measured.parity.measure_loaded(runner, self.measured.rows)
            parity = self.measured.parity.judge(measurement)
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
        return copy_for_export(model, self.job.target, self.measured.reference.written)

    def _calling(self, call: Callable[..., Any]) -> Run:
        args, kwargs = self.measured.adapter.call_arguments(self.files.inputs)
        return calling(call, args, kwargs, self.settings)

    def open_eager(self) -> Opened:
        """The original, ready to run.

        Raises:
            Refused: it can't run in inference mode.
        """
        ready, dropped = open_all([self.eager])
        for figure in dropped:
            raise Refused(f"the original, to compare with: {figure.dropped}")
        return ready[0]

    def unmeasured(self, reason: str) -> Benchmark:
        """The outcome without figures and without a recommendation."""
        return Benchmark(self.batch_sizes, torch.get_num_threads(), 0, (), None, reason)

    def conclude(self, ready: Sequence[Opened], dropped: Sequence[Figure], seconds: float) -> Benchmark:
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
            "free; optimize-export bench measures on another machine"
        )


class NonFinite:
    """The original's outputs for the example inputs with NaN or infinity in them, computed at the first comparison.

    Args:
        measured: the original.
        inputs: the flat inputs of the example call, on the device of the files.
    """

    def __init__(self, measured: MeasuredExport, inputs: Sequence[torch.Tensor]) -> None:
        self._measured = measured
        self._inputs = inputs

    def lost_by(self, runner: Runner) -> str | None:
        """How a runner differs from the original, as a clause; None if it has NaN or infinity at the same elements."""
        for word, tensors, originals in self._calls:
            outputs = runner(*tensors)
            for name, value, target in zip(self._measured.adapter.output_names, outputs, originals, strict=True):
                # The order of NaN isn't defined: a label, or the number of detections, says nothing.
                if not target.is_floating_point() or value.shape != target.shape:
                    continue
                finite, should_be = value.cpu().isfinite(), target.isfinite()
                for mine, theirs, wrong in (
                    ("finite numbers", "NaN or infinity", finite & ~should_be),
                    ("NaN or infinity", "finite numbers", ~finite & should_be),
                ):
                    if count := int(wrong.count_nonzero()):
                        return (
                            f"with {word} in an input, it gives {mine} where the original gives {theirs} "
                            f"({count} of {target.numel()} elements of {name})"
                        )
        return None

    @cached_property
    def _calls(self) -> list[tuple[str, tuple[torch.Tensor, ...], list[torch.Tensor]]]:
        """The kind of value, the inputs and the original's outputs of each call."""
        reference, found = self._measured.reference, []
        # Masks and the like are left out: nobody puts NaN there.
        floats = [
            number
            for number, each in enumerate(self._inputs)
            if each.is_floating_point() and each.numel() and not keeps_values(each)
        ]
        for word, value in _VALUES.items() if floats else ():
            tensors = tuple(each.clone() for each in self._inputs)
            for order, number in enumerate(floats):
                _put(value, tensors[number], order, len(floats))
            there = [each.to(reference.original.device) for each in tensors]
            outputs = outputs_on(reference, Call(*self._measured.adapter.call_arguments(there)))
            # It may refuse such inputs.
            if outputs is not None:
                found.append((word, tensors, list(outputs.values())))
        return found


def _put(value: float, tensor: torch.Tensor, order: int, count: int) -> None:
    """Write a value into the middle of some rows of an input; of several inputs, each has rows of its own if it can."""
    rows = tensor if tensor.dim() > 1 else tensor.reshape(1, -1)
    step = min(len(rows), count)
    middle: tuple[Any, ...] = tuple(size // 2 for size in rows.shape[1:])
    rows[slice(order % step, None, step), *middle] = value


@dataclass(frozen=True)
class OtherPasses:
    """The passes of the export with one more, or without one."""

    changed: str
    """The name of that pass."""
    more: bool
    """Whether it was added; otherwise it was left out."""
    passes: tuple[Pass, ...]
    """The resulting passes, in order."""

    @property
    def name(self) -> str:
        return f"the module {'with' if self.more else 'without'} {self.changed}"

    def made(self, job: ExportJob) -> nn.Module:
        """Optimize the original with these passes; each change is proven.

        Raises:
            Refused: the pass doesn't change the model.
        """
        module = optimize_again(job, self.passes, job.target)
        record = next((each for each in report_of(module).passes if each.name == self.changed), None)
        if record is not None and record.status != "applied":
            reasons = [record.reason, *(skip.text for skip in record.skips), "it finds nothing to change"]
            raise Refused(f"the pass is {record.status}: {next(filter(None, reasons))}")
        return module


def with_other_passes(job: ExportJob) -> Iterator[OtherPasses]:
    """Each optional pass added to those of the export, or left out if the module has it already."""
    provenance = job.provenance
    if provenance is not None and (provenance.original is None or provenance.report.mode != "inference"):
        return
    used, applied = ((), ()) if provenance is None else (provenance.passes, provenance.applied)
    exported = {item.name for item in applied}
    for name in _OPTIONAL:
        if name in exported:
            yield OtherPasses(name, False, tuple(item for item in used if item.name != name))
        elif all(item.name != name for item in used):
            tail = next((index for index, item in enumerate(used) if item.is_barrier), len(used))
            yield OtherPasses(name, True, (*used[:tail], parse_pass(name), *used[tail:]))
