"""The simulation of a step under a choice agrees with measurements."""

from dataclasses import replace

import pytest
from training_models import STEPS, of_transformers, random_choice_of, with_gradients

from passes.checkpointing.choice import Choice, overwritten, possible
from passes.checkpointing.fake import faked
from passes.checkpointing.profile import Call, Position, Profile, Value, measure, profile
from passes.checkpointing.simulation import Course, Simulation

SMALL = ["resnet", "vit", "bert", "gpt2", "llama", "t5"]


def random_possible(found, seed):
    wanted, regions = random_choice_of(found, seed)
    return Choice(possible(found, wanted), regions)


def assert_told(model, args, kwargs, seeds, most):
    """The simulated peak is too high by at most the share `most`; peak and FLOPs are never too low."""
    found = profile(model, args, kwargs)
    simulation = Simulation(found)
    nothing = Choice.nothing(found)
    plain = measure(model, args, kwargs, nothing.plan(found))
    assert simulation.run(nothing).peak == found.peak == plain.peak
    for seed in seeds:
        choice = random_possible(found, seed)
        told = simulation.run(choice)
        seen = measure(model, args, kwargs, choice.plan(found))
        assert seen.peak <= told.peak <= (1 + most) * seen.peak, seed
        assert seen.flops - plain.flops <= told.flops, seed


@pytest.mark.parametrize("name", STEPS)
def test_the_peak_of_any_choice_is_told_exactly(name):
    # If only some of the casts inside a call are recomputed, the simulated peak is slightly too high.
    assert_told(*with_gradients(*STEPS[name]()), range(25), most=0.02 if "casts" in name else 0)


@pytest.mark.parametrize("name", SMALL)
def test_the_peak_of_any_choice_is_told_for_models_of_transformers(name):
    assert_told(*with_gradients(*of_transformers(name)), range(6 if name == "t5" else 12), most=0.005)


@pytest.mark.parametrize("name", ["in place", "mixed", "attention"])
def test_on_fake_tensors_it_is_told_too(name):
    model, args, kwargs = STEPS[name]()
    with faked(model, args, kwargs) as (fake_args, fake_kwargs):
        assert_told(model, fake_args, fake_kwargs, range(200, 205), most=0)


@pytest.mark.parametrize("name", ["in place", "out of place", "norms", "loss inside"])
def test_what_is_computed_again_is_told_exactly_where_nothing_stops_early(name):
    model, args, kwargs = with_gradients(*STEPS[name]())
    found = profile(model, args, kwargs)
    plain = measure(model, args, kwargs, Choice.nothing(found).plan(found))
    told = set()
    for seed in range(15):
        choice = random_possible(found, seed)
        seen = measure(model, args, kwargs, choice.plan(found))
        outcome = Simulation(found).run(choice)
        assert seen.flops - plain.flops == outcome.flops
        told.add(outcome.flops)
    assert len(told) > 2


# ------------------------------------------------------------------------------------- computed by hand


def chain(sizes, flops=None):
    """The profile of a chain of calls that each save their result. The gradients have the sizes of the results."""
    count = len(sizes)
    flops = flops or [1] * count
    calls = [
        Call(
            f"call{i}", "", flops=flops[i], cost=flops[i] + 1, inner=size, alone=size, args=(i - 1,) if i else (), makes=(i,)
        )
        for i, size in enumerate(sizes)
    ]  # fmt: skip
    values = [
        Value(size, i, (0,), python=min(i + 1, count - 1), until=count - i, savers=(i,)) for i, size in enumerate(sizes)
    ]
    order = [Position(count, 0, extras=[0])]
    order += [
        Position(i, sizes[i], [i], [i], [sizes[i] + (sizes[i - 1] if i else 0), sizes[i - 1] if i else 0])
        for i in reversed(range(count))
    ]
    found = Profile(calls, values, order)
    found.peak = Simulation(found).run(Choice.nothing(found)).peak
    found.flops = sum(flops)
    return found


def test_a_chain_is_followed_step_by_step():
    course = Course(Simulation(chain([10, 20, 30])), Choice.nothing(chain([10, 20, 30])))
    assert course.forward == [10, 30, 60]
    # After the loss, each call has its turn, at the end of which its result is released.
    assert course.backward == [60, 60 + 50, 30 + 30, 10 + 10]
    assert course.is_held == [True] * 3
    assert (course.outcome.peak, course.outcome.at) == (110, 4)
    assert (course.outcome.flops, course.outcome.cost) == (0, 0)


def test_what_is_computed_again_is_gone_between_and_costs_itself():
    found = chain([10, 20, 30], flops=[1, 5, 7])
    course = Course(Simulation(found), Choice((False, True, False), ((), (0,), ())))
    # The third call holds its argument while it runs.
    assert course.forward == [10, 30, 60]
    assert course.is_held == [True, False, True]
    # In its own turn, the second call is recomputed from the result of the first.
    assert course.backward == [40, 40 + 50, 10 + 20 + 30, 20]
    assert (course.outcome.flops, course.outcome.cost) == (5, 6)


def test_regions_are_computed_at_once_and_alone_each_from_what_is_there():
    found = chain([8, 8, 8, 8], flops=[1, 10, 100, 1000])

    def flops(*regions):
        return Simulation(found).run(Choice((False, True, True, True), ((), *regions))).flops

    assert flops((0,), (0,), (0,)) == 1110
    assert flops((0,), (1,), (2,)) == 1110 + 110 + 10
    # Recomputing the last result also keeps the third, of the same region, but the second only temporarily.
    assert flops((1,), (0,), (0,)) == 1110 + 10
    # The second call's region surrounds the other two, so its result is kept when theirs are recomputed.
    assert flops((0,), (0, 1), (0, 2)) == 1110 + 100


def test_what_an_output_holds_is_computed_again_beside_it():
    found = chain([8, 8])
    held = replace(found, values=[replace(found.values[0], held=True), found.values[1]])
    choice = Choice((True, False), ((0,), ()))
    plain, twice = (Simulation(item).run(choice).peak for item in (found, held))
    assert plain == 24
    assert Course(Simulation(held), choice).backward[-1] == Course(Simulation(found), choice).backward[-1] + 8
    assert twice == 32
    # At the end, both copies are released.
    assert Course(Simulation(held), choice).live == 0


def test_statistics_to_spare_are_there_while_a_call_is_computed_again():
    found = chain([8, 64, 8])
    choice = Choice((False, True, False), ((), (0,), ()))
    before = Course(Simulation(found), choice)
    found.calls[1].spare = 1000
    after = Course(Simulation(found), choice)
    assert after.forward == before.forward
    # The kept first result, the incoming gradient, the recomputed result, and the temporary statistics.
    assert after.backward[2] == 8 + 64 + 64 + 1000


def test_what_is_written_over_is_computed_again_with_who_takes_it():
    found = chain([8, 8, 8])
    found.values[0].keepable = False
    assert overwritten(found, 1) == [0]
    assert possible(found, [False, True, False]) == (True, True, False)
    found.calls[0].keep("a reason")
    assert possible(found, [False, True, True]) == (False, False, True)
    found.values[0].keepable = True
    assert possible(found, [True, True, True]) == (False, True, True)
