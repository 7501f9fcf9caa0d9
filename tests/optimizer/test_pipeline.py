"""Passes are transactions: each is kept, rolled back or left out, and the report says which and why."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import Any, ClassVar, Literal

import pytest
import torch
from allocations import LargestResult
from folding_models import Island, Pair, image, let_cancel
from pass_contract import conv_bn_chains, tree_of
from tiny_models import Net, enliven
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optimize_export.errors import OptimizeFailed, ParityError
from optimizer import optimize, report_of
from passes import FoldConvBn, Pass, PassResult, fold_conv_bn, registry
from passes.base import Context, ModelTree, TensorRef
from passes.graph.layers import exact
from passes.graph.memory import same_values
from passes.graph.module_pass import ModulePass, ModuleRewriter
from passes.graph.recording import call_of
from passes.registry import register


def test_a_fold_holds_no_more_than_some_rows_of_a_large_weight_in_float64(monkeypatch: Any) -> None:
    rows = 4096
    monkeypatch.setattr(fold_conv_bn, "_ELEMENTS", rows)
    model = enliven(nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64))).eval()
    weight, norm = model[0].weight, model[1]
    folded = fold_conv_bn.FoldedWeight(fold_conv_bn.NormNumbers(norm.eps, True, True), False, 1, False)
    tensors = norm.running_mean, norm.running_var, norm.weight, norm.bias
    with LargestResult() as largest, torch.no_grad():
        new = folded(weight, *tensors)
        bias = fold_conv_bn.FoldedBias(folded, True)(weight, model[0].bias, *tensors)
    assert largest.of[torch.float64] <= rows
    x = torch.randn(2, 64, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(nn.functional.conv2d(x, new, bias), model(x), rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn2(self.second(torch.relu(self.bn1(self.first(x))))))


class Residual(nn.Module):
    def __init__(self, depth: int = 2, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 5)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@dataclass(frozen=True)
class ScaleOneWeight(ModulePass):
    """Scale the first row of one layer's weight by a percentage, as a wrong pass might."""

    name: ClassVar[str] = "scale-one-weight"
    path: str = "blocks.1.second"
    percent: float = 1.0
    declared: bool = True

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        module = graph.tree.root.get_submodule(self.path)
        region = module if self.declared else None
        weight = exact(module.weight).clone()
        weight[0] *= 1 + self.percent / 100
        with graph.change(self.path, f"scaled by {self.percent} percent", region):
            graph.set_tensor(TensorRef(module, "weight"), weight)


@dataclass(frozen=True)
class Raises(ModulePass):
    """Changes something, and raises."""

    name: ClassVar[str] = "raises"

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        ScaleOneWeight(percent=50.0).rewrite(graph, context)
        raise ZeroDivisionError("a defect of the pass\nwith more lines")


@dataclass(frozen=True)
class WritesInPlace(ModulePass):
    """Writes in place to the caller's weights. It must not, because they are shared."""

    name: ClassVar[str] = "writes-in-place"
    how: Literal["no_grad", "data"] = "no_grad"

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        weight = graph.tree.root.get_submodule("head").weight
        if self.how == "data":
            weight.data.mul_(1.5)
            return
        with torch.no_grad():
            weight.mul_(1.5)


@dataclass(frozen=True)
class Harmless(ModulePass):
    """Replaces a weight with an equal one."""

    name: ClassVar[str] = "harmless"
    path: str = "blocks.0.first"

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        ScaleOneWeight(self.path, 0.0).rewrite(graph, context)


@dataclass(frozen=True)
class Bare(Pass):
    """A pass that isn't a ModulePass."""

    name: ClassVar[str] = "bare"

    def run(self, tree: ModelTree, context: Context) -> PassResult:
        rewriter = ModuleRewriter(tree)
        rewriter.skip("", "there is nothing that this pass does")
        return PassResult((), tuple(rewriter.skips), rewriter)


