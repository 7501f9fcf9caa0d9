"""Folded parameters and buffers: tensor subclasses that only the layer they belong to can compute with.

They are subclasses of `nn.Parameter` and `torch.Tensor`. Moving, copying and saving work: `to`, `detach`, `deepcopy`,
`state_dict`, `load_state_dict`. Any other read of their values, or write to them, raises `UnseenCall`. torch's schemas
tell which operations compute: those that return a tensor which doesn't alias an input.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.errors import UnseenCall
from passes.program.matching import BATCH_NORMS, CONVOLUTIONS, layer_arguments, reads_zeros
from passes.program.pairs import FoldedPair
from passes.program.recording import asks_no_values
from passes.program.seals import SealedOutput, check_function, given_on, opened_from, sealed, sealed_for
from passes.program.seals import answer as answer_of_seal
from passes.program.tensors import TensorRef, holds_own
from passes.program.torch_calls import METADATA
from passes.torch_private import is_fake, make_subclass, sources_of, without_subclasses


class FoldedLayer:
    """A layer whose tensors were changed by a fold; the tensors refer to it.

    Attributes:
        weight, bias: the places of its tensors; `bias` is None for a functional call without one.
        dims: the number of spatial dims; 0 for a linear layer.
        module: whether a torch.nn layer computes with the tensors, in its own forward; otherwise a function does.
        pair: the pair with the affine operation after the layer; None if there is none.
        front: the pair with the BatchNorm before the layer; None if there is none.
    """

    def __init__(self, weight: TensorRef, bias: TensorRef | None, dims: int, *, module: bool) -> None:
        self.weight = weight
        self.bias = bias
        self.dims = dims
        self.module = module
        self.pair: FoldedPair | None = None
        self.front: FoldedPair | None = None

    @property
    def any_pair(self) -> FoldedPair:
        """One of the pairs, for error messages."""
        pair = self.pair or self.front
        assert pair is not None
        return pair

    @property
    def places(self) -> tuple[TensorRef, ...]:
        """The places of its tensors."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute a functional layer with its folded tensors, and seal the output.

        Raises:
            UnseenCall: the layer is a module, or has other arguments than in the recorded runs.
        """
        names = layer_arguments(func)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        pair, front = self.pair, self.front
        input = given["input"]
        weight: Any = getattr(self.weight.owner, self.weight.name)
        biases = (None, None if self.bias is None else getattr(self.bias.owner, self.bias.name, None))
        has_own = given.get("weight") is weight and any(given.get("bias") is bias for bias in biases)
        if self.module or not has_own:
            raise self.any_pair.read_elsewhere(self.any_pair.conv_path)
        if not all(map(holds_own, self.places)):
            raise self.any_pair.other_weight()
        if front is not None:
            input = opened_from(input, front, self.dims)
            if reads_zeros(given.get("padding", 0), weight.shape[2:]):
                raise front.other_padding()
        if pair is not None and pair.rank is not None and input.dim() != pair.rank:
            raise pair.other_rank(input)
        bias: Any = None if self.bias is None else self.bias.owner._parameters.get(self.bias.name)
        output: torch.Tensor
        if needs_unsealed(input):
            output = func(**{**given, "input": input, "weight": unsealed(weight), "bias": unsealed(bias)})
        else:
            with without_subclasses():
                output = func(**{**given, "input": input, "weight": weight, "bias": bias})
        return output if pair is None else sealed(output, pair, output.dim() - pair.dims - 1)


def unsealed(tensor: Any) -> Any:
    """Return an unsealed alias of a folded tensor, for calls that its seal would refuse; other values as they are."""
    if not is_folded(tensor):
        return tensor
    with without_subclasses():
        return torch.ops.aten.alias.default(tensor)


def needs_unsealed(input: Any) -> bool:
    """Whether a layer with folded tensors must compute with unsealed aliases of them for this input.

    It must in a graph that torch.compile captures, because the graph runs without the checks. It must also for an input
    whose class overrides torch's operations.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return type(input) is not torch.Tensor and not is_fake(input) and torch.overrides.has_torch_function((input,))


class _Forwards(threading.local):
    """The number of nested forwards of optimized models that are running in this thread.

    In a forward, `detach` returns a folded tensor again, and values can't be read, so a branch that no run showed can't
    compute with them. Outside of forwards, code reads weights for files, averages and state dicts, so both give the
    values.
    """

    def __init__(self) -> None:
        # Attributes of the object from the start: torch.compile guards on whether it has them.
        self.running = 0
        # Whether the programs that torch.export makes in this thread are compared with the model.
        self.compared = False


