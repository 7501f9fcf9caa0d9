"""What a node computes, however it is spelled. Only reads."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

from passes.graph.capture import is_atom
from passes.graph.guards import (
    SHAPE_AND_KIND,
    FoldedConvForward,
    FoldedNormForward,
    inner_forward,
    is_carried,
    opened_from,
    sealed_for,
)
from passes.graph.linear_groups import SharedLinearForward
from passes.graph.program import Program
from passes.program.moves import METHODS, SHAPED_AS, Channels, move_named
from passes.program.tensors import TensorRef

# What code outside of this package knows of FX: a place in the program.
Node = fx.Node


@dataclass(frozen=True)
class Convolution:
    """A convolution, transposed convolution or linear layer.

    Attributes:
        node: where it stands.
        input: the node of its input.
        weight: Conv: (out, in / groups, *kernel); transposed: (in, out / groups, *kernel); linear: (out, in).
        bias: where its bias is or would be registered; None for a functional call without one.
        dims: spatial dims: 1, 2 or 3; 0 for a linear layer.
        transposed: whether it is a transposed convolution.
        groups: 1 for a linear layer.
        module: the called module; None for a functional call.
        pads: whether it reads zeros beyond the border of its input, or may.
    """

    node: fx.Node
    input: fx.Node
    weight: TensorRef
    bias: TensorRef | None
    dims: int
    transposed: bool
    groups: int
    module: nn.Module | None
    pads: bool = False

    @property
    def bias_value(self) -> torch.Tensor | None:
        """The bias, (out,), or None."""
        return None if self.bias is None else self.bias.value

    @property
    def channels(self) -> int:
        """How many channels it makes; as its module says where the weight is computed."""
        weight = self.weight.value
        if weight is None:
            return int(getattr(self.module, "out_channels" if self.dims else "out_features"))
        return int(weight.shape[1]) * self.groups if self.transposed else int(weight.shape[0])

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """The places of its weight and its bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def input_channels(self) -> int:
        """How many channels it takes; as its module says where the weight is computed."""
        weight = self.weight.value
        if weight is None:
            return int(getattr(self.module, "in_channels" if self.dims else "in_features"))
        return int(weight.shape[0]) if self.transposed else int(weight.shape[1]) * self.groups


@dataclass(frozen=True)
class BatchNorm:
    """A batch normalisation.

    Attributes:
        node, input, module: as in `Convolution`.
        weight, bias: scale and shift, (channels,); None for a functional call without them.
        mean, var: the running statistics, (channels,); None likewise.
        eps: added to the variance.
        uses_batch_statistics: whether this call normalises by the statistics of the batch.
        updates_statistics: whether this call moves the running statistics.
        moves: in a pair, what the value passes between the two that moves its numbers and changes none, in order.
        leads: in a pair, whether the BatchNorm stands in front of the convolution.
    """

    node: fx.Node
    input: fx.Node
    weight: TensorRef | None
    bias: TensorRef | None
    mean: TensorRef | None
    var: TensorRef | None
    eps: float
    uses_batch_statistics: bool
    updates_statistics: bool
    module: nn.Module | None
    moves: tuple[fx.Node, ...] = ()
    leads: bool = False

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """All that it reads."""
        return tuple(ref for ref in (self.weight, self.bias, self.mean, self.var) if ref is not None)


@dataclass(frozen=True)
class ChannelScale:
    """A product or sum of a value and a parameter or buffer, with one number of it for each channel or one for all.

    Attributes:
        node, input, moves: as in `BatchNorm`.
        operation: "mul", "div", "add", "sub", or "rsub" for what the value is taken from.
        tensor: the parameter or buffer, of any shape that broadcasts so.
    """

    node: fx.Node
    input: fx.Node
    operation: str
    tensor: TensorRef
    moves: tuple[fx.Node, ...] = ()

    module: None = None
    leads: bool = False

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """All that it reads."""
        return (self.tensor,)

    @property
    def rank(self) -> int:
        """The dims of the parameter or buffer."""
        assert self.tensor.value is not None
        return self.tensor.value.dim()


# What may become part of the layer before it.
Affine = BatchNorm | ChannelScale

