"""The peaks and the costs of many choices at once: `Simulation` by columns of numbers, one for each choice.

A choice is written as two rows over the calls: which are computed again, and how far each reaches: the last call for whose
sake it is computed for good. Where one behind that asks for it, it is computed for the time only. As the backward pass goes
from the last call to the first, a value is then held from one moment on until its last use. These are regions in one another:
each reaches from the first call that it holds to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from passes.checkpointing.choice import Choice, Region
from passes.checkpointing.simulation import Simulation

# One row for each call, one column for each choice.
Columns = np.ndarray[Any, Any]


class Many:
    """Follows one profile under many choices.

    What is true or false of each choice stands in the bits of one number; what is counted, in the columns of an array.

    Attributes:
        peak: bytes, of each choice.
        excess: the bytes over the budget, of all calls of the forward and all positions of the backward pass together.
        cost: of what it computes again, in the unit of the costs.
    """

    def __init__(
        self, simulation: Simulation, costs: Sequence[float], again: Columns, reach: Columns, budget: float = np.inf
    ) -> None:
        self._simulation = simulation
        self._costs = np.array(costs)
        self._count = again.shape[1]
        self._width = -(-self._count // 8)
        self._again = _packed(again)
        # For each call and each one behind it, where the first reaches that far.
        far = reach[:, None] >= np.arange(len(again))[:, None]
        self._reach = np.packbits(far, axis=2, bitorder="little")
        self._lacks = [
            self._again[maker] if named else 0
            for maker, named in zip(simulation.maker, simulation.is_named, strict=True)
        ]
        self._asked = [0] * len(again)
        self.cost = np.zeros(self._count)
        self._ending: list[list[int]] = [[] for _ in range(len(simulation.profile.order) + 1)]
        for value, until in enumerate(simulation.until):
            if until >= 0:
                self._ending[until].append(value)
        # What each call takes beside what is there when it begins: by what is asked for, where that makes a difference.
        self._ways_to_take = np.array(simulation.again, dtype=float).reshape(-1, 4)
        kinds = [sum({simulation.kind[value] for value in made}) for made in simulation.makes]
        self._goes_by = [
            kind == 3 and len(set(takes[1:])) > 1 for kind, takes in zip(kinds, simulation.again, strict=True)
        ]
        self._takes = np.take_along_axis(self._ways_to_take, np.array(kinds)[:, None], axis=1)
        # The bytes that go with each value.
        self._copies: dict[int, Columns] = {}
        # Bytes are whole numbers here as well.
        forward = self._go_forward(again)
        # The most in the time of the position of the backward pass that it is just now.
        self._most = np.zeros(self._count)
        most = np.concatenate([forward, [self._most_at(position) for position in range(len(simulation.profile.order))]])
        self.peak = most.max(axis=0)
        self.excess = np.maximum(most - budget, 0).sum(axis=0)
        self.cost += self.cost > 0

    def asked(self, column: int) -> list[bool]:
        """For each call, whether under a choice its result is computed again for its own sake, and no other's."""
        return [bool(bits >> column & 1) for bits in self._asked]

    def _go_forward(self, again: Columns) -> Columns:
        """The most in the time of each call, and what is held for the backward pass."""
        simulation, count = self._simulation, len(again)
        size, maker = (np.array(column)[:, None] for column in (simulation.size, simulation.maker))
        dropped = self._unpacked(self._lacks).astype(bool)
        until, python, taken = self._ends(again, dropped)
        held = (until >= 0) & ~dropped & np.array(simulation.may_stay, dtype=bool)[:, None]
        held |= np.array(simulation.is_held, dtype=bool)[:, None]
        change = self._summed(np.broadcast_to(maker, python.shape), size, count) - self._summed(
            np.clip(python, maker, count - 1), size * ~held, count
        )
        live = np.cumsum(change, axis=0)
        self._live = live[-1]
        self._late = self._summed(np.maximum(until, 0), size * (held & taken), len(simulation.profile.order) + 1)
        for value in np.flatnonzero(held.any(axis=1)).tolist():
            self._copies[value] = simulation.size[value] * (held[value] & ~taken[value]).astype(float)
        return live - change + np.array(simulation.inner)[:, None]

    def _summed(self, places: Columns, sizes: Columns, count: int) -> Columns:
        """For each place the sizes of the values that are there."""
        flat = (places * self._count + np.arange(self._count)).ravel()
        weights = np.broadcast_to(sizes, places.shape).ravel()
        return np.bincount(flat, weights, count * self._count).reshape(count, self._count)

    def _ends(self, again: Columns, dropped: Columns) -> tuple[Columns, Columns, Columns]:
        """As in a course of a single choice."""
        simulation = self._simulation
        until = np.repeat(np.array(simulation.until)[:, None], self._count, axis=1)
        python = np.repeat(np.array(simulation.python)[:, None], self._count, axis=1)
        taken = np.zeros(dropped.shape, dtype=bool)
        lasts, ends = np.full(again.shape, -1), np.full(again.shape, -1)
        for index in range(len(again) - 1, -1, -1):
            if not self._again[index]:
                continue
            last, end = lasts[index], ends[index]
            for value in simulation.makes[index]:
                last, end = np.maximum(last, simulation.python[value]), np.maximum(end, simulation.until[value])
            for value in simulation.args[index]:
                on, maker = again[index] & dropped[value], simulation.maker[value]
                np.maximum(lasts[maker], last, out=lasts[maker], where=on)
                np.maximum(ends[maker], end, out=ends[maker], where=on)
                off = again[index] & ~dropped[value]
                taken[value] |= off & (end >= until[value])
                np.maximum(python[value], last, out=python[value], where=off)
                np.maximum(until[value], end, out=until[value], where=off)
        return until, python, taken

    def _most_at(self, position: int) -> Columns:
        """The most in the time of a position of the backward pass, which goes by."""
        simulation, item = self._simulation, self._simulation.profile.order[position]
        self._most = self._live + item.incoming
        for value in item.needs:
            if self._lacks[value]:
                self._compute(value, position, item.incoming)
        self._reaches(item.extras[0])
        for value, extra in zip(item.releases, item.extras[1:], strict=True):
            if simulation.until[value] == position and value in self._copies:
                self._live = self._live - self._copies.pop(value)
            self._reaches(extra)
        for value in self._ending[position]:
            if value in self._copies:
                self._live = self._live - self._copies.pop(value)
        self._live = self._live - self._late[position]
        return self._most

    def _reaches(self, more: int) -> None:
        np.maximum(self._most, self._live + more, out=self._most)

    def _compute(self, wanted: int, position: int, incoming: int) -> None:
        simulation, lacks, size = self._simulation, self._lacks, self._simulation.size
        last = simulation.maker[wanted]
        runs, needed, lets_go = self._needed(wanted)
        self._asked[last] |= runs[last]
        order = sorted(runs)
        place_of = {index: place for place, index in enumerate(order)}
        # What comes, for good or for the time, each with its place in the order.
        kept_rows: list[tuple[int, int, int]] = []
        short_rows: list[tuple[int, int, int]] = []
        short: dict[int, int] = {}
        for place, index in enumerate(order):
            stays = runs[index] & self._reaches_to(index, last)
            for value in simulation.makes[index]:
                kept = 0
                if simulation.is_saved[value] and simulation.until[value] >= position:
                    kept = stays & lacks[value]
                    lacks[value] &= ~kept
                if kept:
                    kept_rows.append((place, value, kept))
                if comes := needed.get(value, 0) & ~kept:
                    short[value] = comes
                    short_rows.append((place, value, comes))
        gone_rows = [(place_of[index], value, bits & short[value]) for index, value, bits in lets_go if value in short]
        rows = [*kept_rows, *short_rows, *gone_rows]
        columns = self._unpacked([*(bits for _, _, bits in rows), *(runs[index] for index in order)])
        change, runs_here = columns[: len(rows)], columns[len(rows) :]
        come = len(kept_rows) + len(short_rows)
        sizes = np.zeros((2, len(order), len(rows)))
        for number, (place, value, _) in enumerate(rows):
            sizes[int(number >= come), place, number] = size[value]
        more, less = sizes @ change
        after = self._live + np.cumsum(more - less, axis=0)
        before = after - more + less
        peaks = (before + np.maximum(more, self._taken(order, rows[:come]))) * runs_here
        np.maximum(self._most, peaks.max(axis=0) + incoming, out=self._most)
        self.cost += self._costs[order] @ runs_here
        self._live = after[-1]
        for number, (_, value, _) in enumerate(kept_rows):
            self._copies[value] = self._copies.get(value, 0) + size[value] * change[number]

    def _taken(self, order: Sequence[int], came: Sequence[tuple[int, int, int]]) -> Columns:
        """The bytes that each call takes beside what is there when it begins."""
        found = self._takes[order]
        if not any(self._goes_by[index] for index in order):
            return found
        found = np.repeat(found, self._count, axis=1)
        kind = self._simulation.kind
        for place, index in enumerate(order):
            if self._goes_by[index]:
                asked = [0, 0]
                for where, value, bits in came:
                    if where == place:
                        asked[kind[value] - 1] |= bits
                one, two = self._unpacked(asked).astype(int)
                found[place] = self._ways_to_take[index][one + 2 * two]
        return found

    def _reaches_to(self, index: int, last: int) -> int:
        return int.from_bytes(self._reach[index, last].tobytes(), "little")

    def _needed(self, wanted: int) -> tuple[dict[int, int], dict[int, int], list[tuple[int, int, int]]]:
        """Which calls run, which values are taken that aren't there, and what goes behind the last call that takes it."""
        simulation, lacks = self._simulation, self._lacks
        last = simulation.maker[wanted]
        runs, needed = {last: lacks[wanted]}, dict[int, int]()
        lets_go: list[tuple[int, int, int]] = []
        for index in range(last, -1, -1):
            if index not in runs:
                continue
            for value in simulation.args[index]:
                if takes := runs[index] & lacks[value]:
                    before = needed.get(value, 0)
                    if last_takers := takes & ~before:
                        lets_go.append((index, value, last_takers))
                    needed[value] = before | takes
                    maker = simulation.maker[value]
                    runs[maker] = runs.get(maker, 0) | takes
        return runs, needed, lets_go

    def _unpacked(self, rows: Sequence[int]) -> Columns:
        whole = b"".join(bits.to_bytes(self._width, "little") for bits in rows)
        table = np.frombuffer(whole, dtype=np.uint8).reshape(len(rows), self._width)
        return np.unpackbits(table, axis=1, count=self._count, bitorder="little").astype(float)


