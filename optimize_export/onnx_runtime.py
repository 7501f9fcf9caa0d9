"""onnxruntime: its import with its telemetry off, its providers, and a file that runs in it. Without torch.

All other modules import onnxruntime from here. From version 1.29 on, official builds write an identifier into the home
folder and send events. This starts at import, so the variable must be set before. The call covers processes that have
already imported onnxruntime.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from optimize_export.errors import DeviceError
from optimize_export.runtime.cpus import own_threads, usable_cpus
from optimize_export.runtime.route import NUMPY_DTYPES, Route, is_installed, require_runtime

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"


class _Onnxruntime(ModuleType):
    """onnxruntime, imported when a name of it is first used: files of other formats don't need it."""

    def __getattr__(self, name: str) -> Any:
        require_runtime("onnxruntime")
        import onnxruntime

        if not vars(self).get("_silenced"):
            onnxruntime.disable_telemetry_events()
            self._silenced = True
        return getattr(onnxruntime, name)


ort: Any = _Onnxruntime("onnxruntime")


def no_cuda() -> str:
    """The sentence for an onnxruntime without its CUDA provider."""
    return f"onnxruntime {ort.__version__} has no CUDA provider; install one with `pip install onnxruntime-gpu`."


def providers(
    device: str, index: int = 0, *, tf32: bool = False, cuda_graph: bool = False, nhwc: bool = False
) -> list[Any]:
    """The execution providers of a session on "cpu" or "cuda", with their options.

    For "cuda", this also silences onnxruntime's default logger.

    Args:
        index: the number of the GPU.
        tf32: whether float32 products may round their factors to 11 significant bits. Without it they don't, whatever
            onnxruntime's default is, since results must match the model's.
        cuda_graph: whether runs may be recorded; see `without_graph`.
        nhwc: whether convolutions run in channels-last.
    """
    if device == "cpu":
        return [CPU]
    # In float16, cuDNN can't fuse each convolution with the operations after it. onnxruntime then runs them one by one, but
    # writes an error line first, and no option of a session stops that.
    ort.set_default_logger_severity(4)
    options = {"device_id": index, "use_tf32": tf32, "enable_cuda_graph": cuda_graph, "prefer_nhwc": nhwc}
    return [(CUDA, {name: str(int(value)) for name, value in options.items()}), CPU]


def without_graph() -> Any:
    """The options of a run that isn't recorded, in a session with `cuda_graph`."""
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", "-1")
    return options


def quantization() -> tuple[Any, Any]:
    """`onnxruntime.quantization` and its module for weights of 4 bits. Only quantization needs the slow import.

    The import extends `sys.path`, which is undone.
    """
    require_runtime("onnxruntime")
    paths = list(sys.path)
    try:
        import onnxruntime.quantization
        from onnxruntime.quantization import matmul_nbits_quantizer
    finally:
        sys.path[:] = paths
    return onnxruntime.quantization, matmul_nbits_quantizer


class OnnxruntimeRunner:
    """A session for one file. Calls may run in several threads at once."""

    placement: dict[str, int] | None = None

    def __init__(self, path: Path, route: Route, device: str) -> None:
        options = ort.SessionOptions()
        # Failures raise exceptions; onnxruntime's own lines on stderr would only repeat them.
        options.log_severity_level = 4
        if (threads := own_threads(route.settings.get("threads"), _default_threads())) is not None:
            options.intra_op_num_threads = threads
            options.inter_op_num_threads = 1
        if route.settings.get("spinning") is False:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        settings = {name: bool(route.settings.get(name)) for name in ("cuda_graph", "nhwc", "tf32")}
        if device == "cuda" and CUDA not in ort.get_available_providers():
            raise DeviceError(no_cuda())
        self._session = ort.InferenceSession(str(path), options, providers=providers(device, **settings))
        if device == "cuda" and CUDA not in self._session.get_providers():
            raise DeviceError(
                f"onnxruntime {ort.__version__} couldn't start its CUDA provider: its CUDA and cuDNN versions must fit "
                "those that are installed."
            )
        self.device = device
        self.settings = {"onnxruntime_tf32": "on" if settings["tf32"] and device == "cuda" else "off"}
        self._inputs = tuple(node.name for node in self._session.get_inputs())
        self._outputs = tuple(node.name for node in self._session.get_outputs())
        types = {node.type for node in (*self._session.get_inputs(), *self._session.get_outputs())}
        names = {"float": "float32", "double": "float64"}
        kinds = {kind.removeprefix("tensor(").removesuffix(")") for kind in types}
        self._by_numpy = device == "cpu" and {names.get(kind, kind) for kind in kinds} <= NUMPY_DTYPES
        self._in_graphs = settings["cuda_graph"] and device == "cuda"
        self._run_options = without_graph() if self._in_graphs else None
        # Graphs need torch, which keeps their inputs and outputs on the GPU.
        self._bound = self._by_address() if self._in_graphs and is_installed("torch") else None

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        torch: Any = sys.modules.get("torch")
        in_torch = torch is not None and any(isinstance(tensor, torch.Tensor) for tensor in tensors)
        if not in_torch and self._bound is None:
            return self._run(tensors)
        if self._by_numpy:
            # No copy in either direction.
            arrays = [tensor.numpy(force=True) if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors]
            return tuple(map(torch.from_numpy, self._run(arrays)))
        if self._bound is None:
            self._bound = self._by_address()
        given = [torch.as_tensor(tensor) for tensor in tensors]
        outputs = self._bound(*given)
        if not in_torch:
            return tuple(output.numpy(force=True) for output in outputs)
        return tuple(output.to(given[0].device) for output in outputs)

    @property
    def graphs(self) -> Any:
        """The `Graphed` of a session that runs in CUDA graphs; None otherwise."""
        return self._bound if self._in_graphs else None

    def _run(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(self._session.run(self._outputs, dict(zip(self._inputs, arrays, strict=True)), self._run_options))

    def _by_address(self) -> Callable[..., tuple[Any, ...]]:
        """A run by address: on the GPU, and for dtypes that numpy doesn't have."""
        names = ("torch", "optimize_export.runtime.onnx_binding")
        torch, binding = map(importlib.import_module, names)
        target = torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")
        bound = binding.BoundSession(self._session, target, graphs=self._in_graphs)
        if not self._in_graphs:
            return bound
        graphs = importlib.import_module("optimize_export.runtime.cuda_graphs")
        return graphs.Graphed(bound, bound.recorded)


def _default_threads() -> int | None:
    """The number of CPUs that this process may use, if those are fewer than the machine has; None otherwise.

    By itself, onnxruntime starts a thread for each core of the machine, also in a container that may use two.
    """
    usable = usable_cpus()
    return usable if usable < (os.cpu_count() or 1) else None
