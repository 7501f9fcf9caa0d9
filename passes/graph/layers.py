"""Find layers in a graph, and the BatchNorms, products and sums by channel before and after them.

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
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from passes.base import PLAIN_TENSORS
from passes.graph import effects
from passes.graph.captured import EXAMPLE, argument, before, example_of, is_tensor, name_of, value_with
from passes.graph.graph_pass import GraphRewriter, Node
from passes.graph.recording import SHAPED_AS, operation_name, shape_of
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
    "mul": "mul", "multiply": "mul", "rmul": "mul", "add": "add", "radd": "add", "sub": "sub", "subtract": "sub",
    "rsub": "rsub", "div": "div", "divide": "div", "true_divide": "div", "truediv": "div",
}  # fmt: skip
# The operation if the value is the second operand.
_SWAPPED = {"mul": "mul", "add": "add", "sub": "rsub", "rsub": "sub"}
# Calls that read only the shape of a tensor.
_SHAPE_READERS = frozenset({"size", "dim", "numel", "nelement", "ndimension", "sym_size", "__len__"})
_COMPUTED = "is computed at every call, and not from parameters and buffers alone"


@dataclass(frozen=True)
class Layer:
    """A convolution, transposed convolution or linear layer."""

    node: Node  # the call
    input: Node
    weight: Node  # convolution: (out, in / groups, *kernel); transposed: (in, out / groups, *kernel); linear: (out, in)
    bias: Node | None  # (out,)
    dims: int  # the number of spatial dims: 1, 2 or 3; 0 for a linear layer
    transposed: bool  # whether it is a transposed convolution
    groups: int  # 1 for a linear layer
    pads: bool  # whether it pads its input with zeros, or may do so
    names: Sequence[str]  # the names of the arguments of the call, in their order

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of its weight."""
        return tuple(map(int, example_of(self.weight).shape))

    @property
    def channels(self) -> int:
        """The number of output channels."""
        first, second, *_ = self.weight_shape
        return second * self.groups if self.transposed else first

    @property
    def input_channels(self) -> int:
        """The number of input channels."""
        first, second, *_ = self.weight_shape
        return first if self.transposed else second * self.groups

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
    """A batch normalization. The tensors, (channels,), are None for a call without them."""

    node: Node
    input: Node
    mean: Node | None  # mean, var: the running statistics
    var: Node | None
    weight: Node | None  # the scale
    bias: Node | None  # the shift
    eps: float  # added to the variance
    momentum: Any  # the share of a batch in new running statistics
    uses_batch_statistics: bool  # whether it normalizes by the statistics of the batch
    names: Sequence[str]  # as in `Layer`

    @property
    def tensors(self) -> dict[str, Node]:
        """The tensors that it reads, by name."""
        named = {"running_mean": self.mean, "running_var": self.var, "weight": self.weight, "bias": self.bias}
        return {name: node for name, node in named.items() if node is not None}


@dataclass(frozen=True)
class ChannelScale:
    """A product or sum of a value with numbers that are constant between calls."""

    node: Node
    input: Node
    operation: str  # "mul", "div", "add", "sub", or "rsub" for numbers - value
    numbers: Node  # one number per channel, or one for all, in a shape that broadcasts this way

    @property
    def tensors(self) -> dict[str, Node]:
        """The tensors that it reads, by name."""
        return {"other operand": self.numbers}


Affine = BatchNorm | ChannelScale
"""An operation that scales and shifts each channel; a layer before or after it may do this by its weights."""