_CONVOLUTIONS: Mapping[Any, tuple[int, bool]] = {
    F.conv1d: (1, False), F.conv2d: (2, False), F.conv3d: (3, False),
    torch.conv1d: (1, False), torch.conv2d: (2, False), torch.conv3d: (3, False),
    F.conv_transpose1d: (1, True), F.conv_transpose2d: (2, True), F.conv_transpose3d: (3, True),
    torch.conv_transpose1d: (1, True), torch.conv_transpose2d: (2, True), torch.conv_transpose3d: (3, True),
}  # fmt: skip
_CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_LINEAR_ARGUMENTS = ("input", "weight", "bias")
_BATCH_NORM_ARGUMENTS: Mapping[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
}
_SCALES: Mapping[Any, str] = {
    **{function: name for name in ("mul", "add", "sub") for function in (getattr(operator, name), getattr(torch, name))},
    operator.truediv: "div", torch.div: "div", torch.true_divide: "div", torch.multiply: "mul", torch.subtract: "sub",
    torch.divide: "div",
}  # fmt: skip
_SCALE_METHODS = {
    "mul": "mul", "multiply": "mul", "add": "add", "sub": "sub", "subtract": "sub", "div": "div", "divide": "div",
    "true_divide": "div",
}  # fmt: skip
STOCK_CONVOLUTIONS: tuple[type[_ConvNd], ...] = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
_ACTIVATION_MODULES: Mapping[type[nn.Module], str] = {
    nn.ReLU: "relu", nn.ReLU6: "relu6", nn.GELU: "gelu", nn.SiLU: "silu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh",
    nn.Hardswish: "hardswish", nn.Hardsigmoid: "hardsigmoid", nn.LeakyReLU: "leaky_relu", nn.ELU: "elu",
    nn.Mish: "mish", nn.Softplus: "softplus",
}  # fmt: skip
_ACTIVATION_NAMES = frozenset({*_ACTIVATION_MODULES.values(), "relu_", "sigmoid_", "tanh_", "silu_"})


def convolution_at(program: Program, node: fx.Node) -> Convolution | None:
    """The convolution or linear layer that the node computes, if it does."""
    if node.op == "call_module":
        return _convolution_module(node, program.module_of(node))
    if node.op != "call_function":
        return None
    if node.target in _CONVOLUTIONS:
        dims, transposed = _CONVOLUTIONS[node.target]
        names = _TRANSPOSED_ARGUMENTS if transposed else _CONVOLUTION_ARGUMENTS
        return _convolution_call(program, node, names, dims, transposed)
    if node.target in (F.linear, torch._C._nn.linear):
        return _convolution_call(program, node, _LINEAR_ARGUMENTS, 0, False)
    return None


def _convolution_module(node: fx.Node, module: nn.Module | None) -> Convolution | None:
    source = _sized_tensor(node) if isinstance(module, _ConvTransposeNd) else only_tensor(node)
    if module is None or source is None or not is_stock(module, (*STOCK_CONVOLUTIONS, nn.Linear)):
        return None
    weight, bias = TensorRef(module, "weight"), TensorRef(module, "bias")
    if isinstance(module, nn.Linear):
        return Convolution(node, source, weight, bias, 0, False, 1, module)
    assert isinstance(module, _ConvNd)
    dims = len(module.kernel_size)
    transposed = isinstance(module, _ConvTransposeNd)
    pads = module.padding_mode == "zeros" and any(module._reversed_padding_repeated_twice)
    return Convolution(node, source, weight, bias, dims, transposed, module.groups, module, pads)


def _convolution_call(
    program: Program, node: fx.Node, names: tuple[str, ...], dims: int, transposed: bool
) -> Convolution | None:
    given = arguments_of(node, names)
    weight, bias = _ref(program, given.get("weight")), _ref(program, given.get("bias"))
    groups = given.get("groups", 1)
    source = given.get("input")
    if not isinstance(source, fx.Node) or weight is None or not isinstance(groups, int):
        return None
    if given.get("bias") is not None and bias is None:
        bias = _unset(program, given["bias"])
        if bias is None:
            return None
    padding = given.get("padding", 0)
    sides = padding if isinstance(padding, list | tuple) else [padding]
    pads = padding != "valid" and any(type(side) is not int or side != 0 for side in sides)
    return Convolution(node, source, weight, bias, dims, transposed, groups, None, pads)