def _packed(rows: Columns) -> list[int]:
    """Each row as a number, its first column in the lowest bit."""
    return [int.from_bytes(row.tobytes(), "little") for row in np.packbits(rows, axis=1, bitorder="little")]


def regions_that_reach(again: Sequence[bool], reach: Sequence[int], asked: Sequence[bool]) -> tuple[Region, ...]:
    """The regions in which each call is computed for good for the sake of those up to its reach, and of no other.

    Args:
        asked: what is computed for its own sake. It reaches no further: nobody behind it had it computed for good.
    """
    ends = [index if own else max(end, index) for index, (end, own) in enumerate(zip(reach, asked, strict=True))]
    starts: dict[int, int] = {}
    for index, (end, is_again) in enumerate(zip(ends, again, strict=True)):
        if is_again:
            starts.setdefault(end, index)
    # Of two that overlap the one that reaches further lies around the other.
    for end in sorted(starts):
        starts[end] = min(starts[end], *(starts[other] for other in starts if other <= end and starts[end] <= other))
    found: list[Region] = []
    for index, (end, is_again) in enumerate(zip(ends, again, strict=True)):
        around = [other for other, start in starts.items() if start <= index and other >= end]
        found.append(tuple(sorted(around, reverse=True)) if is_again else ())
    return tuple(found)


def choice_of(again: Sequence[bool], reach: Sequence[int], asked: Sequence[bool]) -> Choice:
    """A choice that was followed among others, by its rows."""
    return Choice(tuple(again), regions_that_reach(again, reach, asked))


def reach_of(choice: Choice) -> list[int]:
    """How far each call reaches: to the last one that is computed again in its region."""
    ends: dict[Region, int] = {}
    for index, (is_again, region) in enumerate(zip(choice.recomputed, choice.regions, strict=True)):
        if is_again:
            ends.update((region[:depth], index) for depth in range(len(region) + 1))
    return [
        ends[region] if is_again else index
        for index, (is_again, region) in enumerate(zip(choice.recomputed, choice.regions, strict=True))
    ]
