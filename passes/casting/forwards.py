"""Forward wrappers that compute in a half precision, or in float32 where half precision loses too much."""

from __future__ import annotations

import inspect
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, ValuesView
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from passes.graph.forwards import AroundForward, is_atom
from passes.torch_private import AnyNorm, is_tracing

HALF = (torch.bfloat16, torch.float16)
_CAST = (torch.float32, *HALF)
# Tuples, because torch.compile doesn't support isinstance checks with a union of classes.
_ROWS = (list, deque)
_OPENED = (tuple, list, deque, ValuesView)


class RootCast(AroundForward):
    """Base of the wrappers for a root that computes in a half precision.

    Inputs are passed on unchanged, and lists and dicts stay the caller's objects. Tensors that the forward stores in
    them get the dtype that they have in the original, like the outputs.
    """

    def __init__(self, owner: nn.Module, inner: Any, dtype: torch.dtype, outputs: Sequence[torch.dtype | None]) -> None:
        self.owner = owner
        self.inner = inner
        self.dtype = self.computes_in = dtype
        # The original dtype of each leaf of the output; None if it was not a float tensor in the recorded call. A
        # half-precision tensor at such a position is cast to float32. If the number of leaves differs from the recorded
        # call, all half-precision tensors are.
        self.outputs = tuple(outputs)

    def _given_out(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the call, and cast its outputs, and the tensors that it stored in its arguments, to their dtypes."""
        given = (args, kwargs.values())
        held, before = list(_containers_in(given)), list(_tensors_in(given))
        outputs = call(*args, **kwargs)

        def cast(leaf: Any, want: torch.dtype | None = None) -> Any:
            is_ours = isinstance(leaf, torch.Tensor) and leaf.dtype is self.dtype and not _is_among(leaf, before)
            return leaf.to(want or torch.float32) if is_ours else leaf

        changed_in_place(held, cast)
        leaves, spec = pytree.tree_flatten(outputs, is_leaf=lambda each: _is_size(each) or _is_among(each, held))
        known = self.outputs if len(leaves) == len(self.outputs) else (None,) * len(leaves)
        new = [cast(leaf, want) for leaf, want in zip(leaves, known, strict=True)]
        return outputs if _are_same(new, leaves) else pytree.tree_unflatten(new, spec)


class AutocastForward(RootCast):
    """Runs a root under autocast, and casts the outputs to their original dtypes.

    If each weight is used once, autocast's cache is off: it would keep the casts of all weights until the end of the
    call. If weights are used repeatedly, the cache is on, except in a trace, which would record a cast made earlier,
    under an outer autocast, as a constant. If the user has cast the parameters to another dtype, the forward runs
    without autocast.
    """

    def __init__(
        self,
        owner: nn.Module,
        inner: Any,
        dtype: torch.dtype,
        outputs: Sequence[torch.dtype | None],
        *,
        repeats: bool = False,
    ) -> None:
        super().__init__(owner, inner, dtype, outputs)
        self.repeats = repeats  # whether a call uses some weights more than once
        self.made_for = _dtype_of(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _dtype_of(self.owner) is not self.made_for:
            return self._inner_forward(*args, **kwargs)
        return self._given_out(self._cast_call, args, kwargs)

    def _cast_call(self, *args: Any, **kwargs: Any) -> Any:
        is_cached = self.repeats and not is_tracing()
        with torch.autocast(_device_type(self.owner), self.dtype, cache_enabled=is_cached):
            return self._inner_forward(*args, **kwargs)


class CastForward(RootCast):
    """Runs a root whose layers have half-precision weights, and casts the outputs to their original dtypes.

    Inputs are cast by the layers that need it; everything else computes on them unchanged.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._given_out(self._inner_forward, args, kwargs)


class UnderAutocast(AroundForward):
    """Runs under autocast a module that mixes half-precision outputs of its layers with float32 tensors.

    Operations that accept only one dtype would raise there; autocast casts their inputs.
    """

    def __init__(self, owner: nn.Module, inner: Any, dtype: torch.dtype) -> None:
        self.owner = owner
        self.inner = inner
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(_device_type(self.owner), self.dtype, cache_enabled=False):
            return self._inner_forward(*args, **kwargs)


class InFloat32(AroundForward):
    """Runs a module in float32 inside a model that computes in a half precision."""

    def __init__(self, owner: nn.Module, inner: Any, gives: torch.dtype | None, *, is_atom: bool) -> None:
        self.owner = owner
        self.inner = inner
        # The dtype to which its float32 outputs are cast; None leaves them, because autocast casts them where needed
        self.gives = gives
        self.is_atom = is_atom

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _dtype_of(self.owner) in HALF:
            # The user has cast the module.
            return self._inner_forward(*args, **kwargs)
        loan = Loan(lambda leaf: cast_leaf(leaf, HALF, torch.float32))
        with torch.autocast(_device_type(self.owner), enabled=False):
            outputs = loan.call(self._inner_forward, args, kwargs)
        if self.gives is None and not loan.lent:
            return outputs
        gives = self.gives or torch.float32

        def given(leaf: Any) -> Any:
            own = loan.own(leaf)
            return cast_leaf(leaf, (torch.float32,), gives) if own is leaf else own

        held = list(_containers_in((args, kwargs.values())))
        leaves, spec = pytree.tree_flatten(outputs, is_leaf=lambda each: _is_size(each) or _is_among(each, held))
        new = [given(leaf) for leaf in leaves]
        return outputs if _are_same(new, leaves) else pytree.tree_unflatten(new, spec)


class LoweredInput(AroundForward):
    """Casts the inputs of a layer with half-precision weights, which accepts no other dtype.

    The dtype of the weights is read at each call, so the layer keeps working after they are cast or replaced. Finite
    values of a mask stay finite: the lowest float32 number is out of the range of float16, and rounds to infinity in
    bfloat16.
    """

    def __init__(self, owner: nn.Module, inner: Any, dtype: torch.dtype, *, is_atom: bool) -> None:
        self.owner = owner
        self.inner = inner
        # The dtype of the weights; used for a layer without weights of its own if those of its submodules are not
        # floats
        self.dtype = dtype
        self.is_atom = is_atom
        # The name of one of its own weights; "" if there is none
        self.weight = next((name for name, held in owner._parameters.items() if _is_float(held)), "")
        self.masks = masks_of(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            # A fast path for the most common kind of call.
            held = self.owner._parameters.get(self.weight)
            (value,) = args
            if held is None or value.dtype is not held.dtype:
                value = self.lowered(value)
            return type(self.owner).forward(self.owner, value) if self.inner is None else self.inner(value)
        if self.masks:
            args, kwargs = with_masks(lambda mask: finite_in(mask, self._dtype), self.masks, args, kwargs)
        return Loan(self.lowered).call(self._inner_forward, args, kwargs)

    def lowered(self, leaf: Any) -> Any:
        """Cast a float tensor to the dtype of the weights; anything else is returned as is."""
        return cast_leaf(leaf, _CAST, self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        held = self.owner._parameters.get(self.weight) if self.weight else next(self.owner.parameters(), None)
        return held.dtype if held is not None and held.is_floating_point() else self.dtype


class FiniteMasks(AroundForward):
    """Keeps the finite values of masks finite, for a torch.nn layer with mask arguments under autocast."""

    def __init__(self, owner: nn.Module, inner: Any, dtype: torch.dtype, *, is_atom: bool) -> None:
        self.owner = owner
        self.inner = inner
        self.dtype = dtype  # the dtype to which autocast casts the masks
        self.is_atom = is_atom
        self.masks = masks_of(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_masks(lambda mask: finite_in(mask, self.dtype), self.masks, args, kwargs)
        return self._inner_forward(*args, **kwargs)


def takes_one_dtype(module: nn.Module) -> bool:
    """Whether the module is a torch.nn layer, or a subclass of one, that accepts only inputs of its weights' dtype."""
    if isinstance(module, AnyNorm | nn.Embedding | torch.jit.ScriptModule):
        return False
    if not any(map(_is_float, module._parameters.values())):
        has_layers = any(map(_is_float, module.parameters()))
        return has_layers and is_atom(module) and type(module).forward is not nn.Module.forward
    homes = [base.__module__ for base in type(module).__mro__ if base is not nn.Module]
    return any(home.startswith("torch.nn.modules.") and home != "torch.nn.modules.container" for home in homes)


def dtypes_of(outputs: Any) -> tuple[torch.dtype | None, ...]:
    """The dtype of each leaf of an output; None for a leaf that is not a float tensor."""
    leaves = pytree.tree_leaves(outputs, is_leaf=_is_size)
    return tuple(leaf.dtype if _is_float(leaf) else None for leaf in leaves)


class Loan:
    """Replaces the tensors in the arguments of a call by casts, each tensor once.

    Tuples are rebuilt. Lists and dicts stay the same objects, because the call may write to them: they hold the casts
    during the call and their own tensors again afterwards.
    """

    def __init__(self, cast: Callable[[Any], Any]) -> None:
        # (cast, original tensor) for each tensor that was cast.
        self.lent: list[tuple[Any, Any]] = []
        self._cast = cast

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call with the casts."""
        try:
            return forward(*changed_in_place(args, self._lend), **changed_in_place(kwargs, self._lend))
        finally:
            if self.lent:
                changed_in_place((args, kwargs), self.own)

    def own(self, leaf: Any) -> Any:
        """The original tensor of a cast; any other value is returned as is."""
        for made, own in self.lent:
            if made is leaf:
                return own
        return leaf

    def _lend(self, leaf: Any) -> Any:
        for made, own in self.lent:
            if own is leaf:
                return made
        made = self._cast(leaf)
        if made is not leaf:
            self.lent.append((made, leaf))
        return made


def changed_in_place(value: Any, change: Callable[[Any], Any]) -> Any:
    """Replace the tensors in a value: lists and dicts are written to, tuples are rebuilt."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return _tuple_of(value, [changed_in_place(each, change) for each in value])
    if isinstance(value, _ROWS):
        items: Any = enumerate(value)
    elif isinstance(value, dict):
        items = list(value.items())
    else:
        return value
    for key, each in items:
        new = changed_in_place(each, change)
        if new is not each:
            value[key] = new
    return value


def _tuple_of(value: Any, items: Sequence[Any]) -> Any:
    if _are_same(items, value):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _are_same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(one is other for one, other in zip(new, old, strict=True))


def _is_among(value: Any, held: Iterable[Any]) -> bool:
    # Not by id, which torch 2.11 can't compile.
    return any(value is each for each in held)


def _containers_in(value: Any) -> Iterator[Any]:
    """The outermost lists and dicts."""
    if isinstance(value, (dict, *_ROWS)):
        yield value
    elif isinstance(value, _OPENED):
        for each in value:
            yield from _containers_in(each)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _OPENED):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, dict):
        yield from _tensors_in(value.values())


def with_masks(
    change: Callable[[Any], Any], masks: frozenset[int | str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `change` to the mask arguments of a call; `masks` comes from `masks_of`."""
    positional = tuple(change(each) if place in masks else each for place, each in enumerate(args))
    return positional, {name: change(each) if name in masks else each for name, each in kwargs.items()}


def masks_of(module: nn.Module) -> frozenset[int | str]:
    """The arguments of a module's forward that have "mask" in their name, each by name and by position."""
    try:
        names = inspect.signature(types.MethodType(type(module).forward, module)).parameters
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(key for place, name in enumerate(names) if "mask" in name for key in (place, name))


def finite_in(mask: Any, dtype: torch.dtype) -> Any:
    """Clamp the finite values of a float32 mask to half the range of `dtype`, so that sums with it stay finite.

    Infinite values are kept.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.float32 or dtype not in HALF:
        return mask
    most = torch.finfo(dtype).max / 2
    return torch.where(mask.isinf(), mask, mask.clamp(-most, most))


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    return pytree.tree_map(change, tree, is_leaf=_is_size)


def _is_size(value: Any) -> bool:
    # pytree would rebuild a torch.Size as a plain tuple.
    return isinstance(value, torch.Size)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not is_lazy(leaf) and leaf.is_floating_point()


def cast_leaf(leaf: Any, of: Sequence[torch.dtype], to: torch.dtype) -> Any:
    """Cast a tensor if its dtype is one of `of`; anything else is returned as is."""
    return leaf.to(to) if isinstance(leaf, torch.Tensor) and leaf.dtype in of else leaf


def _dtype_of(owner: nn.Module) -> torch.dtype | None:
    """The dtype of the first floating-point parameter."""
    return next((parameter.dtype for parameter in owner.parameters() if parameter.is_floating_point()), None)


def _device_type(owner: nn.Module) -> str:
    """The current device type of the module, which may have been moved."""
    for parameter in owner.parameters():
        # Autocast doesn't exist for meta, where nothing is computed.
        return "cpu" if parameter.is_meta else parameter.device.type
    return "cpu"
