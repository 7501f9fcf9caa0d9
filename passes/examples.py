"""Small modules that a graph pass changes or refuses. They stand on the pass: tests run them, and the docs show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Example:
    """A module, and whether a pass changes it.

    Attributes:
        forward: the expression that the module returns for its input `x`, such as "norm(conv(x))". It may use `torch`,
            `F` and the layers.
        shape: the shape of `x`; its first dim is the batch.
        layers: the layers and parameters by name, each as an expression such as "nn.Conv2d(3, 8, 3)".
        reason: a part of the reason why the pass refuses it; "" if the pass changes it.
    """

    forward: str
    shape: tuple[int, ...]
    layers: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""

    def module(self) -> nn.Module:
        """Make the module in eval mode, with random weights and statistics."""
        names: dict[str, Any] = {"torch": torch, "F": F, "nn": nn}
        made = {name: eval(code, names) for name, code in self.layers.items()}
        forward = eval(f"lambda self, x, {', '.join(made)}: {self.forward}", names)
        module = type("Net", (_Net,), {"run": forward})(made).eval()
        with torch.no_grad():
            for tensor in (*module.parameters(), *(each for each in module.buffers() if each.is_floating_point())):
                tensor.uniform_(0.5, 1.5)
        return module

    def __str__(self) -> str:
        layers = ", ".join(f"`{name} = {code}`" for name, code in self.layers.items())
        text = f"`{self.forward}`{f' with {layers}' if layers else ''}"
        return f"{text}: {self.reason}" if self.reason else text


class _Net(nn.Module):
    run: Any

    def __init__(self, made: Mapping[str, Any]) -> None:
        super().__init__()
        for name, each in made.items():
            setattr(self, name, each)
        self._names = list(made)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(x, *(getattr(self, name) for name in self._names))
