"""The plan of a forward, as plain data: what is kept for the backward pass, and what is recomputed there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """What a tape does at one call of a torch function.

    Attributes:
        region: the nested regions in which the call is recomputed, from the outermost to its own. When a value of a
            region is computed, the values that it needs in this region and the surrounding ones stay. Values of other
            regions are computed temporarily.
        recomputed: whether its results are dropped, and recomputed in the backward pass.
        internals: which of the tensors that the call itself saves for its backward pass are dropped, by their index in
            the order of saving. They are neither its arguments nor its results: casts under autocast, indices of a
            pooling.
        random: whether it draws random numbers; if recomputed, it draws the same ones.
    """

    region: tuple[int, ...] = ()
    recomputed: bool = False
    internals: frozenset[int] = frozenset()
    random: bool = False


@dataclass(frozen=True)
class Plan:
    """The steps of a forward, one for each call.

    Attributes:
        names: the name of the torch function of each call, in order.
        steps: the step of each call; None if the call runs as without a plan.
        synchronised: the numbers of the calls that a SyncBatchNorm makes. Where it synchronises, it makes other calls.
    """

    names: tuple[str, ...]
    steps: tuple[Step | None, ...]
    synchronised: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.steps):
            raise ValueError(f"{len(self.names)} names for {len(self.steps)} steps")
