"""The contenders that a user would deploy: files in the runtimes for them, exact and quantized, and this project's choice."""

from __future__ import annotations

from pathlib import Path

import torch
from contenders import BUDGET, EXACT, OPENVINO, OPENVINO_BF16, QUANTIZED, QUANTIZED_OPENVINO, Made, Workshop, calling
from file_runs import OnnxRun, OpenvinoRun, default_threads, quantize, size_of
from models import Subject, flat

from exporters.isolation import silent
from optimize_export.runtime import load, openvino_precisions
from optimizer import export, optimize

# The least cosine that the goals ask for, of this project's result and of a peer's.
ACCURACY = 0.999
_CALIBRATION_BATCHES = 8


class Deployments(Workshop):
    """Makes all contenders for one model.

    Args:
        tune_seconds: for this project's choice, once for the exact one and once within the accuracy budget.
    """

    def __init__(self, subject: Subject, folder: Path, device: str, threads: int, tune_seconds: float) -> None:
        super().__init__(subject, folder, device, threads)
        self._tune_seconds = tune_seconds
        self.makers |= {
            OPENVINO: lambda inputs: self._openvino(self._plain_file(inputs), inputs),
            OPENVINO_BF16: self._bfloat16,
            QUANTIZED: self._quantized,
            QUANTIZED_OPENVINO: lambda inputs: self._openvino(self._quantized_file(inputs), inputs),
            EXACT: lambda inputs: self._tuned(inputs, EXACT, "exact"),
            BUDGET: lambda inputs: self._tuned(inputs, BUDGET, ACCURACY),
        }

    def _openvino(self, path: Path, inputs: tuple[torch.Tensor, ...], precision: str = "f32") -> Made:
        if self._device != "cpu":
            raise RuntimeError("OpenVINO runs on the CPU here")
        return Made(OpenvinoRun(path, inputs, self._threads, precision), size_of(path))

    def _bfloat16(self, inputs: tuple[torch.Tensor, ...]) -> Made:
        if "bfloat16" not in openvino_precisions():
            raise RuntimeError("OpenVINO doesn't list bfloat16 among the capabilities of this CPU")
        return self._openvino(self._plain_file(inputs), inputs, "bf16")

    def _quantized(self, inputs: tuple[torch.Tensor, ...]) -> Made:
        path = self._quantized_file(inputs)
        return Made(OnnxRun(path, inputs, self._device, self._threads), size_of(path))

    def _quantized_file(self, inputs: tuple[torch.Tensor, ...]) -> Path:
        plain = self._plain_file(inputs)
        path = plain.with_name(f"quantized_{plain.name}")

        def write() -> Path:
            # As onnxruntime recommends: transformers dynamically, CNNs statically.
            calibration = None if self._subject.transformer else _calibration(inputs)
            with silent():
                quantize(plain, path, calibration)
            return path

        return self._once(path.name, write)

    def _tuned(
        self, inputs: tuple[torch.Tensor, ...], name: str, accuracy: str | float, tune_seconds: float | None = None
    ) -> Made:
        """Export, tune and load as a user does."""
        batch = len(inputs[0])
        fast = self._once(f"optimized_{batch}", lambda: optimize(self._model, example_inputs=inputs))
        drawn = accuracy == "exact" or not all(tensor.is_floating_point() for tensor in inputs)
        with default_threads(self._threads):
            bundle = export(
                fast,
                example_inputs=inputs,
                output=self._folder / f"{name}_{batch}",
                formats=("onnx", "torchscript"),
                tune=True,
                tune_seconds=self._tune_seconds if tune_seconds is None else tune_seconds,
                accuracy=accuracy,
                # The same as for onnxruntime's own quantization.
                calibration=None if drawn else _calibration(inputs),
                device=self._device,
            )
            loaded = load(bundle, device=self._device)
        (files,) = (each["files"] for each in bundle.manifest["artifacts"] if each["format"] == loaded.route.format)
        run = calling(lambda *given: flat(loaded(*given)), inputs)
        size = sum((bundle.path / each).stat().st_size for each in files)
        return Made(run, size, str(loaded.route), bundle.benchmark)


def _calibration(inputs: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
    """Batches from the distribution of the images, none of which is a measured one."""
    generator = torch.Generator().manual_seed(2)
    return [
        tuple(torch.randn(tensor.shape, generator=generator) for tensor in inputs) for _ in range(_CALIBRATION_BATCHES)
    ]
