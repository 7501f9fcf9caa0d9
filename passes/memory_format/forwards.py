"""Forward wrappers that change the memory format of a module's inputs or outputs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.graph.forwards import AroundForward, standing_around
from passes.graph.layouts import (
    CHANNELS_LAST_FORMATS,
    DimOrder,
    has_strides,
    is_channels_last,
    lies_in,
    order_of,
)
from passes.torch_private import is_transformed, without_torch_function


class ContiguousInput(AroundForward):
    """Makes the input of a convolution contiguous, for one that stays contiguous inside a channels_last model.

    torch chooses the format of a convolution by its input as well as by its weight.
    """

    is_atom = True

    def __init__(self, owner: nn.Module, inner: Any) -> None:
        self.owner = owner
        self.inner = inner

    def __call__(self, input: torch.Tensor, *size: Any, **named: Any) -> Any:
        return self._inner_forward(_back_as_it_came(input, input.contiguous()), *size, **named)


class ChannelsLastInput(AroundForward):
    """Converts the input of a convolution to channels_last, although its weight is contiguous.

    The weight stays as it is; at each call, the convolution makes a temporary copy of it in the format of the input.
    """

    is_atom = True

    def __init__(self, owner: nn.Module, inner: Any) -> None:
        self.owner = owner
        self.inner = inner

    def __call__(self, input: Any, *size: Any, **named: Any) -> Any:
        return self._inner_forward(_back_as_it_came(input, _in_channels_last(input)), *size, **named)


class DrawsInOrder(AroundForward):
    """Draws the random numbers of a module in contiguous order, so that results match those of the original.

    A generator fills memory in address order. In channels_last, the same numbers would go to other elements.
    """

    def __init__(self, owner: nn.Module, inner: Any) -> None:
        self.owner = owner
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._inner_forward(*args, **kwargs)
        with _ContiguousDraws():
            return self._inner_forward(*args, **kwargs)


class _ContiguousDraws(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        value: Any = args[0] if args else None
        if not draws_for_last(getattr(func, "__name__", ""), args, kwargs):
            return func(*args, **kwargs)
        given = _back_as_it_came(value, value.contiguous())
        result = func(given, *args[1:], **kwargs)
        if result is given:
            return value.copy_(given)
        return _back_as_it_came(result, _in_channels_last(result))


# Functions that draw a random number for each element of their first argument.
_DRAWS = frozenset({
    "dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "rrelu", "rrelu_", "gumbel_softmax", "rand_like",
    "randn_like", "randint_like", "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_",
    "normal_", "random_", "uniform_",
})  # fmt: skip
# The position of their `training` argument.
_TRAINS_BEHIND = {"dropout": 2, "dropout_": 2, "alpha_dropout": 2, "alpha_dropout_": 2, "rrelu": 3, "rrelu_": 3}


def draws_for_last(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call of a torch function draws a random number for each element of a channels_last feature map."""
    if name not in _DRAWS or not args or not isinstance(args[0], torch.Tensor):
        return False
    behind = _TRAINS_BEHIND.get(name)
    if behind is not None and not kwargs.get(
        "training", kwargs.get("train", args[behind] if len(args) > behind else True)
    ):
        return False
    with without_torch_function():
        return _is_map(args[0]) and is_channels_last(args[0]) and not args[0].is_contiguous()


def _in_channels_last(value: Any) -> Any:
    """Copy a feature map to channels_last, including one that is in both formats but has contiguous strides.

    Anything else is returned as is.
    """
    if torch.compiler.is_compiling() or not isinstance(value, torch.Tensor):
        # Compiled and exported programs choose the formats themselves.
        return value
    # Hide these checks from modes that watch or plan the calls of a forward.
    with without_torch_function():
        if not _is_map(value) or is_channels_last(value):
            return value
        memory_format = CHANNELS_LAST_FORMATS[value.dim()]
    return value.clone(memory_format=memory_format)


def _is_map(value: torch.Tensor) -> bool:
    # A tensor under a torch.func transform represents a batch of tensors with other dims.
    return has_strides(value) and value.dim() in CHANNELS_LAST_FORMATS and not is_transformed(value)


def _back_as_it_came(value: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """Make the gradient of a converted copy return in the format of the original value.

    The operation that made the value reads both in its backward pass, and is slow if their formats differ: a BatchNorm
    takes eight times as long.
    """
    if copied is value or not copied.requires_grad or torch.compiler.is_compiling():
        return copied
    with without_torch_function():
        if is_transformed(value):
            return copied
        order = _order_of(value)
    if order is not None and copied.grad_fn is not None:
        # A hook on the node, not on the tensor, because the tensor may be an output that the caller saves.
        copied.grad_fn.register_prehook(functools.partial(_all_ordered, order))
    return copied


def _all_ordered(order: DimOrder, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_ordered(gradient, order) for gradient in gradients)


class FormattedForward(AroundForward):
    """Gives the outputs of a root the dim order that they have in the original.

    If a call returns another number of values than the recorded ones, all outputs are made contiguous, as convolutions
    on contiguous inputs return them.
    """

    def __init__(self, owner: nn.Module, orders: tuple[DimOrder | None, ...], inner: Any) -> None:
        self.owner = owner
        self.orders = orders  # the dim order of each output; None to leave it as it is
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._inner_forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(outputs, is_leaf=_is_size)
        orders = self.orders if len(leaves) == len(self.orders) else ((),) * len(leaves)
        return pytree.tree_unflatten([_given_out(*pair) for pair in zip(leaves, orders, strict=True)], spec)


def _given_out(leaf: Any, order: DimOrder | None) -> Any:
    ordered = _ordered(leaf, order)
    return leaf if ordered is leaf else _back_as_it_came(leaf, ordered)


def ordered_leaves(outputs: Any) -> list[Any]:
    """The leaves of a root's outputs, in the order of `FormattedForward.orders`."""
    leaves: list[Any] = pytree.tree_leaves(outputs, is_leaf=_is_size)
    return leaves


def _is_size(value: Any) -> bool:
    # pytree would rebuild a torch.Size as a plain tuple.
    return isinstance(value, torch.Size)


def _ordered(leaf: Any, order: DimOrder | None) -> Any:
    if order is None or not _is_dense(leaf):
        return leaf
    if leaf.dim() != len(order) or order == tuple(range(len(order))):
        return leaf.contiguous()
    if leaf.permute(order).is_contiguous():
        return leaf
    back = [order.index(dim) for dim in range(len(order))]
    return leaf.permute(order).contiguous().permute(back)


def dim_order(leaves: Sequence[Any]) -> DimOrder | None:
    """The order of the dims in memory of one output, over calls with several sizes.

    None for values that are not strided tensors of two or more dims, or that have gaps or overlaps in memory. Dims of
    size 1 fit anywhere in the order. If the calls seem to differ, the result is an order that fits all of them, or else
    that of the first call.

    Args:
        leaves: the output in each of the calls.
    """
    orders = [_order_of(leaf) for leaf in leaves]
    if None in orders:
        return None
    common = (order for order in orders if order and all(lies_in(leaf, order) for leaf in leaves))
    return next(common, orders[0])


def _order_of(leaf: Any) -> DimOrder | None:
    return order_of(leaf) if _is_dense(leaf) else None


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and has_strides(leaf)


def is_kept_contiguous(conv: nn.Module) -> bool:
    """Whether the convolution converts its input to contiguous format."""
    return standing_around(conv, ContiguousInput) is not None


def enters_channels_last(conv: nn.Module) -> bool:
    """Whether the convolution converts its input to channels_last."""
    return standing_around(conv, ChannelsLastInput) is not None
