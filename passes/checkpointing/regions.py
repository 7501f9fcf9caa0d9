"""Describe the regions of a choice: the calls that are recomputed together, in terms of modules and functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from passes.checkpointing.budget import shown
from passes.checkpointing.choice import Choice
from passes.checkpointing.profile import Profile

_MOST_NAMES = 4


@dataclass(frozen=True)
class RegionRecord:
    """Calls that are recomputed together.

    Attributes:
        path: the path of the innermost module that contains them all.
        calls: the names of their functions.
        dropped: the bytes that aren't kept for the backward pass.
        flops: the FLOPs of the recomputation.
    """

    path: str
    calls: tuple[str, ...]
    dropped: int
    flops: int

    @property
    def names(self) -> str:
        """A short list of the calls."""
        counts = Counter(self.calls).most_common()
        names = [name if count == 1 else f"{count} {name}" for name, count in counts[:_MOST_NAMES]]
        rest = len(self.calls) - sum(count for _, count in counts[:_MOST_NAMES])
        return ", ".join([*names, f"{rest} more"] if rest else names)

    @property
    def text(self) -> str:
        """A short description of the region."""
        return f"recomputes {self.names}: {shown(self.dropped)} less to keep"


def regions_of(profile: Profile, choice: Choice) -> list[RegionRecord]:
    """The outermost regions of a choice, in the order of the forward, without those that save no memory."""
    members: dict[int, list[int]] = {}
    for index, (again, region) in enumerate(zip(choice.recomputed, choice.regions, strict=True)):
        if again:
            members.setdefault(region[0] if region else 0, []).append(index)
    found = [_record(profile, calls) for _, calls in sorted(members.items())]
    return [record for record in found if record.dropped]


def _record(profile: Profile, members: Sequence[int]) -> RegionRecord:
    calls = [profile.calls[index] for index in members]
    values = [profile.values[number] for call in calls for number in call.makes]
    dropped = sum(value.size for value in values if value.savers and value.numbers)
    paths = [call.path.split(".") if call.path else [] for call in calls]
    return RegionRecord(
        ".".join(_common(paths)), tuple(call.name for call in calls), dropped, sum(call.flops for call in calls)
    )


def _common(paths: Sequence[list[str]]) -> list[str]:
    first, last = min(paths), max(paths)
    return [
        a for number, (a, b) in enumerate(zip(first, last, strict=False)) if first[: number + 1] == last[: number + 1]
    ]
