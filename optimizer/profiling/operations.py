"""The time of a run by operation and module, with repeated blocks in one row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"(\d+)")
# More numbers or ranges than this become a star.
_MOST_NUMBERS = 5


@dataclass(frozen=True)
class Operation:
    """One kind of operation, on inputs of the same shapes, in modules whose paths differ only in numbers.

    Attributes:
        name: "aten::conv2d", "ConvolutionBackward0", or the operator of an ONNX file.
        modules: the paths of the modules that call it, "" for the root; the names of the nodes of an ONNX file. Empty
            for operations outside of the model, such as those of the loss.
        calls: the number of calls in one run.
        seconds: the time of these calls.
        share: `seconds` divided by the time of the run, from 0 to 1.
    """

    name: str
    modules: tuple[str, ...]
    calls: int
    seconds: float
    share: float

    @property
    def where(self) -> str:
        """All modules as one path, such as "layers.{0..3,5}.conv1"."""
        return one_path(self.modules) if self.modules else "outside of the model"

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {
            "name": self.name,
            "where": self.where,
            "modules": list(self.modules),
            "calls": self.calls,
            "seconds": self.seconds,
            "share": self.share,
        }


def without_numbers(path: str) -> str:
    """The path with a star for each number."""
    return _NUMBER.sub("*", path)


def one_path(paths: Sequence[str]) -> str:
    """Write paths that differ only in numbers as one: "layers.{0..3,5}.conv1", or "layers.*.conv1" for many numbers."""
    columns = zip(*(_NUMBER.split(path) for path in paths), strict=True)
    return "".join(map(_one_of, columns)) or "the model itself"


def _one_of(texts: Sequence[str]) -> str:
    different = set(texts)
    if len(different) == 1:
        return texts[0]
    ranges: list[list[int]] = []
    for number in sorted(map(int, different)):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    shown = [f"{one[0]}..{one[-1]}" if len(one) > 2 else ",".join(map(str, one)) for one in ranges]
    return "*" if len(shown) > _MOST_NUMBERS else f"{{{','.join(shown)}}}"


@dataclass
class Spent:
    """The calls of one operation in one module, over all runs.

    Attributes:
        seconds: their time, without that of modules that they call.
        shapes: the shapes of the inputs of the first call.
    """

    calls: int = 0
    seconds: float = 0.0
    shapes: Any = ()


Place = tuple[str, str | None]
"""The name of an operation, and the path of a module; None outside of the model."""


def operations_of(spent: Mapping[Place, Spent], *, seconds: float, runs: int) -> tuple[Operation, ...]:
    """Put repeated blocks together, and sort by time, the most expensive first.

    Args:
        seconds: the time of one run, of which the operations have their shares.
        runs: the number of runs in `spent`.
    """
    groups: dict[tuple[Any, ...], list[Place]] = {}
    for place, each in spent.items():
        name, path = place
        groups.setdefault((name, path if path is None else without_numbers(path), str(each.shapes)), []).append(place)
    operations = []
    for places in groups.values():
        own = sum(spent[place].seconds for place in places) / runs
        calls = max(1, round(sum(spent[place].calls for place in places) / runs))
        modules = tuple(path for _, path in places if path is not None)
        operations.append(Operation(places[0][0], modules, calls, own, own / seconds if seconds else 0.0))
    return tuple(sorted(operations, key=lambda operation: -operation.seconds))
