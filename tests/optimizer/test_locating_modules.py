"""Find the first module that differs from the original, after wrong passes and in spoilt results."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from located_models import Net, X, line_with
from spoiling import scale_torchscript, spoiling
from tiny_models import enliven
from torch import nn

from exporters import TorchScriptExporter
from optimize_export.errors import ParityError
from optimizer import export, optimize
from optimizer.faults.locating_modules import first_wrong_module, first_wrong_part
from optimizer.model.inputs import Samples
from optimizer.parity import measure_reference
from passes.base import Context, TensorRef
from passes.graph.module_pass import ModulePass, ModuleRewriter


@dataclass(frozen=True)
class ScaleUnseen(ModulePass):
    """Scale the weight of a layer, without naming a region to compare."""

    name: ClassVar[str] = "scale-unseen"
    path: str = "blocks.1.second"

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        module = graph.tree.root.get_submodule(self.path)
        with graph.change(self.path, "scaled"):
            graph.set_tensor(TensorRef(module, "weight"), module.weight.detach() * 1.01)


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return enliven(Net()).eval()


def found(original: nn.Module, candidate: nn.Module):
    reference = measure_reference(original, Samples((X,)), batch_sizes=[2, 3], draws=1)
    found = (first_wrong_module(reference, candidate, where) for where, _ in reference.calls())
    return next(filter(None, found), None)


LINES = {
    "stem": "y = self.blocks(self.stem(x)).mean((2, 3))",
    "blocks.1.second": "return torch.relu(self.two(self.second(y)) + x)",
    "head": "return self.head(self.norm(self.shared(self.shared(y))))",
}


@pytest.mark.parametrize("path", LINES)
def test_a_pass_that_scales_a_weight_is_found_with_its_module_and_line(net, path):
    """The pass runs after folds, which change the outputs of the convolutions, and before another pass."""
    fast = optimize(net, ["fold-conv-bn", ScaleUnseen(path), "channels-last"], example_inputs=(X,))
    record = next(record for record in fast.report.passes if record.name == "scale-unseen")
    assert record.status == "rolled-back"
    kind = type(net.get_submodule(path)).__name__
    assert f"It first differs at {path} ({line_with(LINES[path])}, {kind}): off by" in record.reason
    assert [record.status for record in fast.report.passes if record.name == "fold-conv-bn"] == ["applied"]


def test_the_line_of_what_a_container_of_torchs_own_calls_is_that_of_the_containers_call():
    torch.manual_seed(0)

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 1)
            self.tail = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1)), nn.Flatten())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.stem(x)
            return self.tail(y)

    fast = optimize(enliven(Holding()).eval(), [ScaleUnseen("tail.0.1")], example_inputs=(X,))
    assert f"tail.0.1 ({line_with('return self.tail(y)', __file__)}, Conv2d)" in fast.report.passes[0].reason


def test_what_folds_change_on_the_way_is_no_fault(net):
    fast = optimize(net, ["fold-conv-bn"], example_inputs=(X,))
    assert fast.report.passes[0].status == "applied"
    assert found(net, fast) is None


def test_the_first_call_of_a_module_that_is_called_twice(net):
    fast = optimize(net, [], example_inputs=(X,))
    fast.shared.weight = nn.Parameter(fast.shared.weight.detach() * 1.01)
    divergence = found(net, fast)
    assert (divergence.module, divergence.call, divergence.operation) == ("shared", 1, "Linear")
    assert divergence.where == "batch size 2, draw 0"
    assert divergence.error > 4 * divergence.noise


def test_an_operation_of_a_modules_own_forward_is_named_by_that_module(net):
    candidate = optimize(net, [], example_inputs=(X,))
    block = candidate.blocks[1]
    block.forward = lambda x: torch.relu(block.two(block.second(torch.relu(block.one(block.first(x))))) + 1.01 * x)
    divergence = found(net, candidate)
    assert divergence.module == "blocks.1"
    assert divergence.operation == "Block"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchscript", "onnx"])
def test_a_result_that_was_spoilt_after_it_was_made_is_found_when_it_is_exported(net, tmp_path, name):
    fast = optimize(net, example_inputs=(X,))
    # In the memory of the result alone: otherwise the model would have the fault too.
    fast.blocks[2].first.weight = nn.Parameter(1.01 * fast.blocks[2].first.weight.detach())
    with pytest.raises(ParityError, match=r"It first differs at blocks\.2\.first \(located_models\.py:") as caught:
        export(fast, example_inputs=(X,), output=tmp_path / "net", formats=[name])
    assert caught.value.figures["artifacts"][0]["divergence"]["module"] == "blocks.2.first"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["blocks.1.second", "shared"])
def test_a_torchscript_file_that_was_spoilt_is_found_by_its_module(net, tmp_path, monkeypatch, path):
    names = [f"model.model.{path}.{name}" for name in ("weight_in_channels_last", "folded_weight", "weight")]
    spoiling(monkeypatch, TorchScriptExporter, lambda file: scale_torchscript(file, names, 1.01))
    fast = optimize(net, example_inputs=(X,))
    with pytest.raises(ParityError, match=rf"It first differs at {path} \(located_models\.py:") as caught:
        export(fast, example_inputs=(X,), output=tmp_path / "net", formats=["torchscript"])
    assert caught.value.figures["artifacts"][0]["divergence"]["call"] == 1


class Branching(nn.Module):
    """Has data-dependent control flow, which a trace can't follow, and a child that gets a non-default argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.scaled = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scaled(self.first(x), 2.0)
        if bool((x.sum() > 1e6).item()):
            y = -y
        return self.head(y)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return self.inner(x) * by