FORWARDS = _Forwards()


class a_forward_runs:
    """Count a forward of an optimized model for the block."""

    def __enter__(self) -> None:
        FORWARDS.running += 1

    def __exit__(self, *error: object) -> None:
        FORWARDS.running -= 1


class ComparedExports(contextlib.ContextDecorator):
    """Let torch.export read a model's code without running it, in a block that compares each program with the model."""

    def __enter__(self) -> None:
        FORWARDS.compared = True

    def __exit__(self, *error: object) -> None:
        FORWARDS.compared = False


class SealsWhileExporting(TorchFunctionMode):
    """Guards the folded tensors of a model while torch.export runs it on fake tensors, which are not of these classes.

    The fake tensors get the attributes of the folded ones, which identify them. A call with one of them is handled like
    a call with the folded tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        for fake, real in sources_of((*model.parameters(), *model.buffers())):
            if is_folded(real):
                _seal_as(fake, real)
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_folded, pytree.tree_leaves((args, kwargs)))):
            return answer(func, args, kwargs)
        return func(*args, **kwargs)


class _Folded:
    """Base of all folded tensors.

    Attributes:
        sealed_layer: the layer that computes with the tensor; None for a tensor of an affine operation.
        sealed_pair: for a tensor of an affine operation, its pair.
    """

    sealed_layer: FoldedLayer | None = None
    sealed_pair: FoldedPair | None = None

    def bare(self) -> torch.Tensor:
        """The values as a plain tensor over the same memory, without gradient: for files and comparisons."""
        with without_subclasses():
            values: torch.Tensor = self.detach().as_subclass(torch.Tensor)  # type: ignore[attr-defined]
        return values

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return answer(func, args, kwargs or {})


class FoldedParameter(_Folded, nn.Parameter):
    """A parameter that a fold changed."""

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with without_subclasses():
            values = self.data.clone(memory_format=torch.preserve_format)
            twin = _made(FoldedParameter, values, self.requires_grad)
        memo[id(self)] = twin
        _copy_state(self, twin, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        with without_subclasses():
            values = self.detach()
            return _made, (FoldedParameter, values, self.requires_grad), dict(self.__dict__), None, None, _set_state


class FoldedTensor(_Folded, torch.Tensor):
    """A placeholder for a tensor whose values are now in other tensors, or a view of a folded parameter."""

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with without_subclasses():
            twin = _made(FoldedTensor, self.detach().clone(), self.requires_grad)
        memo[id(self)] = twin
        _copy_state(self, twin, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        with without_subclasses():
            values = self.detach()
            return _made, (FoldedTensor, values, self.requires_grad), dict(self.__dict__), None, None, _set_state


# The tensor classes whose stored values torch's operations use unchanged.
PLAIN_TENSORS: frozenset[type[torch.Tensor]] = frozenset({torch.Tensor, nn.Parameter, FoldedParameter, FoldedTensor})


def _made(kind: type[Any], values: torch.Tensor, requires_grad: bool) -> Any:
    with without_subclasses():
        return make_subclass(kind, values.detach(), requires_grad)


def _set_state(tensor: Any, state: dict[str, Any]) -> None:
    tensor.__dict__.update(state)


def _copy_state(tensor: Any, twin: Any, memo: Any) -> None:
    for name, value in tensor.__dict__.items():
        twin.__dict__[name] = copy.deepcopy(value, memo)


def folded_parameter(values: torch.Tensor, layer: FoldedLayer, *, requires_grad: bool) -> FoldedParameter:
    """Make a parameter that only the given layer can compute with."""
    parameter: FoldedParameter = _made(FoldedParameter, values, requires_grad)
    parameter.sealed_layer = layer
    return parameter


def folded_tensor(
    values: torch.Tensor, *, pair: FoldedPair | None = None, layer: FoldedLayer | None = None
) -> FoldedTensor:
    """Make the placeholder for a tensor whose values are now in others; computing with it raises `UnseenCall`."""
    tensor: FoldedTensor = _made(FoldedTensor, values, False)
    tensor.sealed_pair = pair
    tensor.sealed_layer = layer
    return tensor


def over_values(source: FoldedParameter, values: torch.Tensor) -> FoldedParameter:
    """A folded parameter with other values and no seal yet; `sealed_like` adds the seal."""
    parameter: FoldedParameter = _made(FoldedParameter, values, source.requires_grad)
    return parameter


def sealed_like(source: torch.Tensor, twin: torch.Tensor, memo: dict[int, Any]) -> None:
    """Give the copy of a folded parameter a copy of its source's seal, using a deepcopy memo."""
    if isinstance(source, FoldedParameter):
        _copy_state(source, twin, memo)


