"""The pass that makes a result wrong is named, even if only batch sizes that `optimize` doesn't use show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from located_models import LateNet
from torch import nn

from optimize_export.errors import ParityError
from optimizer import export, optimize
from passes.base import Context, TensorRef
from passes.graph.module_pass import ModulePass, ModuleRewriter


@dataclass(frozen=True)
class Set(ModulePass):
    """Add a number to a tensor, without naming a region to compare."""

    name: ClassVar[str] = "set"
    module: str = "late"
    tensor: str = "extra"
    add: float = 1.0

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        module = graph.tree.root.get_submodule(self.module)
        with graph.change(self.module, "set"):
            graph.set_tensor(TensorRef(module, self.tensor), getattr(module, self.tensor).detach() + self.add)


@dataclass(frozen=True)
class Harmless(Set):
    """Replace a tensor with an equal one."""

    name: ClassVar[str] = "harmless"
    module: str = "first"
    tensor: str = "weight"
    add: float = 0.0


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def net():
    return LateNet(dim=0, start=4).eval()


@pytest.mark.slow
def test_a_pass_that_shows_at_a_larger_batch_alone_is_named_when_a_file_fails(net, tmp_path):
    fast = optimize(net, [Harmless(), Set(), Harmless("last")], example_inputs=X)
    assert {record.status for record in fast.report.passes} == {"applied"}, "it shows at neither of the two batch sizes"
    with pytest.raises(
        ParityError, match=r"one of its passes \(harmless, set\) causes it, or it was modified"
    ) as caught:
        export(fast, example_inputs=X, output=tmp_path / "net", formats=["torchscript", "onnx"])
    assert "It first differs at late (located_models.py:" in str(caught.value)


def test_a_call_of_the_users_own_that_alone_shows_it_is_enough_for_the_pass_to_be_taken_back(net):
    many = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    passes = [Harmless(), Set(), Harmless("last")]
    fast = optimize(net, passes, example_inputs=X, further_inputs=[((many,), {})])
    assert [record.status for record in fast.report.passes] == ["applied", "rolled-back", "applied"]
    assert "at batch size 6" in fast.report.passes[1].reason
    assert "It first differs at late (located_models.py:" in fast.report.passes[1].reason


def test_a_result_that_was_written_to_is_no_passs_fault(net, tmp_path):
    fast = optimize(net, [Harmless(), Harmless("last")], example_inputs=X)
    with torch.no_grad():
        fast.last.weight.mul_(1.01)
    with pytest.raises(ParityError, match=r"one of its passes \(harmless\) causes it, or it was modified"):
        export(fast, example_inputs=X, output=tmp_path / "net", formats=["torchscript"])


def test_where_no_pass_changed_anything_none_is_named(net, tmp_path):
    fast = optimize(net, [], example_inputs=X)
    fast.last.weight = nn.Parameter(net.last.weight.detach() * 1.01)
    with pytest.raises(ParityError, match=r"It first differs at last ") as caught:
        export(fast, example_inputs=X, output=tmp_path / "net", formats=["torchscript"])
    assert str(caught.value).endswith(", draw 0.")