class Cancelling(nn.Module):
    """Two parallel pairs; the products of the first one's weights cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)) for _ in range(2))
        enliven(self)
        let_cancel(self.first[0].weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x + 1000).relu(), self.second(x).relu()


@dataclass(frozen=True)
class ScaleMoved(ModulePass):
    """Move a scale from each BatchNorm into its convolution: the same function, except for rounding."""

    name: ClassVar[str] = "scale-moved"

    def what(self) -> str:
        return "scale moved"

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        for conv, norm in conv_bn_chains(graph.tree, context):
            around = call_of(norm.node).around
            assert around is not None
            with graph.change(graph.tree.path(norm.module or around.module), self.what(), around.module):
                for ref, factor in ((conv.weight, 0.7), (conv.bias, 0.7), (norm.mean, 0.7), (norm.var, 0.49)):
                    assert ref is not None
                    assert ref.value is not None
                    graph.set_tensor(ref, (ref.value.detach().double() * factor).to(ref.value.dtype))
                if norm.module is not None:
                    graph.set_attribute(norm.module, "eps", norm.eps * 0.49)


@dataclass(frozen=True)
class ScaleMovedBlindly(Pass):
    """The same pass, but it ignores which places to leave alone."""

    name: ClassVar[str] = "scale-moved-blindly"

    def run(self, tree: ModelTree, context: Context) -> PassResult:
        return ScaleMoved().run(tree, replace(context, left_alone={}))


X = image(2, 3, 8, 8)


def statuses(model: nn.Module) -> list[tuple[str, str]]:
    return [(record.name, record.status) for record in report_of(model).passes]


def test_one_percent_of_one_weight_in_a_deep_net_is_found_where_it_was_made() -> None:
    model = Residual(4).eval()
    fast = optimize(model, ["fold-conv-bn", ScaleOneWeight("blocks.2.second"), Harmless()], example_inputs=(X,))
    assert statuses(fast) == [("fold-conv-bn", "applied"), ("scale-one-weight", "rolled-back"), ("harmless", "applied")]
    reason = report_of(fast).passes[1].reason
    assert reason.startswith("blocks.2.second (scaled by 1.0 percent): ")
    assert "times its rounding noise" in reason
    assert report_of(fast).verified
    assert torch.allclose(fast(X), model(X), atol=1e-4)


@pytest.mark.parametrize(
    ("item", "dtype"),
    [("fold-conv-bn", torch.bfloat16), ("fold-conv-bn", torch.float16), (ScaleMoved(), torch.bfloat16)],
)
def test_a_place_where_half_precision_would_lose_too_much_is_left_alone(dtype: torch.dtype, item: Any) -> None:
    model = Cancelling().to(dtype).eval()
    fast = optimize(model, [item, "channels-last"], example_inputs=(X.to(dtype),), strict=True)
    record, later = report_of(fast).passes
    assert (record.status, later.status) == ("applied", "applied")
    assert [change.where for change in record.changes] == ["second.1"]
    (skip,) = record.skips
    assert skip.where == "first.1"
    what = "folded into first.0" if item == "fold-conv-bn" else "scale moved"
    assert skip.text.startswith(f"undone ({what}), because it loses too much to rounding: output is off by ")
    assert skip.text.endswith("(4 times is allowed)")
    assert {change.where for change in later.changes} == {"first.0", "second.0"}
    assert report_of(fast).verified
    # The output of the pair that is left alone is bit-identical.
    torch.testing.assert_close(fast(X.to(dtype))[0], model(X.to(dtype))[0], rtol=0, atol=0)
    assert record.parity is not None
    assert record.parity <= 4


def test_rounding_is_judged_on_the_whole_in_other_dtypes() -> None:
    fast = optimize(Cancelling().eval(), ["fold-conv-bn"], example_inputs=(X,))
    assert [change.where for change in report_of(fast).passes[0].changes] == ["first.1", "second.1"]


def test_a_pass_that_leaves_nothing_alone_is_taken_back_as_a_whole() -> None:
    model = Cancelling().bfloat16().eval()
    asked = [ScaleMovedBlindly(), "fold-conv-bn"]
    fast = optimize(model, asked, example_inputs=(X.bfloat16(),))
    record, later = report_of(fast).passes
    assert record.status == "rolled-back"
    assert record.reason.startswith("undone (scale moved), because it loses too much to rounding: output is off by ")
    assert [change.where for change in later.changes] == ["second.1"]
    with pytest.raises(
        OptimizeFailed, match=r"scale-moved-blindly was rolled back: undone \(scale moved\), because it loses too much"
    ):
        optimize(model, asked, example_inputs=(X.bfloat16(),), strict=True)


@dataclass(frozen=True)
class ScaleMovedInOtherWords(ScaleMoved):
    """Describes each of its changes differently in every run."""

    name: ClassVar[str] = "scale-moved-in-other-words"
    said: list[str] = field(default_factory=list)

    def what(self) -> str:
        self.said.append(f"scale moved, change {len(self.said)}")
        return self.said[-1]


def test_a_pass_that_finds_ever_new_words_is_taken_back_too() -> None:
    fast = optimize(Cancelling().bfloat16().eval(), [ScaleMovedInOtherWords()], example_inputs=(X.bfloat16(),))
    (record,) = report_of(fast).passes
    assert record.status == "rolled-back"
    assert "it loses too much to rounding" in record.reason


def test_a_wrong_pass_in_half_precision_is_taken_back_as_a_whole() -> None:
    wrong = ScaleOneWeight("second.0", percent=30.0)
    fast = optimize(Cancelling().bfloat16().eval(), [wrong, "fold-conv-bn"], example_inputs=(X.bfloat16(),))
    assert statuses(fast) == [("scale-one-weight", "rolled-back"), ("fold-conv-bn", "applied")]
    assert report_of(fast).passes[0].reason.startswith("second.0 (scaled by 30.0 percent): ")


def test_a_wrong_pass_without_a_region_is_found_by_bisection() -> None:
    model = Residual().eval()
    wrong = ScaleOneWeight(percent=30.0, declared=False)
    asked: list[Any] = [Harmless("blocks.0.first"), "fold-conv-bias", wrong, "fold-conv-bn", Harmless("head")]
    fast = optimize(model, asked, example_inputs=(X,))
    assert statuses(fast) == [
        ("harmless", "applied"),
        ("fold-conv-bias", "applied"),
        ("scale-one-weight", "rolled-back"),
        ("fold-conv-bn", "applied"),
        ("harmless", "applied"),
    ]
    assert len(report_of(fast).passes[3].changes) == 5
    assert report_of(fast).passes[2].reason
    assert report_of(fast).verified
    assert torch.allclose(fast(X), model(X), atol=1e-4)


def test_two_wrong_passes_are_both_found() -> None:
    # With other weights a channel may be dead, so that scaling its weight changes nothing.
    torch.manual_seed(0)
    first, second = (ScaleOneWeight(f"blocks.{n}.first", 40.0, declared=False) for n in (0, 1))
    fast = optimize(Residual(), [first, "fold-conv-bn", second], example_inputs=(X,))
    assert [status for _, status in statuses(fast)] == ["rolled-back", "applied", "rolled-back"]
    assert report_of(fast).verified


def test_a_pass_that_raises_is_left_out() -> None:
    model = Residual().eval()
    fast = optimize(model, ["fold-conv-bn", Raises(), Harmless()], example_inputs=(X,))
    assert statuses(fast) == [("fold-conv-bn", "applied"), ("raises", "failed"), ("harmless", "applied")]
    line = inspect.getsourcelines(Raises.rewrite)[1] + 2
    assert report_of(fast).passes[1].reason == f"ZeroDivisionError: a defect of the pass (test_pipeline.py:{line})"
    assert torch.allclose(fast(X), model(X), atol=1e-4)


@dataclass(frozen=True)
class RaisesWhatIsPromised(Raises):
    is_guarantee: ClassVar[bool] = True


@dataclass(frozen=True)
class ScalesWhatIsPromised(ScaleOneWeight):
    is_guarantee: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("item", "strict", "message"),
    [
        (Raises(), True, "raises failed .ZeroDivisionError: a defect of the pass"),
        (RaisesWhatIsPromised(), False, "raises failed .ZeroDivisionError: a defect of the pass"),
        (ScaleOneWeight(), True, "scale-one-weight was rolled back: blocks.1.second"),
        (ScalesWhatIsPromised(), False, "scale-one-weight was rolled back: blocks.1.second"),
        (ScalesWhatIsPromised(percent=30.0, declared=False), False, "scale-one-weight was rolled back"),
    ],
)
def test_strict_and_a_guarantee_make_it_an_error(item: Pass, strict: bool, message: str) -> None:
    model = Residual()
    before = tree_of(model)
    with pytest.raises(OptimizeFailed, match=message):
        optimize(model, ["fold-conv-bn", item], example_inputs=(X,), strict=strict)
    assert tree_of(model) == before


@pytest.mark.parametrize("strict", [False, True])
def test_a_pass_that_writes_to_the_callers_weights_is_named(strict: bool) -> None:
    with pytest.raises(OptimizeFailed, match=r"The pass writes-in-place wrote in place to head\.weight"):
        optimize(Residual(), ["fold-conv-bn", WritesInPlace()], example_inputs=(X,), strict=strict)


def test_a_write_past_the_version_counter_is_found_in_the_result() -> None:
    with pytest.raises(ParityError, match="Even without any pass, the copy doesn't compute the same as the model"):
        optimize(Residual(), ["fold-conv-bn", WritesInPlace("data")], example_inputs=(X,))


def test_a_bare_pass_that_raises_half_way_leaves_the_tree_as_it_was() -> None:
    @dataclass(frozen=True)
    class HalfWay(Pass):
        """Replaces a module, then raises."""

        name: ClassVar[str] = "half-way"

        def run(self, tree: ModelTree, context: Context) -> PassResult:
            tree.root.head = nn.Identity()
            tree.root.stem[0].bias = None
            tree.root.mark = "left behind"
            raise ZeroDivisionError("half-way")

    model = Residual().eval()
    fast = optimize(model, [HalfWay(), "fold-conv-bn"], example_inputs=(X,))
    assert statuses(fast) == [("half-way", "failed"), ("fold-conv-bn", "applied")]
    assert isinstance(fast.head, nn.Linear)
    assert not hasattr(fast, "mark")
    assert report_of(fast).verified


def test_chains_of_norms_are_checked_one_by_one() -> None:
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), *[nn.BatchNorm2d(4) for _ in range(4)], nn.ReLU())).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X,))
    (record,) = report_of(fast).passes
    assert record.status == "applied", record.reason
    assert [change.where for change in record.changes] == ["1", "2", "3", "4"]
    assert record.parity is not None
    assert torch.allclose(fast(X), model(X), atol=1e-5)


def test_a_pass_whose_changes_no_run_can_be_watched_for_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_deep(*args: Any, **kwargs: Any) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr("passes.graph.module_pass._Check._judged", too_deep)
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    fast = optimize(model, ["sync-batch-norm"], example_inputs=(torch.randn(2, 3, 8, 8),), mode="training")
    (record,) = report_of(fast).passes
    assert record.status == "failed"
    assert record.reason == (
        "RuntimeError: the run that checks its changes raises (RecursionError: maximum recursion depth exceeded)"
    )
    with pytest.raises(OptimizeFailed, match="maximum recursion depth"):
        optimize(model, ["sync-batch-norm"], example_inputs=(torch.randn(2, 3, 8, 8),), mode="training", strict=True)


def test_modules_many_levels_deep() -> None:
    model: nn.Module = enliven(Pair())
    for _ in range(130):
        model = nn.Sequential(model)
    fast = optimize(model.eval(), example_inputs=(image(),))
    # torch.compile's front end may give up at such a depth.
    assert {record.status for record in report_of(fast).passes[:2]} <= {"applied", "unchanged"}
    torch.testing.assert_close(fast(image()), model(image()), rtol=1e-4, atol=1e-5)


def test_the_records_of_a_pass_that_does_nothing() -> None:
    fast = optimize(Pair(), [Bare()], example_inputs=(X,))
    (record,) = report_of(fast).passes
    assert (record.status, record.changes, record.parity) == ("unchanged", (), None)
    assert record.skips[0].text == "there is nothing that this pass does"


def test_without_example_inputs_nothing_is_verified_and_said_so() -> None:
    fast = optimize(Residual(), [ScaleOneWeight()])
    assert statuses(fast) == [("scale-one-weight", "applied")]
    assert not report_of(fast).verified
    assert any("nothing was verified" in note for note in report_of(fast).notes)


def test_an_island_among_graphs() -> None:
    model = enliven(nn.Sequential(Island(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3))).eval()
    fast = optimize(model, ["fold-conv-bn", ScaleOneWeight("0.conv", 5.0)], example_inputs=(X,))
    assert statuses(fast)[0][1] in ("applied", "unchanged")
    assert statuses(fast)[1] == ("scale-one-weight", "rolled-back")
    assert report_of(fast).passes[1].reason.startswith("0.conv (scaled")
    assert torch.allclose(fast(X), model(X), atol=1e-5)


def test_passes_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes are given as instances, and by a name that an entry point registers."""
    import sys
    import types

    module = types.ModuleType("another_package")
    module.__dict__["Harmless"] = Harmless
    monkeypatch.setitem(sys.modules, "another_package", module)
    point = EntryPoint("harmless", "another_package:Harmless", registry.ENTRY_POINTS)
    classes = register([FoldConvBn], [point])
    monkeypatch.setattr(registry, "_classes", lambda: classes)
    fast = optimize(Residual(), ["harmless:path=stem.0", FoldConvBn(), Harmless("head")], example_inputs=(X,))
    assert statuses(fast) == [("harmless", "applied"), ("fold-conv-bn", "applied"), ("harmless", "applied")]
    assert report_of(fast).passes[0].options["path"] == "stem.0"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_sparse_and_nested_outputs_are_compared() -> None:
    def run(m: Any, x: Tensor) -> list[Tensor]:
        y = torch.relu(m.linear(x[:, 0, 0]))
        return [y.to_sparse(), y.to_sparse_csr(), torch.nested.as_nested_tensor([y, y[:1]])]

    report = report_of(optimize(enliven(Net(run, linear=nn.Linear(8, 5))), [], example_inputs=(X,)))
    assert report.coverage.share == 1
    assert report.verified


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_outputs_are_the_same_only_to_the_bit(layout: torch.layout) -> None:
    dense = torch.tensor([[0.0, 1.5], [float("nan"), 0.0]])
    mine = dense.to_sparse(layout=layout)
    assert same_values(mine, dense.clone().to_sparse(layout=layout))
    assert not same_values(mine, (dense * (1 + 1e-6)).to_sparse(layout=layout))
    assert not same_values(mine, dense.t().contiguous().to_sparse(layout=layout))
    assert not same_values(mine, dense)
    assert not same_values(mine, dense[:1].to_sparse(layout=layout))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_outputs_are_the_same_row_by_row(layout: torch.layout) -> None:
    def nested(*rows: list[float]) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=layout)

    assert same_values(nested([1.0, 2.0], [3.0]), nested([1.0, 2.0], [3.0]))
    assert not same_values(nested([1.0, 2.0], [3.0]), nested([1.0, 2.0], [3.5]))
    # Padded with zeros, both would be equal.
    assert not same_values(nested([1.0, 2.0], [3.0]), nested([1.0, 2.0], [3.0, 0.0]))
    assert not same_values(nested([1.0, 2.0], [3.0]), nested([1.0, 2.0]))


