"""Forwards that stand in a module's `__dict__` where the class' own forward goes on working.

A forward may take another branch than in the runs that were seen, and a convolution that was folded together with a
BatchNorm is only right if its output goes into that BatchNorm and nowhere else. So the convolution gives out its output
under a seal that its BatchNorm alone can open. What was seen runs as before; anything else that looks at the values
raises instead of answering wrong.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.errors import UnseenCall
from passes.graph.formats import FORMATS, ORDERS, DimOrder, is_taken_for_last
from passes.graph.storage import has_strides
from passes.program.moves import METHODS, SHAPED_AS, Channels, move_named


class InstanceForward:
    """Base of the callables that stand in a module's `__dict__` as its `forward`; copied and pickled with the module."""

    # Whether a call of the module is one operation, which no graph looks into.
    is_atom = False
    owner: nn.Module

    def _class_forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.owner).forward(self.owner, *args, **kwargs)

    @property
    def __code__(self) -> types.CodeType:
        # torch.export asks the forward of the root for it, to name its inputs.
        return class_code(self.owner)

    def _class_signature(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(type(self.owner).forward, self.owner))


class FoldedPair:
    """One convolution and the BatchNorm it was folded together with; both hold it, and copies of both hold one copy.

    Attributes:
        conv_path, norm_path: where the two stand in the tree.
        leads: whether the BatchNorm stands in front of the convolution.
        rank: the dims of the convolution's input that both were seen to take for one thing: on others the BatchNorm's
            channels may not be the convolution's. None where they are the same on any.
        dims: the spatial dims of the convolution, behind that of the channels.
        trained: whether the convolution had a bias that was trained, and isn't any more.
    """

    def __init__(
        self, conv_path: str, norm_path: str, rank: int | None, dims: int, *, leads: bool = False, trained: bool = False
    ) -> None:
        self.conv_path = conv_path
        self.norm_path = norm_path
        self.leads = leads
        self.rank = rank
        self.dims = dims
        self.trained = trained
        self.warned = False

    @property
    def first(self) -> str:
        """The path of the one whose output goes to the other."""
        return self.norm_path if self.leads else self.conv_path

    @property
    def second(self) -> str:
        """The path of the other."""
        return self.conv_path if self.leads else self.norm_path

    def opened(self, value: Any) -> SealedOutput:
        """What the first one of the pair gave out.

        Raises:
            UnseenCall: it is anything else.
        """
        if not isinstance(value, SealedOutput) or value.sealed_by is not self:
            raise UnseenCall(
                f"{self.second} was folded together with {self.first} and is given a value that doesn't come from it:"
                " give optimize() example inputs that take this branch, or leave the pass out.",
                (self.first, self.second),
            )
        return value

    def other_rank(self, input: torch.Tensor) -> UnseenCall:
        """The error where the convolution is given an input of other dims."""
        return UnseenCall(
            f"{self.conv_path} was folded together with {self.norm_path} for {self.rank}-D input and is given"
            f" {input.dim()}-D input: leave the pass out."
        )

    def other_dim(self, dim: int, wanted: int) -> UnseenCall:
        """The error where the channels come to the second one in another dim than it takes them from."""
        return UnseenCall(
            f"{self.first} was folded together with {self.second}, which takes dim {wanted} for the channels, and they"
            f" come to it in dim {dim}: give optimize() example inputs that take this branch, or leave the pass out."
        )

    def went_astray(self) -> UnseenCall:
        """The error where something else than the second one uses the output of the first."""
        return UnseenCall(
            f"{self.first} was folded together with {self.second}, and its output was used without it: give"
            " optimize() example inputs that take this branch, or leave the pass out.",
            (self.first, self.second),
        )

    def other_tensors(self, path: str) -> UnseenCall:
        """The error where one of the two, at the path, has parameters that the rewrite took from it."""
        return UnseenCall(
            f"{path} has parameters again that went into another module when {self.conv_path} was folded together with"
            f" {self.norm_path}: load weights into the original model, or give them to it, and optimize it again."
        )

    def warn_of_lost_gradient(self, gradient: torch.Tensor) -> None:
        """A hook of the BatchNorm's output in eval, where the original's bias would get a gradient: says so once."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"a gradient went back through {self.norm_path} in eval, where it would train the bias of"
                f" {self.conv_path}: optimize() moved that into the running mean, and it isn't trained. To train with this"
                " BatchNorm in eval, put it in eval before optimize().",
                UserWarning,
                stacklevel=2,
            )

    def refuse_reset(self) -> NoReturn:
        """Stands in a BatchNorm's `__dict__` as its `reset_running_stats`, where its statistics are in other weights."""
        raise UnseenCall(
            f"the running statistics of {self.norm_path} went into {self.conv_path} when the two were folded together:"
            " reset them in the original model and optimize that again."
        )

    def in_training(self) -> UnseenCall:
        """The error where the BatchNorm is to take the statistics of the batch, which the convolution's weights hold no
        place for."""
        return UnseenCall(
            f"{self.norm_path} was put in training, and it was folded together with {self.conv_path} as it is in eval: put"
            ' it in eval, or optimize the original model with mode="training".'
        )

    def other_eps(self) -> UnseenCall:
        """The error where the BatchNorm's `eps`, which is in the convolution's weights, was set anew."""
        return UnseenCall(
            f"{self.norm_path} has another eps than when it was folded into {self.conv_path}: set it in the original"
            " model and optimize that again."
        )


