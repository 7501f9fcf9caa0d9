"""A thorough search for the choices of a step of few calls.

A choice is written as three rows over the calls that can be computed again: which of them are, where a new region begins
(a new one, or a new one within the last), and which calls belong to the region within. From several begins, one entry of the
rows is changed after the other, and with very few calls two at once, as long as that helps: first towards the budget, then
in cost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations

from passes.checkpointing.choice import Choice, Region, possible
from passes.checkpointing.simulation import Outcome, Simulation

# The search is for steps of so many calls that can be computed again, at the most.
FEW = 40
# For so many, two entries are changed at once.
_VERY_FEW = 9
_BEGINS = 12
# So many calls are followed, at most, for one budget.
_MOVES = 60_000

# For each call: is it computed again; does a region begin with it (1: within the last, 2: a new one); is it in the one within.
Rows = tuple[int, ...]


class Search:
    """Searches among the choices for one step."""

    def __init__(self, simulation: Simulation, cost: Callable[[Outcome], float]) -> None:
        self._simulation = simulation
        self._cost = cost
        calls = simulation.profile.calls
        self.places = [index for index, call in enumerate(calls) if call.repeatable and call.makes]
        self._known: dict[Rows, tuple[int, float, Choice]] = {}
        self._left = 0

    def cheapest(self, budget: int, known: Choice | None) -> Choice | None:
        """The cheapest choice found whose peak is within the budget; None where there is none."""
        count = len(self.places)
        rng = random.Random(count)
        begins = [(1,) * count + (gap,) * count + (inside,) * count for gap, inside in ((0, 0), (2, 0), (1, 1))]
        if known is not None:
            again = tuple(int(known.recomputed[place]) for place in self.places)
            begins += [again + begin[count:] for begin in begins]
        begins += [
            tuple(rng.randrange(kinds) for kinds in (2, 3, 2) for _ in range(count)) for _ in range(_BEGINS)
        ]  # fmt: skip
        self._left = _MOVES // len(calls) if (calls := self._simulation.profile.calls) else 0
        for begin in begins:
            self._descend(begin, budget)
        found = [(cost, peak, choice) for peak, cost, choice in self._known.values() if peak <= budget]
        if known is not None:
            found.append((*self._judged(known)[::-1], known))
        return min(found, key=lambda item: item[:2])[-1] if found else None

    def _descend(self, rows: Rows, budget: int) -> None:
        best = self._rank(rows, budget)
        improved = True
        while improved:
            improved = False
            for tried in self._neighbours(rows):
                if self._left <= 0:
                    return
                rank = self._rank(tried, budget)
                if rank < best:
                    rows, best, improved = tried, rank, True
                    break

    def _neighbours(self, rows: Rows) -> Iterator[Rows]:
        count = len(self.places)
        changes = [
            (place, value)
            for place in range(3 * count)
            for value in range(3 if place // count == 1 else 2)
            if value != rows[place]
        ]
        for change in changes:
            yield _changed(rows, change)
        for one, other in combinations(changes, 2) if count <= _VERY_FEW else ():
            if one[0] != other[0]:
                yield _changed(rows, one, other)

    def _rank(self, rows: Rows, budget: int) -> tuple[int, float]:
        if rows not in self._known:
            self._left -= 1
            choice = self._choice(rows)
            self._known[rows] = (*self._judged(choice), choice)
        peak, cost, _ = self._known[rows]
        return max(peak - budget, 0), cost

    def _judged(self, choice: Choice) -> tuple[int, float]:
        outcome = self._simulation.run(choice)
        return outcome.peak, self._cost(outcome)

    def _choice(self, rows: Rows) -> Choice:
        count, total = len(self.places), len(self._simulation.profile.calls)
        wanted = [False] * total
        regions: list[Region] = [()] * total
        outer = inner = 0
        for number, place in enumerate(self.places):
            again, gap, inside = rows[number], rows[count + number], rows[2 * count + number]
            wanted[place] = bool(again)
            if number:
                outer += gap == 2
                inner += gap > 0
            regions[place] = (outer, inner) if inside else (outer,)
        return Choice(possible(self._simulation.profile, wanted), tuple(regions))


def _changed(rows: Rows, *changes: tuple[int, int]) -> Rows:
    found = list(rows)
    for place, value in changes:
        found[place] = value
    return tuple(found)
