"""A thorough search for the choices of a step of few calls.

Many choices walk at once. In each step each of them is changed a little at random, or takes a run of calls as another one has
it; what is better is taken, and what is worse the less often the later it is (simulated annealing; Kirkpatrick et al., 1983). A
choice is as bad as the logarithm of what it costs and, many times as much, the bytes by which it is over the budget, of all
moments of the step together: where one of several moments comes within the budget, a walk is nearer to its goal although the
peak is what it was. From time to time the worst go on from where the best are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from passes.checkpointing.choice import Choice, overwritten
from passes.checkpointing.many import Columns, Many, choice_of, reach_of
from passes.checkpointing.simulation import Simulation

# The search is for steps of so many calls that can be computed again, at the most.
FEW = 40
_WALKS = 256
# So many steps, and so many more for each call.
_STEPS = 40
_STEPS_EACH = 3
_HOT, _COLD = 1.0, 0.02
# What the budget once more weighs, and what it weighs to be over it at all, where the cost is weighed by its logarithm.
_OVER, _AT_ALL = 50.0, 0.2
# The worst quarter goes on from the best one each so many steps.
_GATHER = 8
# More than any choice weighs.
_FAR = 1e9
# A budget that falls is so much below the lowest peak.
_CLOSE = 0.002


class _Rows(NamedTuple):
    """Choices, one in each column: which calls are computed again, and how far each reaches."""

    again: Columns
    reach: Columns

    def at(self, column: int) -> _Rows:
        return _Rows(self.again[:, [column]], self.reach[:, [column]])

    def where(self, is_taken: Columns, other: _Rows) -> _Rows:
        return _Rows(np.where(is_taken, self.again, other.again), np.where(is_taken, self.reach, other.reach))


class Search:
    """Searches among the choices for one step."""

    def __init__(self, simulation: Simulation, costs: Sequence[float]) -> None:
        """`costs`: of each call."""
        self._simulation = simulation
        self._costs = costs
        profile = simulation.profile
        self._count = len(profile.calls)
        self._calls = np.arange(self._count)[:, None]
        self._can = np.array([call.repeatable for call in profile.calls], dtype=bool)
        self.places = [index for index, call in enumerate(profile.calls) if call.repeatable and call.makes]
        makers = ((index, overwritten(profile, index)) for index in range(self._count))
        self._overwritten = [(index, found) for index, found in makers if found]

    def cheapest(self, budget: int, known: Choice | None) -> Choice | None:
        """The cheapest choice that a search from a known one finds within the budget; None where it finds none."""
        found = self._walked(budget, None if known is None else _rows_of(known)) if self.places else None
        return None if found is None else self._choice(found)

    def lowest(self, known: Choice) -> Choice:
        """The choice with the lowest peak that a search from a known one finds, and of those the cheapest."""
        if not self.places:
            return known
        rows = _rows_of(known)
        found = self._walked(_below(self._peak(rows)), rows, is_falling=True) or rows
        return self._choice(self._walked(self._peak(found), found) or found)

    def _walked(self, budget: int, known: _Rows | None, *, is_falling: bool = False) -> _Rows | None:
        """The cheapest within the budget that a walk comes by; a budget that falls goes down with each that is."""
        rng = np.random.default_rng(self._count)
        tried = rows = self._begins(rng, known)
        weights, best, least = np.full(_WALKS, _FAR), None, _FAR
        steps = _STEPS + _STEPS_EACH * len(self.places)
        for step in range(steps):
            seen, over = self._weighed(tried, budget)
            heat = _HOT * (_COLD / _HOT) ** (step / steps)
            is_taken = rng.random(_WALKS) < np.exp(np.minimum((weights - seen) / heat, 0))
            rows, weights = tried.where(is_taken, rows), np.where(is_taken, seen, weights)
            within = seen + _FAR * over
            if within.min() < least:
                best, least = tried.at(int(np.argmin(within))), float(within.min())
                if is_falling:
                    budget, least = _below(self._peak(best)), _FAR
                    weights, _ = self._weighed(rows, budget)
            if step % _GATHER == _GATHER - 1:
                rows, weights = _gathered(rows, weights)
            tried = self._changed(rng, rows)
        return best

    def _weighed(self, rows: _Rows, budget: int) -> tuple[Columns, Columns]:
        """How bad each choice is, and whether it is over the budget."""
        seen = Many(self._simulation, self._costs, rows.again, rows.reach, budget)
        over = seen.excess > 0
        return np.log1p(seen.cost) + _OVER * seen.excess / max(budget, 1) + _AT_ALL * over, over

    def _peak(self, rows: _Rows) -> int:
        return int(Many(self._simulation, self._costs, rows.again, rows.reach).peak[0])

    def _choice(self, rows: _Rows) -> Choice:
        seen = Many(self._simulation, self._costs, rows.again, rows.reach)
        return choice_of(rows.again[:, 0].tolist(), rows.reach[:, 0].tolist(), seen.asked(0))

    # --------------------------------------------------------------------------------- the ways

    def _begins(self, rng: np.random.Generator, known: _Rows | None) -> _Rows:
        """Nearly all of nothing to all, at random; all, each alone or all at once; and what is known."""
        size = (self._count, _WALKS)
        again = rng.random(size) < rng.random(_WALKS)
        far = np.maximum(self._calls, rng.integers(0, self._count, size))
        reach = np.where(rng.random(size) < rng.random(_WALKS), self._calls, far)
        again[:, ::4] = True
        reach[:, ::8], reach[:, 4::8] = self._calls, self._count - 1
        if known is not None:
            again[:, 1::8], reach[:, 1::8] = known
        return _Rows(self._possible(again), reach)

    def _changed(self, rng: np.random.Generator, rows: _Rows) -> _Rows:
        """Each choice changed once or twice: one call, two for one another, or a run of them."""
        again, reach = rows.again.copy(), rows.reach.copy()
        columns, places = np.arange(_WALKS), np.array(self.places)
        twice = rng.integers(0, 2, _WALKS).astype(bool)
        for is_changed in (np.ones(_WALKS, dtype=bool), twice):
            kind = rng.integers(0, 8, _WALKS)
            one, other = (places[rng.integers(0, len(places), _WALKS)] for _ in range(2))
            for row, on in ((one, kind <= 2), (other, kind == 2)):
                on = on & is_changed
                again[row[on], columns[on]] ^= True
            far = np.maximum(one, rng.integers(0, self._count, _WALKS))
            near = np.minimum(one + rng.integers(0, 4, _WALKS), self._count - 1)
            ends = np.where(rng.integers(0, 2, _WALKS), near, far)
            on = is_changed & ((kind == 0) | (kind == 3))
            reach[one[on], columns[on]] = ends[on]
            # A run whose calls reach to its end, or each to itself; in half of all cases all are computed again.
            first, last = np.minimum(one, other), np.maximum(one, other)
            inside = (self._calls >= first) & (self._calls <= last) & is_changed
            end = np.minimum(last, first + rng.integers(1, max(2, self._count // 3), _WALKS))
            ends = np.where(rng.random(_WALKS) < 0.3, self._calls, end)
            short = inside & (self._calls <= end)
            reach = np.where(short & ((kind == 4) | (kind == 5)), ends, reach)
            again |= short & (kind == 5) & rng.integers(0, 2, _WALKS).astype(bool)
            # A run as another choice has it.
            there, other_one = inside & (kind >= 6), rng.integers(0, _WALKS, _WALKS)
            again = np.where(there, rows.again[:, other_one], again)
            reach = np.where(there, rows.reach[:, other_one], reach)
        return _Rows(self._possible(again), reach)

    def _possible(self, again: Columns) -> Columns:
        """As `possible` has it, in place."""
        can = self._can[:, None]
        again &= can
        for index, makers in reversed(self._overwritten):
            again[makers] |= again[index]
        again &= can
        for index, makers in self._overwritten:
            again[index] &= again[makers].all(axis=0)
        return again


def _rows_of(choice: Choice) -> _Rows:
    return _Rows(np.array(choice.recomputed)[:, None], np.array(reach_of(choice))[:, None])


def _gathered(rows: _Rows, weights: Columns) -> tuple[_Rows, Columns]:
    """The worst quarter in the places of the best."""
    order = np.argsort(weights, kind="stable")
    source = np.arange(_WALKS)
    source[order[-_WALKS // 4 :]] = order[: _WALKS // 4]
    return _Rows(rows.again[:, source], rows.reach[:, source]), weights[source]


def _below(peak: int) -> int:
    return int(peak * (1 - _CLOSE))
