"""Run a model in float64 without copying it.

`Float64Mode` intercepts every call of a torch function while it is active and raises it to float64: floating-point
tensors among the arguments, dtype arguments, conversions (`.float()`, `.to(torch.float16)`), factories, and the value
of `x.dtype`. `.double()` on a copy does not change the conversions in a forward; this mode does.

- Parameters are cast call by call, so that at most one of them is held in float64 at a time.
- Every other tensor of lower precision (a buffer, an attribute) gets one *shadow* in float64 for all later calls.
  Writes go to the shadow: the model's own buffers stay unchanged.
- Results in torch's default dtype (`torch.zeros(3)`, `torch.tensor(0.1)`, a quotient of integers) are float64 too. The
  default itself belongs to the whole process and stays: `torch.get_default_dtype()` returns the same as before.
- Random numbers are drawn as the original draws them, in its own dtype from the same stream, and cast afterwards
  (`OwnDraws`).
- Autocast has no effect.

The mode does not see into TorchScript, compiled code, or kernels that accept float32 only: those raise, or show up in
`Float64Mode.lowered`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from passes.graph.recording import METADATA, argument, name_of
from passes.torch_private import OpOverload, OpOverloadPacket, schema_of

_RAISED = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
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
_FLOAT_OVERFLOW = re.compile(r"converted to type (?!u?int)\S+ without overflow")
_INTEGERS = frozenset(
    {
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
        torch.bool,
    }
)  # fmt: skip
# Functions that return elements of a tensor unchanged. Moving the elements before casting or perturbing them gives the
# same result and needs less memory.
_DATA_MOVEMENT = frozenset(
    {"__getitem__", "embedding", "view", "reshape", "t", "transpose", "permute", "detach", "expand"}
)
# Functions that only ask about a tensor, so that it needs no cast.
READS_METADATA = METADATA | {
    "storage_offset", "data_ptr", "__hash__", "requires_grad_", "is_shared", "is_nonzero", "is_inference", "is_pinned",
    "register_hook", "retain_grad",
}  # fmt: skip
# The functions that choose by scores; `max` and `min` only with a dim.
_CHOOSING = frozenset({"topk", "sort", "argsort", "msort", "argmax", "argmin", "nms"})


def raised(dtype: torch.dtype) -> torch.dtype:
    """Map a lower-precision dtype to float64 or complex128, and any other dtype to itself."""
    return _RAISED.get(dtype, dtype)


class OwnDraws(TorchDispatchMode):
    """Inside a run in float64, draws random numbers in the model's own dtype, and casts them."""

    supports_higher_order_operators = True

    def __init__(self, own_dtype: torch.dtype) -> None:
        super().__init__()
        # The number of operators that drew.
        self.count = 0
        # The dtype that the current call of a torch function asks for; None if it names none.
        self.asked: torch.dtype | None = None
        own_complex = {torch.float16: torch.complex32, torch.float64: torch.complex128}.get(own_dtype, torch.complex64)
        self._own = {torch.float64: own_dtype, torch.complex128: own_complex}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, schema = kwargs or {}, schema_of(func)
        if schema is None or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **given)
        given = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **given}
        # Attention draws only for its dropout, which is 0 by default.
        if any(one.name == "dropout_p" for one in schema.arguments) and not given.get("dropout_p"):
            return func(**given)
        self.count += 1
        if func is torch.ops.aten.native_dropout.default:
            values, share = given["input"], 1 - given["p"]
            _, mask = func(torch.ones_like(values, dtype=self._own.get(values.dtype)), given["p"], given["train"])
            return values * mask / share if share else torch.zeros_like(values), mask
        lowered = tree_map(self._lowered, given)
        result = func(**lowered)
        written = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        for name in written:
            given[name].copy_(lowered[name])
            if result is lowered[name]:
                return given[name]
        return tree_map(lambda leaf: leaf.to(raised(leaf.dtype)) if isinstance(leaf, torch.Tensor) else leaf, result)

    def _lowered(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(self._own.get(leaf.dtype, leaf.dtype))
        return (self.asked or self._own.get(leaf, leaf)) if isinstance(leaf, torch.dtype) else leaf


class Float64Mode(TorchFunctionMode):
    """Inside, every torch call of this thread computes in float64."""

    def __init__(
        self,
        *,
        own_dtype: torch.dtype = torch.float32,
        leaf_parameters: bool = False,
        written: Iterable[nn.Parameter] = (),
        draws: bool = True,
    ) -> None:
        """Prepare a run.

        Args:
            own_dtype: the dtype in which the model draws its random numbers.
            leaf_parameters: keep a float64 leaf for every parameter that is used (twice the memory of the parameters),
                so that gradients are float64 too: `mode.shadow(parameter)` is the leaf.
            written: parameters that the model writes to; each gets a shadow, like a buffer.
            draws: whether the model may draw random numbers.
        """
        super().__init__()
        self._written = frozenset(map(id, written))
        self._draws = OwnDraws(own_dtype) if draws else None
        self.leaf_parameters = leaf_parameters
        # The names of the functions whose floating-point results were not float64.
        self.lowered: set[str] = set()
        # The machine epsilon of the least precise dtype that was raised. The original's own rounding is measured by it,
        # whatever the dtype of the outputs.
        self.coarsest = 0.0
        # Whether a call chose or ordered elements by scores.
        self.chooses = False
        # Each original is kept with its shadow; otherwise its id could name another tensor later.
        self._shadows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> Float64Mode:
        super().__enter__()
        if self._draws is not None:
            self._draws.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._draws is not None:
            self._draws.__exit__(*error)
        super().__exit__(*error)

    def saw(self, dtype: torch.dtype) -> None:
        if dtype in _RAISED:
            self.coarsest = max(self.coarsest, torch.finfo(dtype).eps)

    def shadow(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The float64 shadow of a tensor; None if the run made none."""
        kept = self._shadows.get(id(tensor))
        return None if kept is None else kept[1]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.chooses |= _chooses(name_of(func), args, kwargs or {})
        with _without_autocast(self.saw):
            return self._run(func, args, kwargs or {})

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if name in ("__get__", "__set__"):
            return self._attribute(func, args)
        if name in READS_METADATA:
            return func(*args, **kwargs)
        if name in _CONVERSIONS or name in _COMPLEX_CONVERSIONS:
            dtype = torch.complex128 if name in _COMPLEX_CONVERSIONS else torch.float64
            self.saw(_CONVERSIONS.get(name, torch.float32))
            return self._raise(args[0]).to(dtype, **kwargs)
        if self._is_plain_parameter(moved_argument(name, args, kwargs)):
            return self._raise_result(name, func(*args, **kwargs))
        return self._in_float64(name, func, args, kwargs)

    def _in_float64(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = written_ids(name, args, kwargs)
        new_args, new_kwargs = tree_map(functools.partial(self._raise_argument, written=written), (args, kwargs))
        if self._draws is not None:
            leaves = pytree.tree_leaves((args, kwargs))
            self._draws.asked = next((leaf for leaf in leaves if isinstance(leaf, torch.dtype)), None)
        if not written and _may_follow_default_dtype(func, (new_args, new_kwargs)):
            drawn = self._drawn()
            result = _float64_by_default(func, new_args, new_kwargs, lambda: self._drawn() > drawn)
            if self._drawn() > drawn:
                return tree_map(self._raise, result)
        else:
            result = func(*new_args, **new_kwargs)
        for given, used in ((args[:1], new_args[:1]), ((kwargs.get("out"),), (new_kwargs.get("out"),))):
            # `self.total += x` binds the result to the buffer's name, which must keep the model's own tensor.
            if written and given and result is used[0]:
                return given[0]
        return self._raise_result(name, result)

    def _drawn(self) -> int:
        return 0 if self._draws is None else self._draws.count

    def _attribute(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        tensor = args[0]
        if attribute in _ALIASES:
            keep = attribute == "data" and name_of(func) == "__set__"
            tensor = self._raise_argument(tensor, written=(id(tensor),) if keep else ())
            return func(tensor, *tree_map(self._raise_argument, args[1:]))
        result = func(*args)
        if isinstance(result, torch.dtype):
            return raised(result)
        return self._raise(result) if isinstance(result, torch.Tensor) else result

    def _is_plain_parameter(self, tensor: Any) -> bool:
        """Whether this is a parameter without a shadow: the run neither writes to it nor holds it as a float64 leaf."""
        held = self.leaf_parameters or id(tensor) in self._shadows or id(tensor) in self._written
        return isinstance(tensor, nn.Parameter) and not held

    def _raise_argument(self, value: Any, written: tuple[int, ...] = ()) -> Any:
        if isinstance(value, torch.Tensor):
            return self._raise(value, keep=id(value) in written)
        if isinstance(value, torch.dtype):
            self.saw(value)
            return raised(value)
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
            if name not in _DATA_MOVEMENT and not isinstance(value, nn.Parameter):
                self.lowered.add(name)
            return value.to(raised(value.dtype))

        if isinstance(result, torch.dtype):
            return raised(result)
        return tree_map(to_float64, result)


def _may_follow_default_dtype(func: Callable[..., Any], arguments: Any) -> bool:
    """Whether a call may return floats of torch's default dtype: none of its tensor arguments is a float."""
    if isinstance(func, OpOverload | OpOverloadPacket) and not str(func).startswith("aten."):
        # A custom operator chooses its dtype itself, and may have side effects.
        return False
    return all(
        tensor.dtype in _INTEGERS for tensor in pytree.tree_leaves(arguments) if isinstance(tensor, torch.Tensor)
    )


def _float64_by_default(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], has_drawn: Callable[[], bool]
) -> Any:
    """Make a call so that it returns float64 if it would return the default dtype, unless it draws random numbers.

    Two symptoms show the default dtype: the dtype of the result, and an error about a number that is too large for it
    (`torch.finfo(x.dtype).min` where `x.dtype` is float64). The call is then repeated with integers and booleans cast to
    float64, and if that doesn't help, with a dtype argument, as for factories.
    """
    result, overflow = None, None
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        if not _FLOAT_OVERFLOW.search(str(error)):
            raise
        # With its traceback, the error would keep this frame alive, and every tensor in it.
        overflow = error.with_traceback(None)
    if overflow is None and (has_drawn() or not _has_low_precision(result)):
        return result
    is_complex = isinstance(result, torch.Tensor) and result.is_complex()
    ways = [(args, {**kwargs, "dtype": torch.complex128 if is_complex else torch.float64})]
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        ways.insert(0, tree_map(_raise_integer, (args, kwargs)))
    for other_args, other_kwargs in ways:
        try:
            again = func(*other_args, **other_kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue
        if not _has_low_precision(again):
            return again
    if overflow is not None:
        raise overflow
    return result


def _raise_integer(leaf: Any) -> Any:
    return leaf.to(torch.float64) if isinstance(leaf, torch.Tensor) and leaf.dtype in _INTEGERS else leaf


def _has_low_precision(tree: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype in _RAISED for leaf in pytree.tree_leaves(tree))


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


def moved_argument(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument whose elements a call returns unchanged; None if the call does more than move elements."""
    if name == "embedding":
        # With a norm, an embedding writes to its table.
        is_plain = len(args) == 2 and not any(value for key, value in kwargs.items() if key != "padding_idx")
        return args[1] if is_plain else None
    return args[0] if name in _DATA_MOVEMENT and args and not kwargs else None


def written_ids(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """The ids of the tensors that a call of the torch function of this name writes to."""
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
    return tuple(id(target) for target in targets if isinstance(target, torch.Tensor))


def _is_augmented(name: str) -> bool:
    return name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")


def _chooses(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return name in _CHOOSING or (name in ("max", "min") and isinstance(argument(args, kwargs, 1, "dim", None), int))