def batch_norm_at(program: Program, node: fx.Node) -> BatchNorm | None:
    """The batch normalisation that the node computes, if it does."""
    if node.op == "call_module":
        return _batch_norm_module(node, program.module_of(node))
    if node.op != "call_function" or node.target not in _BATCH_NORM_ARGUMENTS:
        return None
    given = arguments_of(node, _BATCH_NORM_ARGUMENTS[node.target])
    source, eps, training = given.get("input"), given.get("eps", 1e-5), given.get("training", False)
    if not isinstance(source, fx.Node) or not isinstance(eps, float) or not isinstance(training, bool):
        return None
    names = ("weight", "bias", "running_mean", "running_var")
    refs = {name: _ref(program, given.get(name)) for name in names}
    if any(given.get(name) is not None and refs[name] is None for name in names):
        return None
    weight, bias, mean, var = (refs[name] for name in names)
    return BatchNorm(node, source, weight, bias, mean, var, eps, training, training and mean is not None, None)


def _batch_norm_module(node: fx.Node, module: nn.Module | None) -> BatchNorm | None:
    source = only_tensor(node)
    stock = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    if module is None or source is None or not is_stock(module, stock):
        return None
    assert isinstance(module, _BatchNorm)
    refs = [TensorRef(module, name) for name in ("weight", "bias", "running_mean", "running_var")]
    weight, bias, mean, var = (ref if ref.is_there else None for ref in refs)
    uses_batch = module.training or mean is None
    updates = module.training and module.track_running_stats and mean is not None
    return BatchNorm(node, source, weight, bias, mean, var, module.eps, uses_batch, updates, module)


def activation_at(program: Program, node: fx.Node) -> str | None:
    """The name of the pointwise activation that the node computes, if it does."""
    module = program.module_of(node)
    if module is not None:
        return next((name for cls, name in _ACTIVATION_MODULES.items() if is_stock(module, (cls,))), None)
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return str(name).rstrip("_") if node.op in ("call_method", "call_function") and name in _ACTIVATION_NAMES else None


def conv_bn_chains(program: Program) -> Iterator[tuple[Convolution, BatchNorm]]:
    """Every batch normalisation whose input a convolution or linear layer makes, wherever the two stand."""
    for node in _norm_nodes(program):
        norm = batch_norm_at(program, node)
        if norm is not None and (found := _behind_convolution(program, norm)) is not None:
            yield found


def _norm_nodes(program: Program) -> list[fx.Node]:
    """The nodes that may be batch normalisations: most are none, which shows at once."""
    return [node for node in program.nodes() if _may_be_norm(program, node)]


