"""What one forward keeps for its backward pass, and what it computes again there: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """What is done at one call of a torch function.

    Attributes:
        region: the regions that the call is computed again with, from the outermost to its own. Regions lie in one another:
            when one is computed, what lies in those around it is computed for good, and what lies in others only for the
            time that it takes.
        recomputed: its results aren't kept: they are computed again in the backward pass.
        internals: of what the call itself saves for its backward pass, in the order in which it saves, the numbers of those
            that aren't kept and are neither its arguments nor its results: casts under autocast, indices of a pooling.
        random: it draws random numbers: computed again, it draws the same.
    """

    region: tuple[int, ...] = ()
    recomputed: bool = False
    internals: frozenset[int] = frozenset()
    random: bool = False


@dataclass(frozen=True)
class Plan:
    """The steps of a forward, call by call.

    Attributes:
        names: the name of the torch function of each call, in order.
        steps: for each call what is done there; None where everything is as without a plan.
        synchronised: the numbers of the calls that a SyncBatchNorm makes, which are others where it synchronises.
    """

    names: tuple[str, ...]
    steps: tuple[Step | None, ...]
    synchronised: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.steps):
            raise ValueError(f"{len(self.names)} names for {len(self.steps)} steps")
