"""Errors in a channel, column or band of small numbers, next to numbers that are far larger."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from parity_models import check_region, folded
from tiny_models import enliven
from torch import nn

from optimizer.model.inputs import Samples
from optimizer.parity import (
    check_parity,
    judge,
    measure_reference,
)
from optimizer.parity.differences import Pool, Slices, pieces_of, slice_noise
from optimizer.parity.noise import RoundingNoise
from optimizer.parity.verdict import SLICE_FACTOR


class Scaled(nn.Module):
    """Columns of very different magnitudes: the first is scaled by a million, the last by 0.1."""

    def __init__(self, activation=None, bias=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 8)
        self.stem.bias.data += bias
        self.activation = activation or nn.Identity()
        self.head = nn.Linear(8, 8)
        self.sizes = 10.0 ** (6 - torch.arange(8.0))
        for parameter in self.head.parameters():
            parameter.data *= self.sizes.view(-1, *(1,) * (parameter.dim() - 1))

    def forward(self, x):
        return self.head(self.activation(self.stem(x)))


class ScaledConv(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        enliven(self)
        for parameter in self.bn.parameters():
            parameter.data *= 10.0 ** (6 - torch.arange(8.0))

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


@pytest.mark.parametrize(
    ("activation", "shape", "off", "where"),
    [
        (nn.GELU(), (2, 6), ("weight", 6, 1.001), "index 6 of dim 1"),
        (nn.GELU(), (2, 6), ("weight", 6, 1.1), "index 6 of dim 1"),
        (None, (2, 5, 6), ("bias", 7, 1.5), "index 7 of dim 2"),
    ],
)
def test_an_error_in_a_column_a_million_times_smaller_is_found(activation, shape, off, where):
    model, x = Scaled(activation), torch.randn(shape)
    wrong, (name, column, factor) = copy.deepcopy(model), off
    wrong.head.get_parameter(name).data[column] *= factor
    report = check_parity(model, wrong, (x,))
    (output,) = report.outputs
    assert output.max_error < output.tolerance
    assert (report.verdict, output.slice) == ("failed", where)
    assert output.slice_ratio > 256
    assert where in report.reason
    assert check_parity(model, wrong, (x,), atol=10.0).ok, "the user's tolerance replaces the noise of slices too"


def test_a_column_gets_more_samples_before_it_is_wrong(monkeypatch):
    """As in a column of PP-OCR's feature maps, whose first sample happens to have almost no rounding error."""
    model, x = Scaled(nn.GELU()), torch.randn(2, 6)
    other = copy.deepcopy(model)
    other.head.weight.data[6] *= 1.001
    reference = measure_reference(model, Samples((x,)))
    (name,) = reference.noises
    report = judge(reference.compare(other))
    assert (report.verdict, report.outputs[0].slice) == ("failed", "index 6 of dim 1")

    def more(*_):
        pool = Pool(slices=Slices())
        own = reference.original.calls[0].own.values[name]
        pool.add(own.double().abs() * 1e-3, of=own)
        return {name: pool}

    reference = measure_reference(model, Samples((x,)))
    before = dict(reference.slices[name].noise)
    monkeypatch.setattr(RoundingNoise, "more_samples", more)
    assert judge(reference.compare(other)).ok
    assert bool((reference.slices[name].noise[1] >= before[1]).all())


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (1, 40), (5, 1, 3), (2, 7, 3), (3, 4, 2, 5)], ids=str)
@pytest.mark.parametrize("spoilt", [False, True], ids=["finite", "with NaN"])
def test_pieces_pool_to_the_same_as_a_whole(shape, spoilt, monkeypatch):
    def pooled():
        pool = Pool(slices=Slices())
        for a, b in calls:
            pool.add_distance(a, b)
        return pool

    generator = torch.Generator().manual_seed(0)
    calls = [[torch.randn(shape, generator=generator) * 300 for _ in "ab"] for _ in range(2)]
    if spoilt and shape:
        calls[0][0].view(-1)[::3] = math.nan
    whole = pooled()
    for size in (1, 2, 3, 6, 10):
        monkeypatch.setattr("optimizer.parity.differences.PIECE", size)
        covered = torch.zeros(shape)
        for at in pieces_of(covered):
            covered[at] += 1
            assert covered[at].numel() <= max(size, math.prod(shape[2:]))
        assert bool((covered == 1).all())
        pieces = pooled()
        assert (pieces.largest, pieces.count) == (whole.largest, whole.count)
        assert pieces.squares == pytest.approx(whole.squares)
        for found, wanted in (
            (pieces.slices.largest, whole.slices.largest),
            (pieces.slices.samples, whole.slices.samples),
        ):
            assert found.keys() == wanted.keys()
            for key, values in wanted.items():
                torch.testing.assert_close(found[key], values, rtol=0, atol=0, equal_nan=True)


def test_an_error_in_a_channel_a_million_times_smaller_is_found():
    model, x = ScaledConv().eval(), torch.randn(2, 3, 7, 7)
    right, wrong = folded(model), folded(model)
    wrong.conv.weight.data[6] *= 1.01
    assert check_parity(model, right, (x,)).ok
    report = check_parity(model, wrong, (x,))
    assert report.outputs[0].max_error < report.outputs[0].tolerance
    assert report.verdict == "failed"
    assert report.outputs[0].slice == "index 6 of dim 1"
    region = check_region(model, wrong, x)
    assert not region.ok
    assert "index 6 of dim 1" in region.reason
    assert check_region(model, right, x).ok


