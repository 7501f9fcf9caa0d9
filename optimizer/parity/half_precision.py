"""The noise for a candidate in half precision: the error that the original itself has at that precision.

The original runs in bfloat16 whatever the half precision. bfloat16 has the range of float32, so nothing overflows in this
run, and an overflow in a result shows. `error_scale` converts the error: the machine epsilon of float16 is an eighth of
that of bfloat16. Nothing is written to the model.
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
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from optimize_export.errors import UsageError
from optimize_export.wording import append_once, error_summary
from optimizer.model import pinned_settings
from optimizer.parity.differences import Pool, Slices, all_finite, distance, half_as_float32, is_exact
from optimizer.parity.noise import RoundingNoise
from optimizer.parity.original import OriginalCall, mixed_seed
from optimizer.parity.results import OutputNoise
from optimizer.parity.rounding import off_by_one_ulp, random_signs, run_in
from optimizer.parity.signal import missing_signal
from optimizer.parity.torch_functions import mapped, reads_metadata, written_ids
from passes.base import Precision
from passes.casting.forwards import Loan, takes_one_dtype
from passes.graph.forwards import intercepted_calls
from passes.graph.recording import name_of

_RUN_IN = torch.bfloat16
# These accept float32 statistics and weights next to an input of another dtype.
_MIXED = frozenset({"batch_norm", "instance_norm"})


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
        seen = one.aligned(_outputs_at(noise, one, precision, seed))
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


def error_scale(precision: Precision) -> float:
    """The factor that converts an error of this module's runs into one in the dtype of the precision."""
    return torch.finfo(precision.dtype).eps / torch.finfo(_RUN_IN).eps


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
    mode = _RoundedParameters(dtype, seed, everywhere=precision.everywhere)

    def around(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module is target and not mode.is_running:
            return call_target(functools.partial(call_module, module, call), args, kwargs)
        return call_module(module, call, args, kwargs)

    def call_module(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if mode.is_paused or not mode.is_running:
            return call(*args, **kwargs)
        if id(module) in kept:
            return call_in_float32(kept[id(module)], call, args, kwargs)
        if precision.everywhere and takes_one_dtype(module):
            return Loan(mode.round).call(call, args, kwargs)
        return call(*args, **kwargs)

    def call_target(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(mode.running())
            if not precision.everywhere:
                stack.enter_context(torch.autocast(_device_of(target), dtype, cache_enabled=False))
            if precision.everywhere or seed is not None:
                stack.enter_context(mode)
            return call(args, kwargs)

    def call_in_float32(path: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with mode.paused(), torch.autocast(_device_of(target), enabled=False):
            outputs = Loan(half_as_float32).call(call, args, kwargs)
        is_rounded = precision.everywhere and path not in precision.bare
        return pytree.tree_map(mode.round, outputs) if is_rounded else outputs

    with intercepted_calls(target, around):
        yield


class _RoundedParameters(TorchFunctionMode):
    """Perturbs each float32 parameter that a call reads, if there is a seed, and casts it, if `everywhere`.

    Without `everywhere`, autocast casts the parameters.
    """

    def __init__(self, dtype: torch.dtype, seed: int | None, *, everywhere: bool) -> None:
        super().__init__()
        self.is_running = False
        self.is_paused = False
        self._dtype = dtype
        self._everywhere = everywhere
        self._signs = None if seed is None else random_signs(torch.Generator().manual_seed(seed))
        self._next_start = itertools.count(0, 7919)
        # Each parameter is kept with its start; otherwise its id could name another tensor later.
        self._starts: dict[int, tuple[torch.Tensor, int]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Mark that the target runs."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Change nothing while a module runs that stays in float32."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def round(self, leaf: Any) -> Any:
        """Cast a float32 tensor to the dtype; any other value is returned unchanged."""
        return leaf.to(self._dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 else leaf

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        if self.is_paused or reads_metadata(name) or name == "__set__":
            return func(*args, **kwargs)
        if name == "__get__":
            result = func(*args)
            is_cast = self._everywhere and _is_float32_parameter(args[0])
            return self._dtype if is_cast and result is torch.float32 else result
        if name in _MIXED:
            return func(*args, **kwargs)
        written = written_ids(name, args, kwargs)

        def round_parameter(leaf: Any) -> Any:
            if not _is_float32_parameter(leaf) or id(leaf) in written:
                return leaf
            return self._perturbed(leaf).to(self._dtype) if self._everywhere else self._perturbed(leaf)

        args, kwargs = mapped(args, round_parameter), mapped(kwargs, round_parameter)
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            # A float32 tensor that the forward created meets a tensor of the dtype. A real result casts one of them.
            if not self._everywhere or len(_float_dtypes((args, kwargs))) < 2:
                raise
            return func(*mapped(args, self.round), **mapped(kwargs, self.round))

    def _perturbed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Change a parameter by a quarter of a unit in the last place of the dtype, in the same way each time."""
        if self._signs is None or not tensor.numel():
            return tensor
        known = self._starts.get(id(tensor))
        if known is None:
            known = self._starts[id(tensor)] = (tensor, next(self._next_start) % len(self._signs))
        return off_by_one_ulp(tensor, self._signs, known[1], eps=torch.finfo(self._dtype).eps / 4)


def _is_float32_parameter(leaf: Any) -> bool:
    return isinstance(leaf, nn.Parameter) and leaf.dtype is torch.float32


def _float_dtypes(tree: Any) -> set[torch.dtype]:
    leaves = pytree.tree_leaves(tree)
    return {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()}


def _device_of(target: nn.Module) -> str:
    tensors = itertools.chain(target.parameters(), target.buffers())
    return next((tensor.device.type for tensor in tensors), "cpu")
