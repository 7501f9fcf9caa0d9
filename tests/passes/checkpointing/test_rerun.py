"""`cheapest` finds the choice with the lowest total cost."""

import random
from itertools import product

import pytest
from small_profiles import made, random_profile
from training_models import STEPS, with_gradients

from passes.checkpointing.choice import overwritten
from passes.checkpointing.profile import profile
from passes.checkpointing.rerun import cheapest


def total(found, costs, price, needed, again):
    """The total cost of a choice, as the docstring of `cheapest` defines it; None if the choice isn't possible."""
    result = 0.0
    for index, call in enumerate(found.calls):
        if again[index] and (not call.repeatable or not all(again[maker] for maker in overwritten(found, index))):
            return None
        result += costs[index] if again[index] else 0.0
    for number, value in enumerate(found.values):
        if again[value.call]:
            continue
        is_wanted = number in needed or (value.savers and value.until >= 0 and value.keepable)
        is_taken = any(again[index] for index, call in enumerate(found.calls) if number in call.args)
        if is_wanted or (is_taken and value.keepable):
            result += price * value.size
    return result


def assert_cheapest(found, costs, price, needed):
    best = min(
        cost
        for again in product((False, True), repeat=len(found.calls))
        if (cost := total(found, costs, price, needed, again)) is not None
    )
    got = cheapest(found, costs, price, needed)
    assert total(found, costs, price, needed, got) == pytest.approx(best, rel=1e-9)
    return sum(got)


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_cheaper(seed):
    rng = random.Random(seed)
    found = random_profile(seed, 8, residual=seed % 2 == 0)
    if seed % 3 == 0:
        # One value is overwritten later, and one call can't be repeated.
        victim = rng.randrange(7)
        found.values[victim].keepable = False
        found.calls[rng.randrange(8)].keep("a reason")
    costs = [call.cost for call in found.calls]
    needed = frozenset(rng.sample(range(8), rng.choice((0, 1, 3))))
    counts = {assert_cheapest(found, costs, price, needed) for price in (0.0, 1.0, 10.0, 100.0, 10_000.0)}
    assert len(counts) > 1


def test_on_a_models_profile_nothing_is_cheaper():
    model, args, kwargs = with_gradients(*STEPS["norms"]())
    found = profile(model, args, kwargs)
    costs = [call.cost for call in found.calls]
    for price in (0.1, 1.0, 10.0, 100.0):
        assert_cheapest(found, costs, price, frozenset())


def test_a_free_byte_keeps_all_and_a_dear_one_nothing_that_can_be_computed():
    found = made([[], [0], [1]], [8, 8, 8], [5, 5, 5], [True] * 3, [False] * 3)
    assert cheapest(found, [5.0] * 3, 0.0, frozenset()) == (False, False, False)
    assert cheapest(found, [5.0] * 3, 100.0, frozenset()) == (True, True, True)


def test_what_is_written_over_goes_with_who_takes_it():
    found = made([[], [0], [1]], [8, 8, 8], [10_000, 1, 1], [False, True, False], [False] * 3)
    assert cheapest(found, [10_000.0, 1.0, 1.0], 100.0, frozenset()) == (False, False, False)
    assert cheapest(found, [100.0, 1.0, 1.0], 100.0, frozenset())[1]
    found.values[0].keepable = False
    # Keeping the second value costs 800, and recomputing it costs 10,001.
    assert cheapest(found, [10_000.0, 1.0, 1.0], 100.0, frozenset()) == (False, False, False)
    assert cheapest(found, [10.0, 1.0, 1.0], 100.0, frozenset())[:2] == (True, True)
