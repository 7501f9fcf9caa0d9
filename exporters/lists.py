"""Find where a model splits a tensor into as many tensors as an open size: `for row in x`, `x.unbind(1)`, `x.split(1)`.

Every capture freezes the number that it saw. It fails at other sizes without naming the line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from exporters.decisions import number_of_pieces
from exporters.isolation import eager_only, silent, undisturbed
from exporters.places import paths_of, place_of, user_frame

if TYPE_CHECKING:
    from exporters.evidence import Evidence


# Functions that split the dim that is their third argument, by default the first one.
_SPLITTING = frozenset({"split", "chunk", "tensor_split"})


@dataclass(frozen=True)
class _Split:
    """A call that splits a tensor: its place, the number of pieces, and the size of the dim that it splits.

    For rare functions, `size` has all sizes of the tensor.
    """

    place: str
    count: int
    size: tuple[int, ...]


class _Lists(TorchFunctionMode):
    """Record each call that splits a tensor."""

    def __init__(self, paths: dict[int, str]) -> None:
        super().__init__()
        self.seen: list[_Split] = []
        self._paths = paths

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = number_of_pieces(func, args, result)
        if count is not None and (frame := user_frame(sys._getframe(1))) is not None:
            size = _size(getattr(func, "__name__", ""), args, kwargs or {}, count)
            self.seen.append(_Split(place_of(frame, frame.f_lineno, self._paths), count, size))
        return result


def _size(name: str, args: Any, kwargs: Any, count: int) -> tuple[int, ...]:
    if name in ("__iter__", "unbind"):
        return (count,)
    shape = tuple(next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)).shape)
    return (shape[kwargs.get("dim", args[2] if len(args) > 2 else 0)],) if name in _SPLITTING else shape


def lists_as_long_as_a_size(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """For each open size that determines a number of tensors: its name, and a clause with the first place."""
    for view in evidence.along:
        if len(view.inputs) < 2:
            continue
        for one, other in zip(_seen(view, 0), _seen(view, 1), strict=False):
            if one.place != other.place:
                break
            if one.count != other.count:
                first, second = (view.at(batch) for batch in view.batches[:2])
                many = f"{one.count} tensors at {first} and {other.count} at {second}"
                yield view.size, f"the model splits a tensor at {one.place}, into {many}"
                break


def splits_an_open_dim(evidence: Evidence) -> bool:
    """Whether the size of a dim that the model splits changes between the calls."""
    return any(_seen(view, 0) != _seen(view, 1) for view in evidence.along)


def _seen(evidence: Evidence, call: int) -> Sequence[_Split]:
    with undisturbed(evidence.adapter), silent(), eager_only(), _Lists(paths_of(evidence.adapter.model)) as lists:
        evidence.adapter.run(evidence.inputs[call])
    return lists.seen
