"""The sequential test of a drop: its bounds are the exact ones where these are known, and its errors as rare as stated."""

import math
from collections import Counter

import numpy as np
import pytest

from optimize_export.errors import UsageError
from optimizer.accuracy import PairedTest, Search
from optimizer.accuracy.drops import FIRST_LOOK, LOST, PATIENCE, _Spending


def answers(generator, count, lost, gained=0.0, right=0.8):
    """Scores of 0 and 1 of an original and a candidate that loses and gains these shares of all examples."""
    kind = generator.random(count)
    original = np.where(kind < lost, 1, np.where(kind < lost + gained, 0, generator.random(count) < right))
    return original, np.where(kind < lost, 0, np.where(kind < lost + gained, 1, original))


def outcome(test, original, candidate, chunk=64, weights=None):
    """The verdict on these examples, at the first look that decides or at the end."""
    for start in range(0, len(original), chunk):
        part = slice(start, start + chunk)
        test.add(original[part], candidate[part], None if weights is None else weights[part])
        if test.verdict is not None:
            return test.verdict
    return test.finish()


@pytest.mark.parametrize(("count", "lost"), [(20, 0), (600, 0), (50, 3), (3000, 5), (10000, 25)])
def test_the_bound_is_the_exact_one_of_lost_answers(count, lost):
    test = PairedTest(max(lost, 1e-6) / count, 0.05)
    test.add(np.ones(count), np.arange(count) >= lost)
    assert test.finish() is None
    chances = (math.comb(count, k) * test.upper**k * (1 - test.upper) ** (count - k) for k in range(lost + 1))
    level = sum(chances) / test._within.left
    # The approximation errs to the safe side: a bound whose level is at most 3 % too small.
    assert 0.97 < level <= 1


def test_no_change_needs_as_many_examples_as_the_rule_of_three_says():
    same = np.ones(1000)
    assert (outcome(PairedTest(0.005, 0.05), same[:590], same[:590]), outcome(PairedTest(0.005, 0.05), same, same)) == (
        None,
        "within",
    )
    test = PairedTest(0.005, 0.05)
    test.add(same[:100], same[:100])
    assert 590 < test.needed() < 660
    assert test.drop == 0


def test_a_clear_loss_is_told_after_few_examples():
    test = PairedTest(0.005, 0.05)
    assert outcome(test, *answers(np.random.default_rng(0), 10_000, 0.5)) == "outside"
    assert test.count == 64 == 2 * FIRST_LOOK


def test_a_decided_test_takes_no_more():
    test = PairedTest(0.005, 0.05)
    test.add([1.0] * 64, [0.0] * 64)
    with pytest.raises(ValueError, match="the test is decided: outside"):
        test.add([1.0], [1.0])


