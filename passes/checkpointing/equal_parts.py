"""Find equal parts of a step, such as the blocks of a transformer, so that each is solved once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from passes.checkpointing.profile import Call, Profile

# A value is identified by its distance if it was made at most this many parts back.
_NEAR = 10


@dataclass
class EqualParts:
    """The parts of a step between its cuts.

    Attributes:
        cuts: the indices of calls at which the forward is cut.
        turns: for each call, the places in the order of the step at which it takes part.
    """

    profile: Profile
    cuts: Sequence[int]
    turns: Sequence[Sequence[int]]

    def key(self, start: int, end: int) -> Hashable:
        """A key that is equal for equal ranges of parts."""
        first = self.cuts[start]
        far = tuple(ref for number in range(start, end) for ref in self._far[number] if ref[1] >= first)
        return (tuple(self._signatures[start:end]), end == len(self.cuts) - 1, start if far else None)

    @cached_property
    def _signatures(self) -> list[int]:
        """A number for each part, the same for equal parts."""
        known: dict[Hashable, int] = {}
        found = []
        for number in range(len(self.cuts) - 1):
            signature = self._signature(number)
            found.append(known.setdefault(signature, len(known)))
        return found

    @cached_property
    def _far(self) -> list[list[tuple[int, int]]]:
        """For each part, the calls that take a value from far back, each with the call that made the value."""
        values, found = self.profile.values, []
        for number in range(len(self.cuts) - 1):
            near = self.cuts[max(number - _NEAR, 0)]
            calls = range(self.cuts[number], self.cuts[number + 1])
            refs = ((call, values[arg].call) for call in calls for arg in self.profile.calls[call].args)
            found.append([ref for ref in refs if ref[1] < near])
        return found

    def _signature(self, number: int) -> Hashable:
        start, end = self.cuts[number], self.cuts[number + 1]
        near = self.cuts[max(number - _NEAR, 0)]
        profile, turns = self.profile, self.turns
        last = end + (end == len(profile.calls))
        places = sorted(turn for call in range(start, last) for turn in turns[call])
        base = places[0] if places else 0
        # Values are identified by how far back they were made.
        made = profile.calls[start].makes or (0,)
        origin = next((call.makes[0] for call in profile.calls[start:end] if call.makes), made[0])

        def called(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(value - origin for value in values if profile.values[value].call >= near)

        def described(call: Call) -> Hashable:
            makes = tuple(
                (
                    value.size, value.numbers, value.python - start, max(value.until - base, -1), value.held, value.keepable,
                    tuple(saver - start for saver in value.savers),
                )
                for value in (profile.values[made] for made in call.makes)
            )  # fmt: skip
            return (
                call.flops, call.cost, call.inner, call.alone, call.early, called(call.args), makes, call.repeatable, call.random, call.writes, call.spare,
            )  # fmt: skip

        turn = tuple(
            (
                place - base,
                item.call - start,
                item.incoming,
                called(item.needs),
                called(item.releases),
                tuple(item.extras),
            )
            for place in places
            for item in (profile.order[place],)
        )
        return tuple(described(call) for call in profile.calls[start:end]), turn
