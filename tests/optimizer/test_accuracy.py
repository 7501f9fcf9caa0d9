"""The accuracy of lossy candidates, and the budgets that judge it."""

import math

import pytest
import torch

from optimize_export.errors import UsageError
from optimizer.options import AccuracyBudget, parse_accuracy
from optimizer.parity import Accuracy, accuracy_between

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


def test_an_equal_output_has_no_error(target: torch.Tensor) -> None:
    found = accuracy(target.clone(), target)
    assert (found.cosine, found.top1, found.max_error, found.snr) == (pytest.approx(1), 1.0, 0.0, None)


def test_an_output_that_was_zero_must_stay_zero() -> None:
    zero = torch.zeros(4, 3)
    assert accuracy(zero.clone(), zero).why_not(BUDGET) is None
    assert accuracy(zero + 1e-9, zero).why_not(BUDGET) == "cosine 0.0000 is below 0.99"


def test_integers_have_a_share_of_equal_elements() -> None:
    target = torch.arange(10)
    found = accuracy(torch.where(target == 3, 4, target), target)
    assert (found.equal, found.cosine, found.top1) == (0.9, None, None)
    assert found.why_not(AccuracyBudget(top1=0.9)) is None
    assert found.why_not(AccuracyBudget(top1=0.95)) == "share of equal integers 0.9000 is below 0.95"
    assert found.why_not(AccuracyBudget(cosine=0.95)) == "share of equal integers 0.9000 is below 0.95"
    assert accuracy(target[:0], target[:0]).equal == 1.0


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (torch.zeros(2, 3), "y has the shape [2, 3] instead of [2, 4]"),
        (torch.zeros(2, 4, dtype=torch.float16), "y is float16 instead of float32"),
        (torch.tensor([[math.nan, 1, 1, 1], [1, 1, 1, 1]]), "y has NaN or infinity at other elements"),
        (torch.tensor([[math.inf, 1, 1, 1], [1, 1, 1, 1]]), "y has NaN or infinity at other elements"),
    ],
)
def test_no_budget_allows_another_shape_dtype_or_nan(value: torch.Tensor, problem: str) -> None:
    found = accuracy(value, torch.ones(2, 4))
    assert found.problem == problem
    assert found.why_not(AccuracyBudget(cosine=1e-9)) == problem


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
    assert found.why_not(BUDGET) == "2 outputs instead of 1"


def test_complex_outputs_have_a_cosine() -> None:
    target = torch.randn(8, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert accuracy(target * 1.001, target).cosine == pytest.approx(1)
    assert accuracy(target * 1j, target).cosine == pytest.approx(0, abs=1e-6)


def test_a_budget_that_nothing_can_be_compared_with_is_not_met() -> None:
    sequence = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    found = accuracy(sequence, sequence)
    assert found.why_not(AccuracyBudget(top1=0.5)) == "no output has classes, so there is no top-1 agreement"
    assert accuracy(sequence, sequence, "logits").why_not(AccuracyBudget(top1=0.5)) is None
    empty = torch.zeros(0, 4)
    assert accuracy(empty, empty).why_not(BUDGET) == "no output could be compared"


def test_both_parts_of_a_budget_must_be_met(target: torch.Tensor) -> None:
    found = Accuracy(cosine=0.995, top1=0.97)
    assert found.why_not(AccuracyBudget(0.99, 0.96)) is None
    assert found.why_not(AccuracyBudget(0.999, 0.96)) == "cosine 0.99500 is below 0.999"
    assert found.why_not(AccuracyBudget(0.99, 0.98)) == "top-1 agreement 0.9700 is below 0.98"


@pytest.mark.parametrize(
    ("cosine", "shown"), [(1.0, "1.0000"), (0.9999999, "0.99999990"), (0.99999949, "0.99999949"), (-0.5, "-0.5000")]
)
def test_a_share_is_shown_with_the_digits_that_tell_it_from_1(cosine: float, shown: str) -> None:
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
