"""All ways of running one model: as it is, optimized by this project, and by what a user would use instead."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch
from models import Plain, Subject
from torch import nn
from torch.fx.experimental.optimization import fuse

from exporters.isolation import silent
from exporters.registry import load_artifact
from exporters.torchscript_deprecation import torchscript_allowed
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
ONNX = "onnx"

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
    ONNX: "torch.onnx.export in onnxruntime",
}


# The batch sizes at which this project verifies its results. The benchmark itself shows the error at the batch size
# that it measures.
_VERIFIED = (2, 1)


@dataclass(frozen=True)
class Contender:
    """One way to run the model on one batch.

    Attributes:
        name: a key of `LABELS`.
        run: returns the outputs as flat tensors; None if this way isn't available.
        reason: the error that made it unavailable; otherwise "".
        set_up_seconds: the time to make it, including the first call.
    """

    name: str
    run: Run | None
    reason: str = ""
    set_up_seconds: float = 0.0


class Workshop:
    """Makes the contenders for one model. Whatever doesn't depend on the batch size is made once.

    Args:
        folder: where the exported files are written.
        threads: the number of threads of onnxruntime.

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
        self._fast: nn.Module | None = None
        self._made: dict[str, tuple[Any, float]] = {}
        self.makers: dict[str, Callable[[tuple[torch.Tensor, ...]], Run]] = {
            EAGER: lambda inputs: calling(self._plain, inputs),
            OURS: lambda inputs: calling(Plain(self._optimized()), inputs),
            OURS_COMPILED: self._ours_compiled,
            OURS_TORCHSCRIPT: lambda inputs: self._artifact("torchscript", inputs),
            OURS_ONNX: lambda inputs: self._artifact("onnx", inputs),
            FUSE: lambda inputs: calling(Plain(self._once(FUSE, lambda: fuse(self._model))), inputs),
            BY_HAND: lambda inputs: calling(Plain(self._once(BY_HAND, self._by_hand)), inputs),
            JIT: self._jit,
            COMPILE: lambda inputs: calling(Plain(_compiled(self._model)), inputs),
            ONNX: self._plain_onnx,
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
        started = time.perf_counter()
        try:
            with warnings.catch_warnings(), torchscript_allowed():
                warnings.simplefilter("ignore")
                run = self.makers[name](inputs)
                run()
        except Exception as error:  # noqa: BLE001 - any error means that this way is unavailable; the row says so
            return Contender(name, None, sentence_of(error), time.perf_counter() - started)
        return Contender(name, run, "", time.perf_counter() - started)

    def _once(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _optimized(self) -> nn.Module:
        return self._once(OURS, lambda: optimize(self._model, example_inputs=self.inputs(_VERIFIED[0])))

    def _ours_compiled(self, inputs: tuple[torch.Tensor, ...]) -> Run:
        # Compile the verified result. Without example inputs, nothing runs the compiled code before the first call. So
        # it is compiled for one batch size, like that of torch.compile.
        return calling(Plain(optimize(self._optimized(), ["torch-compile"])), inputs)

    def _by_hand(self) -> nn.Module:
        fused: nn.Module = fuse(self._model)
        return fused.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def _artifact(self, form: str, inputs: tuple[torch.Tensor, ...]) -> Run:
        bundle = self._once(form, lambda: self._bundle(form))
        (artifact,) = bundle.artifacts
        path = artifact.path
        if form == "onnx":
            return OnnxRun(path, inputs, self._device, self._threads)
        return calling(torch.jit.load(str(path), map_location=self._device).eval(), inputs)

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

    def _plain_onnx(self, inputs: tuple[torch.Tensor, ...]) -> Run:
        path = self._folder / f"plain_{len(inputs[0])}.onnx"
        with silent():
            torch.onnx.export(self._plain, inputs, str(path), dynamo=True, verbose=False)
        return OnnxRun(path, inputs, self._device, self._threads)


class OnnxRun:
    """Runs a file in onnxruntime with bound inputs and outputs, and with the same session settings for every file.

    Raises:
        ProviderFallback: the device is the GPU, but onnxruntime would compute on the CPU.
    """

    def __init__(self, path: Path, inputs: tuple[torch.Tensor, ...], device: str, threads: int) -> None:
        if device == "cuda":
            # This checks where the nodes really run.
            load_artifact("onnx", path, device)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # The threads spin while they wait for work. After a run, this would take cores from the next contender.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = ort.InferenceSession(str(path), options, providers=_providers(device))
        self._device = device
        self._inputs = tuple(tensor.contiguous() for tensor in inputs)

    def __call__(self) -> tuple[torch.Tensor, ...]:
        binding = self._session.io_binding()
        for node, tensor in zip(self._session.get_inputs(), self._inputs, strict=True):
            kind = _NUMPY_NAMES[tensor.dtype]
            binding.bind_input(node.name, self._device, 0, kind, list(tensor.shape), tensor.data_ptr())
        for node in self._session.get_outputs():
            binding.bind_output(node.name, self._device, 0)
        if self._device == "cuda":
            # onnxruntime uses its own stream, so the inputs must be complete before it starts.
            torch.cuda.current_stream().synchronize()
        self._session.run_with_iobinding(binding)
        return tuple(torch.utils.dlpack.from_dlpack(value) for value in binding.get_outputs())


_NUMPY_NAMES = {torch.float32: "float32", torch.int64: "int64"}


def _providers(device: str) -> list[Any]:
    if device == "cpu":
        return ["CPUExecutionProvider"]
    # TF32 rounds the operands of float32 products to 10 bits of mantissa. It is off for torch, too.
    return [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"]


def calling(call: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Run:
    """Return a function that makes the call with these inputs, without gradients, and returns a tuple."""

    def run() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            output = call(*inputs)
        return output if isinstance(output, tuple) else (output,)

    return run


def _compiled(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model)
    return compiled


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


def _difference(output: torch.Tensor, truth: torch.Tensor) -> float:
    if output.shape != truth.shape:
        return float("inf")
    difference = (output.double().cpu() - truth.cpu()).abs().max().item() / max(truth.abs().max().item(), 1e-300)
    return difference if difference == difference else float("inf")
