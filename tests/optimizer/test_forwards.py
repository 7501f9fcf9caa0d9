"""How often a proof runs forward of the original, and in which dtypes."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from tiny_models import Net as TinyNet
from tiny_models import enliven
from torch import nn

from optimize_export.errors import ParityError
from optimizer import export, optimize
from optimizer.model.inputs import Samples
from optimizer.parity import judge, measure_reference
from optimizer.pipeline import provenance_of
from passes import FoldConvBn, ModulePass

RAN = Counter()


class Net(nn.Module):
    """Counts its forwards by batch size and dtype; with `labels`, it returns integers too."""

    def __init__(self, labels=False):
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.labels, self.factor = labels, 1.0

    def forward(self, x):
        scores = self.head(self.bn(self.conv(x)).relu().mean((2, 3))) * self.factor
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            RAN[scores.dtype, len(x)] += 1
        return (scores, scores.argmax(1)) if self.labels else scores


@pytest.fixture
def net():
    torch.manual_seed(0)
    return enliven(Net()).eval()


def image(rows=4):
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(rows))


def float64_sizes():
    return {size for dtype, size in RAN if dtype == torch.float64}


def test_float64_is_run_at_two_batch_sizes(net):
    RAN.clear()
    reference = measure_reference(net, Samples((image(),)))
    assert float64_sizes() == {4, 1}
    assert {size for _, size in RAN} == {4, 1, 2, 3, 5, 8} == set(reference.batch_sizes)
    assert judge(reference.compare(net)).ok
    net.factor = 1.001
    wrong = judge(reference.compare(enliven(Net()).eval()))
    assert wrong.verdict == "failed"


def test_where_there_are_labels_ties_are_looked_for_at_each_size():
    RAN.clear()
    measure_reference(enliven(Net(labels=True)).eval(), Samples((image(),)))
    assert float64_sizes() == {4, 1, 2, 3, 5, 8}


def test_a_fault_at_a_size_without_float64_is_seen(net):
    class AtFive(Net):
        def forward(self, x):
            return super().forward(x) * (1 + 1e-4 * (len(x) == 5))

    torch.manual_seed(0)
    wrong = enliven(AtFive()).eval()
    report = judge(measure_reference(net, Samples((image(),))).compare(wrong))
    assert report.verdict == "failed"
    assert "batch size 5" in report.reason


@pytest.mark.parametrize("passes", [None, ["simplify"], []])
def test_where_nothing_changes_the_original_is_run_once_at_two_sizes(passes):
    def plain(net, x):
        RAN[x.dtype, len(x)] += 1
        return net.head(x).tanh()

    model = enliven(TinyNet(plain, head=nn.Linear(8, 5))).eval()
    RAN.clear()
    fast = optimize(model, passes, example_inputs=(torch.randn(4, 8),))
    if passes is None or not passes:
        assert {(torch.float32, 4): 1, (torch.float32, 2): 1} == RAN
    assert fast.report.verified
    assert "there was nothing to compare" in fast.report.parity.reason


def test_what_a_pass_of_the_users_did_is_compared_whatever_it_says(net):
    @dataclass(frozen=True)
    class Doubling(ModulePass):
        name = "doubling"

        def rewrite(self, model, context):
            model.tree.root.head.weight.data = model.tree.root.head.weight * 2

    with pytest.raises(ParityError, match="Even without any pass, the copy doesn't compute the same as the model"):
        optimize(net, [Doubling()], example_inputs=(image(),))


def test_a_fold_takes_few_forwards(net):
    RAN.clear()
    fast = optimize(net, example_inputs=(image(),))
    assert [record.status for record in fast.report.passes].count("applied") >= 2
    ran = sum(len_ * count * (2 if dtype == torch.float64 else 1) for (dtype, len_), count in RAN.items())
    assert ran / 4 <= 13


class Padded(nn.Module):
    """While a `TorchFunctionMode` is active, its encoder takes the slow path, which doesn't zero padded positions."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.conv, self.bn = nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8)

    def forward(self, x):
        seen = self.encoder(x, src_key_padding_mask=(x[..., 0] > 0.5))
        return self.bn(self.conv(seen.transpose(1, 2)))


