"""What many choices take that are followed at once is what each takes that is followed alone."""

import numpy as np
import pytest
from small_profiles import random_profile
from training_models import STEPS, of_transformers, random_choice_of, with_gradients

from passes.checkpointing.choice import Choice, possible
from passes.checkpointing.many import Many, choice_of, reach_of
from passes.checkpointing.profile import profile
from passes.checkpointing.simulation import Course
from passes.checkpointing.solve import Solver

# No multiple of eight.
COUNT = 37


def random_rows(found, seed):
    """Calls to compute again, and how far each reaches: itself, near, anywhere."""
    rng, count = np.random.default_rng(seed), len(found.calls)
    again, reach = np.zeros((count, COUNT), dtype=bool), np.zeros((count, COUNT), dtype=int)
    for column in range(COUNT):
        again[:, column] = possible(found, list(rng.random(count) < rng.choice((0.3, 0.6, 1.0))))
        far = rng.integers(0, rng.choice((1, 3, 10, count)), count)
        reach[:, column] = np.minimum(np.arange(count) + far, count - 1)
    return again, reach


def assert_as_alone(found, seed):
    solver = Solver(found)
    again, reach = random_rows(found, seed)
    budget = int(0.7 * found.peak)
    many = Many(solver.simulation, solver._costs, again, reach, budget)
    for column in range(COUNT):
        rows = again[:, column].tolist(), reach[:, column].tolist()
        choice = choice_of(*rows, many.asked(column))
        course = Course(solver.simulation, choice)
        assert many.peak[column] == course.outcome.peak
        assert many.cost[column] == pytest.approx(course.outcome.cost, rel=1e-12)
        steps = course.forward + course.backward
        assert many.excess[column] == sum(max(step - budget, 0) for step in steps)
        # The way back from the regions.
        same = Many(solver.simulation, solver._costs, again[:, [column]], np.array(reach_of(choice))[:, None])
        assert (same.peak[0], same.cost[0]) == (many.peak[column], many.cost[column])
    assert len(set(many.peak)) > 2


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("count", [8, 20, 40])
def test_many_choices_take_what_each_takes_alone(count, residual):
    assert_as_alone(random_profile(count, count, residual), seed=count)


@pytest.mark.parametrize("name", ["in place", "attention", "mixed", "norms", "loss inside", "casts", "gpt2"])
def test_for_real_steps_too(name):
    step = STEPS[name]() if name in STEPS else of_transformers(name)
    assert_as_alone(profile(*with_gradients(*step)), seed=5)


def test_regions_that_are_runs_are_told_by_how_far_they_reach():
    found = random_profile(0, 20, residual=False)
    simulation = Solver(found).simulation
    for seed in range(20):
        wanted, regions = random_choice_of(found, seed)
        # Regions within are runs only where each call is in one.
        regions = tuple(region if len(region) == 1 else region[:1] for region in regions)
        choice = Choice(possible(found, wanted), regions)
        rows = np.array(choice.recomputed)[:, None], np.array(reach_of(choice))[:, None]
        many = Many(simulation, Solver(found)._costs, *rows)
        assert many.peak[0] == simulation.run(choice).peak


def test_what_overlaps_lies_in_one_another():
    # The second reaches further than the first, which is asked for by nobody but the first three.
    choice = choice_of([True] * 5, [2, 4, 2, 4, 4], [False, False, True, False, True])
    assert choice.regions == ((4, 2), (4,), (4, 2), (4,), (4,))
    # Where two don't, neither lies in the other.
    assert choice_of([True] * 4, [1, 1, 3, 3], [False, True, False, True]).regions == ((1,), (1,), (3,), (3,))
    # What is kept is in none.
    assert choice_of([True, False], [1, 1], [True, False]).regions == ((0,), ())
