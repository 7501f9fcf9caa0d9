"""All values of an ONNX file, from a session with a copy of its graph that lists them as outputs.

onnxruntime's graph optimizations are off: they fuse operations, and the values between these would be lost.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import onnx
import torch

from exporters.onnx_binding import BoundSession
from exporters.onnx_session import providers_for
from optimize_export.onnx_runtime import ort

_FAILING_NODE = re.compile(r"Name:'(?P<name>[^']*)'")
_FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"


class OnnxValues:
    """A file that returns its values with the given names, or all.

    A run holds all of them at once. This takes as much memory as one call of the model that frees nothing.

    Attributes:
        names: the requested values that the file computes.
        outputs: the names of the file's outputs.
    """

    def __init__(self, path: Path, device: torch.device, names: Collection[str] | None) -> None:
        self._folder = path.parent
        self._device = torch.device(device.type, device.index or 0)
        self._model = onnx.load(path, load_external_data=False)
        computed = frozenset(name for node in self._model.graph.node for name in node.output if name)
        self.names = computed if names is None else computed & frozenset(names)
        self.outputs = tuple(value.name for value in self._model.graph.output)

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
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry(_FOLDER_OF_WEIGHTS, str(self._folder))
        return ort.InferenceSession(model.SerializeToString(), options, providers=providers_for(self._device))
