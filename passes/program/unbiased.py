"""The forward of a layer whose bias was moved away, and that shows a placeholder for it to everybody else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from passes.program.folded import FoldedConvForward
from passes.program.weights import unsealed
from passes.torch_private import without_subclasses


class UnbiasedForward(FoldedConvForward):
    """The forward of a layer whose `bias` attribute is a placeholder: it computes with the registered parameters."""

    def through(self, layer: Any, input: Any, *size: Any, **named: Any) -> Any:
        """See `FoldedConvForward.through`; a layer's own forward would read the placeholder."""
        return super().through(layer or _unbiased, input, *size, **named)

    def compute(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the layer alone, without checks and without a seal on the output."""
        with without_subclasses():
            return _unbiased(self.owner, *args, **kwargs)


def _unbiased(owner: Any, input: Any, output_size: Any = None) -> torch.Tensor:
    weight, output = owner.weight, None
    if torch.compiler.is_dynamo_compiling():
        weight = unsealed(weight)
    if isinstance(owner, nn.Linear):
        output = functional.linear(input, weight)
    elif not owner.transposed:
        output = owner._conv_forward(input, weight, None)
    else:
        dims = len(owner.kernel_size)
        padding = owner._output_padding(
            input, output_size, owner.stride, owner.padding, owner.kernel_size, dims, owner.dilation
        )
        output = getattr(functional, f"conv_transpose{dims}d")(
            input, weight, None, owner.stride, owner.padding, padding, owner.groups, owner.dilation
        )
    return output