@pytest.mark.slow
@pytest.mark.parametrize("path", ["first", "scaled.inner"])
def test_a_scripted_file_that_was_spoilt_is_found_by_its_module(tmp_path, monkeypatch, path):
    names = [f"model.model.{path}.weight"]
    spoiling(monkeypatch, TorchScriptExporter, lambda file: scale_torchscript(file, names, 1.01))
    torch.manual_seed(0)
    model = enliven(Branching()).eval()
    with pytest.raises(ParityError, match=rf"It first differs at {path} \(test_locating_modules\.py:") as caught:
        export(model, example_inputs=torch.randn(2, 4), output=tmp_path / "net", formats=["torchscript"])
    (artifact,) = caught.value.figures["artifacts"]
    assert artifact["route"] == "script"


@pytest.mark.slow
@pytest.mark.parametrize("passes", [None, ()], ids=["optimized", "as it is"])
def test_a_torchscript_file_has_the_modules_of_the_model(net, tmp_path, passes):
    fast = optimize(net, passes, example_inputs=(X,))
    bundle = export(fast, example_inputs=(X,), output=tmp_path / "net", formats=["torchscript"])
    parts = TorchScriptExporter.parts(bundle.path / "model.torchscript.pt", "cpu")
    assert all(
        parts.part(*key, alone=True) is not None for key in [("stem", 1), ("shared", 1), ("shared", 2), ("blocks.1", 1)]
    )
    assert parts.part("shared", 3, alone=True) is None
    computes = parts.part("blocks.1.two", 1, alone=True) is not None
    assert computes is (passes == ()), "where it was folded, the file computes nothing there"


@pytest.mark.slow
def test_a_torchscript_file_that_is_right_differs_nowhere(net, tmp_path):
    fast = optimize(net, [], example_inputs=(X,))
    bundle = export(fast, example_inputs=(X,), output=tmp_path / "net", formats=["torchscript"])
    reference = measure_reference(net, Samples((X,)), batch_sizes=[2, 3], draws=1)
    parts = TorchScriptExporter.parts(bundle.path / "model.torchscript.pt", "cpu")
    for where, _ in reference.calls():
        assert first_wrong_part(reference, fast, parts, where) is None
