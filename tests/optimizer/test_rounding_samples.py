"""Errors near the noise: more samples of rounding explain some, and excuse no others."""

import copy

import pytest
import torch
from parity_models import check_region, image, net
from tiny_models import enliven
from torch import nn

from optimizer import optimize
from optimizer.model.inputs import Samples
from optimizer.parity import (
    Reference,
    check_parity,
    judge,
    measure_reference,
)
from optimizer.parity.differences import Pool
from optimizer.parity.noise import RoundingNoise


def judged_by_few_samples(model, candidate, inputs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reference, "refine_noise", lambda self: None)
        return check_parity(model, candidate, inputs, mode="training")


class PaddedAttention(nn.Module):
    """Attention in which the rows of padded positions are fully masked: all their scores are equal."""

    def __init__(self, hidden):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.hidden = hidden

    def forward(self, x, mask):
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        if self.hidden is None:
            scores = scores + mask
        else:
            scores = scores.masked_fill(~(mask[:, :, None] & mask[:, None]), self.hidden)
        return scores.softmax(-1) @ self.value(x)


class Positions(nn.Module):
    """Adds waves of counted positions, which rounding must leave whole."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        places = torch.ones_like(x[0, :, 0]).cumsum(0)
        pairs = torch.div(torch.arange(8, dtype=torch.float32), 2, rounding_mode="floor")
        return self.linear(x + torch.sin(places[:, None] / 100 ** (pairs / 4)))


LENGTHS = torch.arange(6) < torch.tensor([[6], [4]])


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (lambda: PaddedAttention(LOWEST), (LENGTHS,)),
        (lambda: PaddedAttention(-1e9), (LENGTHS,)),
        (lambda: PaddedAttention(None), (torch.zeros(2, 6, 6).masked_fill(~LENGTHS[:, None], LOWEST),)),
        (Positions, ()),
    ],
    ids=["masked by the lowest", "masked by -1e9", "masked by an input", "positions"],
)
def test_more_samples_excuse_no_error_that_rounding_cannot_explain(make, more):
    torch.manual_seed(0)
    model = enliven(make()).eval()
    reference = measure_reference(model, Samples((torch.randn(2, 6, 8), *more)))
    before = reference.noises["output"].noise
    report = judge(reference.compare(lambda *args: model(*args) + 20 * before))
    assert report.verdict == "failed"
    assert before < 1e-4
    assert reference.noises["output"].noise < 4 * before, "more samples were taken, and say the same"


def test_more_samples_for_one_candidate_excuse_no_larger_error_of_another(monkeypatch):
    torch.manual_seed(0)
    model = enliven(nn.Linear(4, 4)).eval()
    reference = measure_reference(model, Samples((torch.randn(2, 4),)))
    (name,) = reference.noises
    before = reference.noises[name].noise
    tail = Pool()
    tail.add(torch.full((8,), 100 * before, dtype=torch.float64), of=torch.ones(8))
    monkeypatch.setattr(RoundingNoise, "more_samples", lambda *args: {name: tail})

    def verdict(times):
        def candidate(x):
            return model(x) + times * before

        return judge(reference.compare(candidate)).verdict

    assert verdict(300) == "failed"
    assert reference.noises[name].noise == before, "so large an error is none of rounding, and nothing was sampled"
    assert verdict(20) == "ok"
    assert reference.noises[name].noise > before
    assert verdict(300) == "failed"
    assert verdict(20) == "ok"


class OwnDtype(nn.Module):
    def forward(self, x):
        assert x.dtype is torch.float32
        return x


class RoundingOften(nn.Module):
    """Rounding at its inner steps changes the output several times as much as an ulp of its inputs and weights does."""

    def __init__(self):
        super().__init__()
        self.turns = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(12))
        for turn in self.turns:
            nn.init.orthogonal_(turn.weight)
        self.shift = nn.Parameter(torch.zeros(32))
        self.coarse = 0.0

    def forward(self, x):
        for turn in self.turns:
            x = turn(x)
            for _ in range(8):
                x = x * 0.7 / 0.7
        if self.coarse:
            x = x + self.coarse - self.coarse
        return x + self.shift


@pytest.mark.slow
def test_a_wrong_weight_is_no_internal_rounding(monkeypatch):
    """Internal rounding doesn't excuse an error that is as large in float64."""
    torch.manual_seed(0)
    model = RoundingOften().eval()
    inputs = Samples((torch.randn(4, 32),), {}, seed=0)
    noise = measure_reference(model, inputs).noises["output"].noise_rms
    shifted, coarse = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        shifted.shift += 8 * noise
    coarse.coarse = 128.0

    def judged(candidate):
        return judge(measure_reference(model, inputs).compare(candidate))

    with monkeypatch.context() as patch:
        patch.setattr("optimizer.parity.reference.judge_again_in_float64", lambda *_: None)
        assert judged(shifted).ok, "it would prove nothing"
    report = judged(shifted)
    assert report.verdict == "failed"
    assert "(4 times is allowed)" in report.reason
    assert any(
        "float64 has the same error, so rounding inside the model can't explain it" in note for note in report.notes
    )
    assert not check_region(model, shifted, *inputs.given.args).ok
    # A candidate that only rounds differently has as large an error, and passes.
    with monkeypatch.context() as patch:
        patch.setattr(Reference, "refine_noise", lambda self: None)
        assert not judged(coarse).ok
    assert judged(coarse).ok


@pytest.mark.slow
def test_more_samples_show_that_a_gradient_is_only_rounding():
    """If the model can't run in float64, only the noise shows that a gradient should be zero."""
    found = 0
    for seed in (22, 44, 48, 59, *range(100, 400)):
        torch.manual_seed(seed)
        layers = OwnDtype(), nn.ConvTranspose3d(4, 4, 3, stride=2), nn.BatchNorm3d(4)
        model = enliven(nn.Sequential(*layers)).train()
        inputs = (torch.randn(6, 4, 5, 5, 5, generator=torch.Generator().manual_seed(seed)),)
        candidate = optimize(model, ["fold-conv-bias"], mode="training", example_inputs=inputs)
        if not judged_by_few_samples(model, candidate, inputs).ok:
            found += 1
            report = check_parity(model, candidate, inputs, mode="training")
            assert report.ok, (seed, report)
            assert report.reference == "own dtype"
        if found == 2:
            return
    raise AssertionError("few samples were enough everywhere: nothing was tried")


@pytest.mark.parametrize("off", [2e-6, 2e-5])
def test_an_error_near_the_noise_stays_a_failure(off):
    model = net().train()
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.head.weight.mul_(1 + off)
    measured = measure_reference(model, Samples((image(4),)), mode="training")
    before = measured.noises["output"].noise
    report = judge(measured.compare(wrong))
    assert report.verdict == "failed"
    assert report.ratio < 256
    assert before < measured.noises["output"].noise < 3 * before
