"""Run an ONNX file in onnxruntime, on numpy arrays or torch tensors. Needs numpy and onnxruntime only."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from exporters.onnx_runtime import CUDA, NO_CUDA, ort, providers
from optimizer.errors import DeviceError
from optimizer.runtime.dtypes import NUMPY_DTYPES
from optimizer.runtime.processor import usable_cpus
from optimizer.runtime.route import Route


class OnnxruntimeRunner:
    """A session for one file. Calls may run in several threads at once.

    Raises:
        DeviceError: the device is a GPU, and onnxruntime can't use it.
    """

    placement: dict[str, int] | None = None

    def __init__(self, path: Path, route: Route, device: str) -> None:
        options = ort.SessionOptions()
        # Failures raise exceptions; onnxruntime's own lines on stderr would only repeat them.
        options.log_severity_level = 4
        if (threads := route.settings.get("threads", _default_threads())) is not None:
            options.intra_op_num_threads = int(threads)
            options.inter_op_num_threads = 1
        if route.settings.get("spinning") is False:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        tf32 = bool(route.settings.get("tf32"))
        if device == "cuda" and CUDA not in ort.get_available_providers():
            raise DeviceError(NO_CUDA)
        self._session = ort.InferenceSession(str(path), options, providers=providers(device, tf32=tf32))
        if device == "cuda" and CUDA not in self._session.get_providers():
            raise DeviceError(
                f"onnxruntime {ort.__version__} couldn't start its CUDA provider: its CUDA and cuDNN versions must fit "
                "those that are installed."
            )
        self.device = device
        self.settings = {"onnxruntime_tf32": "on" if tf32 and device == "cuda" else "off"}
        self._inputs = tuple(node.name for node in self._session.get_inputs())
        self._outputs = tuple(node.name for node in self._session.get_outputs())
        types = {node.type for node in (*self._session.get_inputs(), *self._session.get_outputs())}
        names = {"float": "float32", "double": "float64"}
        kinds = {kind.removeprefix("tensor(").removesuffix(")") for kind in types}
        self._by_numpy = device == "cpu" and {names.get(kind, kind) for kind in kinds} <= NUMPY_DTYPES

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        torch = sys.modules.get("torch")
        if torch is None or not any(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return tuple(self._session.run(self._outputs, dict(zip(self._inputs, tensors, strict=True))))
        if self._by_numpy:
            # No copy in either direction.
            arrays = [tensor.numpy(force=True) if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors]
            outputs = self._session.run(self._outputs, dict(zip(self._inputs, arrays, strict=True)))
            return tuple(map(torch.from_numpy, outputs))
        return self._bound(torch, tensors)

    def _bound(self, torch: Any, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run by address: on the GPU, and for dtypes that numpy doesn't have."""
        run_session = importlib.import_module("exporters.onnx_binding").run_session
        target = torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")
        given = [torch.as_tensor(tensor) for tensor in tensors]
        outputs = run_session(self._session, target, given)
        home = given[0].device if given else target
        return tuple(output.to(home) for output in outputs)


def _default_threads() -> int | None:
    """The number of CPUs that this process may use, if those are fewer than the machine has; None otherwise.

    By itself, onnxruntime starts a thread for each core of the machine, also in a container that may use two.
    """
    usable = usable_cpus()
    return usable if usable < (os.cpu_count() or 1) else None
