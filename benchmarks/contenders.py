"""Ways of running one model: as it is, optimized by this project, and by what a user would use instead."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from file_runs import OnnxRun, size_of
from models import Plain, Subject
from torch import nn
from torch.fx.experimental.optimization import fuse

from exporters.isolation import silent, torchscript_allowed
from optimize_export.gpu_settings import GpuSettings
from optimize_export.runtime.cpus import available_memory
from optimizer import export, optimize

Run = Callable[[], tuple[torch.Tensor, ...]]

EAGER = "eager"
OURS = "ours"
OURS_COMPILED = "ours-compile"
OURS_TORCHSCRIPT = "ours-torchscript"
OURS_ONNX = "ours-onnx"
FUSE = "fuse"
BY_HAND = "fuse-channels-last"
JIT = "jit"
COMPILE = "compile"
AUTOTUNE = "compile-max-autotune"
FREEZING = "compile-freezing"
ONNX = "onnx"
EAGER_TF32 = "eager-tf32"
COMPILE_TF32 = "compile-tf32"
ONNX_TF32 = "onnx-tf32"
OPENVINO = "openvino"
OPENVINO_BF16 = "openvino-bf16"
QUANTIZED = "quantized"
QUANTIZED_OPENVINO = "quantized-openvino"
EXACT = "ours-exact"
BUDGET = "ours-budget"

LABELS = {
    EAGER: "eager",
    OURS: "optimize-export",
    OURS_COMPILED: "optimize-export, torch-compile",
    OURS_TORCHSCRIPT: "optimize-export, TorchScript file",
    OURS_ONNX: "optimize-export, ONNX file in onnxruntime",
    FUSE: "torch.fx fuse",
    BY_HAND: "torch.fx fuse, channels_last",
    JIT: "torch.jit.optimize_for_inference",
    COMPILE: "torch.compile",
    AUTOTUNE: "torch.compile, max-autotune",
    FREEZING: "torch.compile, freezing",
    ONNX: "torch.onnx.export in onnxruntime",
    EAGER_TF32: "eager, TF32",
    COMPILE_TF32: "torch.compile, TF32",
    ONNX_TF32: "torch.onnx.export in onnxruntime, TF32",
    OPENVINO: "torch.onnx.export in OpenVINO",
    OPENVINO_BF16: "torch.onnx.export in OpenVINO, bfloat16",
    QUANTIZED: "onnxruntime's quantization",
    QUANTIZED_OPENVINO: "onnxruntime's quantization in OpenVINO",
    EXACT: "optimize-export, tuned",
    BUDGET: "optimize-export, tuned, accuracy 0.999",
}

# On a GPU, these round the factors of float32 products to 11 significant bits; the others don't, except as this project
# chose.
_IN_TF32 = "-tf32"

# The batch sizes at which this project verifies its results. The benchmark itself shows the error at the batch size
# that it measures.
_VERIFIED = (2, 1)
# The copies of the weights that a contender may need: those in the file, in the runtime, and packed for its kernels.
_COPIES = 3


@dataclass(frozen=True)
class Made:
    """A run with the bytes of its files, what a contender chose by itself, and the figures that it chose by."""

    run: Run
    bytes: int
    choice: str = ""
    tuning: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Contender:
    """One way to run the model on one batch.

    Attributes:
        name: a key of `LABELS`.
        run: returns the outputs as flat tensors; None if this way isn't available.
        reason: the error that made it unavailable; otherwise "".
        set_up_seconds: the time to make it, including the first call and steps that it shares with other contenders.
        bytes: of its files, or of the model's tensors if it has none.
        choice: what it chose by itself, such as a runtime.
        tuning: the figures that it chose by, and why other candidates were dropped; None if it had no choice.
    """

    name: str
    run: Run | None
    reason: str = ""
    set_up_seconds: float = 0.0
    bytes: int | None = None
    choice: str = ""
    tuning: Mapping[str, Any] | None = None


class Workshop:
    """Makes the contenders for one model. Whatever doesn't depend on the batch size is made once.

    Args:
        folder: where the exported files are written.
        threads: the number of threads of onnxruntime and OpenVINO.

    Attributes:
        makers: for each name, the function that makes the run of one batch of inputs.
    """

    def __init__(self, subject: Subject, folder: Path, device: str, threads: int) -> None:
        self._subject = subject
        self._device = device
        self._folder = folder
        self._threads = threads
        self._model = subject.model.to(device)
        self._plain = Plain(self._model).eval()
        # The results of shared steps, each with the seconds that it took, and the seconds of those used again by the
        # current contender.
        self._made: dict[str, tuple[Any, float]] = {}
        self._used_again = 0.0
        self.makers: dict[str, Callable[[tuple[torch.Tensor, ...]], Run | Made]] = {
            EAGER: lambda inputs: calling(self._plain, inputs),
            EAGER_TF32: lambda inputs: calling(self._plain, inputs),
            OURS: lambda inputs: calling(Plain(self._optimized()), inputs),
            OURS_COMPILED: self._ours_compiled,
            OURS_TORCHSCRIPT: lambda inputs: self._artifact("torchscript", inputs),
            OURS_ONNX: lambda inputs: self._artifact("onnx", inputs),
            FUSE: lambda inputs: calling(Plain(self._once(FUSE, lambda: fuse(self._model))), inputs),
            BY_HAND: lambda inputs: calling(Plain(self._once(BY_HAND, self._by_hand)), inputs),
            JIT: self._jit,
            COMPILE: lambda inputs: self._compiled(inputs),
            COMPILE_TF32: lambda inputs: self._compiled(inputs),
            AUTOTUNE: lambda inputs: self._compiled(inputs, mode="max-autotune"),
            FREEZING: self._frozen,
            ONNX: self._plain_onnx,
            ONNX_TF32: lambda inputs: self._plain_onnx(inputs, tf32=True),
        }

    def inputs(self, batch: int) -> tuple[torch.Tensor, ...]:
        """The inputs of all contenders, on the device."""
        return tuple(tensor.to(self._device) for tensor in self._subject.inputs(batch))

    def truth(self, batch: int) -> tuple[torch.Tensor, ...]:
        """The outputs of the model in float64."""
        double = Plain(deepcopy(self._subject.model)).eval().double()
        wide = tuple(t.double() if t.is_floating_point() else t for t in self.inputs(batch))
        return calling(double, wide)()

    def contenders(self, batch: int, names: Iterable[str]) -> list[Contender]:
        """Make one contender for each name, and call each of them once."""
        # Drop compiled code of other batch sizes: with it, the compiler would switch to dynamic shapes.
        torch._dynamo.reset()
        inputs = self.inputs(batch)
        return [self._contender(name, inputs) for name in names]

    def _contender(self, name: str, inputs: tuple[torch.Tensor, ...]) -> Contender:
        started, self._used_again = time.perf_counter(), 0.0
        try:
            self._check_memory()
            settings = self._settings(name)
            # Compilers read them, too.
            if self._device == "cuda":
                settings.put_in_force()
                _in_force.clear()
            with warnings.catch_warnings(), torchscript_allowed():
                warnings.simplefilter("ignore")
                made = self.makers[name](inputs)
                made = made if isinstance(made, Made) else Made(made, self._bytes)
                if self._device == "cuda":
                    # Files that this project tuned set their own, and leave them so.
                    made = replace(made, run=_under(settings if made.tuning is None else None, made.run))
                made.run()
        except Exception as error:  # noqa: BLE001 - any error means that this way is unavailable; the row says so
            return Contender(name, None, sentence_of(error), self._spent_since(started))
        return Contender(name, made.run, "", self._spent_since(started), made.bytes, made.choice, made.tuning)

    def _settings(self, name: str) -> GpuSettings:
        """The settings that a contender is made and runs under, on a GPU. RuntimeError if it needs one and there is none."""
        tf32 = name.endswith(_IN_TF32)
        if tf32 and self._device != "cuda":
            raise RuntimeError("TF32 needs a GPU")
        return GpuSettings(matmul=tf32, cudnn=tf32, benchmark=False)

    def _spent_since(self, started: float) -> float:
        return time.perf_counter() - started + self._used_again

    @property
    def _bytes(self) -> int:
        tensors = (*self._model.parameters(), *self._model.buffers())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _check_memory(self) -> None:
        """Raise MemoryError if another contender could take the memory that the others need; all stay open."""
        free, needed = available_memory(), _COPIES * self._bytes
        if free is not None and free < needed:
            raise MemoryError(f"{free / 2**30:.1f} GiB are free, and this could need {needed / 2**30:.1f}")

    def _once(self, key: str, make: Callable[[], Any]) -> Any:
        """The result of a step that several contenders share."""
        if key in self._made:
            self._used_again += self._made[key][1]
        else:
            started, before = time.perf_counter(), self._used_again
            made = make()
            self._made[key] = made, time.perf_counter() - started + self._used_again - before
        return self._made[key][0]

    def _optimized(self) -> nn.Module:
        return self._once(OURS, lambda: optimize(self._model, example_inputs=self.inputs(_VERIFIED[0])))

    def _ours_compiled(self, inputs: tuple[torch.Tensor, ...]) -> Run:
        # Compile the verified result. Without example inputs, nothing runs the compiled code before the first call. So
        # it is compiled for one batch size, like that of torch.compile.
        return calling(Plain(optimize(self._optimized(), ["torch-compile"])), inputs)

    def _by_hand(self) -> nn.Module:
        fused: nn.Module = fuse(self._model)
        return fused.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def _compiled(self, inputs: tuple[torch.Tensor, ...], **options: Any) -> Run:
        return calling(Plain(torch.compile(self._model, **options)), inputs)  # type: ignore[arg-type]

    def _frozen(self, inputs: tuple[torch.Tensor, ...]) -> Run:
        # The option alone doesn't freeze: torch.compile's front end reads the setting of the process. Without the option,
        # the code of plain torch.compile would be used again.
        with torch._inductor.config.patch(freezing=True):
            run = self._compiled(inputs, options={"freezing": True})
            run()
        return run

    def _artifact(self, form: str, inputs: tuple[torch.Tensor, ...]) -> Made:
        bundle = self._once(form, lambda: self._bundle(form))
        (artifact,) = bundle.artifacts
        path = artifact.path
        if form == "onnx":
            return Made(OnnxRun(path, inputs, self._device, self._threads), size_of(path))
        loaded = torch.jit.load(str(path), map_location=self._device).eval()
        return Made(calling(loaded, inputs), size_of(path))

    def _bundle(self, form: str) -> Any:
        # Export one bundle for each format, because a refused format would withhold the whole bundle.
        return export(
            self._optimized(),
            example_inputs=self.inputs(_VERIFIED[0]),
            output=self._folder / form,
            formats=(form,),
            batch_sizes=_VERIFIED,
            device=self._device,
        )

    def _jit(self, inputs: tuple[torch.Tensor, ...]) -> Run:
        traced = torch.jit.trace(self._plain, inputs, check_trace=False)
        run = calling(torch.jit.optimize_for_inference(traced), inputs)
        # The profiling executor settles on its final code in the second call.
        run()
        return run

    def _plain_onnx(self, inputs: tuple[torch.Tensor, ...], *, tf32: bool = False) -> Made:
        path = self._plain_file(inputs)
        return Made(OnnxRun(path, inputs, self._device, self._threads, tf32=tf32), size_of(path))

    def _plain_file(
        self, inputs: tuple[torch.Tensor, ...], name: str = "plain", model: nn.Module | None = None
    ) -> Path:
        """The ONNX file of `torch.onnx.export` for one batch size: of the original, or of another module."""
        path = self._folder / f"{name}_{len(inputs[0])}.onnx"

        def write() -> Path:
            with silent():
                torch.onnx.export(model or self._plain, inputs, str(path), dynamo=True, verbose=False)
            return path

        return self._once(path.name, write)


def calling(call: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Run:
    """Return a function that makes the call with these inputs, without gradients, and returns a tuple."""

    def run() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            output = call(*inputs)
        return output if isinstance(output, tuple) else (output,)

    return run


# What `_under` put in force for the last run, if nothing can have changed it since. Reading torch's settings takes
# microseconds, which counts in short calls.
_in_force: list[GpuSettings] = []


def _under(settings: GpuSettings | None, run: Run) -> Run:
    """The run under torch's settings; None if it sets its own."""

    def call() -> tuple[torch.Tensor, ...]:
        if settings is None:
            _in_force.clear()
        elif not _in_force or _in_force[0] is not settings:
            settings.put_in_force()
            _in_force[:] = [settings]
        return run()

    return call


