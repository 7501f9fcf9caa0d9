"""Run a model in float64 without a copy of it, or with its weights off by one unit in the last place.

`Float64Mode` sees every torch function that is called while it is active and raises it to float64: floating tensors
among the arguments, dtype arguments, conversions (`.float()`, `.to(torch.float16)`), factories, and what `x.dtype` says.
`.double()` on a copy leaves the conversions that are written into a forward; here they are raised too.

- Parameters are cast call by call, so that no more than one of them stands in float64 at a time; of a large weight of a
  convolution or linear layer, no more than some rows.
- Any other float tensor that isn't float64 yet (a buffer, an attribute) gets one *shadow* in float64 that serves all
  later calls. Writes go to the shadow: the model's own buffers stay as they are.
- What takes torch's default dtype (`torch.zeros(3)`, `torch.tensor(0.1)`, integers divided by integers) is float64 too. The
  default itself is the whole process's and stays: `torch.get_default_dtype()` answers as it did.
- Random numbers are drawn as the original draws them, in its own dtype from the same stream, and cast afterwards.
- Autocast has no effect.

It doesn't see into TorchScript, compiled code, or kernels that take float32 only: those raise, or show up in `lowered`.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._decomp import decomposition_table
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from passes.program.shared_memory import copied_together
from passes.program.torch_calls import argument, name_of
from passes.program.weights import bare, is_folded

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
# What only asks about a tensor: no need to cast it for the answer.
_QUESTIONS = frozenset(
    {
        "size", "dim", "numel", "stride", "storage_offset", "is_contiguous", "data_ptr", "get_device", "nelement",
        "ndimension", "is_floating_point", "is_complex", "__len__", "__hash__", "requires_grad_", "is_shared",
        "is_nonzero", "has_names", "is_inference", "is_pinned", "is_same_size", "register_hook", "retain_grad",
    }
)  # fmt: skip
# Attributes of a tensor that are tensors over the same values.
_ALIASES = frozenset({"T", "H", "mT", "mH", "data", "real", "imag"})
_FILLS = frozenset(
    {"normal_", "uniform_", "exponential_", "bernoulli_", "log_normal_", "cauchy_", "geometric_", "random_"}
)
_INITIALISERS = frozenset(
    {
        "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "trunc_normal_", "orthogonal_",
        "sparse_",
    }
)  # fmt: skip
_RANDOM_FACTORIES = frozenset({"rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "normal"})
_DRAWS = frozenset({"bernoulli", "multinomial", "poisson", "binomial", "gumbel_softmax", "rrelu", "rrelu_"})
# Each multiplies its input by a random mask: the mask is the answer for a tensor of ones.
_MASKING = frozenset(
    {"dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_"}
)
_ALPHA_DROPOUTS = frozenset({"alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"})
# The layers whose outputs can be computed some at a time, and where these stand among the dims of the output.
_BY_ROWS = {"linear": -1, "conv1d": -2, "conv2d": -3, "conv3d": -4}
# A weight of more elements than these is large, and as many of it are cast at a time: 4 MiB.
_LARGE = 1 << 19
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_ATTENTION = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})


class Layout(NamedTuple):
    """Where a tensor has its numbers; no strides for one that isn't strided."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _layout(tensor: torch.Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else ())


def raised(dtype: torch.dtype) -> torch.dtype:
    """float64 for the smaller floats, complex128 for the smaller complexes, every other dtype itself."""
    return _RAISED.get(dtype, dtype)


def _has_one_dtype(group: Sequence[torch.Tensor]) -> bool:
    return len(group) > 1 and len({tensor.dtype for tensor in group}) == 1


@contextmanager
def float64_mode(*, own_dtype: torch.dtype = torch.float32, leaf_parameters: bool = False) -> Iterator["Float64Mode"]:
    """Inside, every torch call of this thread computes in float64.

    Args:
        own_dtype: the dtype in which the model draws its random numbers.
        leaf_parameters: keep a float64 leaf for every parameter that is used (twice the memory of the parameters), so
            that gradients are float64 too: `mode.shadow(parameter)` is the leaf.
    """
    with Float64Mode(own_dtype=own_dtype, leaf_parameters=leaf_parameters) as mode:
        yield mode


