"""Open files from untrusted sources: only regular files, of a limited size, without blocking on a FIFO."""

import io
import os
import stat
from pathlib import Path

# The manifest of a model in three formats has about 40 kB. A file of several gigabytes would fill the memory.
LARGEST_TEXT = 64 << 20

# The flags that this operating system supports.
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOCTTY", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


def open_regular(path: Path, *, follow: bool = False) -> io.BufferedReader:
    """Open a regular file for reading.

    The type is checked twice: before opening, because opening a device may already have an effect, and again on the
    open file, because another process may have replaced the file in between.

    Args:
        follow: accept a link to a regular file. The files of a bundle are never links; files that the user names may be.

    Raises:
        OSError: the path isn't a regular file (but a FIFO, a device, a socket, a folder), or it can't be read.
    """
    _refuse_irregular(path, os.stat(path, follow_symlinks=follow))
    descriptor = os.open(path, os.O_RDONLY | (_FLAGS if follow else _FLAGS | _NO_LINKS))
    try:
        _refuse_irregular(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_text_bytes(path: Path, *, follow: bool = False) -> bytes:
    """Read a regular file of at most `LARGEST_TEXT` bytes.

    Raises:
        OSError: as for `open_regular`, or the file is larger.
    """
    with open_regular(path, follow=follow) as file:
        data = file.read(LARGEST_TEXT + 1)
    if len(data) > LARGEST_TEXT:
        raise OSError(0, f"it has more than {LARGEST_TEXT >> 20} MiB", str(path))
    return data


def _refuse_irregular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "it is not a regular file", str(path))
