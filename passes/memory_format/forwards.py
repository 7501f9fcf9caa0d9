"""Forward wrappers that change the memory format of a module's inputs or outputs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.graph.forwards import AroundForward, standing_around
from passes.graph.tensors import (
    CHANNELS_LAST_FORMATS,
    ORDERS,
    DimOrder,
    has_strides,
    is_channels_last,
    kind_of,
    lies_in,
    order_of,
)
from passes.torch_private import is_transformed, without_torch_function


def why_no_format(weight: torch.Tensor) -> str | None:
    """The reason why a weight has no memory format, as a clause; None if it has one."""
    if is_lazy(weight):
        return "its weight is not initialised yet: run the model once first"
    if kind := kind_of(weight):
        return f"its weight is {kind}"
    return None


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


class ChannelsLastInputs(AroundForward):
    """Converts some inputs of a root to channels_last, once for all operations that read them.

    The caller's tensors keep their format. If the forward writes to a copy, the caller's tensor gets the values; if it
    returns a copy, the caller's tensor is returned instead. Neither happened in the recorded runs.
    """

    def __init__(self, owner: nn.Module, inputs: frozenset[str], inner: Any) -> None:
        self.owner = owner
        self.inputs = inputs  # the names of the parameters to convert
        self.inner = inner
        names = positional_names(owner)
        self._positions = frozenset(number for number, name in enumerate(names) if name in inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # Compiled and exported programs choose the formats themselves.
            return self._inner_forward(*args, **kwargs)
        lent: list[_Lent] = []
        given = [_lend(arg, lent) if number in self._positions else arg for number, arg in enumerate(args)]
        named = {name: _lend(arg, lent) if name in self.inputs else arg for name, arg in kwargs.items()}
        outputs = self._inner_forward(*given, **named)
        for original, copied, version in lent:
            if copied._version != version:
                original.copy_(copied)
        return pytree.tree_map(lambda leaf: _own_of(leaf, lent), outputs, is_leaf=_is_size) if lent else outputs


# The caller's tensor, the copy that the forward gets, and the version counter of the copy.
_Lent = tuple[torch.Tensor, torch.Tensor, int]


def _lend(value: Any, lent: list[_Lent]) -> Any:
    """Copy a feature map to channels_last, and record the copy in `lent`; anything else is returned as is."""
    order = ORDERS.get(value.dim()) if _is_dense(value) else None
    if order is None:
        return value
    copied = _back_as_it_came(value, _counting_writes(value, order))
    if copied is not value:
        lent.append((value, copied, copied._version))
    return copied


def _counting_writes(value: torch.Tensor, order: DimOrder) -> Any:
    if not torch.is_inference_mode_enabled():
        return _ordered(value, order)
    # Tensors created in inference mode have no version counter.
    with torch.inference_mode(False), torch.no_grad():
        return _ordered(value, order)


def _own_of(leaf: Any, lent: Sequence[_Lent]) -> Any:
    return next((original for original, copied, _ in lent if copied is leaf), leaf)


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the forward's parameters that can be passed by position."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


class FormattedForward(AroundForward):
    """Gives the outputs of a root the dim order that they have in the original.

    If a call returns another number of values than the recorded ones, all outputs are made contiguous, as convolutions
    on contiguous inputs return them.
    """

    def __init__(
        self,
        owner: nn.Module,
        orders: tuple[DimOrder | None, ...],
        inner: Any,
        others: tuple[DimOrder | None, ...] | None = None,
    ) -> None:
        self.owner = owner
        self.orders = orders  # the dim order of each output; None to leave it as it is
        self.inner = inner
        # The dim orders when the root's training flag differs from `training`; None if they are the same
        self.others = others
        self.training = owner.training  # the root's training flag at the time of the pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._inner_forward(*args, **kwargs)
        known = self.orders if self.others is None or self.owner.training is self.training else self.others
        if isinstance(outputs, torch.Tensor):
            return _given_out(outputs, known[0] if len(known) == 1 else ())
        leaves, spec = pytree.tree_flatten(outputs, is_leaf=_is_size)
        orders = known if len(leaves) == len(known) else ((),) * len(leaves)
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
