"""Run one call of the original, or of a candidate, in float64, with perturbed weights, or rounded at each operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from optimizer.model import Call, Runs, eager_only, reachable_modules, rebuild
from optimizer.parity.float64 import Float64Mode
from optimizer.parity.observe import Observation, observe, own_dtype
from optimizer.parity.original import Original, OriginalCall, mixed_seed, without_warnings
from optimizer.parity.random_draws import Layout, MaskedLayouts
from optimizer.parity.rounding import PerturbedMode, RoundedMode, off_by_one_ulp, random_signs, stands_for_infinity
from passes.graph.shared_memory import groups_of, places_in

ModeOf = Callable[[Any], AbstractContextManager[Any]]
"""Makes the mode for the copy that is run."""

# Only tensors with more dims than this, such as batches of feature maps, have a memory layout that kernels choose.
_LEAST_DIMS_OF_A_MAP = 3


def run_in(
    mode: ModeOf,
    original: Original,
    one: OriginalCall,
    *,
    call: Call,
    training: bool,
    runs: Runs | None = None,
) -> Observation:
    """The outputs of one call in a mode.

    Args:
        call: the inputs. The caller makes them, because an exception of the user's input function isn't a result.
        runs: of a candidate; None for the original.
    """
    with eager_only(), without_warnings(), (runs or original.runs).fresh() as module:
        return observe(module, call, seed=one.seed, training=training, mode=mode(module), names=one.names)


def in_float64(
    original: Original, one: OriginalCall, call: Call, *, training: bool, runs: Runs | None = None
) -> tuple[Float64Mode, Observation]:
    """Run one call with every torch call raised to float64; return the mode that did it, and the outputs."""
    mode, seen = _raised(original, one, call, training, runs, ())
    if any(len(layout.shape) > _LEAST_DIMS_OF_A_MAP for layout in mode.masked):
        # Dropout draws its mask in the order of memory, which may differ in float64.
        own = MaskedLayouts()
        run_in(lambda module: own, original, one, call=call, training=training, runs=runs)
        if own.masked != mode.masked:
            mode, seen = _raised(original, one, call, training, runs, own.masked)
    return mode, seen


def _raised(
    original: Original, one: OriginalCall, call: Call, training: bool, runs: Runs | None, masks: Sequence[Layout]
) -> tuple[Float64Mode, Observation]:
    modes: list[Float64Mode] = []

    def raising(module: Callable[..., Any]) -> Float64Mode:
        mode = Float64Mode(
            own_dtype=own_dtype(module, call),
            leaf_parameters=training,
            written=_written_in(module, original),
            together=_sharing_memory(module),
            masks=masks,
        )
        modes.append(mode)
        return mode

    seen = run_in(raising, original, one, call=call, training=training, runs=runs)
    return modes[-1], seen


def perturbed(original: Original, one: OriginalCall, call: Call, number: int, *, training: bool) -> Observation:
    """The outputs with inputs and parameters off by one ulp, up or down at random.

    Args:
        number: of the random sample.
    """
    seed = mixed_seed(one.seed, 1, number)
    signs = random_signs(torch.Generator().manual_seed(seed))

    def perturb(tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
            return tensor
        value = tensor.detach()
        off = off_by_one_ulp(value, signs)
        if value.layout is torch.strided and not value.is_nested:
            off = torch.where(stands_for_infinity(value), value, off)
        return off.requires_grad_(tensor.requires_grad)

    args, kwargs = rebuild((call.args, call.kwargs), perturb)

    def mode(module: Any) -> PerturbedMode:
        return PerturbedMode(seed, written=_written_in(module, original))

    return run_in(mode, original, one, call=Call(args, kwargs), training=training)


def rounded(original: Original, one: OriginalCall, call: Call, number: int) -> tuple[int, Observation]:
    """The number of rounded operators, and the outputs with each operator's result and each parameter off by one ulp.

    Args:
        number: of the random sample.
    """
    rounding, seed = RoundedMode(mixed_seed(one.seed, 3, number)), mixed_seed(one.seed, 2, number)

    def both(module: Any) -> AbstractContextManager[None]:
        return _both(PerturbedMode(seed, written=_written_in(module, original)), rounding)

    seen = run_in(both, original, one, call=call, training=original.with_gradients(one.draw))
    return rounding.calls, seen


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(first)
        stack.enter_context(second)
        yield


def _written_in(module: Any, original: Original) -> list[nn.Parameter]:
    """The parameters of a copy that forward writes to."""
    if not isinstance(module, nn.Module):
        return []
    named = module.named_parameters(remove_duplicate=False)
    return [parameter for name, parameter in named if name in original.runs.written]


def _sharing_memory(module: Any) -> list[list[torch.Tensor]]:
    """Groups of buffers and attributes that share memory, except groups with gradients."""
    modules = reachable_modules(module) if isinstance(module, nn.Module) else []
    held = [place.tensor for place in places_in(("", module) for module in modules)]
    groups = groups_of(tensor for tensor in held if not isinstance(tensor, nn.Parameter))
    return [group for group in groups if len(group) > 1 and not any(one.requires_grad for one in group)]
