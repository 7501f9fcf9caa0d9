"""Find where a model splits a tensor into as many tensors as an open size: `for row in x`, `x.unbind(1)`, `x.split(1)`.

Every capture freezes the number that it saw. It fails at other sizes without naming the line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

from exporters.decisions import number_of_pieces
from exporters.isolation import eager_only, silent, undisturbed
from exporters.places import paths_of, place_of, user_frame

if TYPE_CHECKING:
    from exporters.evidence import Evidence


class _Lists(TorchFunctionMode):
    """Record each place where a function returns several tensors, with their number."""

    def __init__(self, paths: dict[int, str]) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self._paths = paths

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = number_of_pieces(func, args, result)
        if count is not None and (frame := user_frame(sys._getframe(1))) is not None:
            self.seen.append((place_of(frame, frame.f_lineno, self._paths), count))
        return result


def lists_as_long_as_a_size(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """For each open size that determines a number of tensors: its name, and a clause with the first place."""
    for view in evidence.along:
        if len(view.inputs) < 2:
            continue
        for (place, count), (again, other) in zip(_seen(view, 0), _seen(view, 1), strict=False):
            if place != again:
                break
            if count != other:
                many = f"{count} tensors at {view.at(view.batches[0])} and {other} at {view.at(view.batches[1])}"
                yield view.size, f"the model splits a tensor at {place}, into {many}"
                break


def _seen(evidence: Evidence, call: int) -> Sequence[tuple[str, int]]:
    with undisturbed(evidence.adapter), silent(), eager_only(), _Lists(paths_of(evidence.adapter.model)) as lists:
        evidence.adapter.run(evidence.inputs[call])
    return lists.seen