@dataclass(frozen=True)
class Pair:
    """A layer and an affine operation, one of which takes the other's output."""

    layer: Layer
    affine: Affine
    moves: tuple[Node, ...]  # the operations between the two that only move values, in order
    affine_first: bool  # whether the affine operation comes before the layer

    @property
    def way(self) -> tuple[Node, ...]:
        """The nodes from the first of the two to the second."""
        ends = (self.layer.node, self.affine.node)
        first, second = reversed(ends) if self.affine_first else ends
        return (first, *self.moves, second)

    @property
    def channels(self) -> Channels | None:
        """The channel dim of the input of the second; None if it isn't known."""
        if not is_tensor(self.way[0]):
            return None
        layer, rank = self.layer, example_of(self.way[0]).dim()
        dim, count = (1, layer.input_channels) if self.affine_first else (rank - layer.dims - 1, layer.channels)
        channels: Channels | None = Channels(rank, dim, count)
        for node in self.moves:
            channels = channels and channels.after(node)
        return channels


class Finder(ABC):
    """Finds the layers and affine operations of one graph."""

    @abstractmethod
    def is_constant(self, node: Any) -> bool:
        """Whether the value is a parameter or buffer, or computed from such tensors only."""

    @abstractmethod
    def _is_pure(self, node: Node) -> bool:
        """Whether the node only computes a value."""

    def layer_at(self, node: Node) -> Layer | None:
        """The layer that the node computes; None for other nodes, and for weights that depend on the inputs."""
        given = convolution_arguments(node)
        if given is None or not self._is_pure(node):
            return None
        dims, transposed = _LAYERS[name_of(node)]
        weight: Any = given.get("weight")
        bias, groups = given.get("bias"), given.get("groups", 1)
        if not is_tensor(weight) or not self.is_constant(weight) or not (bias is None or self.is_constant(bias)):
            return None
        shape = example_of(weight).shape
        if len(shape) != dims + 2 or not all(type(size) is int for size in shape):
            return None
        pads = _reads_zeros(given.get("padding", 0), shape[2:])
        return Layer(node, given["input"], weight, bias, dims, transposed, groups, pads, _layer_arguments(node))

    def batch_norm_at(self, node: Node) -> BatchNorm | None:
        """The batch normalization that the node computes; None for other nodes."""
        names, given = _norm_arguments(node), batch_norm_arguments(node)
        if names is None or given is None:
            return None
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
        operation = _OPERATIONS.get(operation_name(node))
        if operation is None or len(node.args) != 2 or node.kwargs or not self._is_pure(node):
            return None
        value: Any
        numbers: Any
        value, numbers = node.args
        if self.is_constant(value):
            value, numbers, operation = numbers, value, _SWAPPED.get(operation)
        if operation is None or not self.is_constant(numbers) or not is_tensor(numbers) or not is_tensor(value):
            return None
        return None if self.is_constant(value) else ChannelScale(node, value, operation, numbers)

    def affine_at(self, node: Node) -> Affine | None:
        """The batch normalization, or the product or sum, that the node computes; None for other nodes."""
        return self.batch_norm_at(node) or self.scale_at(node)

    def layer_before(self, affine: Affine) -> Layer | None:
        """The layer that makes the input of the affine operation; None if there is none."""
        return self.layer_at(self._source_of(affine.input)[0])

    def pair_before(self, affine: Affine) -> Pair | None:
        """The affine operation and the layer that makes its input; None if there is none."""
        source, moves = self._source_of(affine.input)
        layer = self.layer_at(source)
        if layer is None:
            return None
        pair = Pair(layer, affine, moves, affine_first=False)
        return pair if isinstance(affine, BatchNorm) or _are_by_channel(affine.numbers, pair.channels) else None

    def pair_after(self, affine: Affine) -> Pair | None:
        """The affine operation and the only layer that takes its output; None if there is none."""
        users, moves = self._readers_after(affine.node)
        layer = self.layer_at(users[0]) if len(users) == 1 else None
        if layer is None or layer.input is not (moves[-1] if moves else affine.node):
            return None
        return Pair(layer, affine, moves, affine_first=True)

    def _is_move(self, node: Any) -> bool:
        """Whether the node is an operation that only moves or reshapes its first argument."""
        return name_of(node) in _MOVES and self._is_pure(node) and bool(node.args) and is_tensor(node.args[0])

    def _source_of(self, node: Any) -> tuple[Node, tuple[Node, ...]]:
        """The node that makes a value, and the moves of the value after it, in order."""
        moves: list[Node] = []
        while self._is_move(node):
            moves.append(node)
            node = node.args[0]
        return node, tuple(reversed(moves))

    def _readers_after(self, node: Node) -> tuple[list[Node], tuple[Node, ...]]:
        """The nodes that read a value after its moves, and the moves, in order."""
        moves: list[Node] = []
        users = _readers(node)
        while len(users) == 1 and self._is_move(users[0]):
            moves.append(users[0])
            users = _readers(users[0])
        return users, tuple(moves)


