"""Conditions on sizes: those under which a capture takes the model's path, and the guards of captured programs.

"Batch" here means any size that grows: the size of another open dim, or the step number when all sizes grow together.
Guards are comparisons of input sizes as Python source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

# Every batch up to the first number is checked, then powers of two up to the second. Numbers near these and near
# hints are checked, too.
_EVERY_BATCH_TO = 64
_LARGEST = 1 << 20


@dataclass(frozen=True)
class Condition:
    """An assumption that a capture made."""

    # The condition or its location in the source, for messages.
    what: str
    # Whether it holds at a batch.
    holds: Callable[[int], bool]
    # Batches worth checking, such as a number that the batch is compared with.
    hints: frozenset[int] = frozenset()
    # The index of the view in `Evidence.along` whose size the condition is about.
    along: int = 0
    # The condition as a relation of sizes by name: `4096*batch <= 2147483648`; "" if a bundle can't declare it.
    relation: str = ""


@dataclass(frozen=True)
class Line:
    """A size as a function of the batch: `slope` * batch + `start`."""

    slope: int
    start: int

    def at(self, batch: int) -> int:
        return self.slope * batch + self.start

    def batch_of(self, size: int) -> int | None:
        """The batch at which the size occurs, rounded down; None if the size doesn't depend on the batch."""
        return (size - self.start) // self.slope if self.slope else None


def line_through(batches: Sequence[int], sizes: Sequence[int]) -> Line | None:
    """The line with integer slope and start through the sizes at these batches; None if there is none."""
    if len(set(sizes)) == 1:
        return Line(0, sizes[0])
    points = list(zip(batches, sizes, strict=False))
    # The first open dim may keep its size where another one changes.
    other = next((point for point in points if point[0] != batches[0]), None)
    if other is None:
        return None
    slope, rest = divmod(other[1] - sizes[0], other[0] - batches[0])
    line = Line(slope, sizes[0] - slope * batches[0])
    fits = not rest and all(line.at(batch) == size for batch, size in points)
    return line if fits else None


def batches_near(sizes: Iterable[int], lines: Iterable[Line]) -> frozenset[int]:
    """The batches at which one of the lines reaches one of the sizes: hints for a condition that compares them."""
    lines = list(lines)
    return frozenset(batch for size in sizes for line in lines if (batch := line.batch_of(size)) is not None)


def breaks(condition: Condition) -> Iterator[int]:
    """The batches that break a condition, in ascending order.

    Above 64, only some candidates are checked. If the condition holds at one candidate and breaks at the next,
    bisection finds the first batch that breaks it.
    """
    yield from (batch for batch in range(1, _EVERY_BATCH_TO + 1) if not condition.holds(batch))
    held = _EVERY_BATCH_TO if condition.holds(_EVERY_BATCH_TO) else 0
    for batch in _far_batches(condition.hints):
        if condition.holds(batch):
            held = batch
        else:
            yield batch if held == 0 else _turning_point(condition, held, batch)
            held = 0


def _far_batches(hints: Iterable[int]) -> list[int]:
    power = _EVERY_BATCH_TO * 2
    found = {hint + step for hint in hints for step in (-1, 0, 1, 2)}
    while power <= _LARGEST:
        found.update((power - 1, power, power + 1))
        power *= 2
    return sorted(batch for batch in found if batch > _EVERY_BATCH_TO)


def _turning_point(condition: Condition, holds: int, breaks: int) -> int:
    """The first batch that breaks the condition, if it changes once between a batch that holds and one that breaks."""
    while breaks - holds > 1:
        middle = (holds + breaks) // 2
        if condition.holds(middle):
            holds = middle
        else:
            breaks = middle
    return breaks


class UnreadableGuard(ValueError):
    """A guard compares something other than input sizes; the message is a clause."""


@dataclass(frozen=True)
class _Sized:
    """Placeholder for an input in a guard."""

    shape: Sequence[int]

    def size(self) -> Sequence[int]:
        return self.shape


class _Torch:
    """The functions of torch in guards, as they are for numbers: `int(n / 4)` is `trunc(sym_float(n) / 4)`."""

    sym_float, sym_int, sym_max, sym_min = float, int, max, min


def guard_holds(guard: str, sizes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a guard holds for inputs of these sizes, by parameter name.

    The guard comes from torch, or from a file that can run any code when it is loaded, so it is passed to `eval`.

    Raises:
        UnreadableGuard: it reads something other than sizes.
        ArithmeticError: it is undefined at these sizes (a division by zero).
    """
    names = {
        "L": {name: _Sized(shape) for name, shape in sizes.items()},
        **{"len": len, "max": max, "min": min, "math": math, "torch": _Torch},
    }
    try:
        return bool(eval(guard, {"__builtins__": {}, **names}))
    except ArithmeticError:
        raise
    except Exception as error:
        raise UnreadableGuard(f"`{guard[:80]}` is not a comparison of sizes") from error
