"""The candidates of one export: the original, its files, the module in Python; and the proof of each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exporters.aoti import missing_compiler as missing_cpp_compiler
from exporters.child_process import InChild, can_start
from exporters.registry import exported_format
from optimize_export.errors import DeviceError
from optimize_export.gpu_settings import GpuSettings
from optimize_export.runtime import Route, Runner, Setting, open_route, own_routes, require_runtime
from optimize_export.runtime.cpus import available_memory
from optimize_export.wording import listed
from optimizer.exporting import ExportJob, MeasuredExport, WrittenFiles, copy_for_export, optimize_again
from optimizer.model import Call, keeps_values
from optimizer.parity import Accuracy, outputs_on
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
from optimizer.tuning.further_files import FurtherFiles, why_not_applied
from passes.base import Pass
from passes.compiling.compiler import import_inductor, missing_compiler
from passes.registry import parse_pass

# How much memory open files take at most, as a multiple of their size: a timing opens each file at most twice, and a
# runtime copies the weights while it loads them. Tuning keeps more of them open.
_TIMED_COPIES, _TUNED_COPIES = 3, 6
# Exact passes that make some models faster on some devices, and others slower.
_OPTIONAL = ("channels-last", "merge-linears", "pad-channels", "jit-fusion")
_VALUES = {"NaN": math.nan, "infinity": math.inf}


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
    has_open_sizes: bool = False
    """Whether the files take other sizes than those of the inputs."""
    proven: Sequence[Route] = ()
    """The routes whose files have run: they are opened without a child process."""
    # The last route that was opened in the child, and its runner there: a proof mostly follows.
    _in_child: tuple[Route, Runner] | None = field(default=None, init=False, repr=False)

    @property
    def own_routes(self) -> list[Route]:
        """Each file in the runtime that its format is made for, the simplest to ship first."""
        return own_routes(entry["format"] for entry in self.entries)

    def in_openvino(self, format: str, precision: str = "float32") -> Route:
        """A file in OpenVINO, compiled for the shapes of the inputs."""
        settings: dict[str, Setting] = {} if precision == "float32" else {"precision": precision}
        if self.has_open_sizes:
            settings["shapes"] = ",".join("x".join(map(str, tensor.shape)) for tensor in self.inputs)
        return Route(format, "openvino", settings)

    def entry(self, format: str) -> Mapping[str, Any]:
        return next(each for each in self.entries if each["format"] == format)

    def opened(self, route: Route) -> Runner:
        """Open the file of a route."""
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
        # Such as "model.onnx in openvino".
        name = f"{entry['path']} {str(route).removeprefix(f'{route.format} ')}"
        return Candidate(name, lambda: self._run(route), route, entry["bytes"], accuracy, self.device)

    def _run(self, route: Route) -> Run:
        inputs = tuple(self.inputs)
        if route not in self.proven and _crashes_alone(route, self.device, inputs):
            self.open_for_proof(route)(*inputs)
        # The runner of a route with CUDA graphs has them as an attribute.
        runner: Any = self.opened(route)
        if self.device != "cuda" or not route.settings.get("cuda_graph"):
            return lambda: runner(*inputs)

        def replayed() -> object:
            outputs = runner(*inputs)
            if reason := runner.graphs.why_none:
                raise DeviceError(f"no CUDA graph of it can be recorded: {reason}")
            return outputs

        return replayed


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
    if route is None or exported_format(route.format) != "torchscript":
        return None
    return Route(route.format, route.runtime, {**route.settings, "freeze": True})


def in_graph(candidate: Candidate) -> bool:
    """Whether the candidate runs in CUDA graphs."""
    return candidate.route is not None and candidate.route.settings.get("cuda_graph", False) is True


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


# --------------------------------------------------------------------------------------------------- those of one export


class Bench:
    """What the candidates of one export are made of."""

    def __init__(self, job: ExportJob, measured: MeasuredExport, written: WrittenFiles, folder: Path) -> None:
        self.job, self.measured = job, measured
        self._on_gpu = job.target.type == "cuda"
        # The user's, which the original runs under; None on a CPU.
        self.settings = GpuSettings.now() if self._on_gpu else None
        given = measured.adapter.flatten_inputs(job.samples.given.args, job.samples.given.kwargs)
        inputs = [tensor.detach().clone().to(job.target) for tensor in given]
        entries = [
            {**entry, "bytes": sum((folder / path).stat().st_size for path in entry["files"])}
            for entry in written.entries
        ]
        # The proven files, with the example call.
        self.files = Files(folder, entries, job.target.type, inputs)
        self.files.proven = self.files.own_routes
        self.files.has_open_sizes = measured.request.dynamic_batch or bool(measured.request.open_dims)
        # By format, how long its file took to export and prove, in seconds.
        self.seconds = dict(written.seconds)
        self.nonfinite = NonFinite(measured, inputs)
        # By route, how it differs from the original for NaN or infinity, where that is allowed.
        self.lost: dict[str, str] = {}

    @cached_property
    def further(self) -> FurtherFiles:
        """Makes the files that tuning adds."""
        return FurtherFiles(self.job, self.measured)

    def end_compiling(self) -> None:
        """End what compiles in the background."""
        if "further" in vars(self):
            self.further.close()

    def finished(self) -> None:
        """Wait for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()

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
        return Candidate("the optimized module", lambda: self._calling(job.model))

    def with_other_passes(self) -> Iterator[Candidate]:
        """The module with another optional pass, or without one that it has; neither is a file."""
        for name, changed, passes in with_other_passes(self.job):
            yield Candidate(name, partial(self._optimized_again, changed, passes))

    def _optimized_again(self, changed: str, passes: Sequence[Pass]) -> Run:
        """Optimize the original with other passes; each change is proven.

        Raises:
            Refused: the pass `changed` doesn't change the model.
        """
        module = optimize_again(self.job, passes, self.job.target)
        if (why := why_not_applied(module, changed)) is not None:
            raise Refused(f"the pass is {why}")
        return self._calling(module)

    def compiled(self) -> Candidate | None:
        """The module compiled by torch.compile, which is no file; None without a compiler."""

        def opened() -> Run:
            import_inductor()
            run = self._calling(self.job.model, torch.compile)
            with warnings.catch_warnings():
                # Inductor recommends TF32 to whoever compiles without it.
                warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
                run()
            return run

        return Candidate("torch.compile", opened) if self.can_compile else None

    @property
    def can_compile(self) -> bool:
        """Whether this machine has what inductor and AOTInductor need."""
        return missing_compiler(self.job.target) is None and missing_cpp_compiler() is None

    def _calling(self, model: nn.Module, compiler: Callable[[Any], Any] = lambda module: module) -> Run:
        """The example call of a copy of a module."""
        copy = copy_for_export(model, self.job.target, self.measured.reference.written)
        args, kwargs = self.measured.adapter.call_arguments(self.files.inputs)
        return calling(compiler(copy), args, kwargs, self.settings)

    def open_eager(self) -> Opened:
        """The original, ready to run.

        Raises:
            Refused: it can't run in inference mode.
        """
        ready, dropped = open_all([Candidate(EAGER, lambda: self._calling(self.measured.original))])
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
        # Exact files before lossy ones, and without CUDA graphs before with; the sort is stable.
        files = [each.name for each in sorted(candidates, key=lambda each: (each.accuracy is not None, in_graph(each)))]
        found = timed(ready, files, seconds, self.finished)
        figures, notes = (*found.figures, *dropped), (*found.notes, *self._notes(ready))
        reason, threads = recommendation(figures, found.chosen), torch.get_num_threads()
        return Benchmark(self.batch_sizes, threads, found.rounds, figures, found.route, reason, notes)

    def _notes(self, ready: Sequence[Opened]) -> list[str]:
        losing: dict[str, list[str]] = {}
        for candidate in (each.candidate for each in ready):
            if clause := self.lost.get(str(candidate.route)):
                losing.setdefault(clause, []).append(candidate.name)
        lost = [f"{listed(names)}: {clause}" for clause, names in losing.items()]
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
    """The original's outputs for the example inputs with NaN or infinity in them, computed at the first comparison."""

    def __init__(self, measured: MeasuredExport, inputs: Sequence[torch.Tensor]) -> None:
        self._measured = measured
        # The flat inputs of the example call, on the device of the files.
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


def with_other_passes(job: ExportJob) -> Iterator[tuple[str, str, tuple[Pass, ...]]]:
    """Each optional pass added to those of the export, or left out if the module has it already.

    Yields:
        A name for the module, the name of the pass, and the resulting passes in order.
    """
    provenance = job.provenance
    if provenance is not None and (provenance.original is None or provenance.report.mode != "inference"):
        return
    used, applied = ((), ()) if provenance is None else (provenance.passes, provenance.applied)
    exported = {item.name for item in applied}
    for name in _OPTIONAL:
        if name in exported:
            yield f"the module without {name}", name, tuple(item for item in used if item.name != name)
        elif all(item.name != name for item in used):
            tail = next((index for index, item in enumerate(used) if item.is_barrier), len(used))
            yield f"the module with {name}", name, (*used[:tail], parse_pass(name), *used[tail:])
