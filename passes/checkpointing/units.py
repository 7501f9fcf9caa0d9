"""Plans for models that FSDP2 shards, where a unit has its whole parameters only while it runs."""

from __future__ import annotations

from passes.checkpointing.profile import Profile


def keep_between(profile: Profile, units: set[str]) -> None:
    """Exclude from recomputation the calls whose results leave their unit.

    A recomputation then needs no parameters of another unit. Calls outside of all units belong to the root, whose
    parameters stay whole from its forward to its backward pass.
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
            call.keep("a unit of fully_shard takes it from another one")


def _unit_of(path: str, units: set[str]) -> str | None:
    while path and path not in units:
        path = path.rpartition(".")[0]
    return path or None
