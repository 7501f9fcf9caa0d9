"""The work for a model of n times as many operations is at most n times the work, counted in function calls instead of seconds."""

from __future__ import annotations

import cProfile
import pstats

import pytest
import torch
from torch import nn

from optimizer import optimize
from passes import JitFusion, MergeLinears, PadChannels, Simplify
from passes.graph.graph_pass import GraphPass
from passes.registry import pass_names

FEW, MANY = 20, 160
# All but the last two compile or capture graphs, which is torch's own work. The last two are for training.
OTHERS = {
    "torch-compile",
    "simplify",
    "merge-linears",
    "pad-channels",
    "jit-fusion",
    "insert-checkpoints",
    "sync-batch-norm",
}


class InARow(nn.Module):
    """Blocks of a convolution, a BatchNorm, an activation and an addition in one forward."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(2) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + norm(conv(x)).relu()
        return x


class SideBySide(nn.Module):
    """Blocks of two linear layers on one input, their product and an addition in one forward."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(3, 3) for _ in range(blocks))
        self.values = nn.ModuleList(nn.Linear(3, 3) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate, value in zip(self.gates, self.values, strict=True):
            x = x + gate(x) * value(x)
        return x


def calls_of(model: nn.Module, item: str) -> int:
    """The number of calls of Python and C functions while the model is optimized."""
    profile = cProfile.Profile()
    profile.enable()
    try:
        optimize(model.eval(), [item])
    finally:
        profile.disable()
    return int(pstats.Stats(profile).total_calls)


@pytest.mark.parametrize("name", sorted({*pass_names()} - OTHERS))
def test_a_pass_does_no_more_for_an_operation_of_a_larger_model(name: str) -> None:
    calls_of(InARow(2), name)  # warm-up, for work that is done once in a process
    few, many = (calls_of(InARow(blocks), name) for blocks in (FEW, MANY))
    assert many <= MANY / FEW * few


REWRITES = [
    Simplify(),
    JitFusion(),
    pytest.param(MergeLinears(force=True), marks=pytest.mark.zoo),
    pytest.param(PadChannels(force=True), marks=pytest.mark.zoo),
]


@pytest.mark.slow
@pytest.mark.parametrize("item", REWRITES, ids=lambda item: item.name)
def test_a_rewrite_of_a_captured_graph_does_no_more_for_an_operation_of_a_larger_model(
    item: GraphPass, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, rewrite = cProfile.Profile(), type(item).rewrite
    monkeypatch.setattr(type(item), "rewrite", lambda *given: profile.runcall(rewrite, *given))

    def calls(blocks: int) -> int:
        profile.clear()
        optimize(SideBySide(blocks).eval(), [item], example_inputs=(torch.randn(2, 3),))
        return int(pstats.Stats(profile).total_calls)

    calls(2)
    few, many = calls(20), calls(80)
    assert few > 1000
    assert many <= 4 * few
