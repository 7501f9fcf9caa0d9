"""Find layers in a captured graph, and the BatchNorms, products and sums by channel before and after them.

A layer is a convolution, a transposed convolution or a linear layer. Between the two there may be operations that only
move values. Authors of passes use this as follows:

layers = Layers(graph)
for node in graph.calls("batch_norm"):
    norm = layers.batch_norm_at(node)
    pair = layers.pair_before(norm)
    if pair is not None and (reason := layers.why_not(pair)):
        graph.skip(node, reason)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from passes.graph import effects
from passes.graph.captured import argument, example_of, is_tensor, name_of
from passes.graph.effects import is_dropout_off, is_pure
from passes.graph.graph_pass import GraphRewriter, Node
from passes.graph.tensors import PLAIN_TENSORS, dims_from_zero, listed_dims
from passes.torch_private import OpOverload, enter_autocast, has_autocast

# The number of spatial dims, 0 for a linear layer, and whether the layer is transposed.
_LAYERS = {
    "conv1d": (1, False), "conv2d": (2, False), "conv3d": (3, False), "linear": (0, False),
    "conv_transpose1d": (1, True), "conv_transpose2d": (2, True), "conv_transpose3d": (3, True),
}  # fmt: skip
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_NORM_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
# `torch.batch_norm` and the ATen operator have another order than `F.batch_norm`.
_NORM_ARGUMENTS_OF_TORCH = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
_OPERATIONS = {
    "mul": "mul", "multiply": "mul", "add": "add", "sub": "sub", "subtract": "sub", "rsub": "rsub",
    "div": "div", "divide": "div", "true_divide": "div", "truediv": "div",
}  # fmt: skip
# The operation if the value is the second operand.
_SWAPPED = {"mul": "mul", "add": "add", "sub": "rsub", "rsub": "sub"}
# Calls that read only the shape of a tensor, and calls that read only the shape of their second argument.
_SHAPE_READERS = frozenset({"size", "dim", "numel", "nelement", "ndimension", "sym_size", "__len__"})
_SHAPED_AS = frozenset({"reshape_as", "view_as", "expand_as"})


@dataclass(frozen=True)
class Layer:
    """A convolution, transposed convolution or linear layer.

    Attributes:
        node: the call.
        input: the node of its input.
        weight: convolution: (out, in / groups, *kernel); transposed: (in, out / groups, *kernel); linear: (out, in).
        bias: (out,), or None.
        dims: the number of spatial dims: 1, 2 or 3; 0 for a linear layer.
        transposed: whether it is a transposed convolution.
        groups: the number of groups; 1 for a linear layer.
        pads: whether it pads its input with zeros, or may do so.
        names: the names of the arguments of the call, in their order.
    """

    node: Node
    input: Node
    weight: Node
    bias: Node | None
    dims: int
    transposed: bool
    groups: int
    pads: bool
    names: Sequence[str]

    @property
    def channels(self) -> int:
        """The number of output channels."""
        return _size(self.weight, 1) * self.groups if self.transposed else _size(self.weight, 0)

    @property
    def input_channels(self) -> int:
        """The number of input channels."""
        return _size(self.weight, 0) if self.transposed else _size(self.weight, 1) * self.groups

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the call by name; those left to their defaults are missing."""
        return _named(self.node, self.names)

    @property
    def tensors(self) -> dict[str, Node]:
        """Its weight and, if there is one, its bias."""
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})


@dataclass(frozen=True)
class BatchNorm:
    """A batch normalization.

    Attributes:
        node, input, names: as in `Layer`.
        mean, var: the running statistics, (channels,); None for a call without them.
        weight, bias: scale and shift, (channels,); None for a call without them.
        eps: added to the variance.
        momentum: the share of a batch in new running statistics.
        uses_batch_statistics: whether it normalizes by the statistics of the batch.
    """

    node: Node
    input: Node
    mean: Node | None
    var: Node | None
    weight: Node | None
    bias: Node | None
    eps: float
    momentum: Any
    uses_batch_statistics: bool
    names: Sequence[str]

    @property
    def tensors(self) -> dict[str, Node]:
        """The tensors that it reads, by name."""
        named = {"running_mean": self.mean, "running_var": self.var, "weight": self.weight, "bias": self.bias}
        return {name: node for name, node in named.items() if node is not None}