class Fed(Pair):
    """Has a second pair whose only input is a parameter."""

    def more(self) -> None:
        self.inner = nn.Conv2d(3, 4, 3, padding=1)
        self.inner_bn = nn.BatchNorm2d(4)
        self.table = nn.Parameter(torch.randn(1, 3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) + self.inner_bn(self.inner(self.table))


class Alone(Fed):
    def forward(self) -> Tensor:  # type: ignore[override]
        return self.inner_bn(self.inner(self.table))


@pytest.mark.parametrize(
    ("cls", "places", "dtype"),
    [
        (Fed, ["bn", "inner_bn"], torch.float32),
        (Alone, ["inner_bn"], torch.float64),
        (Alone, ["inner_bn"], torch.bfloat16),
    ],
)
def test_a_change_to_what_takes_no_argument_is_checked(cls: type[Fed], places: list[str], dtype: torch.dtype) -> None:
    inputs = (X.to(dtype),) if cls is Fed else ()
    model = cls().to(dtype).eval()
    fast = optimize(model, ["fold-conv-bn", "channels-last"], example_inputs=inputs, strict=True)
    folded, laid_out = report_of(fast).passes
    assert [change.where for change in folded.changes] == places
    assert folded.parity is not None
    assert folded.parity <= 4
    assert laid_out.status == "applied"
    assert report_of(fast).verified
    torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=0.05 if dtype is torch.bfloat16 else 1e-5, atol=0.05)
    trained = optimize(cls().to(dtype), ["fold-conv-bias"], example_inputs=inputs, mode="training", strict=True)
    assert len(report_of(trained).passes[0].changes) == len(places)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_wrong_change_to_what_takes_no_argument_is_found(mode: Literal["inference", "training"]) -> None:
    fast = optimize(Alone().train(mode == "training"), [ScaleOneWeight("inner")], example_inputs=(), mode=mode)
    (record,) = report_of(fast).passes
    assert record.status == "rolled-back"
    assert record.reason.startswith("inner (scaled by 1.0 percent): output is off by ")


