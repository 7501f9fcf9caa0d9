"""Write torch archives so that a full disk raises an error.

torch's own writer ends the process when the disk is full.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Maximum bytes of weights to write through memory.
WRITTEN_THROUGH_MEMORY = 100_000_000


def write_archive(path: Path, weights: int, in_memory: Callable[[], bytes], to_file: Callable[[str], object]) -> None:
    """Write an archive with this many bytes of weights to `path`.

    A small archive is written to memory first, where a full disk can't end the process. This briefly takes three times
    the memory of the weights. A large archive is written directly by torch, after its disk space was reserved.

    Raises:
        OSError: the file can't be written, for example because the disk is full.
    """
    if weights <= WRITTEN_THROUGH_MEMORY:
        path.write_bytes(in_memory())
    else:
        _reserve(path, weights + weights // 8)
        to_file(str(path))


def _reserve(path: Path, size: int) -> None:
    """Raise OSError, as any write does, if `path` can't hold `size` bytes."""
    if not hasattr(os, "posix_fallocate"):
        return
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    path.unlink()