class RecordedLayers(Finder):
    """The layers and affine operations of a recorded run."""

    def __init__(self, graph: fx.Graph) -> None:
        self._constants: set[Node] = set()
        for node in graph.nodes:
            inputs = node.all_input_nodes
            if node.op == "get_attr" or (inputs and self._constants.issuperset(inputs)):
                self._constants.add(node)
            shape = shape_of(node)
            if shape is not None and (shape.dtype.is_floating_point or shape.dtype.is_complex):
                node.meta[EXAMPLE] = torch.empty(shape.sizes, dtype=shape.dtype, device="meta")

    def is_constant(self, node: Any) -> bool:
        """See `Finder.is_constant`."""
        return isinstance(node, Node) and node in self._constants

    def computing(self, node: Any) -> list[Node]:
        """The calls that compute a constant from parameters and buffers, last first; none for other nodes."""
        nodes = before([node] if self.is_constant(node) else (), lambda each: True)
        return [each for each in nodes if each.op != "get_attr"]

    def _is_pure(self, node: Node) -> bool:
        return node.op == "call_function"


class Layers(Finder):
    """The layers and affine operations of a captured graph. It stays valid while a pass folds them one by one."""

    def __init__(self, graph: GraphRewriter) -> None:
        self._graph = graph
        self._memory = graph.memory()
        self._switches = [node for node in graph.nodes if effects.is_setting(node)]
        self._partial_autocasts = [node for node in self._switches if self._is_partial_autocast(node)]
        self._constants: set[Node] = set()
        for node in graph.nodes:
            if self._is_computed_from_constants(node):
                self._constants.add(node)

    def is_constant(self, node: Any) -> bool:
        """See `Finder.is_constant`."""
        is_tensor = self._graph.is_parameter(node) or (isinstance(node, Node) and self._graph.is_derived(node))
        return is_tensor or node in self._constants

    def _is_pure(self, node: Node) -> bool:
        return effects.is_pure(node)

    def calls(self) -> list[Node]:
        """The calls of convolution and linear functions, also those that `layer_at` finds no layer at."""
        return self._graph.calls(*_LAYERS)

    # Judge ------------------------------------------------------------------------------------------------------------

    def why_alone(self, node: Node) -> str | None:
        """The reason why a `batch_norm` call, or the layer before it, isn't recognized, as a clause; None for others.

        That is so if one of their tensors isn't constant: it depends on the inputs of the forward, is random, or is
        written to when it is computed; and if an earlier pass has padded the layer.
        """
        names = _norm_arguments(node)
        if names is None:
            return None
        if name := self._first_computed(node, names[:5]):
            return f"its {name} {_COMPUTED}"
        layer, _ = self._source_of(_named(node, names)["input"])
        if name_of(layer) in _LAYERS and (name := self._first_computed(layer, _ARGUMENTS[:3])):
            return f"the {name} of {self._graph.where(layer)} {_COMPUTED}"
        # As pad-channels writes it.
        whole = layer.args[0] if name_of(layer) == "narrow" else None
        if isinstance(whole, Node) and self.layer_at(whole) is not None:
            where = self._graph.where(whole)
            return (
                f"its input is a part of the channels of {where}: put this pass before pad-channels if that padded it"
            )
        return None

    def why_no_layer(self, node: Node) -> str:
        """The reason why `layer_at` finds no layer at a call of a convolution or linear function, as a clause."""
        if name := self._first_computed(node, _ARGUMENTS[:3]):
            return f"its {name} {_COMPUTED}"
        return "its weight has a shape that no layer has"

    def why_unmatched(self, affine: Affine) -> str:
        """The reason why `pair_before`, and for a BatchNorm `pair_after`, find no layer, as a clause."""
        source, _ = self._source_of(affine.input)
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
        users, _ = self._readers_after(affine.node)
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
        """The reason why nothing can be computed once from the tensors that it reads, as a clause; None if it can.

        They may change within a call, or are of a class or layout of their own.
        """
        for name, tensor in each.tensors.items():
            if reason := self._why_not_tensor(each.node, name, tensor):
                return reason
            if self._memory.may_be_written(before([tensor], self._constants.__contains__)):
                return f"the forward may write to {self._name_of(each.node, name, tensor)}"
        return None

    # Rewrite ----------------------------------------------------------------------------------------------------------

    def without_affine(self, pair: Pair, **tensors: Any) -> Node:
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

    def call_with(self, each: Layer | BatchNorm, before: Node, *, is_alike: bool = True, **changed: Any) -> Node:
        """Insert a call of the layer or BatchNorm with other arguments, by name, before a node.

        Args:
            is_alike: whether its value has the shape that the value of the layer or BatchNorm has.
        """
        node = each.node
        # A call may have further arguments by position, such as `cudnn_enabled`.
        args = [changed.get(name, old) for name, old in itertools.zip_longest(each.names[: len(node.args)], node.args)]
        more = {name: value for name, value in changed.items() if name not in each.names[: len(args)]}
        return self._graph.call(before, node.target, args, {**node.kwargs, **more}, like=node if is_alike else None)

    def replace(self, node: Node, new: Node) -> None:
        """Replace a node by another one of equal value, in the same memory layout if anything depends on it."""
        if self._graph.why_layout_shows(node, self._graph.example(new)):
            new = self._graph.call(node, "contiguous", (new,))
        self._graph.replace(node, new)

    # Constants --------------------------------------------------------------------------------------------------------

    def sources_of(self, node: Node) -> tuple[Node, ...]:
        """The parameters, buffers and derived tensors that a constant is computed from."""
        return tuple(sorted(before([node], self._constants.__contains__).keys() - self._constants))

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
            return self._why_not_tensor(owner, name, tensor)
        return f"{self._name_of(owner, name, tensor)} has dtype {str(dtype).removeprefix('torch.')}"

    def _why_not_tensor(self, owner: Node, name: str, tensor: Node) -> str | None:
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


