"""Run a call of a reference again: to watch it, or to judge the values inside a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from optimizer.model import Call, eager_only, one_at_a_time, pinned_settings
from optimizer.parity.noise import RoundingNoise
from optimizer.parity.observe import observe
from optimizer.parity.original import Original
from optimizer.parity.reference import Reference
from optimizer.parity.results import OutputParity
from optimizer.parity.verdict import judge


def rerun(
    reference: Reference, where: str, target: nn.Module, watch: Callable[[nn.Module], AbstractContextManager[None]]
) -> None:
    """Run a module at one call of the reference, without gradients, and watch the copy that runs.

    Args:
        where: one of the reference's `calls`.
    """
    one = reference.call_at(where)
    call, runs = reference.original.inputs_of(one), reference.runs_of(target)
    runs.watch = watch
    with one_at_a_time, pinned_settings(), eager_only(), runs.fresh() as module:
        observe(module, call, seed=one.seed, names=one.names)


def reference_at(target: Callable[..., Any], call: Call, where: str, *, seed: int = 0) -> Reference:
    """A reference of a callable at one call.

    Args:
        where: the call in words.
        seed: of the random numbers in the call.

    Raises:
        LoadError: the callable raises there.
    """
    original = Original(target, "inference", seed)
    with one_at_a_time, pinned_settings() as settings:
        original.run(None, 0, call, label=where, seed=seed)
        original.check()
        return Reference(original, RoundingNoise(original), settings, 1)


def judged_values(reference: Reference, values: Sequence[torch.Tensor | None]) -> list[OutputParity | None]:
    """Judge values by the outputs of a reference with one call; problems call each value "it".

    Args:
        values: on the CPU, one for each output; None for an unknown value, which isn't judged.
    """
    own = reference.original.calls[0].own
    expected = [own.values[name] for name in own.of_kind("output")]
    filled = tuple(right if value is None else value for right, value in zip(expected, values, strict=True))
    measurement = reference.compare(lambda *_: filled, flatten=lambda args, kwargs: ())
    report = judge(measurement, names=dict.fromkeys(reference.noises, "it"))
    return [None if value is None else each for value, each in zip(values, report.outputs, strict=True)]
