"""All values of an ONNX file in one session: a copy of its graph that lists them as outputs.

onnxruntime's own optimizations are off in it: they merge operations, and the values between these are gone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import onnx
import torch

from exporters.onnx_runtime import ort
from exporters.onnx_session import providers_for, run_session
from exporters.steps import Seen

_FAILING_NODE = re.compile(r"Name:'(?P<name>[^']*)'")
_FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"


class OnnxValues:
    """A file, ready to give the named ones of its values, or all.

    All of them are held at once while a run is looked at: as much memory as the model takes for one call without freeing
    anything.

    Attributes:
        names: those of the asked values that the file computes.
        outputs: the names of its outputs.
    """

    def __init__(self, path: Path, device: torch.device, names: Collection[str] | None) -> None:
        self._folder = path.parent
        self._device = torch.device(device.type, device.index or 0)
        self._model = onnx.load(path, load_external_data=False)
        computed = frozenset(name for node in self._model.graph.node for name in node.output if name)
        self.names = computed if names is None else computed & frozenset(names)
        self.outputs = tuple(value.name for value in self._model.graph.output)
        self._sessions: dict[int, ort.InferenceSession] = {}

    def run(self, tensors: Sequence[torch.Tensor]) -> Seen:
        """The values for these inputs; where an operation raises, those before it in the file's order."""
        first: tuple[str, ...] = ()
        end, error = len(self._model.graph.node), ""
        while any(name in self.names for node in self._model.graph.node[:end] for name in node.output):
            session = self._session(end)
            try:
                values = run_session(session, self._device, tensors)
            except RuntimeError as raised:
                error = str(raised)
                # Nothing before it raised, as onnxruntime goes by this order too; what it runs earlier is looked at next.
                end = self._number_of(error, end)
                first = self._behind(end)
                continue
            names = [node.name for node in session.get_outputs()]
            return Seen({name: value.cpu() for name, value in zip(names, values, strict=True)}, first, error)
        return Seen({}, first, error)

    def _number_of(self, error: str, end: int) -> int:
        """Which of the first `end` nodes an error of onnxruntime names; the last of them where it names none."""
        found = _FAILING_NODE.search(error)
        # Names needn't be unique. The last one is no earlier than the one that raised: if it is later, that raises again.
        numbers = [
            number for number, node in enumerate(self._model.graph.node[:end]) if found and node.name == found["name"]
        ]
        return numbers[-1] if numbers else end - 1

    def _behind(self, number: int) -> tuple[str, ...]:
        """The named values that follow from a node with no other named value between."""
        open_names, found = (
            set(self._model.graph.node[number].output),
            dict.fromkeys(self._model.graph.node[number].output),
        )
        for node in self._model.graph.node[number + 1 :]:
            if any(name in open_names and name not in self.names for name in node.input):
                open_names.update(node.output)
                found.update(dict.fromkeys(node.output))
        return tuple(name for name in found if name in self.names)

    def _session(self, end: int) -> ort.InferenceSession:
        """A session of the first `end` nodes whose outputs are the named values."""
        if end not in self._sessions:
            model = onnx.ModelProto()
            model.CopyFrom(self._model)
            graph = model.graph
            del graph.node[end:], graph.output[:]
            # No types: onnxruntime finds them, and those that were written down may be what is wrong.
            graph.output.extend(
                onnx.ValueInfoProto(name=name) for node in graph.node for name in node.output if name in self.names
            )
            options = ort.SessionOptions()
            options.log_severity_level = 4
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.add_session_config_entry(_FOLDER_OF_WEIGHTS, str(self._folder))
            content = model.SerializeToString()
            self._sessions[end] = ort.InferenceSession(content, options, providers=providers_for(self._device))
        return self._sessions[end]
