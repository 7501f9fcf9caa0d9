"""Find where a file first differs if its values have no known names, as in those of the old ONNX exporter."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from located_models import Net, X, line_with
from onnx import helper
from spoiling import scale_initializer, spoiling
from tiny_models import enliven
from torch import nn

import exporters.onnx
from exporters import OnnxExporter
from exporters.errors import RouteRefused
from optimize_export.errors import ParityError
from optimizer import export, optimize


@pytest.fixture
def net():
    torch.manual_seed(0)
    return enliven(Net()).eval()


@pytest.fixture(autouse=True)
def old_exporter(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise RouteRefused("not today")

    monkeypatch.setattr(exporters.onnx, "by_dynamo", refuse)


def found_in(net: nn.Module, folder: Path, monkeypatch, spoil, passes=None) -> dict:
    """The divergence that an export reports for a spoilt file."""

    def spoil_file(path: Path) -> None:
        model = onnx.load(path)
        spoil(model.graph)
        onnx.save(model, path)

    spoiling(monkeypatch, OnnxExporter, spoil_file)
    fast = optimize(net, passes, example_inputs=X)
    with pytest.raises(ParityError) as caught:
        export(fast, example_inputs=X, output=folder / "net", formats=["onnx"])
    (artifact,) = caught.value.figures["artifacts"]
    assert artifact["route"] == "torchscript"
    assert artifact["divergence"] is not None, artifact["divergence_note"]
    return artifact["divergence"]


def scale(graph: onnx.GraphProto, node: str, index: int = 1) -> None:
    """Scale one weight of a node by 1 %."""
    scale_initializer(graph, next(each for each in graph.node if each.name == node).input[index], 1.01)


HEAD = "return self.head(self.norm(self.shared(self.shared(y))))"
PLACES = {
    "/model/blocks/blocks.2/second/Conv": ("blocks.2.second", "return torch.relu(self.two(self.second(y)) + x)"),
    "/model/shared/Gemm": ("shared", HEAD),
}


@pytest.mark.slow
@pytest.mark.parametrize("node", PLACES)
def test_a_weight_that_is_off_by_a_percent_is_found_at_its_module(net, tmp_path, monkeypatch, node):
    # Every other one in a model that the passes leave as it is.
    passes = None if list(PLACES).index(node) % 2 == 0 else ()
    found = found_in(net, tmp_path, monkeypatch, lambda graph: scale(graph, node), passes)
    module, line = PLACES[node]
    assert (found["module"], found["line"]) == (module, line_with(line))
    assert found["error"] > 100 * found["noise"]


@pytest.mark.slow
def test_a_batch_that_is_a_constant_is_found_where_the_file_raises(net, tmp_path, monkeypatch):
    def spoil(graph: onnx.GraphProto) -> None:
        node = next(each for each in graph.node if each.name == "/model/blocks/blocks.1/first/Conv")
        at, output = list(graph.node).index(node), node.output[0]
        node.output[0] = "unshaped"
        graph.initializer.append(helper.make_tensor("sizes", onnx.TensorProto.INT64, [4], [2, 4, 6, 6]))
        graph.node.insert(at + 1, helper.make_node("Reshape", ["unshaped", "sizes"], [output], name="planted"))

    found = found_in(net, tmp_path, monkeypatch, spoil)
    assert found["module"] == "blocks.1", "what its convolution gives is there, and right"
    assert found["problem"] == f"the file raises there at {found['where']}"


@pytest.mark.slow
def test_an_output_that_is_changed_behind_all_modules_is_found_at_the_model(net, tmp_path, monkeypatch):
    def spoil(graph: onnx.GraphProto) -> None:
        node, output = graph.node[-1], graph.output[0].name
        node.output[0] = "right"
        graph.node.append(helper.make_node("Neg", ["right"], [output], name="planted"))

    found = found_in(net, tmp_path, monkeypatch, spoil)
    assert (found["module"], found["operation"]) == ("", "Net")
