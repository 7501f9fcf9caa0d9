"""Statistics of errors: their definitions, the figures of a report, and the budgets of lossy candidates."""

import math
from typing import Any

import pytest
import torch
from tiny_models import Net
from torch import nn

from optimize_export.errors import UsageError
from optimizer import check_parity
from optimizer.options import AccuracyBudget, parse_accuracy
from optimizer.parity import Accuracy, accuracy_between
from optimizer.parity.differences import cosine, has_classes, percentile_999, top1_agreement


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


KINDS = {
    "normal": lambda count: draw(count).abs(),
    "zeros": lambda count: torch.zeros(count, dtype=torch.float64),
    "one wrong": lambda count: torch.zeros(count, dtype=torch.float64).index_fill(0, torch.tensor([count // 2]), 7.0),
    "few values": lambda count: draw(count).abs().round(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 999, 1000, 12345])
def test_the_percentile_is_the_one_of_the_definition(kind: str, count: int) -> None:
    errors = KINDS[kind](count)
    by_definition = float(errors.sort().values[math.ceil(count * 999 / 1000) - 1])
    assert percentile_999(errors) == by_definition


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
@pytest.mark.parametrize("piece", [3, 1 << 20])
def test_the_cosine_is_that_of_the_angle_whatever_the_scale(
    scale: float, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimizer.parity.differences.PIECE", piece)
    a, b = draw(50), draw(50, seed=1)
    expected = float(torch.dot(a, b) / (a.norm() * b.norm()))
    assert cosine(a * scale, b) == pytest.approx(expected, rel=1e-12)
    assert cosine(a * scale, a) == pytest.approx(1.0, rel=1e-12)
    assert cosine(a, -a) == pytest.approx(-1.0, rel=1e-12)
    assert cosine((a + 1j * b) * scale, a + 1j * b) == pytest.approx(1.0, rel=1e-12)
    assert (cosine(0 * a, 0 * a), cosine(0 * a, b), cosine(b, 0 * a)) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("piece", [1, 4, 1 << 20])
def test_rows_that_tie_or_have_no_largest_score_are_left_out(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.parity.differences.PIECE", piece)
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

    def run(net: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = model(x)
        scores = seen["scores"].clone()
        scores[1:, 0] -= by
        return {"scores": scores, "map": seen["map"], "label": scores.argmax(1)}

    return Net(run)


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


# Budgets of lossy candidates ------------------------------------------------------------------------------------------

BUDGET = AccuracyBudget(cosine=0.99)


def accuracy(value: torch.Tensor, target: torch.Tensor, name: str = "y") -> Accuracy:
    return accuracy_between([name], [((value,), (target,))])


def noisy(target: torch.Tensor, share: float) -> torch.Tensor:
    noise = torch.randn(target.shape, generator=torch.Generator().manual_seed(1))
    return target + share * noise


@pytest.fixture
def target() -> torch.Tensor:
    return torch.randn(50, 20, generator=torch.Generator().manual_seed(0))


def test_the_figures_are_those_of_their_formulas(target: torch.Tensor) -> None:
    value = noisy(target, 0.1)
    found = accuracy(value, target)
    error = value.double() - target.double()
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(value.flatten(), target.flatten(), 0)), abs=1e-6)
    assert found.top1 == pytest.approx(float((value.argmax(1) == target.argmax(1)).double().mean()))
    assert found.max_error == pytest.approx(float(error.abs().max()))
    assert found.snr == pytest.approx(20 * math.log10(target.double().norm() / error.norm()))
    assert (found.equal, found.calls, found.problem) == (None, 1, None)
    assert found.why_not(BUDGET) is None


def test_the_worst_of_all_outputs_and_calls_counts(target: torch.Tensor) -> None:
    pairs = [((noisy(target, share), target), (target, target)) for share in (0.01, 0.3, 0.02)]
    found = accuracy_between(["y", "z"], pairs)
    alone = accuracy(noisy(target, 0.3), target)
    assert (found.cosine, found.top1, found.max_error, found.snr) == (
        alone.cosine,
        alone.top1,
        alone.max_error,
        alone.snr,
    )
    assert found.calls == 3
    assert "cosine" in (found.why_not(BUDGET) or "")
    found = accuracy(target.clone(), target)
    assert (found.cosine, found.top1, found.max_error, found.snr) == (pytest.approx(1), 1.0, 0.0, None)


def test_integers_have_a_share_of_equal_elements() -> None:
    target = torch.arange(10)
    found = accuracy(torch.where(target == 3, 4, target), target)
    assert (found.equal, found.cosine, found.top1) == (0.9, None, None)
    assert found.why_not(AccuracyBudget(top1=0.9)) is None
    assert found.why_not(AccuracyBudget(top1=0.95)) == "share of equal integers 0.9000 is below 0.95"
    assert found.why_not(AccuracyBudget(cosine=0.95)) == "share of equal integers 0.9000 is below 0.95"
    assert accuracy(target[:0], target[:0]).equal is None


ZERO, ONES, EMPTY = torch.zeros(4, 3), torch.ones(2, 4), torch.zeros(0, 4)
SEQUENCE = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
TOP1, LOWEST = AccuracyBudget(top1=0.5), AccuracyBudget(cosine=1e-9)
PLACES = "NaN or inf in different places than in the original (1 at batch size 2, draw 0)"


@pytest.mark.parametrize(
    ("value", "target", "name", "budget", "why"),
    [
        # An output that was zero must stay zero.
        (ZERO, ZERO, "y", BUDGET, None),
        (ZERO + 1e-9, ZERO, "y", BUDGET, "cosine 0.0000 is below 0.99"),
        # No budget allows another shape, dtype or NaN.
        (ONES[:, :3], ONES, "y", LOWEST, "the shape is (2, 3), but should be (2, 4) at batch size 2, draw 0"),
        (ONES.half(), ONES, "y", LOWEST, "the dtype is float16, but should be float32 at batch size 2, draw 0"),
        (torch.tensor([[math.nan, 1, 1, 1], [1, 1, 1, 1]]), ONES, "y", LOWEST, PLACES),
        # A budget that nothing can be compared with is not met.
        (SEQUENCE, SEQUENCE, "y", TOP1, "no output has classes, so there is no top-1 agreement"),
        (SEQUENCE, SEQUENCE, "logits", TOP1, None),
        (EMPTY, EMPTY, "y", BUDGET, "no output could be compared"),
    ],
)
def test_why_a_budget_is_not_met(value: Any, target: Any, name: str, budget: AccuracyBudget, why: str | None) -> None:
    assert accuracy(value, target, name).why_not(budget) == why


def test_a_top1_budget_alone_judges_other_float_outputs_by_their_cosine() -> None:
    logits, boxes = torch.eye(4), torch.ones(4, 2, 2)
    other = boxes.clone()
    other[:, 0] = 0.5
    found = accuracy_between(("logits", "boxes"), [((logits, other), (logits, boxes))])
    assert (found.top1, found.cosine) == (1.0, found.other_cosine)
    assert found.why_not(TOP1) is None
    assert found.why_not(AccuracyBudget(top1=0.99)) == "cosine of an output without classes 0.9486 is below 0.99"
    assert [each.name for each in found.outputs if each.is_below(AccuracyBudget(top1=0.99))] == ["boxes"]
    assert Accuracy.from_json(found.to_json()) == found
    assert found.why_not(AccuracyBudget(cosine=0.9, top1=0.99)) is None
    assert "other_cosine" not in Accuracy(cosine=1.0, top1=1.0).to_json()


def test_both_parts_of_a_budget_must_be_met() -> None:
    found = Accuracy(cosine=0.995, top1=0.97)
    assert found.why_not(AccuracyBudget(0.99, 0.96)) is None
    assert found.why_not(AccuracyBudget(0.999, 0.96)) == "cosine 0.99500 is below 0.999"
    assert found.why_not(AccuracyBudget(0.99, 0.98)) == "top-1 agreement 0.9700 is below 0.98"


@pytest.mark.parametrize(
    ("there", "here", "allowed"),
    [
        (math.nan, math.nan, True),
        (-math.inf, -math.inf, True),
        (math.inf, -math.inf, False),
        (math.nan, math.inf, False),
        (math.inf, 3e38, False),
    ],
)
def test_nan_and_infinity_must_be_at_the_same_elements(there: float, here: float, allowed: bool) -> None:
    target, value = torch.tensor([[1.0, 2.0, there]]), torch.tensor([[1.0, 2.001, here]])
    assert (accuracy(value, target).why_not(BUDGET) is None) == allowed


def test_another_number_of_outputs_is_a_problem(target: torch.Tensor) -> None:
    found = accuracy_between(["y"], [((target, target), (target,))])
    assert found.why_not(BUDGET) == "The candidate returns 2 tensors, and the original 1"


def test_complex_outputs_have_a_cosine() -> None:
    target = torch.randn(8, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert accuracy(target * 1.001, target).cosine == pytest.approx(1)
    assert accuracy(target * 1j, target).cosine == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("cosine", "shown"), [(1.0, "1.0000"), (0.9999999, "0.99999990"), (0.99999949, "0.99999949"), (-0.5, "-0.5000")]
)
def test_a_share_is_shown_with_enough_digits(cosine: float, shown: str) -> None:
    assert str(Accuracy(cosine=cosine)) == f"cosine {shown}"


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ("exact", AccuracyBudget()),
        (0.999, AccuracyBudget(cosine=0.999)),
        ("0.999", AccuracyBudget(cosine=0.999)),
        ("cosine=0.9", AccuracyBudget(cosine=0.9)),
        ("top1=0.99", AccuracyBudget(top1=0.99)),
        ("0.999, top1=0.99", AccuracyBudget(0.999, 0.99)),
    ],
)
def test_a_budget_is_parsed(given: object, budget: AccuracyBudget) -> None:
    assert parse_accuracy(given) == budget
    assert budget.is_exact == (given == "exact")


@pytest.mark.parametrize(
    "given", [0, 1, 2, -1, "0", "1", "2", "-1", "abc", "top1=2", "nan", math.nan, "top5=0.9", "", "top1=", None, True]
)
def test_anything_else_is_no_budget(given: object) -> None:
    with pytest.raises(UsageError, match=r"isn't a budget: use exact, a cosine above 0 and below 1 such as 0.999"):
        parse_accuracy(given)


def test_a_budget_has_one_value_of_each_kind() -> None:
    with pytest.raises(UsageError, match="has two values for cosine"):
        parse_accuracy("0.9,cosine=0.99")
