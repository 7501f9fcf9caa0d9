"""Pairs of a layer and a BatchNorm: in a recorded run."""

from collections.abc import Collection, Iterator

from torch.fx import Node

from passes.program.matching import Pair, pair_in_front
from passes.program.recording import Recording


def pairs_in_front(recording: Recording, folded: Collection[Node] = ()) -> Iterator[Pair]:
    """All pairs of a layer and the BatchNorm before it."""
    return filter(None, (pair_in_front(node, folded) for node in recording.nodes()))
