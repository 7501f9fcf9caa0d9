"""Models with a convolution and a BatchNorm after it, each with a difficulty for folding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from tiny_models import Net, enliven
from torch import nn

Tensor = torch.Tensor
CONVOLUTIONS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda **k: nn.Conv1d(4, 6, 3, padding=1, **k), (2, 4, 9)),
    "conv1d grouped": (lambda **k: nn.Conv1d(4, 6, 3, groups=2, **k), (2, 4, 9)),
    "conv2d": (lambda **k: nn.Conv2d(4, 6, 3, stride=2, **k), (2, 4, 8, 8)),
    "conv2d grouped": (lambda **k: nn.Conv2d(4, 6, 3, groups=2, dilation=2, **k), (2, 4, 8, 8)),
    "conv2d depthwise": (lambda **k: nn.Conv2d(4, 4, 3, groups=4, padding="same", **k), (2, 4, 8, 8)),
    "conv2d reflect": (lambda **k: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", **k), (2, 4, 8, 8)),
    "conv2d 1x1": (lambda **k: nn.Conv2d(4, 6, 1, **k), (2, 4, 8, 8)),
    "conv3d": (lambda **k: nn.Conv3d(4, 6, 3, **k), (2, 4, 5, 5, 5)),
    "conv3d grouped": (lambda **k: nn.Conv3d(4, 6, 3, groups=2, **k), (2, 4, 5, 5, 5)),
    "transposed1d": (lambda **k: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, **k), (2, 4, 5)),
    "transposed1d grouped": (lambda **k: nn.ConvTranspose1d(4, 6, 3, groups=2, **k), (2, 4, 5)),
    "transposed2d": (lambda **k: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, **k), (2, 4, 5, 5)),
    "transposed2d grouped": (
        lambda **k: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2, **k),
        (2, 4, 5, 5),
    ),
    "transposed2d depthwise": (lambda **k: nn.ConvTranspose2d(4, 4, 3, groups=4, padding=1, **k), (2, 4, 5, 5)),
    "transposed3d": (lambda **k: nn.ConvTranspose3d(4, 6, 2, **k), (2, 4, 3, 3, 3)),
    "transposed3d grouped": (
        lambda **k: nn.ConvTranspose3d(4, 6, 3, stride=2, output_padding=1, groups=2, **k),
        (2, 4, 3, 3, 3),
    ),
    "linear": (lambda **k: nn.Linear(4, 6, **k), (2, 4)),
}
_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def norm_behind(convolution: nn.Module, shape: tuple[int, ...], **options: Any) -> nn.Module:
    channels = getattr(convolution, "out_channels", None) or convolution.out_features
    return _NORMS[len(shape)](channels, **options)


def image(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape or (2, 3, 8, 8), generator=torch.Generator().manual_seed(seed))


def side_by_side(*blocks: nn.Module, shapes: Iterable[tuple[int, ...]]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model in float64 that calls each block with an input of its own, and the inputs."""
    model = Net(lambda m, *xs: [block(x) for block, x in zip(m.blocks, xs, strict=True)], blocks=nn.ModuleList(blocks))
    return enliven(model).double().eval(), tuple(image(*shape).double() for shape in shapes)


class Pair(nn.Module):
    """A convolution and its BatchNorm; subclasses use the two in other ways."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        # Seed the weights, so that two models of one class are equal.
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=bias)
            self.bn = nn.BatchNorm2d(4)
            self.more()
        enliven(self)

    def more(self) -> None:
        """Add or replace modules in a subclass."""

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)).relu()


def let_cancel(weight: Tensor) -> None:
    """Set values whose products with the same number in all three input channels cancel, exactly in any float dtype.

    If that number is large, the result is small. Folded weights are rounded again, so they leave a larger result.
    """
    first, second = (torch.randint(1, 17, (len(weight), 9)).float() / 64 for _ in range(2))
    with torch.no_grad():
        weight.copy_(torch.stack([first, second, -(first + second)], 2).view(-1, 3, 3, 3))


class BatchNormAct(nn.BatchNorm2d):
    """A BatchNorm with an activation, whose forward calls the function, as in image models."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return torch.nn.functional.silu(x)


