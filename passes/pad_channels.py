"""W x + b == the first rows of (W with zeros) (x with zeros) + (b with zeros): in sizes that tensor cores like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from passes.base import Context
from passes.graph_interface import CHANNELS_LAST_FORMATS, GraphPass, GraphRewriter, Node, is_channels_last


@dataclass(frozen=True)
class PadChannels(GraphPass):
    """Compute linear layers and convolutions in multiples of 8 channels, as tensor cores do float16 and bfloat16.

        y = W x + b,  W (out, in)   ->   y = (W' x' + b')[:out],  W' (out', in'), x' (in'), b' (out') with zeros behind

    Exact: what is added to each sum is a product of two zeros that the pass makes itself, whatever else there is, NaN and
    infinity too. The outputs are cut back, and lie in memory as the layer gives them. No tensor of the module is touched:
    the padded parameters are made of its own at the first call, kept, and made anew once one of these was written to, moved,
    cast or replaced (torch doesn't tell of writes by `.data`). They take their memory once more, and are made at every call
    where gradients go to them.

    Padding is done where it can pay, by these rules:

    - Tensor cores of an NVIDIA GPU take float16 (from Volta on) and bfloat16 (from Ampere on), best in multiples of 8,
      which are 16 bytes (NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements";
      Convolutional Layers User's Guide, "Channels In And Out"). The dtype is that of the layer's output.
    - A padded layer copies its input, its output or both. That is little only beside a layer that computes much: m n k
      multiplications for m k + n k + m n numbers in memory, of which torch's own compiler asks more than half of what the
      GPU does in the time of one memory access (torch/_inductor/fx_passes/pad_mm.py). Here that is 64, for the least of
      these GPUs. Where one graph is captured for inputs of any size, m is taken to be as large as need be.
    - No more than half of the multiplications are by the zeros that were added.
    - Convolutions of one, two and three dims on contiguous maps stay: cuDNN brings these into channels_last itself, and
      pads them on the way (NVIDIA, Tensor Ops Made Easier in cuDNN). Put `channels-last` in front. So do those on images
      of up to 4 channels, which cuDNN has kernels for.

    In compiled code and in files that others trace, layers are as they were.

    Args:
        multiple: what the numbers of channels become multiples of.
        force: pad wherever it can be done, on any device and in any dtype, also where it only costs.

    Does not handle: what torch.compile can't capture; grouped and depthwise convolutions, whose groups would be padded one
    by one; weights that are computed at every call, or may be written to by the forward; products by other functions, such
    as `addmm` of GPT-2's Conv1D. Each layer pads its input and cuts its output, also between two that are padded.
    """

    multiple: int = 8
    force: bool = False

    name: ClassVar[str] = "pad-channels"
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    def __post_init__(self) -> None:
        if self.multiple < 2:
            raise ValueError(f"multiple must be a number of channels of 2 or more, not {self.multiple}")

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        """Pad every layer that can be padded, where it can pay."""
        layers = list(_unaligned_layers(graph, self.multiple))
        if layers and not self.force and (reason := _why_not_here(layers, context.device)):
            graph.skip_place("", reason)
            return
        memory = graph.memory()
        for layer in layers:
            reason = _why_not(graph, layer)
            if reason is None and memory.may_be_written(layer.parameters):
                reason = "its parameters may be written to by the forward"
            if reason is None and not self.force:
                reason = _why_it_costs(layer, context.device)
            if reason is None:
                _pad(graph, layer)
            else:
                graph.skip(layer.node, reason)


# What a GPU multiplies in the time of one memory access, halved: 60 to 150 for those with tensor cores.
_BALANCE = 64
# Padded, a layer may multiply so many times as much.
_MOST_WORK = 2
# cuDNN has kernels for images of so many channels.
_IMAGE_CHANNELS = 4

# Of each function, where its argument `groups` stands.
_GROUPS = {
    "linear": None, "conv1d": 6, "conv2d": 6, "conv3d": 6, "conv_transpose1d": 6, "conv_transpose2d": 6,
    "conv_transpose3d": 6,
}  # fmt: skip


@dataclass(frozen=True)
class _Layer:
    """A call of a linear layer or convolution whose channels are no multiples.

    Attributes:
        node: the call.
        weight, bias: what it is given, beside its input.
        groups: 1 for a linear layer.
        given, made: how many channels it takes and makes.
        inputs, outputs: how many are to be added to these.
        examples: of the input, the weight and the output.
    """

    node: Node
    weight: Node
    bias: Node | None
    groups: int
    given: int
    made: int
    inputs: int
    outputs: int
    examples: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @property
    def is_transposed(self) -> bool:
        """Whether the weight's first dim is that of the inputs."""
        return "transpose" in GraphRewriter.name_of(self.node)

    @property
    def dims(self) -> int:
        """How many dims there are behind that of the channels."""
        return self.examples[1].dim() - 2

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in, which under autocast isn't that of the weight."""
        return self.examples[2].dtype

    @property
    def parameters(self) -> tuple[Node, ...]:
        """The weight, and the bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def _unaligned_layers(graph: GraphRewriter, multiple: int) -> Iterator[_Layer]:
    for node in graph.calls(*_GROUPS):
        source, weight, bias = (graph.argument(node, at, name) for at, name in enumerate(("input", "weight", "bias")))
        if not isinstance(source, Node) or not isinstance(weight, Node):
            continue
        examples = graph.example(source), graph.example(weight), graph.example(node)
        if not all(isinstance(example, torch.Tensor) for example in examples) or examples[1].dim() < 2:
            continue
        place = _GROUPS[graph.name_of(node)]
        groups = 1 if place is None else graph.argument(node, place, "groups", 1)
        made, given, *_ = examples[1].shape
        if "transpose" in graph.name_of(node):
            made, given = given * groups, made
        else:
            given *= groups
        inputs, outputs = -given % multiple, -made % multiple
        if inputs or outputs:
            yield _Layer(node, weight, bias, groups, given, made, inputs, outputs, examples)


# Whether it can be done ------------------------------------------------------------------------------------------------


def _why_not(graph: GraphRewriter, layer: _Layer) -> str | None:
    if layer.groups > 1:
        return (
            f"its channels are in {layer.groups} groups, each of which would have to be padded: that costs more "
            "than it saves"
        )
    for name, tensor in zip(("weight", "bias"), layer.parameters, strict=False):
        if not graph.is_parameter(tensor) and not graph.is_derived(tensor):
            return (
                f"its {name} is computed at every call, and would be padded at every call: that costs more than it "
                "saves"
            )
        example = graph.example(tensor)
        if not hasattr(example, "fake_mode"):
            return f"its {name} is a {type(example).__name__}, which has its own arithmetic"
        if example.layout is not torch.strided or not example.is_floating_point():
            return f"its {name} is of layout {example.layout} and dtype {_name_of(example.dtype)}"
    return None


# Whether it pays -------------------------------------------------------------------------------------------------------


def _why_not_here(layers: Sequence[_Layer], device: torch.device) -> str | None:
    """Why it pays for no layer of the model."""
    dtypes = _dtypes_of_tensor_cores(device)
    if not dtypes:
        return f"the model is on a device without tensor cores ({device}), where padding only costs"
    if not any(layer.dtype in dtypes for layer in layers):
        names = sorted({_name_of(layer.dtype) for layer in layers})
        wanted = " and ".join(map(_name_of, dtypes))
        return (
            f"its layers compute in {' and '.join(names)}, but the tensor cores of {device} need multiples only for "
            f"{wanted}"
        )
    return None


def _dtypes_of_tensor_cores(device: torch.device) -> tuple[torch.dtype, ...]:
    """What the tensor cores of the device take that is best in multiples of 8; nothing where it has none."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ()
    major, _ = torch.cuda.get_device_capability(device)
    if major < 7:
        return ()
    return (torch.float16,) if major < 8 else (torch.float16, torch.bfloat16)


def _why_it_costs(layer: _Layer, device: torch.device) -> str | None:
    if layer.dtype not in _dtypes_of_tensor_cores(device):
        return f"it computes in {_name_of(layer.dtype)}, which doesn't gain from multiples"
    if GraphRewriter.name_of(layer.node) != "linear" and (reason := _why_cudnn_does_it(layer)):
        return reason
    work = layer.given * layer.made
    padded = (layer.given + layer.inputs) * (layer.made + layer.outputs)
    if padded > _MOST_WORK * work:
        return f"padded, it would multiply {padded / work:.1f} times as much, mostly zeros"
    return _why_copies_cost(layer)


def _why_copies_cost(layer: _Layer) -> str | None:
    source, weight, output = layer.examples
    text = (
        "it multiplies so little per element that copies of its inputs and outputs cost more than a faster product "
        "saves"
    )
    # On so large an input that the weight counts for nothing.
    if weight[0, 0].numel() * layer.given * layer.made < _BALANCE * (layer.given + layer.made):
        return text
    given, made = source.numel(), output.numel()
    if not isinstance(given, int) or not isinstance(made, int):
        # One graph for inputs of any size.
        return None
    places = given // layer.given if layer.is_transposed else made // layer.made
    if weight.numel() * places < _BALANCE * (given + weight.numel() + made):
        return f"{text}, on an input of shape {list(source.shape)}"
    return None


def _why_cudnn_does_it(layer: _Layer) -> str | None:
    _, weight, _ = layer.examples
    if weight.dim() not in CHANNELS_LAST_FORMATS or not is_channels_last(weight):
        hint = ": put channels-last before this pass" if weight.dim() in CHANNELS_LAST_FORMATS else ""
        return f"its maps are contiguous, and cuDNN pads those itself{hint}"
    if layer.given <= _IMAGE_CHANNELS:
        return f"its input has {layer.given} channels, and cuDNN has kernels for such images"
    return None


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Rewrite ---------------------------------------------------------------------------------------------------------------


def _pad(graph: GraphRewriter, layer: _Layer) -> None:
    node, spatial = layer.node, (0, 0) * layer.dims
    first, second = (layer.inputs, layer.outputs) if layer.is_transposed else (layer.outputs, layer.inputs)
    with graph.change(node, _what(layer)):
        # Of `widths`, those of the last dim come first.
        arguments: dict[str, Any] = {"weight": _padded(graph, node, layer.weight, (*spatial, 0, second, 0, first))}
        if layer.bias is not None and layer.outputs:
            arguments["bias"] = _padded(graph, node, layer.bias, (0, layer.outputs))
        if layer.inputs:
            arguments["input"] = graph.call(
                node, F.pad, (graph.argument(node, 0, "input"), (*spatial, 0, layer.inputs))
            )
        wide = graph.call(node, node.target, *_with(node, arguments))  # type: ignore[arg-type]
        if not layer.outputs:
            graph.replace(node, wide)
            return
        own = graph.call(node, torch.narrow, (wide, -layer.dims - 1, 0, layer.made))
        # In the memory format that it has: what follows may view it, and may write to it.
        graph.replace_call(node, torch.clone, (own,))


def _padded(graph: GraphRewriter, before: Node, tensor: Node, widths: Sequence[int]) -> Node:
    return graph.derived(before, lambda source: F.pad(source, widths), tensor, what="zeros behind", in_autocast=False)


def _with(node: Node, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the node, with others in their places."""
    args, kwargs = list(node.args), dict(node.kwargs)
    for place, name in enumerate(("input", "weight", "bias")):
        if name in arguments and place < len(args):
            args[place] = arguments[name]
        elif name in arguments:
            kwargs[name] = arguments[name]
    return args, kwargs


def _what(layer: _Layer) -> str:
    sides = [
        f"{count} to {count + added} {name}"
        for count, added, name in (
            (layer.given, layer.inputs, "inputs"),
            (layer.made, layer.outputs, "outputs"),
        )
        if added
    ]
    return f"padded with zeros from {' and from '.join(sides)}"
