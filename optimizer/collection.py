"""Python's search for cyclic garbage while graphs are built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects made between two searches of the youngest generation; Python's own number is 700 (2,000 from 3.13 on).
_RARELY = 100_000


@contextmanager
def rare_collection() -> Iterator[None]:
    """Let the collector look seldom for the time of the block.

    Graphs are many small objects that live on: each search walks them and finds nothing, which makes the cost of one
    operation grow with the size of the graph. Seldom isn't never, so memory stays bounded. A collector that the caller
    turned off stays off.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _RARELY:
        # Off, or some other thread is inside: what this one would put back isn't its own.
        yield
        return
    gc.set_threshold(_RARELY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
