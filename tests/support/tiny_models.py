"""Give small models biases and statistics that make comparisons meaningful."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """Returns what a function makes of the module and its inputs; it holds layers, parameters and others by name."""

    def __init__(self, run: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)
        self.run = run

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        return self.run(self, x, *more)


def enliven(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw biases, the weights of norm layers and BatchNorm statistics, in place, and return the model.

    A freshly initialised network outputs almost nothing, and a BatchNorm with mean 0 and variance 1 is almost the
    identity: a comparison over such a model proves nothing.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return (
            torch.rand(like.shape, generator=generator, dtype=torch.float64).mul_(high - low).add_(low).to(like.dtype)
        )

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                if module.running_mean is not None:
                    module.running_mean.copy_(uniform(module.running_mean, -0.5, 0.5))
                    module.running_var.copy_(uniform(module.running_var, 0.5, 2.0))
                if module.affine:
                    module.weight.copy_(uniform(module.weight, 0.5, 1.5))
                    module.bias.copy_(uniform(module.bias, -0.3, 0.3))
            elif isinstance(module, nn.LayerNorm | nn.GroupNorm) and module.weight is not None:
                module.weight.copy_(uniform(module.weight, 0.5, 1.5))
                if module.bias is not None:
                    module.bias.copy_(uniform(module.bias, -0.3, 0.3))
            elif getattr(module, "bias", None) is not None and isinstance(module.bias, torch.Tensor):
                module.bias.copy_(uniform(module.bias, -0.3, 0.3))
    return model
