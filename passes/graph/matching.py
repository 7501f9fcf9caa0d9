"""Recognize layers and affine operations in recorded runs, however they are written. Only reads."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from passes.graph.forwards import InstanceForward, inner_forward
from passes.graph.model_tree import TensorRef
from passes.graph.recording import Node, Recording, call_of, shape_of, tensor_of
from passes.graph.tensors import dims_from_zero, listed_dims
from passes.torch_private import AnyBatchNorm


@dataclass(frozen=True)
class Channels:
    """The dim of a tensor that holds the channels."""

    rank: int  # the number of dims of the tensor
    dim: int  # the channel dim, counted from 0
    count: int  # the number of channels

    def behind(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Channels | None:
        """The channels after an operation of `_MOVES`; None if the operation may mix them with other values.

        Args:
            name: the name of the tensor method; `move_named` gives it for functions.
            args, kwargs: the arguments other than the tensor.
        """
        return _MOVES[name](self, [*args, *kwargs.values()] if name not in _BY_NAME else [dict(kwargs), *args])


def _as_they_are(channels: Channels, arguments: list[Any]) -> Channels | None:
    return channels


def _without_draws(channels: Channels, arguments: list[Any]) -> Channels | None:
    """A dropout keeps the channels if it is off; its arguments are (input, p, training, inplace)."""
    named, *others = arguments
    training = named.get("training", others[1] if len(others) > 1 else True)
    return channels if training is False else None


def _swapped(channels: Channels, arguments: list[Any]) -> Channels | None:
    dims = dims_from_zero(arguments, channels.rank)
    if dims is None or len(dims) != 2:
        return None
    first, second = dims
    dim = {first: second, second: first}.get(channels.dim, channels.dim)
    return Channels(channels.rank, dim, channels.count)


def _permuted(channels: Channels, arguments: list[Any]) -> Channels | None:
    dims = dims_from_zero(listed_dims(arguments), channels.rank)
    if dims is None or sorted(dims) != list(range(channels.rank)):
        return None
    return Channels(channels.rank, dims.index(channels.dim), channels.count)


def _flattened(channels: Channels, arguments: list[Any]) -> Channels | None:
    named, *others = arguments
    given = [named.get("start_dim", 0), named.get("end_dim", -1)]
    given[: len(others)] = others
    dims = dims_from_zero(given, channels.rank)
    if dims is None or dims[0] > dims[1]:
        return None
    start, end = dims
    if start < end and start <= channels.dim <= end:
        return None
    gone = end - start
    return Channels(channels.rank - gone, channels.dim - (gone if channels.dim > end else 0), channels.count)


def _unsqueezed(channels: Channels, arguments: list[Any]) -> Channels | None:
    dims = dims_from_zero(arguments, channels.rank + 1)
    if dims is None or len(dims) != 1:
        return None
    return Channels(channels.rank + 1, channels.dim + (dims[0] <= channels.dim), channels.count)


def _regrouped(channels: Channels, arguments: list[Any]) -> Channels | None:
    """`view` and `reshape` keep the channels if they are the last dim and its size doesn't change."""
    sizes = listed_dims(arguments)
    is_last = channels.dim == channels.rank - 1
    if not is_last or not sizes or type(sizes[-1]) is not int or sizes[-1] != channels.count:
        return None
    return Channels(len(sizes), len(sizes) - 1, channels.count)


_MOVES: dict[str, Any] = {
    "contiguous": _as_they_are, "clone": _as_they_are, "dropout": _without_draws,
    "transpose": _swapped, "swapaxes": _swapped, "swapdims": _swapped, "permute": _permuted,
    "flatten": _flattened, "unsqueeze": _unsqueezed, "view": _regrouped, "reshape": _regrouped,
}  # fmt: skip
# Operations with optional arguments, which are looked up by name.
_BY_NAME = frozenset({"dropout", "flatten"})
# The operations that are tensor methods.
METHODS = frozenset(_MOVES) - {"dropout"}
_FUNCTIONS: dict[Any, str] = {
    **{getattr(torch, name): name for name in METHODS - {"contiguous", "view"}},
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout), "dropout"),
    F.feature_alpha_dropout: "dropout",
    torch.dropout: "dropout",
}  # fmt: skip
# Methods that use only the shape of their second argument.
SHAPED_AS = frozenset({"reshape_as", "view_as", "expand_as"})


