"""Which sizes of the open dims beside the batch are looked at: each by itself, then all together."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from optimizer.inputs import Sizes

# So many other sizes of a dim are looked at, if the original takes so many.
ENOUGH = 4


def ladder(given: int) -> tuple[int, ...]:
    """Other sizes than the given one, the most telling first; some models take no larger ones, or multiples only."""
    sizes = (given + 1, 1, 2 * given, given // 2, 3 * given // 2, given - 1, 3 * given, 4 * given)
    return tuple(size for size in dict.fromkeys(sizes) if size > 0 and size != given)


@dataclass
class Taken:
    """The sizes at which the original could be run.

    Attributes:
        batch: the batch size of those calls in which another size is another one.
        given: the given size by name.
        alone: by name the other sizes at which it was run.
        together: batch size and sizes of the calls in which all grow by equal steps.
    """

    batch: int | None
    given: Mapping[str, int]
    alone: dict[str, list[int]] = field(default_factory=dict)
    together: list[tuple[int | None, Sizes]] = field(default_factory=list)

    def base(self, name: str) -> int:
        """The size to trace at: the given one, or a larger one where that is 1, which is special to every tracer."""
        larger = [size for size in self.alone.get(name, ()) if size > 1]
        return self.given[name] if self.given[name] > 1 or not larger else min(larger)

    def others(self, name: str) -> list[int]:
        """Sizes beside that one: two that show how the rest goes, and 1."""
        sizes = sorted({self.given[name], *self.alone.get(name, ())} - {self.base(name)})
        larger = [size for size in sizes if size > 1]
        return larger[:2] + ([1] if 1 in sizes else [])

    def bases(self) -> Sizes:
        return tuple((name, self.base(name)) for name in self.given)

    def steps(self, batch: int | None, batches: Iterable[int]) -> tuple[int, dict[str, int]]:
        """By how much the batch and each other size grow in one step; 0 where none larger is known to work."""
        step = _step(batch, batches) if batch is not None else 0
        return step, {name: _step(self.base(name), self.alone.get(name, ())) for name in self.given}


def _step(base: int, others: Iterable[int]) -> int:
    return min((size - base for size in others if size > base), default=0)