def _layer_arguments(node: Node) -> Sequence[str]:
    """The names of the arguments of a layer's call, in their order."""
    return _TRANSPOSED_ARGUMENTS if _LAYERS[name_of(node)][1] else _ARGUMENTS


def convolution_arguments(node: Node) -> dict[str, Any] | None:
    """The arguments of a call of a convolution or linear layer, by name ("input", "weight", "stride", …).

    Arguments left to their defaults are missing. None for any other call.
    """
    is_layer = node.op in ("call_function", "call_method") and name_of(node) in _LAYERS
    return _named(node, _layer_arguments(node)) if is_layer else None


def _norm_arguments(node: Node) -> Sequence[str] | None:
    """The names of the arguments of a batch normalization, in their order; None for other nodes."""
    if node.target is F.batch_norm:
        return _NORM_ARGUMENTS
    is_of_torch = node.target is torch.batch_norm or isinstance(node.target, OpOverload)
    return _NORM_ARGUMENTS_OF_TORCH if is_of_torch and name_of(node) == "batch_norm" else None


def batch_norm_arguments(node: Node) -> dict[str, Any] | None:
    """The arguments of a call of a batch normalization, by name ("input", "running_mean", "training", …).

    Arguments left to their defaults are missing. None for any other call.
    """
    names = _norm_arguments(node)
    return None if names is None else _named(node, names)