def _may_be_norm(program: Program, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = program.module_of(node)
        return isinstance(module, _BatchNorm) and not is_carried(module)
    return node.op == "call_function" and node.target in _BATCH_NORM_ARGUMENTS


def affine_chains(program: Program) -> Iterator[tuple[Convolution, Affine]]:
    """Every batch normalisation, and every product or sum by channel, whose input a convolution or linear layer makes.

    Where one is folded before the next pair is asked for, what stands behind it is a pair too.
    """
    waiting = [node for node in program.nodes() if _may_be_norm(program, node) or _scale_at(node) is not None]
    found = True
    while found:
        found, rest = False, []
        for node in waiting:
            affine = _affine_at(program, node)
            pair = None if affine is None else _behind_convolution(program, affine)
            if pair is None:
                rest.append(node)
                continue
            found = True
            yield pair
        waiting = rest


def _affine_at(program: Program, node: fx.Node) -> Affine | None:
    return batch_norm_at(program, node) or channel_scale_at(program, node)


def channel_scale_at(program: Program, node: fx.Node) -> ChannelScale | None:
    """The product or sum with a parameter or buffer that the node computes, if it does; of what shape isn't asked."""
    operation = _scale_at(node)
    if operation is None or len(node.args) != 2 or node.kwargs:
        return None
    first, second = (_ref(program, argument) for argument in node.args)
    value, tensor = (node.args[1], first) if second is None else (node.args[0], second)
    if tensor is None or not isinstance(value, fx.Node):
        return None
    if second is None:
        operation = {"mul": "mul", "add": "add", "sub": "rsub"}.get(operation)
    return None if operation is None else ChannelScale(node, value, operation, tensor)


def _scale_at(node: fx.Node) -> str | None:
    if node.op == "call_method":
        return _SCALE_METHODS.get(str(node.target))
    is_function = node.op == "call_function" and node.target.__hash__ is not None
    return _SCALES.get(node.target) if is_function else None


_A = TypeVar("_A", bound=Affine)


def _behind_convolution(program: Program, affine: _A) -> tuple[Convolution, _A] | None:
    source, moves = _source_of(program, affine.input)
    conv = convolution_at(program, source)
    if conv is None:
        return None
    affine = replace(affine, moves=moves) if moves else affine
    return None if isinstance(affine, ChannelScale) and not scales_channels(program, conv, affine) else (conv, affine)


def scales_channels(program: Program, conv: Convolution, scale: ChannelScale) -> bool:
    """Whether the product or sum has one number for each channel of the convolution, or one for all, and keeps its dims."""
    tensor = scale.tensor.value
    assert tensor is not None
    channels = channels_between(program, conv, scale)
    if channels is None:
        # Its channels are as many dims before the last one as it has of space, batched or not.
        if scale.moves:
            return False
        channels = Channels(conv.dims + 1, 0, conv.channels)
    shape = [1] * (channels.rank - tensor.dim()) + list(tensor.shape)
    return tensor.dim() <= channels.rank and all(
        size == 1 or (dim == channels.dim and size == channels.count) for dim, size in enumerate(shape)
    )


def bn_conv_chains(program: Program) -> Iterator[tuple[Convolution, BatchNorm]]:
    """Every convolution or linear layer whose input a batch normalisation makes, wherever the two stand.

    Where that is folded before the next pair is asked for, and another one stands in front of it, that is a pair too.
    """
    for node in list(program.nodes()) if _norm_nodes(program) else ():
        conv = convolution_at(program, node)
        seen: set[fx.Node] = set()
        while conv is not None:
            source, moves = _source_of(program, conv.input)
            norm = batch_norm_at(program, source)
            if norm is None or source in seen:
                break
            seen.add(source)
            yield conv, replace(norm, moves=moves, leads=True)
            conv = convolution_at(program, node)


def in_order(conv: Convolution, norm: Affine) -> tuple[Convolution | Affine, Convolution | Affine]:
    """The two of a pair, the one first whose output goes to the other."""
    return (norm, conv) if norm.leads else (conv, norm)


def way_of(conv: Convolution, norm: Affine) -> tuple[fx.Node, ...]:
    """The nodes of a pair, from the first of the two over the moves to the second."""
    first, second = in_order(conv, norm)
    return (first.node, *norm.moves, second.node)


def _source_of(program: Program, node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """What makes the value, and the moves behind that, in order."""
    moves: list[fx.Node] = []
    source = program.producer(node)
    while _move_at(program, source) is not None:
        moves.append(source)
        source = program.producer(source.all_input_nodes[0])
    return source, tuple(reversed(moves))


def _move_at(program: Program, node: fx.Node) -> tuple[str, Sequence[Any], Mapping[str, Any]] | None:
    """The move that the node makes of its first argument, with the others; None for other nodes."""
    if not node.args:
        # A seal goes through where it stands, not under its name.
        return None
    if node.op == "call_module":
        return _module_move(program, program.module_of(node)) if len(node.args) == 1 and not node.kwargs else None
    if node.op == "call_method":
        name = str(node.target) if node.target in METHODS else None
    else:
        name = move_named(node.target) if node.op == "call_function" else None
    if name is None or (name == "dropout" and program.mode == "training"):
        return None
    return name, node.args[1:], node.kwargs


def _module_move(program: Program, module: nn.Module | None) -> tuple[str, Sequence[Any], Mapping[str, Any]] | None:
    if module is None:
        return None
    if is_stock(module, (nn.Flatten,)):
        return "flatten", (module.start_dim, module.end_dim), {}
    if is_stock(module, _DROPOUTS) and program.mode == "inference":
        return "dropout", (), {"training": module.training}
    return None


def is_moving(program: Program, module: nn.Module) -> bool:
    """Whether the module only moves values, or gives them as they are."""
    return _module_move(program, module) is not None


def channels_between(program: Program, conv: Convolution, norm: Affine) -> Channels | None:
    """Where the channels stand in what the second of a pair is given; None where that isn't known."""
    first, _ = in_order(conv, norm)
    rank = program.rank_of_input(first.node)
    if rank is None:
        return None
    dim, count = (1, conv.input_channels) if norm.leads else (rank - conv.dims - 1, conv.channels)
    if not 0 <= dim < rank:
        return None
    channels: Channels | None = Channels(rank, dim, count)
    for node in norm.moves:
        move = _move_at(program, node)
        channels = None if move is None or channels is None else channels.behind(*move)
    return channels


def uses_values(program: Program, user: fx.Node, value: fx.Node) -> bool:
    """Whether an operation that is given the value does more than ask for its shape and kind."""
    if user.target is getattr:
        return user.args[1] not in SHAPE_AND_KIND
    if user.op != "call_method":
        return True
    if user.target in SHAPED_AS:
        return program.producer(user.all_input_nodes[0]) is value or len(user.args) != 2 or user.args[0] is user.args[1]
    return user.target not in SHAPE_AND_KIND


def unlike_layers(program: Program) -> Iterator[tuple[str, str]]:
    """The path of each batch normalisation that stands behind, or in, a layer which only looks like a convolution, and a
    clause that says so."""
    for node in _norm_nodes(program):
        norm = batch_norm_at(program, node)
        if norm is None or convolution_at(program, program.producer(norm.input)) is not None:
            continue
        for step in program.way_to_producer(norm.input):
            module = program.module_of(step)
            if module is not None and (clause := _unlike(module)):
                yield program.where(node), f"the layer before it, {program.where(step)}, is {clause}"
                break
    kinds = {type(module) for module in program.root.modules()}
    quantized = frozenset(kind for kind in kinds if _is_quantized(kind))
    for path, module in program.root.named_modules() if quantized else ():
        for name, child in module.named_children() if type(module) in quantized else ():
            if isinstance(child, _BatchNorm):
                around = f"the layer around it, {path or 'the root'}, is {_unlike(module)}"
                yield f"{path}.{name}".lstrip("."), around


def _unlike(module: nn.Module) -> str | None:
    name = type(module).__name__
    if _is_quantized(type(module)):
        return f"the {name} of torch.ao, which works with quantized numbers"
    if isinstance(inner_forward(module), SharedLinearForward):
        return "computed together with others on its input: put merge-linears last"
    if isinstance(module, _ConvNd | nn.Linear) and not is_stock(module, (*STOCK_CONVOLUTIONS, nn.Linear)):
        return f"of the class {name}, which computes in a way of its own"
    return None


def _is_quantized(kind: type[nn.Module]) -> bool:
    """Whether modules of the class quantize, work on quantized tensors, or are being trained for that."""
    home = kind.__module__
    return home.startswith(("torch.ao.nn.", "torch.ao.quantization.fake_quantize")) and any(
        word in home for word in ("quantized", "qat", "fake_quantize")
    )


def can_be_sealed(program: Program, conv: Convolution, norm: Affine) -> bool:
    """Whether the two can check at every call that the value of the one goes to the other, and nowhere else.

    Otherwise it is one graph that shows it, which has to be the forward of its module.
    """
    if norm.module is not None:
        return True
    other = opened_between(program, conv, norm) or conv.node
    return program.module_of(other) is not None or program.home(other) is not program.home(norm.node)


def opened_between(program: Program, conv: Convolution, norm: Affine) -> fx.Node | None:
    """Where the value between the two is given free by another pair, of which one is the convolution; None for nowhere.

    That is another BatchNorm which the convolution carries, or where a graph checks in the place of one that was a
    function. Of several such places, the one that is nearest to the BatchNorm.
    """
    found = [node for node in nodes_between(program, conv, norm) if _opens(program, node, norm)]
    if not found:
        return None
    return found[-1] if norm.leads else found[0]


def _opens(program: Program, node: fx.Node, norm: Affine) -> bool:
    """Whether a pair ends at the node, or begins there that has the BatchNorm in front."""
    module = program.module_of(node)
    if module is not None:
        return is_carried(module)
    return node.target is (sealed_for if norm.leads else opened_from)


def nodes_between(program: Program, conv: Convolution, norm: Affine) -> list[fx.Node]:
    """What the value of the first of a pair passes on its way to the second, from there back.

    Operations that move it or give it as it is, calls of modules that it comes out of, and inputs of graphs that it goes
    into.
    """
    first, second = in_order(conv, norm)
    found: list[fx.Node] = []
    node = second.input
    while node is not first.node:
        found.append(node)
        module = program.module_of(node)
        if node in norm.moves or program.is_identity(node):
            node = node.all_input_nodes[0]
        elif module is None:
            # It comes in from outside.
            (call,) = program.calls_of(program.home(node).module)
            node = call.all_input_nodes[0]
        else:
            node = _output_of(program, module).all_input_nodes[0]
    return found


def modules_between(program: Program, conv: Convolution, norm: Affine) -> list[nn.Module]:
    """The modules that the value of the first of a pair passes through, into or out of, on its way to the second."""
    found: list[nn.Module] = []
    for node in nodes_between(program, conv, norm):
        module = program.home(node).module if node.op == "placeholder" else program.module_of(node)
        if module is not None:
            found.append(module)
    return found


def _output_of(program: Program, module: nn.Module) -> fx.Node:
    return next(node for node in reversed(program.graphs[id(module)].graph.nodes) if node.op == "output")


def is_stock(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    """Whether the module computes what one of the classes does: it is one, or a subclass that keeps the forward.

    One that an earlier pass folded together with another still computes it, unless that other does its work.
    """
    forward = inner_forward(module)
    guarded = isinstance(forward, FoldedConvForward) or (isinstance(forward, FoldedNormForward) and not forward.carried)
    if (forward is not None and not guarded) or type(module).__call__ is not nn.Module.__call__:
        return False
    own = type(module)
    for cls in classes:
        if own is cls:
            return True
        if isinstance(module, cls) and own.forward is cls.forward:
            kept = ("_conv_forward", "_check_input_dim")
            return all(getattr(own, name, None) is getattr(cls, name, None) for name in kept)
    return False


def is_layer(module: nn.Module) -> bool:
    """Whether calling the module runs, or may run, code of torch's own that reads the tensors of one layer."""
    return isinstance(module, _ConvNd | nn.Linear | _BatchNorm) or is_atom(module)


def arguments_of(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a functional call by name; those left to their defaults are missing."""
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def is_parametrized(module: nn.Module) -> bool:
    """Whether some parameter of the module is computed from others at every access."""
    return "parametrizations" in module._modules and parametrize.is_parametrized(module)


def only_tensor(node: fx.Node) -> fx.Node | None:
    """The one argument of a module call that takes one tensor and nothing else."""
    arguments = (*node.args, *node.kwargs.values())
    return arguments[0] if len(arguments) == 1 and isinstance(arguments[0], fx.Node) else None


def _sized_tensor(node: fx.Node) -> fx.Node | None:
    """What a call of a transposed convolution is given, which may say what size is to come out."""
    arguments = arguments_of(node, ("input", "output_size"))
    source = arguments.get("input")
    return source if arguments.keys() <= {"input", "output_size"} and isinstance(source, fx.Node) else None


def _unset(program: Program, argument: Any) -> TensorRef | None:
    """The parameter that a node reads and that is none any more: the biases of training results are."""
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        return None
    owner, name, value = program.tensor_of(argument)
    return TensorRef(owner, name) if value is None and name in owner._parameters else None


def _ref(program: Program, argument: Any) -> TensorRef | None:
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        return None
    owner, name, value = program.tensor_of(argument)
    return TensorRef(owner, name) if isinstance(value, torch.Tensor) else None
