"""Profiles of small steps, made by hand."""

import random

from passes.checkpointing.choice import Choice
from passes.checkpointing.profile import Call, Position, Profile, Value
from passes.checkpointing.simulation import Simulation


def made(sources, sizes, flops, saves_result, saves_arguments, name="call"):
    """A step with one value per call: `sources[i]` are the calls whose values call i takes.

    In the backward pass, each call needs the values that it saved, makes the gradients of its arguments, and releases
    its own gradient.
    """
    count = len(sources)
    takers = [[i for i in range(count) if j in sources[i]] for j in range(count)]
    values, savers = [], [[] for _ in range(count)]
    for i in range(count):
        if saves_result[i]:
            savers[i].append(i)
        for j in sources[i] if saves_arguments[i] else ():
            savers[j].append(i)
    places = {count - 1 - place: place + 1 for place in range(count)}
    for i in range(count):
        last = max(takers[i], default=count - 1)
        until = max((places[saver] for saver in savers[i]), default=-1)
        values.append(Value(sizes[i], i, (0,), last, until, False, tuple(sorted(savers[i]))))
    calls = [
        Call(f"{name}{i}", "", flops[i], flops[i] + 1, sizes[i], sizes[i], 0, tuple(sources[i]), (i,))
        for i in range(count)
    ]
    # The gradient of each value exists from the turn of its last taker to its own turn.
    order = [Position(count, extras=[sizes[-1]])]
    for turn in reversed(range(count)):
        waiting = [j for j in range(turn + 1) if j == count - 1 or any(taker > turn for taker in takers[j])]
        incoming = sum(sizes[j] for j in waiting)
        new = sum(sizes[j] for j in sources[turn] if j not in waiting)
        needs = [i for i in range(count) if turn in values[i].savers]
        releases = [i for i in needs if values[i].until == places[turn]]
        order.append(
            Position(turn, incoming, needs, releases, [incoming + new] + [incoming + new - sizes[turn]] * len(releases))
        )
    found = Profile(calls, values, order)
    found.peak = Simulation(found).run(Choice.nothing(found)).peak
    found.flops = sum(flops)
    return found


def random_profile(seed, count, residual):
    """A chain of cheap and expensive calls; with `residual`, some calls take values from further back, too."""
    rng = random.Random(seed)
    sources = [[] if i == 0 else [i - 1] for i in range(count)]
    if residual:
        for i in range(2, count):
            if rng.random() < 0.4:
                sources[i].insert(0, rng.randrange(i - 1))
    sizes = [rng.choice((1, 2, 4, 4, 8)) * 64 for _ in range(count)]
    flops = [rng.choice((100, 1_000, 10_000, 40_000)) for _ in range(count)]
    saves_result = [rng.random() < 0.6 for _ in range(count)]
    saves_arguments = [rng.random() < 0.6 for _ in range(count)]
    return made(sources, sizes, flops, saves_result, saves_arguments)
