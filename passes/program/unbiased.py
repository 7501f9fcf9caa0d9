"""The forward of a layer whose bias was moved away, and that shows a placeholder for it to everybody else."""

from __future__ import annotations

from typing import Any

import torch

from passes.program.folded import FoldedConvForward, layer_output
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
    weight = unsealed(owner.weight) if torch.compiler.is_dynamo_compiling() else owner.weight
    return layer_output(owner, weight, None, input, output_size)