def move_named(function: Any) -> str | None:
    """The name of the move that a function of torch makes; None for any other function."""
    return _FUNCTIONS.get(function) if function.__hash__ is not None else None


CONVOLUTIONS: Mapping[Any, tuple[int, bool]] = {
    F.conv1d: (1, False), F.conv2d: (2, False), F.conv3d: (3, False),
    torch.conv1d: (1, False), torch.conv2d: (2, False), torch.conv3d: (3, False),
    F.conv_transpose1d: (1, True), F.conv_transpose2d: (2, True), F.conv_transpose3d: (3, True),
    torch.conv_transpose1d: (1, True), torch.conv_transpose2d: (2, True), torch.conv_transpose3d: (3, True),
    F.linear: (0, False),
}  # fmt: skip
CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
BATCH_NORMS: Mapping[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
}
# By the name of the function, without the underscores of an operator; a leading "r" swaps the operands.
_SCALES = {
    "mul": "mul", "multiply": "mul", "rmul": "mul", "add": "add", "radd": "add", "sub": "sub", "subtract": "sub",
    "rsub": "rsub", "div": "div", "divide": "div", "true_divide": "div", "truediv": "div",
}  # fmt: skip
_SCALE_FUNCTIONS = frozenset(
    getattr(home, name)
    for home in (torch, torch.Tensor, operator)
    for word in _SCALES
    for name in (word, f"__{word}__")
    if hasattr(home, name)
)
STOCK_CONVOLUTIONS: tuple[type[nn.Module], ...] = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
STOCK_LAYERS = (*STOCK_CONVOLUTIONS, nn.Linear)
STOCK_NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Convolution:
    """A convolution, transposed convolution or linear layer."""

    node: Node
    input: Node  # the node of its input
    # Convolution: (out, in / groups, *kernel); transposed: (in, out / groups, *kernel); linear: (out, in)
    weight: TensorRef
    bias: TensorRef | None  # the place where its bias is or would be registered; None for a functional call without one
    dims: int  # the number of spatial dims: 1, 2 or 3; 0 for a linear layer
    transposed: bool  # whether it is a transposed convolution
    groups: int  # the number of groups; 1 for a linear layer
    module: nn.Module | None  # the torch.nn layer that makes the call; None for a functional call
    pads: bool = False  # whether it pads its input with zeros, or may do so

    @property
    def bias_value(self) -> torch.Tensor | None:
        """The bias, (out,), or None."""
        return None if self.bias is None else self.bias.value

    @property
    def channels(self) -> int:
        """The number of output channels."""
        shape = self._weight_shape
        return int(shape[1]) * self.groups if self.transposed else int(shape[0])

    @property
    def input_channels(self) -> int:
        """The number of input channels."""
        shape = self._weight_shape
        return int(shape[0]) if self.transposed else int(shape[1]) * self.groups

    @property
    def _weight_shape(self) -> Sequence[int]:
        weight = self.weight.value
        assert weight is not None
        return weight.shape

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """The places of its weight and, if there is one, its bias."""
        return (self.weight,) if self.bias is None or self.bias_value is None else (self.weight, self.bias)


@dataclass(frozen=True)
class BatchNorm:
    """A batch normalization.

    Attributes:
        node, input, module: as in `Convolution`.
        weight, bias: scale and shift, (channels,); None for a call without them.
        mean, var: the running statistics, (channels,); None for a call without them.
        eps: added to the variance.
        uses_batch_statistics: whether this call normalizes by the statistics of the batch.
        moves: in a pair, the operations between the two that only move data, in order.
    """

    node: Node
    input: Node
    weight: TensorRef | None
    bias: TensorRef | None
    mean: TensorRef | None
    var: TensorRef | None
    eps: float
    uses_batch_statistics: bool
    module: nn.Module | None
    moves: tuple[Node, ...] = ()

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """All tensors that it reads."""
        return tuple(ref for ref in (self.weight, self.bias, self.mean, self.var) if ref is not None)

    @property
    def named_by(self) -> TensorRef | None:
        """The tensor that identifies this BatchNorm: the running mean, or another one if it has none."""
        return self.mean or next(iter(self.tensors), None)


