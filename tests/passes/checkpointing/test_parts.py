"""The simulation of a part alone agrees with the simulation of the whole step."""

import random

import pytest
from small_profiles import random_profile
from training_models import STEPS, with_gradients

from passes.checkpointing.choice import Choice, possible
from passes.checkpointing.parts import Cutter, last_uses
from passes.checkpointing.profile import profile
from passes.checkpointing.simulation import Course, Simulation

MODELS = ["in place", "out of place", "attention", "mixed", "norms"]


def profile_of(name):
    return profile(*with_gradients(*STEPS[name]()))


def pieces(found, seed):
    """Divide the calls of a profile into random ranges (start, end)."""
    rng, count = random.Random(seed), len(found.calls)
    ends = sorted(rng.sample(range(1, count), min(3, count - 1)))
    return list(zip([0, *ends], [*ends, count], strict=True))


def outside(found, course, start, end):
    """The bytes of values outside the part, at each of its calls and at each of its positions of the backward pass."""
    values = found.values
    before = [number for number, value in enumerate(values) if value.call < start]
    others = [number for number, value in enumerate(values) if not start <= value.call < end]
    forward = [
        sum(values[number].size for number in before if course.is_held[number] or course.python[number] >= call)
        for call in range(start, end)
    ]
    backward = {
        place: sum(values[number].size for number in others if course.is_held[number] and course.until[number] >= place)
        for place, item in enumerate(found.order)
        if start <= item.call < end + (end == len(found.calls))
    }
    return forward, backward


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_a_part_alone_takes_what_it_takes_in_the_whole(name, seed):
    found = profile_of(name)
    cutter = Cutter(found)
    for start, end in pieces(found, seed):
        part = cutter.part(start, end)
        rng = random.Random(seed)
        for share in (0.0, 0.5, 1.0):
            # Values that cross the end are kept, and calls before the part are not recomputed.
            exits = {part.profile.values[number].call for number in part.crossing}
            wanted = [index not in exits and rng.random() < share for index in range(end - start)]
            again = possible(part.profile, wanted)
            whole_again = (False,) * start + again + (False,) * (len(found.calls) - end)
            if possible(found, whole_again) != whole_again:
                continue
            regions = tuple((index // 3,) for index in range(start, end))
            whole_regions = ((),) * start + regions + ((),) * (len(found.calls) - end)
            alone = Course(Simulation(part.profile), Choice(again, regions))
            whole = Course(Simulation(found), Choice(whole_again, whole_regions))
            forward, backward = outside(found, whole, start, end)
            told = [bytes_ + more for bytes_, more in zip(alone.forward, forward, strict=True)]
            assert told == whole.forward[start:end]
            assert (alone.flops, alone.cost) == (whole.flops, whole.cost)
            for (place, more), bytes_ in zip(sorted(backward.items()), alone.backward, strict=True):
                foreign = any(not start <= found.values[number].call < end for number in found.order[place].releases)
                seen = whole.backward[place]
                assert bytes_ + more >= seen
                if not foreign and not share:
                    assert bytes_ + more == seen


@pytest.mark.parametrize("seed", range(10))
def test_the_whole_is_a_part(seed):
    found = random_profile(seed, 8, residual=True)
    part = Cutter(found).part(0, 8)
    assert part.profile.calls == found.calls
    assert part.profile.values == found.values
    assert part.profile.order == found.order
    assert part.crossing == frozenset()
    assert part.lasting == {number for number, value in enumerate(found.values) if value.until >= 0}


def test_what_goes_across_its_end_is_known():
    found = random_profile(3, 8, residual=True)
    uses = last_uses(found)
    for number, value in enumerate(found.values):
        takers = [index for index, call in enumerate(found.calls) if number in call.args]
        assert uses[number] == max([value.call, *takers, *value.savers])
    part = Cutter(found).part(2, 5)
    assert part.crossing == {number - 2 for number in (2, 3, 4) if uses[number] >= 5}
    assert part.profile.calls[0].makes == (0,)
    # Values from before the part count as always available, so they are not among the arguments.
    assert all(number >= 0 for call in part.profile.calls for number in call.args)
    assert [item.call for item in part.profile.order] == [2, 1, 0]
