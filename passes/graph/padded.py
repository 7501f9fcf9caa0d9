"""Layers that compute with more channels than they have, so that the numbers of these are multiples of some number.

The channels that are added are zeros in the input, in the weight and in the bias. What is added to each sum is a product
of two zeros, and the channels that come out of it besides are cut off.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from passes.graph.casts import LoweredInput, lowering
from passes.graph.constants import Computed, value_of
from passes.graph.formats import FORMATS, is_taken_for_last
from passes.graph.guards import AroundForward, FoldedConvForward, SealedOutput, standing_around
from passes.graph.hooks import has_global_hooks, has_hooks

_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class PaddedTensor(Computed):
    """A weight or bias with zeros behind its channels; the tensor itself stays what it is.

    Args:
        widths: as `torch.nn.functional.pad` takes them.
    """

    under_autocast = True

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)

    def compute(self, *sources: torch.Tensor) -> torch.Tensor:
        """The tensor with its zeros, in the memory format that it has."""
        (source,) = sources
        return F.pad(source, self.widths)


class PaddedForward(AroundForward):
    """The forward of a linear layer or convolution that computes with more channels than it has.

    Its parameters stay as they are, and those that it computes with are made of them: anew where they were written to, cast,
    moved or replaced. What doesn't fit (a weight of another shape or class, an input of other channels) is computed
    without padding, and so is all that torch.compile traces, which pads by itself.

    Attributes:
        inputs, outputs: how many channels are added.
        shape: of the weight that these are added to.
    """

    is_atom = True

    def __init__(self, owner: nn.Module, inner: Any, inputs: int, outputs: int) -> None:
        self.owner = owner
        self.inner = inner
        self.inputs = inputs
        self.outputs = outputs
        self.transposed = isinstance(owner, _ConvTransposeNd)
        self.shape: tuple[int, ...] = tuple(cast(torch.Tensor, owner.weight).shape)
        first, second = (inputs, outputs) if self.transposed else (outputs, inputs)
        # Those of the last dim come first.
        self.weight = PaddedTensor((0, 0) * self.dims + (0, second, 0, first))
        self.bias = PaddedTensor((0, outputs))

    @property
    def dims(self) -> int:
        """The spatial dims, which stand behind that of the channels."""
        return len(self.shape) - 2

    @property
    def made(self) -> int:
        """How many channels the layer makes."""
        return self.shape[1 if self.transposed else 0]

    @property
    def given(self) -> int:
        """How many channels it takes."""
        return self.shape[0 if self.transposed else 1]

    def __call__(self, input: Any, *size: Any, **named: Any) -> Any:
        inner = self.inner
        if inner is None:
            return self.compute_layer(self.owner, input, *size, **named)
        if isinstance(inner, FoldedConvForward):
            return inner.through(self.compute_layer, input, *size, **named)
        return inner(input, *size, **named)

    def compute(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The layer alone, with nobody looking where its output goes."""
        return self.compute_layer(self.owner, *args, **kwargs)

    def compute_layer(self, owner: nn.Module, input: Any, *size: Any, **named: Any) -> torch.Tensor:
        """What the forward of the layer's class computes."""
        if not self.fits(owner, input):
            output: torch.Tensor = type(owner).forward(owner, input, *size, **named)
            return output
        wide = self._compute(owner, widened(input, self.dims, self.inputs), size, named)
        return cut(wide, self.dims, self.made) if self.outputs else wide

    def compute_wide(self, owner: nn.Module, input: torch.Tensor, taken: int, given: int) -> torch.Tensor:
        """The same, where the input has `taken` channels that were added, of any numbers, and the output is to have `given`."""
        if not self.fits(owner, input, taken):
            # Only a value that is of other channels than in the runs that were seen comes here.
            own = cut(input, self.dims, input.shape[-self.dims - 1] - taken) if taken else input
            return widened(self.compute_layer(owner, own), self.dims, given)
        wide = self._cleared(input) if taken else widened(input, self.dims, self.inputs)
        output = self._compute(owner, wide, (), {})
        if not given:
            return cut(output, self.dims, self.made) if self.outputs else output
        return self._without_gradient(output) if torch.is_grad_enabled() else output

    def _cleared(self, input: torch.Tensor) -> torch.Tensor:
        """The input with zeros for the channels that were added, where a function may have made anything of them."""
        own = -self.dims - 1, 0, self.given
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._is_tracing() or _is_transformed(input):
            return widened(input.narrow(*own), self.dims, self.inputs)
        # Nobody else reads these.
        input.narrow(-self.dims - 1, self.given, self.inputs).zero_()
        return input

    def _without_gradient(self, output: torch.Tensor) -> torch.Tensor:
        """The output, whose added channels get no gradient: one of infinity by zero, of a root of them, would be NaN in all."""
        return widened(output.narrow(-self.dims - 1, 0, self.made), self.dims, self.outputs)

    def fits(self, owner: nn.Module, input: Any, taken: int = 0) -> bool:
        """Whether the layer can be computed with the channels that are added; `taken` are added to the input already."""
        if torch.compiler.is_compiling():
            return torch.compiler.is_exporting()
        if torch._C._is_tracing():
            # A look at a shape would warn that it becomes part of the trace.
            return True
        weight = owner.weight
        return (
            type(weight) in (torch.Tensor, nn.Parameter)
            and weight.layout is torch.strided
            and weight.shape == self.shape
            and isinstance(input, torch.Tensor)
            and input.layout is torch.strided
            and not input.is_nested
            and (input.dim() in (self.dims + 1, self.dims + 2) if self.dims else input.dim() > 0)
            and input.shape[-self.dims - 1] == self.given + taken
        )

    def _compute(self, owner: Any, wide: torch.Tensor, size: Sequence[Any], named: dict[str, Any]) -> torch.Tensor:
        weight, bias = value_of(self.weight, owner.weight), owner.bias
        if bias is not None and self.outputs:
            bias = value_of(self.bias, bias)
        if not self.dims:
            return F.linear(wide, weight, bias)
        if not self.transposed:
            output: torch.Tensor = owner._conv_forward(wide, weight, bias)
            return output
        # As in the forwards of torch.nn.ConvTranspose1d and its like.
        wanted = size[0] if size else named.get("output_size")
        places = (owner.stride, owner.padding, owner.kernel_size, self.dims, owner.dilation)
        padding = owner._output_padding(wide, wanted, *places)
        call = _TRANSPOSED[self.dims]
        return call(wide, weight, bias, owner.stride, owner.padding, padding, owner.groups, owner.dilation)


