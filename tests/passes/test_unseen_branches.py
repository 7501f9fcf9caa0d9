"""Models with branches that no example input takes: each returns the output of the original."""

from __future__ import annotations

import copy
import inspect
import re
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


class Net(nn.Module):
    """A classifier for two domains, each with its own BatchNorm, with a layer scale and an adapter of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.mix, self.day, self.night = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.rand(8, 1, 1) + 0.5)
        self.down, self.up = nn.Parameter(torch.randn(2, 72) / 8), nn.Parameter(torch.randn(8, 2) / 2)
        self.head = nn.Linear(8, 5)
        self.tap: Tensor | None = None

    def delta(self) -> Tensor:
        return (self.up @ self.down).view(8, 8, 3, 3)

    def forward(self, x: Tensor, want: str = "") -> Any:
        statistics: Any = self.bn
        if want == "padded":
            self.stem.padding = (1, 1)
        if want == "other epsilon":
            self.bn.eps = 0.1
        if want == "statistics by hand":
            statistics.running_mean.zero_()
            statistics.running_var.fill_(1)
        if want == "merged in place":
            with torch.no_grad():
                self.conv.weight += self.delta()
        if want == "merged into a new parameter":
            self.conv.weight = nn.Parameter((self.conv.weight + self.delta()).detach())
        x = self.stem(x)
        if want == "features before the BatchNorm":
            return x
        if want == "kept features":
            self.tap = x
        if want == "channels in another order":
            x = x.flip(1)
        x = F.relu(self.norm(x))
        if want == "adapted":
            x = x + self.bn(F.conv2d(x, self.conv.weight + self.delta(), self.conv.bias, padding=1)) * self.scale
        elif want == "without the scale":
            x = x + self.bn(self.conv(x))
        elif want == "scale as a number":
            x = x + self.bn(self.conv(x)) * float(self.scale[0].detach())
        else:
            x = x + self.bn(self.conv(x)) * self.scale
        norm = self.night if want == "the other domain" else self.day
        y = self.head(F.relu(norm(self.mix(x))).mean((2, 3)))
        gamma: Any = self.bn.weight
        if want == "slimming":
            return y, gamma.abs().sum() + self.conv.weight.square().sum()
        if want == "gate by a tensor":
            return y if gamma[0] > 0.1 else 2 * y
        if want == "log of a weight":
            return y, self.conv.weight[0, 0, 0].tolist()
        return y


BRANCHES = re.findall(r'want == "(.+?)"', inspect.getsource(Net.forward))


def _parameters() -> list[Any]:
    return [
        # With graph passes, each case takes ten seconds, because torch captures it again and again.
        pytest.param(
            branch,
            passes,
            id=f"{branch}, {passes}",
            marks=pytest.mark.zoo if passes == "graph passes" and number >= 3 else (),
        )
        for number, branch in enumerate(BRANCHES)
        for passes in PASSES
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("branch", "passes"), _parameters())
def test_an_unseen_branch_is_right(branch: str, passes: str) -> None:
    torch.manual_seed(0)
    model = enliven(Net()).eval()
    fast = optimize(model, PASSES[passes], example_inputs=(image(),))
    assert "fold-conv-bn" in {record.name for record in report_of(fast).passes if record.changes}
    x = image(4, 3, 8, 8, seed=1)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    # A branch may write to the weights, whose memory is that of the model.
    twin = copy.deepcopy(model)
    torch.testing.assert_close(fast(x, branch), twin(x, branch), rtol=1e-4, atol=1e-4)
