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
        """The tensor; None if none is registered."""
        parameter = self.owner._parameters.get(self.name)
        return self.owner._buffers.get(self.name) if parameter is None else parameter
