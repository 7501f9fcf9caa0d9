"""Operations that only move or reshape data, and the position of the channels after them.

The matcher applies these rules to the nodes of a recorded graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


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

    def behind(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Channels | None:
        """The channels after an operation of `_MOVES`; None if the operation may mix them with other values.

        Args:
            name: the name of the tensor method; `move_named` gives it for functions.
            args, kwargs: the arguments other than the tensor.
        """
        return _MOVES[name](self, [*args, *kwargs.values()] if name not in _BY_NAME else [dict(kwargs), *args])


def _as_they_are(channels: Channels, arguments: list[Any]) -> Channels | None:
    return channels


def _without_draws(channels: Channels, arguments: list[Any]) -> Channels | None:
    """A dropout keeps the channels if it is off; its arguments are (input, p, training, inplace)."""
    named, *others = arguments
    training = named.get("training", others[1] if len(others) > 1 else True)
    return channels if training is False else None


def _swapped(channels: Channels, arguments: list[Any]) -> Channels | None:
    dims = _dims(arguments, channels.rank)
    if dims is None or len(dims) != 2:
        return None
    first, second = dims
    dim = {first: second, second: first}.get(channels.dim, channels.dim)
    return Channels(channels.rank, dim, channels.count)


def _permuted(channels: Channels, arguments: list[Any]) -> Channels | None:
    dims = _dims(_listed(arguments), channels.rank)
    if dims is None or sorted(dims) != list(range(channels.rank)):
        return None
    return Channels(channels.rank, dims.index(channels.dim), channels.count)


def _flattened(channels: Channels, arguments: list[Any]) -> Channels | None:
    named, *others = arguments
    given = [named.get("start_dim", 0), named.get("end_dim", -1)]
    given[: len(others)] = others
    dims = _dims(given, channels.rank)
    if dims is None or dims[0] > dims[1]:
        return None
    start, end = dims
    if start < end and start <= channels.dim <= end:
        return None
    gone = end - start
    return Channels(channels.rank - gone, channels.dim - (gone if channels.dim > end else 0), channels.count)


def _unsqueezed(channels: Channels, arguments: list[Any]) -> Channels | None:
    dims = _dims(arguments, channels.rank + 1)
    if dims is None or len(dims) != 1:
        return None
    return Channels(channels.rank + 1, channels.dim + (dims[0] <= channels.dim), channels.count)


def _regrouped(channels: Channels, arguments: list[Any]) -> Channels | None:
    """`view` and `reshape` keep the channels if they are the last dim and its size doesn't change."""
    sizes = _listed(arguments)
    is_last = channels.dim == channels.rank - 1
    if not is_last or not sizes or type(sizes[-1]) is not int or sizes[-1] != channels.count:
        return None
    return Channels(len(sizes), len(sizes) - 1, channels.count)


def _listed(arguments: list[Any]) -> list[Any]:
    """Return dims or sizes as one list, whether they are given one by one or as a sequence."""
    return list(arguments[0]) if len(arguments) == 1 and isinstance(arguments[0], list | tuple) else arguments


def _dims(arguments: Sequence[Any], rank: int) -> list[int] | None:
    """The dims counted from 0; None if one of them is not a valid dim number."""
    if any(type(dim) is not int or not -rank <= dim < rank for dim in arguments):
        return None
    return [dim % rank for dim in arguments]


_MOVES: dict[str, Any] = {
    "contiguous": _as_they_are, "clone": _as_they_are, "dropout": _without_draws,
    "transpose": _swapped, "swapaxes": _swapped, "swapdims": _swapped, "permute": _permuted,
    "flatten": _flattened, "unsqueeze": _unsqueezed, "view": _regrouped, "reshape": _regrouped,
}  # fmt: skip
# Operations with optional arguments, which are looked up by name.
_BY_NAME = frozenset({"dropout", "flatten"})
# The operations that are tensor methods.
METHODS = frozenset(_MOVES) - {"dropout"}
_FUNCTIONS: dict[Any, str] = {
    **{getattr(torch, name): name for name in METHODS - {"contiguous", "view"}},
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout), "dropout"),
    F.feature_alpha_dropout: "dropout",
    torch.dropout: "dropout",
}  # fmt: skip
# Methods that use only the shape of their second argument.
SHAPED_AS = frozenset({"reshape_as", "view_as", "expand_as"})


def move_named(function: Any) -> str | None:
    """The name of the move that a function of torch makes; None for any other function."""
    return _FUNCTIONS.get(function) if function.__hash__ is not None else None