# What may be asked of the sealed tensor: the answers are the same before and behind the BatchNorm.
SHAPE_AND_KIND = frozenset({
    "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_floating_point",
    "is_complex", "size", "dim", "ndimension", "numel", "nelement", "element_size", "itemsize", "nbytes", "get_device",
})  # fmt: skip


class SealedOutput:
    """The output of the first of a folded pair on the way to the second: its shape and kind can be asked for, its values
    can't.

    It is no tensor, so that no operation of torch computes on it by any way. `isinstance` in Python code takes it for
    one, as it does the tensor; functions written in C that test its class before they read its memory must not.

    What only moves the values gives one that is sealed likewise.

    Attributes:
        sealed_value: the output.
        sealed_by: the convolution and its BatchNorm.
        sealed_dim: the one that holds the channels.
    """

    __slots__ = ("sealed_by", "sealed_dim", "sealed_value")

    def __init__(self, value: torch.Tensor, pair: FoldedPair, dim: int = 1) -> None:
        self.sealed_value = value
        self.sealed_by = pair
        self.sealed_dim = dim

    def __getattr__(self, name: str) -> Any:
        # While it is being copied, it has nothing yet.
        if name.startswith("__") or name.startswith("sealed_"):
            raise AttributeError(name)
        if name in METHODS:
            return functools.partial(self._moved, name, getattr(self.sealed_value, name))
        if name not in SHAPE_AND_KIND:
            raise self.sealed_by.went_astray()
        return getattr(self.sealed_value, name)

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        sealed = next(leaf for leaf in leaves if isinstance(leaf, SealedOutput))
        name = getattr(func, "__name__", "")
        if name in SHAPE_AND_KIND:
            return func(sealed.sealed_value)
        if name in SHAPED_AS and len(args) == 2 and isinstance(args[0], torch.Tensor) and args[1] is sealed:
            return func(args[0], sealed.sealed_value)
        move = move_named(func)
        if move is not None and args and args[0] is sealed:
            return sealed._moved(move, functools.partial(func, sealed.sealed_value), *args[1:], **kwargs)
        raise sealed.sealed_by.went_astray()

    def _moved(self, name: str, move: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> SealedOutput:
        value, pair, dim = self.sealed_value, self.sealed_by, self.sealed_dim
        behind = Channels(value.dim(), dim, value.shape[dim]).behind(name, args, kwargs)
        if behind is None:
            raise pair.went_astray()
        return SealedOutput(move(*args, **kwargs), pair, behind.dim)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        caller = sys._getframe(1)
        name = caller.f_globals.get("__name__", "")
        if name.startswith(_INTERNAL):
            return SealedOutput
        if name == "abc" or _asks_isinstance(caller):
            return torch.Tensor
        if not name:
            # An expression that torch.compile evaluates to guard its code.
            return SealedOutput
        raise self.sealed_by.went_astray()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self.sealed_by.went_astray()

    def __len__(self) -> int:
        return len(self.sealed_value)

    __bool__ = __int__ = __float__ = __index__ = __iter__ = __getitem__ = __setitem__ = __array__ = _refuse
    __neg__ = __pos__ = __abs__ = __invert__ = _refuse
    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = _refuse
    __mul__ = __rmul__ = __imul__ = __truediv__ = __rtruediv__ = __itruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __floordiv__ = __mod__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __xor__ = _refuse
    __eq__: Callable[..., Any] = _refuse
    __ne__: Callable[..., Any] = _refuse
    __hash__ = object.__hash__


def sealed_for(value: torch.Tensor, pair: FoldedPair, behind: int | None) -> SealedOutput:
    """What the first of a pair gives out, where that is a function in a graph.

    Args:
        value: the output.
        pair: the two.
        behind: how many dims there are behind that of the channels; None for a BatchNorm, which has them in dim 1.

    Raises:
        UnseenCall: it has other dims than in the runs that were seen.
    """
    if isinstance(value, SealedOutput):
        raise value.sealed_by.went_astray()
    if pair.rank is not None and value.dim() != pair.rank:
        raise pair.other_rank(value)
    return SealedOutput(value, pair, 1 if behind is None else value.dim() - behind - 1)


def opened_from(value: Any, pair: FoldedPair, behind: int | None) -> torch.Tensor:
    """What the second of a pair is given, where that is a function in a graph.

    Args:
        value: what comes to it.
        pair: the two.
        behind: how many dims there are behind that of the channels; None for a BatchNorm, which takes dim 1 for it.

    Raises:
        UnseenCall: it isn't what the first one gave out, or its channels stand in another dim.
    """
    sealed = pair.opened(value)
    opened = sealed.sealed_value
    wanted = 1 if behind is None else opened.dim() - behind - 1
    if sealed.sealed_dim != wanted:
        raise pair.other_dim(sealed.sealed_dim, wanted)
    return opened


# Modules that ask a seal for its class and mean the seal, or get the same answer for both: it is no parameter.
_INTERNAL = (
    "passes.", "optimizer.", "exporters.", "torch._dynamo", "torch._guards", "torch._subclasses", "torch.fx",
    "torch.nn.parameter", "copyreg",
)  # fmt: skip
# The tensor types from before `torch.Tensor`: their `isinstance` reads the memory of what says to be a tensor.
_TYPED = frozenset(cls.__name__ for cls in torch._tensor_classes)


def _asks_isinstance(frame: types.FrameType) -> bool:
    """Whether the call that the frame is at is one of the builtin `isinstance`, by a class that is no typed tensor."""
    code = frame.f_code
    if "isinstance" in frame.f_globals or not _TYPED.isdisjoint(code.co_names):
        return False
    return frame.f_lasti // 2 in _isinstance_instructions(code)


@functools.lru_cache(maxsize=1024)
def _isinstance_instructions(code: types.CodeType) -> frozenset[int]:
    """The indices of the instructions whose expression starts where one takes the builtin `isinstance`."""
    starts = _starts(code)
    taken = {
        starts[instruction.offset // 2]
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "isinstance"
    } - {(None, None)}
    return frozenset(index for index, start in enumerate(starts) if start in taken)


def _starts(code: types.CodeType) -> list[tuple[int | None, int | None]]:
    """Line and column where the expression of each instruction starts; a call's and its function's are the same."""
    return [(line, column) for line, _, column, _ in code.co_positions()]


class FoldedConvForward(InstanceForward):
    """The forward of a convolution that was folded together with a BatchNorm behind it, in front of it, or both.

    Attributes:
        pair: it and the BatchNorm behind it; None without.
        front: it and the BatchNorm in front of it; None without.
    """

    is_atom = True

    def __init__(self, owner: nn.Module, pair: FoldedPair | None, front: FoldedPair | None = None) -> None:
        self.owner = owner
        self.pair = pair
        self.front = front
        self.has_bias = owner._parameters.get("bias") is not None

    def __call__(self, input: Any, *size: Any, **named: Any) -> Any:
        return self.through(type(self.owner).forward, input, *size, **named)

    def through(self, layer: Callable[..., Any], input: Any, *size: Any, **named: Any) -> Any:
        """The convolution as `layer(owner, input, …)` computes it, with the checks of where its values go."""
        # The way of every call of every pair: as few steps as there can be. Transposed ones may be given an output size.
        owner, pair, front = self.owner, self.pair, self.front
        if front is not None:
            input = opened_from(input, front, front.dims)
        if pair is None:
            return layer(owner, input, *size, **named)
        if not self.has_bias and owner._parameters.get("bias") is not None:
            raise pair.other_tensors(pair.conv_path)
        if pair.rank is not None and input.dim() != pair.rank:
            raise pair.other_rank(input)
        return SealedOutput(layer(owner, input, *size, **named), pair, input.dim() - pair.dims - 1)

    def compute(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The convolution alone, with nobody looking where its output goes."""
        output: torch.Tensor = self._class_forward(*args, **kwargs)
        return output


class FoldedNormForward(InstanceForward):
    """The forward of a BatchNorm that was folded together with the convolution before it, or behind it.

    Attributes:
        carried: whether the convolution does the BatchNorm's work, and nothing is left of it but the check.
        farther: the convolution and another BatchNorm, on the side of this one where the convolution isn't; None
            without. The convolution does the work of both: what lies between them is right for neither alone.
        eps: the BatchNorm's, when it was folded.
    """

    is_atom = True

    def __init__(self, owner: nn.Module, pair: FoldedPair, *, carried: bool) -> None:
        self.owner = owner
        self.pair = pair
        self.carried = carried
        self.farther: FoldedPair | None = None
        self.eps = owner.eps

    def with_farther(self, pair: FoldedPair) -> FoldedNormForward:
        """The same with another BatchNorm that the convolution was folded together with, beyond this one."""
        twin = copy.copy(self)
        twin.farther = pair
        return twin

    def __call__(self, input: Any) -> Any:
        pair, farther = self.pair, self.farther
        if pair.leads:
            self._check_norm()
            return sealed_for(input if farther is None else opened_from(input, farther, None), pair, None)
        opened = opened_from(input, pair, None)
        if not self.carried:
            output = self.compute(opened)
            if pair.trained and output.requires_grad and self._is_frozen():
                output.register_hook(pair.warn_of_lost_gradient)
            return output
        self._check_norm()
        return opened if farther is None else SealedOutput(opened, farther)

    def _check_norm(self) -> None:
        # `functional_call` and the like put tensors in place that no hook sees.
        owner, pair = self.owner, self.pair
        parameters, buffers = owner._parameters, owner._buffers
        if (
            parameters.get("weight") is not None
            or parameters.get("bias") is not None
            or buffers.get("running_mean") is not None
            or buffers.get("running_var") is not None
        ):
            raise pair.other_tensors(pair.norm_path)
        if owner.eps != self.eps:
            raise pair.other_eps()
        if owner.training:
            raise pair.in_training()

    def _is_frozen(self) -> bool:
        """Whether the running mean is what is taken off, in code that runs as it is written."""
        frozen = not self.owner.training and self.owner._buffers.get("running_mean") is not None
        return frozen and not torch.compiler.is_compiling()

    def compute(self, input: torch.Tensor) -> torch.Tensor:
        """The BatchNorm alone, wherever the input comes from."""
        if self.carried:
            return input
        output: torch.Tensor = self._class_forward(input)
        return output


class LentForward(InstanceForward):
    """The forward of a layer whose tensors a function used when it was folded together with another: it has none.

    Only where the function stands what is left of the layer is right. A call of the layer itself was never seen.

    Attributes:
        path: where the layer stands in the tree.
        conv_path, norm_path: where the convolution and the BatchNorm stand, of which at least one is the function.
    """

    is_atom = True

    def __init__(self, owner: nn.Module, path: str, conv_path: str, norm_path: str) -> None:
        self.owner = owner
        self.path = path
        self.conv_path = conv_path
        self.norm_path = norm_path

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnseenCall(
            f"{self.path} is called, and its tensors were changed when {self.conv_path} was folded together with"
            f" {self.norm_path}, where they are used without a call: give optimize() example inputs that take this branch,"
            " or leave the pass out."
        )


def refuse_checkpoint(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """A hook of a module that has given parameters away: weights from before would meet those that took them in."""
    registered = {**module._parameters, **module._buffers}
    found = next(
        (prefix + name for name, held in registered.items() if held is None and prefix + name in state_dict), None
    )
    if found is not None:
        error_msgs.append(
            f"{found} was folded into another weight when the model was optimized: load the weights into the original"
            " model and optimize it again."
        )


class SealCheckingForward(InstanceForward):
    """The forward of the module that calls both: as it was, and no seal leaves it."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._class_forward(*args, **kwargs)
        _refuse_seals(outputs, depth=4)
        return outputs

    @property
    def __signature__(self) -> inspect.Signature:
        # Code that asks a model for its arguments reads them here.
        return self._class_signature()


def _refuse_seals(value: Any, depth: int) -> None:
    """See that no seal stands in a value, its containers or its dataclasses."""
    leaves = (value,) if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    for leaf in leaves:
        if isinstance(leaf, SealedOutput):
            raise leaf.sealed_by.went_astray()
        for name in getattr(type(leaf), "__dataclass_fields__", ()) if depth else ():
            _refuse_seals(getattr(leaf, name, None), depth - 1)


class AroundForward(InstanceForward):
    """Base of the forwards around whatever else is the module's forward, that change nothing of what is computed.

    Attributes:
        inner: what stood in the module's `__dict__`; None for the forward of its class.
    """

    inner: Any

    def around(self, inner: Any) -> AroundForward:
        """The same around another forward."""
        twin = copy.copy(self)
        twin.inner = inner
        return twin

    def _inner_forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._class_forward if self.inner is None else self.inner
        return forward(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return self._class_signature() if self.inner is None else inspect.signature(self.inner)


class ContiguousInput(AroundForward):
    """The forward of a convolution that computes in contiguous format, in the midst of others in channels_last.

    A convolution goes by the format of its input as much as by that of its weight.
    """

    is_atom = True

    def __init__(self, owner: nn.Module, inner: Any) -> None:
        self.owner = owner
        self.inner = inner

    def __call__(self, input: torch.Tensor, *size: Any, **named: Any) -> Any:
        return self._inner_forward(_back_as_it_came(input, input.contiguous()), *size, **named)


class ChannelsLastInput(AroundForward):
    """The forward of a convolution that computes in channels_last, though neither its weight nor its input is in it.

    The weight stays as it is: the convolution brings a copy of it into the format of the input for the time of a call.
    """

    is_atom = True

    def __init__(self, owner: nn.Module, inner: Any) -> None:
        self.owner = owner
        self.inner = inner

    def __call__(self, input: Any, *size: Any, **named: Any) -> Any:
        return self._inner_forward(_back_as_it_came(input, _in_channels_last(input)), *size, **named)


class DrawsInOrder(AroundForward):
    """The forward of a module that draws random numbers for the elements of maps, in the order of contiguous ones.

    A generator fills memory from its beginning to its end: in channels_last the same numbers fall on other elements.
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


# What draws a number for each element of its first argument.
_DRAWS = frozenset({
    "dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "rrelu", "rrelu_", "gumbel_softmax", "rand_like",
    "randn_like", "randint_like", "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_",
    "normal_", "random_", "uniform_",
})  # fmt: skip
# Where these are told whether they are in training: behind so many arguments.
_TRAINS_BEHIND = {"dropout": 2, "dropout_": 2, "alpha_dropout": 2, "alpha_dropout_": 2, "rrelu": 3, "rrelu_": 3}


def draws_for_last(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a torch function of that name draws a number for each element of a map in channels_last."""
    if name not in _DRAWS or not args or not isinstance(args[0], torch.Tensor):
        return False
    behind = _TRAINS_BEHIND.get(name)
    if behind is not None and not kwargs.get(
        "training", kwargs.get("train", args[behind] if len(args) > behind else True)
    ):
        return False
    with torch._C.DisableTorchFunction():
        return _is_map(args[0]) and is_taken_for_last(args[0]) and not args[0].is_contiguous()


def _in_channels_last(value: Any) -> Any:
    """A copy of a map in channels_last, by its strides too where it is in both formats; anything else as it is."""
    if torch.compiler.is_compiling() or not isinstance(value, torch.Tensor):
        # Compiled and exported programs choose the formats themselves.
        return value
    # Whoever watches the calls of a forward, or plans them, has nothing to see in a look.
    with torch._C.DisableTorchFunction():
        if not _is_map(value) or is_taken_for_last(value):
            return value
        memory_format = FORMATS[value.dim()]
    return value.clone(memory_format=memory_format)


def _is_map(value: torch.Tensor) -> bool:
    # A tensor under a transform of torch.func stands for many, whose dims are others.
    return has_strides(value) and value.dim() in FORMATS and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _back_as_it_came(value: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """The copy of a value in another format, whose gradient comes back in the format of the value.

    Whatever made the value reads both in the backward pass, and is slow where the two are in different formats: a
    BatchNorm takes eight times as long then.
    """
    if copied is value or not copied.requires_grad or torch.compiler.is_compiling():
        return copied
    with torch._C.DisableTorchFunction():
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return copied
        order = _order_of(value)
    if order is not None and copied.grad_fn is not None:
        # Not a hook of the tensor, which may be an output that the caller saves.
        copied.grad_fn.register_prehook(functools.partial(_all_ordered, order))
    return copied


def _all_ordered(order: DimOrder, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_ordered(gradient, order) for gradient in gradients)


class ChannelsLastInputs(AroundForward):
    """The forward of a root that brings some of its inputs into channels_last, once for all that read them.

    The caller's tensors stay as they are. Where the forward writes to a copy the caller's tensor gets its values, and
    where it returns one it returns the caller's tensor: in the recorded runs it did neither.

    Attributes:
        inputs: the names of the parameters.
    """

    def __init__(self, owner: nn.Module, inputs: frozenset[str], inner: Any) -> None:
        self.owner = owner
        self.inputs = inputs
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


# The caller's tensor, the copy that the forward is given, and how often that was written to before.
_Lent = tuple[torch.Tensor, torch.Tensor, int]


def _lend(value: Any, lent: list[_Lent]) -> Any:
    """A copy of a map in channels_last, noted in `lent`; anything else, and what is in that format, as it is."""
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
    # A tensor that is made in inference mode doesn't count the writes to it.
    with torch.inference_mode(False), torch.no_grad():
        return _ordered(value, order)


def _own_of(leaf: Any, lent: Sequence[_Lent]) -> Any:
    return next((original for original, copied, _ in lent if copied is leaf), leaf)


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of the module's forward that can be given by position."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


class FormattedForward(AroundForward):
    """The forward of a root, with the dims of the outputs in memory in the order that the original gives them.

    A call that returns more or fewer values than the recorded ones has them all made contiguous, which is what
    convolutions on contiguous input give.

    Attributes:
        orders: of the dims of each output.
        others: the same where the training flag of the root is another than now; None where it is all one.
        training: the flag as it is now.
    """

    def __init__(
        self,
        owner: nn.Module,
        orders: tuple[DimOrder | None, ...],
        inner: Any,
        others: tuple[DimOrder | None, ...] | None = None,
    ) -> None:
        self.owner = owner
        self.orders = orders
        self.inner = inner
        self.others = others
        self.training = owner.training

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
    """The values among the outputs of a root that its `FormattedForward` has orders for."""
    leaves: list[Any] = pytree.tree_leaves(outputs, is_leaf=_is_size)
    return leaves


def _is_size(value: Any) -> bool:
    # Put together again from its numbers, it would be a tuple.
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
    """The order of the dims in memory of one output, which calls of several sizes gave.

    None for what is no strided tensor of two dims or more, or has gaps or overlaps in memory. Dims of size 1 don't tell
    where they stand: where the leaves seem to differ, the order that is right for all is taken, else that of the first.
    """
    orders = [_order_of(leaf) for leaf in leaves]
    if None in orders:
        return None
    common = (order for order in orders if order and all(_lies_in(leaf, order) for leaf in leaves))
    return next(common, orders[0])


def _order_of(leaf: Any) -> DimOrder | None:
    if not _is_dense(leaf) or leaf.dim() < 2:
        return None
    dims = range(leaf.dim())
    strides = leaf.stride()
    order = tuple(dims) if leaf.is_contiguous() else tuple(sorted(dims, key=lambda dim: -strides[dim]))
    return order if _lies_in(leaf, order) else None


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and has_strides(leaf)


def _lies_in(leaf: torch.Tensor, order: DimOrder) -> bool:
    return leaf.dim() == len(order) and leaf.permute(order).is_contiguous()


_Around = TypeVar("_Around", bound=AroundForward)


def standing_around(module: nn.Module, kind: type[_Around]) -> _Around | None:
    """The outermost of this kind that stands around the module's forward; None for none."""
    installed = module.__dict__.get("forward")
    while isinstance(installed, AroundForward):
        if isinstance(installed, kind):
            return installed
        installed = installed.inner
    return None


def inner_forward(module: nn.Module) -> Any:
    """What stands in the module's `__dict__` as its forward, under those that change no numbers; None for nothing."""
    installed = module.__dict__.get("forward")
    while isinstance(installed, AroundForward):
        installed = installed.inner
    return installed


def is_kept_contiguous(conv: nn.Module) -> bool:
    """Whether the convolution brings its input into contiguous format."""
    return isinstance(conv.__dict__.get("forward"), ContiguousInput)


def enters_channels_last(conv: nn.Module) -> bool:
    """Whether the convolution brings its input into channels_last."""
    return isinstance(conv.__dict__.get("forward"), ChannelsLastInput)


def is_carried(module: nn.Module) -> bool:
    """Whether the module is a BatchNorm that its convolution carries, which gives its input as it is."""
    forward = inner_forward(module)
    return isinstance(forward, FoldedNormForward) and forward.carried


def is_tied(norm: nn.Module) -> bool:
    """Whether the BatchNorm is right only behind one convolution, and does its own work there."""
    forward = inner_forward(norm)
    return isinstance(forward, FoldedNormForward) and not forward.carried


def class_code(module: nn.Module) -> types.CodeType:
    """The code of the forward that the module's class defines."""
    # What stands there may be a descriptor that has no code, and gives a function for the instance.
    forward = inspect.getattr_static(type(module), "forward").__get__(module, type(module))
    code: types.CodeType = inspect.unwrap(forward).__code__
    return code
