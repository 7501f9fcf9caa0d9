"""Cut a range of calls out of the profile of a step, as a separate profile."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from passes.checkpointing.profile import Call, Position, Profile, Value


@dataclass
class Part:
    """A range of calls, numbered from 0, with their values and their turns in the backward pass.

    Attributes:
        start, end: the range of calls in the step; `end` is not included.
        profile: the profile of these calls alone. Values from earlier calls count as always available.
        crossing: the values of the part that later calls take or save.
        lasting: the values of the part that the whole step holds beyond the forward.
    """

    start: int
    end: int
    profile: Profile
    crossing: frozenset[int]
    lasting: frozenset[int]


class Cutter:
    """Cuts parts out of one profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.last_use = last_uses(profile)
        # For each call, and at the end for the loss, its positions in the backward pass.
        self.turns: list[list[int]] = [[] for _ in range(len(profile.calls) + 1)]
        for number, position in enumerate(profile.order):
            self.turns[position.call].append(number)

    def part(self, start: int, end: int) -> Part:
        """Cut out the calls from `start` up to, but without, `end`."""
        whole = self.profile
        calls = range(start, end + (end == len(whole.calls)))
        places = sorted(turn for call in calls for turn in self.turns[call])
        numbers = [value for call in whole.calls[start:end] for value in call.makes]
        local = {number: index for index, number in enumerate(numbers)}
        values = [self._value(whole.values[number], start, end, places) for number in numbers]
        order = [_position(whole.order[place], start, local) for place in places]
        crossing = frozenset(local[number] for number in numbers if self.last_use[number] >= end)
        lasting = frozenset(local[number] for number in numbers if whole.values[number].until >= 0)
        part = Profile([_call(call, local) for call in whole.calls[start:end]], values, order)
        return Part(start, end, part, crossing, lasting)

    def _value(self, value: Value, start: int, end: int, places: list[int]) -> Value:
        """Renumber the calls and positions of a value for the part."""
        until = bisect_right(places, value.until) - 1
        if value.until == len(self.profile.order):
            until = len(places)
        savers = tuple(call - start for call in value.savers if call < end)
        return replace(
            value,
            call=value.call - start,
            python=value.python - start,
            until=until,
            # A value that is released before the first position of the part isn't held in the part.
            held=value.held and until >= 0,
            savers=savers,
        )


def last_uses(profile: Profile) -> list[int]:
    """For each value, the last call that takes or saves it."""
    found = [value.call for value in profile.values]
    for index, call in enumerate(profile.calls):
        for number in call.args:
            found[number] = max(found[number], index)
    return [max((last, *value.savers)) for last, value in zip(found, profile.values, strict=True)]


def _call(call: Call, local: dict[int, int]) -> Call:
    return replace(call, args=_known(call.args, local), makes=_known(call.makes, local))


def _known(numbers: Iterable[int], local: dict[int, int]) -> tuple[int, ...]:
    return tuple(local[number] for number in numbers if number in local)


def _position(position: Position, start: int, local: dict[int, int]) -> Position:
    releases: list[int] = []
    extras = position.extras[:1]
    for number, extra in zip(position.releases, position.extras[1:], strict=True):
        if number in local:
            releases.append(local[number])
            extras.append(extra)
        else:
            extras[-1] = max(extras[-1], extra)
    needs = list(_known(position.needs, local))
    return Position(position.call - start, position.incoming, needs, releases, extras)
