"""Pad channels with zeros: W x + b == the first rows of W' x' + b', whose sizes suit tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from passes.base import Context
from passes.graph_interface import (
    CHANNELS_LAST_FORMATS,
    Example,
    GraphPass,
    GraphRewriter,
    Layer,
    Layers,
    Node,
    is_channels_last,
)


@dataclass(frozen=True)
class PadChannels(GraphPass):
    """Pad linear layers and convolutions with zeros to multiples of 8 channels, which tensor cores prefer.

        y = W x + b,  W (out, in)   ->   y = (W' x' + b')[:out],  W' (out', in'), x' (in'), b' (out') padded with zeros

    Exact: each sum only gains products of two zeros. The pass makes both zeros itself, so NaN and infinity elsewhere
    have no effect. The extra outputs are cut off, and the rest has the memory format of the layer's output. No tensor
    of the module is modified. The padded parameters are computed at the first call and cached. They are recomputed when
    a parameter was written to, moved, cast or replaced (torch doesn't count writes through `.data`). They take memory
    in addition to the originals. If gradients flow to the parameters, the graph runs as it was written.

    A layer is padded only if that can pay. `force` skips these rules:

    - Tensor cores of NVIDIA GPUs compute in float16 (since Volta) and bfloat16 (since Ampere). They are fastest with
      multiples of 8, which are 16 bytes (NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core
      Requirements"; Convolutional Layers User's Guide, "Channels In And Out"). The dtype of the layer's output counts.
    - A padded layer copies its input, its output or both, and must compute enough to make up for it. It does
      m n k multiplications and accesses m k + n k + m n numbers in memory. The ratio of the two must be at least 64.
      torch's own compiler requires more than half of the GPU's machine balance (torch/_inductor/fx_passes/pad_mm.py).
      This half is 60 to 150 for GPUs with tensor cores, and the pass takes a low value for all of them. If one graph is
      captured for inputs of any size, m is assumed to be large.
    - At most half of the multiplications may be with added zeros.
    - 1-D convolutions, and 2-D and 3-D ones whose weights aren't in channels_last, are left alone. cuDNN converts their
      feature maps to channels_last itself, and pads them in the process (NVIDIA, Tensor Ops Made Easier in cuDNN). Put
      `channels-last` before this pass. Convolutions with up to 4 input channels are left alone too, because cuDNN has
      kernels for such images.

    Exported files contain the padded layers if the forward is one graph. If you trace, export or compile the result
    yourself, you get the original layers.

    Does not handle: what torch.compile can't capture; grouped and depthwise convolutions, in which each group would
    need padding; weights that depend on the inputs, or that the forward may write to; products by other functions,
    such as `addmm` in GPT-2's Conv1D. Each layer pads its input and cuts its output, even between two padded layers.

    Attributes:
        multiple: pad the numbers of channels to multiples of this number.
        force: pad wherever it is possible, on any device and in any dtype, even if that only costs time.
    """

    multiple: int = 8
    force: bool = False

    name: ClassVar[str] = "pad-channels"
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    VALID: ClassVar[Sequence[Example]] = (
        Example("linear(x)", (2, 16), {"linear": "nn.Linear(16, 9)"}),
        Example("conv(x)", (2, 12, 6, 6), {"conv": "nn.Conv2d(12, 16, 3)"}),
    )
    REFUSED: ClassVar[Sequence[Example]] = (
        Example("conv(x)", (2, 12, 6, 6), {"conv": "nn.Conv2d(12, 12, 3, groups=4)"}, "its channels are in 4 groups"),
        Example(
            "F.linear(x, x.mean() * linear.weight)", (2, 16), {"linear": "nn.Linear(16, 9)"}, "computed at every call"
        ),
    )

    def __post_init__(self) -> None:
        if self.multiple < 2:
            raise ValueError(f"multiple must be a number of channels of 2 or more, not {self.multiple}")

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        """Pad every layer for which padding is possible and can pay."""
        layers = Layers(graph)
        unaligned = list(_unaligned_layers(graph, layers, self.multiple))
        if unaligned and not self.force and (reason := _why_not_here(unaligned, context.device)):
            graph.skip_place("", reason)
            return
        for each in unaligned:
            reason = _why_not(layers, each.layer)
            if reason is None and not self.force:
                reason = _why_it_costs(each, context.device)
            if reason is None:
                _pad(graph, layers, each)
            else:
                graph.skip(each.layer.node, reason)


# The minimum number of multiplications per number in memory. Half of the machine balance of GPUs with tensor cores is
# 60 to 150.
BALANCE = 64
# The maximum factor by which padding may increase the multiplications of a layer.
_MOST_WORK = 2
# cuDNN has kernels for images with at most this number of channels.
IMAGE_CHANNELS = 4


@dataclass(frozen=True)
class _Unaligned:
    """A layer whose numbers of channels aren't multiples."""

    layer: Layer
    # inputs, outputs: the numbers of channels to add to these
    inputs: int
    outputs: int
    examples: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # example tensors of the input, the weight and the output

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its output; under autocast it differs from the dtype of the weight."""
        return self.examples[2].dtype


def _unaligned_layers(graph: GraphRewriter, layers: Layers, multiple: int) -> Iterator[_Unaligned]:
    for node in layers.calls():
        layer = layers.layer_at(node)
        if layer is None:
            graph.skip(node, layers.why_no_layer(node))
            continue
        inputs, outputs = -layer.input_channels % multiple, -layer.channels % multiple
        if inputs or outputs:
            examples = graph.example(layer.input), graph.example(layer.weight), graph.example(node)
            yield _Unaligned(layer, inputs, outputs, examples)
        else:
            graph.explain(node, f"{layer.input_channels} and {layer.channels} channels are multiples of {multiple}")


# Whether padding is possible ------------------------------------------------------------------------------------------


def _why_not(layers: Layers, layer: Layer) -> str | None:
    if layer.groups > 1:
        return (
            f"its channels are in {layer.groups} groups, each of which would have to be padded: that costs more "
            "than it saves"
        )
    return layers.why_not_constant(layer)


# Whether padding pays -------------------------------------------------------------------------------------------------


def _why_not_here(layers: Sequence[_Unaligned], device: torch.device) -> str | None:
    """The reason why padding pays for no layer of the model; None if it may pay."""
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
    """The dtypes in which tensor cores of the device prefer multiples of 8; empty if there are no tensor cores."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ()
    major, _ = torch.cuda.get_device_capability(device)
    if major < 7:
        return ()
    return (torch.float16,) if major < 8 else (torch.float16, torch.bfloat16)


def _why_it_costs(each: _Unaligned, device: torch.device) -> str | None:
    layer = each.layer
    if each.dtype not in _dtypes_of_tensor_cores(device):
        return f"it computes in {_name_of(each.dtype)}, which doesn't gain from multiples"
    if layer.dims and (reason := _why_cudnn_does_it(each)):
        return reason
    work = layer.input_channels * layer.channels
    padded = (layer.input_channels + each.inputs) * (layer.channels + each.outputs)
    if padded > _MOST_WORK * work:
        return f"padded, it would multiply {padded / work:.1f} times as much, mostly zeros"
    return _why_copies_cost(each)


def _why_copies_cost(each: _Unaligned) -> str | None:
    source, weight, output = each.examples
    inputs, outputs = each.layer.input_channels, each.layer.channels
    text = (
        "it multiplies so little per element that copies of its inputs and outputs cost more than a faster product "
        "saves"
    )
    # The limit for large inputs, where reading the weight costs nothing in comparison.
    if weight[0, 0].numel() * inputs * outputs < BALANCE * (inputs + outputs):
        return text
    given, made = source.numel(), output.numel()
    if not isinstance(given, int) or not isinstance(made, int):
        # One graph serves inputs of any size.
        return None
    places = given // inputs if each.layer.transposed else made // outputs
    if weight.numel() * places < BALANCE * (given + weight.numel() + made):
        return f"{text}, on an input of shape {list(source.shape)}"
    return None


def _why_cudnn_does_it(each: _Unaligned) -> str | None:
    _, weight, _ = each.examples
    if weight.dim() not in CHANNELS_LAST_FORMATS or not is_channels_last(weight):
        hint = ": put channels-last before this pass" if weight.dim() in CHANNELS_LAST_FORMATS else ""
        return f"its maps are contiguous, and cuDNN pads those itself{hint}"
    if (given := each.layer.input_channels) <= IMAGE_CHANNELS:
        return f"its input has {given} channels, and cuDNN has kernels for such images"
    return None


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Rewrite --------------------------------------------------------------------------------------------------------------


def _pad(graph: GraphRewriter, layers: Layers, each: _Unaligned) -> None:
    layer, node, spatial = each.layer, each.layer.node, (0, 0) * each.layer.dims
    first, second = (each.inputs, each.outputs) if layer.transposed else (each.outputs, each.inputs)
    with graph.change(node, _what(each)):
        # The widths start with those of the last dim.
        arguments = {"weight": _padded(graph, layers, layer.weight, node, (*spatial, 0, second, 0, first))}
        if layer.bias is not None and each.outputs:
            arguments["bias"] = _padded(graph, layers, layer.bias, node, (0, each.outputs))
        if each.inputs:
            arguments["input"] = graph.call(node, F.pad, (graph.argument(node, 0, "input"), (*spatial, 0, each.inputs)))
        wide = layers.call_with(layer, node, is_alike=False, **arguments)
        if not each.outputs:
            graph.replace(node, wide)
            return
        own = graph.call(node, torch.narrow, (wide, -layer.dims - 1, 0, layer.channels))
        # Copy it in its memory format: later operations may view it or write to it.
        graph.replace_call(node, torch.clone, (own,))


def _padded(graph: GraphRewriter, layers: Layers, tensor: Node, before: Node, widths: Sequence[int]) -> Node:
    source = layers.derived_from(tensor)
    return graph.derived(before, lambda value: F.pad(value, widths), source, what="zeros behind", in_autocast=False)


def _what(each: _Unaligned) -> str:
    sides = [
        f"{count} to {count + added} {name}"
        for count, added, name in (
            (each.layer.input_channels, each.inputs, "inputs"),
            (each.layer.channels, each.outputs, "outputs"),
        )
        if added
    ]
    return f"padded with zeros from {' and from '.join(sides)}"
