"""Find where a file differs that its own exporter refuses: a fault is planted during the export to each format."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import located_models
import onnx_ir as ir
import pytest
import torch
from tiny_models import enliven
from torch import nn

import exporters.onnx
import exporters.pt2
import exporters.torchscript
from exporters import ExportError
from optimizer import export


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        return self.second(torch.tanh(hidden))


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


line_with = partial(located_models.line_with, file=__file__)


def refused(folder: Path, name: str) -> str:
    torch.manual_seed(0)
    with pytest.raises(ExportError) as caught:
        export(enliven(Net()), example_inputs=X, output=folder / "net", formats=[name])
    assert list(folder.iterdir()) == []
    return str(caught.value)


@pytest.fixture
def onnx_files_are_wrong(monkeypatch):
    strip = exporters.onnx._strip

    def spoil(model: ir.Model) -> None:
        strip(model)
        bias = model.graph.initializers["model.first.bias"]
        bias.const_value = ir.tensor(bias.const_value.numpy() * 2)

    monkeypatch.setattr(exporters.onnx, "_strip", spoil)


@pytest.mark.slow
@pytest.mark.usefixtures("onnx_files_are_wrong")
def test_an_onnx_file_by_its_operation_and_a_search_that_raises_hides_nothing(tmp_path, monkeypatch):
    message = refused(tmp_path, "onnx")
    place = f"first ({line_with('hidden = self.norm(self.first(x))')}, linear)"
    assert f" The file of the route 'dynamo' first differs at {place}: off by " in message
    assert message.startswith("The model can't be exported to onnx (dynamo")

    def broken(*_: object) -> None:
        raise RuntimeError("no values today")

    monkeypatch.setattr("optimizer.faults.locating.first_wrong_value", broken)
    message = refused(tmp_path, "onnx")
    assert "output `output` is wrong on inputs of [2, 4]: its largest error is" in message
    assert "first differs" not in message
