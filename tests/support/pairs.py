"""Pairs of a layer and a BatchNorm: in a recorded run, and in a result."""

from collections.abc import Collection, Iterator

from torch import nn
from torch.fx import Node

from passes.program.folded import FoldedNormForward
from passes.program.forwards import inner_forward
from passes.program.matching import Pair, pair_in_front
from passes.program.recording import Recording


def pairs_in_front(recording: Recording, folded: Collection[Node] = ()) -> Iterator[Pair]:
    """All pairs of a layer and the BatchNorm before it."""
    return filter(None, (pair_in_front(node, folded) for node in recording.nodes()))


def is_carried(module: nn.Module) -> bool:
    """Whether the module is a BatchNorm whose work a layer does, so that it returns its input."""
    forward = inner_forward(module)
    return isinstance(forward, FoldedNormForward) and forward.carried