class WithAct(Pair):
    def more(self) -> None:
        self.bn = BatchNormAct(4)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x))


class SameForward(nn.Conv2d):
    """A subclass that inherits forward."""

    def describe(self) -> str:
        return "a convolution"


class KeptForward(Pair):
    def more(self) -> None:
        self.conv = SameForward(3, 4, 3)


class StandardisedConv(nn.Conv2d):
    """Standardizes its weight at every call, by a batch_norm that belongs to no BatchNorm of the model."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True)
        return F.conv2d(x, weight.reshape(4, 3, 3, 3), self.bias)


class Standardised(Pair):
    def more(self) -> None:
        self.conv = StandardisedConv(3, 4, 3)


class DirectConv(nn.Conv2d):
    """Has its own forward, which calls the function on its own weight; the graph shows what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, bias=self.bias, stride=self.stride)


class Direct(Pair):
    def more(self) -> None:
        self.conv = DirectConv(3, 4, 3)


class Functional(Pair):
    """Uses only functions, on its own parameters and buffers."""

    def more(self) -> None:
        self.w = nn.Parameter(torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(3)))
        self.gain = nn.Parameter(torch.tensor([0.5, 1.5, -1.0, 2.0]))
        self.register_buffer("mean", torch.tensor([0.1, -0.2, 0.3, 0.4]))
        self.register_buffer("var", torch.tensor([0.5, 1.5, 2.0, 0.7]))
        del self.conv, self.bn

    def forward(self, x: Tensor) -> Any:
        return F.batch_norm(F.conv2d(x, self.w), self.mean, self.var, self.gain, None, False, 0.1, 1e-3).relu()


class TorchFunctions(Functional):
    """Uses functions of torch, not only of torch.nn.functional, and keywords in another order."""

    def more(self) -> None:
        super().more()
        self.shift = nn.Parameter(torch.tensor([1.0, -1.0, 0.5, 0.2]))
        self.register_buffer("second_mean", torch.tensor([0.3, 0.2, -0.3, 0.1]))
        self.register_buffer("second_var", torch.tensor([1.5, 1.1, 0.4, 0.9]))

    def forward(self, x: Tensor) -> Any:
        y = torch.conv2d(x, weight=self.w, padding=1)
        z = F.batch_norm(running_mean=self.mean, running_var=self.var, weight=self.gain, input=y)
        return torch.batch_norm(z, None, self.shift, self.second_mean, self.second_var, False, 0.1, 1e-5, False)


class FunctionalBias(Functional):
    def more(self) -> None:
        super().more()
        self.b = nn.Parameter(torch.tensor([1.0, -1.0, 0.5, 0.2]))

    def forward(self, x: Tensor) -> Any:
        return F.batch_norm(F.conv2d(x, self.w, self.b), self.mean, self.var, self.gain)


class ThroughIdentity(Pair):
    def more(self) -> None:
        self.between = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.between(input=self.conv(x))).relu()


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.tanh())


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x).relu()


class AcrossModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = Stem(), Head()
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x))


class Nested(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity())), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
        )
        enliven(self)


class SharedBlock(nn.Module):
    """A block that is called twice; each of its tensors still has only one use."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x).relu())


class TwoNorms(Pair):
    def more(self) -> None:
        self.second = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.bn(self.conv(x))).relu()


class Island(Pair):
    """Has a data-dependent branch, so that it can't be part of a graph."""

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return y if x.sum() > 1e6 else self.bn(y).relu()


FOLDED = [
    Pair, WithAct, KeptForward, Direct, Functional, TorchFunctions, FunctionalBias, ThroughIdentity, AcrossModules,
    Nested, SharedBlock, TwoNorms,
]  # fmt: skip


class Scale(nn.Module):
    """A product by channel, in a separate module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + image(4, 1, 1, seed=5).abs())

    def forward(self, x: Tensor) -> Any:
        return x * self.weight
