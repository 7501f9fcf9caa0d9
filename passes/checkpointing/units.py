"""Plans for models that FSDP2 shards, whose units have their parameters whole in their own time only."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from passes.checkpointing.profile import Profile


def units_among(paths: Iterable[str], pattern: str) -> set[str]:
    """The paths that a pattern such as `"stem|layers.*"` means: `*` stands for one name, or a part of it."""
    wanted = [one.strip().split(".") for one in pattern.split("|")]
    return {path for path in paths if any(_matches(path.split("."), one) for one in wanted)}


def _matches(path: list[str], wanted: list[str]) -> bool:
    return len(path) == len(wanted) and all(map(fnmatchcase, path, wanted))


def keep_between(profile: Profile, units: set[str]) -> None:
    """Let no call be computed again whose results leave its unit: what is computed again needs no other unit's parameters.

    What belongs to no unit is the root's, whose parameters stay whole from its forward to its backward pass.
    """
    homes = [_unit_of(call.path, units) for call in profile.calls]
    users: list[set[str | None]] = [set() for _ in profile.calls]
    for call, home in zip(profile.calls, homes, strict=True):
        for value in call.args:
            users[profile.values[value].call].add(home)
    for made in profile.values:
        users[made.call].update(homes[saver] for saver in made.savers)
    for call, home, using in zip(profile.calls, homes, users, strict=True):
        if home is not None and using - {home}:
            call.repeatable = False


def _unit_of(path: str, units: set[str]) -> str | None:
    while path and path not in units:
        path = path.rpartition(".")[0]
    return path or None
