"""Models whose training step has few calls, small enough to solve exactly: each as (model, inputs)."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from training_models import built


def perceptron(*widths):
    return nn.Sequential(*[layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())])


def convolutions(count, inplace=False):
    widths = [3] + [8] * count
    layers = [
        (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b, momentum=0.1), nn.ReLU(inplace)) for a, b in pairwise(widths)
    ]
    return nn.Sequential(*[layer for row in layers for layer in row])


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    """Keeps the weights of its attention, as one without a kernel for it does."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.block = Block(width)

    def forward(self, x):
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.block(x + self.out(F.dropout(weights @ v, 0.1)))


class UShaped(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [(3, 8), (8, 16), (16, 16), (32, 8), (16, 8)]
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU()) for a, b in widths
        )
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        first = self.parts[0](x)
        second = self.parts[1](F.avg_pool2d(first, 2))
        y = self.parts[2](F.avg_pool2d(second, 2))
        y = self.parts[3](torch.cat([F.interpolate(y, scale_factor=2), second], 1))
        return self.out(self.parts[4](torch.cat([F.interpolate(y, scale_factor=2), first], 1)))


def _rows(count, width):
    return torch.rand(count, width, generator=torch.Generator().manual_seed(3))


def _image(size):
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(3))


def _words():
    return torch.rand(2, 24, 16, generator=torch.Generator().manual_seed(3), requires_grad=True)


SMALL_STEPS = {
    "perceptron": lambda: built(lambda: perceptron(8, 32, 16, 48, 4), _rows(16, 8)),
    "deep perceptron": lambda: built(lambda: perceptron(8, 64, 32, 16, 48, 24, 80, 16, 32, 64, 8), _rows(16, 8)),
    "deeper perceptron": lambda: built(lambda: perceptron(16, *(32, 64, 16, 48) * 5), _rows(16, 16)),
    "equal layers": lambda: built(lambda: perceptron(*[16] * 9), _rows(32, 16)),
    "convolutions": lambda: built(lambda: convolutions(3), _image(12)),
    "convolutions in place": lambda: built(lambda: convolutions(4, inplace=True), _image(12)),
    "many convolutions": lambda: built(lambda: convolutions(8), _image(12)),
    "attention": lambda: built(lambda: Transformer(16), _words()),
    "residual": lambda: built(lambda: nn.Sequential(*[Block(16) for _ in range(5)]), _rows(32, 16).requires_grad_()),
    "U-shaped": lambda: built(UShaped, _image(16)),
}
