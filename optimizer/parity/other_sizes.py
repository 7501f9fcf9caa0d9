"""Run the original at other sizes of its open dims."""

from __future__ import annotations

from optimizer.model import ENOUGH, Sizes, Taken, ladder
from optimizer.parity.original import Original


def run_other_sizes(original: Original) -> Taken:
    """Run the original at other sizes of its open dims except the batch: each dim alone, then all growing together."""
    samples = original.samples
    assert samples is not None
    batches = [one.batch_size for one in original.calls if one.batch_size is not None]
    larger = sorted(size for size in batches if size > 1)
    batch = samples.batch_size if samples.batch_size in larger or not larger else larger[0]
    taken = Taken(batch, samples.sizes)
    original.base_batch = batch
    if not original.calls:
        return taken
    for name, given in samples.sizes.items():
        worked = taken.alone.setdefault(name, [])
        for size in ladder(given):
            if len(worked) < ENOUGH and _run_at(original, batch, ((name, size),)):
                worked.append(size)
    step, steps = taken.steps(batch, batches)
    if samples.sizes and (step > 0) + sum(size > 0 for size in steps.values()) > 1:
        for count in (1, 2):
            sizes = tuple((name, taken.base(name) + count * size) for name, size in steps.items())
            rows = None if batch is None else batch + count * step
            if not _run_at(original, rows, sizes):
                break
            taken.together.append((rows, sizes))
    for name, worked in taken.alone.items():
        sizes_told = ", ".join(map(str, sorted({taken.given[name], *worked})))
        original.notes.append(f"{name} was checked at the sizes {sizes_told}.")
    return taken


def _run_at(original: Original, batch_size: int | None, sizes: Sizes) -> bool:
    assert original.samples is not None
    return original.run(batch_size, 0, original.samples.at(batch_size, 0, sizes), sizes=sizes)
