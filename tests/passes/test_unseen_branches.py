"""Models with branches that no example input takes: each returns the output of the original."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_models import image
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import optimize, report_of

GRAPH_PASSES = [
    "fold-conv-bias", "fold-conv-bn", "channels-last", "simplify", "merge-linears:force=true", "pad-channels:force=true",
    "jit-fusion",
]  # fmt: skip
PASSES: dict[str, list[str] | None] = {"preset": None, "graph passes": GRAPH_PASSES}


class ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.bn = nn.BatchNorm2d(outputs)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class Backbone(nn.Module):
    """A network for two domains, each with its own BatchNorm, that returns features on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBlock(3, 8)
        self.body = ConvBlock(8, 8, stride=2)
        self.mix = nn.Conv2d(8, 8, 1, bias=False)
        self.day = nn.BatchNorm2d(8)
        self.night = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        self.tap: Tensor | None = None

    def forward(self, x: Tensor, want: str = "") -> Any:
        if want == "features before the BatchNorm":
            return self.stem.conv(x)
        if want == "both features":
            before = self.stem.conv(x)
            return {"before": before, "after": self.stem.bn(before)}
        if want == "kept features":
            self.tap = self.stem.conv(x)
            return self.stem.bn(self.tap) + self.tap.mean()
        if want == "channels in another order":
            return self.stem.bn(self.stem.conv(x).flip(1))
        if want == "two sizes in one batch":
            halves = [self.stem.conv(half) for half in x.chunk(2)]
            return self.stem.bn(torch.cat(halves))
        x = self.body(self.stem(x))
        norm = self.night if want == "the other domain" else self.day
        x = F.relu(norm(self.mix(x)))
        if want == "raw class map":
            return F.conv2d(x, self.mix.weight)
        if want == "shape":
            y = self.mix(x)
            return self.head(x.mean((2, 3))) * (y.shape[1] + y.dim() + len(y))
        return self.head(x.mean((2, 3)))


def penalty_of(blocks: list[ConvBlock]) -> Tensor:
    """A helper that gets the blocks, not the model."""
    return torch.stack([block.conv.weight.square().sum() for block in blocks]).sum()


def shift_of(block: ConvBlock) -> Tensor:
    assert block.conv.bias is not None
    return block.conv.bias.abs().mean()


class Regularised(nn.Module):
    """A classifier that reads its own weights and statistics, for a loss, a gate or a log."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ConvBlock(3, 8)
        self.second = ConvBlock(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, extra: str = "") -> Any:
        statistics: Any = self.first.bn
        if extra == "fresh statistics":
            self.first.bn.reset_running_stats()
        if extra == "statistics by hand":
            statistics.running_mean.zero_()
            statistics.running_var.fill_(1)
        if extra == "other epsilon":
            self.first.bn.eps = 0.1
        y = self.head(self.second(self.first(x)).mean((2, 3)))
        gamma: Any = self.first.bn.weight
        spread: Any = self.second.bn.running_var
        if extra == "penalty":
            return y, penalty_of([self.first, self.second])
        if extra == "bias in a helper":
            return y + shift_of(self.first)
        if extra == "slimming":
            return y, gamma.abs().sum()
        if extra == "statistics as a feature":
            return y + spread.sqrt().mean()
        if extra == "gate by a tensor":
            return y if gamma[0] > 0.1 else 2 * y
        if extra == "gate by a number":
            return y if gamma[0].item() > 0.1 else 2 * y
        if extra == "log of a weight":
            return y, self.first.conv.weight[0, 0, 0].tolist()
        if extra == "same as at the start":
            return y if torch.equal(self.first.bn.weight, torch.zeros(8)) else 2 * y
        if extra == "norm for a log":
            return y, float(self.first.conv.weight.detach().norm())
        return y


class Adapted(nn.Module):
    """A residual block with a layer scale and a low-rank adapter of its convolution's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.lift = nn.Conv2d(3, 8, 3)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.rand(8, 1, 1) + 0.5)
        self.project = nn.Conv2d(8, 8, 1)
        self.down = nn.Parameter(torch.randn(2, 72) / 8)
        self.up = nn.Parameter(torch.randn(8, 2) / 2)

    def delta(self) -> Tensor:
        return (self.up @ self.down).view(8, 8, 3, 3)

    def forward(self, x: Tensor, adapter: str = "") -> Any:
        if adapter == "padded":
            self.lift.padding = (1, 1)
        x = self.lift(self.norm(x))
        if adapter == "functional":
            y = F.conv2d(x, self.conv.weight + self.delta(), self.conv.bias, padding=1)
            return x + self.project(self.bn(y)) * self.scale
        if adapter == "beside":
            y = self.conv(x) + F.conv2d(x, self.delta(), padding=1)
            return x + self.project(self.bn(y)) * self.scale
        if adapter == "without the scale":
            return x + self.project(self.bn(self.conv(x)))
        if adapter == "scale as a number":
            return x + self.project(self.bn(self.conv(x))) * float(self.scale[0].detach())
        if adapter == "merged in place":
            with torch.no_grad():
                self.conv.weight += self.delta()
        if adapter == "merged into a copy":
            merged = copy.deepcopy(self.conv)
            with torch.no_grad():
                merged.weight.add_(self.delta())
            return x + self.project(self.bn(merged(x))) * self.scale
        if adapter == "merged into a new parameter":
            self.conv.weight = nn.Parameter((self.conv.weight + self.delta()).detach())
        return x + self.project(self.bn(self.conv(x))) * self.scale


# The branches of each model, read from the source of its forward.
CASES = [
    (build, branch)
    for build in (Backbone, Regularised, Adapted)
    for branch in re.findall(r'(?:want|extra|adapter) == "(.+?)"', inspect.getsource(build.forward))
]


def _model(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return enliven(build()).eval()


def _parameters() -> list[Any]:
    return [
        # With graph passes, each case takes ten seconds, because torch captures it again and again.
        pytest.param(
            build,
            branch,
            passes,
            id=f"{branch}, {passes}",
            marks=pytest.mark.zoo if passes == "graph passes" and number >= 3 else (),
        )
        for number, (build, branch) in enumerate(CASES)
        for passes in PASSES
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("build", "branch", "passes"), _parameters())
def test_an_unseen_branch_is_right(build: Callable[[], nn.Module], branch: str, passes: str) -> None:
    model = _model(build)
    fast = optimize(model, PASSES[passes], example_inputs=(image(),))
    assert "fold-conv-bn" in {record.name for record in report_of(fast).passes if record.changes}
    x = image(4, 3, 8, 8, seed=1)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    # A branch may write to the weights, whose memory is that of the model.
    twin = copy.deepcopy(model)
    torch.testing.assert_close(fast(x, branch), twin(x, branch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("part", ["body", "body.conv"])
def test_features_are_right_in_a_hook(part: str, passes: str) -> None:
    model = _model(Backbone)
    fast = optimize(model, PASSES[passes], example_inputs=(image(),))
    collected: list[Tensor] = []
    one: Any
    for one in (copy.deepcopy(model), fast):
        one.get_submodule(part).register_forward_hook(lambda module, inputs, output: collected.append(output.detach()))
        one(image())
    torch.testing.assert_close(collected[1], collected[0], rtol=1e-4, atol=1e-4)