@dataclass(frozen=True)
class ChannelScale:
    """A product or sum of a value with numbers that are constant between calls.

    Attributes:
        node, input: as in `Layer`.
        operation: "mul", "div", "add", "sub", or "rsub" for numbers - value.
        numbers: one number per channel, or one for all, in a shape that broadcasts this way.
    """

    node: Node
    input: Node
    operation: str
    numbers: Node

    @property
    def tensors(self) -> dict[str, Node]:
        """The tensors that it reads, by name."""
        return {"other operand": self.numbers}


Affine = BatchNorm | ChannelScale
"""An operation that scales and shifts each channel; a layer before or after it may do this by its weights."""


@dataclass(frozen=True)
class Pair:
    """A layer and an affine operation, one of which takes the other's output.

    Attributes:
        layer, affine: the two.
        moves: the operations between the two that only move values, in order.
        affine_first: whether the affine operation comes before the layer.
    """

    layer: Layer
    affine: Affine
    moves: tuple[Node, ...]
    affine_first: bool

    @property
    def way(self) -> tuple[Node, ...]:
        """The nodes from the first of the two to the second."""
        ends = (self.layer.node, self.affine.node)
        first, second = reversed(ends) if self.affine_first else ends
        return (first, *self.moves, second)

    @property
    def channels(self) -> Channels | None:
        """The channel dim of the input of the second; None if it isn't known."""
        layer, rank = self.layer, example_of(self.way[0]).dim()
        dim, count = (1, layer.input_channels) if self.affine_first else (rank - layer.dims - 1, layer.channels)
        channels: Channels | None = Channels(rank, dim, count)
        for node in self.moves:
            channels = channels and channels.after(node)
        return channels


