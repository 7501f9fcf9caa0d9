"""Which calls of a step are computed again, and what a choice has to keep to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.checkpointing.plan import Plan, Step
from passes.checkpointing.profile import Profile

Region = tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """The calls that are computed again, each with its region; the regions of the others say nothing."""

    recomputed: tuple[bool, ...]
    regions: tuple[Region, ...]

    @classmethod
    def nothing(cls, profile: Profile) -> Choice:
        """The step as it is."""
        count = len(profile.calls)
        return cls((False,) * count, ((),) * count)

    def plan(self, profile: Profile) -> Plan:
        """The choice as the tape takes it."""
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
                # What a kept call saves of dropped arguments isn't kept; another one is as without a plan.
                steps.append(Step(random=call.random) if call.random or index in meets else None)
        return steps

    def _meets_dropped(self, profile: Profile) -> set[int]:
        """The calls that take or save a dropped value."""
        dropped = {number for number, value in enumerate(profile.values) if self.recomputed[value.call]}
        savers = {saver for number in dropped for saver in profile.values[number].savers}
        return savers | {index for index, call in enumerate(profile.calls) if dropped.intersection(call.args)}


def possible(profile: Profile, wanted: Sequence[bool]) -> tuple[bool, ...]:
    """The choice nearest to the wanted one that can be computed.

    What is written over later can't be kept: a call that takes it is computed again only with the call that made it.
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
    """The calls that made what this one takes and what is written over later."""
    values = profile.values
    return [values[value].call for value in profile.calls[index].args if not values[value].keepable]
