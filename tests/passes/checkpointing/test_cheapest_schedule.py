"""The bound that the solver is held to is one: nothing is cheaper, and where all is tried it is what the cheapest costs."""

from operator import attrgetter

import pytest
from cheapest_schedule import least_cost
from small_profiles import cheapest_of_all, random_profile
from training_models import STEPS, random_choice_of, with_gradients

from passes.checkpointing.choice import Choice, possible
from passes.checkpointing.profile import profile
from passes.checkpointing.solve import Solver


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("seed", [0, 2, 3, 4, 5, 9])
def test_the_bound_is_what_the_cheapest_of_all_choices_costs(seed, residual):
    found = random_profile(seed, 5, residual)
    front = cheapest_of_all(found, attrgetter("cost"))
    for peak, cost, _ in front:
        assert least_cost(found, peak) == pytest.approx(cost, rel=1e-6, abs=1e-6)
        # Where a value may come and go, less may do.
        assert least_cost(found, peak, of_a_tape=False) <= cost * (1 + 1e-6)
    assert least_cost(found, front[0][0] - 1) == float("inf")
    assert least_cost(found, found.peak) == 0.0


# Those where values are written over, held by others, saved inside of calls, and drawn at random.
MODELS = ["in place", "out of place", "attention", "mixed", "norms", "loss inside", "casts"]


@pytest.mark.parametrize("name", MODELS)
def test_no_choice_is_cheaper_than_the_bound_at_its_peak(name):
    found = profile(*with_gradients(*STEPS[name]()))
    solver = Solver(found)
    bounds = []
    for seed in range(6):
        wanted, regions = random_choice_of(found, seed)
        outcome = solver.simulation.run(Choice(possible(found, wanted), regions))
        bounds.append(least_cost(found, outcome.peak))
        assert bounds[-1] <= outcome.cost * (1 + 1e-6), seed
    # The least that any call takes doesn't fit into less.
    assert least_cost(found, max(call.inner for call in found.calls) - 1) == float("inf")


def test_the_bound_is_no_empty_one():
    found = profile(*with_gradients(*STEPS["in place"]()))
    solver = Solver(found)
    budget = int(0.8 * found.peak)
    cost = solver.simulation.run(solver.solve(budget)).cost
    assert 0 < 0.98 * cost <= least_cost(found, budget) <= cost * (1 + 1e-6)
