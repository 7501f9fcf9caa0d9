"""Run one call of the original, or of a candidate, in float64 or with simulated rounding.

Two modes simulate rounding: `PerturbedMode` changes the parameters by one unit in the last place, and `RoundedMode` the
result of every operator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from optimizer.model import Call, Runs, eager_only, rebuild
from optimizer.parity.float64 import READS_METADATA, Float64Mode, moved_argument, raised, written_ids
from optimizer.parity.observe import Observation, observe, own_dtype
from optimizer.parity.original import Original, OriginalCall, mixed_seed, without_warnings
from optimizer.torch_private import decomposition_of
from passes.graph.recording import name_of
from passes.torch_private import schema_of

# Norms subtract a mean inside, and the difference may be far smaller than the rounded numbers.
_NORMS = re.compile("norm(?!al)")
# ATen operators that fill in given numbers, or none yet, and compute nothing.
_FILLS = frozenset(
    {
        "masked_fill", "masked_scatter", "where", "fill", "full", "full_like", "new_full", "scalar_tensor", "empty",
        "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    }
)  # fmt: skip
# The layouts that torch can multiply with a dense tensor of signs.
_MULTIPLIED = frozenset({torch.strided, torch.sparse_coo, torch.sparse_csr})
# In units of epsilon: a number that changes by this share of itself rounds to its neighbor, never to the one after it.
_TO_A_NEIGHBOR = 0.51
ModeOf = Callable[[Any], AbstractContextManager[Any]]
"""Makes the mode for the copy that is run."""


def run_in(
    mode: ModeOf,
    original: Original,
    one: OriginalCall,
    *,
    call: Call,
    training: bool,
) -> Observation:
    """The outputs of one call in a mode.

    Args:
        call: the inputs. The caller makes them, because an exception of the user's input function isn't a result.
    """
    with eager_only(), without_warnings(), original.runs.fresh() as module:
        return observe(module, call, seed=one.seed, training=training, mode=mode(module), names=one.names)


def in_float64(
    original: Original, one: OriginalCall, call: Call, *, training: bool, runs: Runs | None = None
) -> tuple[Float64Mode, Observation]:
    """Run one call with every torch call raised to float64; return the mode that did it, and the outputs.

    Args:
        runs: of a candidate; None for the original.
    """
    with eager_only(), without_warnings(), (runs or original.runs).fresh() as module:
        written, dtype = _written_in(module, original), own_dtype(module, call)
        mode = Float64Mode(own_dtype=dtype, leaf_parameters=training, written=written, draws=one.own.draws)
        return mode, observe(module, call, seed=one.seed, training=training, mode=mode, names=one.names)


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
    return rounding.rounded_results, seen


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def _written_in(module: Any, original: Original) -> list[nn.Parameter]:
    """The parameters of a copy that forward writes to."""
    if not isinstance(module, nn.Module):
        return []
    named = module.named_parameters(remove_duplicate=False)
    return [parameter for name, parameter in named if name in original.runs.written]


class PerturbedMode(TorchFunctionMode):
    """Changes each parameter that a call reads by about one unit in the last place, up or down at random.

    A parameter changes in the same way each time it is read. Gradients reach the parameters themselves.
    """

    def __init__(self, seed: int, *, written: Iterable[nn.Parameter] = (), eps: float | None = None) -> None:
        """Draw the signs of the changes.

        Args:
            written: parameters that the model writes to. They are not changed, because the writes would be lost.
            eps: as for `off_by_one_ulp`.
        """
        super().__init__()
        self._eps = eps
        self._written = frozenset(map(id, written))
        self._generator = torch.Generator().manual_seed(seed)
        # Each parameter is kept with its start; otherwise its id could name another tensor later.
        self._starts: dict[int, tuple[torch.Tensor, int]] = {}
        self._signs = random_signs(self._generator)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if (
            name in ("__get__", "__set__")
            or name in READS_METADATA
            or func in (torch.autograd.grad, torch.autograd.backward)
        ):
            return func(*args, **kwargs)
        if self._is_perturbed(source := moved_argument(name, args, kwargs)):
            # Changing only the rows that are read avoids a copy of the whole table.
            return self.perturbed(func(*args, **kwargs), self._start_of(source))
        written = written_ids(name, args, kwargs)

        def perturb(value: Any) -> Any:
            if not self._is_perturbed(value) or id(value) in written:
                return value
            return self.perturbed(value, self._start_of(value))

        return self.call(func, *tree_map(perturb, (args, kwargs)))

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def perturbed(self, value: Any, start: int) -> Any:
        if not isinstance(value, torch.Tensor) or not _is_inexact(value) or value.numel() == 0:
            return value
        return off_by_one_ulp(value, self._signs, start, eps=self._eps)

    def _is_perturbed(self, value: Any) -> bool:
        if not isinstance(value, nn.Parameter) or id(value) in self._written:
            return False
        return value.layout in _MULTIPLIED and not value.is_nested

    def _start_of(self, parameter: torch.Tensor) -> int:
        known = self._starts.get(id(parameter))
        if known is None:
            known = self._starts[id(parameter)] = (parameter, _random_start(self._signs, self._generator))
        return known[1]


class RoundedMode(TorchDispatchMode):
    """Changes the result of each operator to the next number above or below it, at random.

    This simulates rounding at every step of a model, in the backward pass too. Norms are decomposed: if the mean that a
    BatchNorm subtracts is wrong by one unit, all rows are wrong in the same way. A gradient, as a sum over the rows, is
    then wrong by a multiple of that.

    Three kinds of results stay unchanged:
    - results of operators that only fill in numbers;
    - whole numbers (a count, positions, a mask), which every kernel computes exactly: half of position 2 is never 0.99,
      which floor would turn into 0;
    - numbers that represent infinity, as in a mask. They absorb all numbers that are added to them, so every kernel
      returns them exactly. If they were rounded, a fully masked row of attention, whose numbers are all equal, would
      attend to one position alone, and any error would pass as rounding.

    A higher-order operator, such as the one of `torch.cond`, is one operator: what it calls isn't rounded.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rounded_results = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._signs = random_signs(self._generator)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (schema := schema_of(func)) is None:
            return tree_map_only(torch.Tensor, self._rounded, func(*args, **kwargs))
        composed = decomposition_of(func) if _NORMS.search(func.__name__) else None
        if composed is not None:
            with self:
                return composed(*args, **kwargs)
        result = func(*args, **kwargs)
        if schema.name.partition("::")[2].strip("_") in _FILLS:
            return result
        results = result if isinstance(result, tuple | list) else (result,)
        for value, declared in zip(results, schema.returns, strict=False):
            is_view = declared.alias_info is not None and not declared.alias_info.is_write
            is_own = not is_view and isinstance(value, torch.Tensor) and _is_inexact(value) and _is_dense(value)
            if is_own:
                self._round(value)
        return result

    def _rounded(self, value: torch.Tensor) -> torch.Tensor:
        """A rounded copy, since a higher-order operator may return one of its arguments."""
        if not (_is_inexact(value) and _is_dense(value)):
            return value
        value = value.clone()
        self._round(value)
        return value

    def _round(self, value: torch.Tensor) -> None:
        exact = stands_for_infinity(value) | _is_whole(value)
        if exact.all():
            return
        self.rounded_results += 1
        signs = _signs_for(value, self._signs, _random_start(self._signs, self._generator))
        offset = signs.to(value.dtype).mul_(_TO_A_NEIGHBOR * torch.finfo(value.dtype).eps).mul_(value)
        value.add_(offset.masked_fill_(exact, 0))


