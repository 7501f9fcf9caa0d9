"""A small residual network, for the recipes in this folder."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)) + x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Block(16) for _ in range(3)))
        self.head = nn.Linear(16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


def get_model() -> nn.Module:
    """The model in eval mode; yours loads its weights from a file, by `weights` in models.toml."""
    torch.manual_seed(0)
    return Net().eval()


def get_example_inputs() -> tuple[torch.Tensor, ...]:
    """A batch of two images."""
    return (torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)),)
