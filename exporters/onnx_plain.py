"""Run an ONNX file on the CPU, on numpy arrays. Needs numpy and onnxruntime only, since the child process has no torch."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from exporters.child_runtime import BFLOAT16
from optimize_export.onnx_runtime import CPU, ort

AssignedNode = tuple[str, str, str]
"""Execution provider, node name, operator type."""

# The number of bfloat16 in ONNX files (`onnx.TensorProto.DataType`).
_BFLOAT16_IN_FILES = 16


class PlainSession:
    """A session for the proof of a file.

    It has no memory arena: an arena would keep the memory of the largest run, and the proof has few runs.
    """

    def __init__(self, path: str, optimize: bool) -> None:
        options = session_options(optimize=optimize)
        options.enable_cpu_mem_arena = False
        self._session = ort.InferenceSession(path, options, providers=[CPU])
        self._inputs = [node.name for node in self._session.get_inputs()]
        self._outputs = [node.name for node in self._session.get_outputs()]
        self.device = "cpu"
        self.placement = placement_of(assigned_nodes(self._session))
        self.settings = {"onnxruntime_tf32": "off"}

    def __call__(self, *arrays: Any) -> list[Any]:
        if len(arrays) != len(self._inputs):
            raise ValueError(f"The file takes {len(self._inputs)} tensors, not {len(arrays)}.")
        values = self._session.run_with_ort_values(
            self._outputs, {name: _value(array) for name, array in zip(self._inputs, arrays, strict=True)}
        )
        return list(map(_array, values))


def _value(array: Any) -> Any:
    if isinstance(array, tuple):
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array[1], _BFLOAT16_IN_FILES)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _array(value: Any) -> Any:
    if value.data_type() != f"tensor({BFLOAT16})":
        return value.numpy()
    shape = value.shape()
    bits = np.empty(shape, np.uint16)
    ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return BFLOAT16, bits


def session_options(*, optimize: bool = True) -> Any:
    """The options of a session that knows where its nodes run, with or without onnxruntime's graph optimizations."""
    options = ort.SessionOptions()
    # Failures raise exceptions; onnxruntime's own lines on stderr would only repeat them.
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def assigned_nodes(session: ort.InferenceSession) -> list[AssignedNode] | None:
    """The execution provider of each node of the optimized graph; None if this onnxruntime can't report it."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    return [
        (subgraph.ep_name, node.name, node.op_type)
        for subgraph in session.get_provider_graph_assignment_info()
        for node in subgraph.get_nodes()
    ]


def placement_of(assigned: Sequence[AssignedNode] | None) -> dict[str, int] | None:
    """The number of nodes by provider."""
    return None if assigned is None else dict(Counter(provider for provider, _, _ in assigned))
