"""The sizes at which a trace is valid, taken from torch.export's capture of the same model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from exporters.base import Captures
from exporters.errors import RouteRefused
from exporters.evidence import TOGETHER, Evidence, Size, Sizes
from exporters.exported_program import Condition, conditions_of_numbers, conditions_of_program, shared_program
from exporters.tracing import Watch, follow_inputs, follow_settings, refuse_values, trace, watching

# How much larger a size is at least than in the calls when it is tried whether Python reads it. Mostly the strides of a
# model multiply to less, so that a size that they divide differs, too. The last number is for inputs with more elements.
_FAR = (256, 128, 64, 8)
_LARGEST_FAR = 2**20


def traced_with_conditions(evidence: Evidence) -> tuple[torch.jit.ScriptModule, tuple[Condition, ...], str]:
    """Trace the first call.

    Returns:
        The trace, the conditions under which it is valid for any call, and the first clause of `Watch.sizes` ("" if there
        is none).
    """
    module, watch = trace(evidence.adapter, evidence.inputs[0])
    follow_settings(module)
    if evidence.device.type != "cpu":
        follow_inputs(module, evidence.device)
    return module, conditions_of_trace(evidence, watch), next(iter(watch.sizes), "")


@contextmanager
def watched(evidence: Evidence) -> Iterator[Callable[[], tuple[Condition, ...]]]:
    """Watch the trace of the first call made inside; yield a function that returns its conditions."""
    with watching(evidence.adapter) as watch:
        yield lambda: conditions_of_trace(evidence, watch)


def conditions_of_trace(evidence: Evidence, watch: Watch) -> tuple[Condition, ...]:
    """The conditions on the open sizes under which the trace of the first call, with this record, is valid for any call.

    Raises:
        RouteRefused: Python read a value of the inputs; or it read a size, or a number of pieces of a tensor, that
            changes between the calls, and torch.export can't capture the model to determine at which other sizes the
            trace is valid.
    """
    refuse_values(watch, counts=False)
    if watch.counts:
        # A size that depends on values decides on the path, as the number of True elements may. torch.export captures a
        # model only if no branch depends on such a size, as none does on whether it is negative, or on whether the rows
        # of a graph's edges are none after those of the nodes were appended.
        try:
            shared_program(evidence)
        except RouteRefused:
            refuse_values(watch)
    if not evidence.open_dims or not watch.sizes:
        return ()
    try:
        program = shared_program(evidence)
        return (*conditions_of_program(program, evidence), *conditions_of_numbers(program, evidence))
    except RouteRefused as refusal:
        if not _reads_an_open_size(evidence):
            return ()
        raise RouteRefused(
            f"{watch.sizes[0]}, and torch.export can't determine at which sizes the trace is valid: {refusal}",
            size=refusal.size,
        ) from refusal


def _reads_an_open_size(evidence: Evidence) -> bool:
    """Whether Python reads a size or a number of pieces in the trace that isn't the same at all sizes, or may not be."""
    try:
        far = [_far_from_the_calls(evidence, size) for size in evidence.sizes if size.name != TOGETHER]
        calls = [*evidence.inputs, *far]
        asked = [trace(evidence.adapter, inputs)[1].asked for inputs in calls]
        if len({tuple(map(len, sizes)) for sizes in asked}) > 1:
            # The model takes another path at another size.
            return True
        fixed = [[len(set(each)) == 1 for each in zip(*sizes, strict=True)] for sizes in zip(*asked, strict=True)]
        _, watch = trace(evidence.adapter, calls[0], fixed)
    except RouteRefused:
        return True
    return bool(watch.sizes)


def _far_from_the_calls(evidence: Evidence, size: Size) -> tuple[torch.Tensor, ...]:
    """Inputs of a size so large that sizes computed from it differ from those in the calls, though windows round down."""
    largest = max(size.values)
    for more in _FAR:
        # A model that takes a size takes multiples of it, too.
        sizes = {size.name: largest * (more // largest + 2)}
        if more != _FAR[-1] and max(map(math.prod, evidence.shapes_at(sizes))) > _LARGEST_FAR:
            continue
        try:
            inputs = evidence.inputs_at(sizes)
            trace(evidence.adapter, inputs)
        except RouteRefused:
            continue
        return inputs
    raise RouteRefused(f"the model takes no large {size.name}", size=size.name)


def conditions_at(evidence: Evidence, sizes: Sizes) -> tuple[Condition, ...]:
    """The conditions of the model's path at sizes outside the calls; none if it can't be captured there.

    Raises:
        RouteRefused: Python reads a value of the inputs there.
    """
    key = ("conditions", evidence.shapes_at(sizes))
    return evidence.captures.once(key, lambda: _conditions_at(evidence, sizes))


def _conditions_at(evidence: Evidence, sizes: Sizes) -> tuple[Condition, ...]:
    inputs, adapter = evidence.inputs_at(sizes), evidence.captures.adapter
    there = replace(evidence, inputs=(inputs, *evidence.inputs), captures=Captures(adapter))
    try:
        return conditions_of_program(shared_program(there), there)
    except RouteRefused:
        # File and model have already been compared at these sizes.
        try:
            _, watch = trace(adapter, inputs)
        except RouteRefused:
            return ()
        refuse_values(watch, f"at {evidence.at(sizes)} ")
        return ()
