"""The number of runs in a proof: `effort=` in Python, `--quick` and `--thorough` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import api, export, optimize
from optimizer.command import cli
from optimizer.exporting import measure
from optimizer.parity import Reference, judge

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
RAN: list[tuple[torch.dtype, int]] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        RAN.append((x.dtype, len(x)))
        return torch.relu(self.fc(x))


class WrongAbove(Net):
    """Wrong for rows whose `feature` is above `bound`, the largest value that a proof with fewer samples draws."""

    feature, bound = 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.where(x[:, self.feature, None] > self.bound, y * 1.01, y)


def net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return enliven(kind()).eval()


class Measured(Exception):
    """Ends an export before it writes files."""


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Reference]:
    """A function that begins an export with an effort, and returns the reference of the proof."""

    def only_measure(job: Any) -> None:
        raise Measured(measure(job).reference)

    monkeypatch.setattr(api, "measure", only_measure)

    def of(effort: Any, batch_sizes: tuple[int, ...] = (1, 2, 3, 5, 8)) -> Reference:
        with pytest.raises(Measured) as caught:
            export(net(), example_inputs=(X,), output=tmp_path / effort, effort=effort, batch_sizes=batch_sizes)
        return caught.value.args[0]

    return of


@pytest.mark.parametrize(
    ("effort", "sizes", "measured"),
    [("quick", {4, 2}, {4}), ("normal", {4, 1, 2, 3, 5, 8}, {4, 1}), ("thorough", *[{4, 1, 2, 3, 5, 8}] * 2)],
)
def test_the_sizes_of_each_effort(effort, sizes, measured, reference):
    RAN.clear()
    assert set(reference(effort).batch_sizes) == sizes
    assert {size for dtype, size in RAN if dtype is torch.float64} == measured


@pytest.mark.parametrize(("asked", "compared"), [((1,), [4, 1]), ((4,), [4]), ((1, 8, 3), [4, 8]), ((4, 1, 2), [4, 2])])
def test_a_quick_proof_takes_no_size_that_wasnt_asked_for(asked, compared, reference):
    assert list(reference("quick", asked).batch_sizes) == compared


def test_a_thorough_proof_finds_an_error_that_fewer_inputs_dont_show(reference):
    wrong = net(WrongAbove)
    normal, thorough = reference("normal"), reference("thorough")
    few, many = (torch.cat([call.args[0] for _, call in each.calls()]).amax(0) for each in (normal, thorough))
    wrong.feature = int((many - few).argmax())
    wrong.bound = float(few[wrong.feature])
    assert many[wrong.feature] > wrong.bound, "it would prove nothing"
    assert judge(normal.compare(wrong)).ok
    assert judge(thorough.compare(wrong)).verdict == "failed"


def test_the_manifest_has_the_effort_of_the_export_also_for_a_result_of_optimize(tmp_path):
    fast = optimize(net(), example_inputs=(X,))
    for effort, sizes in (("quick", [2, 4]), ("thorough", [1, 2, 3, 4, 5, 8])):
        bundle = export(fast, example_inputs=(X,), output=tmp_path / effort, formats=["torchscript"], effort=effort)
        assert bundle.manifest["parity"]["effort"] == effort
        assert bundle.parity.ok
        assert sorted(bundle.manifest["parity"]["batch_sizes"]) == sizes


def test_the_command_takes_the_effort(write, tmp_path):
    assert cli.main([str(write("")), "--output", str(tmp_path / "net"), "--formats", "torchscript", "--quick"]) == 0
    assert json.loads((tmp_path / "net" / "manifest.json").read_text())["parity"]["effort"] == "quick"