class Complex(Pair):
    def more(self) -> None:
        self.complex = nn.Conv2d(4, 4, 3, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.complex(self.bn(self.conv(x)).to(torch.complex64)).abs()


def test_a_complex_convolution_is_compared_in_its_own_dtype() -> None:
    model = Complex().eval()
    fast = optimize(model, ["fold-conv-bn", "channels-last"], example_inputs=(X,), strict=True)
    assert statuses(fast) == [("fold-conv-bn", "applied"), ("channels-last", "applied")]
    assert [change.where for change in report_of(fast).passes[1].changes] == ["conv", "complex"]
    assert report_of(fast).verified
    torch.testing.assert_close(fast(X), model(X))


@dataclass(frozen=True)
class Widen(ModulePass):
    """Make a convolution return the right numbers in another dtype, which the module around it casts back."""

    name: ClassVar[str] = "widen"

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        conv = graph.tree.root.conv
        with graph.change("conv", "gives float64", conv):
            graph.set_attribute(conv, "forward", lambda x: nn.Conv2d.forward(conv, x).double())


def test_a_change_of_a_dtype_within_is_found_where_it_was_made() -> None:
    class Casts(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).float().sin()

    fast = optimize(Casts().eval(), [Widen()], example_inputs=(X,))
    (record,) = report_of(fast).passes
    assert record.status == "rolled-back"
    assert record.reason.startswith("conv (gives float64): output: the dtype is float64, but should be float32")


class Parted(Pair):
    """Two pairs; a reentrant checkpoint around its convolution separates the second."""

    def more(self) -> None:
        self.second, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(checkpoint(self.second, self.bn(self.conv(x)), use_reentrant=True))


class OneRowAlone(Parted):
    """Skips the second BatchNorm for a single row."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.bn(self.conv(x)))
        return x if len(x) == 1 else self.norm(x)


class Force(OneRowAlone):
    """Computes gradients in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(leaf.square().sum(), leaf)
        return super().forward(x) + slope.mean()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("cls", "mode"), [(Parted, "inference"), (Parted, "training"), (OneRowAlone, "training"), (Force, "inference")]
)
def test_pairs_that_some_calls_part_are_right_at_every_call(
    cls: type[Parted], mode: Literal["inference", "training"]
) -> None:
    passes = ["fold-conv-bias"] if mode == "training" else ["fold-conv-bias", "fold-conv-bn", "channels-last"]
    model = enliven(cls()).train(mode == "training")
    fast = optimize(model, passes, example_inputs=(image(4, 3, 8, 8),), mode=mode, strict=True)
    assert report_of(fast).verified
    for rows in (1, 4, 5):
        x = image(rows, 3, 8, 8)
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                torch.testing.assert_close(fast(x), copy.deepcopy(model)(x), rtol=1e-4, atol=1e-5)


