"""Compute the peak and the cost of a step under a plan from its profile alone."""

from __future__ import annotations

from dataclasses import dataclass

from passes.checkpointing.choice import Choice
from passes.checkpointing.profile import Profile


@dataclass(frozen=True, slots=True)
class Outcome:
    """The peak and the cost of a step under a plan.

    Attributes:
        peak: in bytes.
        at: the place of the peak: a call of the forward, or, from `len(calls)` on, a position of the backward pass.
        flops, cost: the FLOPs and the estimated time of the recomputation.
    """

    peak: int
    at: int
    flops: int
    cost: int


class Simulation:
    """Simulates what the tape and autograd do with a profile, on numbers of bytes."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        calls, values = profile.calls, profile.values
        # The profile by columns, which are faster to read.
        self.args = [call.args for call in calls]
        self.makes = [call.makes for call in calls]
        self.inner = [call.inner for call in calls]
        # A call that writes in place is recomputed in new memory. Its memory depends on what is requested: results
        # only, internally saved tensors only, or both.
        more = [call.spare + (sum(values[made].size for made in call.makes) if call.writes else 0) for call in calls]
        self.again = [
            (0, call.alone + own, call.early + own, call.inner + own) for call, own in zip(calls, more, strict=True)
        ]
        self.size = [value.size for value in values]
        self.maker = [value.call for value in values]
        self.until = [value.until for value in values]
        self.python = [value.python for value in values]
        self.is_named = [bool(value.numbers) for value in values]
        self.kind = [1 if any(number >= 0 for number in value.numbers) else 2 for value in values]
        self.is_saved = [bool(value.savers) for value in values]
        # Values that stay whatever is recomputed, and values that can stay.
        self.is_held = [value.held for value in values]
        self.may_stay = [value.keepable for value in values]

    def run(self, choice: Choice) -> Outcome:
        """Simulate the step under this choice."""
        return Course(self, choice).outcome


class Course:
    """The simulation of one step under a choice.

    Attributes:
        outcome: the result.
        forward, backward: the maximum number of bytes alive in each call of the forward, and in each position of the
            backward pass.
        is_held: for each value, whether it is held beyond the forward, without recomputation.
    """

    def __init__(self, simulation: Simulation, choice: Choice) -> None:
        self.simulation = simulation
        self.order = simulation.profile.order
        self.recomputed, self.regions = choice.recomputed, choice.regions
        self.dropped = [
            choice.recomputed[maker] and named
            for maker, named in zip(simulation.maker, simulation.is_named, strict=True)
        ]
        # Whether a value is released with the last value that is recomputed from it, not in its own turn.
        self.is_taken = [False] * len(self.dropped)
        self.until, self.python = self._ends()
        # Whether each value is held beyond the forward, without recomputation.
        self.is_held = [
            held or (until >= 0 and not dropped and may_stay)
            for held, until, dropped, may_stay in zip(
                simulation.is_held, self.until, self.dropped, simulation.may_stay, strict=True
            )
        ]
        # Whether each value is missing in the backward pass, so that it must be recomputed when it is needed.
        self.lacks = list(self.dropped)
        self.flops = self.cost = 0
        self.live = 0
        self.ends: list[dict[int, int]] = [{} for _ in range(len(self.order) + 1)]
        self.late = [0] * (len(self.order) + 1)
        self.forward: list[int] = []
        self.backward: list[int] = []
        self.outcome = self._followed()

    def _ends(self) -> tuple[list[int], list[int]]:
        """Compute how long each value is held.

        Returns:
            For each value, the position of the backward pass until which it is held, -1 for none; and the call of the
                forward until which it is held if the backward pass doesn't need it.
        """
        simulation, recomputed, dropped, makers = self.simulation, self.recomputed, self.dropped, self.simulation.maker
        until, python = list(simulation.until), list(simulation.python)
        # The inputs of a recomputed call are held as long as anything that depends on it.
        lasts, ends = [-1] * len(recomputed), [-1] * len(recomputed)
        for index in range(len(recomputed) - 1, -1, -1):
            if not recomputed[index]:
                continue
            last, end = lasts[index], ends[index]
            for value in simulation.makes[index]:
                last, end = max(last, simulation.python[value]), max(end, simulation.until[value])
            for value in simulation.args[index]:
                if dropped[value]:
                    maker = makers[value]
                    lasts[maker], ends[maker] = max(lasts[maker], last), max(ends[maker], end)
                else:
                    self.is_taken[value] |= end >= until[value]
                    python[value], until[value] = max(python[value], last), max(until[value], end)
        return until, python

    def _followed(self) -> Outcome:
        self._go_forward()
        self._go_backward()
        steps = self.forward + self.backward
        peak = max(steps, default=0)
        return Outcome(peak, steps.index(peak) if steps else 0, self.flops, self.cost)

    def _go_forward(self) -> None:
        simulation, python, size, is_held = self.simulation, self.python, self.simulation.size, self.is_held
        count = len(simulation.args)
        gone = [0] * count
        live = 0
        for index, inner in enumerate(simulation.inner):
            self.forward.append(live + inner)
            for number in simulation.makes[index]:
                live += size[number]
                if not is_held[number]:
                    gone[min(max(python[number], index), count - 1)] += size[number]
            live -= gone[index]
        self.live = live

    def _go_backward(self) -> None:
        size, lacks, ends = self.simulation.size, self.lacks, self.ends
        for number, held in enumerate(self.is_held):
            if held:
                self._end(number)
        for position, item in enumerate(self.order):
            peak = self.live + item.incoming
            for number in item.needs:
                if lacks[number]:
                    peak = max(peak, item.incoming + self._compute(number, position))
            peak = max(peak, self.live + item.extras[0])
            ending = ends[position]
            for number, extra in zip(item.releases, item.extras[1:], strict=True):
                self.live -= size[number] * ending.pop(number, 0)
                peak = max(peak, self.live + extra)
            for number, copies in ending.items():
                self.live -= size[number] * copies
            self.live -= self.late[position]
            self.backward.append(peak)

    def _end(self, number: int) -> None:
        """Schedule the release of a value that is alive now."""
        end = self.simulation.until[number] if self.dropped[number] else self.until[number]
        if self.is_taken[number]:
            self.late[end] += self.simulation.size[number]
            return
        # A value that an output holds is recomputed next to it, so there may be two copies.
        self.ends[end][number] = self.ends[end].get(number, 0) + 1

    def _compute(self, wanted: int, position: int) -> int:
        """Recompute a value, and fill the missing values of its region and the surrounding ones that it depends on.

        Returns:
            The maximum number of bytes alive meanwhile.
        """
        # Planning spends most of its time in this loop, so it reads local names.
        simulation, lacks, regions, size = self.simulation, self.lacks, self.regions, self.simulation.size
        calls, args, makes, again = simulation.profile.calls, simulation.args, simulation.makes, simulation.again
        is_saved, until, kind = simulation.is_saved, simulation.until, simulation.kind
        order, uses = self._needed(wanted)
        region = regions[simulation.maker[wanted]]
        live = peak = self.live
        held = set[int]()
        for index in order:
            call = calls[index]
            self.flops += call.flops
            self.cost += call.cost
            before, asked = live, 0
            own = regions[index]
            stays = region[: len(own)] == own
            for number in makes[index]:
                if stays and is_saved[number] and until[number] >= position and lacks[number]:
                    lacks[number] = False
                    live += size[number]
                    self._end(number)
                elif number in uses:
                    held.add(number)
                    live += size[number]
                else:
                    continue
                asked |= kind[number]
            taken = before + again[index][asked]
            if taken > peak or live > peak:
                peak = max(taken, live)
            if not uses:
                continue
            for number in args[index]:
                if number in uses:
                    uses[number] -= 1
                    if not uses[number]:
                        del uses[number]
                        if number in held:
                            live -= size[number]
        self.live = live
        return peak

    def _needed(self, wanted: int) -> tuple[list[int], dict[int, int]]:
        """The calls to run, in the order of the forward, and how often each missing value is taken."""
        args, lacks, maker = self.simulation.args, self.lacks, self.simulation.maker
        first = maker[wanted]
        found, uses, stack = {first}, dict[int, int](), [first]
        while stack:
            for number in args[stack.pop()]:
                if lacks[number]:
                    uses[number] = uses.get(number, 0) + 1
                    if (index := maker[number]) not in found:
                        found.add(index)
                        stack.append(index)
        return sorted(found), uses
