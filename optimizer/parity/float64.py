"""Run a model in float64 without copying it.

`Float64Mode` intercepts every call of a torch function while it is active and raises it to float64: floating-point
tensors among the arguments, dtype arguments, conversions (`.float()`, `.to(torch.float16)`), factories, and the value
of `x.dtype`. `.double()` on a copy does not change the conversions in a forward; this mode does.

- Parameters are cast call by call, so that at most one of them is held in float64 at a time. Large weights of
  convolutions and linear layers are cast a few rows at a time.
- Every other tensor of lower precision (a buffer, an attribute) gets one *shadow* in float64 for all later calls.
  Writes go to the shadow: the model's own buffers stay unchanged.
- Results in torch's default dtype (`torch.zeros(3)`, `torch.tensor(0.1)`, a quotient of integers) are float64 too. The
  default itself belongs to the whole process and stays: `torch.get_default_dtype()` returns the same as before.
- Random numbers are drawn as the original draws them, in its own dtype from the same stream, and cast afterwards.
- Autocast has no effect.

The mode does not see into TorchScript, compiled code, or kernels that accept float32 only: those raise, or show up in
`Float64Mode.lowered`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from optimizer.parity.ties import chooses
from optimizer.parity.torch_functions import DATA_MOVEMENT, mapped, moved_argument, reads_metadata, written_ids
from passes.graph.memory import copied_together
from passes.graph.recording import argument, name_of
from passes.torch_private import OpOverload, OpOverloadPacket

_RAISED = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
_RAISED_TYPES = {
    "torch.FloatTensor": "torch.DoubleTensor",
    "torch.HalfTensor": "torch.DoubleTensor",
    "torch.BFloat16Tensor": "torch.DoubleTensor",
    "torch.cuda.FloatTensor": "torch.cuda.DoubleTensor",
    "torch.cuda.HalfTensor": "torch.cuda.DoubleTensor",
    "torch.cuda.BFloat16Tensor": "torch.cuda.DoubleTensor",
}
_CONVERSIONS = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
}
_COMPLEX_CONVERSIONS = frozenset({"cfloat", "chalf", "cdouble"})
# Attributes of a tensor that are tensors over the same values.
_ALIASES = frozenset({"T", "H", "mT", "mH", "data", "real", "imag"})
# The layers whose output channels can be computed in parts, each with the dim of the channels in the output.
_BY_ROWS = {"linear": -1, "conv1d": -2, "conv2d": -3, "conv3d": -4}
# The number of weight elements that are cast at a time: 4 MiB in float64. Weights with more elements are large.
_LARGE = 1 << 19
_FLOAT_OVERFLOW = re.compile(r"converted to type (?!u?int)\S+ without overflow")
_INTEGERS = frozenset(
    {
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
        torch.bool,
    }
)  # fmt: skip
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
_PURE_DRAWS = _FACTORIES | {"bernoulli", "multinomial", "poisson", "binomial"}
_DRAWS = _PURE_DRAWS | {"gumbel_softmax", "rrelu", "rrelu_"}
# Each multiplies its input by a random mask, which the same call on a tensor of ones returns.
_MASKING = frozenset(
    {"dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_"}
)
_ALPHA_DROPOUTS = frozenset({"alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"})
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_ATTENTION = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})


def raised(dtype: torch.dtype) -> torch.dtype:
    """Map a lower-precision dtype to float64 or complex128, and any other dtype to itself."""
    return _RAISED.get(dtype, dtype)


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


class Float64Mode(TorchFunctionMode):
    """Inside, every torch call of this thread computes in float64."""

    def __init__(
        self,
        *,
        own_dtype: torch.dtype = torch.float32,
        leaf_parameters: bool = False,
        written: Iterable[nn.Parameter] = (),
        together: Iterable[Sequence[torch.Tensor]] = (),
        masks: Iterable[Layout] = (),
    ) -> None:
        """Prepare a run.

        Args:
            own_dtype: the dtype in which the model draws its random numbers.
            leaf_parameters: keep a float64 leaf for every parameter that is used (twice the memory of the parameters),
                so that gradients are float64 too: `mode.shadow(parameter)` is the leaf.
            written: parameters that the model writes to; each gets a shadow, like a buffer.
            together: groups of other tensors that share memory (`passes.graph.containers.groups_of`); the shadows
                of a group share memory too.
            masks: the layouts of the inputs of dropouts in a run in the original's own dtypes (`MaskedLayouts`). A mask
                is drawn in memory order, which may differ in float64 kernels.
        """
        super().__init__()
        self._written = frozenset(map(id, written))
        self._together = {id(tensor): group for group in together if _has_one_dtype(group) for tensor in group}
        self.own_dtype = own_dtype
        self.leaf_parameters = leaf_parameters
        # The names of the functions whose floating-point results were not float64.
        self.lowered: set[str] = set()
        # The machine epsilon of the least precise dtype that was raised. The original's own rounding is measured by it,
        # whatever the dtype of the outputs.
        self.coarsest = 0.0
        # Whether a call chose or ordered elements by scores.
        self.chooses = False
        # The layouts of the inputs of dropouts, in call order.
        self.masked: list[Layout] = []
        self._masks = iter(masks)
        # Each original is kept with its shadow; otherwise its id could name another tensor later.
        self._shadows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def saw(self, dtype: torch.dtype) -> None:
        """Note a dtype that was raised."""
        if dtype in _RAISED:
            self.coarsest = max(self.coarsest, torch.finfo(dtype).eps)

    def shadow(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The float64 shadow of a tensor; None if the run made none."""
        kept = self._shadows.get(id(tensor))
        return None if kept is None else kept[1]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.chooses |= chooses(func, args, kwargs or {})
        with _without_autocast(self.saw):
            return self._run(func, args, kwargs or {})

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if name in ("__get__", "__set__"):
            return self._attribute(func, args)
        if reads_metadata(name):
            return func(*args, **kwargs)
        if name in _CONVERSIONS or name in _COMPLEX_CONVERSIONS:
            dtype = torch.complex128 if name in _COMPLEX_CONVERSIONS else torch.float64
            self.saw(_CONVERSIONS.get(name, torch.float32))
            return self._raise(args[0]).to(dtype, **kwargs)
        if name == "view" and any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values())):
            return self._reinterpreted(func, args, kwargs)
        if name in _FILLS:
            return self._fill(func, args, kwargs)
        if name in _MASKING and _drops(args, kwargs):
            return self._mask(name, func, args, kwargs)
        if _draws(name, args, kwargs):
            return self._draw(name, func, args, kwargs)
        if self._is_plain_parameter(moved_argument(name, args, kwargs)):
            return self._raise_result(name, func(*args, **kwargs))
        if self._has_large_weight(name, args, kwargs):
            return self._by_rows(name, func, args, kwargs)
        return self._in_float64(name, func, args, kwargs)

    def _in_float64(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = written_ids(name, args, kwargs)
        new_args = mapped(args, functools.partial(self._raise_argument, written=written))
        new_kwargs = mapped(kwargs, functools.partial(self._raise_argument, written=written))
        if not written and _may_follow_default_dtype(func, (new_args, new_kwargs)):
            result = _float64_by_default(func, new_args, new_kwargs)
        else:
            result = func(*new_args, **new_kwargs)
        for given, used in ((args[:1], new_args[:1]), ((kwargs.get("out"),), (new_kwargs.get("out"),))):
            # `self.total += x` binds the result to the buffer's name, which must keep the model's own tensor.
            if written and given and result is used[0]:
                return given[0]
        return self._raise_result(name, result)

    def _draw(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call in the model's own dtype and cast its results."""
        if name not in _PURE_DRAWS:
            self.lowered.add(name)
        return mapped(func(*mapped(args, self._lower), **mapped(kwargs, self._lower)), self._raise)

    def _fill(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = self._raise(args[0], keep=True)
        if not target.is_floating_point() or self.own_dtype is torch.float64:
            return func(target, *args[1:], **kwargs)
        drawn = torch.empty_like(target, dtype=self.own_dtype)
        func(drawn, *mapped(args[1:], self._lower), **mapped(kwargs, self._lower))
        with torch.no_grad():
            target.copy_(drawn)
        return args[0]

    def _mask(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw the mask of a dropout in the model's own dtype, and multiply the input by it in float64."""
        key = "input" if not args else None
        values = self._raise(kwargs["input"] if key else args[0], keep=name.endswith("_"))
        probability = argument(args, kwargs, 1, "p", 0.5)
        self.masked.append(_layout(values))
        layout = next(self._masks, self.masked[-1])
        if layout.shape == values.shape and layout != self.masked[-1]:
            ones = torch.empty_strided(*layout, dtype=self.own_dtype, device=values.device).fill_(1)
        else:
            ones = torch.ones_like(values, dtype=self.own_dtype, requires_grad=False)
        rest = {**kwargs, "inplace": False} if "inplace" in kwargs else dict(kwargs)
        mask = func(**{**rest, key: ones}) if key else func(ones, *args[1:3], **rest)
        scale = 0.0 if probability >= 1 else 1 / (1 - probability)
        kept = (mask != 0).to(values.dtype) * scale
        if name.endswith("_") or argument(args, kwargs, 3, "inplace", False) is True:
            return values.mul_(kept)
        return values * kept

    def _lower(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype is torch.float64 and self.own_dtype is not torch.float64:
            return value.to(self.own_dtype)
        return value

    def _attribute(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        tensor = args[0]
        if attribute in _ALIASES:
            keep = attribute == "data" and name_of(func) == "__set__"
            tensor = self._raise_argument(tensor, written=(id(tensor),) if keep else ())
            return func(tensor, *mapped(args[1:], self._raise_argument))
        result = func(*args)
        if isinstance(result, torch.dtype):
            return raised(result)
        return self._raise(result) if isinstance(result, torch.Tensor) else result

    def _reinterpreted(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """View a tensor as another dtype, from the bits of the original's own dtype."""
        tensor = args[0]
        if tensor.dtype is torch.float64 and self.own_dtype is not torch.float64:
            tensor = tensor.to(self.own_dtype)
        return self._raise_result("view", func(tensor, *args[1:], **kwargs))

    def _is_plain_parameter(self, tensor: Any) -> bool:
        """Whether this is a parameter without a shadow: the run neither writes to it nor holds it as a float64 leaf."""
        held = self.leaf_parameters or id(tensor) in self._shadows or id(tensor) in self._written
        return isinstance(tensor, nn.Parameter) and not held

    def _has_large_weight(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        weight = argument(args, kwargs, 1, "weight", None)
        return (
            name in _BY_ROWS
            and self._is_plain_parameter(weight)
            and weight.dtype in _RAISED
            and weight.layout is torch.strided
            and weight.numel() > _LARGE
            and weight.dim() > 1
            and argument(args, kwargs, 6, "groups", 1) == 1
        )

    def _by_rows(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a layer in parts, each from at most `_LARGE` elements of its weight in float64."""
        weight, bias = argument(args, kwargs, 1, "weight", None), argument(args, kwargs, 2, "bias", None)
        given = self._raise(argument(args, kwargs, 0, "input", None))
        bias = self._raise(bias)
        self.saw(weight.dtype)
        others = {key: value for key, value in kwargs.items() if key not in ("input", "weight", "bias")}
        count = max(1, _LARGE * len(weight) // weight.numel())
        parts = []
        for start in range(0, len(weight), count):
            rows = slice(start, start + count)
            own = weight[rows].to(raised(weight.dtype))
            parts.append(func(given, own, None if bias is None else bias[rows], *args[3:], **others))
        return torch.cat(parts, _BY_ROWS[name])

    def _raise_argument(self, value: Any, written: tuple[int, ...] = ()) -> Any:
        if isinstance(value, torch.Tensor):
            return self._raise(value, keep=id(value) in written)
        if isinstance(value, torch.dtype):
            self.saw(value)
            return raised(value)
        if isinstance(value, str):
            return _RAISED_TYPES.get(value, value)
        if isinstance(value, type) and f"{value.__module__}.{value.__name__}" in _RAISED_TYPES:
            return _RAISED_TYPES[f"{value.__module__}.{value.__name__}"]
        return value

    def _raise(self, tensor: Any, keep: bool = False) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _RAISED:
            return tensor
        if (kept := self._shadows.get(id(tensor))) is not None:
            return kept[1]
        self.saw(tensor.dtype)
        parameter = isinstance(tensor, nn.Parameter)
        if parameter and not keep and not self.leaf_parameters and id(tensor) not in self._written:
            return tensor.to(raised(tensor.dtype))
        if (group := self._together.get(id(tensor))) is not None:
            shadows = copied_together(group, raised(tensor.dtype))
            self._shadows |= {id(one): (one, shadow) for one, shadow in zip(group, shadows, strict=True)}
            return self._shadows[id(tensor)][1]
        if tensor.grad_fn is not None:
            shadow = tensor.to(raised(tensor.dtype))
        else:
            shadow = tensor.detach().to(raised(tensor.dtype)).requires_grad_(tensor.requires_grad)
        self._shadows[id(tensor)] = (tensor, shadow)
        return shadow

    def _raise_result(self, name: str, result: Any) -> Any:
        def to_float64(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dtype not in _RAISED:
                return value
            if name not in DATA_MOVEMENT and not isinstance(value, nn.Parameter):
                self.lowered.add(name)
            return value.to(raised(value.dtype))

        if isinstance(result, torch.dtype):
            return raised(result)
        return mapped(result, to_float64) if _has_low_precision(result) else result


def _has_one_dtype(group: Sequence[torch.Tensor]) -> bool:
    return len(group) > 1 and len({tensor.dtype for tensor in group}) == 1


def _may_follow_default_dtype(func: Callable[..., Any], arguments: Any) -> bool:
    """Whether a call may return floats of torch's default dtype: none of its tensor arguments is a float."""
    if isinstance(func, OpOverload | OpOverloadPacket) and not str(func).startswith("aten."):
        # A custom operator chooses its dtype itself, and may have side effects.
        return False
    return all(
        tensor.dtype in _INTEGERS for tensor in pytree.tree_leaves(arguments) if isinstance(tensor, torch.Tensor)
    )


def _float64_by_default(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call so that it returns float64 if it would return the default dtype.

    Two symptoms show the default dtype: the dtype of the result, and an error about a number that is too large for it
    (`torch.finfo(x.dtype).min` where `x.dtype` is float64). The call is then repeated in other ways, until one returns
    float64: with integers and booleans cast to float64; with integers alone cast, because booleans may be conditions;
    with Python floats as tensors, because `torch.where(mask, 1.0, 0.5)` has nothing else to cast; for factories, with a
    dtype argument.
    """
    result, overflow = None, None
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        if not _FLOAT_OVERFLOW.search(str(error)):
            raise
        # With its traceback, the error would keep this frame alive, and every tensor in it.
        overflow = error.with_traceback(None)
    if overflow is None and not _has_low_precision(result):
        return result
    is_complex = isinstance(result, torch.Tensor) and result.is_complex()
    ways: list[tuple[Callable[[Any], Any], dict[str, Any]]] = [
        (_raise_integers_and_booleans, {}),
        (_raise_integers, {}),
        (_raise_number, {}),
        (lambda leaf: leaf, {"dtype": torch.complex128 if is_complex else torch.float64}),
    ]
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        del ways[:-1]
    for raise_leaf, more in ways:
        try:
            again = func(*mapped(args, raise_leaf), **{**mapped(kwargs, raise_leaf), **more})
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue
        if not _has_low_precision(again):
            return again
    if overflow is not None:
        raise overflow
    return result


def _raise_integers_and_booleans(leaf: Any) -> Any:
    return leaf.to(torch.float64) if isinstance(leaf, torch.Tensor) and leaf.dtype in _INTEGERS else leaf


def _raise_integers(leaf: Any) -> Any:
    return leaf if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bool else _raise_integers_and_booleans(leaf)


def _raise_number(leaf: Any) -> Any:
    return torch.tensor(leaf, dtype=torch.float64) if isinstance(leaf, float) else leaf


def _has_low_precision(tree: Any) -> bool:
    if isinstance(tree, torch.Tensor):
        return tree.dtype in _RAISED
    if isinstance(tree, tuple | list):
        return any(_has_low_precision(item) for item in tree)
    return isinstance(tree, dict) and any(_has_low_precision(item) for item in tree.values())


@contextmanager
def _without_autocast(saw: Callable[[torch.dtype], None]) -> Iterator[None]:
    active = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not active:
        yield
        return
    for device in active:
        saw(torch.get_autocast_dtype(device))
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in active:
            torch.set_autocast_enabled(device, True)


def _layout(tensor: torch.Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else ())


def _draws(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call returns random numbers, or computes with some that it draws."""
    return (
        name in _DRAWS
        or (name in _ALPHA_DROPOUTS and _drops(args, kwargs))
        or (name in _ATTENTION and _attention_drops(name, args, kwargs))
        or (name in _RECURRENT and _recurrent_drops(args))
    )


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