def _is_transformed(value: torch.Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(value)


def call_wide(layer: nn.Module, value: torch.Tensor, dims: int, taken: int, given: int) -> Any:
    """The call of a layer in a graph where values keep the channels that were added.

    A layer that is watched, or isn't the padded one any more, is called with its own channels, by whoever it is.

    Args:
        layer: the padded layer.
        value: its input, with `taken` channels more than the layer takes.
        dims: how many dims there are behind that of the channels.
        given: how many channels more than the layer makes the output has.
    """
    forward = wide_forward(layer)
    if forward is None or _is_watched(layer) or taken not in (0, forward.inputs) or given not in (0, forward.outputs):
        own = cut(value, dims, value.shape[-dims - 1] - taken) if taken else value
        return _with_more(layer(own), dims, given)
    if (cast := lowering(layer)) is not None:
        value = cast.lowered(value)
    if forward.inner is None:
        return forward.compute_wide(layer, value, taken, given)
    return forward.inner.through(functools.partial(forward.compute_wide, taken=taken, given=given), value)


def wide_forward(layer: nn.Module) -> PaddedForward | None:
    """The layer's forward, where that can take and give channels that were added; None for any other."""
    forward = layer.__dict__.get("forward")
    # What casts the input to the dtype of the weight casts the channels that were added with it.
    if isinstance(forward, LoweredInput):
        forward = forward.inner
    if not isinstance(forward, PaddedForward) or not isinstance(forward.inner, FoldedConvForward | None):
        return None
    return forward


def _with_more(value: Any, dims: int, count: int) -> Any:
    if isinstance(value, SealedOutput):
        return SealedOutput(widened(value.sealed_value, dims, count), value.sealed_by, value.sealed_dim)
    return widened(value, dims, count)


def _is_watched(layer: nn.Module) -> bool:
    """Whether more is run by a call of the layer than its forward."""
    # Compiled code has no need of it: what is added and cut there is no copy.
    return (
        (torch.compiler.is_compiling() and not torch.compiler.is_exporting())
        or layer._compiled_call_impl is not None
        or has_hooks(layer)
        or has_global_hooks()
    )


def widened(value: torch.Tensor, dims: int, count: int) -> torch.Tensor:
    """The value with so many channels of zeros behind its own, in the memory format that it has.

    Args:
        dims: how many dims there are behind that of the channels.
    """
    return F.pad(value, (0, 0) * dims + (0, count)) if count else value


def cut(value: torch.Tensor, dims: int, channels: int) -> torch.Tensor:
    """The first so many channels of the value, in memory as a layer gives them: what follows may view them.

    Args:
        dims: as for `widened`.
    """
    own = value.narrow(-dims - 1, 0, channels)
    if dims and value.dim() in FORMATS and is_taken_for_last(value):
        return own.contiguous(memory_format=FORMATS[value.dim()])
    return own.contiguous()


def padded_forward(module: nn.Module) -> PaddedForward | None:
    """The one that stands around the module's forward; None for none."""
    return standing_around(module, PaddedForward)
