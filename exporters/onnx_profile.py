"""Profile the nodes of an ONNX file with onnxruntime's own profiler."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exporters.onnx_session import LoadedOnnx

# onnxruntime's name of the event for one run of a node is the node's name and this.
_KERNEL = "_kernel_time"


@dataclass(frozen=True)
class NodeRun:
    """One run of a node of the graph as onnxruntime optimized it.

    Attributes:
        name: of the node; onnxruntime's own nodes, such as those that reorder a layout, have names of their own.
        op_type: its operator.
        shapes: of its inputs.
        seconds: its time, without that of the nodes in its subgraphs. On a GPU this is the time to launch it.
    """

    name: str
    op_type: str
    shapes: Any
    seconds: float


def profile_nodes(
    path: Path, device: torch.device, tensors: Sequence[torch.Tensor], trace: Path, *, runs: int
) -> tuple[float, list[NodeRun]]:
    """Run a file under the profiler, after one run to warm up.

    Args:
        tensors: the inputs of the file, in its order.
        trace: the path of the Chrome trace to write; it includes the warm-up.

    Returns:
        The seconds of one run, and the nodes of all `runs`.

    Raises:
        ProviderFallback: the file would run on another device.
        OSError: the trace can't be written.
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
    return [_node_run(event, max(0, own[id(event)]) / 1e6) for event in events]


def _node_run(event: Any, seconds: float) -> NodeRun:
    details = event["args"]
    op_type = details["op_name"]
    name = event["name"].removesuffix(_KERNEL)
    return NodeRun(name or op_type, op_type, details.get("input_type_shape"), seconds)
