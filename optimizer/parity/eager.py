"""How the original's outputs change under the user's own settings, which a comparison pins."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from optimize_export.errors import LoadError
from optimize_export.wording import error_summary
from optimizer.model import pinned_by
from optimizer.parity.observe import Observation
from optimizer.parity.original import Original, OriginalCall, without_warnings
from optimizer.parity.results import OutputNoise
from optimizer.parity.tensors import distance, is_exact, special
from optimizer.parity.verdict import FACTOR

EagerRun = tuple[OriginalCall, Observation | str]
"""A call, and its outputs under the user's settings, or the error there."""


def eager_runs(original: Original) -> list[EagerRun]:
    """Run the user's own calls under the settings in force; empty if pinning changes none that the model may notice."""
    if original.mode != "inference" or not any(pinned_by(original.target, original.device)):
        return []
    given = [one for one in original.calls if not one.sizes]
    calls = [one for one in given if one is given[0] or one.key in original.asked]
    return [(one, _run(original, one)) for one in calls]


def notes_on_eager(original: Original, runs: list[EagerRun], noises: dict[str, OutputNoise]) -> list[str]:
    """A note on the first difference beyond rounding; empty if there is none."""
    differences = (text for one, seen in runs for text in _differences(one, seen, noises))
    first = next(differences, None)
    if first is None:
        return []
    pinned, remedy = zip(*pinned_by(original.target, original.device), strict=True)
    return [
        f"The original ran without {' and '.join(pinned)}, which eager uses here and files don't: with it, {first}. "
        f"To see the numbers of the files in eager, call {' and '.join(remedy)}."
    ]


def _run(original: Original, one: OriginalCall) -> Observation | str:
    try:
        with without_warnings():
            return original.run_again(one)
    except LoadError:
        raise
    except Exception as error:  # noqa: BLE001 - the original is foreign code; what it raises is part of the note
        return error_summary(error)


def _differences(one: OriginalCall, seen: Observation | str, noises: dict[str, OutputNoise]) -> Iterator[str]:
    if isinstance(seen, str):
        yield f"it raises at {one.where}: {seen}"
        return
    values = one.settled(seen.values)
    for name in one.own.of_kind("output"):
        own, value = one.own.values[name], values.get(name)
        if value is None or not noises[name].deterministic:
            continue
        if (text := _difference(own, value, one.unstable[name], noises[name])) is not None:
            yield f"{name} {text} ({one.where})"


def _difference(own: torch.Tensor, value: torch.Tensor, unstable: torch.Tensor, noise: OutputNoise) -> str | None:
    if own.shape != value.shape:
        return f"has the shape {tuple(value.shape)} instead of {tuple(own.shape)}"
    if is_exact(own):
        count = int(((own != value) & ~unstable).count_nonzero())
        return f"differs in {count} elements" if count else None
    odd_own, odd_value = special(own), special(value)
    others = (odd_value != odd_own) & ~unstable
    if count := int((others & (odd_value != 0)).count_nonzero()):
        return f"has NaN or infinity in {count} elements that are different without it"
    if count := int(others.count_nonzero()):
        return f"is finite in {count} elements that are NaN or infinite without it"
    error = distance(value, own)[(odd_own == 0) & (odd_value == 0)]
    largest = float(error.max()) if error.numel() else 0.0
    # Two runs are compared, and each of them may have the allowed error.
    if largest <= 2 * noise.allowed(FACTOR)[0]:
        return None
    count = int((error > 2 * noise.allowed(FACTOR)[0]).count_nonzero())
    return f"differs by up to {largest:.2g} in {count} of {own.numel()} elements"
