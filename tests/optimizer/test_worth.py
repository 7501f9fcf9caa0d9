"""A result of several graphs that is slower than the model as written doesn't use them."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import optimize, report_of
from optimizer.pipeline.copy_runs import CopyRuns
from passes.program.backend import GRAPH_CALL

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.breaks = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), breaks

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        if self.breaks and y.sum() > 1e9:
            return x
        return y


def net(*, breaks: bool) -> nn.Module:
    torch.manual_seed(0)
    return enliven(nn.Sequential(*(Block(breaks) for _ in range(3)))).eval()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Let the timing find these seconds, as written and by the graphs; returns a list that gets the rounds."""
    monkeypatch.delenv("OPTIMIZE_EXPORT_NO_BENCH")

    def find(*seconds: float) -> list[int]:
        asked: list[int] = []

        def answer(runs: CopyRuns, ways: Sequence[Any], rounds: int, *, at_most: float) -> Sequence[float]:
            asked.append(rounds)
            return seconds

        monkeypatch.setattr(CopyRuns, "seconds", answer)
        return asked

    return find


def test_slower_graphs_are_not_used(timed: Callable[..., list[int]]) -> None:
    timed(2e-3, 3e-3)
    model = net(breaks=True)
    fast = optimize(model, ["fold-conv-bn", "channels-last"], example_inputs=X)
    folds, formats = report_of(fast).passes
    assert (folds.status, folds.changes, formats.status) == ("unchanged", (), "applied")
    assert folds.skips[-1].text == (
        "a call takes 3.00 ms by its graphs and 2.00 ms as it is written, so they aren't used: torch.compile splits the "
        "forward into many graphs"
    )
    assert GRAPH_CALL not in fast.__dict__
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(fast)(X), model(X))


@pytest.mark.parametrize("seconds", [(2e-3, 1e-3), (2e-3, 2.05e-3), (0.2, 0.4)])
def test_faster_ones_and_those_of_slow_models_are(timed: Callable[..., list[int]], seconds: Sequence[float]) -> None:
    asked = timed(*seconds)
    fast = optimize(net(breaks=True), ["fold-conv-bn"], example_inputs=X)
    assert (report_of(fast).passes[0].status, len(asked)) == ("applied", 1)
    assert GRAPH_CALL in fast.__dict__


def test_a_single_graph_is_not_timed(timed: Callable[..., list[int]]) -> None:
    asked = timed(1.0, 2.0)
    fast = optimize(net(breaks=False), ["fold-conv-bn"], example_inputs=X)
    assert (report_of(fast).passes[0].status, asked) == ("applied", [])


def test_nothing_is_timed_where_the_environment_says_so(timed: Callable[..., list[int]], monkeypatch) -> None:
    asked = timed(1e-3, 2e-3)
    monkeypatch.setenv("OPTIMIZE_EXPORT_NO_BENCH", "1")
    optimize(net(breaks=True), ["fold-conv-bn"], example_inputs=X)
    assert asked == []


def test_the_seconds_of_each_way_are_the_shortest_of_its_calls() -> None:
    calls: list[str] = []

    class Way:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            calls.append(self.name)

        def __exit__(self, *_: object) -> None:
            pass

    from optimizer.model import Call

    runs = CopyRuns(net(breaks=False), [Call((X,))])
    ways = (lambda: Way("a"), lambda: Way("b"))
    first, second = runs.seconds(ways, 2, at_most=60.0)
    assert 0 < first < 60
    assert 0 < second < 60
    assert calls == ["a", "b"] * 3
    calls.clear()
    runs.seconds(ways, 5, at_most=0.0)
    assert calls == ["a", "b"] * 2, "after the first round that takes longer, none follows"
