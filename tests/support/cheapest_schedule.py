"""The least that a backward pass can cost within a budget of bytes: a mixed integer program over schedules.

The program is that of Jain et al., "Checkmate: Breaking the memory wall with optimal tensor rematerialization", 2020, over the
memory of `Simulation`. A stage is one value that the backward pass asks for. In each stage every call may be computed again,
and every value may be there when it begins; what is there at the first stage is what the forward kept. The bytes are counted in
each call of the forward, before each call that is computed again, and at each moment of the backward pass.

What comes out is a bound: no choice whose simulated peak is within the budget costs less. To be one the program leaves out what
would only raise it: a call takes what it takes where the least of its results is asked for, it is paid for once in a stage, and
what something else than autograd holds is there for whoever is computed from it.

The schedules are more than a `Choice` can say. `of_a_tape` are those that a tape could follow if it were told for each value
at which stage to begin to hold it: a call is kept for the backward pass or computed again there, what is held stays up to its
last use, and so does what it would be computed from. Without, a value may go and come back at any stage.
"""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from passes.checkpointing.choice import overwritten
from passes.checkpointing.simulation import Simulation

INFEASIBLE = 2


def least_cost(profile, budget, of_a_tape=True, gap=0.0, nodes=None):
    """A cost that no choice within the budget falls below; infinity where there is none.

    Args:
        gap: the share by which the bound may fall short of the program's optimum.
        nodes: of the search for it, at most: the bound is what is proven by then.
    """
    return Schedules(profile, budget, of_a_tape).least(gap, nodes)


