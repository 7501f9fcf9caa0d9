"""One copy of the original that answers calls one after another: its answers must not depend on earlier calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from optimizer.model import AsItIs, eager_only, one_at_a_time, pinned_settings
from optimizer.parity.comparison import Comparison
from optimizer.parity.original import without_warnings
from optimizer.parity.reference import Reference
from optimizer.parity.results import Measurement

_T = TypeVar("_T")


def measure_in_sequence(reference: Reference) -> Measurement:
    """Compare the outputs of one copy that answers all measured calls, and at the end the smallest batch again."""
    with _sequence() as settings:
        comparison = reference.original.runs.first(lambda module: _answers(reference, module))
    if comparison.is_doubtful():
        reference.look_closely()
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
    noises = reference.noises_of_few_samples()
    comparison = Comparison(noises, flat=False, in_detail=False, slices=reference.slices, who="the model")
    runs = AsItIs(module, in_eval=True)
    calls = [one for one in reference.original.calls if one.measured]
    for one in (*calls, min(calls, key=lambda one: one.batch_size or 0)):
        comparison.run(runs, one, reference.original.inputs_of(one), None, training=False)
    return comparison
