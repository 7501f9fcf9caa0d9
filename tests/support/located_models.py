"""A network for tests that search for places in its files and results, and the lines of its source."""

from pathlib import Path

import torch
from tiny_models import enliven
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.one, self.two = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.one(self.first(x)))
        return torch.relu(self.two(self.second(y)) + x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.shared = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(self.stem(x)).mean((2, 3))
        return self.head(self.norm(self.shared(self.shared(y))))


class Late(nn.Module):
    """Adds multiples of `extra`, which is zero at first, to what lies beyond the first `start` indices of a dim."""

    def __init__(self, dim: int, start: int) -> None:
        super().__init__()
        self.extra, self.dim, self.start = nn.Parameter(torch.zeros(4)), dim, start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(torch.ones_like(x[..., :1]).cumsum(self.dim) - self.start) * self.extra


class LateNet(nn.Module):
    def __init__(self, dim: int, start: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.late, self.last = enliven(nn.Linear(4, 4)), Late(dim, start), enliven(nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.late(self.first(x)))


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def line_with(text: str, file: str = __file__) -> str:
    """The place of the line with this text, as reports write it."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.strip() == text)
    return f"{Path(file).name}:{number}"
