"""Run a model as a less precise result of it computes, which is to be judged by what the model is off by then.

The model is run in bfloat16 whatever the half precision: that has the range of float32, so that nothing overflows here and
what overflows in a result shows as that. Rounding to float16, whose unit is an eighth, moves a result by an eighth of
that: `share` is what the error is multiplied by. Nothing is written to the model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from optimizer.float64 import is_question, mapped, off_by_one_ulp, random_signs, written_tensors
from passes.base import Precision
from passes.casting.forwards import Loan, takes_one_dtype
from passes.program.interception import intercepted_calls
from passes.program.torch_calls import name_of

_RUN_IN = torch.bfloat16
# Their statistics and weights stay in float32 beside an input of another dtype.
_MIXED = frozenset({"batch_norm", "instance_norm"})


def share(precision: Precision) -> float:
    """What an error of a run here is to be multiplied by, for one in the dtype of the precision."""
    return torch.finfo(precision.dtype).eps / torch.finfo(_RUN_IN).eps


@contextmanager
def computing_as(
    target: nn.Module, precision: Precision, *, seed: int | None = None, dtype: torch.dtype = _RUN_IN
) -> Iterator[None]:
    """Inside, calls of `target` by this thread compute as the precision says.

    Args:
        seed: of another sample: parameters are off by a quarter of a unit before they are rounded, up or down at random.
            None rounds them as they are. Inputs aren't: what computes with them as they are would be off by what a result
            isn't, as the sine of a large number.
        dtype: what is computed in.
    """
    paths = set(precision.kept)
    kept = {id(module): path for path, module in target.named_modules(remove_duplicate=False) if path in paths}
    mode = _Rounding(dtype, seed, everywhere=precision.everywhere)

    def around(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module is target and not mode.is_inside:
            return _whole(functools.partial(_called, module, call), args, kwargs)
        return _called(module, call, args, kwargs)

    def _called(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if mode.is_off or not mode.is_inside:
            return call(*args, **kwargs)
        if id(module) in kept:
            return _apart(kept[id(module)], call, args, kwargs)
        if precision.everywhere and takes_one_dtype(module):
            return Loan(mode.round).call(call, args, kwargs)
        return call(*args, **kwargs)

    def _whole(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(mode.inside())
            if not precision.everywhere:
                stack.enter_context(torch.autocast(_device_of(target), dtype, cache_enabled=False))
            if precision.everywhere or seed is not None:
                stack.enter_context(mode)
            return call(args, kwargs)

    def _apart(path: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with mode.off(), torch.autocast(_device_of(target), enabled=False):
            outputs = Loan(_raised).call(call, args, kwargs)
        is_rounded = precision.everywhere and path not in precision.bare
        return pytree.tree_map(mode.round, outputs) if is_rounded else outputs

    with intercepted_calls(target, around):
        yield


class _Rounding(TorchFunctionMode):
    """Each parameter that a call reads is of the dtype; with autocast, which sees to that itself, it is off at most."""

    def __init__(self, dtype: torch.dtype, seed: int | None, *, everywhere: bool) -> None:
        super().__init__()
        self.is_inside = False
        self.is_off = False
        self._dtype = dtype
        self._everywhere = everywhere
        self._signs = None if seed is None else random_signs(torch.Generator().manual_seed(seed))
        self._starts = itertools.count(0, 7919)
        self._offsets: dict[int, tuple[torch.Tensor, int]] = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While the model runs."""
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """While a part runs that stays in float32."""
        self.is_off = True
        try:
            yield
        finally:
            self.is_off = False

    def round(self, leaf: Any) -> Any:
        """A float32 tensor in the dtype; anything else as it is."""
        return leaf.to(self._dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 else leaf

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        if self.is_off or is_question(name) or name == "__set__":
            return func(*args, **kwargs)
        if name == "__get__":
            result = func(*args)
            is_own = self._everywhere and isinstance(args[0], nn.Parameter) and args[0].dtype is torch.float32
            return self._dtype if is_own and result is torch.float32 else result
        if name in _MIXED:
            return func(*args, **kwargs)
        written = {id(tensor) for tensor in written_tensors(name, args, kwargs)}

        def given(leaf: Any) -> Any:
            is_own = isinstance(leaf, nn.Parameter) and leaf.dtype is torch.float32 and id(leaf) not in written
            if not is_own:
                return leaf
            return self._off(leaf).to(self._dtype) if self._everywhere else self._off(leaf)

        args, kwargs = mapped(args, given), mapped(kwargs, given)
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            # What makes float32 on the way meets what is of the dtype: a result has it cast somewhere.
            if not self._everywhere or len(_float_dtypes((args, kwargs))) < 2:
                raise
            return func(*mapped(args, self.round), **mapped(kwargs, self.round))

    def _off(self, tensor: torch.Tensor) -> torch.Tensor:
        """Off by a quarter of a unit of the dtype, the same way each time."""
        if self._signs is None or not tensor.numel():
            return tensor
        known = self._offsets.get(id(tensor))
        if known is None:
            known = self._offsets[id(tensor)] = (tensor, next(self._starts) % len(self._signs))
        return off_by_one_ulp(tensor, self._signs, known[1], eps=torch.finfo(self._dtype).eps / 4)


def _float_dtypes(given: Any) -> set[torch.dtype]:
    leaves = pytree.tree_leaves(given)
    return {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()}


def _raised(leaf: Any) -> Any:
    is_half = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)
    return leaf.to(torch.float32) if is_half else leaf


def _device_of(target: nn.Module) -> str:
    tensors = itertools.chain(target.parameters(), target.buffers())
    return next((tensor.device.type for tensor in tensors), "cpu")
