"""Memory: rare garbage collection while graphs are built, and freed memory that goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Allocations between two collections of the youngest generation. Python's default is 700 (2,000 from 3.13 on).
_RARELY = 100_000


@contextmanager
def rare_collection() -> Iterator[None]:
    """Collect cyclic garbage rarely inside the block.

    A graph consists of many small objects that stay alive. Each collection visits them and frees nothing, so that the
    cost of one operation grows with the size of the graph. Rare collections still bound the memory. A collector that
    the caller turned off stays off.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _RARELY:
        # The collector is off, or another thread is inside the block and restores the threshold.
        yield
        return
    gc.set_threshold(_RARELY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def release_memory() -> None:
    """Return freed memory that the C library keeps to the operating system.

    After many tensors of different sizes, glibc keeps freed memory in gaps between blocks in use: 200 MB after the
    proof of a ResNet-50. A runtime that loads a file next would need its own memory in addition.
    """
    if sys.platform == "linux":
        # Other C libraries have no such function, and a statically linked Python has no library to ask.
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
