"""Find the first module that differs from the original, after wrong passes and in spoilt results."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from located_models import Net, X, line_with
from tiny_models import enliven
from torch import nn

from optimize_export.errors import ParityError
from optimizer import export, optimize
from optimizer.faults.locating import first_wrong_module
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
def test_a_result_that_was_spoilt_after_it_was_made_is_found_when_it_is_exported(net, tmp_path):
    fast = optimize(net, example_inputs=(X,))
    # In the memory of the result alone: otherwise the model would have the fault too.
    fast.blocks[2].first.weight = nn.Parameter(1.01 * fast.blocks[2].first.weight.detach())
    with pytest.raises(ParityError, match=r"It first differs at blocks\.2\.first \(located_models\.py:") as caught:
        export(fast, example_inputs=(X,), output=tmp_path / "net", formats=["torchscript"])
    assert caught.value.figures["artifacts"][0]["divergence"]["module"] == "blocks.2.first"
