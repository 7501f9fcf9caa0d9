"""Find where a file differs that its own exporter refuses: a fault is planted during the export."""

from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from located_models import Net, X, line_with
from tiny_models import enliven

import exporters.onnx
from exporters import ExportError
from optimizer import export


def refused(folder: Path) -> str:
    torch.manual_seed(0)
    with pytest.raises(ExportError) as caught:
        export(enliven(Net()), example_inputs=X, output=folder / "net", formats=["onnx"])
    assert list(folder.iterdir()) == []
    return str(caught.value)


@pytest.mark.slow
def test_an_onnx_file_by_its_operation_and_a_search_that_raises_hides_nothing(tmp_path, monkeypatch):
    strip = exporters.onnx._strip

    def spoil(model: ir.Model) -> None:
        strip(model)
        bias = model.graph.initializers["model.shared.bias"]
        bias.const_value = ir.tensor(bias.const_value.numpy() * 2)

    monkeypatch.setattr(exporters.onnx, "_strip", spoil)
    message = refused(tmp_path)
    place = f"shared ({line_with('return self.head(self.norm(self.shared(self.shared(y))))')}, linear)"
    assert f" The file of the route 'dynamo' first differs at {place}: off by " in message
    assert message.startswith("The model can't be exported to onnx (dynamo")

    def broken(*_: object) -> None:
        raise RuntimeError("no values today")

    monkeypatch.setattr("optimizer.faults.locating.first_wrong_value", broken)
    message = refused(tmp_path)
    assert "output `output` is wrong on inputs of [2, 3, 6, 6]: its largest error is" in message
    assert "first differs" not in message
