"""The dim of a value that holds the channels, after operations that only move or reshape values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from passes.graph.captured import argument, example_of, is_tensor, name_of
from passes.graph.effects import is_dropout_off, is_pure
from passes.graph.graph_rewriting import Node


@dataclass(frozen=True)
class Channels:
    """The dim of a tensor that holds the channels.

    Attributes:
        rank: the number of dims of the tensor.
        dim: the channel dim, counted from 0.
        count: the number of channels.
    """

    rank: int
    dim: int
    count: int

    def after(self, node: Node) -> Channels | None:
        """The channels after a move (see `is_move`); None if it may mix them with other values."""
        move: Channels | None = _MOVES[name_of(node)](self, node)
        return move


def is_move(node: Any) -> bool:
    """Whether the node is an operation that only moves or reshapes its first argument."""
    return name_of(node) in _MOVES and is_pure(node) and bool(node.args) and is_tensor(node.args[0])


def _as_they_are(channels: Channels, node: Node) -> Channels | None:
    return channels


def _without_draws(channels: Channels, node: Node) -> Channels | None:
    return channels if is_dropout_off(node) else None


def _swapped(channels: Channels, node: Node) -> Channels | None:
    dims = _dims(_others(node), channels.rank)
    if dims is None or len(dims) != 2:
        return None
    first, second = dims
    return Channels(channels.rank, {first: second, second: first}.get(channels.dim, channels.dim), channels.count)


def _permuted(channels: Channels, node: Node) -> Channels | None:
    dims = _dims(_listed(_others(node)), channels.rank)
    if dims is None or sorted(dims) != list(range(channels.rank)):
        return None
    return Channels(channels.rank, dims.index(channels.dim), channels.count)


def _flattened(channels: Channels, node: Node) -> Channels | None:
    given = [argument(node, 1, "start_dim", 0), argument(node, 2, "end_dim", -1)]
    dims = _dims(given, channels.rank)
    if dims is None or dims[0] > dims[1]:
        return None
    start, end = dims
    if start < end and start <= channels.dim <= end:
        return None
    gone = end - start
    return Channels(channels.rank - gone, channels.dim - (gone if channels.dim > end else 0), channels.count)


def _unsqueezed(channels: Channels, node: Node) -> Channels | None:
    dims = _dims(_others(node), channels.rank + 1)
    if dims is None or len(dims) != 1:
        return None
    return Channels(channels.rank + 1, channels.dim + (dims[0] <= channels.dim), channels.count)


def _regrouped(channels: Channels, node: Node) -> Channels | None:
    """`view` and `reshape` keep the channels if they are the last dim and its size doesn't change."""
    shape = example_of(node).shape
    if channels.dim != channels.rank - 1 or not shape or type(shape[-1]) is not int or shape[-1] != channels.count:
        return None
    return Channels(len(shape), len(shape) - 1, channels.count)


def _padded(channels: Channels, node: Node) -> Channels | None:
    """Padding with copies of the values keeps the channels; zeros don't belong to any channel."""
    widths, mode = argument(node, 1, "pad"), argument(node, 2, "mode", "constant")
    is_outside = isinstance(widths, list | tuple) and channels.dim < channels.rank - len(widths) // 2
    return channels if mode in ("reflect", "replicate", "circular") and is_outside else None


def _others(node: Node) -> list[Any]:
    return [*node.args[1:], *node.kwargs.values()]


def _listed(arguments: list[Any]) -> list[Any]:
    """Return dims as one list, whether they are given one by one or as a sequence."""
    return list(arguments[0]) if len(arguments) == 1 and isinstance(arguments[0], list | tuple) else arguments


def _dims(arguments: Sequence[Any], rank: int) -> list[int] | None:
    """The dims counted from 0; None if one of them is not a valid dim number."""
    if any(type(dim) is not int or not -rank <= dim < rank for dim in arguments):
        return None
    return [dim % rank for dim in arguments]


_MOVES = {
    "contiguous": _as_they_are, "clone": _as_they_are,
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), _without_draws),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout", "feature_dropout"), _without_draws),
    "transpose": _swapped, "swapaxes": _swapped, "swapdims": _swapped, "permute": _permuted,
    "flatten": _flattened, "unsqueeze": _unsqueezed, "view": _regrouped, "reshape": _regrouped, "pad": _padded,
}  # fmt: skip