def like_old(old: torch.Tensor | None, new: nn.Parameter) -> nn.Parameter:
    """Make the new parameter a folded one if the old one was."""
    layer = getattr(old, "sealed_layer", None)
    if layer is None or not isinstance(old, FoldedParameter) or isinstance(new, FoldedParameter):
        return new
    return folded_parameter(new, layer, requires_grad=new.requires_grad)


def is_folded(leaf: Any) -> bool:
    """Whether the value is a folded tensor, or the fake tensor that torch.export uses in its place."""
    return isinstance(leaf, _Folded) or (is_fake(leaf) and "sealed_layer" in leaf.__dict__)


def _seal_as(tensor: Any, source: Any) -> None:
    tensor.sealed_layer, tensor.sealed_pair = source.sealed_layer, source.sealed_pair


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """The values as a tensor over the same memory without gradient, and without the seal of a folded one."""
    return tensor.bare() if isinstance(tensor, _Folded) else tensor.detach()


def like_folded(held: Any, values: torch.Tensor) -> torch.Tensor:
    """A folded tensor with other values, and the seal of the one that is held."""
    kind = FoldedParameter if isinstance(held, FoldedParameter) else FoldedTensor
    twin: torch.Tensor = _made(kind, bare(values), held.requires_grad)
    _seal_as(twin, held)
    return twin


def admit(held: Any, values: torch.Tensor) -> None:
    """Allow the next `held.copy_(values)`, with exactly these values."""
    held.admitted = values


