"""The sizes at which open dims except the batch are checked: first each dim alone, then all together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from optimizer.model.inputs import Samples, Sizes
from optimizer.model.working_copy import Mode

# Maximum number of other sizes to check for a dim, as far as the original accepts them.
ENOUGH = 4


def ladder(given: int) -> tuple[int, ...]:
    """Other sizes than the given one, the most informative first.

    Some models accept no larger sizes, or only multiples.
    """
    sizes = (given + 1, 1, 2 * given, given // 2, 3 * given // 2, given - 1, 3 * given, 4 * given)
    return tuple(size for size in dict.fromkeys(sizes) if size > 0 and size != given)


@dataclass
class Taken:
    """The sizes at which the original ran.

    Attributes:
        batch: the batch size of the calls in which another size changes.
        given: the given size of each name.
        alone: for each name, the other sizes at which the original ran.
        together: batch size and sizes of the calls in which all sizes grow by equal steps.
    """

    batch: int | None
    given: Mapping[str, int]
    alone: dict[str, list[int]] = field(default_factory=dict)
    together: list[tuple[int | None, Sizes]] = field(default_factory=list)

    def base(self, name: str) -> int:
        """The size to trace at: the given one, or a larger one if that is 1, which every tracer treats specially."""
        larger = [size for size in self.alone.get(name, ()) if size > 1]
        return self.given[name] if self.given[name] > 1 or not larger else min(larger)

    def others(self, name: str) -> list[int]:
        """Sizes other than the base: at most two above 1, which show how the other sizes behave, and 1."""
        sizes = sorted({self.given[name], *self.alone.get(name, ())} - {self.base(name)})
        larger = [size for size in sizes if size > 1]
        return larger[:2] + ([1] if 1 in sizes else [])

    def bases(self) -> Sizes:
        return tuple((name, self.base(name)) for name in self.given)

    def steps(self, batch: int | None, batches: Iterable[int]) -> tuple[int, dict[str, int]]:
        """The growth of the batch and of each other size in one step; 0 if no larger size is known to work."""
        step = _step(batch, batches) if batch is not None else 0
        return step, {name: _step(self.base(name), self.alone.get(name, ())) for name in self.given}


def _step(base: int, others: Iterable[int]) -> int:
    return min((size - base for size in others if size > base), default=0)


def two_batch_sizes(samples: Samples, mode: Mode, asked: Sequence[int] | None) -> list[int] | None:
    """The batch size of the example inputs and a second one; None if the batch can't change.

    Args:
        asked: the user's batch sizes; the first that is neither 1 nor the given size is used.
    """
    given = samples.batch_size
    if not samples.dynamic or given is None:
        return None
    # Many models treat a batch of 1 specially. In training, 2 rows are special too: a BatchNorm over them gives plus
    # and minus one, and gradients that are mostly rounding error.
    default = given + 1 if mode == "training" else 2 if given != 2 else 3
    return [given, next((size for size in asked or () if size > 1 and size != given), default)]
