"""Let a result run as written if it is slower by its rewritten graphs.

At every call, torch.compile checks its guards, and each graph its derived tensors: some 30 microseconds for a small model.
A forward with graph breaks has several graphs. So a small model may lose more than its passes gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from optimizer.options import is_to_be_timed
from optimizer.pipeline.copy_runs import CopyRuns
from optimizer.report import PassRecord, PlaceRecord
from passes.program.backend import GRAPH_CALL, Applied, GraphCall, compilation_of, without_graph_call
from passes.torch_private import COMPILED_CALL

# What the graphs of a model with slower calls cost doesn't count: of one graph, and of several.
_SLOWEST, _SLOWEST_SPLIT = 5e-3, 0.1
_ROUNDS = 9
# A result may be slower by this factor, which is the noise of such a measurement.
_NOISE = 1.05


def used_if_faster(root: nn.Module, runs: CopyRuns, records: Sequence[PassRecord]) -> tuple[list[PassRecord], str]:
    """Let a result run as written if it is slower by its rewritten graphs. A single graph stays, for files.

    Nothing is timed where the environment variable OPTIMIZE_EXPORT_NO_BENCH is set.

    Args:
        records: of all passes.

    Returns:
        The records, and a note on a single graph; "" for none. Passes of several graphs, which no file can hold, are
        removed: their records are unchanged, and have a skip with the times.
    """
    call = root.__dict__.get(COMPILED_CALL)
    if not isinstance(call, GraphCall) or not runs.calls or not is_to_be_timed(None):
        # Without a run, or under another compiler.
        return list(records), ""
    is_split = compilation_of(call).compiled.is_split

    def as_written() -> AbstractContextManager[Any]:
        return without_graph_call(root)

    if runs.seconds([as_written], 1)[0] > (_SLOWEST_SPLIT if is_split else _SLOWEST):
        return list(records), ""
    written, rewritten = runs.seconds([as_written, nullcontext], _ROUNDS)
    if rewritten <= _NOISE * written:
        return list(records), ""
    times = f"{1e3 * written:.2f} ms instead of {1e3 * rewritten:.2f} ms by the rewritten graph"
    if not is_split:
        call.is_for_files = True
        return list(records), f"calls of the result run as written, which takes {times}; files hold the rewritten graph"
    del root.__dict__[GRAPH_CALL]
    root.__dict__[COMPILED_CALL] = None
    names = {step.item.name for step in call.passes if isinstance(step, Applied)}
    skip = PlaceRecord("", f"the forward has graph breaks, and runs as written, which takes {times}s")
    return [
        replace(record, status="unchanged", changes=(), skips=(*record.skips, skip))
        if record.name in names and record.status == "applied"
        else record
        for record in records
    ], ""
