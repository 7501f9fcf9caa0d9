"""Find the cheapest choice of calls to recompute within a budget of bytes.

The forward is cut into parts, at places that few bytes cross. From left to right, each range of parts between two cuts
gets one of several options. A label records how many bytes a prefix of the forward keeps, and its cost. A label is
dropped if another one keeps no more and costs no more. While a part runs, forward and backward, the values that the
prefix keeps are alive, and nothing of the later parts is. So a part fits if its own peak and the bytes kept before it
stay within the budget. (Herrmann et al., "Optimal checkpointing for heterogeneous chains", 2019, solve a chain of
blocks in the same way. There a block is recomputed as a whole or not at all.)

An option keeps the values that are worth their bytes at one price. When the backward pass reaches the range, it
recomputes for good the values that are worth their bytes at a lower price. The rest is recomputed in its own turn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from passes.checkpointing.choice import Choice, Region, possible
from passes.checkpointing.cost import FLOPS_PER_BYTE
from passes.checkpointing.equal_parts import EqualParts
from passes.checkpointing.parts import Cutter, Part
from passes.checkpointing.profile import Profile
from passes.checkpointing.rerun import cheapest
from passes.checkpointing.simulation import Course, Simulation

# The prices of a byte, in FLOPs: from that of the cheapest call to that of the most expensive matmul.
_PRICES = tuple(FLOPS_PER_BYTE * 2.0**power for power in range(-1, 14))
_MOST_CUTS = 48
# At most `_MANY * _MOST_CUTS` cuts are used, for example in a long row of equal blocks.
_MANY = 4
# All ranges of at most this many parts are tried.
_LONGEST = 6
# Longer ranges begin at one of these numbers of major cuts further back. Following a range of every length would take
# most of the planning time.
_FURTHER = (1, 2, 3, 4, 5, 6, 8, 11, 15, 21, 30, 42)
# The maximum number of prices that are tried for a longer range.
_COARSE = 4
_LABELS = 2000
_TRIES = 8
_CLOSE = 0.002
# The shares of the lowest peak found that are tried afterwards.
_BELOW = (0.995, 0.99, 0.98, 0.96, 0.93)
# The maximum number of calls to simulate while single calls are dropped from a choice.
_MOVES = 100_000


class Option(NamedTuple):
    """One way to run a range of parts.

    Attributes:
        kept: the bytes that stay for the backward pass.
        inner: the maximum number of bytes alive while the range runs, forward or backward.
        cost: the cost of the recomputation.
        choice: the choice for the calls of the range, numbered from 0.
    """

    kept: int
    inner: int
    cost: float
    choice: Choice


@dataclass
class Solver:
    """Finds choices for one step under any budget; a part is recomputed whole or not at all unless `selective`."""

    profile: Profile
    selective: bool = True
    _options: dict[Hashable, list[Option]] = field(default_factory=dict)
    _levels: dict[Hashable, list[tuple[bool, ...]]] = field(default_factory=dict)

    @cached_property
    def simulation(self) -> Simulation:
        return Simulation(self.profile)

    @cached_property
    def cutter(self) -> Cutter:
        return Cutter(self.profile)

    @cached_property
    def _equal_parts(self) -> EqualParts:
        return EqualParts(self.profile, self.cuts, self.cutter.turns)

    @cached_property
    def cuts(self) -> list[int]:
        """The places where the forward is cut: 0, places in between, and its end."""
        return [cut for cut, _ in self._cuts]

    @cached_property
    def _cuts(self) -> list[tuple[int, bool]]:
        return cuts_of(self.profile, self.cutter.last_use)

    @cached_property
    def _major(self) -> list[int]:
        """The indices of the major cuts."""
        return [number for number, (_, stands_out) in enumerate(self._cuts) if stands_out]

    @cached_property
    def _costs(self) -> list[float]:
        """The cost of each call."""
        return [call.cost for call in self.profile.calls]

    @cached_property
    def _eager_peak(self) -> int:
        return self.simulation.run(Choice.nothing(self.profile)).peak

    def solve(self, budget: int) -> Choice | None:
        """Return the cheapest choice found whose peak is within the budget, in bytes; None if none is found."""
        if self._eager_peak <= budget:
            return Choice.nothing(self.profile)
        found = self.joined(budget)
        if found is not None:
            return found
        # The choice with the lowest peak may fit, even if nothing was found for this budget.
        return self.lowest if self.simulation.run(self.lowest).peak <= budget else None

    def joined(self, budget: int) -> Choice | None:
        """Return the cheapest choice that can be assembled from options for parts; None if none is found."""
        target = float(budget)
        for _ in range(_TRIES):
            found = self._shortest(target)
            if found is None:
                break
            peak = self.simulation.run(found).peak
            if peak <= budget:
                return self._thinned(found, budget)
            # The whole step may take a little more memory than its parts.
            target -= max(peak - budget, 0.002 * budget)
        return None

    @cached_property
    def lowest(self) -> Choice:
        """The choice with the lowest peak that is found."""
        best = Choice.nothing(self.profile)
        low, high = 0, self._eager_peak
        while high - low > high * _CLOSE:
            middle = (low + high) // 2
            found = self.joined(middle)
            if found is None:
                low = middle
            else:
                best, high = found, min(middle, self.simulation.run(found).peak)
        # The search isn't complete: it may find a choice for a lower budget than one for which it finds none.
        for share in _BELOW:
            if (found := self.joined(int(share * high))) is not None:
                best, high = found, self.simulation.run(found).peak
        return best

    def uniform(self, count: int) -> Choice:
        """Divide the forward into `count` ranges of about the same cost, and recompute each from its inputs."""
        costs = np.cumsum(self._costs)
        ends = [self.cuts[0]]
        for number in range(1, count):
            wanted = costs[-1] * number / count
            ends.append(min(self.cuts, key=lambda cut: abs((costs[cut - 1] if cut else 0) - wanted)))
        ends.append(self.cuts[-1])
        last_use, values = self.cutter.last_use, self.profile.values
        exits = {
            value.call for value, last in zip(values, last_use, strict=True) for end in ends if value.call < end <= last
        }
        wanted = [index not in exits for index in range(len(self.profile.calls))]
        regions = tuple((bisect_right(ends, index),) for index in range(len(self.profile.calls)))
        return Choice(possible(self.profile, wanted), regions)

    def solve_uniform(self, budget: int) -> Choice | None:
        """The cheapest of the uniform choices whose peak is within the budget; None if there is none."""
        fitting = [
            (outcome.cost, number, choice)
            for number, choice in enumerate(self._uniform_choices())
            if (outcome := self.simulation.run(choice)).peak <= budget
        ]
        return min(fitting)[-1] if fitting else None

    def lowest_uniform(self) -> Choice:
        """The uniform choice with the lowest peak."""
        return min(self._uniform_choices(), key=lambda choice: self.simulation.run(choice).peak)

    def _uniform_choices(self) -> Iterator[Choice]:
        """Yield the choice that recomputes nothing, and the uniform ones with one range, two ranges, and so on."""
        # Recomputation may take more memory: a range may hold an argument that is larger than everything it saves.
        yield Choice.nothing(self.profile)
        yield from (self.uniform(count) for count in range(1, len(self.cuts)))

    def _thinned(self, choice: Choice, budget: int) -> Choice:
        """Drop from a choice the calls that needn't be recomputed, the most expensive first."""
        best, outcome = choice, self.simulation.run(choice)
        again = [index for index, is_again in enumerate(choice.recomputed) if is_again]
        for index in sorted(again, key=self._costs.__getitem__, reverse=True)[: _MOVES // len(self._costs)]:
            wanted = list(best.recomputed)
            wanted[index] = False
            tried = Choice(possible(self.profile, wanted), best.regions)
            seen = self.simulation.run(tried)
            if seen.peak <= budget and seen.cost < outcome.cost:
                best, outcome = tried, seen
        return best

    # ---------------------------------------------------------------------------------- the labels

    def _shortest(self, budget: float) -> Choice | None:
        held = self._held_behind()
        labels = [_Labels(budget) for _ in self.cuts]
        labels[0].start()
        for end in range(1, len(self.cuts)):
            for start in self._starts(end):
                if labels[start].count:
                    for option in self.options(start, end):
                        labels[end].offer(labels[start], start, option, budget - held[end])
            labels[end].settle()
        return self._assembled(labels) if labels[-1].count else None

    def _starts(self, end: int) -> Iterator[int]:
        """The cuts at which a range that ends at this one may begin."""
        near = max(0, end - _LONGEST)
        if end in self._major:
            far = [start for start in self._major if start < near][::-1]
            yield from (far[count - 1] for count in _FURTHER if count <= len(far))
        yield from range(near, end)

    def _held_behind(self) -> list[int]:
        """For each cut, the bytes that are made after it and stay until the end of the step."""
        never = len(self.profile.order)
        return [
            sum(value.size for value in self.profile.values if value.call >= cut and value.until == never)
            for cut in self.cuts
        ]

    def _assembled(self, labels: list[_Labels]) -> Choice:
        count = len(self.profile.calls)
        recomputed = [False] * count
        regions: list[Region] = [()] * count
        end, place = len(self.cuts) - 1, int(np.argmin(labels[-1].cost))
        while end:
            start, place, option = labels[end].step(place)
            first = self.cuts[start]
            for index, (again, region) in enumerate(zip(option.choice.recomputed, option.choice.regions, strict=True)):
                recomputed[first + index] = again
                regions[first + index] = (start, *region)
            end = start
        return Choice(possible(self.profile, recomputed), tuple(regions))

    # --------------------------------------------------------------------------------- the options

    def options(self, start: int, end: int) -> list[Option]:
        """The options for the parts between two cuts."""
        key = self._equal_parts.key(start, end)
        if key not in self._options:
            self._options[key] = self._made(start, end)
        return self._options[key]

    def _made(self, start: int, end: int) -> list[Option]:
        part = self.cutter.part(self.cuts[start], self.cuts[end])
        simulation = Simulation(part.profile)
        levels = self._levels_of(start, end)
        is_long = end - start > _LONGEST
        inside = [number for number in self._major if start < number < end] if is_long else range(start + 1, end)
        boundaries = _boundaries(part, [self.cuts[number] - part.start for number in inside])
        exits = {part.profile.values[value].call for value in part.crossing}
        if is_long:
            # Try fewer prices for a long range.
            levels = levels[::-1][:: -(-len(levels) // _COARSE)][::-1]
        found: dict[tuple[tuple[bool, ...], tuple[Region, ...]], Option] = {}
        for number, first in enumerate(levels):
            again = possible(part.profile, [want and call not in exits for call, want in enumerate(first)])
            # If everything that crosses a cut is kept, the parts on both sides can be separate ranges.
            if any(all(is_saved and not again[call] for call, is_saved in crossing) for crossing in boundaries):
                continue
            choices = []
            for second, stride in [*((level, 1) for level in levels[: number + 1]), (first, 2), (first, 3), (first, 5)]:
                # The values that cross a cut are recomputed for good; or only those across every second cut, and so on.
                good = {call for crossing in boundaries[stride - 1 :: stride] for call, _ in crossing}
                later = [a and b and call not in good for call, (a, b) in enumerate(zip(again, second, strict=True))]
                choices.append(Choice(again, _regions(part.profile, again, later)))
            if end - start == 1:
                # Each call is recomputed in its own turn, from the kept values.
                choices.append(Choice(again, tuple((call,) for call in range(len(again)))))
            for choice in choices:
                if (choice.recomputed, choice.regions) not in found:
                    found[choice.recomputed, choice.regions] = self._option(part, simulation, choice)
        return _undominated(list(found.values()))

    def _option(self, part: Part, simulation: Simulation, choice: Choice) -> Option:
        course = Course(simulation, choice)
        outcome, values = course.outcome, part.profile.values
        # The values that cross the end are kept for the later parts.
        staying = {number for number in part.crossing | part.lasting if _is_kept(part.profile, choice, number)}
        kept = sum(values[number].size for number, held in enumerate(course.is_held) if held or number in staying)
        return Option(kept, outcome.peak, outcome.cost, choice)

    def _levels_of(self, start: int, end: int) -> list[tuple[bool, ...]]:
        """The calls that are recomputed at each price, from none to all that can be."""
        each = [self._levels_at(number) for number in range(start, end)]
        rows = [tuple(again for part in row for again in part) for row in zip(*each, strict=True)]
        return list(dict.fromkeys(rows))

    def _levels_at(self, number: int) -> list[tuple[bool, ...]]:
        key = self._equal_parts.key(number, number + 1)
        if key not in self._levels:
            part = self.cutter.part(self.cuts[number], self.cuts[number + 1])
            calls = part.profile.calls
            everything = possible(part.profile, [True] * len(calls))
            nothing = (False,) * len(calls)
            between = self._priced(part) if self.selective else [everything] * len(_PRICES)
            self._levels[key] = [nothing, *between, everything]
        return self._levels[key]

    def _priced(self, part: Part) -> Iterator[tuple[bool, ...]]:
        costs = [call.cost for call in part.profile.calls]
        for price in _PRICES:
            yield cheapest(part.profile, costs, price, part.crossing)


class _Labels:
    """The prefixes up to one cut: the bytes that each keeps, its cost, and how it was made.

    The budget is divided into `_LABELS` steps. Of the prefixes that keep bytes within the same step, the cheapest
    stays.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._kept = np.zeros(_LABELS + 1)
        self._cost = np.full(_LABELS + 1, np.inf)
        # The index of the option of each label, and the place of the label before it.
        self._option = np.zeros(_LABELS + 1, dtype=np.int64)
        self._before = np.zeros(_LABELS + 1, dtype=np.int64)
        self._options: list[tuple[int, Option]] = []
        self.kept = self.cost = np.zeros(0)

    @property
    def count(self) -> int:
        return len(self.kept)

    def start(self) -> None:
        """Add the empty prefix."""
        self._cost[0] = 0.0
        self.settle()

    def offer(self, before: _Labels, start: int, option: Option, budget: float) -> None:
        """Extend the labels at an earlier cut by an option, where it fits."""
        # The labels are sorted by the bytes that they keep.
        count = int(np.searchsorted(before.kept, budget - option.inner, side="right"))
        kept = before.kept[:count] + option.kept
        cost = before.cost[:count] + option.cost
        step = (kept * (_LABELS / self._budget)).astype(np.int64)
        better = (step <= _LABELS) & (cost < self._cost[np.minimum(step, _LABELS)])
        places = np.flatnonzero(better)
        if not len(places):
            return
        step = step[places]
        # If two labels fall into one step, the cheaper one is written last.
        order = np.argsort(-cost[places], kind="stable")
        places, step = places[order], step[order]
        self._kept[step], self._cost[step] = kept[places], cost[places]
        self._option[step], self._before[step] = len(self._options), places
        self._options.append((start, option))

    def settle(self) -> None:
        """Drop the labels that keep more than another one and cost no less."""
        least = np.minimum.accumulate(self._cost)
        is_better = np.isfinite(self._cost)
        is_better[1:] &= least[1:] < least[:-1]
        self._places = np.flatnonzero(is_better)
        self.kept, self.cost = self._kept[self._places], self._cost[self._places]

    def step(self, place: int) -> tuple[int, int, Option]:
        """Return how a label was made: the cut and the place of the label before it, and the option."""
        at = self._places[place]
        start, option = self._options[self._option[at]]
        return start, int(self._before[at]), option


def _is_kept(profile: Profile, choice: Choice, number: int) -> bool:
    value = profile.values[number]
    return value.keepable and not (choice.recomputed[value.call] and value.numbers)


def _undominated(options: list[Option]) -> list[Option]:
    options = sorted(options, key=lambda option: (option.cost, option.kept, option.inner))
    found: list[Option] = []
    for option in options:
        if not any(other.kept <= option.kept and other.inner <= option.inner for other in found):
            found.append(option)
    return found


def _boundaries(part: Part, cuts: Sequence[int]) -> list[set[tuple[int, bool]]]:
    """For each cut, the calls whose values cross it, each with whether the value is saved for the backward pass."""
    uses = Cutter(part.profile).last_use
    ends = [
        (value.call, last, number in part.lasting)
        for number, (value, last) in enumerate(zip(part.profile.values, uses, strict=True))
    ]
    return [{(call, is_saved) for call, last, is_saved in ends if call < cut <= last} for cut in cuts]


def _regions(profile: Profile, again: Sequence[bool], later: Sequence[bool]) -> tuple[Region, ...]:
    """One region for the calls that are recomputed at once, and in it one for each group of connected later calls."""
    groups = list(range(len(again)))

    def group(index: int) -> int:
        while groups[index] != index:
            index = groups[index]
        return index

    for index, call in enumerate(profile.calls):
        for value in call.args:
            maker = profile.values[value].call
            if later[index] and later[maker]:
                groups[group(index)] = group(maker)
    return tuple((group(index),) if later[index] else () for index in range(len(again)))


def cuts_of(profile: Profile, last_use: Sequence[int]) -> list[tuple[int, bool]]:
    """Find the cuts of a forward: places that no more bytes cross than their neighbours.

    A value that is overwritten later crosses no cut.

    Returns:
        The cuts in order, each with whether it is a major one.
    """
    count = len(profile.calls)
    across = np.zeros(count + 1)
    closed = np.zeros(count + 1, dtype=int)
    for value, last in zip(profile.values, last_use, strict=True):
        # A cut is the place before the call of the same number.
        across[value.call + 1] += value.size
        across[last + 1 if last < count else count] -= value.size
        if not value.keepable:
            closed[value.call + 1] += 1
            closed[min(last + 1, count)] -= 1
    across, closed = np.cumsum(across), np.cumsum(closed)
    # Of the places that the same values cross, take the last one.
    comes = {value.call for value, last in zip(profile.values, last_use, strict=True) if last > value.call}
    goes = {last for value, last in zip(profile.values, last_use, strict=True) if last > value.call}
    places = [0, *(cut for cut in range(1, count) if cut in comes or cut in goes), count]
    lows = [
        cut
        for before, cut, behind in zip(places, places[1:], places[2:], strict=False)
        if not closed[cut] and across[before] >= across[cut] <= across[behind]
    ]
    # Of the lows without a climb between them, the last one represents all.
    apart = [cut for cut, behind in pairwise([*lows, count]) if across[cut : behind + 1].max() > across[cut]]
    heights = dict(zip(apart, _prominences(apart, across), strict=True))
    # Take all lows of equal height or none, so that equal blocks are cut alike.
    least = sorted(heights.values())[-_MOST_CUTS:][0] if apart else 0
    found = [(cut, len(lows) <= _MOST_CUTS or heights.get(cut, -1) >= least) for cut in lows]
    if len(lows) > _MANY * _MOST_CUTS:
        found = [(cut, stands_out) for cut, stands_out in found if stands_out] or [(cut, True) for cut in lows]
        found = found[:: -(-len(found) // (_MANY * _MOST_CUTS))]
    return [(0, True), *found, (count, True)]


def _prominences(lows: Sequence[int], across: np.ndarray) -> list[float]:
    """The prominence of each low: the smallest climb to another place at least as low, or to an end."""
    climbs = [float(across[a : b + 1].max()) for a, b in pairwise([0, *lows, len(across) - 1])]
    found = []
    for number, low in enumerate(lows):
        ways = []
        for lows_there, climbs_there in (
            (lows[number + 1 :], climbs[number + 1 :]),
            (lows[:number][::-1], climbs[: number + 1][::-1]),
        ):
            height = 0.0
            for other, climb in zip_longest(lows_there, climbs_there):
                height = max(height, climb)
                if other is not None and across[other] <= across[low]:
                    break
            ways.append(height)
        found.append(min(ways) - float(across[low]))
    return found
