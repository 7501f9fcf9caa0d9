"""Open files that a stranger may have written: regular files only, without following a link or waiting for a FIFO."""

import io
import os
import stat
from pathlib import Path

# A manifest has about 40 kB for a model with three formats; a file of gigabytes would fill the memory.
LARGEST_TEXT = 64 << 20

# Those that the system has.
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading.

    The type is checked twice: before, as opening a device may already do something, and on the open file, as another
    process may have exchanged it.

    Raises:
        OSError: it is a link, a FIFO, a device or another thing that isn't a regular file, or it can't be read.
    """
    _refuse_irregular(path, os.lstat(path))
    descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        _refuse_irregular(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_text_bytes(path: Path) -> bytes:
    """The bytes of a regular file of at most `LARGEST_TEXT` bytes.

    Raises:
        OSError: as for `open_regular`, or it is larger.
    """
    with open_regular(path) as file:
        data = file.read(LARGEST_TEXT + 1)
    if len(data) > LARGEST_TEXT:
        raise OSError(0, f"it has more than {LARGEST_TEXT >> 20} MiB", str(path))
    return data


def _refuse_irregular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "it is not a regular file", str(path))
