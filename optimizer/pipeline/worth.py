"""Take the graph passes out of a result that is slower with them.

torch.compile splits a forward at each graph break. Each of its graphs then costs the check of its guards and of its
derived tensors, some 50 microseconds, and a model of many small graphs may lose more than its passes gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from torch import nn

from optimizer.options import is_to_be_timed
from optimizer.pipeline.copy_runs import CopyRuns
from optimizer.report import PassRecord, PlaceRecord
from passes.program.backend import GRAPH_CALL, Applied, GraphCall, compilation_of, without_graph_call
from passes.torch_private import COMPILED_CALL

# In a model with slower calls, what its graphs cost doesn't count.
_SLOWEST = 0.1
_ROUNDS = 7
# A result may be slower by this factor, which is the noise of such a measurement.
_NOISE = 1.05


def without_what_slows(root: nn.Module, runs: CopyRuns, records: Sequence[PassRecord]) -> list[PassRecord]:
    """Remove the graph passes of a result of several graphs if it is slower with them than as written.

    Nothing is timed where the environment variable OPTIMIZE_EXPORT_NO_BENCH is set.

    Args:
        records: of all passes.

    Returns:
        The records; those of the removed passes are unchanged, and have a skip with the times.
    """
    call = root.__dict__.get(COMPILED_CALL)
    if not isinstance(call, GraphCall) or not runs.calls or not is_to_be_timed(None):
        # Without a run, or under another compiler.
        return list(records)
    if not compilation_of(call).compiled.is_split:
        return list(records)
    ways = (lambda: without_graph_call(root), nullcontext)
    written, rewritten = runs.seconds(ways, _ROUNDS, at_most=_SLOWEST)
    if written > _SLOWEST or rewritten <= _NOISE * written:
        return list(records)
    del root.__dict__[GRAPH_CALL]
    root.__dict__[COMPILED_CALL] = None
    names = {step.item.name for step in call.passes if isinstance(step, Applied)}
    reason = (
        f"a call takes {1e3 * rewritten:.2f} ms by its graphs and {1e3 * written:.2f} ms as it is written, so they aren't "
        "used: torch.compile splits the forward into many graphs"
    )
    return [
        replace(record, status="unchanged", changes=(), skips=(*record.skips, PlaceRecord("", reason)))
        if record.name in names and record.status == "applied"
        else record
        for record in records
    ]
