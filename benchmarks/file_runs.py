"""Run model files in onnxruntime and OpenVINO, and quantize them, as their documentations show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch

from exporters.registry import load_artifact
from optimize_export.onnx_runtime import providers
from optimize_export.runtime.onnx_binding import BoundSession

_NUMPY_NAMES = {torch.float32: "float32", torch.int64: "int64"}


class OnnxRun:
    """Runs a file in onnxruntime with bound inputs and outputs.

    With `cuda_graph`, it replays the kernels of the first run. A caller has new inputs at each call, so they are copied
    to the place from which the graph reads them.

    Raises:
        ProviderFallback: the device is the GPU, but onnxruntime would compute on the CPU.
    """

    def __init__(
        self,
        path: Path,
        inputs: tuple[torch.Tensor, ...],
        device: str,
        threads: int,
        *,
        tf32: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        if device == "cuda":
            # This checks where the nodes really run.
            load_artifact("onnx", path, device)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        self._session = ort.InferenceSession(
            str(path), options, providers=providers(device, tf32=tf32, cuda_graph=cuda_graph)
        )
        self._device = device
        self._inputs = tuple(tensor.contiguous() for tensor in inputs)
        bound = BoundSession(self._session, torch.device(device, 0), graphs=True) if cuda_graph else None
        self._recorded = None if bound is None else bound.recorded(self._inputs)

    def __call__(self) -> tuple[torch.Tensor, ...]:
        if self._recorded is not None:
            replay, read, written = self._recorded
            for place, tensor in zip(read, self._inputs, strict=True):
                place.copy_(tensor)
            replay()
            return written
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


class OpenvinoRun:
    """Runs a file in OpenVINO on the CPU.

    Args:
        precision: "f32" or "bf16".
    """

    def __init__(self, path: Path, inputs: tuple[torch.Tensor, ...], threads: int, precision: str = "f32") -> None:
        from optimize_export.runtime.openvino_runner import openvino_core

        config = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": threads,
        }
        self._compiled = openvino_core().compile_model(str(path), "CPU", config)
        self._inputs = [tensor.contiguous().numpy() for tensor in inputs]

    def __call__(self) -> tuple[torch.Tensor, ...]:
        # A compiled model shares the memory of the inputs and copies the outputs by default.
        return tuple(map(torch.from_numpy, self._compiled(self._inputs).to_tuple()))


def quantize(source: Path, target: Path, calibration: Sequence[tuple[torch.Tensor, ...]] | None) -> None:
    """Quantize a file with onnxruntime's tools: statically, per channel, as QDQ; dynamically without calibration.

    Args:
        calibration: batches of inputs.
    """
    from onnxruntime.quantization import QuantFormat, quantize_dynamic, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = target.with_name(f"prepared_{target.name}")
    quant_pre_process(str(source), str(prepared))
    if calibration is None:
        quantize_dynamic(str(prepared), str(target))
        return
    quantize_static(
        str(prepared),
        str(target),
        _Batches(prepared, calibration),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        # As the documentation advises: without VNNI, sums of products of 8 bits each may saturate.
        reduce_range=not _has_vnni(),
    )


class _Batches:
    """What onnxruntime calls a CalibrationDataReader."""

    def __init__(self, path: Path, batches: Sequence[tuple[torch.Tensor, ...]]) -> None:
        names = [node.name for node in ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).get_inputs()]
        self._rest = iter([dict(zip(names, (t.cpu().numpy() for t in batch), strict=True)) for batch in batches])

    def get_next(self) -> Mapping[str, Any] | None:
        return next(self._rest, None)


def _has_vnni() -> bool:
    try:
        return "vnni" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@contextlib.contextmanager
def default_threads(count: int) -> Iterator[None]:
    """Make `count` onnxruntime's default number of threads.

    Its own is the number of the machine's cores, also in a process that is restricted to some of them: it then pins its
    threads to the others.
    """

    class Limited(ort.SessionOptions):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = count

    before = ort.SessionOptions
    ort.SessionOptions = Limited
    try:
        yield
    finally:
        ort.SessionOptions = before


def size_of(path: Path) -> int:
    """The bytes of an ONNX file and of its external data, which has the same name with a further suffix."""
    return sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*"))