class Schedules:
    """The variables and rows of the program.

    Attributes:
        stages: for each the position of the backward pass, and the value that is asked for.
        again: for each call, whether it is computed again at all.
        runs, new: for each stage, by calls and by values: what is computed, and what comes to stay.
        there: for each stage, whether each value is there when it begins.
    """

    def __init__(self, profile, budget, of_a_tape):
        self.profile, self.budget, self.of_a_tape = profile, budget, of_a_tape
        self.simulation = Simulation(profile)
        values, calls = profile.values, profile.calls
        self.may_go = [bool(value.numbers) and calls[value.call].repeatable and not value.held for value in values]
        self.stages = [
            (place, value)
            for place, position in enumerate(profile.order)
            for value in dict.fromkeys(position.needs)
            if self.may_go[value]
        ]
        self.costs = [call.cost for call in calls]
        self.scale = max(self.costs)
        self.low, self.high, self.price, self.is_whole = [], [], [], []
        self.rows, self.columns, self.factors, self.most = [], [], [], []
        self.again = [self._variable(high=float(call.repeatable), is_whole=of_a_tape) for call in calls]
        self.runs, self.there, self.new = [], [], []
        for place, wanted in self.stages:
            self._name(place, values[wanted].call)
        self._keep()
        for stage in range(len(self.stages)):
            self._run(stage)
            if stage + 1 < len(self.stages):
                self._go_on(stage)
        if of_a_tape:
            self._hold_sources()
        self._count_forward()
        self._count_backward()

    def least(self, gap, nodes):
        shape = (len(self.most), len(self.low))
        self.found = milp(
            np.array(self.price),
            integrality=np.array(self.is_whole, dtype=int),
            bounds=Bounds(self.low, self.high),
            constraints=LinearConstraint(
                coo_array((self.factors, (self.rows, self.columns)), shape=shape).tocsr(), -np.inf, self.most
            ),
            options={"mip_rel_gap": gap} | ({} if nodes is None else {"node_limit": nodes}),
        )
        if self.found.status == INFEASIBLE:
            return float("inf")
        cost = max(self.found.mip_dual_bound or 0.0, 0.0) * self.scale
        # To compute anything again costs one more.
        return cost + 1 if cost > 0.5 else 0.0

    # ------------------------------------------------------------------------------- variables and rows

    def _variable(self, high=1.0, low=0.0, price=0.0, is_whole=True):
        self.low.append(low)
        self.high.append(high)
        self.price.append(price)
        self.is_whole.append(is_whole)
        return len(self.low) - 1

    def _at_most(self, most, *terms):
        """The sum of the terms, each a variable and its factor, is at most so much."""
        for variable, factor in terms:
            self.rows.append(len(self.most))
            self.columns.append(variable)
            self.factors.append(factor)
        self.most.append(most)

    def _fits(self, bytes_there, terms):
        """So many bytes and those of the terms are within the budget."""
        self._at_most(1 - bytes_there / self.budget, *((variable, size / self.budget) for variable, size in terms))

    def _is_fixed(self, number, place):
        """Whether a value is there at a position whatever is computed again."""
        value = self.profile.values[number]
        return not self.may_go[number] and value.until >= place and (value.held or value.keepable)

    def _size(self, number):
        value = self.profile.values[number]
        # What is written over, and is no plan's, is there for whoever takes it.
        return value.size if self.may_go[number] or value.keepable or value.held else 0

    def _name(self, place, last):
        calls, values = self.profile.calls, self.profile.values
        self.runs.append(
            {
                index: self._variable(price=self.costs[index] / self.scale)
                for index in range(last + 1)
                if calls[index].repeatable and calls[index].makes
            }
        )
        is_there = [self._is_fixed(number, place) or not self._size(number) for number in range(len(values))]
        self.there.append([self._variable(low=float(fixed)) for fixed in is_there])
        self.new.append(
            {
                number: self._variable()
                for number, value in enumerate(values)
                if self.may_go[number]
                and value.call in self.runs[-1]
                and (not self.of_a_tape or (value.savers and value.until >= place))
            }
        )

    # ----------------------------------------------------------------------------------- what can be

    def _keep(self):
        """What is there at the first stage was kept."""
        for number, value in enumerate(self.profile.values):
            if not self.stages or not self.may_go[number]:
                continue
            first, again = self.there[0][number], self.again[value.call]
            if not value.keepable:
                self.high[first] = 0.0
            if self.of_a_tape:
                self._at_most(1, (first, 1), (again, 1))
                if value.keepable and value.until >= self.stages[0][0]:
                    self._at_most(-1, (first, -1), (again, -1))

    def _run(self, stage):
        """A call takes what is there or is computed in the same stage."""
        values, calls = self.profile.values, self.profile.calls
        runs, there, new = self.runs[stage], self.there[stage], self.new[stage]
        for index, run in runs.items():
            if self.of_a_tape:
                self._at_most(0, (run, 1), (self.again[index], -1))
            for number in calls[index].args:
                made = [(runs[values[number].call], -1)] if self.may_go[number] and values[number].call in runs else []
                self._at_most(0, (run, 1), (there[number], -1), *made)
            if any(maker not in runs for maker in overwritten(self.profile, index)):
                self.high[run] = 0.0
        for number, comes in new.items():
            self._at_most(0, (comes, 1), (runs[values[number].call], -1))
            self._at_most(1, (comes, 1), (there[number], 1))
        wanted = self.stages[stage][1]
        self._at_most(-1, (there[wanted], -1), (new[wanted], -1))

    def _go_on(self, stage):
        """What is there at the next stage was there, or came to stay."""
        place, following = self.stages[stage][0], self.stages[stage + 1][0]
        for number, value in enumerate(self.profile.values):
            comes = [(self.new[stage][number], 1)] if number in self.new[stage] else []
            before, after = self.there[stage][number], self.there[stage + 1][number]
            self._at_most(0, (after, 1), (before, -1), *((variable, -1) for variable, _ in comes))
            is_held = self.may_go[number] and value.savers and following <= value.until
            if place == following or (self.of_a_tape and is_held):
                self._at_most(0, (after, -1), (before, 1), *comes)

    def _hold_sources(self):
        """What a call is computed again from is held for as long as anything that comes of it is."""
        values, calls = self.profile.values, self.profile.calls
        takers = [[] for _ in values]
        for index, call in enumerate(calls):
            for number in call.args if call.repeatable else ():
                takers[number].append(index)
        for stage, (place, _) in enumerate(self.stages):
            # For each call, where it is computed again: whether anything that comes of it is held.
            lives = {}
            for index in reversed(range(len(calls))):
                made = calls[index].makes
                if any(values[number].until >= place for number in made):
                    lives[index] = self.again[index]
                    continue
                later = {taker for number in made if self.may_go[number] for taker in takers[number] if taker in lives}
                if later:
                    lives[index] = self._variable(is_whole=False)
                for taker in sorted(later):
                    self._at_most(1, (lives[taker], 1), (self.again[index], 1), (lives[index], -1))
            for number, value in enumerate(values):
                for taker in takers[number]:
                    if taker in lives and value.keepable:
                        made = [(self.again[value.call], -1)] if self.may_go[number] else []
                        self._at_most(0, (lives[taker], 1), (self.there[stage][number], -1), *made)

    # ------------------------------------------------------------------------------------ the bytes

    def _count_forward(self):
        for index, call in enumerate(self.profile.calls):
            fixed, terms = call.inner, []
            for number, value in enumerate(self.profile.values):
                if value.call >= index:
                    continue
                if value.python >= index or value.held:
                    fixed += value.size
                elif self.stages and (self.may_go[number] or value.keepable):
                    terms.append((self.there[0][number], value.size))
            self._fits(fixed, terms)

    def _count_backward(self):
        following = 0
        for place, position in enumerate(self.profile.order):
            here = [stage for stage, (where, _) in enumerate(self.stages) if where == place]
            for stage in here:
                self._count_stage(stage, position)
            following = here[-1] + 1 if here else following
            # What was there, and came, in the last stage; without a stage, what is there at the next one.
            last = here[-1] if here else following
            gone = set()
            for step, extra in enumerate(position.extras):
                gone |= set(position.releases[step - 1 : step])
                fixed, terms = extra if step or here else max(extra, position.incoming), []
                for number, value in enumerate(self.profile.values):
                    if number in gone:
                        continue
                    if self._is_fixed(number, place):
                        fixed += value.size
                    elif last < len(self.stages):
                        terms.append((self.there[last][number], self._size(number)))
                        if here and number in self.new[last]:
                            terms.append((self.new[last][number], value.size))
                self._fits(fixed, terms)

    def _count_stage(self, stage, position):
        values, calls = self.profile.values, self.profile.calls
        place = self.stages[stage][0]
        runs, there, new = self.runs[stage], self.there[stage], self.new[stage]
        numbers = range(len(values))
        fixed = position.incoming + sum(values[number].size for number in numbers if self._is_fixed(number, place))
        always = [(there[number], self._size(number)) for number in numbers if not self._is_fixed(number, place)]
        beside = self._count_beside(stage)
        for index, run in runs.items():
            terms = list(always)
            for number in numbers:
                if self.may_go[number] and values[number].call < index:
                    later = [taker for taker in beside.get(number, {}) if taker >= index]
                    if later:
                        terms.append((beside[number][min(later)], values[number].size))
                    elif number in new:
                        terms.append((new[number], values[number].size))
            kinds = {self.simulation.kind[number] for number in calls[index].makes if values[number].numbers}
            takes = min((self.simulation.again[index][kind] for kind in kinds), default=0)
            self._fits(fixed, [*terms, (run, takes)])

    def _count_beside(self, stage):
        """For each value and each call that takes it, whether it was computed in the stage and is there up to that call."""
        runs, there, new = self.runs[stage], self.there[stage], self.new[stage]
        found = {}
        for index in reversed(runs):
            for number in self.profile.calls[index].args:
                if not self.may_go[number] or self.profile.values[number].call not in runs:
                    continue
                later = found.setdefault(number, {})
                variable = self._variable(is_whole=False)
                self._at_most(0, (runs[index], 1), (there[number], -1), (variable, -1))
                if later:
                    self._at_most(0, (later[min(later)], 1), (variable, -1))
                elif number in new:
                    self._at_most(0, (new[number], 1), (variable, -1))
                later[index] = variable
        return found
