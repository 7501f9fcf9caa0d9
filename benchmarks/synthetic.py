"""Models that consist almost only of graph, with thousands of operations on tiny weights, or almost only of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

# Operations of one block: convolution, BatchNorm, activation, addition.
OPERATIONS = 4
_CHANNELS = 2
_WIDTH = 4
_BLOCKS_OF_A_STAGE = 8
# The maximum number of layers in one list; more layers are split into several lists.
_LAYERS_OF_A_LIST = 512


def _convolution(number: int) -> nn.Conv2d:
    # Every second one has a bias, for the pass that moves biases.
    return nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, bias=number % 2 == 0)


def _activation(value: torch.Tensor, number: int) -> torch.Tensor:
    if number % 3 == 0:
        return functional.relu(value)
    return value.relu() if number % 3 == 1 else torch.relu(value)


def _in_lists(layers: Iterable[nn.Module]) -> nn.ModuleList:
    left, lists = list(layers), nn.ModuleList()
    while left:
        part, left = left[:_LAYERS_OF_A_LIST], left[_LAYERS_OF_A_LIST:]
        lists.append(nn.ModuleList(part))
    return lists


class Flat(nn.Module):
    """All blocks in one forward: one long graph."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.convolutions = _in_lists(_convolution(number) for number in range(blocks))
        self.norms = _in_lists(nn.BatchNorm2d(_CHANNELS) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolutions, norms in zip(self.convolutions, self.norms, strict=True):
            for number, (convolution, norm) in enumerate(zip(convolutions, norms, strict=True)):
                x = x + _activation(norm(convolution(x)), number)
        return x


class Block(nn.Module):
    """One block with its own forward."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.convolution = _convolution(number)
        self.norm = nn.BatchNorm2d(_CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + _activation(self.norm(self.convolution(x)), self.number)


class Nested(nn.Module):
    """Blocks in stages in a body: many short graphs, three levels deep."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        starts = range(0, blocks, _BLOCKS_OF_A_STAGE)
        self.body = nn.Sequential(
            *(nn.Sequential(*(Block(n) for n in range(s, min(s + _BLOCKS_OF_A_STAGE, blocks)))) for s in starts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Parallel(nn.Module):
    """Blocks of two linear layers on the same input, their product and an addition, all in one forward."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.gates = _in_lists(nn.Linear(_WIDTH, _WIDTH) for _ in range(blocks))
        self.values = _in_lists(nn.Linear(_WIDTH, _WIDTH) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gates, values in zip(self.gates, self.values, strict=True):
            for gate, value in zip(gates, values, strict=True):
                x = x + gate(x) * value(x)
        return x


SHAPES: dict[str, Callable[[int], nn.Module]] = {"flat": Flat, "nested": Nested, "parallel": Parallel}


def graph_of(shape: str, operations: int) -> nn.Module:
    """A model in eval with that many operations, rounded down to whole blocks."""
    return SHAPES[shape](max(1, operations // OPERATIONS)).eval()


def example_of_graph() -> torch.Tensor:
    """A tiny input that all of these models support."""
    return torch.randn(2, _CHANNELS, _WIDTH, _WIDTH, generator=torch.Generator().manual_seed(0))


class Weights(nn.Module):
    """Convolutions with BatchNorms on tiny images: almost nothing but weights."""

    def __init__(self, mebibytes: int) -> None:
        super().__init__()
        self.channels = 512 if mebibytes >= 64 else 128
        layers = max(1, round(mebibytes * 2**20 / (4 * 9 * self.channels**2)))
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(self.channels, self.channels, 3, padding=1, bias=False), nn.BatchNorm2d(self.channels)
            )
            for _ in range(layers)
        )
        for layer in self.layers:
            # With the default initialization, the signal would vanish after a hundred layers.
            nn.init.kaiming_uniform_(layer[0].weight, nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

    def example(self) -> torch.Tensor:
        return torch.randn(2, self.channels, 4, 4, generator=torch.Generator().manual_seed(0))


class _PairOfLayers(nn.Module):
    """A convolution and its BatchNorm, called as in most models."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(_CHANNELS, _CHANNELS, 1, bias=False)
        self.norm = nn.BatchNorm2d(_CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.conv(x))
        return normed


def pairs_of(count: int) -> nn.Sequential:
    """A model in eval with that many pairs of a convolution and a BatchNorm; on tiny maps, only calls cost time."""
    return nn.Sequential(*(_PairOfLayers() for _ in range(count))).eval()


def pairs_folded_by_hand(model: nn.Sequential) -> nn.Sequential:
    """The same, with each pair folded by torch's public function; an `nn.Identity` replaces the BatchNorm."""
    folded = deepcopy(model)
    for pair in folded:
        assert isinstance(pair, _PairOfLayers)
        pair.conv = fuse_conv_bn_eval(pair.conv, pair.norm)
        pair.norm = nn.Identity()  # type: ignore[assignment]
    return folded