def sentence_of(error: Exception) -> str:
    """The class and the first line of an error, in at most 160 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."


def error_against(outputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """The largest error of any output, relative to the largest value of that output.

    Infinite if the outputs differ from the truth in number or shape, or aren't finite.
    """
    if len(outputs) != len(truth):
        return float("inf")
    return max(_difference(output, true) for output, true in zip(outputs, truth, strict=True))


def cosine_to(outputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float | None:
    """The least cosine of the angle between an output and the truth, both flattened; None if there is none."""
    if [output.shape for output in outputs] != [true.shape for true in truth]:
        return None
    pairs = [
        (output.to(true.device, torch.float64).flatten(), true.double().flatten())
        for output, true in zip(outputs, truth, strict=True)
        if true.is_floating_point()
    ]
    cosines = [float(torch.dot(output, true) / (output.norm() * true.norm())) for output, true in pairs]
    # The minimum of values that contain a NaN depends on their order.
    return min(cosines) if cosines and all(map(math.isfinite, cosines)) else None


def _difference(output: torch.Tensor, truth: torch.Tensor) -> float:
    if output.shape != truth.shape:
        return float("inf")
    # Where the truth is: large outputs take long to copy.
    distance = (output.to(truth.device, torch.float64) - truth).abs().max().item()
    difference = distance / max(truth.abs().max().item(), 1e-300)
    return difference if difference == difference else float("inf")