def _are_by_channel(numbers: Node, channels: Channels | None) -> bool:
    """Whether there is one number per channel, or one for all, and broadcasting adds no dims."""
    shape = example_of(numbers).shape
    if channels is None or len(shape) > channels.rank:
        return False
    first = channels.rank - len(shape)
    return all(size == 1 or (dim == channels.dim and size == channels.count) for dim, size in enumerate(shape, first))


def _named(node: Node, names: Sequence[str]) -> dict[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


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
    return name in _SHAPE_READERS or (name in SHAPED_AS and user.args[0] is not value)


# Operations that return the values as they are, perhaps in other memory; dropouts only if they are off.
_COPIES = frozenset({
    "contiguous", "clone", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "feature_dropout",
})  # fmt: skip
_VIEWS = frozenset({"transpose", "swapaxes", "swapdims", "permute", "flatten", "unsqueeze", "view", "reshape"})
_MOVES = _COPIES | _VIEWS | {"pad"}


@dataclass(frozen=True)
class Channels:
    """The dim of a tensor that holds the channels."""

    rank: int  # the number of dims of the tensor
    dim: int  # the channel dim, counted from 0
    count: int  # the number of channels

    def after(self, node: Node) -> Channels | None:
        """The channels after a move; None if it may mix them with other values."""
        name = name_of(node)
        if name in _COPIES:
            return self if "dropout" not in name or effects.is_dropout_off(node) else None
        return self._after_padding(node) if name == "pad" else self._after_view(node)

    def _after_view(self, node: Node) -> Channels | None:
        """The dim that is left with a stride after the view of a tensor in which only the channels have one."""
        source: Any = node.args[0]
        example = example_of(source)
        strides = [int(dim == self.dim) for dim in range(self.rank)]
        with getattr(example, "fake_mode", nullcontext()):
            marked = torch.empty_strided(example.shape, strides, dtype=example.dtype, device=example.device)
        try:
            value = value_with(node, {source: marked})
        except (RuntimeError, ValueError):
            value = None
        if value is None:
            return None
        sizes = [size if type(size) is int else None for size in value.shape]
        # The strides of dims of size 1 mean nothing. A stride that is a symbol isn't 0.
        zero = [type(stride) is int and stride == 0 for stride in value.stride()]
        found = [dim for dim, size in enumerate(sizes) if size != 1 and not zero[dim]]
        # If the view is a copy, or the channels are in several dims, several dims have strides, or one of another size.
        return Channels(value.dim(), found[0], self.count) if [sizes[dim] for dim in found] == [self.count] else None

    def _after_padding(self, node: Node) -> Channels | None:
        """Padding with copies of the values keeps the channels; zeros don't belong to any channel."""
        widths, mode = argument(node, 1, "pad"), argument(node, 2, "mode", "constant")
        is_outside = isinstance(widths, list | tuple) and self.dim < self.rank - len(widths) // 2
        return self if mode in ("reflect", "replicate", "circular") and is_outside else None


# Arithmetic of folds ---------------------------------------------------------------------------------------------------


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gradients, in its own dtype; a tensor on MPS, which has no float64, is copied to the CPU.

    A product or sum with a float64 tensor is then computed in float64, without a float64 copy of a large weight. This
    doesn't hold for a float64 scalar tensor, unless this tensor is a scalar too.
    """
    tensor = tensor.detach()
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def float64(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor in float64, without gradients; on the CPU if its device has no float64."""
    return exact(tensor).double()


def why_not_finite(tensor: torch.Tensor) -> str | None:
    """The reason not to use the tensor, as a clause, if it holds NaN or infinity; None otherwise.

    A rewrite that reorders operations isn't exact on such tensors.
    """
    # A NaN or an infinity makes the sum non-finite. The sum of finite values may overflow too, so check them one by one
    # then.
    is_finite = math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())
    return None if is_finite else "the new weights wouldn't be finite"
