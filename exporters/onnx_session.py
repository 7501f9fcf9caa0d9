"""Load an ONNX file in onnxruntime, run it on torch tensors, and tell where its nodes run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch

from exporters.base import LoadedArtifact
from exporters.child_process import InChild, can_start
from exporters.errors import ProviderFallback, refusing
from exporters.onnx_binding import BoundSession
from exporters.onnx_plain import AssignedNode, PlainSession, assigned_nodes, placement_of
from optimize_export.onnx_runtime import CUDA, NO_CUDA, ort, providers

# Nodes that compute nothing. A runtime on the GPU places them on the CPU by design.
_NO_COMPUTATION = frozenset({"Shape", "Size", "Constant", "MemcpyToHost", "MemcpyFromHost"})


def session_for_proof(path: Path) -> LoadedArtifact:
    """Load the file on the CPU, or on the GPU where the CPU lacks a kernel (some operators in half precision)."""
    with refusing("onnxruntime can't load the file"):
        try:
            return on_cpu(path)
        except ort.capi.onnxruntime_pybind11_state.NotImplemented:
            if not torch.cuda.is_available():
                raise
            return LoadedOnnx(path, torch.device("cuda"))


def on_cpu(path: Path, *, optimize: bool = True) -> LoadedArtifact:
    """The file on the CPU in the child process, or in this one where no child can be started."""
    if can_start():
        return InChild(path, partial(PlainSession, str(path), optimize), f"onnxruntime {ort.__version__}")
    return LoadedOnnx(path, torch.device("cpu"), optimize=optimize)


class LoadedOnnx:
    def __init__(
        self,
        path: Path,
        device: torch.device,
        *,
        optimize: bool = True,
        profile: Path | None = None,
    ) -> None:
        self._target = torch.device(device.type, device.index or 0)
        self.device = device.type
        options = ort.SessionOptions()
        # Failures raise exceptions; onnxruntime's own lines on stderr would only repeat them.
        options.log_severity_level = 4
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        if profile is not None:
            options.enable_profiling = True
            # onnxruntime appends the time.
            options.profile_file_prefix = str(profile)
        self._session = ort.InferenceSession(str(path), options, providers=providers_for(self._target))
        assigned = assigned_nodes(self._session)
        self.placement = None if assigned is None else placement_of(assigned)
        self.settings = {"onnxruntime_tf32": _tf32(self._session)}
        self._run = BoundSession(self._session, self._target)
        if device.type != "cpu":
            _require_cuda(self._session, assigned, path)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._run(*tensors)

    def end_profile(self) -> Path:
        """End the profile, and return the path of its file."""
        return Path(self._session.end_profiling())


def providers_for(device: torch.device) -> list[Any]:
    """The execution providers of a session on the device, with their options.

    Raises:
        ProviderFallback: there is no such provider.
    """
    if device.type not in ("cpu", "cuda"):
        raise ProviderFallback(f"ONNX files run on the CPU or with CUDA, not on {device.type!r}.")
    if device.type == "cuda" and CUDA not in ort.get_available_providers():
        raise ProviderFallback(NO_CUDA)
    return providers(device.type, device.index or 0)


def _tf32(session: ort.InferenceSession) -> str:
    """Whether float32 products use TF32, as the session reports it: "on", "off" or "unknown"."""
    if CUDA not in session.get_providers():
        return "off"
    used = session.get_provider_options().get(CUDA, {}).get("use_tf32")
    return "unknown" if used is None else "off" if str(used).lower() in ("0", "false") else "on"


def _require_cuda(session: ort.InferenceSession, assigned: list[AssignedNode] | None, path: Path) -> None:
    if CUDA not in session.get_providers():
        raise ProviderFallback(
            f"onnxruntime {ort.__version__} couldn't start its CUDA provider and would run on the CPU; "
            f"its CUDA and cuDNN versions must fit those that are installed."
        )
    if _tf32(session) == "on":
        raise ProviderFallback(f"onnxruntime {ort.__version__} computes float32 in TF32, although that was disabled.")
    if assigned is None:
        raise ProviderFallback(f"onnxruntime {ort.__version__} can't report where its nodes run; 1.24 or later can.")
    graph = onnx.load(path, load_external_data=False).graph
    judge_placement(assigned, shape_only_nodes(graph) | added_for_shapes(assigned, graph))


def judge_placement(assigned: Sequence[AssignedNode], shape_only: frozenset[str]) -> None:
    """Accept a placement whose computations are all on CUDA.

    Nodes that compute nothing (`Shape`, `Constant`, copies) and the `shape_only` nodes, given by name, may be on the
    CPU. onnxruntime places those there on purpose, because the host needs the shapes.

    Raises:
        ProviderFallback: another node isn't on CUDA, or no node is.
    """
    fallen = [
        f"`{name}` ({op_type})"
        for provider, name, op_type in assigned
        if provider != CUDA and op_type not in _NO_COMPUTATION and name not in shape_only
    ]
    if fallen:
        more = f" and {len(fallen) - 5} more" if len(fallen) > 5 else ""
        raise ProviderFallback(f"onnxruntime runs {', '.join(fallen[:5])}{more} on the CPU, not on the GPU.")
    if not any(provider == CUDA for provider, _, _ in assigned):
        raise ProviderFallback("onnxruntime runs no node of the file on the GPU.")


def added_for_shapes(assigned: Sequence[AssignedNode], graph: onnx.GraphProto) -> frozenset[str]:
    """Names of the nodes by which onnxruntime permutes a shape: it turns Shape(Transpose(x)) into Gather(Shape(x)).

    A Gather of tensor data that the file doesn't have would be on the GPU, which has a kernel for it.
    """
    own = {node.name for node in graph.node}
    return frozenset(name for _, name, op_type in assigned if op_type == "Gather" and name not in own)


def shape_only_nodes(graph: onnx.GraphProto) -> frozenset[str]:
    """Names of the nodes that read no tensor data: shapes, constants, and nodes that compute only from these."""
    known = {initializer.name for initializer in graph.initializer}
    names = set()
    for node in graph.node:
        has_body = any(attribute.HasField("g") for attribute in node.attribute)
        reads_none = not has_body and all(name in known for name in node.input if name)
        if node.op_type in ("Shape", "Size") or reads_none:
            names.add(node.name)
            known.update(node.output)
    return frozenset(names)