def stands_for_infinity(value: torch.Tensor) -> torch.Tensor:
    """Where a float tensor is at least half of its dtype's largest number, like masks of `torch.finfo(…).min`."""
    return value.detach().abs() >= torch.finfo(value.dtype).max / 2


def random_signs(generator: torch.Generator) -> torch.Tensor:
    """Ones and minus ones for `off_by_one_ulp`: int8, of a prime length, so that each row gets different ones."""
    return torch.randint(0, 2, (65537,), generator=generator, dtype=torch.int8).mul_(2).sub_(1)


def off_by_one_ulp(
    value: torch.Tensor, signs: torch.Tensor, start: int = 0, *, eps: float | None = None
) -> torch.Tensor:
    """Compute `value * (1 ± eps)`, with the signs (int8, any length) taken in turn from `start` on; differentiable.

    Args:
        eps: the relative change; the machine epsilon of the value's dtype by default.
    """
    # Few steps make another tensor of this size, because the value may be the largest weight of the model.
    offset = value.detach() * _signs_for(value, signs, start)
    offset.mul_(torch.finfo(value.dtype).eps if eps is None else eps)
    return value + offset if value.requires_grad else offset.add_(value)


def _random_start(signs: torch.Tensor, generator: torch.Generator) -> int:
    return int(torch.randint(0, len(signs), (), generator=generator))


def _signs_for(value: torch.Tensor, signs: torch.Tensor, start: int) -> torch.Tensor:
    """Signs in the shape of `value`, taken in turn from `start` on."""
    repeats = -(-(value.numel() + start) // len(signs))
    return signs.to(value.device).repeat(repeats)[start : start + value.numel()].view(value.shape)


def _is_whole(value: torch.Tensor) -> torch.Tensor:
    """Where a float tensor holds whole numbers that are small enough for its dtype to represent their neighbors."""
    if value.is_complex():
        return torch.zeros_like(value, dtype=torch.bool)
    return (value == value.round()) & (value.abs() < 1 / torch.finfo(value.dtype).eps)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element of the tensor has its own place in memory."""
    return tensor.layout is torch.strided and not tensor.is_nested and 0 not in tensor.stride()


def _is_inexact(tensor: torch.Tensor) -> bool:
    return raised(tensor.dtype) in (torch.float64, torch.complex128)
