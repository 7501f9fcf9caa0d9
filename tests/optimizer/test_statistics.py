"""The statistics in a report equal their definitions, in small and in hard cases."""

import json
import math

import pytest
import torch
from torch import nn

from optimizer import check_parity
from optimizer.model.inputs import Samples
from optimizer.parity import Measurement, ParityReport, judge, measure_reference
from optimizer.parity.accuracy import cosine, has_classes, percentile_999, top1_agreement


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def resonant(count: int) -> torch.Tensor:
    """Numbers that are zero wherever the first sample is taken."""
    values = draw(count).abs()
    values[:: -(-count // 64)] = 0
    return values


KINDS = {
    "normal": lambda count: draw(count).abs(),
    "zeros": lambda count: torch.zeros(count, dtype=torch.float64),
    "one wrong": lambda count: torch.zeros(count, dtype=torch.float64).index_fill(0, torch.tensor([count // 2]), 7.0),
    "few values": lambda count: draw(count).abs().round(),
    "sorted": lambda count: draw(count).abs().sort().values,
    "falling": lambda count: draw(count).abs().sort(descending=True).values,
    "resonant": resonant,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 999, 1000, 1001, 2000, 12345])
def test_the_percentile_is_the_one_of_the_definition(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.parity.accuracy._SAMPLE", 64)
    errors = KINDS[kind](count)
    by_definition = float(errors.sort().values[math.ceil(count * 999 / 1000) - 1])
    assert percentile_999(errors) == by_definition


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
@pytest.mark.parametrize("piece", [3, 1 << 20])
def test_the_cosine_is_that_of_the_angle_whatever_the_scale(
    scale: float, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimizer.parity.accuracy.PIECE", piece)
    a, b = draw(50), draw(50, seed=1)
    expected = float(torch.dot(a, b) / (a.norm() * b.norm()))
    assert cosine(a * scale, b) == pytest.approx(expected, rel=1e-12)
    assert cosine(a * scale, a) == pytest.approx(1.0, rel=1e-12)
    assert cosine(a, -a) == pytest.approx(-1.0, rel=1e-12)
    assert cosine((a + 1j * b) * scale, a + 1j * b) == pytest.approx(1.0, rel=1e-12)


def test_the_cosine_of_zeros_is_one_only_beside_zeros() -> None:
    zero, some = torch.zeros(4), torch.ones(4)
    assert (cosine(zero, zero), cosine(zero, some), cosine(some, zero)) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("piece", [1, 4, 1 << 20])
def test_rows_that_tie_or_have_no_largest_score_are_left_out(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.parity.accuracy.PIECE", piece)
    inf = math.inf
    reference = torch.tensor(
        [[3.0, 1, 2], [3, 1, 2], [1, 1 + 1e-3, 0], [math.nan, 0, 1], [inf, inf, 0], [-inf, 5, -inf], [1, 2, 3]]
    )
    candidate = reference.clone()
    candidate[1] = torch.tensor([1.0, 2, 3])
    candidate[6, 0] = math.nan
    # Rows 2 (a tie), 3 and 4 are left out. Of the four others, rows 1 and 6 disagree.
    assert top1_agreement(candidate, reference, noise=1e-3) == (0.5, 3)
    assert top1_agreement(candidate, reference, noise=1e-4) == (3 / 5, 2)
    # An infinite distance exceeds any noise, so only the masked row is decided.
    assert top1_agreement(candidate, reference, noise=10.0) == (1.0, 6)
    assert top1_agreement(candidate[:3], reference[:3], noise=10.0) == (None, 3)
    assert top1_agreement(candidate[:0], reference[:0], noise=0.0) == (None, 0)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "expected"),
    [
        ("output", (3, 4), torch.float32, True),
        ("output", (3, 1), torch.float32, False),
        ("output", (3, 4), torch.int64, False),
        ("output", (3, 4), torch.complex64, False),
        ("output", (4,), torch.float32, False),
        ("hidden", (3, 2, 4), torch.float32, False),
        ("logits", (3, 2, 4), torch.bfloat16, True),
        ("heads.start_logits", (3, 2, 4), torch.float32, True),
        ("logits.other", (3, 2, 4), torch.float32, False),
        ("logits", (3, 2, 4, 4), torch.float32, False),
    ],
)
def test_which_outputs_have_classes(name: str, shape: tuple[int, ...], dtype: torch.dtype, expected: bool) -> None:
    assert has_classes(name, torch.zeros(shape, dtype=dtype)) is expected


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layer(x)
        return {"scores": scores, "map": scores[:, :, None, None], "label": scores.argmax(1)}


def shifted(model: nn.Module, by: float) -> nn.Module:
    """Subtract `by` from the score of class 0, the most frequent winner, in every row except the first."""

    class Shifted(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            seen = model(x)
            scores = seen["scores"].clone()
            scores[1:, 0] -= by
            return {"scores": scores, "map": seen["map"], "label": scores.argmax(1)}

    return Shifted()


def test_every_call_has_its_figures_and_the_report_the_worst() -> None:
    model = Heads().eval()
    x = draw(4, 6).float()
    report = check_parity(model, shifted(model, 100.0), (x,), batch_sizes=(1, 4), atol=1000.0)
    scores, maps, label = report.outputs
    assert [(call.batch_size, call.draw) for call in scores.calls] == [(1, 0), (1, 1), (4, 0), (4, 1)]
    one, _, many, _ = scores.calls
    assert one.max_error < 1e-5
    assert one.agreement == 1.0
    # Three of 20 scores (4 rows, 5 columns) are off by 100.
    assert many.max_error == many.p999_error == pytest.approx(100.0)
    assert many.mean_error == pytest.approx(100 * 3 / 20, rel=1e-5)
    with torch.no_grad():
        right, wrong = model(x)["scores"], shifted(model, 100.0)(x)["scores"]
    assert many.cosine == pytest.approx(float(torch.cosine_similarity(right.flatten(), wrong.flatten(), 0)), abs=1e-6)
    assert many.agreement == float((right.argmax(1) == wrong.argmax(1)).double().mean())
    assert scores.cosine == min(call.cosine for call in scores.calls)
    assert scores.mean_error == max(call.mean_error for call in scores.calls)
    assert scores.agreement == min(call.agreement for call in scores.calls) < 1
    assert (maps.agreement, maps.undecided) == (None, 0)
    assert maps.cosine == pytest.approx(1.0)
    assert (label.cosine, label.mean_error) == (None, None)
    assert label.agreement == scores.agreement
    assert "label" in report.reason


def test_figures_leave_out_what_is_not_finite_on_both_sides() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 1, torch.nan, x)

    def other(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, torch.nan, x)

    (output,) = check_parity(model, other, (draw(8, 3, 3).float(),), batch_sizes=(8,)).outputs
    assert output.problem is not None
    assert output.calls[0].max_error == output.calls[0].mean_error == 0.0
    (output,) = check_parity(model, lambda x: x * math.nan, (draw(8, 3, 3).float(),), batch_sizes=(8,)).outputs
    assert [call.max_error for call in output.calls] == [None, None]
    assert output.cosine is None


def test_figures_are_plain_data_both_ways_and_older_data_has_none() -> None:
    model = Heads().eval()
    measurement = measure_reference(model, Samples((draw(4, 6).float(),))).compare(model)
    data = json.loads(json.dumps(measurement.to_json(), allow_nan=False))
    assert Measurement.from_json(data) == measurement
    report = judge(measurement)
    told = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert ParityReport.from_json(told) == report
    assert len(told["outputs"][0]["calls"]) == 6
    for output in (*data["outputs"], *told["outputs"]):
        for name in ("calls", "mean_error", "p999_error", "cosine", "agreement", "undecided"):
            output.pop(name, None)
    assert judge(Measurement.from_json(data)).outputs[0].calls == ()
    assert ParityReport.from_json(told).outputs[0].cosine is None


def test_figures_decide_nothing() -> None:
    """One wrong element among many doesn't show in the percentile or the cosine, but the verdict fails."""
    x = draw(2000, 8).float()

    def wrong(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[0, 0] += 1e-2
        return y

    report = check_parity(torch.clone, wrong, (x,), batch_sizes=(2000,))
    assert report.verdict == "failed"
    assert report.outputs[0].p999_error == 0.0
    assert report.outputs[0].cosine == pytest.approx(1.0, abs=1e-6)
