"""What a plan costs against the least that any schedule costs, for steps that are small enough to solve exactly."""

import pytest
from cheapest_schedule import least_cost
from small_steps import SMALL_STEPS
from training_models import with_gradients

from passes.checkpointing.profile import profile
from passes.checkpointing.solve import Solver

BUDGETS = {
    "perceptron": (0.75, 0.6),
    "deep perceptron": (0.75, 0.5, 0.35),
    "deeper perceptron": (0.7,),
    "equal layers": (0.6, 0.5),
    "convolutions": (0.9, 0.6),
    "convolutions in place": (0.75, 0.6, 0.5),
    "many convolutions": (0.7,),
    "attention": (0.75, 0.5),
    "residual": (0.6,),
    "U-shaped": (0.75, 0.6),
}


def solver_of(name):
    model, inputs = SMALL_STEPS[name]()
    return Solver(profile(*with_gradients(model, inputs, {})))


@pytest.mark.parametrize("name", BUDGETS)
def test_a_plan_costs_at_most_2_percent_more_than_the_cheapest_schedule(name):
    found = solver_of(name).profile
    for share in BUDGETS[name]:
        budget = int(share * found.peak)
        # As in a call of the pass, nothing is known from other budgets.
        solver = Solver(found)
        outcome = solver.simulation.run(solver.solve(budget))
        assert outcome.peak <= budget, share
        least = least_cost(found, budget, gap=0.002)
        assert 0 < least * (1 - 1e-6) <= outcome.cost <= 1.02 * least, share


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "convolutions in place", "attention"])
def test_no_schedule_needs_2_percent_less_than_the_lowest(name):
    solver = solver_of(name)
    floor = solver.simulation.run(solver.lowest).peak
    assert least_cost(solver.profile, int(0.98 * floor)) == float("inf")
    assert solver.simulation.run(solver.lowest).cost <= 1.02 * least_cost(solver.profile, floor)
    # Asked for by itself, it is reached again.
    again = Solver(solver.profile)
    assert again.simulation.run(again.solve(floor)).peak <= floor
