"""Which convolutions can be in channels_last, and what they cost on a CPU, as numbers of moved elements."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from passes.graph.layouts import kind_of
from passes.torch_private import convolution_kernel

# Kernels that read a channels_last weight without packing it.
READING_CHANNELS_LAST = frozenset({"Slow2d", "SlowDilated2d", "SlowTranspose2d"})
# Kernels that return contiguous maps for inputs in any format.
CONTIGUOUS_KERNELS = frozenset({"Slow3d", "SlowDilated3d", "SlowTranspose3d"})


@dataclass(frozen=True)
class Costs:
    """The cost of one convolution, or BatchNorm in training, as a number of moved elements."""

    channels_last: float  # the cost in channels_last
    contiguous: float  # the cost in contiguous format
    change: float  # the cost of converting its input from one format to the other


def cheapest_formats(costs: Sequence[Costs]) -> list[bool]:
    """For each layer, in the order of execution, whether it is in channels_last in the cheapest run.

    In channels_last, oneDNN packs the weight at every call, in a slow way. In contiguous format, it converts the input
    to a blocked layout and the output back. Measured on a ResNet-50, both take equally long for equal numbers of
    elements. torch's own kernels, which it selects for small inputs, pack nothing. Between two convolutions of
    different formats, the input is converted. The cheapest formats for the whole run are the shortest path through two
    states per convolution.
    """
    # The costs of the cheapest runs up to here that end in contiguous format and in channels_last. `origins` has, for
    # each layer and each of these ends, whether the layer before it is in channels_last.
    totals = (0.0, math.inf)
    origins: list[tuple[bool, bool]] = []
    for cost in costs:
        contiguous, last = totals
        origin = (last + cost.change < contiguous, last <= contiguous + cost.change)
        origins.append(origin)
        totals = (
            min(contiguous, last + cost.change) + cost.contiguous,
            min(last, contiguous + cost.change) + cost.channels_last,
        )
    is_last = totals[1] <= totals[0]
    formats = []
    for origin in reversed(origins):
        formats.append(is_last)
        is_last = origin[is_last]
    return formats[::-1]


def why_dear(cost: Costs, kernels: Collection[str]) -> str:
    """Why a convolution with this cost, which these kernels compute, is contiguous in the cheapest run."""
    if not CONTIGUOUS_KERNELS.isdisjoint(kernels):
        return "its kernel returns contiguous maps for inputs in any format"
    if cost.channels_last > cost.contiguous:
        return "its weight is large compared with its maps: channels_last would cost more at every call than it saves"
    return (
        "the convolutions around it are faster in contiguous format, and converting between the formats would cost more "
        "than it saves"
    )


def kernel_of(named: Mapping[str, Any], weight: torch.Tensor, given: torch.Size, transposed: bool) -> str:
    """The name of the kernel that torch selects for an input of this shape.

    Args:
        named: the further arguments of the convolution by name; those left to their defaults may be missing.
    """
    dims = weight.dim() - 2
    batched = given if len(given) == weight.dim() else (1, *given)

    def each(name: str, default: int) -> list[int]:
        value = named.get(name, default)
        return [value] * dims if isinstance(value, int) else list(value)

    dilation = each("dilation", 1)
    padding = named.get("padding", 0)
    if padding == "same":
        padding = [step * (size - 1) // 2 for step, size in zip(dilation, weight.shape[2:], strict=True)]
    no_values = torch.empty((), dtype=weight.dtype)
    return convolution_kernel(
        no_values.expand(batched),
        no_values.expand(weight.shape),
        stride=each("stride", 1),
        padding=[0] * dims if padding == "valid" else [padding] * dims if isinstance(padding, int) else list(padding),
        dilation=dilation,
        transposed=transposed,
        output_padding=each("output_padding", 0),
        groups=named.get("groups", 1),
    )


def why_no_format(weight: torch.Tensor) -> str | None:
    """The reason why a weight has no memory format, as a clause; None if it has one."""
    if is_lazy(weight):
        return "its weight is not initialised yet: run the model once first"
    if kind := kind_of(weight):
        return f"its weight is {kind}"
    return None
