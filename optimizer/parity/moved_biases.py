"""Biases that a pass moved from a candidate's layers into the running means of its BatchNorms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from optimizer.parity.observe import own_name
from optimizer.parity.original import OriginalCall
from optimizer.parity.pools import Pool
from optimizer.parity.results import OutputNoise
from optimizer.parity.tensors import distance, least_noise, unit, where_finite, wide
from passes.program.moved_bias import moved_biases
from passes.program.weights import bare


@dataclass
class MovedBiases:
    """Biases that a candidate no longer has, because they were subtracted from its running means.

    Only the difference m - b of running mean and bias has an effect, so both sides must agree on that. The candidate's
    b is zero.

    Attributes:
        means: by the running mean's name in the comparison, the original's bias in float64 on the CPU.
        gradients: names of the gradients of these biases, which must be rounding noise in the original.
        problems: sentences about running means that don't differ by the bias before any run.
    """

    means: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def find_moved_biases(
    original: Callable[..., Any], candidate: Callable[..., Any], noises: Mapping[str, OutputNoise]
) -> MovedBiases:
    """The biases that the candidate declares as moved, with the original's values."""
    found = MovedBiases()
    if not isinstance(candidate, nn.Module) or not isinstance(original, nn.Module):
        return found
    own = dict(original.named_parameters())
    for bias_path, mean_path in moved_biases(candidate):
        if bias_path not in own:
            # The original doesn't have this bias either.
            continue
        found.gradients.add(f"gradient of {own_name(bias_path)}")
        if mean_path is None or (mean_name := f"buffer {own_name(mean_path)}") not in noises:
            continue
        bias = found.means[mean_name] = wide(bare(own[bias_path]).cpu())
        mean, rest = original.get_buffer(mean_path).cpu(), candidate.get_buffer(mean_path).cpu()
        # Check before any run, because a run with momentum 1 replaces the mean completely.
        allowed = unit(rest.dtype) * (wide(mean).abs() + bias.abs())
        if bool((distance(rest, wide(mean) - bias) > allowed).any()):
            found.problems.append(f"{mean_path} must be the original's running mean minus {bias_path}, but isn't")
    return found


def noises_with(
    moved: MovedBiases, noises: Mapping[str, OutputNoise], calls: Iterable[OriginalCall]
) -> dict[str, OutputNoise]:
    """The noises, raised to at least the rounding error of the candidate's running means."""
    known = list(calls)
    return {**noises, **{name: _noise_of(name, bias, noises[name], known) for name, bias in moved.means.items()}}


def _noise_of(name: str, bias: torch.Tensor, noise: OutputNoise, calls: list[OriginalCall]) -> OutputNoise:
    pool = Pool()
    for values in (wide(one.truth.values[name]) - bias for one in calls if name in one.truth.values):
        pool.add(values.abs(), where_finite(values), of=values)
    dtype: torch.dtype = getattr(torch, noise.dtype)
    step = least_noise(dtype) * unit(dtype)
    return replace(
        noise,
        noise=max(noise.noise, step * pool.largest),
        noise_rms=max(noise.noise_rms, step * pool.rms / 2),
    )
