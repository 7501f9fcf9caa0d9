"""The sizes at which a trace is valid, taken from torch.export's capture of the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from exporters.conditions import Condition
from exporters.decisions import Watch, refuse_values, watching
from exporters.decisions import traced as traced_and_watched
from exporters.errors import RouteRefused
from exporters.exported_program import captured, conditions_of_program
from exporters.proof import Evidence


@contextmanager
def watched(evidence: Evidence) -> Iterator[Callable[[], tuple[Condition, ...]]]:
    """Watch the trace of the first call made inside; yield a function that returns its conditions."""
    with watching(evidence.adapter) as watch:
        yield lambda: conditions_of_trace(evidence, watch)


def traced(evidence: Evidence) -> tuple[torch.jit.ScriptModule, Watch]:
    """Trace the first call, and record where Python reads traced values.

    Raises:
        RouteRefused: it can't be traced.
    """
    return traced_and_watched(evidence.adapter, evidence.inputs[0])


def conditions_of_trace(evidence: Evidence, watch: Watch) -> tuple[Condition, ...]:
    """The conditions on the open sizes under which the trace of the first call is valid for any call.

    Args:
        watch: the record of that trace.

    Raises:
        RouteRefused: Python read a value of the inputs; or it read a size, and torch.export can't capture the model to
            determine at which other sizes the trace is valid.
    """
    refuse_values(watch)
    if not evidence.open_dims or not watch.sizes:
        return ()
    try:
        return conditions_of_program(_captured(evidence), evidence)
    except RouteRefused as refusal:
        raise RouteRefused(
            f"the model reads a size in Python at {watch.sizes[0]}, which the trace freezes, and torch.export can't tell at"
            f" which sizes it holds: {refusal}",
            size=refusal.size,
        ) from refusal


def conditions_at(evidence: Evidence, batch: int) -> tuple[Condition, ...]:
    """The conditions of the model's path at a batch outside the calls; none if it can't be captured there.

    Raises:
        RouteRefused: Python reads a value of the inputs there.
    """
    inputs = evidence.inputs_at(batch)
    try:
        return conditions_of_program(_captured(replace(evidence, inputs=(inputs, *evidence.inputs))), evidence)
    except RouteRefused:
        # File and model have already been compared at that batch.
        try:
            _, watch = traced_and_watched(evidence.adapter, inputs)
        except RouteRefused:
            return ()
        refuse_values(watch, f"at {evidence.at(batch)} ")
        return ()


def _captured(evidence: Evidence) -> torch.export.ExportedProgram:
    try:
        return captured(evidence, strict=False)[0]
    except RouteRefused:
        # Strict mode analyzes the model's byte code, so it supports `len(x)` of an open batch.
        return captured(evidence, strict=True)[0]