class Masked(nn.Module):
    """Every column of its scores is masked in some row."""

    def __init__(self, fill):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.fill = nn.Linear(6, 32), fill

    def forward(self, x, mask):
        scores = self.head(x)
        return scores.masked_fill(mask, torch.finfo(scores.dtype).min if self.fill is None else self.fill)


@pytest.mark.parametrize("fill", [-1e9, -1e30, None])
def test_an_error_next_to_a_mask_of_huge_numbers_is_found(fill):
    model, inputs = Masked(fill), (torch.randn(16, 6), torch.rand(16, 32) > 0.5)
    assert inputs[1].any(0).all()
    right, wrong = copy.deepcopy(model), copy.deepcopy(model)
    right.head.forward = lambda x: (x.unsqueeze(-2) * model.head.weight).sum(-1) + model.head.bias
    wrong.head.weight.data *= 1.001
    assert check_parity(model, right, inputs).ok
    report = check_parity(model, wrong, inputs)
    assert report.reference == "float64"
    assert not report.ok
    assert report.outputs[0].slice == "a number below 256"
    assert "at a number below 256" in report.reason


def test_bands_of_magnitude_without_numbers_in_every_measurement_are_not_judged():
    sizes = torch.tensor([1.0, 300.0, 1e9]).repeat_interleave(20)
    size, once, errors = Slices(), Slices(), Slices()
    size.add(sizes, sizes)
    once.add(sizes[:40] * 1e-9, sizes[:40])
    errors.add(sizes.square(), sizes)
    worst = slice_noise(size, [once], torch.float32, least_samples=16).worst(errors)
    assert worst.where == "a number from 256 to 65536"
    assert worst.error == 90000


class ByScale(nn.Module):
    """Activations as accurate as a kernel must be: to an ulp of the result's scale, not of each number."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        gate = 0.5 * (1 + torch.tanh(x / 2))
        return {
            "sigmoid": lambda: gate,
            "silu": lambda: x * gate,
            "softplus": lambda: torch.log(1 + torch.exp(x)),
            "elu": lambda: torch.where(x > 0, x, torch.exp(x) - 1),
            "gelu": lambda: x - x * 0.5 * (1 - torch.erf(x * 0.5**0.5)),
            "softmax": lambda: (x.softmax(-1) + 1) - 1,
        }[self.name]()


@pytest.mark.parametrize(("bias", "head"), [("low", "head"), ("spread", "none")])
@pytest.mark.parametrize(
    "activation",
    [nn.Sigmoid(), nn.SiLU(), nn.SiLU(inplace=True), nn.Softplus(), nn.ELU(), nn.GELU(), nn.Softmax(-1)],
    ids=lambda activation: f"{type(activation).__name__}{'-inplace' if getattr(activation, 'inplace', False) else ''}",
)
def test_kernels_that_keep_to_the_scale_of_their_result_are_right(activation, bias, head):
    model = Scaled(activation, torch.tensor(-25.0) if bias == "low" else -torch.linspace(0, 60, 8))
    candidate = copy.deepcopy(model)
    candidate.activation = ByScale(type(activation).__name__.lower())
    if head == "none":
        model.head = candidate.head = nn.Identity()
    x = torch.randn(2, 6)
    report = check_parity(model, candidate, (x,))
    (output,) = report.outputs
    assert output.slice_ratio < SLICE_FACTOR / 10


def test_sums_in_another_order_are_right():
    class Reordered(Scaled):
        def forward(self, x):
            order = torch.arange(5, -1, -1)
            x = F.linear(x[:, order], self.stem.weight[:, order], self.stem.bias)
            first, second = x.chunk(2, 1), self.head.weight.chunk(2, 1)
            return self.head.bias + first[1] @ second[1].T + first[0] @ second[0].T

    report = check_parity(Scaled(), Reordered(), (torch.randn(2, 6),))
    assert report.ok
    assert 0 < report.outputs[0].slice_ratio < 10


def test_columns_that_cancel_are_judged_by_the_cancelled_numbers():
    class Cancelling(nn.Module):
        def __init__(self, plain):
            super().__init__()
            self.plain = plain

        def forward(self, x):
            big = 10.0 ** torch.arange(8)
            return (x if self.plain else (x + big) - big) * 10.0 ** -torch.arange(8)

    report = check_parity(Cancelling(False), Cancelling(True), (torch.randn(2, 8),))
    assert report.ok
    assert report.outputs[0].slice_ratio < 10


def test_slices_of_few_numbers_or_none_but_zeros_are_not_judged():
    model, x = Scaled(), torch.randn(2, 6)
    wrong = copy.deepcopy(model)
    wrong.head.weight.data[7] *= 1.5
    few = check_parity(model, wrong, (x,), batch_sizes=[2], draws=2)
    assert few.ok
    assert not few.outputs[0].slice.startswith("index")
    for parameter in model.head.parameters():
        parameter.data[7] = 0
    wrong = copy.deepcopy(model)
    wrong.head.bias.data[7] = 1e-3
    zeros = check_parity(model, wrong, (x,))
    assert zeros.ok
    assert zeros.outputs[0].slice != "index 7 of dim 1"


def test_slices_are_not_judged_in_torchscript():
    model, x = Scaled(nn.Sigmoid(), -torch.linspace(0, 60, 8)), torch.randn(2, 6)
    model.head = nn.Identity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, but users' modules contain it
        model.activation = torch.jit.script(nn.Sigmoid())
    candidate = Scaled(ByScale("sigmoid"), -torch.linspace(0, 60, 8))
    candidate.head = nn.Identity()
    report = check_parity(model, candidate, (x,))
    assert report.outputs[0].slice == ""
