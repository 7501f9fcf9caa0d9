"""A result of several graphs that is slower than the model as written doesn't use them."""

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import export, optimize, report_of
from optimizer.model import Call
from optimizer.pipeline.transactions import CopyRuns
from passes.graph.backend import GRAPH_CALL, compilation_of

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
    """Let the timing find these seconds, as written and by the graphs; returns a list that gets the numbers of rounds."""
    monkeypatch.delenv("OPTIMIZE_EXPORT_NO_BENCH")

    def find(*seconds: float) -> list[int]:
        asked: list[int] = []

        def answer(runs: CopyRuns, ways: Sequence[Any], rounds: int) -> Sequence[float]:
            asked.append(rounds)
            return seconds[: len(ways)]

        monkeypatch.setattr(CopyRuns, "seconds", answer)
        return asked

    return find


def test_slower_graphs_are_not_used(timed: Callable[..., list[int]]) -> None:
    timed(2e-3, 3e-3)
    model = net(breaks=True)
    fast = optimize(model, ["fold-conv-bn", "channels-last"], example_inputs=X)
    (note,) = report_of(fast).notes
    assert "2.00 ms instead of 3.00 ms by the rewritten graphs; files hold its changes if" in note
    assert fast.__dict__[GRAPH_CALL].is_for_files
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(fast)(X), model(X))


@pytest.mark.parametrize(("breaks", "seconds"), [(True, (2e-3, 2.05e-3)), (False, (2e-3, 1e-3))])
def test_faster_ones_are(timed: Callable[..., list[int]], seconds: Sequence[float], breaks: bool) -> None:
    asked = timed(*seconds)
    fast = optimize(net(breaks=breaks), ["fold-conv-bn"], example_inputs=X)
    assert (report_of(fast).passes[0].status, len(asked)) == ("applied", 2)
    assert not fast.__dict__[GRAPH_CALL].is_for_files


@pytest.mark.parametrize(("breaks", "written", "used"), [(True, 0.2, True), (True, 0.02, False), (False, 0.02, True)])
def test_of_slow_models_one_call_is_timed(
    timed: Callable[..., list[int]], breaks: bool, written: float, used: bool
) -> None:
    """Guards don't count there. Those of several graphs count in slower models than those of one."""
    asked = timed(written, 2 * written)
    fast = optimize(net(breaks=breaks), ["fold-conv-bn"], example_inputs=X)
    assert (fast.__dict__[GRAPH_CALL].is_for_files, len(asked)) == (not used, 1 if used else 2)
    assert asked[0] == 1


def test_a_single_graph_that_is_slower_is_for_files(timed: Callable[..., list[int]], tmp_path: Path) -> None:
    timed(1e-3, 2e-3)
    model = net(breaks=False)
    fast = optimize(model, ["fold-conv-bn"], example_inputs=X)
    assert report_of(fast).passes[0].status == "applied"
    told = "1.00 ms instead of 2.00 ms by the rewritten graph; files hold the rewritten graph"
    assert any(note.endswith(told) for note in report_of(fast).notes)
    for one in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        compilation_of(one.__dict__[GRAPH_CALL]).compiled.run = lambda *_: pytest.fail("by the graph")
        with torch.no_grad():
            torch.testing.assert_close(one(X), model(X))
    bundle = export(fast, example_inputs=X, output=tmp_path / "net", formats=["pt2"])
    program = torch.export.load(str(bundle.path / "model.pt2"))
    assert not [node for node in program.graph.nodes if "batch_norm" in str(node.target)]


def test_nothing_is_timed_where_the_environment_says_so(timed: Callable[..., list[int]], monkeypatch) -> None:
    asked = timed(1e-3, 2e-3)
    monkeypatch.setenv("OPTIMIZE_EXPORT_NO_BENCH", "1")
    optimize(net(breaks=True), ["fold-conv-bn"], example_inputs=X)
    assert asked == []


def test_the_seconds_of_each_way_are_the_shortest_of_its_calls() -> None:
    calls: list[str] = []

    @contextmanager
    def way(name: str) -> Iterator[None]:
        calls.append(name)
        yield

    runs = CopyRuns(net(breaks=False), [Call((X,))])
    ways = (lambda: way("a"), lambda: way("b"))
    first, second = runs.seconds(ways, 3)
    assert 0 < first < 60
    assert 0 < second < 60
    assert calls == ["a", "b"] * 3