class Layers:
    """The layers and affine operations of one graph. It stays valid while a pass folds them one by one."""

    def __init__(self, graph: GraphRewriter) -> None:
        self._graph = graph
        self._memory = graph.memory()
        self._switches = [node for node in graph.nodes if effects.is_setting(node)]
        self._partial_autocasts = [node for node in self._switches if self._is_partial_autocast(node)]
        self._constants: set[Node] = set()
        for node in graph.nodes:
            if self._is_computed_from_constants(node):
                self._constants.add(node)

    # Find -------------------------------------------------------------------------------------------------------------

    def is_constant(self, node: Any) -> bool:
        """Whether the value is a parameter or buffer, or computed from such tensors only."""
        is_tensor = self._graph.is_parameter(node) or (isinstance(node, Node) and self._graph.is_derived(node))
        return is_tensor or node in self._constants

    def layer_at(self, node: Node) -> Layer | None:
        """The layer that the node computes; None for other nodes, and for weights that depend on the inputs."""
        name = name_of(node)
        if name not in _LAYERS or not self._graph.is_pure(node):
            return None
        dims, transposed = _LAYERS[name]
        names = _TRANSPOSED_ARGUMENTS if transposed else _ARGUMENTS
        given = _named(node, names)
        weight: Any = given.get("weight")
        bias, groups = given.get("bias"), given.get("groups", 1)
        if not self.is_constant(weight) or not (bias is None or self.is_constant(bias)):
            return None
        if self._graph.example(weight).dim() != dims + 2 or not _is_static(weight):
            return None
        pads = _reads_zeros(given.get("padding", 0), self._graph.example(weight).shape[2:])
        return Layer(node, given["input"], weight, bias, dims, transposed, groups, pads, names)

    def batch_norm_at(self, node: Node) -> BatchNorm | None:
        """The batch normalization that the node computes; None for other nodes."""
        names = _norm_arguments(node)
        if names is None:
            return None
        given = _named(node, names)
        mean, var, weight, bias = (given.get(name) for name in _NORM_ARGUMENTS[1:5])
        eps, training = given.get("eps", 1e-5), given.get("training", False)
        if not isinstance(eps, float) or not isinstance(training, bool):
            return None
        if not all(each is None or self.is_constant(each) for each in (mean, var, weight, bias)):
            return None
        momentum = given.get("momentum", 0.1)
        return BatchNorm(node, given["input"], mean, var, weight, bias, eps, momentum, training, names)

    def scale_at(self, node: Node) -> ChannelScale | None:
        """The product or sum with constant numbers that the node computes; None for other nodes."""
        operation = _OPERATIONS.get(name_of(node))
        if operation is None or len(node.args) != 2 or node.kwargs or not self._graph.is_pure(node):
            return None
        value: Any
        numbers: Any
        value, numbers = node.args
        if self.is_constant(value):
            value, numbers, operation = numbers, value, _SWAPPED.get(operation)
        if operation is None or not self.is_constant(numbers) or not self._graph.is_tensor(value):
            return None
        return None if self.is_constant(value) else ChannelScale(node, value, operation, numbers)

    def affine_at(self, node: Node) -> Affine | None:
        """The batch normalization, or the product or sum, that the node computes; None for other nodes."""
        return self.batch_norm_at(node) or self.scale_at(node)

    def pair_before(self, affine: Affine) -> Pair | None:
        """The affine operation and the layer that makes its input; None if there is none."""
        moves: list[Node] = []
        node: Any = affine.input
        while is_move(node):
            moves.append(node)
            node = node.args[0]
        layer = self.layer_at(node)
        if layer is None:
            return None
        pair = Pair(layer, affine, tuple(reversed(moves)), affine_first=False)
        return pair if isinstance(affine, BatchNorm) or _are_by_channel(affine.numbers, pair.channels) else None

    def pair_after(self, affine: Affine) -> Pair | None:
        """The affine operation and the only layer that takes its output; None if there is none."""
        moves: list[Node] = []
        users = _readers(affine.node)
        while len(users) == 1 and is_move(users[0]):
            moves.append(users[0])
            users = _readers(users[0])
        layer = self.layer_at(users[0]) if len(users) == 1 else None
        if layer is None or layer.input is not (moves[-1] if moves else affine.node):
            return None
        return Pair(layer, affine, tuple(moves), affine_first=True)

    # Judge ------------------------------------------------------------------------------------------------------------

    def why_alone(self, node: Node) -> str | None:
        """The reason why a `batch_norm` call, or the layer before it, isn't recognized, as a clause; None for others.

        That is so if one of their tensors isn't constant: it depends on the inputs of the forward, is random, or is
        written to when it is computed.
        """
        names = _norm_arguments(node)
        if names is None:
            return None
        if name := self._first_computed(node, names[:5]):
            return f"its {name} is computed at every call, and not from parameters and buffers alone"
        layer = _named(node, names)["input"]
        while is_move(layer):
            layer = layer.args[0]
        if name_of(layer) in _LAYERS and (name := self._first_computed(layer, _ARGUMENTS[:3])):
            return (
                f"the {name} of {self._graph.where(layer)} is computed at every call, and not from parameters and "
                "buffers alone"
            )
        return None

    def why_unmatched(self, affine: Affine) -> str:
        """The reason why `pair_before`, and for a BatchNorm `pair_after`, find no layer, as a clause."""
        source: Any = affine.input
        while is_move(source):
            source = source.args[0]
        layer = self.layer_at(source)
        if layer is not None and isinstance(affine, ChannelScale):
            shape = list(self._graph.example(affine.numbers).shape)
            return f"numbers of shape {shape} aren't one per channel of {self._graph.where(layer.node)}"
        maker = f"is computed by {self._graph.where(source)}"
        if source.op == "placeholder":
            maker = "comes from outside of its graph"
        before = f"its input {maker}, not by a convolution or linear layer"
        if not isinstance(affine, BatchNorm):
            return before
        users = _readers(affine.node)
        while len(users) == 1 and is_move(users[0]):
            users = _readers(users[0])
        takers = "the output of its graph" if any(user.op == "output" for user in users) else f"{len(users)} operations"
        if len(users) == 1 and users[0].op != "output":
            takers = self._graph.where(users[0])
        return f"{before}, and its output goes to {takers}"

    def _first_computed(self, node: Node, names: Sequence[str]) -> str | None:
        given = _named(node, names)
        return next(
            (name for name in names[1:] if given.get(name) is not None and not self.is_constant(given[name])), None
        )

    def why_not(self, pair: Pair) -> str | None:
        """The reason why the two can't be computed together, as a clause; None if they can.

        In the reasons, "it" is the first of the two.
        """
        tensors = [(each.node, *tensor) for each in (pair.layer, pair.affine) for tensor in each.tensors.items()]
        return (
            self._why_not_value(pair)
            or self._why_not_settings(pair)
            or next(filter(None, itertools.starmap(self._why_not_number, tensors)), None)
            or self._why_not_dtype(pair)
            or (self._why_not_dims(pair) if isinstance(pair.affine, BatchNorm) else None)
        )

    def why_not_derived(self, *each: Layer | Affine) -> str | None:
        """The reason why no tensor can be derived from the tensors that these read, as a clause; None if it can."""
        if has_autocast():
            return "the model is called under autocast, where a fold changes the dtypes of the computation"
        return next(filter(None, map(self.why_not_constant, each)), None)

    def why_not_constant(self, each: Layer | Affine) -> str | None:
        """The reason why the tensors that it reads may change within a call, as a clause; None if they can't."""
        for name, tensor in each.tensors.items():
            if self._memory.may_be_written(self._computation_of(tensor)):
                return f"the forward may write to {self._name_of(each.node, name, tensor)}"
        return None

    # Rewrite ----------------------------------------------------------------------------------------------------------

    def without_affine(self, pair: Pair, **tensors: Node | None) -> Node:
        """Insert the layer again with other tensors, and the moves, but not the affine operation.

        Args:
            tensors: the new `weight` and `bias` of the layer.

        Returns:
            The new node in place of the second of the two. `pair.way[-1]` isn't replaced yet.
        """
        new: dict[Node, Node] = {}
        if pair.affine_first:
            new[pair.affine.node] = pair.affine.input
        for node in pair.way[pair.affine_first : len(pair.way) - (not pair.affine_first)]:
            if node is pair.layer.node:
                value = new.get(pair.layer.input, pair.layer.input)
                new[node] = self.call_with(pair.layer, node, input=value, **tensors)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: new.get(source, source))
                new[node] = self._graph.call(node, node.target, args, kwargs)
        for value, following in itertools.pairwise(pair.way):
            for user in set(value.users) - {following, *_readers(value)}:
                self._graph.redirect(user, value, new[value])
        return next(reversed(new.values()))

    def call_with(self, each: Layer | BatchNorm, before: Node, **changed: Any) -> Node:
        """Insert a call of the layer or BatchNorm with other arguments, by name, before a node."""
        node = each.node
        # A call may have further arguments by position, such as `cudnn_enabled`.
        args = [changed.get(name, old) for name, old in itertools.zip_longest(each.names[: len(node.args)], node.args)]
        more = {name: value for name, value in changed.items() if name not in each.names[: len(args)]}
        return self._graph.call(before, node.target, args, {**node.kwargs, **more}, like=node)

    def replace(self, node: Node, new: Node) -> None:
        """Replace a node by another one of equal value, in the same memory layout if anything depends on it."""
        if self._graph.why_layout_shows(node, self._graph.example(new)):
            new = self._graph.call(node, "contiguous", (new,))
        self._graph.replace(node, new)

    # Constants --------------------------------------------------------------------------------------------------------

    def sources_of(self, node: Node) -> tuple[Node, ...]:
        """The parameters, buffers and derived tensors that a constant is computed from."""
        return tuple(sorted(self._computation_of(node) - self._constants))

    def _computation_of(self, node: Node) -> set[Node]:
        """A constant, and all constants that it is computed from."""
        found, waiting = set[Node](), [node]
        while waiting:
            each = waiting.pop()
            found.add(each)
            if each in self._constants:
                waiting += each.all_input_nodes
        return found

    def derived_from(self, node: Node) -> Node:
        """The node itself if it is a parameter, buffer or derived tensor; otherwise a derived tensor of equal value."""
        if node not in self._constants:
            return node
        sources = self.sources_of(node)
        function = self._graph.function_of(node, sources)
        return self._graph.derived(node, function, *sources, what=name_of(node), in_autocast=False)

    def _is_computed_from_constants(self, node: Node) -> bool:
        inputs = node.all_input_nodes
        return (
            node.op in ("call_function", "call_method")
            and bool(inputs)
            and self._graph.is_tensor(node)
            and all(map(self.is_constant, inputs))
            and not self._graph.is_derived(node)
            and self._graph.is_repeatable(node)
            # After a switch of autocast it may have another dtype than when it is computed apart from the graph.
            and not any(switch < node and name_of(switch).startswith("_enter") for switch in self._switches)
        )

    def _why_not_value(self, pair: Pair) -> str | None:
        for value, following in itertools.pairwise(pair.way):
            other = next((user for user in _readers(value) if user is not following), None)
            if other is not None and other.op == "output":
                return "its output leaves the graph: the forward returns it, or other code uses it"
            if other is not None:
                return f"its output is also used by {self._graph.where(other)}"
        # The layer then reads the input of the BatchNorm later than the BatchNorm did.
        if pair.affine_first and self._memory.may_be_written([pair.affine.input], (pair.affine.node, pair.layer.node)):
            return "the input of the BatchNorm may be written to before the layer runs"
        return None

    def _why_not_settings(self, pair: Pair) -> str | None:
        first, second = pair.way[0], pair.way[-1]
        if any(first < switch < second for switch in self._switches):
            return f"autocast or the gradient mode changes between it and {self._graph.where(second)}"
        for enter in self._partial_autocasts:
            # The users of the value are the calls that leave the autocast.
            if enter < first and all(second < leave for leave in enter.users):
                name = str(enter.args[1]).removeprefix("torch.")
                return f"it runs under autocast to {name}, where a fold changes the dtypes of the computation"
        return None

    def _is_partial_autocast(self, enter: Node) -> bool:
        """Whether the node enters an autocast that isn't around the whole graph, as that of `cast-precision` is."""
        # The arguments are the device type, the dtype, and whether it is enabled.
        if enter.target is not enter_autocast or enter.args[2:3] == (False,):
            return False
        apart = (node for node in self._graph.calls() if node < enter or any(leave < node for leave in enter.users))
        return any(
            self._graph.is_tensor(node) and not self._graph.is_derived(node) and name_of(node) not in ("to", "float")
            for node in apart
        )

    def _name_of(self, owner: Node, name: str, tensor: Node) -> str:
        """The path of a parameter or buffer; for other tensors, the name under which the owner reads it."""
        is_own = self._graph.is_parameter(tensor)
        return self._graph.path_of(tensor) if is_own else f"the {name} of {self._graph.where(owner)}"

    def _why_not_number(self, owner: Node, name: str, tensor: Node) -> str | None:
        if (dtype := self._graph.example(tensor).dtype).is_floating_point:
            return self.why_not_tensor(owner, name, tensor)
        return f"{self._name_of(owner, name, tensor)} has dtype {str(dtype).removeprefix('torch.')}"

    def why_not_tensor(self, owner: Node, name: str, tensor: Node) -> str | None:
        """The reason why no tensor can be derived from one that the owner reads under this name, as a clause."""
        example, what = self._graph.example(tensor), self._name_of(owner, name, tensor)
        if example.layout is not torch.strided:
            return f"{what} is of layout {str(example.layout).removeprefix('torch.')}: a fold needs dense tensors"
        for source in self.sources_of(tensor):
            value = self._graph.value(source)
            if value is not None and type(value) not in PLAIN_TENSORS:
                return f"{what} is a {type(value).__name__}, which has its own arithmetic"
            if value is not None and value.is_inference():
                return f"{what} was made in inference mode, where torch doesn't count the writes to a tensor"
        return None

    def _why_not_dtype(self, pair: Pair) -> str | None:
        dtypes = [self._graph.example(node).dtype for node in (pair.layer.weight, pair.layer.node, pair.affine.node)]
        if dtypes[1] is dtypes[2]:
            return None
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        return f"{self._graph.where(pair.affine.node)} converts its {names[1]} input to {names[2]}"

    def _why_not_dims(self, pair: Pair) -> str | None:
        """Refuse ranks at which dim 1, BatchNorm's channel dim, is not the layer's channel dim."""
        layer, channels = pair.layer, pair.channels
        way = f"its output passes through {', '.join(map(self._graph.where, pair.moves))}, " if pair.moves else ""
        if channels is None:
            return f"{way}after which its channels aren't known"
        if channels.dim == (channels.rank - layer.dims - 1 if pair.affine_first else 1):
            return None
        if way:
            taker = self._graph.where(layer.node) if pair.affine_first else "the BatchNorm"
            return f"{way}after which its channels are not those of {taker}"
        kind, ends = "convolution" if layer.dims else "linear layer", "inputs" if pair.affine_first else "outputs"
        owner = f"the input of {self._graph.where(layer.node)}" if pair.affine_first else "its input"
        return f"{owner} is {channels.rank}-D, where the BatchNorm's channels are not the {ends} of the {kind}"


