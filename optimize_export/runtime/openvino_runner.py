"""Run an ONNX file in OpenVINO on the CPU, on numpy arrays or torch tensors."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from optimize_export.errors import DeviceError
from optimize_export.runtime.cpus import own_threads, quota_threads
from optimize_export.runtime.route import PRECISIONS, Route, require_runtime


class OpenvinoRunner:
    """A compiled file. Calls may run in several threads at once; each has its own request.

    A file with open sizes that is compiled for fixed ones is up to 1.3 times as fast. With the setting `shapes`, calls of
    these shapes run so; the first call of other shapes compiles the file once more, for all others.
    """

    placement: dict[str, int] | None = None

    def __init__(self, path: Path, route: Route, device: str) -> None:
        require_runtime("openvino")
        if device != "cpu":
            raise DeviceError(f"OpenVINO runs on the CPU here, not on {device}.")
        package = openvino()
        precision = str(route.settings.get("precision", "float32"))
        config: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            # By itself, OpenVINO computes in bfloat16 where the processor is faster at it.
            "INFERENCE_PRECISION_HINT": PRECISIONS[precision],
        }
        if (threads := own_threads(route.settings.get("threads"), quota_threads())) is not None:
            config["INFERENCE_NUM_THREADS"] = threads
        core = openvino_core()
        self._shapes: list[tuple[int, ...]] | None = None
        # Compiled for any shapes, and for the fixed ones.
        self._any: Any = None
        if "shapes" not in route.settings:
            self._any = core.compile_model(str(path), "CPU", config)
        else:
            texts = str(route.settings["shapes"]).split(",")
            self._shapes = [tuple(int(size) for size in text.split("x") if size) for text in texts]
            # Kept, because the file may be gone when a call has other shapes.
            self._model, self._config, self._lock = core.read_model(str(path)), config, threading.Lock()
            fixed = self._model.clone()
            fixed.reshape(dict(zip(fixed.inputs, map(list, self._shapes), strict=True)))
            self._fixed = core.compile_model(fixed, "CPU", config)
        self._count = len((self._any or self._fixed).outputs)
        self._local = threading.local()
        self._openvino = package
        self.device = "cpu"
        self.settings = {"openvino_precision": precision}

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        torch = sys.modules.get("torch")
        is_torch = torch is not None and any(isinstance(tensor, torch.Tensor) for tensor in tensors)
        arrays = [each.numpy(force=True) if torch and isinstance(each, torch.Tensor) else each for each in tensors]
        name = "any" if self._shapes is None or [array.shape for array in arrays] != self._shapes else "fixed"
        request = getattr(self._local, name, None)
        if request is None:
            request = (self._fixed if name == "fixed" else self._for_any_shape()).create_infer_request()
            setattr(self._local, name, request)
        for index, array in enumerate(arrays):
            # OpenVINO can't share the memory of a view or of an array that it may not write to; it copies these.
            shared = array.flags.c_contiguous and array.flags.writeable
            request.set_input_tensor(index, self._openvino.Tensor(array, shared_memory=shared))
        request.infer()
        # The request reuses the memory of its outputs.
        outputs = tuple(request.get_output_tensor(index).data.copy() for index in range(self._count))
        return tuple(map(torch.from_numpy, outputs)) if is_torch and torch is not None else outputs

    def _for_any_shape(self) -> Any:
        if self._any is None:
            with self._lock:
                if self._any is None:
                    self._any = openvino_core().compile_model(self._model, "CPU", self._config)
        return self._any


def openvino_precisions() -> list[str]:
    """The precisions below float32 in which this machine's processor computes faster, as OpenVINO says."""
    capabilities = openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return [name for name, short in (("bfloat16", "BF16"), ("float16", "FP16")) if short in capabilities]


@functools.cache
def openvino_core() -> Any:
    """OpenVINO's Core, one for the process and never freed.

    Each Core sets up a stack for signal handlers in its thread, and restores the one before when it is freed. If two are
    freed in the order in which they were made, or in another thread, the next signal that Python handles, such as
    Ctrl-C, runs on freed memory and ends the process. Seen in 2026.4.1.
    """
    return openvino().Core()


_TELEMETRY = "openvino_telemetry"


def openvino() -> ModuleType:
    """Import OpenVINO with its telemetry off.

    At import, OpenVINO sends an event to its makers, from a forked process. Besides the event itself, a fork in the middle
    of an export waits until the export is done, and torch's compiler then waits for the fork. Without the package
    `openvino_telemetry`, OpenVINO uses an empty stub, so that package is hidden during the import.
    """
    if "openvino" in sys.modules or _TELEMETRY in sys.modules:
        return importlib.import_module("openvino")
    # An entry of None makes the import of that name fail.
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("openvino")
    finally:
        del sys.modules[_TELEMETRY]
