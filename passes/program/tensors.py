"""References to parameters and buffers by their place in the model, which survive a replacement of the tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


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
        """The tensor; None if the name is registered without one, or if the owner computes it."""
        owner, name = self.owner, self.name
        if (parameter := owner._parameters.get(name)) is not None:
            return parameter
        if (buffer := owner._buffers.get(name)) is not None:
            return buffer
        if (name in owner._parameters and name not in owner.__dict__) or self.is_computed:
            return None
        if hasattr(owner.__dict__.get(name), "sealed_layer"):
            # A placeholder for a tensor whose values were folded into others.
            return None
        value = getattr(owner, name, None)
        return value if isinstance(value, torch.Tensor) else None

    @property
    def is_computed(self) -> bool:
        """Whether a property of the owner's class computes it at every access.

        The computation may write to the model, as that of spectral_norm does.
        """
        return hasattr(type(self.owner), self.name)

    @property
    def is_there(self) -> bool:
        """Whether the owner has a tensor under the name, or computes one."""
        return self.value is not None or self.is_computed