def test_pairs_must_fit():
    with pytest.raises(ValueError, match="same length"):
        PairedTest(0.005, 0.05).add([1.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="negative"):
        PairedTest(0.005, 0.05).add([1.0], [1.0], [-1.0])
    with pytest.raises(ValueError, match="no weights"):
        PairedTest(0.005, 0.05, len).add([1.0], [1.0], [1.0])


def test_examples_of_weight_0_do_not_count():
    test, same = PairedTest(0.005, 0.05), np.ones(64)
    test.add(same, 0 * same, 0 * same)
    assert (test.verdict, test.count, test.needed(), test.finish()) == (None, 0, None, None)
    test.add(same, same)
    assert (test.verdict, test.count, test.drop) == (None, 64, 0)


def test_the_looks_share_alpha():
    spending = _Spending(0.05)
    taken = [spending.take() for _ in range(10)]
    assert spending.left == pytest.approx(0.05 - sum(taken))
    assert spending.left == pytest.approx(0.05 * PATIENCE / (10 + PATIENCE))


@pytest.mark.parametrize("changed", [0.005, 0.02])
def test_a_drop_at_the_budget_is_rarely_within_it(changed):
    """At most 5 % of all tests; of 400, 32 or more have a chance of 0.5 %."""
    generator = np.random.default_rng(1)
    lost = (changed + 0.005) / 2
    verdicts = Counter(
        outcome(PairedTest(0.005, 0.05), *answers(generator, 6000, lost, changed - lost), chunk=500) for _ in range(400)
    )
    assert verdicts["within"] < 32


def test_half_of_the_budget_is_found_within_it():
    generator = np.random.default_rng(2)
    verdicts = Counter(
        outcome(PairedTest(0.005, 0.05), *answers(generator, 16_000, 0.00375, 0.00125), chunk=500) for _ in range(50)
    )
    assert verdicts["within"] >= 45


def test_real_scores_lose_at_most_their_range():
    generator = np.random.default_rng(3)
    original = generator.normal(0, 1, 20_000)
    better, worse = PairedTest(0.02, 0.05), PairedTest(0.02, 0.05)
    assert outcome(better, original, original - generator.normal(0.005, 0.1, 20_000)) == "within"
    assert outcome(worse, original, original - generator.normal(0.04, 0.1, 20_000)) == "outside"
    assert better.count < 20_000 > worse.count
    assert better.drop < better.upper <= 0.02


def test_equal_weights_change_nothing_and_others_cost_examples():
    original, candidate = answers(np.random.default_rng(4), 3000, 0.004)
    plain, equal, unequal = (PairedTest(0.02, 0.05) for _ in range(3))
    plain.add(original, candidate)
    equal.add(original, candidate, np.full(3000, 2.0))
    unequal.add(original, candidate, np.arange(1, 3001))
    assert equal.upper == pytest.approx(plain.upper, rel=1e-9)
    assert (plain.effective, equal.effective) == (3000, 3000)
    assert unequal.effective == pytest.approx(2250, rel=1e-2)
    assert unequal.drop == pytest.approx(np.average(original - candidate, weights=np.arange(1, 3001)))
    assert unequal.upper - unequal.drop > plain.upper - plain.drop


def precision(statistics):
    """The share of true ones among those that were answered so."""
    return sum(truth for truth, answer in statistics if answer) / sum(answer for _, answer in statistics)


def test_an_aggregate_has_a_bound():
    generator = np.random.default_rng(5)
    truth = generator.random(4000) < 0.5
    original = truth ^ (generator.random(4000) < 0.05)
    few, many = original ^ (generator.random(4000) < 0.002), original ^ (generator.random(4000) < 0.1)
    pairs = [list(zip(truth.tolist(), answer.tolist(), strict=True)) for answer in (original, few, many)]
    good, bad = PairedTest(0.02, 0.05, precision), PairedTest(0.02, 0.05, precision)
    assert outcome(good, pairs[0], pairs[1]) == "within"
    assert good.drop == precision(pairs[0][: good.count]) - precision(pairs[1][: good.count])
    assert good.drop < good.upper <= 0.02
    assert outcome(bad, pairs[0], pairs[2]) == "outside"


def test_an_aggregate_that_never_changed_still_needs_examples():
    pairs = [(True, True)] * 1000
    test = PairedTest(0.005, 0.05, precision)
    assert outcome(test, pairs, pairs) is None
    assert test.upper == pytest.approx(LOST * math.log(20) / 1000)
    assert 1190 < test.needed() < 1220


def test_an_aggregate_is_not_computed_of_a_few_statistics():
    test = PairedTest(0.005, 0.05, lambda statistics: 1 / (len(statistics) // 500))
    for _ in range(8):
        test.add([1.0] * 64, [1.0] * 64)
    assert test.verdict is None
    assert test.drop == 0


def test_equal_scores_beyond_1_can_be_lost():
    test = PairedTest(0.5, 0.05)
    test.add(np.full(40, 100.0), np.full(40, 100.0))
    assert test.finish() is None
    assert test.upper == pytest.approx(100 * (1 - 0.05 ** (1 / 40)), rel=0.3)


def test_an_aggregate_without_a_finite_value_is_refused():
    test = PairedTest(0.005, 0.05, lambda statistics: math.nan)
    test.add([1.0] * 10, [1.0] * 10)
    with pytest.raises(UsageError, match="`aggregate` returned nan for 10 statistics"):
        test.finish()


def test_the_final_tests_of_a_search_share_its_alpha():
    search = Search(0.005, 0.05)
    levels = [search.final(is_last=number == 29).alpha for number in range(30)]
    assert levels[:3] == [0.025, 0.0125, 0.00625]
    assert sum(levels) == pytest.approx(0.05)
    assert Search(0.005, 0.05).final(is_last=True).alpha == 0.05
    assert search.quick().alpha > 0.05


def test_sorted_examples_are_within_the_budget_only_at_the_end():
    test = PairedTest(0.005, 0.05, random_order=False)
    test.add(np.ones(20_000), np.ones(20_000))
    assert test.verdict is None
    # The last class is lost.
    test.add(np.ones(400), np.zeros(400))
    assert test.finish() == "outside"
    assert Search(0.005, 0.05, random_order=False).final(is_last=True).random_order is False
    sure = PairedTest(0.005, 0.05, random_order=False)
    sure.add(np.ones(2_000), np.ones(2_000))
    assert sure.finish() == "within"
