"""ONNX files in onnxruntime, on torch tensors: their outputs, where their nodes run, their values and their times."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch

from exporters.base import LoadedArtifact
from exporters.child_process import InChild, can_start
from exporters.errors import ProviderFallback
from exporters.isolation import refusing
from exporters.onnx_plain import AssignedNode, PlainSession, assigned_nodes, placement_of, session_options
from optimize_export.onnx_runtime import CUDA, no_cuda, ort, providers
from optimize_export.runtime.onnx_binding import BoundSession

# Nodes that compute nothing. A runtime on the GPU places them on the CPU by design.
_NO_COMPUTATION = frozenset({"Shape", "Size", "Constant", "MemcpyToHost", "MemcpyFromHost"})

_FAILING_NODE = re.compile(r"Name:'(?P<name>[^']*)'")
_FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"

# onnxruntime's name of the event for one run of a node is the node's name and this.
_KERNEL = "_kernel_time"


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
    def __init__(self, path: Path, device: torch.device, *, optimize: bool = True, profile: Path | None = None) -> None:
        self._target = torch.device(device.type, device.index or 0)
        self.device = device.type
        options = session_options(optimize=optimize)
        if profile is not None:
            options.enable_profiling = True
            # onnxruntime appends the time.
            options.profile_file_prefix = str(profile)
        self._session = ort.InferenceSession(str(path), options, providers=providers_for(self._target))
        assigned = assigned_nodes(self._session)
        self.placement = placement_of(assigned)
        self.settings = {"onnxruntime_tf32": _tf32(self._session)}
        self._run = BoundSession(self._session, self._target)
        if device.type != "cpu":
            _require_cuda(self._session, assigned, path)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._run(*tensors)

    def end_profile(self) -> Path:
        """End the profile; return the path of its file."""
        return Path(self._session.end_profiling())


def providers_for(device: torch.device) -> list[Any]:
    """The execution providers of a session on the device, with their options; ProviderFallback if there is none."""
    if device.type not in ("cpu", "cuda"):
        raise ProviderFallback(f"ONNX files run on the CPU or with CUDA, not on {device.type!r}.")
    if device.type == "cuda" and CUDA not in ort.get_available_providers():
        raise ProviderFallback(no_cuda())
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
    """Raise ProviderFallback unless all computations are on CUDA.

    Nodes that compute nothing (`Shape`, `Constant`, copies) and the `shape_only` nodes, given by name, may be on the
    CPU. onnxruntime places those there on purpose, because the host needs the shapes.
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


class OnnxValues:
    """A file that returns its values with the given names, or all.

    A run holds all of them at once. This takes as much memory as one call of the model that frees nothing.
    """

    def __init__(self, path: Path, device: torch.device, names: Collection[str] | None) -> None:
        self._folder = path.parent
        self._device = torch.device(device.type, device.index or 0)
        self._model = onnx.load(path, load_external_data=False)
        computed = frozenset(name for node in self._model.graph.node for name in node.output if name)
        self.names = computed if names is None else computed & frozenset(names)

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
        end, error = len(self._model.graph.node), ""
        while any(name in self.names for node in self._model.graph.node[:end] for name in node.output):
            session = self._session(end)
            try:
                values = BoundSession(session, self._device)(*tensors)
            except RuntimeError as raised:
                error = str(raised)
                # onnxruntime follows this order too, so no earlier node raised. If it runs a later node first, the next
                # session, which ends before that node, continues the search.
                end = self._number_of(error, end)
                continue
            names = [node.name for node in session.get_outputs()]
            return {name: value.cpu() for name, value in zip(names, values, strict=True)}, error
        return {}, error

    def _number_of(self, error: str, end: int) -> int:
        """The index of the node among the first `end` that onnxruntime's error names; the last one if it names none."""
        found = _FAILING_NODE.search(error)
        # Node names needn't be unique. The last match isn't before the node that raised. If it is after that node, the
        # next session raises again.
        numbers = [
            number for number, node in enumerate(self._model.graph.node[:end]) if found and node.name == found["name"]
        ]
        return numbers[-1] if numbers else end - 1

    def _session(self, end: int) -> ort.InferenceSession:
        """A session with the first `end` nodes, whose outputs are the requested values."""
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        graph = model.graph
        del graph.node[end:], graph.output[:]
        # Leave out the types: onnxruntime infers them, and the types in the file may be the error.
        graph.output.extend(
            onnx.ValueInfoProto(name=name) for node in graph.node for name in node.output if name in self.names
        )
        options = session_options(optimize=False)
        options.add_session_config_entry(_FOLDER_OF_WEIGHTS, str(self._folder))
        return ort.InferenceSession(model.SerializeToString(), options, providers=providers_for(self._device))


@dataclass(frozen=True)
class NodeRun:
    """One run of a node of the graph as onnxruntime optimized it."""

    # onnxruntime's own nodes, such as those that reorder a layout, have names of their own.
    name: str
    op_type: str
    # The shapes of its inputs.
    shapes: Any
    # Without the time of the nodes in its subgraphs. On a GPU this is the time to launch it.
    seconds: float


def profile_nodes(
    path: Path, device: torch.device, tensors: Sequence[torch.Tensor], trace: Path, *, runs: int
) -> tuple[float, list[NodeRun]]:
    """Run a file under the profiler, after one run to warm up.

    Args:
        trace: the path of the Chrome trace to write; it includes the warm-up.

    Returns:
        The seconds of one run, and the nodes of all `runs`.
    """
    session = LoadedOnnx(path, device, profile=trace)
    for _ in range(1 + runs):
        session(*tensors)
    os.replace(session.end_profile(), trace)
    events = json.loads(trace.read_text(encoding="utf-8"))
    whole = [event for event in events if event.get("cat") == "Session" and event["name"] == "model_run"][1:]
    nodes = [event for event in events if event.get("cat") == "Node" and event["name"].endswith(_KERNEL)]
    measured = [event for event in nodes if event["ts"] >= whole[0]["ts"]]
    return sum(event["dur"] for event in whole) / 1e6 / runs, _node_runs(measured)


def _node_runs(events: Sequence[Any]) -> list[NodeRun]:
    """Convert the events; a node with subgraphs contains the events of their nodes."""
    own = {id(event): event["dur"] for event in events}
    around: list[Any] = []
    # If two start at once, the longer one is around the other.
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        if around:
            own[id(around[-1])] -= event["dur"]
        around.append(event)
    return [
        NodeRun(
            event["name"].removesuffix(_KERNEL) or event["args"]["op_name"],
            event["args"]["op_name"],
            event["args"].get("input_type_shape"),
            max(0, own[id(event)]) / 1e6,
        )
        for event in events
    ]