def answer(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Handle a torch call that has folded tensors among its arguments.

    Raises:
        UnseenCall: the call reads or writes values, and is neither the layer nor the affine operation.
    """
    if any(isinstance(leaf, SealedOutput) for leaf in pytree.tree_leaves((args, dict(kwargs)))):
        # torch dispatches to the first argument, which may be a folded tensor in a product with a sealed value.
        return answer_of_seal(func, args, kwargs)
    if _namespace_of(func) in _OF_COMPILED_CODE or func is torch.convolution or _adds_bias(func, args, kwargs):
        # Code that torch captured or compiled calls operators directly; code in a forward doesn't.
        with without_subclasses():
            return func(*args, **kwargs)
    if func in CONVOLUTIONS:
        names = layer_arguments(func)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for name in ("weight", "bias"):
            layer = getattr(given.get(name), "sealed_layer", None)
            if layer is not None:
                return layer.compute(func, args, kwargs)
    if func in BATCH_NORMS:
        given = {**dict(zip(BATCH_NORMS[func], args, strict=False)), **kwargs}
        named = (getattr(given.get(name), "sealed_pair", None) for name in ("running_mean", "weight", "bias"))
        pair = next((pair for pair in named if pair is not None), None)
        if pair is not None:
            return _normalised(pair, given)
    if _name_of(func) in _ASKED:
        with without_subclasses():
            return func(*args, **kwargs)
    kind = _kind(func)
    if kind == "computes" or (kind == "answers" and FORWARDS.running and not asks_no_values(func, args, dict(kwargs))):
        raise _read_elsewhere(args, kwargs)
    if kind == "writes" and not _may_write(func, args, kwargs):
        raise _written(args, kwargs)
    with without_subclasses():
        result = func(*args, **kwargs)
    if kind == "answers" and any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
        # A function without a schema, such as one written in Python, computed a tensor.
        raise _read_elsewhere(args, kwargs)
    return _sealed_again(func, args, result)


# The namespaces of the operators that torch's compilers call.
_OF_COMPILED_CODE = frozenset({"aten", "prims", "mkldnn", "mkl", "onednn", "inductor"})


def _namespace_of(func: Any) -> str:
    """The namespace of an operator of `torch.ops`, with an overload or without; "" for other functions."""
    return str(getattr(func, "_qualified_op_name", getattr(func, "namespace", ""))).partition("::")[0]


def _adds_bias(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether inductor's code calls a linear layer: it passes the bias itself, and a view of the weight's memory."""
    if func is not torch.addmm or "out" not in kwargs:
        return False
    return not any(map(is_folded, (*args[1:], *kwargs.values())))


def _read_elsewhere(args: Any, kwargs: Any) -> UnseenCall:
    pair, path = _told_by(args, kwargs)
    return pair.read_elsewhere(path)


def _written(args: Any, kwargs: Any) -> UnseenCall:
    pair, path = _told_by(args, kwargs)
    return pair.written(path)


def _told_by(args: Any, kwargs: Any) -> tuple[FoldedPair, str]:
    """The pair that changed the first folded tensor among the arguments, and the path of the module that holds it."""
    leaf: Any = next(leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if is_folded(leaf))
    if leaf.sealed_layer is not None:
        pair = leaf.sealed_layer.any_pair
        return pair, pair.conv_path
    return leaf.sealed_pair, leaf.sealed_pair.norm_path


def _normalised(pair: FoldedPair, given: dict[str, Any]) -> Any:
    """Handle a functional BatchNorm on an unsealed value: one before its layer, which returns its input sealed."""
    input = given["input"]
    if not pair.is_named_by(given):
        raise pair.read_elsewhere(pair.norm_path)
    check_function(pair, given)
    if not pair.leads:
        return given_on(opened_from(input, pair, None), pair)
    return sealed_for(input if pair.farther is None else opened_from(input, pair.farther, None), pair, None)


# Operations that copy. Their schemas look like those of computations; the copies are sealed as well.
_COPIES = frozenset({
    "clone", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "pin_memory", "__getitem__", "__iter__", "__get__",
    "__set__", "__deepcopy__",
})  # fmt: skip
# Operations that make a tensor without the values, and attributes that torch reads to make a fake tensor of a view.
_FREE = frozenset({"_base", "grad", "empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros", "new_ones"})
# Queries that don't read the values. Compiled code asks for the address.
_ASKED = METADATA | frozenset({
    "data_ptr", "untyped_storage", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "is_shared", "is_pinned", "__hash__",
    "__repr__", "__delete__", "share_memory_",
})  # fmt: skip
# Methods that change how autograd records a tensor, but not its values.
_OF_AUTOGRAD = frozenset({"requires_grad_", "detach_", "retain_grad_"})


def _kind(func: Any) -> str:
    """Classify a torch function: "aliases" inputs, "writes" to one, "computes" a tensor, or "answers" without one."""
    name = _name_of(func)
    if name == "__get__":
        return "aliases"
    if name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")):
        return "writes"
    return "aliases" if name in _COPIES or name in _FREE else kind_of_operator(name)


@functools.cache
def kind_of_operator(name: str) -> str:
    """Classify an operator of ATen by its schemas, as `_kind` does; "answers" for other names."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    if packet is None:
        return "answers"
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads() if not overload.endswith("out")]
    returns = [result for schema in schemas for result in schema.returns if "Tensor" in str(result.type)]
    if any(result.alias_info is None for result in returns):
        return "computes"
    if any(result.alias_info.is_write for result in returns):
        return "writes"
    return "aliases" if returns else "answers"


def _name_of(func: Any) -> str:
    return str(getattr(func, "__name__", ""))


def _may_write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call may write.

    It may if it changes only how autograd records the tensor, or sets a property other than `data`. `to` may set a
    folded tensor as `data`, and `load_state_dict` may copy the values that the module admitted.
    """
    name = _name_of(func)
    if name in _OF_AUTOGRAD:
        return True
    if name == "__set__":
        return _property_of(func) != "data" or is_folded(args[1])
    if name != "copy_" or len(args) < 2:
        return False
    return args[0].__dict__.pop("admitted", None) is args[1]


def _property_of(func: Any) -> str:
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


def _sealed_again(func: Any, args: Sequence[Any], result: Any) -> Any:
    """Seal the results that alias or copy a folded tensor like that tensor."""
    name = _name_of(func)
    if name == "__get__":
        name = _property_of(func)
    if name in _FREE or (name == "detach" and not FORWARDS.running) or not args or not is_folded(args[0]):
        return result
    source = args[0]

    def seal(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or is_folded(leaf):
            return leaf
        # `nn.Parameter(tensor)` requires a detached tensor to be of the same class.
        kind = type(source) if name == "detach" else FoldedTensor
        view = leaf if is_fake(leaf) else leaf.as_subclass(kind)
        _seal_as(view, source)
        return view

    with without_subclasses():
        return iter([seal(row) for row in result]) if name == "__iter__" else pytree.tree_map(seal, result)
