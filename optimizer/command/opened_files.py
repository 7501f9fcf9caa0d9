"""Watch which files the user's code opens."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any


@dataclass
class OpenedFiles:
    """The absolute paths that Python opened: `open`, imports, `torch.load`, but not libraries that open files in C.

    Attributes:
        read: opened for reading alone.
        written: opened for writing.
    """

    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)

    def data(self) -> set[Path]:
        """The regular files that were read and not written; of compiled sources, the sources."""
        return {source for path in self.read - self.written if (source := _source(path)).is_file()}


_watching: list[OpenedFiles] = []


@contextmanager
def opened_files() -> Iterator[OpenedFiles]:
    """Watch all threads of this process. Python can't remove an audit hook, so one stays, and does nothing later."""
    _add_hook()
    found = OpenedFiles()
    _watching.append(found)
    try:
        yield found
    finally:
        _watching.remove(found)


@cache
def _add_hook() -> None:
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _watching:
        return
    path, _, flags = arguments
    if isinstance(path, int):
        # The descriptor of a file that is open already.
        return
    full = os.path.abspath(os.fsdecode(path))
    for each in _watching:
        (each.written if (flags or 0) & (os.O_WRONLY | os.O_RDWR) else each.read).add(full)


def _source(path: str) -> Path:
    if path.endswith(".pyc"):
        try:
            return Path(source_from_cache(path))
        except ValueError:
            pass
    return Path(path)
