"""Draw random numbers in float64 runs as the original draws them: in its own dtype, from the same random stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from optimizer.parity.torch_functions import mapped
from passes.graph.torch_calls import argument, name_of

_FACTORIES = frozenset({"rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "normal"})
_FILLS = frozenset(
    {
        "normal_", "uniform_", "exponential_", "bernoulli_", "log_normal_", "cauchy_", "geometric_", "random_",
        # The initializers of torch.nn.init.
        "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "trunc_normal_", "orthogonal_",
        "sparse_",
    }
)  # fmt: skip
# These compute nothing besides the draw.
_PURE_DRAWS = frozenset({"bernoulli", "multinomial", "poisson", "binomial"})
_DRAWS = _PURE_DRAWS | {"gumbel_softmax", "rrelu", "rrelu_"}
# Each multiplies its input by a random mask, which the same call on a tensor of ones returns.
_MASKING = frozenset(
    {"dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_"}
)
_ALPHA_DROPOUTS = frozenset({"alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"})
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_ATTENTION = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})


class Layout(NamedTuple):
    """The shape and strides of a tensor; the strides are empty if its layout isn't strided."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class MaskedLayouts(TorchFunctionMode):
    """Records the layouts of the inputs of dropouts, in call order, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.masked: list[Layout] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if name_of(func) in _MASKING and _drops(args, kwargs):
            self.masked.append(_layout(argument(args, kwargs, 0, "input", None)))
        return func(*args, **kwargs)


class RandomDraws:
    """Runs the calls of a float64 run that draw random numbers.

    A dropout mask is drawn in memory order. Kernels of float64 may return another memory order than those of the own
    dtype. The mask then follows the layout that the same dropout had in a run in the own dtype (`MaskedLayouts`).

    Attributes:
        masked: the layouts of the inputs of dropouts, in call order.
    """

    def __init__(self, own_dtype: torch.dtype, *, masks: Iterable[Layout], lowered: set[str]) -> None:
        """Prepare the draws.

        Args:
            own_dtype: the dtype in which the model draws its random numbers.
            masks: the layouts of the same dropouts in a run in the own dtype.
            lowered: receives the names of the functions that compute in the own dtype because they also draw.
        """
        self.masked: list[Layout] = []
        self._masks = iter(masks)
        self._own_dtype = own_dtype
        self._lowered = lowered

    def find(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        to_float64: Callable[..., Any],
    ) -> Callable[[], Any] | None:
        """How to make a call that draws random numbers; None if the call draws none.

        Args:
            to_float64: casts a tensor; with `keep=True`, keeps the cast of a parameter, because the call writes to it.
                It is not stored here: the reference cycle would keep all casts alive after the run.
        """
        if name in _FACTORIES:
            return lambda: self._factory(func, args, kwargs, to_float64)
        if name in _FILLS:
            return lambda: self._fill(func, args, kwargs, to_float64)
        if name in _MASKING and _drops(args, kwargs):
            return lambda: self._masked(name, func, args, kwargs, to_float64)
        if (
            name in _DRAWS
            or (name in _ALPHA_DROPOUTS and _drops(args, kwargs))
            or (name in _ATTENTION and _attention_drops(name, args, kwargs))
            or (name in _RECURRENT and _recurrent_drops(args))
        ):
            if name not in _PURE_DRAWS:
                self._lowered.add(name)
            return lambda: self._factory(func, args, kwargs, to_float64)
        return None

    def _factory(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], to_float64: Callable[..., Any]
    ) -> Any:
        """Make a call in the own dtype and cast its results."""
        return mapped(func(*mapped(args, self._lower), **mapped(kwargs, self._lower)), to_float64)

    def _fill(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], to_float64: Callable[..., Any]
    ) -> Any:
        target = to_float64(args[0], keep=True)
        if not target.is_floating_point() or self._own_dtype is torch.float64:
            return func(target, *args[1:], **kwargs)
        drawn = torch.empty_like(target, dtype=self._own_dtype)
        func(drawn, *mapped(args[1:], self._lower), **mapped(kwargs, self._lower))
        with torch.no_grad():
            target.copy_(drawn)
        return args[0]

    def _masked(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        to_float64: Callable[..., Any],
    ) -> Any:
        key = "input" if not args else None
        values = to_float64(kwargs["input"] if key else args[0], keep=name.endswith("_"))
        probability = argument(args, kwargs, 1, "p", 0.5)
        self.masked.append(_layout(values))
        layout = next(self._masks, self.masked[-1])
        if layout.shape == values.shape and layout != self.masked[-1]:
            ones = torch.empty_strided(*layout, dtype=self._own_dtype, device=values.device).fill_(1)
        else:
            ones = torch.ones_like(values, dtype=self._own_dtype, requires_grad=False)
        rest = {**kwargs, "inplace": False} if "inplace" in kwargs else dict(kwargs)
        mask = func(**{**rest, key: ones}) if key else func(ones, *args[1:3], **rest)
        scale = 0.0 if probability >= 1 else 1 / (1 - probability)
        kept = (mask != 0).to(values.dtype) * scale
        if name.endswith("_") or argument(args, kwargs, 3, "inplace", False) is True:
            return values.mul_(kept)
        return values * kept

    def _lower(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype is torch.float64 and self._own_dtype is not torch.float64:
            return value.to(self._own_dtype)
        return value


def _layout(tensor: torch.Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else ())


def _drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and bool(argument(args, kwargs, 1, "p", 0.5))


def _attention_drops(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "scaled_dot_product_attention":
        return bool(argument(args, kwargs, 4, "dropout_p", 0.0))
    return bool(argument(args, kwargs, 10, "dropout_p", 0.0)) and bool(kwargs.get("training", True))


def _recurrent_drops(args: tuple[Any, ...]) -> bool:
    """Whether `_VF.lstm(input, hx, weights, has_biases, layers, dropout, train, …)` applies dropout; packed or not."""
    numbers = [arg for arg in args if isinstance(arg, float)]
    flags = [arg for arg in args if isinstance(arg, bool)]
    return bool(numbers and numbers[0]) and len(flags) > 1 and flags[1]