class Scaled(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(4, 4, 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 4).reshape(4, 1, 1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.last(super().forward(x)) * self.scale
        return x if mask is None else x * mask


class Masked(nn.Module):
    """Passes no mask to a block if nothing is masked, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.masked = Scaled(), Scaled()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.plain(x) + self.masked(x, None if mask.all() else mask)


@pytest.mark.parametrize(("dtype", "full"), [(torch.bool, 0), (torch.float32, 3)])
def test_what_a_block_is_given_no_mask_for_is_right(dtype: torch.dtype, full: int) -> None:
    model = enliven(Masked()).eval()
    x, mask = image(4, 3, 8, 8), torch.zeros(4, 1, 8, 8, dtype=dtype)
    mask[full] = 1
    mask[:, :, :, 4:] = 1
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(x, mask), strict=True)
    (record,) = report_of(fast).passes
    assert {change.where for change in record.changes} == {"plain.bn", "plain (mul)", "masked.bn", "masked (mul)"}
    for rows in (*(slice(row, row + 1) for row in range(4)), slice(0, 4)):
        torch.testing.assert_close(fast(x[rows], mask[rows]), model(x[rows], mask[rows]), rtol=1e-4, atol=1e-5)


def test_a_batch_of_one_that_cannot_be_had_parts_nothing() -> None:
    def inputs(batch_size: int, generator: torch.Generator) -> tuple[Tensor]:
        if batch_size == 1:
            raise ValueError("pairs of images only")
        return (torch.randn(batch_size, 3, 8, 8, generator=generator),)

    class Pairwise(Pair):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 1:
                raise ValueError("pairs of images only")
            return super().forward(x)

    for example in ((X,), inputs):
        fast = optimize(enliven(Pairwise()).eval(), ["fold-conv-bn"], example_inputs=example)
        assert statuses(fast) == [("fold-conv-bn", "applied")]


class Keys:
    """A cache of a user's own class, which pytree doesn't flatten."""

    def __init__(self) -> None:
        self.kept = torch.randn(2, 4, 8)
        self.calls = 0

    def push(self, x: Tensor) -> Tensor:
        if self.calls:
            raise ValueError("a second call fills the cache beyond its end")
        self.calls += 1
        self.kept = torch.cat((self.kept, x[:, None]), 1)
        return self.kept


class AddsKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)) + keys.push(x).sum(1))
        return y


def test_a_cache_is_as_it_was_given_in_every_run_for_the_passes() -> None:
    x, model = torch.randn(2, 8), enliven(AddsKeys()).eval()
    fast = optimize(model, ["fold-conv-bn", "merge-linears"], example_inputs=(x, given := Keys()), strict=True)
    assert statuses(fast) == [("fold-conv-bn", "applied"), ("merge-linears", "unchanged")]
    assert report_of(fast).parity.ok
    assert given.calls == 0
    torch.testing.assert_close(fast(x, copy.deepcopy(given)), model(x, given))
