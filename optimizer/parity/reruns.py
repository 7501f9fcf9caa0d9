"""Run one call of a reference again, to be watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from optimizer.model import Runs, one_at_a_time, pinned_settings
from optimizer.parity.modes import in_float64, perturbed
from optimizer.parity.noise import RoundingNoise
from optimizer.parity.observe import observe
from optimizer.parity.original import Original
from optimizer.parity.reference import Reference


@dataclass(frozen=True)
class Reruns:
    """Ways to run one call once more, without gradients: three with the original, one with a candidate.

    Attributes:
        original, other: give the copies that are run, so that they can be watched.
        in_float64, perturbed: the original in float64, and with inputs and weights off by one ulp.
    """

    original: Runs
    other: Runs
    own: Callable[[], object]
    in_float64: Callable[[], object]
    perturbed: Callable[[], object]
    candidate: Callable[[], object]


def reruns(reference: Reference, where: str, candidate: Runs | nn.Module) -> Reruns:
    """Ways to run one call of the reference again; `where` is one of its `calls`."""
    one, original = reference.call_at(where), reference.original
    call = original.inputs_of(one)
    other = candidate if isinstance(candidate, Runs) else reference.runs_of(candidate)

    def plain(runs: Runs) -> Callable[[], object]:
        def run() -> object:
            with runs.fresh() as target:
                return observe(target, call, seed=one.seed, names=one.names)

        return run

    return Reruns(
        original=original.runs,
        other=other,
        own=plain(original.runs),
        in_float64=lambda: in_float64(original, one, call, training=False),
        perturbed=lambda: perturbed(original, one, call, 0, training=False),
        candidate=plain(other),
    )


def reference_of(target: nn.Module, reference: Reference, where: str) -> Reference:
    """A reference of another module, at one call of this reference.

    Raises:
        LoadError: it raises there.
    """
    samples = reference.original.samples
    assert samples is not None
    one = reference.call_at(where)
    original = Original(target, "inference", samples.seed, samples=samples)
    with one_at_a_time, pinned_settings() as settings:
        original.run(one.batch_size, one.draw, reference.original.inputs_of(one), label=one.label, sizes=one.sizes)
        original.check()
        return Reference(original, RoundingNoise(original), settings, one.draw + 1)
