"""Archives that torch writes, written so that a full disk is an error.

torch's own writer ends the process when the disk is full.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Bytes of weights.
WRITTEN_THROUGH_MEMORY = 100_000_000


def write_archive(path: Path, weights: int, in_memory: Callable[[], bytes], to_file: Callable[[str], object]) -> None:
    """Write an archive of so many bytes of weights to `path`.

    Through memory, where a full disk ends nothing; that takes three times the weights for a moment, so large ones are
    written by torch after all, to a place that was made sure of.

    Raises:
        OSError: the disk is full, or the like.
    """
    if weights <= WRITTEN_THROUGH_MEMORY:
        path.write_bytes(in_memory())
    else:
        _reserve(path, weights + weights // 8)
        to_file(str(path))


def _reserve(path: Path, size: int) -> None:
    """Fail as any writing does, with an OSError, where `path` can't take `size` bytes."""
    if not hasattr(os, "posix_fallocate"):
        return
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    path.unlink()
