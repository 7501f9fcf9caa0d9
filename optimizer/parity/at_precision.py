"""The noise for a candidate in half precision: the error that the original itself has at that precision."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from optimize_export.errors import UsageError
from optimize_export.wording import append_once, error_summary
from optimizer.model import pinned_settings
from optimizer.parity.lower_precision import computing_in, error_scale
from optimizer.parity.modes import run_in
from optimizer.parity.noise import RoundingNoise
from optimizer.parity.original import OriginalCall, mixed_seed
from optimizer.parity.pools import Pool, Slices
from optimizer.parity.results import OutputNoise
from optimizer.parity.signal import missing_signal
from optimizer.parity.tensors import all_finite, distance, is_exact
from passes.base import Precision


def errors_at(noise: RoundingNoise, precision: Precision, samples: int = 0) -> dict[str, Pool]:
    """The errors of the original's outputs at a precision, over all measured calls.

    Integer elements that differ at that precision are marked as unstable in the call.

    Args:
        samples: the number of runs of each call, with parameters changed slightly before they are rounded; 0 for one
            plain run.

    Raises:
        UsageError: the original isn't a module, so its float32 parts have no paths.
    """
    if not isinstance(noise.original.target, nn.Module):
        raise UsageError(
            "Only a module can be compared at another precision, because its float32 parts are named by path."
        )
    errors: dict[str, Pool] = {}
    for one, number in itertools.product(noise.calls, range(samples) if samples else [None]):
        seed = None if number is None else mixed_seed(one.seed, 4, number)
        seen = one.settled(_outputs_at(noise, one, precision, seed))
        for name, own in one.own.values.items():
            value = seen.get(name)
            if value is None or value.shape != own.shape:
                continue
            if is_exact(own):
                one.unstable[name] |= own != value
                continue
            error = distance(value, one.truth.values[name]) * error_scale(precision)
            plain = None if all_finite(own, value, error) else own.isfinite() & error.isfinite()
            errors.setdefault(name, Pool(slices=Slices())).add(error, plain, of=own)
    return errors


def noise_at(noise: RoundingNoise, precision: Precision, before: OutputNoise, error: Pool | None) -> OutputNoise:
    """The noise of an output at a precision; at least the error of rounding the output once."""
    name, calls = before.name, noise.original.calls
    if error is None:
        tied = sum(int(one.unstable[name].count_nonzero()) for one in calls if name in one.unstable)
        if tied > before.tied:
            noise.notes.append(
                f"{tied - before.tied} more elements of {name} weren't compared: they change in the original itself "
                f"when it computes in {precision.name}."
            )
        signal = missing_signal(noise.original, name, before.rms, before.noise_rms)
        return replace(before, tied=tied, signal=signal)
    least = torch.finfo(precision.dtype).eps / 2
    largest = max(before.noise, error.largest, least * before.scale)
    rms = max(before.noise_rms, error.rms, least * before.rms / 2)
    return replace(before, noise=largest, noise_rms=rms, signal=missing_signal(noise.original, name, before.rms, rms))


def _outputs_at(
    noise: RoundingNoise, one: OriginalCall, precision: Precision, seed: int | None
) -> Mapping[str, torch.Tensor]:
    """The original's outputs at a precision; empty if it raises."""
    original = noise.original
    assert isinstance(original.target, nn.Module)
    call, training = original.inputs_of(one), original.with_gradients(one.draw)

    def outputs(kind: Precision, dtype: torch.dtype = torch.bfloat16) -> Mapping[str, torch.Tensor]:
        mode = functools.partial(computing_in, precision=kind, seed=seed, dtype=dtype)
        return run_in(mode, original, one, call=call, training=training).values

    # A model that doesn't run in the dtype everywhere may run under autocast, with a smaller error.
    for kind in dict.fromkeys((precision, replace(precision, everywhere=False))):
        try:
            with pinned_settings():
                seen = outputs(kind)
                if precision.dtype is torch.float16 and any(map(is_exact, one.own.values.values())):
                    # Fewer integers change in float16 than in bfloat16.
                    finer = outputs(kind, dtype=torch.float16)
                    own = one.own.values
                    seen = {name: _nearer(own.get(name), value, finer.get(name)) for name, value in seen.items()}
                return seen
        except Exception as error:  # noqa: BLE001 - the original is foreign code; the reason is reported
            reason = f"The original couldn't be run in {precision.name}: {error_summary(error)}"
    append_once(noise.notes, reason)
    return {}


def _nearer(own: torch.Tensor | None, value: torch.Tensor, finer: torch.Tensor | None) -> torch.Tensor:
    """The integers of a coarse run, replaced by the original's where a finer run agrees with the original."""
    if own is None or finer is None or not is_exact(own) or not own.shape == value.shape == finer.shape:
        return value
    return torch.where(own == finer, own, value)