@dataclass(frozen=True)
class ChannelScale:
    """A product or sum of a value with a parameter or buffer that has one number per channel, or one for all channels.

    Attributes:
        node, input, moves: as in `BatchNorm`.
        operation: "mul", "div", "add", "sub", or "rsub" for tensor - value.
        tensor: the parameter or buffer, of any shape that broadcasts this way.
    """

    node: Node
    input: Node
    operation: str
    tensor: TensorRef
    moves: tuple[Node, ...] = ()

    module: None = None

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """All tensors that it reads."""
        return (self.tensor,)

    @property
    def named_by(self) -> TensorRef | None:
        """The tensor that identifies this operation."""
        return self.tensor


@dataclass(frozen=True)
class ComputedScale:
    """A product or sum of a layer's output, by channel, with numbers that each call computes from tensors of the model."""

    layer: Node  # the call of the layer
    numbers: tuple[Node, ...]  # the calls that compute the numbers; the first one returns them
    tensors: tuple[TensorRef, ...]  # the parameters and buffers that they are computed from


Affine = BatchNorm | ChannelScale
"""An operation that scales and shifts each channel; a layer before or after it may do this by its weights."""


@dataclass(frozen=True)
class Pair:
    """A layer, and an affine operation after it, in one recorded run.

    Attributes:
        conv: the convolution, transposed convolution or linear layer.
        affine: the BatchNorm, or the product or sum by channel.
    """

    conv: Convolution
    affine: Affine

    @property
    def way(self) -> tuple[Node, ...]:
        """The nodes from the layer to the affine operation."""
        return (self.conv.node, *self.affine.moves, self.affine.node)


