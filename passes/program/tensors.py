"""References to parameters and buffers by their place in the model, which survive a replacement of the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes.torch_private import is_fake, sources_of


@dataclass(frozen=True)
class TensorRef:
    """A parameter or buffer, identified by its place rather than by the tensor.

    Attributes:
        owner: the module that registers it.
        name: its name there, such as "weight".
    """

    owner: nn.Module
    name: str

    @property
    def value(self) -> torch.Tensor | None:
        """The tensor; None if none is registered."""
        parameter = self.owner._parameters.get(self.name)
        return self.owner._buffers.get(self.name) if parameter is None else parameter


def is_own(tensor: torch.Tensor | None) -> bool:
    """Whether a folded layer may compute with this parameter.

    It may if the fold put the parameter there, or if `functional_call` replaces it temporarily by a plain tensor. It
    may not if somebody has put another parameter there, or none.
    """
    if tensor is None:
        return False
    if torch.compiler.is_dynamo_compiling():
        # With freezing, torch treats all parameters as plain ones, but they keep their attributes.
        return getattr(tensor, "sealed_layer", None) is not None
    source = source_of(tensor)
    return hasattr(source, "sealed_layer") or not isinstance(source, nn.Parameter)


def source_of(tensor: Any) -> Any:
    """Return the real tensor of a fake tensor of torch.export; any other value is returned as is."""
    # The fake tensors that `SealsWhileExporting` has marked have the attributes of the real ones.
    if torch.compiler.is_dynamo_compiling() or not is_fake(tensor) or hasattr(tensor, "sealed_layer"):
        return tensor
    return next((source for _, source in sources_of([tensor])), tensor)


def holds_own(ref: TensorRef) -> bool:
    """Whether a folded functional layer may compute with the tensor at this place."""
    held = ref.owner._parameters.get(ref.name)
    # A bias that was moved into a BatchNorm leaves a placeholder without values.
    return is_own(held) or (held is None and hasattr(ref.owner.__dict__.get(ref.name), "sealed_layer"))