def test_what_comes_out_only_while_calls_are_watched_is_not_taken_for_the_originals():
    torch.manual_seed(0)
    model = enliven(Padded()).eval()
    x = torch.rand(4, 6, 8)
    x[:, 0, 0] = 0
    fast = optimize(model, example_inputs=(x,))
    assert fast.report.verified, str(fast.report)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert not any("not deterministic" in note for note in fast.report.parity.notes)


def exported(fast, folder, *inputs, **options):
    RAN.clear()
    return export(fast, example_inputs=inputs, output=folder, formats=("pt2",), **options)


@pytest.fixture(scope="module")
def optimized():
    torch.manual_seed(0)
    return optimize(enliven(Net()).eval(), example_inputs=(image(),))


def test_an_export_goes_on_with_the_runs_of_optimize(optimized, tmp_path):
    fast = optimized
    assert exported(fast, tmp_path / "same", image()).parity.ok
    # The float64 outputs at the given size are kept from `optimize`; one run there checks that the original is
    # unchanged.
    assert float64_sizes() == {1}
    assert RAN[torch.float32, 3] == RAN[torch.float32, 8] == 1
    assert RAN[torch.float32, 5] <= 2
    bundle = exported(fast, tmp_path / "again", image())
    assert float64_sizes() == {1}
    assert bundle.parity.ok


@pytest.mark.parametrize("other", ["inputs", "seed", "sizes"])
def test_other_calls_are_measured_anew(optimized, other, tmp_path):
    options = {"seed": {"seed": 1}, "sizes": {"batch_sizes": (3, 5)}}.get(other, {})
    x = image() + 1 if other == "inputs" else image()
    assert exported(optimized, tmp_path / "net", x, **options).parity.ok
    assert len(float64_sizes()) == 2


@pytest.mark.parametrize("change", ["weight", "number"])
def test_an_original_that_was_changed_is_measured_anew(net, change, tmp_path):
    fast = optimize(net, ["channels-last"], example_inputs=(image(),))
    if change == "number":
        net.factor = 2.0
        with pytest.raises(ParityError):
            exported(fast, tmp_path / "net", image())
    else:
        with torch.no_grad():
            net.head.bias.add_(1)
        # The result shares the bias, so it changes too.
        assert exported(fast, tmp_path / "net", image()).parity.ok
    assert float64_sizes() >= {4, 1}


def test_large_outputs_are_not_kept(net, monkeypatch, tmp_path):
    monkeypatch.setattr("optimizer.pipeline.optimizing._LARGEST_KEPT", 100)
    fast = optimize(net, example_inputs=(image(),))
    assert exported(fast, tmp_path / "net", image()).parity.ok
    assert len(float64_sizes()) == 2


def test_the_report_tells_the_seconds_of_each_stage(net):
    report = optimize(net, example_inputs=(image(),)).report
    assert list(report.to_json()["stages"]) == ["original", "passes", "comparison"]
    assert 0 < sum(report.stages.values()) <= report.seconds
    assert "comparison" in next(line for line in str(report).splitlines() if line.startswith("time: "))


class MakesItself(nn.Module):
    """Has a `__deepcopy__` that returns a module with other weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def __deepcopy__(self, memo):
        return MakesItself()

    def forward(self, x):
        return self.linear(x)


def test_a_class_that_copies_itself_is_compared_though_nothing_changed():
    model = nn.Sequential(enliven(MakesItself())).eval()
    assert not optimize(model, ["fold-conv-bn"], example_inputs=(torch.randn(4, 8),)).report.verified


@pytest.mark.parametrize(("factor", "verdict"), [(0.0, "vacuous"), (float("nan"), "vacuous"), (2.0, "ok")])
def test_outputs_without_signal_are_vacuous_though_nothing_changed(factor, verdict):
    model = TinyNet(lambda net, x: x * factor).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(torch.randn(4, 8),))
    assert fast.report.parity.verdict == verdict
    assert fast.report.verified == (verdict == "ok")


def test_the_reference_of_optimize_and_of_its_export_judges_small_channels_by_themselves():
    model = enliven(nn.Linear(8, 4)).eval()
    with torch.no_grad():
        model.weight[0] *= 1e6
    fast = optimize(model, [FoldConvBn()], example_inputs=torch.randn(4, 8))
    outputs = provenance_of(fast).outputs
    assert set(outputs.reference().slices) == {"output"}
    again = measure_reference(model, Samples((outputs.samples.given.args[0],)), known=outputs)
    assert set(again.slices) == {"output"}
