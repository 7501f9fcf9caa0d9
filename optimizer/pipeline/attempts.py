"""Run one pass once, and judge its changes while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from exporters.places import line_of_error
from optimize_export.wording import first_line
from optimizer.model import WorkingCopy
from optimizer.parity import RegionParity, check_change
from optimizer.pipeline.applied import TreeState
from optimizer.pipeline.callers_tensors import CallersTensors
from optimizer.report import PassRecord, PlaceRecord
from passes.base import Context, DeclaredError, Pass, PassResult
from passes.casting.forwards import AutocastForward, root_cast
from passes.errors import PassesError
from passes.graph.model_tree import ModelTree


@dataclass(frozen=True)
class Attempt:
    """One run of a pass; `result` is None if it raised `error`."""

    record: PassRecord
    result: PassResult | None = None
    error: Exception | None = None


def attempt(item: Pass, context: Context, copy: WorkingCopy, original: nn.Module, tree: ModelTree) -> Attempt:
    """Run a pass on the tree of the working copy; if it raises, restore the tree.

    Raises:
        PassesError: the pass can't do its one job.
        OptimizeFailed: it wrote to a tensor of the caller's model.
    """
    started = time.perf_counter()
    before = TreeState(tree.modules())
    sources = CallersTensors(copy, original, tree)
    try:
        result = item.run(tree, context)
    except PassesError:
        raise
    except Exception as error:  # noqa: BLE001 - a pass of another package may raise anything; the record says so
        # The passes of this project undo their edits, but those of other packages may not.
        before.restore()
        tree.refresh()
        sources.refuse_writes(item)
        line = line_of_error(error)
        reason = f"{type(error).__name__}: {first_line(error)}{f' ({line})' if line else ''}"
        seconds = time.perf_counter() - started
        return Attempt(PassRecord(item.name, item.options, "failed", reason, seconds=seconds), error=error)
    sources.refuse_writes(item)
    record = PassRecord(
        item.name,
        item.options,
        "applied" if result.changes else "unchanged",
        max_error=item.max_error,
        changes=tuple(PlaceRecord(change.where, change.what) for change in result.changes),
        skips=tuple(PlaceRecord(skip.where, skip.reason) for skip in result.skips),
        remarks=tuple(PlaceRecord(remark.where, remark.text) for remark in result.remarks),
        detail=result.detail,
        seconds=time.perf_counter() - started,
    )
    return Attempt(record, result)


def judge_change(
    root: nn.Module,
    declared: DeclaredError | None,
    old: Callable[..., Any],
    new: Callable[..., Any],
    values: tuple[Any, ...],
) -> list[tuple[RegionParity, RegionParity | None]]:
    """As `Context.judge`, for a change of a pass that may declare an error."""
    cast = root_cast(root)
    autocast = cast.dtype if isinstance(cast, AutocastForward) else None
    return check_change(old, new, values, declared=declared, autocast=autocast)