def _norm_arguments(node: Node) -> Sequence[str] | None:
    """The names of the arguments of a batch normalization, in their order; None for other nodes."""
    if node.target is F.batch_norm:
        return _NORM_ARGUMENTS
    is_of_torch = node.target is torch.batch_norm or isinstance(node.target, OpOverload)
    return _NORM_ARGUMENTS_OF_TORCH if is_of_torch and name_of(node) == "batch_norm" else None


def _are_by_channel(numbers: Node, channels: Channels | None) -> bool:
    """Whether there is one number per channel, or one for all, and broadcasting adds no dims."""
    shape = example_of(numbers).shape
    if channels is None or len(shape) > channels.rank:
        return False
    first = channels.rank - len(shape)
    return all(size == 1 or (dim == channels.dim and size == channels.count) for dim, size in enumerate(shape, first))


def _named(node: Node, names: Sequence[str]) -> dict[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _size(node: Node, dim: int) -> int:
    return int(example_of(node).shape[dim])


def _is_static(node: Node) -> bool:
    return all(type(size) is int for size in example_of(node).shape)


def _reads_zeros(padding: Any, kernel: Sequence[int]) -> bool:
    if isinstance(padding, str):
        return padding != "valid" and any(size != 1 for size in kernel)
    sides = padding if isinstance(padding, list | tuple) else [padding]
    return any(type(side) is not int or side != 0 for side in sides)


def _readers(value: Node) -> list[Node]:
    return [user for user in value.users if not _reads_shape(user, value)]


def _reads_shape(user: Node, value: Node) -> bool:
    name = name_of(user)
    if name == "getattr":
        return user.args[1] in ("shape", "ndim")
    return name in _SHAPE_READERS or (name in _SHAPED_AS and user.args[0] is not value)


@dataclass(frozen=True)
class Channels:
    """The dim of a tensor that holds the channels."""

    rank: int  # the number of dims of the tensor
    dim: int  # the channel dim, counted from 0
    count: int  # the number of channels

    def after(self, node: Node) -> Channels | None:
        """The channels after a move (see `is_move`); None if it may mix them with other values."""
        move: Channels | None = _MOVES[name_of(node)](self, node)
        return move


def is_move(node: Any) -> bool:
    """Whether the node is an operation that only moves or reshapes its first argument."""
    return name_of(node) in _MOVES and is_pure(node) and bool(node.args) and is_tensor(node.args[0])


def _as_they_are(channels: Channels, node: Node) -> Channels | None:
    return channels


def _without_draws(channels: Channels, node: Node) -> Channels | None:
    return channels if is_dropout_off(node) else None


def _swapped(channels: Channels, node: Node) -> Channels | None:
    dims = dims_from_zero(_others(node), channels.rank)
    if dims is None or len(dims) != 2:
        return None
    first, second = dims
    return Channels(channels.rank, {first: second, second: first}.get(channels.dim, channels.dim), channels.count)


def _permuted(channels: Channels, node: Node) -> Channels | None:
    dims = dims_from_zero(listed_dims(_others(node)), channels.rank)
    if dims is None or sorted(dims) != list(range(channels.rank)):
        return None
    return Channels(channels.rank, dims.index(channels.dim), channels.count)


def _flattened(channels: Channels, node: Node) -> Channels | None:
    given = [argument(node, 1, "start_dim", 0), argument(node, 2, "end_dim", -1)]
    dims = dims_from_zero(given, channels.rank)
    if dims is None or dims[0] > dims[1]:
        return None
    start, end = dims
    if start < end and start <= channels.dim <= end:
        return None
    gone = end - start
    return Channels(channels.rank - gone, channels.dim - (gone if channels.dim > end else 0), channels.count)


def _unsqueezed(channels: Channels, node: Node) -> Channels | None:
    dims = dims_from_zero(_others(node), channels.rank + 1)
    if dims is None or len(dims) != 1:
        return None
    return Channels(channels.rank + 1, channels.dim + (dims[0] <= channels.dim), channels.count)


def _regrouped(channels: Channels, node: Node) -> Channels | None:
    """`view` and `reshape` keep the channels if they are the last dim and its size doesn't change."""
    shape = example_of(node).shape
    if channels.dim != channels.rank - 1 or not shape or type(shape[-1]) is not int or shape[-1] != channels.count:
        return None
    return Channels(len(shape), len(shape) - 1, channels.count)


def _padded(channels: Channels, node: Node) -> Channels | None:
    """Padding with copies of the values keeps the channels; zeros don't belong to any channel."""
    widths, mode = argument(node, 1, "pad"), argument(node, 2, "mode", "constant")
    is_outside = isinstance(widths, list | tuple) and channels.dim < channels.rank - len(widths) // 2
    return channels if mode in ("reflect", "replicate", "circular") and is_outside else None


def _others(node: Node) -> list[Any]:
    return [*node.args[1:], *node.kwargs.values()]


_MOVES = {
    "contiguous": _as_they_are, "clone": _as_they_are,
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), _without_draws),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout", "feature_dropout"), _without_draws),
    "transpose": _swapped, "swapaxes": _swapped, "swapdims": _swapped, "permute": _permuted,
    "flatten": _flattened, "unsqueeze": _unsqueezed, "view": _regrouped, "reshape": _regrouped, "pad": _padded,
}  # fmt: skip