class Float64Mode(TorchFunctionMode):
    """The mode behind `float64_mode`; `lowered` names the functions whose float results were not float64.

    `written` are parameters that the model writes to: each has a shadow, as a buffer has. `together` are groups of other
    tensors that lie in each other's memory (`passes.program.shared_memory.groups_of`): so do their shadows.

    `coarsest` is the machine epsilon of the least precise dtype that was raised: what the original's own rounding is
    to be measured by, whatever the dtype of its outputs.

    `masked` are the layouts of what dropouts were called with, in their order. A mask is drawn in the order of memory, which
    may be another one in float64, where other kernels compute; `masks` are the layouts of a run in the original's own dtypes
    (`MaskedLayouts`), by which they are drawn then.
    """

    def __init__(
        self,
        *,
        own_dtype: torch.dtype = torch.float32,
        leaf_parameters: bool = False,
        written: Iterable[nn.Parameter] = (),
        together: Iterable[Sequence[torch.Tensor]] = (),
        masks: Iterable[Layout] = (),
    ) -> None:
        super().__init__()
        self.masked: list[Layout] = []
        self._masks = iter(masks)
        self._written = frozenset(map(id, written))
        self._together = {id(tensor): group for group in together if _has_one_dtype(group) for tensor in group}
        self.own_dtype = own_dtype
        self.leaf_parameters = leaf_parameters
        self.lowered: set[str] = set()
        self.coarsest = 0.0
        # The original is kept with its shadow, else its id could name another tensor later.
        self._shadows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def saw(self, dtype: torch.dtype) -> None:
        """Note a dtype that was raised."""
        if dtype in _RAISED:
            self.coarsest = max(self.coarsest, torch.finfo(dtype).eps)

    def shadow(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What stands for this tensor in float64, if the run used or wrote it; None else."""
        kept = self._shadows.get(id(tensor))
        return None if kept is None else kept[1]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with _without_autocast(self.saw):
            return self._run(func, args, kwargs or {})

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if name in ("__get__", "__set__"):
            return self._attribute(func, args)
        if name in _QUESTIONS:
            return func(*args, **kwargs)
        if name in _CONVERSIONS or name in _COMPLEX_CONVERSIONS:
            dtype = torch.complex128 if name in _COMPLEX_CONVERSIONS else torch.float64
            self.saw(_CONVERSIONS.get(name, torch.float32))
            return self._raise(args[0]).to(dtype, **kwargs)
        if name == "view" and any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values())):
            return self._reinterpreted(func, args, kwargs)
        if (draw := self._random(name, func, args, kwargs)) is not None:
            return draw()
        if _only_moves(name, args, kwargs) and self._is_plain_parameter(args[-1 if name == "embedding" else 0]):
            return self._raise_result(name, func(*args, **kwargs))
        if self._has_large_weight(name, args, kwargs):
            return self._by_rows(name, func, args, kwargs)
        written = _written(name, args, kwargs)
        new_args = mapped(args, functools.partial(self._raise_argument, written=written))
        new_kwargs = mapped(kwargs, functools.partial(self._raise_argument, written=written))
        follows = not written and _may_follow_default_dtype(func, (new_args, new_kwargs))
        call = _float64_by_default if follows else _call
        result = call(func, new_args, new_kwargs)
        for given, used in ((args[:1], new_args[:1]), ((kwargs.get("out"),), (new_kwargs.get("out"),))):
            # `self.total += x` binds what comes back to the buffer's name: that stays the model's own tensor.
            if written and given and result is used[0]:
                return given[0]
        return self._raise_result(name, result)

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
        """Bits read as another type are the bits of the original's own type."""
        tensor = args[0]
        if tensor.dtype is torch.float64 and self.own_dtype is not torch.float64:
            tensor = tensor.to(self.own_dtype)
        return self._raise_result("view", func(tensor, *args[1:], **kwargs))

    def _random(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """How to do a call that draws random numbers; None where it draws none."""
        if name in _RANDOM_FACTORIES:
            return lambda: self._factory(func, args, kwargs)
        if name in _FILLS or name in _INITIALISERS:
            return lambda: self._fill(func, args, kwargs)
        if name in _MASKING and _drops(args, kwargs):
            return lambda: self._masked(name, func, args, kwargs)
        if (
            name in _DRAWS
            or (name in _ALPHA_DROPOUTS and _drops(args, kwargs))
            or (name in _ATTENTION and _attention_drops(name, args, kwargs))
            or (name in _RECURRENT and _recurrent_drops(args))
        ):
            return lambda: self._in_own_dtype(name, func, args, kwargs)
        return None

    def _factory(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own_args = mapped(args, self._lower)
        own_kwargs = mapped(kwargs, self._lower)
        return mapped(func(*own_args, **own_kwargs), self._raise)

    def _fill(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = self._raise_argument(args[0], written=(id(args[0]),))
        if not target.is_floating_point() or self.own_dtype is torch.float64:
            return func(target, *args[1:], **kwargs)
        drawn = torch.empty_like(target, dtype=self.own_dtype)
        func(drawn, *mapped(args[1:], self._lower), **mapped(kwargs, self._lower))
        with torch.no_grad():
            target.copy_(drawn)
        return args[0]

    def _masked(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = "input" if not args else None
        given = kwargs["input"] if key else args[0]
        values = self._raise_argument(given, written=(id(given),) if name.endswith("_") else ())
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

    def _in_own_dtype(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name not in ("bernoulli", "multinomial", "poisson", "binomial"):
            self.lowered.add(name)
        return mapped(func(*mapped(args, self._lower), **mapped(kwargs, self._lower)), self._raise)

    def _is_plain_parameter(self, tensor: Any) -> bool:
        """A parameter that is read as it is: neither written to in this run nor held as a float64 leaf."""
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
        """What a layer computes, from as many rows of its weight at a time as may stand in float64."""
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
            shadow = bare(tensor).to(raised(tensor.dtype)).requires_grad_(tensor.requires_grad)
        self._shadows[id(tensor)] = (tensor, shadow)
        return shadow

    def _raise_result(self, name: str, result: Any) -> Any:
        def to_float64(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dtype not in _RAISED:
                return value
            if not isinstance(value, nn.Parameter):
                self.lowered.add(name)
            return value.to(raised(value.dtype))

        if isinstance(result, torch.dtype):
            return raised(result)
        if not _holds_low(result):
            return result
        if name in _MOVING:
            return mapped(result, self._raise_moved)
        return mapped(result, to_float64)

    def _raise_moved(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in _RAISED:
            return value.to(raised(value.dtype))
        return value

    def _lower(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype is torch.float64 and self.own_dtype is not torch.float64:
            return value.to(self.own_dtype)
        return value


class MaskedLayouts(TorchFunctionMode):
    """Notes the layouts of what dropouts are called with, as `Float64Mode.masked` does."""

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


class PerturbedMode(TorchFunctionMode):
    """Each parameter that a call reads is off by about one unit in the last place, up or down at random.

    A parameter is off in the same way each time it is read. Gradients reach the parameters themselves.
    With `results`, what each call but plain arithmetic computes is off by one unit of the result's largest number: no kernel
    of sigmoid, softmax or a norm need be better than that. `calls` counts what was seen.
    `written` are parameters that the model writes to: they are left as they are, else the writes would be lost.
    """

    def __init__(self, seed: int, *, results: bool = False, written: Iterable[nn.Parameter] = ()) -> None:
        super().__init__()
        self._written = frozenset(map(id, written))
        self.calls = 0
        self._results = results
        self._generator = torch.Generator().manual_seed(seed)
        self._offsets: dict[int, tuple[torch.Tensor, int]] = {}
        self._signs = random_signs(self._generator)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if (
            name in ("__get__", "__set__")
            or name in _QUESTIONS
            or func in (torch.autograd.grad, torch.autograd.backward)
        ):
            return func(*args, **kwargs)
        if _only_moves(name, args, kwargs) and self._is_perturbed(args[-1 if name == "embedding" else 0]):
            # Rows of a table are off as rows: the whole table needn't be copied for that.
            result = func(*args, **kwargs)
            return self._off(result, self._offset(args[-1 if name == "embedding" else 0]))
        written = _written(name, args, kwargs)

        def perturb(value: Any) -> Any:
            if not self._is_perturbed(value) or not _is_inexact(value) or id(value) in written:
                return value
            return self._off(value, self._offset(value))

        self.calls += 1
        # Before the call, which may write to its argument.
        scale = self._scale_of_gate(name, args, kwargs) if self._results else 0.0
        result = func(*mapped(args, perturb), **mapped(kwargs, perturb))
        return self._off_at_scale(name, scale, result, args, kwargs) if self._results else result

    def _is_perturbed(self, value: Any) -> bool:
        return isinstance(value, nn.Parameter) and id(value) not in self._written

    def _off_at_scale(self, name: str, scale: float, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name.strip("_") in _EXACT or not any(
            isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))
        ):
            return result
        if args and result is args[0] and isinstance(result, torch.Tensor):
            # Computed in place: what others see of the tensor is off too.
            if _is_inexact(result) and not isinstance(result, nn.Parameter):
                with torch.no_grad():
                    result.copy_(self._off_by_unit_of(max(scale, largest_finite(result)), result))
            return result

        def off(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not _is_inexact(value) or _shares(value, args, kwargs):
                return value
            return self._off_by_unit_of(max(scale, largest_finite(value)), value)

        return mapped(result, off)

    @staticmethod
    def _scale_of_gate(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        return largest_finite(argument(args, kwargs, 0, "input", None)) if name in _GATED else 0.0

    def _off_by_unit_of(self, scale: float, value: torch.Tensor) -> torch.Tensor:
        return value + _pattern(value, self._signs, self._start()) * (scale * torch.finfo(value.dtype).eps)

    def _start(self) -> int:
        return int(torch.randint(0, len(self._signs), (), generator=self._generator))

    def _offset(self, parameter: torch.Tensor) -> int:
        known = self._offsets.get(id(parameter))
        if known is None:
            start = self._start()
            known = self._offsets[id(parameter)] = (parameter, start)
        return known[1]

    def _off(self, value: torch.Tensor, start: int) -> torch.Tensor:
        if not isinstance(value, torch.Tensor) or not _is_inexact(value) or value.numel() == 0:
            return value
        return off_by_one_ulp(value, self._signs, start)


class RoundedMode(TorchDispatchMode):
    """What each operator computes is off by about one unit in the last place, up or down at random.

    That is what rounding does to a model wherever it happens, in the backward pass too. Norms are taken apart:
    where the mean that a BatchNorm takes off is off by a unit, all rows are off the same way, and a gradient, which is a sum
    over them, by as much more. `calls` counts what was rounded.
    What puts given numbers in computes none, and what gives whole numbers alone (a count, positions, a mask) gives them
    exactly: half of position 2 is never 0.99, which floor would take for 0. And a number that stands for infinity, as in a
    mask, takes up all that is added to it: it comes out of any kernel as it is. Were they rounded, a row of attention that is
    masked as a whole, where all numbers are equal, would look at one place alone, and any error would be called rounding.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.calls = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._signs = random_signs(self._generator)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        composed = decomposition_table.get(func) if _PARTS.search(func.__name__) else None
        if composed is not None:
            with self:
                return composed(*args, **kwargs)
        result = func(*args, **kwargs)
        if func._schema.name.partition("::")[2].strip("_") in _PUT_IN:
            return result
        results = result if isinstance(result, tuple | list) else (result,)
        for value, declared in zip(results, func._schema.returns, strict=False):
            is_view = declared.alias_info is not None and not declared.alias_info.is_write
            has_own = not is_view and isinstance(value, torch.Tensor) and _is_inexact(value) and _has_place(value)
            if has_own and not _is_whole(value):
                self._round(value)
        return result

    def _round(self, value: torch.Tensor) -> None:
        self.calls += 1
        start = int(torch.randint(0, len(self._signs), (), generator=self._generator))
        factor = _pattern(value, self._signs, start).mul_(torch.finfo(value.dtype).eps).add_(1)
        # A product, as infinity plus an offset of it is no number.
        value.mul_(factor.masked_fill_(stands_for_infinity(value), 1))


# Operators that put numbers in which others have computed, by their names in ATen.
_PUT_IN = frozenset(
    {"masked_fill", "masked_scatter", "where", "fill", "full", "full_like", "new_full", "scalar_tensor"}
)


def _is_whole(value: torch.Tensor) -> bool:
    """Whether a float tensor holds whole numbers alone, of which its dtype has all up to there."""
    if value.is_complex():
        return False
    with torch.no_grad():
        return bool(((value == value.round()) & (value.abs() < 1 / torch.finfo(value.dtype).eps)).all())


def stands_for_infinity(value: torch.Tensor) -> torch.Tensor:
    """Where a float tensor is half of its dtype's largest number or more, as masks are filled with `torch.finfo(…).min`."""
    return bare(value).abs() >= torch.finfo(value.dtype).max / 2


def random_signs(generator: torch.Generator) -> torch.Tensor:
    """Ones and minus ones for `off_by_one_ulp`: int8, of a prime length, so that they fall differently on each row."""
    return torch.randint(0, 2, (65537,), generator=generator, dtype=torch.int8).mul_(2).sub_(1)


def off_by_one_ulp(
    value: torch.Tensor, signs: torch.Tensor, start: int = 0, *, eps: float | None = None
) -> torch.Tensor:
    """`value * (1 ± eps)` with the signs (int8, any length) taken in turn from `start` on; differentiable.

    `eps` is that of the value's dtype where none is given.
    """
    if is_folded(value):
        value = bare(value)
    # In few steps that make another tensor as large: a value may be the weight that most of a model's memory goes to.
    offset = (value.detach() * _signs(value, signs, start)).mul_(torch.finfo(value.dtype).eps if eps is None else eps)
    return value + offset if value.requires_grad else offset.add_(value)


def largest_finite(tensor: torch.Tensor) -> float:
    """The largest magnitude of a float tensor, infinity and NaN left out; 0 where there is none."""
    sizes = bare(tensor).abs()
    return float(torch.where(sizes.isfinite(), sizes, 0.0).max()) if tensor.numel() else 0.0


def _pattern(value: torch.Tensor, signs: torch.Tensor, start: int) -> torch.Tensor:
    """Signs in the shape and dtype of `value`, taken in turn from `start` on."""
    return _signs(value, signs, start).to(value.dtype)


def _signs(value: torch.Tensor, signs: torch.Tensor, start: int) -> torch.Tensor:
    repeats = -(-(value.numel() + start) // len(signs))
    return signs.to(value.device).repeat(repeats)[start : start + value.numel()].view(value.shape)


def _shares(result: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a result lies in the memory of an argument: it is a view or was written in place."""
    places = {
        value.untyped_storage().data_ptr()
        for value in (*args, *kwargs.values())
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    }
    return result.layout is not torch.strided or result.untyped_storage().data_ptr() in places


def _has_place(tensor: torch.Tensor) -> bool:
    """Whether each of its numbers has a place in memory of its own."""
    return tensor.layout is torch.strided and not tensor.is_nested and 0 not in tensor.stride()


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _RAISED or tensor.dtype in (torch.float64, torch.complex128)


# What subtracts a mean first: what is left may be far smaller than what was rounded.
_PARTS = re.compile("norm(?!al)")
_FLOAT_OVERFLOW = re.compile(r"converted to type (?!u?int)\S+ without overflow")
_INTEGERS = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
    }
)
# What errs by a few units of each result, or of the numbers that this one is the sum of, whatever the kernel: those
# measured by the original's own error and answer. Or doesn't err at all, since numbers are only chosen and moved.
_EXACT = frozenset(
    {
        "linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
        "matmul", "rmatmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "einsum", "tensordot", "dot", "outer",
        "add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "mul", "rmul", "imul", "multiply", "div", "truediv",
        "rdiv", "rtruediv", "itruediv", "idiv", "divide", "neg", "abs", "reciprocal", "sqrt", "rsqrt", "square", "pow",
        "rpow", "addcmul", "addcdiv", "batch_norm", "sum", "mean", "cumsum", "avg_pool1d", "avg_pool2d", "avg_pool3d",
        "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "interpolate", "embedding", "embedding_bag",
        "relu", "relu6", "leaky_relu", "prelu", "hardtanh", "clamp", "clip", "clamp_min", "clamp_max", "threshold",
        "maximum", "minimum", "max", "min", "amax", "amin", "topk", "sort", "max_pool1d", "max_pool2d", "max_pool3d",
        "boolean_dispatch", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "cat", "concat", "stack",
        "hstack", "vstack", "pad", "where", "masked_fill", "gather", "scatter", "index_select", "index_put", "take",
        "masked_select", "getitem", "setitem", "flip", "roll", "repeat", "repeat_interleave", "tile", "tril", "triu",
        "clone", "contiguous", "to", "type", "type_as", "float", "half", "bfloat16", "double", "detach", "copy", "view",
        "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "t", "expand", "expand_as",
        "chunk", "split", "unbind", "narrow", "select", "movedim", "swapaxes", "dropout", "dropout1d", "dropout2d",
        "dropout3d", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "unfold", "fold", "zeros_like", "ones_like",
        "full_like", "new_zeros", "new_ones", "new_full", "new_tensor", "zero", "fill", "real", "imag", "view_as_real",
        "view_as_complex", "meshgrid", "broadcast_to", "as_strided", "diagonal", "resolve_conj", "resolve_neg", "as_subclass", "to_dense", "numpy", "cpu", "cuda",
    }
)  # fmt: skip
# Each is its argument times a number from 0 to 1, which a kernel may know to one unit of 1.
_GATED = frozenset({"silu", "gelu", "mish", "hardswish"})
# Functions that give elements of a tensor as they are: gather first, cast then is the same and needs less memory.
_MOVING = frozenset({"__getitem__", "embedding", "view", "reshape", "t", "transpose", "permute", "detach", "expand"})


def _only_moves(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "embedding":
        # Called with a norm, an embedding writes to its table.
        return len(args) == 2 and all(not kwargs[key] for key in kwargs if key not in ("padding_idx",))
    return name in _MOVING and bool(args) and not kwargs


def is_question(name: str) -> bool:
    """Whether a torch function of this name only asks about a tensor."""
    return name in _QUESTIONS


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Ids of the tensors that a call writes to."""
    return tuple(id(target) for target in written_tensors(name, args, kwargs))


def written_tensors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call of the torch function of this name writes to."""
    targets: list[Any] = []
    if args and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or _is_augmented(name)):
        targets.extend(args[0] if isinstance(args[0], tuple | list) else [args[0]])
    if name in ("embedding", "embedding_bag") and argument(args, kwargs, 3, "max_norm", None) is not None:
        # It shortens the rows that it looks up.
        targets.append(argument(args, kwargs, 1, "weight", None))
    if kwargs.get("inplace") is True:
        targets.append(argument(args, kwargs, 0, "input", None))
    out = kwargs.get("out")
    targets.extend(out if isinstance(out, tuple | list) else [out])
    return [target for target in targets if isinstance(target, torch.Tensor)]


def _is_augmented(name: str) -> bool:
    return name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _may_follow_default_dtype(func: Callable[..., Any], arguments: Any) -> bool:
    """Whether floats that a call gives are of the default dtype: no float tensor goes in, and torch itself computes."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket) and not str(func).startswith("aten."):
        # A custom operator chooses its dtype itself, and may do more than compute.
        return False
    return all(
        tensor.dtype in _INTEGERS for tensor in pytree.tree_leaves(arguments) if isinstance(tensor, torch.Tensor)
    )


def _float64_by_default(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call gives, and in float64 what it would give in the default dtype.

    That is seen by its result, or by a number that is too large for the default dtype (`torch.finfo(x.dtype).min` where
    `x.dtype` says float64). The call is then made once more, in the first of the ways that the function takes: with float64
    for integers and booleans, for integers alone (booleans may be conditions), for numbers (`torch.where(mask, 1.0, 0.5)`
    has nothing else), or with a dtype, as factories have it.
    """
    result, overflow = None, None
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        if not _FLOAT_OVERFLOW.search(str(error)):
            raise
        overflow = error
    if overflow is None and not _holds_low(result):
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
        if not _holds_low(again):
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


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """`change` on each leaf of nested tuples, lists and dicts."""
    if isinstance(tree, tuple):
        if not tree:
            return tree
        items = [mapped(item, change) for item in tree]
        return type(tree)(items) if type(tree) is tuple else _same_tuple(tree, items)
    if type(tree) is list:
        return [mapped(item, change) for item in tree]
    if type(tree) is dict:
        return {key: mapped(item, change) for key, item in tree.items()}
    return change(tree)


def _same_tuple(tree: Any, items: list[Any]) -> Any:
    """A named tuple or one of torch's return types; torch.Size has no tensors and stays."""
    if isinstance(tree, torch.Size):
        return tree
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def _holds_low(tree: Any) -> bool:
    if isinstance(tree, torch.Tensor):
        return tree.dtype in _RAISED
    if isinstance(tree, tuple | list):
        return any(_holds_low(item) for item in tree)
    return isinstance(tree, dict) and any(_holds_low(item) for item in tree.values())


def _drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and bool(argument(args, kwargs, 1, "p", 0.5))


def _attention_drops(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "scaled_dot_product_attention":
        return bool(argument(args, kwargs, 4, "dropout_p", 0.0))
    return bool(argument(args, kwargs, 10, "dropout_p", 0.0)) and bool(kwargs.get("training", True))


def _recurrent_drops(args: tuple[Any, ...]) -> bool:
    """`_VF.lstm(input, hx, weights, has_biases, layers, dropout, train, …)`, or packed with batch sizes second."""
    numbers = [arg for arg in args if isinstance(arg, float)]
    flags = [arg for arg in args if isinstance(arg, bool)]
    return bool(numbers and numbers[0]) and len(flags) > 1 and flags[1]


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
