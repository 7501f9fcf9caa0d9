"""A choice of the calls that are recomputed in the backward pass, and the constraints on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.checkpointing.plan import Plan, Step
from passes.checkpointing.profile import Profile

Region = tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """The calls that are recomputed, each with its region; the regions of the other calls are ignored."""

    recomputed: tuple[bool, ...]
    regions: tuple[Region, ...]

    @classmethod
    def nothing(cls, profile: Profile) -> Choice:
        """The choice that recomputes nothing."""
        count = len(profile.calls)
        return cls((False,) * count, ((),) * count)

    def plan(self, profile: Profile) -> Plan:
        """Convert the choice to the plan that a tape follows."""
        synchronised = frozenset(number for number, call in enumerate(profile.calls) if call.synchronised)
        return Plan(tuple(call.name for call in profile.calls), tuple(self._steps(profile)), synchronised)

    def _steps(self, profile: Profile) -> list[Step | None]:
        steps: list[Step | None] = []
        meets = self._meets_dropped(profile)
        for index, (call, recomputed, region) in enumerate(
            zip(profile.calls, self.recomputed, self.regions, strict=True)
        ):
            numbers = [number for value in call.makes for number in profile.values[value].numbers]
            internals = frozenset(-1 - number for number in numbers if number < 0)
            if recomputed:
                steps.append(Step(region, True, internals, call.random))
            else:
                # A kept call needs a step if it draws random numbers, or if it saves or overwrites a dropped value.
                # Any other kept call runs as without a plan.
                steps.append(Step(random=call.random) if call.random or index in meets else None)
        return steps

    def _meets_dropped(self, profile: Profile) -> set[int]:
        """The calls that save or overwrite a dropped value."""
        values = profile.values
        dropped = {number for number, value in enumerate(values) if self.recomputed[value.call]}
        overwritten = {number for number in dropped if not values[number].keepable}
        savers = {saver for number in dropped for saver in values[number].savers}
        return savers | {index for index, call in enumerate(profile.calls) if overwritten.intersection(call.args)}


def possible(profile: Profile, wanted: Sequence[bool]) -> tuple[bool, ...]:
    """Return the feasible choice nearest to the wanted one.

    A value that is overwritten later can't be kept. So a call that takes it is recomputed only together with the call
    that made it.
    """
    calls = profile.calls
    found = [want and call.repeatable for want, call in zip(wanted, calls, strict=True)]
    for index in range(len(calls) - 1, -1, -1):
        if found[index]:
            for maker in overwritten(profile, index):
                found[maker] = True
    for index, call in enumerate(calls):
        found[index] = found[index] and call.repeatable and all(found[maker] for maker in overwritten(profile, index))
    return tuple(found)


def overwritten(profile: Profile, index: int) -> list[int]:
    """The calls that made those arguments of this call that are overwritten later."""
    values = profile.values
    return [values[value].call for value in profile.calls[index].args if not values[value].keepable]
