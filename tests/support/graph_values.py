"""Run the rewritten graphs of a result node by node, to see the values inside."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

from passes.graph.backend import GRAPH_CALL, _Program
from passes.graph.captured import CapturedGraph
from passes.graph.derived import lifted


def values_in(fast: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[CapturedGraph, fx.Node, Any]]:
    """Call the result, and yield each operation of its rewritten graphs with its value in this call."""
    calls: list[tuple[_Program, Any]] = []
    run = _Program.__call__

    def recording(program: _Program, *inputs: Any) -> Any:
        calls.append((program, inputs))
        return run(program, *inputs)

    with torch.no_grad():
        with patch.object(_Program, "__call__", recording):
            fast(*args, **kwargs)
        for program, inputs in calls:
            captured = program._rewritten(fast.__dict__[GRAPH_CALL].passes, inputs)
            graph, derived = lifted(captured)
            more = None if derived is None else derived.of(inputs)
            interpreter = fx.Interpreter(fx.GraphModule(captured.home, graph), garbage_collect_values=False)
            interpreter.run(*inputs, *(more or ()), enable_io_processing=False)
            for node, value in interpreter.env.items():
                if node.op.startswith("call"):
                    yield captured, node, value
