"""The noise for a candidate in half precision: the error that the original itself has at that precision.

The original runs in bfloat16 whatever the half precision. bfloat16 has the range of float32, so nothing overflows in this
run, and an overflow in a result shows. The error is scaled: the machine epsilon of float16 is an eighth of that of
bfloat16. Nothing is written to the model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_map

from optimize_export.elementwise import HALF, all_finite, distance, is_exact
from optimize_export.errors import UsageError
from optimize_export.wording import append_once, error_summary
from optimizer.model import pinned_settings
from optimizer.parity.differences import Pool, Slices
from optimizer.parity.noise import RoundingNoise, missing_signal
from optimizer.parity.original import OriginalCall, mixed_seed
from optimizer.parity.results import OutputNoise
from optimizer.parity.rounding import PerturbedMode, run_in
from passes.base import Precision
from passes.casting.forwards import Loan, takes_one_dtype
from passes.graph.forwards import intercepted_calls
from passes.graph.recording import name_of

_RUN_IN = torch.bfloat16
# These accept float32 statistics and weights next to an input of another dtype.
_MIXED = frozenset({"batch_norm", "instance_norm"})


def half_as_float32(leaf: Any) -> Any:
    return leaf.to(torch.float32) if isinstance(leaf, torch.Tensor) and leaf.dtype in HALF else leaf


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
    scale = torch.finfo(precision.dtype).eps / torch.finfo(_RUN_IN).eps
    errors: dict[str, Pool] = {}
    for one, number in itertools.product(noise.calls, range(samples) if samples else [None]):
        seed = None if number is None else mixed_seed(one.seed, 4, number)
        seen = one.aligned(_outputs_at(noise, one, precision, seed))
        for name, own in one.own.values.items():
            value = seen.get(name)
            if value is None or value.shape != own.shape:
                continue
            if is_exact(own):
                one.unstable[name] |= own != value
                continue
            error = distance(value, one.truth.values[name]) * scale
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


@contextmanager
def computing_in(
    target: nn.Module, precision: Precision, *, seed: int | None = None, dtype: torch.dtype = _RUN_IN
) -> Iterator[None]:
    """Inside, calls of `target` by this thread compute in the precision.

    Args:
        seed: changes the parameters by a quarter of a unit in the last place before they are rounded, up or down at
            random, for another sample of the error; None rounds them unchanged. Inputs never change: the sine of a
            large number, for example, would amplify the change to an error that no result has.
        dtype: the dtype to compute in.
    """
    paths = set(precision.kept)
    kept = {id(module): path for path, module in target.named_modules(remove_duplicate=False) if path in paths}
    mode = _LoweredParameters(dtype, seed, everywhere=precision.everywhere)
    tensors = itertools.chain(target.parameters(), target.buffers())
    device = next((tensor.device.type for tensor in tensors), "cpu")
    is_running = False

    def around(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal is_running
        if module is not target or is_running:
            return call_module(module, call, args, kwargs)
        with ExitStack() as stack:
            if not precision.everywhere:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
            if precision.everywhere or seed is not None:
                stack.enter_context(mode)
            is_running = True
            try:
                return call_module(module, call, args, kwargs)
            finally:
                is_running = False

    def call_module(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if id(module) in kept and not mode.is_paused:
            return call_in_float32(kept[id(module)], call, args, kwargs)
        if precision.everywhere and not mode.is_paused and takes_one_dtype(module):
            return Loan(mode.round).call(call, args, kwargs)
        return call(*args, **kwargs)

    def call_in_float32(path: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        mode.is_paused = True
        try:
            with torch.autocast(device, enabled=False):
                outputs = Loan(half_as_float32).call(call, args, kwargs)
        finally:
            mode.is_paused = False
        is_rounded = precision.everywhere and path not in precision.bare
        return tree_map(mode.round, outputs) if is_rounded else outputs

    with intercepted_calls(target, around):
        yield


class _LoweredParameters(PerturbedMode):
    """Perturbs each float32 parameter that a call reads, if there is a seed, and casts it, if `everywhere`.

    Without `everywhere`, autocast casts the parameters.
    """

    def __init__(self, dtype: torch.dtype, seed: int | None, *, everywhere: bool) -> None:
        super().__init__(seed or 0, eps=torch.finfo(dtype).eps / 4)
        # Whether a module runs that stays in float32.
        self.is_paused = False
        self._dtype = dtype
        self._is_perturbing = seed is not None
        self._everywhere = everywhere

    def round(self, leaf: Any) -> Any:
        return leaf.to(self._dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 else leaf

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = name_of(func)
        if self.is_paused or name in _MIXED:
            return func(*args, **(kwargs or {}))
        result = super().__torch_function__(func, types, args, kwargs)
        is_dtype = name == "__get__" and result is torch.float32
        return self._dtype if is_dtype and self._everywhere and isinstance(args[0], nn.Parameter) else result

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            leaves = pytree.tree_leaves((args, kwargs))
            floats = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
            # A float32 tensor that the forward created meets a tensor of the dtype. A real result casts one of them.
            if not self._everywhere or len({leaf.dtype for leaf in floats}) < 2:
                raise
            return func(*tree_map(self.round, args), **tree_map(self.round, kwargs))

    def perturbed(self, value: Any, start: int) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return value
        value = super().perturbed(value, start) if self._is_perturbing else value
        return value.to(self._dtype) if self._everywhere else value
