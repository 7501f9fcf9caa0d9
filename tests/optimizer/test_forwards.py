"""How many forwards of the original the proof takes, and of what kind."""

from collections import Counter

import pytest
import torch
from tiny_models import enliven
from torch import nn

from optimizer import export, optimize
from optimizer.errors import ParityError
from optimizer.inputs import Samples
from optimizer.parity import Reference, judge

RAN = Counter()


class Net(nn.Module):
    """Counts its forwards by batch size and dtype; `labels` gives integers too."""

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
    reference = Reference.measure(net, Samples((image(),)))
    assert float64_sizes() == {4, 2}
    assert {size for _, size in RAN} == {4, 1, 2, 3, 5, 8} == set(reference.batch_sizes)
    assert judge(reference.compare(net)).ok
    net.factor = 1.001
    wrong = judge(reference.compare(enliven(Net()).eval()))
    assert wrong.verdict == "failed"


def test_where_there_are_labels_ties_are_looked_for_at_each_size():
    RAN.clear()
    Reference.measure(enliven(Net(labels=True)).eval(), Samples((image(),)))
    assert float64_sizes() == {4, 1, 2, 3, 5, 8}


def test_a_fault_at_a_size_without_float64_is_seen(net):
    class AtFive(Net):
        def forward(self, x):
            return super().forward(x) * (1 + 1e-4 * (len(x) == 5))

    torch.manual_seed(0)
    wrong = enliven(AtFive()).eval()
    report = judge(Reference.measure(net, Samples((image(),))).compare(wrong))
    assert report.verdict == "failed"
    assert "batch size 5" in report.reason


def exported(fast, folder, *inputs, **options):
    RAN.clear()
    return export(fast, example_inputs=inputs, output=folder, formats=("pt2",), **options)


def test_an_export_goes_on_with_the_runs_of_optimize(net, tmp_path):
    fast = optimize(net, example_inputs=(image(),))
    assert exported(fast, tmp_path / "same", image()).parity.ok
    assert float64_sizes() == set()
    # The given size once to see that it is still the same, and by one copy in turn with the other size.
    ran = Counter({size: count for (_, size), count in RAN.items()})
    assert ran[1] == ran[3] == ran[5] == ran[8] == 1
    bundle = exported(fast, tmp_path / "again", image())
    assert float64_sizes() == set()
    assert bundle.parity.ok


@pytest.mark.parametrize("other", ["inputs", "seed", "sizes"])
def test_other_calls_are_measured_anew(net, other, tmp_path):
    fast = optimize(net, example_inputs=(image(),))
    options = {"seed": {"seed": 1}, "sizes": {"batch_sizes": (3, 5)}}.get(other, {})
    x = image() + 1 if other == "inputs" else image()
    assert exported(fast, tmp_path / "net", x, **options).parity.ok
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
        # The result shares the bias.
        assert exported(fast, tmp_path / "net", image()).parity.ok
    assert float64_sizes() >= {4, 2}


def test_large_outputs_are_not_kept(net, monkeypatch, tmp_path):
    monkeypatch.setattr("optimizer.api._LARGEST_KEPT", 100)
    fast = optimize(net, example_inputs=(image(),))
    assert exported(fast, tmp_path / "net", image()).parity.ok
    assert len(float64_sizes()) == 2
