"""Weights of convolutions in the memory format that the kernels for images want."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from passes.base import Context, GraphPass
from passes.graph.match import Node, TensorRef, convolution_at, has_hooks, is_parametrized
from passes.graph.program import Program
from passes.graph.rewriter import Rewriter

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class ChannelsLast(GraphPass):
    """Put the weights of 2-D and 3-D convolutions into channels_last, and give outputs back as the caller knows them.

    A convolution with such a weight makes such an output, and pointwise operations, BatchNorm and pooling keep it: the
    whole runs in that format from the first convolution on. The root's outputs are brought back to the order of dims in
    memory that the original gives them.

    Does not handle: shared or parametrized weights; outputs with gaps in memory, such as a slice of every second
    channel, which come in the strides that they get; it doesn't run without example inputs, since a `view` somewhere in
    the forward may count on the old format, which only a run shows.
    """

    name: ClassVar[str] = "channels-last"
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    def rewrite(self, graph: Rewriter) -> None:
        """Only `rewrite_in` knows whether there are example inputs."""
        self.rewrite_in(graph, Context("inference", torch.device("cpu")))

    def rewrite_in(self, graph: Rewriter, context: Context) -> None:
        """Convert every weight that can be converted."""
        for path, module in _convolutions(graph.program.root):
            reason = _why_not(graph.program, module, context)
            if reason is None:
                _convert(graph, path, module)
            elif reason:
                graph.skip_module(path, reason)
        if graph.changes and any(context.output_orders):
            graph.keep_output_orders(context.output_orders)


def _convolutions(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in root.named_modules():
        weight = module._parameters.get("weight") if isinstance(module, _ConvNd) else None
        if weight is not None and (is_lazy(weight) or weight.dim() in _FORMATS):
            yield path, module


def _why_not(program: Program, module: nn.Module, context: Context) -> str | None:
    """The reason why the weight stays; "" where it needs no change."""
    weight = module._parameters["weight"]
    assert weight is not None
    if is_lazy(weight):
        return "its weight is not initialised yet: run the model once first"
    if weight.is_contiguous(memory_format=_FORMATS[weight.dim()]):
        return ""
    if not context.example_calls:
        return "only a run shows that no view counts on the old format: give example inputs"
    if weight.is_meta:
        return "its weight is on the meta device and has no values"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if is_parametrized(module):
        return "it has parametrizations"
    if has_hooks(module):
        return "it has hooks, which may set its weight"
    if program.holders_of(weight) > 1:
        return "its weight is shared with another module"
    for reader in program.readers_of(module, "weight"):
        if not all(_convolves(program, user, reader) for user in reader.users):
            return (
                f"its weight is also read by {program.home(reader).path or 'the root'}, which may count on the format"
            )
    return None


def _convolves(program: Program, user: Node, weight: Node) -> bool:
    """Whether the node is a convolution by that weight, and uses it for nothing else."""
    conv = convolution_at(program, user)
    return conv is not None and conv.input is not weight


def _convert(graph: Rewriter, path: str, module: nn.Module) -> None:
    weight = module._parameters["weight"]
    assert weight is not None
    memory_format = _FORMATS[weight.dim()]
    calls = graph.program.calls_of(module)
    region = calls[:1] if len(calls) == 1 else ()
    with graph.change(path, f"weight in {str(memory_format).removeprefix('torch.')}", region) as change:
        change.sources.append(TensorRef(module, "weight"))
        graph.set_memory_format(change, TensorRef(module, "weight"), memory_format)
