"""Import onnxruntime with its telemetry off; all other modules import it from here.

From version 1.29 on, official builds write an identifier into the home folder and send events. This starts at import,
so the variable must be set before. The call covers processes that have already imported onnxruntime.
"""

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from optimize_export.runtime.route import require_runtime

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"


class _Onnxruntime(ModuleType):
    """onnxruntime, imported when a name of it is first used: files of other formats don't need it.

    Raises:
        DeviceError: no variant of onnxruntime is installed.
    """

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


def float16_conversion() -> Callable[..., Any]:
    """onnxruntime's conversion of a model to float16."""
    # First: it imports modules of the conversion's package that are found only while `sys.path` is extended.
    quantization()
    from onnxruntime.transformers.float16 import convert_float_to_float16

    conversion: Callable[..., Any] = convert_float_to_float16
    return conversion


__all__ = ["CPU", "CUDA", "float16_conversion", "no_cuda", "ort", "providers", "quantization", "without_graph"]