def is_stock(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    """Whether the module runs the forward of one of these torch.nn classes: an instance, or a subclass that keeps it.

    False if `forward` is overridden, in the class or on the instance. Also False if the class overrides a method that
    `forward` calls, because it may change the result or refuse an input.
    """
    own = type(module)
    if not isinstance(inner_forward(module), InstanceForward | None):
        return False
    kept = ("forward", "_conv_forward", "_check_input_dim")
    return any(
        own is cls
        or (isinstance(module, cls) and all(getattr(own, name, None) is getattr(cls, name, None) for name in kept))
        for cls in classes
    )


def convolution_at(node: Node) -> Convolution | None:
    """The convolution or linear layer that the node computes; None for other nodes."""
    found = _looked_up(CONVOLUTIONS, node)
    if found is None:
        return None
    dims, transposed = found
    given = arguments_of(node, TRANSPOSED_ARGUMENTS if transposed else CONVOLUTION_ARGUMENTS)
    weight, bias, groups = tensor_of(given.get("weight")), tensor_of(given.get("bias")), given.get("groups", 1)
    source: Node = given["input"]
    if weight is None or (given.get("bias") is not None and bias is None):
        return None
    module: nn.Module | None = call_of(node).module
    if module is None or not is_stock(module, STOCK_LAYERS) or not _is_of(module, weight=weight, bias=bias):
        module = None
    else:
        bias = TensorRef(module, "bias")
        if source.op == "call_function" and call_of(source) is call_of(node):
            # Layers with circular, reflect or replicate padding pad in a separate call.
            source = next(iter(source.all_input_nodes))
    pads = reads_zeros(given.get("padding", 0), _shape_of_tensor(weight)[2:])
    return Convolution(node, source, weight, bias, dims, transposed, groups, module, pads)


def _is_of(module: nn.Module, **tensors: TensorRef | None) -> bool:
    return all(ref is None or ref == TensorRef(module, name) for name, ref in tensors.items())


def reads_zeros(padding: Any, kernel: Sequence[int]) -> bool:
    """Whether a convolution with this padding pads its input with zeros, or may do so."""
    if isinstance(padding, str):
        return padding != "valid" and any(size != 1 for size in kernel)
    sides = padding if isinstance(padding, list | tuple) else [padding]
    return any(type(side) is not int or side != 0 for side in sides)


def _shape_of_tensor(ref: TensorRef) -> Sequence[int]:
    value = ref.value
    return () if value is None else value.shape


def batch_norm_at(node: Node) -> BatchNorm | None:
    """The batch normalization that the node computes; None for other nodes."""
    names = _looked_up(BATCH_NORMS, node)
    if names is None:
        return None
    given = arguments_of(node, names)
    source, eps, training = given["input"], given.get("eps", 1e-5), given.get("training", False)
    if not isinstance(eps, float):
        return None
    tensors = ("weight", "bias", "running_mean", "running_var")
    refs = {name: tensor_of(given.get(name)) for name in tensors}
    if any(given.get(name) is not None and refs[name] is None for name in tensors):
        return None
    weight, bias, mean, var = (refs[name] for name in tensors)
    module = call_of(node).module
    owns = all(ref.owner is module for ref in refs.values() if ref is not None)
    stock = module if is_stock(module, STOCK_NORMS) and isinstance(module, AnyBatchNorm) and owns else None
    if stock is not None:
        # In training, a layer may hold running statistics without passing them to the function.
        mean, var = (_held(stock, name) or ref for name, ref in (("running_mean", mean), ("running_var", var)))
    return BatchNorm(node, source, weight, bias, mean, var, eps, training, stock)


def _held(module: nn.Module, name: str) -> TensorRef | None:
    return None if module._buffers.get(name) is None else TensorRef(module, name)


def channel_scale_at(node: Node) -> ChannelScale | None:
    """The product or sum with a parameter or buffer that the node computes; None for other nodes.

    The shapes are not checked.
    """
    operation = scale_named(node.target)
    if len(node.args) != 2 or node.kwargs:
        return None
    first, second = map(tensor_of, node.args)
    value, tensor = (node.args[1], first) if second is None else (node.args[0], second)
    if tensor is None or not isinstance(value, fx.Node):
        return None
    if second is None:
        operation = {"mul": "mul", "add": "add", "sub": "rsub", "rsub": "sub"}.get(str(operation))
    return ChannelScale(node, value, operation, tensor) if operation else None


def computed_scale_at(node: Node) -> ComputedScale | None:
    """The product or sum with computed numbers that the node computes; None for other nodes."""
    if scale_named(node.target) is None or len(node.args) != 2 or node.kwargs:
        return None
    for layer, numbers in (node.args, reversed(node.args)):
        conv = convolution_at(layer) if isinstance(layer, fx.Node) else None
        if conv is None or not isinstance(numbers, fx.Node) or numbers.op != "call_function":
            continue
        calls, tensors = computed_from(numbers)
        if tensors and _is_by_channel(conv, numbers):
            return ComputedScale(conv.node, calls, tensors)
    return None


def computed_from(node: Node) -> tuple[tuple[Node, ...], tuple[TensorRef, ...]]:
    """The calls that compute a value, last first, and the parameters and buffers they start from; none if it has others."""
    calls, tensors, waiting = dict[Node, None](), dict[TensorRef, None](), [node]
    while waiting:
        each = waiting.pop()
        if (tensor := tensor_of(each)) is not None:
            tensors[tensor] = None
        elif not each.all_input_nodes:
            return (), ()
        elif each not in calls:
            calls[each] = None
            waiting += each.all_input_nodes
    return tuple(calls), tuple(tensors)


def _is_by_channel(conv: Convolution, numbers: Node) -> bool:
    made, shape = shape_of(conv.node), shape_of(numbers)
    if made is None or shape is None or len(shape.sizes) > len(made.sizes):
        return False
    sizes = (1,) * (len(made.sizes) - len(shape.sizes)) + shape.sizes
    return sizes == tuple(conv.channels if dim == len(sizes) - conv.dims - 1 else 1 for dim in range(len(sizes)))


def scale_named(function: Any) -> str | None:
    """The name of the product or sum that a torch function computes; None for any other function."""
    if getattr(function, "__hash__", None) is None or function not in _SCALE_FUNCTIONS:
        return None
    return _SCALES[function.__name__.strip("_")]


def layer_arguments(function: Any) -> tuple[str, ...]:
    """The argument names of a function in `CONVOLUTIONS`."""
    return TRANSPOSED_ARGUMENTS if CONVOLUTIONS[function][1] else CONVOLUTION_ARGUMENTS


def affine_at(node: Node) -> Affine | None:
    """The batch normalization, or the product or sum by channel, that the node computes; None for other nodes."""
    return batch_norm_at(node) or channel_scale_at(node)


def pair_behind(node: Node) -> Pair | None:
    """The pair of an affine operation and the layer before it that makes its input; None if there is none."""
    affine = affine_at(node)
    if affine is None:
        return None
    source, moves = _source_of(affine.input)
    conv = convolution_at(source)
    if conv is None:
        return None
    pair = Pair(conv, replace(affine, moves=moves))
    return pair if isinstance(affine, BatchNorm) or _scales_channels(pair) else None


def pairs_behind(recording: Recording) -> Iterator[Pair]:
    """All pairs of an affine operation and the layer before it."""
    return filter(None, map(pair_behind, recording.nodes()))


def _source_of(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """The node that makes the value, and the operations that the value passes afterwards, in order."""
    moves: list[Node] = []
    while move_at(node) is not None:
        moves.append(node)
        node = next(iter(node.all_input_nodes))
    return node, tuple(reversed(moves))


def move_at(node: Node) -> tuple[str, Sequence[Any], Mapping[str, Any]] | None:
    """(name, further arguments, keyword arguments) of a node that only moves its first argument, else None."""
    if not node.args:
        return None
    target: Any = node.target
    name = move_named(target)
    if name is None:
        word = getattr(target, "__name__", "")
        name = word if word in METHODS and getattr(torch.Tensor, word) is target else None
    return None if name is None else (name, node.args[1:], node.kwargs)


def channels_at_end(pair: Pair) -> Channels | None:
    """The channel dim of the affine operation's input; None if it isn't known."""
    conv, affine = pair.conv, pair.affine
    made = shape_of(conv.node)
    assert made is not None
    rank = len(made.sizes)
    channels: Channels | None = Channels(rank, rank - conv.dims - 1, conv.channels)
    for node in affine.moves:
        move = move_at(node)
        if move is not None and channels is not None:
            channels = channels.behind(*move)
    return channels


def _scales_channels(pair: Pair) -> bool:
    """Whether the tensor has one number per channel of the layer, or one for all, and broadcasting adds no dims."""
    assert isinstance(pair.affine, ChannelScale)
    tensor, channels = pair.affine.tensor.value, channels_at_end(pair)
    assert tensor is not None
    if channels is None or tensor.dim() > channels.rank:
        return False
    shape = [1] * (channels.rank - tensor.dim()) + list(tensor.shape)
    return all(size == 1 or (dim == channels.dim and size == channels.count) for dim, size in enumerate(shape))


def arguments_of(node: Node, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a call by name, without those left to their defaults."""
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def convolution_arguments(node: Node) -> dict[str, Any] | None:
    """The arguments of a recorded call of a convolution or linear layer, by name ("input", "weight", "stride", …).

    Arguments left to their defaults are missing. None for any other call.
    """
    return None if _looked_up(CONVOLUTIONS, node) is None else arguments_of(node, layer_arguments(node.target))


def batch_norm_arguments(node: Node) -> dict[str, Any] | None:
    """The arguments of a recorded call of a batch normalization, by name ("input", "running_mean", "training", …).

    Arguments left to their defaults are missing. None for any other call.
    """
    names = _looked_up(BATCH_NORMS, node)
    return None if names is None else arguments_of(node, names)


def _looked_up(table: Mapping[Any, Any], node: Node) -> Any:
    is_call = node.op == "call_function" and getattr(node.target, "__hash__", None) is not None
    return table.get(node.target) if is_call else None
