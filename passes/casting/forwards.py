"""Forwards that compute in a half precision, and in float32 where that loses too much, around whatever else they are."""

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

from passes.program.forwards import AroundForward, is_atom, standing_around
from passes.program.seals import SealedOutput, resealed
from passes.torch_private import AnyNorm, is_tracing

HALF = (torch.bfloat16, torch.float16)
_CAST = (torch.float32, *HALF)
# As tuples, for torch.compile knows no unions of classes.
_ROWS = (list, deque)
_OPENED = (tuple, list, deque, ValuesView)


class RootCast(AroundForward):
    """Base of the forwards of a root that computes in a half precision.

    What goes in is as it was, and lists and dicts are those of the caller: what the forward leaves in them has the dtype
    that it had, as outputs have.

    Attributes:
        dtype: the half precision.
        outputs: the dtype of each leaf of the output; None for what was no float tensor in the call that was seen. What
            comes in the half precision in its place is cast to float32, and so is all that calls give which have more or
            fewer leaves.
    """

    def __init__(self, owner: nn.Module, inner: Any, dtype: torch.dtype, outputs: Sequence[torch.dtype | None]) -> None:
        self.owner = owner
        self.inner = inner
        self.dtype = self.computes_in = dtype
        self.outputs = tuple(outputs)

    def _given_out(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a call returns, and leaves in what it was given, in the dtypes that this had."""
        held = list(_containers_in((args, kwargs.values())))
        before = {id(leaf) for leaf in _tensors_in(held)} if held else set()
        outputs = call(*args, **kwargs)
        leaves = pytree.tree_leaves(outputs, is_leaf=_is_size)
        known = self.outputs if len(leaves) == len(self.outputs) else (None,) * len(leaves)
        # Of each tensor, as often as it is given out: the same one may come in two dtypes.
        casts: dict[int, list[torch.Tensor]] = {}
        for leaf, want in zip(leaves, known, strict=True):
            if self._is_ours(leaf) and not any(leaf is own for own in _tensors_in((args, kwargs.values()))):
                casts.setdefault(id(leaf), []).append(leaf.to(want or torch.float32))
        for leaf in _tensors_in(held):
            if self._is_ours(leaf) and id(leaf) not in before:
                casts.setdefault(id(leaf), [leaf.to(torch.float32)])
        if not casts:
            return outputs

        def cast(leaf: Any) -> Any:
            made = casts.get(id(leaf), [leaf])
            return made.pop(0) if len(made) > 1 else made[0]

        given_out = changed(outputs, cast, held)
        changed_in_place(held, cast)
        return given_out

    def _is_ours(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype is self.dtype


class AutocastForward(RootCast):
    """The forward of a root, under autocast; what it returns has the dtypes that it had without.

    Where each weight is used once, its cast is made there and kept for nothing else: a cache would hold them all until the
    end of the call. One that is used again is cast once in a call, but for a trace, which would take a cast that was made
    before, under an autocast around both, for a constant. Once the parameters are of another dtype, as somebody cast
    them, it computes in that.

    Attributes:
        repeats: whether weights are used more than once in a call.
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
        self.repeats = repeats
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
    """The forward of a root whose layers have weights of a half precision; what it returns has the dtypes that it had
    without. What goes in is cast by the layers that take it: anything else computes with it as it is.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._given_out(self._inner_forward, args, kwargs)


class UnderAutocast(AroundForward):
    """The forward of a module with weights of a half precision below it that mixes what they give with float32, by what
    takes one dtype alone: under autocast, which casts it there.
    """

    def __init__(self, owner: nn.Module, inner: Any, dtype: torch.dtype) -> None:
        self.owner = owner
        self.inner = inner
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(_device_type(self.owner), self.dtype, cache_enabled=False):
            return self._inner_forward(*args, **kwargs)


class InFloat32(AroundForward):
    """The forward of a module that computes in float32, in the midst of others in a half precision.

    Attributes:
        gives: the dtype that its float32 outputs come in; None leaves them as they are, as autocast casts them itself.
    """

    def __init__(self, owner: nn.Module, inner: Any, gives: torch.dtype | None, *, is_atom: bool) -> None:
        self.owner = owner
        self.inner = inner
        self.gives = gives
        self.is_atom = is_atom

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _dtype_of(self.owner) in HALF:
            # Somebody cast it.
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

        return changed(outputs, given, list(_containers_in((args, kwargs.values()))))


class LoweredInput(AroundForward):
    """The forward of a layer with weights of a half precision, which takes nothing else: what comes to it is cast.

    It goes by the dtype that its weights have at the call, so that the layer goes on working once they are cast or
    replaced. A mask stays finite where it was: the least number of float32 is beyond both half precisions.

    Attributes:
        dtype: that of the weights; at a call, only where the layer has none itself, but layers below.
        weight: the name of one of its own; "" where it has none.
        masks: as `masks_of`.
    """

    def __init__(self, owner: nn.Module, inner: Any, dtype: torch.dtype, *, is_atom: bool) -> None:
        self.owner = owner
        self.inner = inner
        self.dtype = dtype
        self.is_atom = is_atom
        self.weight = next((name for name, held in owner._parameters.items() if _is_float(held)), "")
        self.masks = masks_of(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            # By far the most calls, in few steps.
            held = self.owner._parameters.get(self.weight)
            (value,) = args
            if held is None or value.dtype is not held.dtype:
                value = self.lowered(value)
            return type(self.owner).forward(self.owner, value) if self.inner is None else self.inner(value)
        if self.masks:
            args, kwargs = with_masks(lambda mask: finite_in(mask, self._dtype), self.masks, args, kwargs)
        return Loan(self.lowered).call(self._inner_forward, args, kwargs)

    def lowered(self, leaf: Any) -> Any:
        """A tensor as the layer takes it."""
        return cast_leaf(leaf, _CAST, self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        held = self.owner._parameters.get(self.weight) if self.weight else next(self.owner.parameters(), None)
        return held.dtype if held is not None and held.is_floating_point() else self.dtype


class FiniteMasks(AroundForward):
    """The forward of a layer of torch.nn that is given masks, under autocast: they stay finite where they were.

    Attributes:
        dtype: what they are cast to inside.
    """

    def __init__(self, owner: nn.Module, inner: Any, dtype: torch.dtype, *, is_atom: bool) -> None:
        self.owner = owner
        self.inner = inner
        self.dtype = dtype
        self.is_atom = is_atom
        self.masks = masks_of(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_masks(lambda mask: finite_in(mask, self.dtype), self.masks, args, kwargs)
        return self._inner_forward(*args, **kwargs)


def root_cast(root: nn.Module) -> RootCast | None:
    """What casts in the root's forward already; None for nothing."""
    return standing_around(root, RootCast)


def takes_one_dtype(module: nn.Module) -> bool:
    """Whether it is a layer of torch.nn that takes floats of the dtype of its weights alone, or a class made of one."""
    if isinstance(module, AnyNorm | nn.Embedding | torch.jit.ScriptModule):
        return False
    if not any(map(_is_float, module._parameters.values())):
        has_layers = any(map(_is_float, module.parameters()))
        return has_layers and is_atom(module) and type(module).forward is not nn.Module.forward
    homes = [base.__module__ for base in type(module).__mro__ if base is not nn.Module]
    return any(home.startswith("torch.nn.modules.") and home != "torch.nn.modules.container" for home in homes)


def dtypes_of(outputs: Any) -> tuple[torch.dtype | None, ...]:
    """The dtype of each leaf of an output; None for what is no float tensor."""
    leaves = pytree.tree_leaves(outputs, is_leaf=_is_size)
    return tuple(leaf.dtype if _is_float(leaf) else None for leaf in leaves)


class Loan:
    """What a call is given in place of its own tensors, each once.

    Tuples are made anew; lists and dicts stay the objects that they are, as the call may write to them: they hold what is
    lent while it runs, and their own behind it.

    Attributes:
        lent: what was given instead of a tensor, with the tensor, by the identity of the tensor.
    """

    def __init__(self, cast: Callable[[Any], Any]) -> None:
        self.lent: dict[int, tuple[Any, Any]] = {}
        self._owners: dict[int, Any] = {}
        self._cast = cast

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call, with what is lent."""
        try:
            return forward(*changed_in_place(args, self._lend), **changed_in_place(kwargs, self._lend))
        finally:
            if self.lent:
                changed_in_place((args, kwargs), self.own)

    def own(self, leaf: Any) -> Any:
        """The tensor instead of which this one was lent; itself, where it wasn't."""
        return self._owners.get(id(leaf), leaf)

    def _lend(self, leaf: Any) -> Any:
        known = self.lent.get(id(leaf))
        if known is None:
            made = self._cast(leaf)
            if made is leaf:
                return leaf
            known = self.lent[id(leaf)] = made, leaf
            self._owners[id(made)] = leaf
        return known[0]


def changed_in_place(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with other tensors: written into the lists and dicts that hold them, and tuples made anew."""
    if isinstance(value, SealedOutput | torch.Tensor):
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


def changed(value: Any, change: Callable[[Any], Any], own: Sequence[Any] = ()) -> Any:
    """The value with other tensors, made anew where it holds one of them; what is in `own` stays as it is."""
    if isinstance(value, SealedOutput | torch.Tensor):
        return change(value)
    if any(value is each for each in own):
        return value
    if isinstance(value, tuple):
        return _tuple_of(value, [changed(each, change, own) for each in value])
    if type(value) is list:
        items = [changed(each, change, own) for each in value]
        return value if _are_same(items, value) else items
    if type(value) is dict:
        named = {key: changed(each, change, own) for key, each in value.items()}
        return value if _are_same(named.values(), value.values()) else named
    leaves, spec = pytree.tree_flatten(value, is_leaf=_is_size)
    if spec.is_leaf():
        return value
    new = [change(leaf) for leaf in leaves]
    return value if _are_same(new, leaves) else pytree.tree_unflatten(new, spec)


def _tuple_of(value: Any, items: Sequence[Any]) -> Any:
    if _are_same(items, value):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _are_same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(one is other for one, other in zip(new, old, strict=True))


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
    """The arguments of a call with other masks, of which `masks_of` tells."""
    positional = tuple(change(each) if place in masks else each for place, each in enumerate(args))
    return positional, {name: change(each) if name in masks else each for name, each in kwargs.items()}


def masks_of(module: nn.Module) -> frozenset[int | str]:
    """The names of the arguments of a module that are masks by these, and their places among the positional ones."""
    try:
        names = inspect.signature(types.MethodType(type(module).forward, module)).parameters
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(key for place, name in enumerate(names) if "mask" in name for key in (place, name))


def finite_in(mask: Any, dtype: torch.dtype) -> Any:
    """A mask of floats that a half precision holds, infinite where it was and nowhere else: other numbers may be added."""
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.float32 or dtype not in HALF:
        return mask
    most = torch.finfo(dtype).max / 2
    return torch.where(mask.isinf(), mask, mask.clamp(-most, most))


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    return pytree.tree_map(change, tree, is_leaf=_is_size)


def _is_size(value: Any) -> bool:
    # Put together again from its numbers, it would be a tuple.
    return isinstance(value, torch.Size)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not is_lazy(leaf) and leaf.is_floating_point()


def cast_leaf(leaf: Any, of: Sequence[torch.dtype], to: torch.dtype) -> Any:
    """A tensor of one of the dtypes in another one, under the seal that it is in; anything else as it is."""
    if isinstance(leaf, SealedOutput):
        value = cast_leaf(leaf.sealed_value, of, to)
        return leaf if value is leaf.sealed_value else resealed(value, leaf)
    return leaf.to(to) if isinstance(leaf, torch.Tensor) and leaf.dtype in of else leaf


def _dtype_of(owner: nn.Module) -> torch.dtype | None:
    """That of the first parameter of floats."""
    return next((parameter.dtype for parameter in owner.parameters() if parameter.is_floating_point()), None)


def _device_type(owner: nn.Module) -> str:
    """Where the module is now, which may be another place than where it was made."""
    for parameter in owner.parameters():
        # There is no autocast on meta, where nothing is computed.
        return "cpu" if parameter.is_meta else parameter.device.type
    return "cpu"
