"""Run calls of a reference again: to watch one, to judge values inside a model, or all of them on one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from optimizer.model import AsItIs, Call, Runs, eager_only, one_at_a_time, pinned_settings
from optimizer.parity.comparison import Comparison
from optimizer.parity.noise import RoundingNoise
from optimizer.parity.observe import observe
from optimizer.parity.original import Original, without_warnings
from optimizer.parity.reference import Reference
from optimizer.parity.results import Measurement, OutputParity
from optimizer.parity.verdict import judge


def rerun(reference: Reference, where: str, target: Runs | nn.Module) -> tuple[Runs, Callable[[], object]]:
    """The runs of a module, and a function that runs it at one call of the reference, without gradients.

    Args:
        where: one of the reference's `calls`.
    """
    one = reference.call_at(where)
    call = reference.original.inputs_of(one)
    runs = target if isinstance(target, Runs) else reference.runs_of(target)

    def run() -> object:
        with runs.fresh() as module:
            return observe(module, call, seed=one.seed, names=one.names)

    return runs, run


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
        original.run(None, 0, call, keep_call=True, label=where, seed=seed)
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


_T = TypeVar("_T")


def measure_in_sequence(reference: Reference) -> Measurement:
    """Compare the outputs of one copy that answers all measured calls, and at the end the smallest batch again."""
    with _sequence() as settings:
        comparison = reference.original.runs.first(lambda module: _answers(reference, module))
    if comparison.is_doubtful():
        reference.refine_noise()
        comparison.noises = reference.noises
    return replace(comparison.finish(reference.blank), settings=settings)


def after_all_calls(
    reference: Reference, look: Callable[[nn.Module], _T], before: Callable[[nn.Module], object] = lambda module: None
) -> _T:
    """The result of `look` for a copy of the original that has answered the calls of `measure_in_sequence`.

    Args:
        before: called with the copy first.
    """
    with _sequence(), reference.original.runs.fresh() as module:
        assert isinstance(module, nn.Module)
        before(module)
        _answers(reference, module)
        return look(module)


@contextmanager
def _sequence() -> Iterator[dict[str, str]]:
    with one_at_a_time, pinned_settings() as settings, eager_only(), without_warnings():
        yield settings


def _answers(reference: Reference, module: Callable[..., Any]) -> Comparison:
    noises = reference.first_noises()
    comparison = Comparison(noises, flat=False, in_detail=False, slices=reference.slices, who="the model")
    runs = AsItIs(module, in_eval=True)
    calls = [one for one in reference.original.calls if one.measured]
    for one in (*calls, min(calls, key=lambda one: one.batch_size or 0)):
        comparison.run(runs, one, reference.original.inputs_of(one), None, training=False)
    return comparison
