"""Let a result run as written if it is slower by its rewritten graphs.

At every call, torch.compile checks its guards, and each graph its derived tensors: some 30 microseconds for a small model.
A forward with graph breaks has several graphs. So a small model may lose more than its passes gain.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from optimizer.options import is_to_be_timed
from optimizer.pipeline.copy_runs import CopyRuns
from passes.graph.backend import GraphCall, compilation_of, without_graph_call
from passes.torch_private import COMPILED_CALL

# What the graphs of a model with slower calls cost doesn't count: of one graph, and of several.
_SLOWEST, _SLOWEST_SPLIT = 5e-3, 0.1
_ROUNDS = 9
# A result may be slower by this factor, which is the noise of such a measurement.
_NOISE = 1.05


def why_not_used(root: nn.Module, runs: CopyRuns) -> str:
    """Let a result run as written if it is slower by its rewritten graphs, which stay for files; returns a note or "".

    Nothing is timed where the environment variable OPTIMIZE_EXPORT_NO_BENCH is set.
    """
    call = root.__dict__.get(COMPILED_CALL)
    if not isinstance(call, GraphCall) or not runs.calls or not is_to_be_timed(None):
        # Without a run, or under another compiler.
        return ""
    is_split = compilation_of(call).compiled.is_split

    def as_written() -> AbstractContextManager[Any]:
        return without_graph_call(root)

    if runs.seconds([as_written], 1)[0] > (_SLOWEST_SPLIT if is_split else _SLOWEST):
        return ""
    written, rewritten = runs.seconds([as_written, nullcontext], _ROUNDS)
    if rewritten <= _NOISE * written:
        return ""
    call.is_for_files = True
    times = f"{1e3 * written:.2f} ms instead of {1e3 * rewritten:.2f} ms by the rewritten graph"
    note = f"calls of the result run as written, which takes {times}"
    if is_split:
        return f"{note}s; files hold its changes if torch.export traces the forward as one graph"
    return f"{note}; files hold the rewritten graph"
