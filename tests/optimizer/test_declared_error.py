"""A pass that declares a deliberate error is judged by it, at each change and for the whole model."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from tiny_models import enliven
from torch import Tensor, nn

from optimize_export.errors import OptimizeFailed
from optimizer import export, optimize, verify_bundle
from passes.base import Context, Pass, TensorRef
from passes.errors import PassOptionError
from passes.graph.graph_pass import GraphPass, GraphRewriter
from passes.graph.module_pass import ModulePass, ModuleRewriter


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


def as_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def off_by_a_percent(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh") * 1.01


@dataclass(frozen=True)
class GeluTanh(GraphPass):
    """Replace gelu(x) by x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), with an error below 5e-4 everywhere."""

    name: ClassVar[str] = "gelu-tanh"
    max_error: ClassVar[float | None] = 1e-3
    planted: bool = False

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        for node in graph.calls("gelu"):
            with graph.change(node, "by tanh"):
                graph.replace_call(node, off_by_a_percent if self.planted else as_tanh, node.args, {})


@dataclass(frozen=True)
class Undeclared(GeluTanh):
    name: ClassVar[str] = "undeclared"
    max_error: ClassVar[float | None] = None


@dataclass(frozen=True)
class ScaleSecond(ModulePass):
    """A wrong pass whose error is smaller than the error that `GeluTanh` declares."""

    name: ClassVar[str] = "scale-second"

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        module = graph.tree.root.get_submodule("second")
        with graph.change("second", "scaled"):
            graph.set_tensor(TensorRef(module, "weight"), module.weight.detach() * 1.0003)


def optimized(*passes: Pass | str, **options: bool) -> nn.Module:
    return optimize(Net().eval(), list(passes), example_inputs=(torch.randn(4, 8),), **options)


def test_an_approximation_within_its_declared_error_is_applied() -> None:
    report = optimized(GeluTanh()).report
    (record,) = report.passes
    assert record.status == "applied"
    assert record.max_error == 1e-3
    assert 1e-5 < record.error <= 1e-3
    assert report.verified
    assert report.parity.outputs[0].max_error > 4 * report.parity.outputs[0].noise
    assert report.parity.ratio <= report.parity.factor
    assert "of what passes declare" in report.parity.reason
    assert any("gelu-tanh declares an error of at most 0.001" in note for note in report.parity.notes)
    assert "declares an error of at most 0.001, measured" in str(report)


@pytest.mark.parametrize("item", [GeluTanh(planted=True), Undeclared()], ids=["beyond", "undeclared"])
def test_an_error_beyond_what_is_declared_is_rolled_back(item: Pass) -> None:
    (record,) = optimized(item).report.passes
    assert record.status == "rolled-back"
    assert "is off by" in record.reason
    if item.max_error is not None:
        assert "passes declare an error of at most" in record.reason
    with pytest.raises(OptimizeFailed):
        optimized(item, strict=True)


@pytest.mark.parametrize("passes", [(GeluTanh(), ScaleSecond()), (ScaleSecond(), GeluTanh())], ids=["behind", "before"])
def test_a_declared_error_excuses_no_other_pass(passes: tuple[Pass, ...]) -> None:
    status = {record.name: record.status for record in optimized(*passes).report.passes}
    assert status == {"gelu-tanh": "applied", "scale-second": "rolled-back"}


@pytest.mark.parametrize("share", [0.0, -1e-3, 1.0, float("nan")])
def test_a_declared_error_is_a_share(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GeluTanh, "max_error", share)
    with pytest.raises(PassOptionError, match="above 0 and below 1"):
        optimized(GeluTanh())


@pytest.mark.slow
def test_files_are_proven_within_the_declared_error(tmp_path) -> None:
    fast, x = optimized(GeluTanh()), torch.randn(4, 8)
    bundle = export(fast, example_inputs=(x,), output=tmp_path / "net", formats=("torchscript", "onnx"))
    assert bundle.parity.ok
    (made,) = bundle.manifest["passes"]
    assert made["max_error"] == 1e-3
    assert 0 < made["error"] <= 1e-3
    (golden,) = bundle.manifest["golden"]["outputs"]
    assert golden["declared"] == pytest.approx(1e-3 * golden["scale"])
    assert verify_bundle(bundle.path).ok
