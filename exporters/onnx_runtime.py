"""Import onnxruntime with its telemetry off; all other modules import it from here.

From version 1.29 on, official builds write an identifier into the home folder and send events. This starts at import,
so the variable must be set before. The call covers processes that have already imported onnxruntime.
"""

import os
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

ort.disable_telemetry_events()


def quantization() -> tuple[Any, Any]:
    """`onnxruntime.quantization` and its module for weights of 4 bits. Only quantization needs the slow import."""
    import onnxruntime.quantization
    from onnxruntime.quantization import matmul_nbits_quantizer

    return onnxruntime.quantization, matmul_nbits_quantizer


__all__ = ["ort", "quantization"]
