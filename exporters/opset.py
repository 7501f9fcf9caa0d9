"""The ONNX opset versions that a file can have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import onnx
import torch.onnx

from exporters.errors import UnknownOpset
from optimize_export.onnx_runtime import ort

# Not a public API. If a version of torch has it elsewhere, its exporters themselves report what they can't write.
limits: Any = getattr(torch.onnx, "_constants", None)


def refuse_opset(opset: object, formats: Sequence[str]) -> None:
    """Raise UnknownOpset if no file can be written with that opset, or if no requested format has an opset.

    Args:
        opset: the user's choice; None means the exporter's default and is always valid.
        formats: the names of the requested formats.
    """
    if opset is None:
        return
    if not isinstance(opset, int) or isinstance(opset, bool):
        raise UnknownOpset(f"The opset must be a whole number, not {opset!r}.")
    if "onnx" not in formats:
        raise UnknownOpset(
            f"opset applies to ONNX files only, but the formats are {', '.join(formats)}: add onnx, or leave out opset."
        )
    known = opsets()
    if opset not in known:
        raise UnknownOpset(
            f"Opset {opset} isn't available here: torch's exporters write, and onnxruntime {ort.__version__} reads, "
            f"opsets {known[0]} to {known[-1]}."
        )


@cache
def opsets() -> range:
    """The opsets that torch's exporters write and the installed onnxruntime reads."""
    # onnxruntime doesn't report its newest opset, so try to load a file.
    known = getattr(limits, "ONNX_MAX_OPSET", onnx.defs.onnx_opset_version())
    newest = next(opset for opset in range(known, 0, -1) if is_read(opset))
    # Below the base opset, the weights are inputs of the file.
    return range(getattr(limits, "ONNX_BASE_OPSET", 9), newest + 1)


def is_read(opset: int) -> bool:
    """Whether the installed onnxruntime loads a file with an opset."""
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "probe",
        [value("x", onnx.TensorProto.FLOAT, [1])],
        [value("y", onnx.TensorProto.FLOAT, [1])],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except ort.capi.onnxruntime_pybind11_state.Fail:
        return False
    return True
