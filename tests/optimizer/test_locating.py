"""Find where a file first differs: faults are planted in correct files, and found by module, line and operation."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import located_models
import onnx
import pytest
import torch
from onnx import helper
from spoiling import scale_initializer, scale_onnx, spoiling
from tiny_models import enliven
from torch import nn
from torch.nn import functional

from exporters import Artifact, ExportRequest, OnnxExporter
from exporters.places import Place
from optimize_export.errors import ParityError
from optimizer import export
from optimizer.exporting.artifact_parity import FileProof
from optimizer.faults.locating import Divergence, first_wrong_value


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part(x).view(x.shape[0], -1, 2, 4).transpose(1, 2) for part in (self.query, self.key, self.value)]
        mixed = functional.scaled_dot_product_attention(*heads)
        return self.out(mixed.transpose(1, 2).reshape(x.shape[0], -1, 8))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.attention(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3)
        self.pool = nn.MaxPool1d(2)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.again = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.conv(x)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.again(torch.tanh(self.again(x)))).mean(1))


class Exported:
    """A copy of a correct file, for a test to plant a fault in."""

    def __init__(self, artifact: Artifact, folder: Path, shape: tuple[int, ...] = (3, 18)) -> None:
        generator = torch.Generator().manual_seed(1)
        self.draw = lambda batch: torch.randn(batch, *shape, generator=generator)
        self.artifact = replace(artifact, path=folder / "copy.onnx")
        self.proto = onnx.load(artifact.path)

    @classmethod
    def of(cls, model: nn.Module, folder: Path, shape: tuple[int, ...] = (3, 18)) -> "Exported":
        calls = tuple(((torch.randn(batch, *shape),), {}) for batch in (2, 3, 1))
        artifact = OnnxExporter().export(ExportRequest(enliven(model).eval(), calls), folder)
        assert artifact.route == "dynamo"
        return cls(artifact, folder, shape)

    def node_of(self, value: str) -> onnx.NodeProto:
        return next(node for node in self.proto.graph.node if value in node.output)

    def first(self, batch: int = 2) -> Divergence | None:
        onnx.save(self.proto, self.artifact.path)
        program = self.artifact.program
        values = self.artifact.values(self.artifact.path, "cpu", program.places)
        assert len(values.names) > 1
        return first_wrong_value(program, values, (self.draw(batch),), f"batch size {batch}")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Artifact:
    torch.manual_seed(0)
    return Exported.of(Net(), tmp_path_factory.mktemp("net")).artifact


@pytest.fixture
def exported(artifact, tmp_path) -> Exported:
    artifact = replace(artifact, path=artifact.path.with_name("model.onnx"))
    return Exported(artifact, tmp_path)


line_with = partial(located_models.line_with, file=__file__)


HEADS = "heads = [part(x).view(x.shape[0], -1, 2, 4).transpose(1, 2) for part in (self.query, self.key, self.value)]"


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_file_that_is_right_differs_nowhere(exported, batch):
    assert exported.first(batch) is None


def test_a_weight_deep_inside_is_found_and_not_what_its_error_flows_through(exported):
    node = exported.node_of(exported.node_of("linear_5").input[0])
    scale_initializer(exported.proto.graph, node.input[1], 1.01)
    found = exported.first()
    assert found.place == Place("blocks.1.attention.key", 1, line_with(HEADS), "linear")
    assert found.also == ()
    assert found.error > 100 * found.noise
    assert found.problem.endswith("times its rounding noise at batch size 2")


def test_an_error_inside_an_operation_of_many_nodes(exported):
    """Attention is many nodes in the file. It may draw random numbers, but draws none here."""
    next(node for node in exported.proto.graph.node if node.op_type == "Softmax").attribute[0].i = 1
    found = exported.first()
    assert (found.module, found.operation) == ("blocks.0.attention", "scaled_dot_product_attention")


def test_a_transposed_axis_that_does_not_fit_is_found_by_its_shape(exported):
    node = exported.node_of("transpose_1")
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("perm", [0, 1, 2, 3]))
    found = exported.first()
    assert found.place == Place("blocks.0.attention", 1, line_with(HEADS), "transpose")
    assert found.problem == "the shape is (2, 8, 2, 4), but should be (2, 2, 8, 4) at batch size 2"


def test_a_batch_that_is_a_constant_is_found_where_it_first_matters(exported):
    baked = helper.make_tensor("baked", onnx.TensorProto.INT64, [4], [2, 8, 2, 4])
    exported.proto.graph.initializer.append(baked)
    exported.node_of("view_1").input[1] = "baked"
    assert exported.first(2) is None
    found = exported.first(3)
    assert found.place == Place("blocks.0.attention", 1, line_with(HEADS), "view")
    assert (found.problem, found.where) == ("raises at batch size 3", "batch size 3")


def test_the_second_call_of_a_module_is_told_from_the_first(exported):
    node = exported.node_of("linear_9")
    scale = helper.make_tensor("scale", onnx.TensorProto.FLOAT, [], [1.01])
    exported.proto.graph.initializer.append(scale)
    at = list(exported.proto.graph.node).index(node)
    node.output[0] = "unscaled"
    exported.proto.graph.node.insert(at + 1, helper.make_node("Mul", ["unscaled", "scale"], ["linear_9"]))
    found = exported.first()
    assert (found.module, found.call, found.operation) == ("again", 2, "linear")
    assert "again, call 2 (" in str(found)


def test_what_was_merged_is_named_with_it(tmp_path):
    """The exporter folds the BatchNorm, so there is no value between the two layers: either may be wrong."""
    torch.manual_seed(0)
    exported = Exported.of(nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU()), tmp_path)
    weight = next(node for node in exported.proto.graph.node if node.op_type == "Conv").input[1]
    scale_initializer(exported.proto.graph, weight, 1.01)
    found = exported.first()
    assert (found.module, [place.module for place in found.also]) == ("1", ["0"])


def scale_first_weight(path):
    scale_onnx(path, "model.conv.weight", 1.01)


@pytest.mark.slow
def test_an_export_that_fails_says_where(tmp_path, monkeypatch):
    torch.manual_seed(0)
    spoiling(monkeypatch, OnnxExporter, scale_first_weight)
    line = line_with("x = self.pool(self.conv(x)).transpose(1, 2)")
    with pytest.raises(ParityError) as caught:
        export(enliven(Net()), example_inputs=torch.randn(2, 3, 18), output=tmp_path / "net", formats=["onnx"])
    assert f"It first differs at conv ({line}, conv1d): off by" in str(caught.value)
    (artifact,) = caught.value.figures["artifacts"]
    assert artifact["divergence"]["module"] == "conv"
    assert artifact["divergence_note"] == ""
    assert str(caught.value).endswith(" Without the runtime's graph optimizations it is wrong too.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_locating_never_hides_the_failure(tmp_path, monkeypatch):
    torch.manual_seed(0)
    spoiling(monkeypatch, OnnxExporter, scale_first_weight)

    def broken(*_: object) -> None:
        raise RuntimeError("no values today")

    monkeypatch.setattr("optimizer.faults.locating.first_wrong_value", broken)
    with pytest.raises(ParityError, match=r"isn't proven to compute the same as the original: .* is off by") as caught:
        export(enliven(Net()), example_inputs=torch.randn(2, 3, 18), output=tmp_path / "net", formats=["onnx"])
    assert "couldn't be located: the search raised RuntimeError: no values today." in str(caught.value)
    assert caught.value.figures["artifacts"][0]["divergence"] is None


class Optimizing:
    """A file that was loaded by a runtime whose optimizations are wrong."""

    def __init__(self, loaded) -> None:
        self._loaded = loaded

    def __getattr__(self, name: str):
        return getattr(self._loaded, name)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(output * 1.01 for output in self._loaded(*tensors))


@pytest.mark.slow
def test_a_runtime_that_is_at_fault_is_told_from_the_file(tmp_path, monkeypatch):
    torch.manual_seed(0)
    load = OnnxExporter.load
    monkeypatch.setattr(OnnxExporter, "load", staticmethod(lambda path, device: Optimizing(load(path, device))))
    # As on a GPU, where the exporter's proof isn't reused, and the file is loaded again.
    monkeypatch.setattr(FileProof, "__call__", lambda *_: False)
    with pytest.raises(ParityError) as caught:
        export(enliven(Net()), example_inputs=torch.randn(2, 3, 18), output=tmp_path / "net", formats=["onnx"])
    assert str(caught.value).endswith(
        "The first difference couldn't be located: every value in the file is that of the captured "
        "program. Without the runtime's graph optimizations the file is correct: the optimizations are at fault, not the file."
    )


@pytest.mark.slow
def test_a_run_without_optimizations_that_raises_hides_nothing(tmp_path, monkeypatch):
    torch.manual_seed(0)
    spoiling(monkeypatch, OnnxExporter, scale_first_weight)

    def broken(*_: object) -> None:
        raise RuntimeError("no such setting")

    monkeypatch.setattr(OnnxExporter, "load_unoptimized", broken)
    with pytest.raises(ParityError, match=r"It first differs at conv .*it raised RuntimeError: no such setting\.$"):
        export(enliven(Net()), example_inputs=torch.randn(2, 3, 18), output=tmp_path / "net", formats=["onnx"])


@pytest.mark.slow
def test_an_export_that_is_right_is_not_looked_into(tmp_path, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(
        "optimizer.exporting.artifact_parity.locate_in_file", lambda *_: pytest.fail("looked for a place")
    )
    bundle = export(enliven(Net()), example_inputs=torch.randn(2, 3, 18), output=tmp_path / "net", formats=["onnx"])
    assert bundle.parity.ok
