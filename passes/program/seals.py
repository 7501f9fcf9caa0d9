"""Seals: only the second of a folded pair can use the output of the first, whichever branch the forward takes.

The first of the pair returns its output inside a tensor subclass, the seal. Shape and dtype can be read from it.
Operations that only move data return a sealed value again. The second of the pair opens it. Anything else raises
`UnseenCall`. The subclass itself has no values, so code that bypasses `__torch_function__` finds an empty tensor and
raises too.

While torch traces or compiles, the seal is a plain Python object, which leaves nothing in the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from passes.program.matching import BATCH_NORMS, CONVOLUTIONS, scale_named
from passes.program.moves import METHODS, SHAPED_AS, Channels, move_named
from passes.program.pairs import FoldedPair
from passes.program.recording import asks_no_values
from passes.torch_private import NOTHING, frame_callback, is_tracing, make_subclass, without_subclasses, without_tracing


class SealedOutput:
    """The output of the first of a folded pair on its way to the second.

    Attributes:
        sealed_value: the output.
        sealed_by: the pair.
        sealed_dim: the channel dim.
        sealed_grad: whether gradients were on when it was made. A value that is made inside an autograd function, such
            as a reentrant checkpoint, and opened outside would lose its gradient.
    """

    __slots__ = ()
    sealed_value: torch.Tensor
    sealed_by: FoldedPair
    sealed_dim: int
    sealed_grad: bool


class SealedTensor(SealedOutput, torch.Tensor):
    """The seal in eager code: a tensor subclass."""

    __slots__ = ("sealed_by", "sealed_dim", "sealed_grad", "sealed_value")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return answer(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SealedTensor(shape={tuple(self.sealed_value.shape)}, dtype={self.sealed_value.dtype})"

    def __format__(self, text: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: Any) -> Any:
        raise self.sealed_by.went_astray()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.sealed_by.went_astray()


# The attributes and methods that a sealed value answers while torch traces.
SHAPE_AND_KIND = frozenset({
    "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_floating_point",
    "is_complex", "size", "dim", "ndimension", "numel", "nelement", "element_size", "itemsize", "nbytes", "get_device",
})  # fmt: skip


class TracedOutput(SealedOutput):
    """The seal while torch traces or compiles: not a tensor, so that it doesn't appear in the graph."""

    def __init__(self, value: torch.Tensor, pair: FoldedPair, dim: int) -> None:
        self.sealed_value = value
        self.sealed_by = pair
        self.sealed_dim = dim
        self.sealed_grad = is_grad_enabled()

    def __getattr__(self, name: str) -> Any:
        # During a copy, the attributes are not set yet.
        if name.startswith(("__", "sealed_")):
            raise AttributeError(name)
        if name in SHAPE_AND_KIND:
            return getattr(self.sealed_value, name)
        method = getattr(torch.Tensor, name)
        if not callable(method):
            raise self.sealed_by.went_astray()
        return functools.partial(_call_method, method, self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return answer(func, args, kwargs or {})

    def __len__(self) -> int:
        return len(self.sealed_value)


def _call_method(method: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    return answer(method, (value, *args), kwargs)


def _operator(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        return answer(getattr(torch.Tensor, name), (self, *args), {})

    return call


for _name in (
    "bool", "int", "float", "index", "iter", "getitem", "setitem", "array", "neg", "pos", "abs", "invert", "add", "radd",
    "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv", "matmul", "rmatmul", "pow",
    "rpow", "floordiv", "mod", "lt", "le", "gt", "ge", "and", "or", "xor", "eq", "ne",
):  # fmt: skip
    setattr(TracedOutput, f"__{_name}__", _operator(f"__{_name}__"))
TracedOutput.__hash__ = object.__hash__  # type: ignore[method-assign]

is_grad_enabled = torch.is_grad_enabled


def is_captured() -> bool:
    """Whether torch is tracing or compiling the running code, or may compile code that receives its result."""
    # After a graph break, for example, a compiled call runs some frames eagerly.
    return is_compiling() or is_tracing() or frame_callback() is not None


def sealed(value: torch.Tensor, pair: FoldedPair, dim: int = 1) -> Any:
    """Seal the output of the first of a pair; `dim` is its channel dim."""
    if type(value) is not torch.Tensor or is_captured():
        return TracedOutput(value, pair, dim)
    seal: Any = make_subclass(SealedTensor, NOTHING)
    seal.sealed_value = value
    seal.sealed_by = pair
    seal.sealed_dim = dim
    seal.sealed_grad = is_grad_enabled()
    return seal


def sealed_for(value: torch.Tensor, pair: FoldedPair, behind: int | None) -> Any:
    """Check the output of the first of a pair and seal it.

    Args:
        value: the output.
        pair: the pair.
        behind: the number of dims after the channel dim; None if the channel dim is 1, as for a BatchNorm.

    Raises:
        UnseenCall: the output has another number of dims than in the recorded runs, or is sealed by another pair.
    """
    if isinstance(value, SealedOutput):
        raise value.sealed_by.went_astray()
    if pair.rank is not None and value.dim() != pair.rank:
        raise pair.other_rank(value)
    return sealed(value, pair, 1 if behind is None else value.dim() - behind - 1)


def opened_from(value: Any, pair: FoldedPair, behind: int | None) -> torch.Tensor:
    """Open the input of the second of a pair.

    Args:
        value: the sealed value.
        pair: the pair.
        behind: the number of dims after the channel dim that the second expects; None if it expects dim 1, as a
            BatchNorm does.

    Raises:
        UnseenCall: the value isn't the output of the first, or its channels are in another dim.
    """
    if not isinstance(value, SealedOutput) or value.sealed_by is not pair:
        raise pair.came_from_elsewhere()
    if value.sealed_grad is not is_grad_enabled():
        raise pair.went_astray()
    opened = value.sealed_value
    wanted = 1 if behind is None else opened.dim() - behind - 1
    if value.sealed_dim != wanted:
        raise pair.other_dim(value.sealed_dim, wanted)
    return opened


def given_on(value: torch.Tensor, pair: FoldedPair, dim: int = 1) -> Any:
    """Return the output of a second whose work the first does: sealed if there is a farther pair, otherwise open."""
    return value if pair.farther is None else sealed(value, pair.farther, dim)


def answer(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Handle a torch call that has a sealed value among its arguments.

    Raises:
        UnseenCall: the call is not the second of the pair, doesn't just move data, and doesn't just read shape or
            dtype.
    """
    seals = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, SealedOutput)]
    seal = seals[0]
    if len(seals) == 1 or getattr(func, "__name__", "") in SHAPED_AS:
        if func in BATCH_NORMS:
            return _normalised(func, seal, {**dict(zip(BATCH_NORMS[func], args, strict=False)), **kwargs})
        if func in CONVOLUTIONS:
            weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
            layer = getattr(weight, "sealed_layer", None)
            if layer is not None:
                return layer.compute(func, args, kwargs)
        if (operation := scale_named(func)) is not None and len(args) == 2:
            return _scaled(operation, seal, args)
        if args and args[0] is seal:
            name = move_named(func) or _method(func)
            if name is not None:
                return _moved(seal, name, func, args[1:], kwargs)
        if _asks(func, seal, args, kwargs):
            opened = pytree.tree_map_only(SealedOutput, lambda leaf: leaf.sealed_value, (tuple(args), dict(kwargs)))
            return func(*opened[0], **opened[1])
    raise seal.sealed_by.went_astray()


def _normalised(func: Any, seal: SealedOutput, given: dict[str, Any]) -> Any:
    """Handle a functional BatchNorm, which its running mean identifies."""
    pair = seal.sealed_by
    if given.get("input") is not seal:
        raise pair.went_astray()
    nearer = getattr(given.get("running_mean"), "sealed_pair", None)
    if pair.leads and nearer is not None and nearer.farther is pair and nearer.is_named_by(given):
        # A second BatchNorm before the same layer.
        check_function(nearer, given)
        return sealed(opened_from(seal, pair, None), nearer)
    if pair.leads or not pair.is_named_by(given):
        raise pair.went_astray()
    opened = opened_from(seal, pair, None)
    if not pair.carried:
        with without_subclasses():
            if torch.compiler.is_dynamo_compiling():
                # The captured graph runs without the checks, on unsealed tensors.
                mean = given[pair.argument]
                given = {**given, pair.argument: torch.ops.aten.alias.default(mean)}
            output: torch.Tensor = F.batch_norm(**{**given, "input": opened})
        is_frozen = not given.get("training", False) and not torch.compiler.is_compiling()
        if pair.trained and is_frozen and output.requires_grad:
            output.register_hook(pair.warn_of_lost_gradient)
        return output
    check_function(pair, given)
    return given_on(opened, pair)


def check_function(pair: FoldedPair, given: Mapping[str, Any]) -> None:
    """Check that a functional BatchNorm whose work a layer does is called as it was at the time of the fold.

    Raises:
        UnseenCall: its tensors, training flag or `eps` have changed.
    """
    if pair.is_given_back:
        raise pair.other_tensors(pair.norm_path)
    if given.get("training", False):
        raise pair.in_training()
    if given.get("eps", 1e-5) != pair.eps:
        raise pair.other_eps()


def _scaled(operation: str, seal: SealedOutput, args: Sequence[Any]) -> Any:
    pair = seal.sealed_by
    other = args[1] if args[0] is seal else args[0]
    if args[0] is not seal:
        operation = {"sub": "rsub", "rsub": "sub", "div": ""}.get(operation, operation)
    if pair.operation != operation or not pair.is_named_by({pair.argument: other}):
        raise pair.went_astray()
    if pair.is_given_back:
        raise pair.other_tensors(pair.norm_path)
    opened = opened_from(seal, pair, pair.behind)
    return given_on(opened, pair, seal.sealed_dim)


def _moved(seal: SealedOutput, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    value, pair, dim = seal.sealed_value, seal.sealed_by, seal.sealed_dim
    if is_compiling() or not is_tracing():
        behind = Channels(value.dim(), dim, value.shape[dim]).behind(name, args, kwargs)
    else:
        # In a trace, sizes are tensors, and reading one would freeze it.
        with without_tracing():
            sizes, named = _numbers(args), {key: _numbers(size) for key, size in kwargs.items()}
            behind = Channels(value.dim(), dim, value.shape[dim]).behind(name, sizes, named)
    if behind is None or seal.sealed_grad is not is_grad_enabled():
        raise pair.went_astray()
    return sealed(func(value, *args, **kwargs), pair, behind.dim)


def _numbers(argument: Any) -> Any:
    """The argument with numbers instead of the tensors that represent sizes in a trace."""
    if isinstance(argument, torch.Tensor) and not argument.dim():
        return int(argument)
    return [_numbers(item) for item in argument] if isinstance(argument, list | tuple) else argument


def _method(func: Any) -> str | None:
    name = getattr(func, "__name__", "")
    return name if name in METHODS and getattr(torch.Tensor, name) is func else None


def _asks(func: Any, seal: SealedOutput, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if getattr(func, "__name__", "") in SHAPED_AS:
        return args[0] is not seal
    return asks_no_values(
        func, *pytree.tree_map_only(SealedOutput, lambda leaf: leaf.sealed_value, (args, dict(kwargs)))
    )


def resealed(value: torch.Tensor, like: Any) -> Any:
    """Seal a value like another one; returned as is if that one has no seal."""
    return sealed(value, like.sealed_by, like.sealed_dim) if isinstance(like, SealedOutput) else value


def opened(values: Any) -> Any:
    """Replace the sealed values in any containers by the tensors inside."""
    if not any(isinstance(leaf, SealedOutput) for leaf in pytree.tree_leaves(values)):
        return values
    return pytree.tree_map(lambda leaf: leaf.sealed_value if isinstance(leaf, SealedOutput) else leaf, values)
