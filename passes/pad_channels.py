"""W x + b == the first rows of (W with zeros) (x with zeros) + (b with zeros): in sizes that tensor cores like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from passes.base import Context, GraphPass
from passes.graph.capture import ModuleGraph
from passes.graph.formats import FORMATS, is_taken_for_last
from passes.graph.forward import GraphForward, cost_of
from passes.graph.guards import inner_forward
from passes.graph.match import STOCK_CONVOLUTIONS, Node, is_parametrized, is_stock
from passes.graph.padded import padded_forward
from passes.graph.program import Program
from passes.graph.rewriter import Rewriter
from passes.graph.storage import kind_of
from passes.graph.stretches import stretches_in


@dataclass(frozen=True)
class PadChannels(GraphPass):
    """Compute linear layers and convolutions in multiples of 8 channels, as tensor cores do float16 and bfloat16.

        y = W x + b,  W (out, in)   ->   y = (W' x' + b')[:out],  W' (out', in'), x' (in'), b' (out') with zeros behind

    Exact: what is added to each sum is a product of two zeros that the pass makes itself, whatever else there is, NaN and
    infinity too. The outputs are cut back, and lie in memory as the layer gives them. Parameters stay as they are, under
    their names and in their shapes; the padded ones are made of them at the first call, kept, and made anew once a
    parameter was written to, moved, cast or replaced (torch doesn't tell of writes by `.data`). They take their memory
    once more.

    Where a value goes from padded layers to padded layers, over what does the same to each of its numbers (activations, sums
    and products of such values, a BatchNorm that was folded into its convolution), it keeps the channels that were added:

        h = act(W1 x + b1); y = W2 h        ->   h' = act(W1' x' + b1'), zeros behind the channels of h, y = (W2' h')[:out]

    They are made zeros again in the layer that takes them, as an activation may make infinity of a zero, and get no gradient
    in the one that makes them. The graph stands in for the forward then, and gives way to it where it doesn't hold: for a
    hook on an activation, say. Put passes that fold in front of this one: such layers are no calls of modules any more,
    which those look for.

    Padding is done where it can pay, by these rules:

    - Tensor cores of an NVIDIA GPU take float16 (from Volta on) and bfloat16 (from Ampere on), best in multiples of 8,
      which are 16 bytes (NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements";
      Convolutional Layers User's Guide, "Channels In And Out"). The dtype is that of the weight, or of the autocast that
      the recorded runs show.
    - A padded layer copies its input, its output or both. That is little only beside a layer that computes much: m n k
      multiplications for m k + n k + m n numbers in memory, of which torch's own compiler asks more than half of what the
      GPU does in the time of one memory access (torch/_inductor/fx_passes/pad_mm.py). Here that is 64, for the least of
      these GPUs. m is that of the example inputs; without them it is taken to be as large as need be.
    - No more than half of the multiplications are by the zeros that were added.
    - Convolutions of one, two and three dims on contiguous maps stay: cuDNN brings these into channels_last itself, and
      pads them on the way (NVIDIA, Tensor Ops Made Easier in cuDNN). Put `channels-last` in front. So do those on images
      of up to 4 channels, which cuDNN has kernels for.

    Under torch.compile, which pads products itself where a measurement says so (`shape_padding`), layers stay as they are.
    In ONNX files weights are padded; TorchScript files pad theirs at every call, and once under torch.jit.freeze: what is
    loaded into such a module counts.

    Args:
        multiple: what the numbers of channels become multiples of.
        force: pad wherever it can be done, on any device and in any dtype, also where it only costs.

    Does not handle: grouped and depthwise convolutions, whose groups would be padded one by one; layers whose weight is
    computed at every call (parametrizations), is quantized or sparse, of a class of its own or not initialised; layers that
    are never called, such as those that nn.MultiheadAttention reads; functional calls; layers of other classes, such as
    GPT-2's Conv1D. Zeros are cut off in front of all that looks at more than one channel (softmax, norms, sums, views), and
    at the borders of modules.
    """

    multiple: int = 8
    force: bool = False

    name: ClassVar[str] = "pad-channels"
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    def __post_init__(self) -> None:
        if self.multiple < 2:
            raise ValueError(f"multiple is a number of channels from 2 on, not {self.multiple}")

    def rewrite(self, graph: Rewriter) -> None:
        """Only `rewrite_in` knows the device."""
        self.rewrite_in(graph, Context("inference", torch.device("cpu")))

    def rewrite_in(self, graph: Rewriter, context: Context) -> None:
        """Pad every layer that can be padded, where it can pay."""
        layers = list(_unaligned_layers(graph.program, self.multiple))
        if layers and not self.force and (reason := _why_not_here(graph.program, layers, context.device)):
            graph.skip_module("", reason)
            return
        for layer in layers:
            reason = _why_not(graph.program, layer)
            if reason is None and not self.force:
                reason = _why_it_costs(graph.program, layer, context.device)
            if reason is None:
                _pad(graph, layer)
            else:
                graph.skip_module(layer.path, reason)
        for home in list(graph.program.graphs.values()) if graph.changes else ():
            if home.traced:
                _keep_wide(graph, home)


# What a GPU multiplies in the time of one memory access, halved: 60 to 150 for those with tensor cores.
_BALANCE = 64
# Padded, a layer may multiply so many times as much.
_MOST_WORK = 2
# cuDNN has kernels for images of so many channels.
_IMAGE_CHANNELS = 4


@dataclass(frozen=True)
class _Layer:
    """A linear layer or convolution whose channels are no multiples.

    Attributes:
        path, module: where it stands.
        given, made: how many channels it takes and makes.
        inputs, outputs: how many are to be added to these.
    """

    path: str
    module: nn.Linear | _ConvNd
    given: int
    made: int
    inputs: int
    outputs: int

    @property
    def groups(self) -> int:
        """1 for a linear layer."""
        return self.module.groups if isinstance(self.module, _ConvNd) else 1

    @property
    def kernel(self) -> int:
        """The elements of the kernel; 1 for a linear layer."""
        return self.module.weight[0, 0].numel()


def _unaligned_layers(program: Program, multiple: int) -> Iterator[_Layer]:
    for module in program.modules():
        if isinstance(module, nn.Linear):
            given, made = module.in_features, module.out_features
        elif isinstance(module, _ConvNd):
            given, made = module.in_channels, module.out_channels
        else:
            continue
        inputs, outputs = -given % multiple, -made % multiple
        if (inputs or outputs) and padded_forward(module) is None:
            yield _Layer(program.paths[id(module)][0], module, given, made, inputs, outputs)


# Whether it can be done ------------------------------------------------------------------------------------------------


def _why_not(program: Program, layer: _Layer) -> str | None:
    module = layer.module
    if not is_stock(module, (*STOCK_CONVOLUTIONS, nn.Linear)):
        return f"its {type(module).__name__} computes in a way of its own"
    if layer.groups > 1:
        return f"its channels are in {layer.groups} groups, of which each would have to be padded: that only costs"
    if is_parametrized(module) or module._parameters.get("weight") is None:
        return "its weight is computed at every call, and would be padded at every call: that only costs"
    if program.calls_in_a_run(module) == 0 and not program.calls_of(module):
        return "no recorded run calls it"
    for name, tensor in module._parameters.items():
        if tensor is not None and (reason := _why_not_tensor(tensor)):
            return f"its {name} {reason}"
    return None


def _why_not_tensor(tensor: nn.Parameter) -> str | None:
    if is_lazy(tensor):
        return "is not initialised yet: run the model once first"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if type(tensor) is not nn.Parameter:
        return f"is a {type(tensor).__name__}, which has an arithmetic of its own"
    if kind := kind_of(tensor):
        return f"is {kind}"
    return None if tensor.is_floating_point() else f"is of dtype {_name_of(tensor.dtype)}"


# Whether it pays -------------------------------------------------------------------------------------------------------


def _why_not_here(program: Program, layers: list[_Layer], device: torch.device) -> str | None:
    """Why it pays for no layer of the model."""
    dtypes = _dtypes_of_tensor_cores(device)
    if not dtypes:
        return f"the model is on a device without tensor cores ({device}), where padding only costs"
    if not any(_dtype_of(program, layer) in dtypes for layer in layers):
        names = sorted({_name_of(_dtype_of(program, layer)) for layer in layers})
        wanted = " and ".join(map(_name_of, dtypes))
        return (
            f"its layers compute in {' and '.join(names)}, and the tensor cores of {device} take {wanted} in multiples"
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


def _dtype_of(program: Program, layer: _Layer) -> torch.dtype:
    return program.autocast_in(layer.module) or layer.module.weight.dtype


def _why_it_costs(program: Program, layer: _Layer, device: torch.device) -> str | None:
    dtype = _dtype_of(program, layer)
    if dtype not in _dtypes_of_tensor_cores(device):
        return f"it computes in {_name_of(dtype)}, which gains nothing by multiples"
    if isinstance(layer.module, _ConvNd) and (reason := _why_cudnn_does_it(layer)):
        return reason
    work = layer.given * layer.made
    padded = (layer.given + layer.inputs) * (layer.made + layer.outputs)
    if padded > _MOST_WORK * work:
        return f"padded, it would multiply {padded / work:.1f} times as much, mostly by zeros"
    multiplications, moved = _work_of(program, layer)
    if multiplications < _BALANCE * moved:
        return (
            f"it multiplies {multiplications / moved:.0f} times for each number that it reads and writes, where"
            f" copies of its inputs and outputs cost more than a faster product saves (from {_BALANCE} on they don't)"
        )
    return None


def _why_cudnn_does_it(layer: _Layer) -> str | None:
    weight = layer.module.weight
    if weight.dim() not in FORMATS or not is_taken_for_last(weight):
        hint = ": put channels-last in front of this pass" if weight.dim() in FORMATS else ""
        return f"its maps are contiguous, and cuDNN pads those itself{hint}"
    if layer.given <= _IMAGE_CHANNELS:
        return f"its input has {layer.given} channels, and cuDNN has kernels for such images"
    return None


def _work_of(program: Program, layer: _Layer) -> tuple[int, int]:
    """How many multiplications the layer does in a run, and how many numbers it reads and writes for them."""
    calls = program.recordings.maps.get(id(layer.module), ()) if program.recordings is not None else ()
    products = layer.kernel * layer.given * layer.made
    if not calls:
        # Of so large a batch that the weight counts for nothing.
        return products, layer.given + layer.made
    is_transposed = isinstance(layer.module, _ConvNd) and layer.module.transposed
    places = sum(given.numel() // layer.given if is_transposed else made.numel() // layer.made for given, made in calls)
    moved = sum(given.numel() + layer.module.weight.numel() + made.numel() for given, made in calls)
    return products * places, moved


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pad(graph: Rewriter, layer: _Layer) -> None:
    calls = graph.program.calls_of(layer.module)
    region: list[Node] = calls if len(calls) == 1 else []
    with graph.change(layer.path, _what(layer), region) as change:
        graph.pad_layer(change, layer.module, layer.inputs, layer.outputs)


def _what(layer: _Layer) -> str:
    sides = [
        f"{count} to {count + added} {name}"
        for count, added, name in ((layer.given, layer.inputs, "inputs"), (layer.made, layer.outputs, "outputs"))
        if added
    ]
    return f"padded with zeros from {' and from '.join(sides)}"


# Between layers --------------------------------------------------------------------------------------------------------

# What a cut and a padding take in Python alone, in tenths of a microsecond.
_LINK = 60


def _keep_wide(graph: Rewriter, home: ModuleGraph) -> None:
    """Leave out cuts and paddings that take each other back, if that is worth a graph."""
    stretches = list(stretches_in(graph.program, home))
    if not stretches:
        return
    where = home.path or "the root"
    if (unwatched := home.unwatched()) is not None:
        text = f"the zeros of {where} are cut off and put back: its forward {unwatched}, and what it answers can't be known"
        graph.skip_module(home.path, text)
        return
    is_graph = isinstance(inner_forward(home.module), GraphForward)
    if not is_graph and _LINK * sum(stretch.links for stretch in stretches) <= cost_of(home.structure, home.baked):
        graph.skip_module(home.path, _NOT_WORTH)
        return
    for stretch in stretches:
        first, last = (graph.program.where(node) for node in (stretch.nodes[0], stretch.nodes[-1]))
        with graph.change(
            home.path, f"added zeros kept from {first} to {last}", stretch.nodes, gives_way=True
        ) as change:
            graph.keep_wide(change, stretch)


_NOT_WORTH = "to cut off zeros and put them back between its layers costs less than to see that a graph still holds"
