"""Watch which files the user's code opens."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        written: opened for writing, or replaced by another file.
    """

    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)

    def data(self) -> set[Path]:
        """The regular files that were read and not written; of compiled sources, the sources."""
        sources = map(_source, self.read - self.written)
        # Opening some of them failed.
        return {Path(path) for path in sources if os.path.isfile(path)}


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
    if event not in ("open", "os.rename") or not _watching:
        return
    if event == "open":
        path, _, flags = arguments
        is_written = bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))
    else:
        # Another file is moved to the place.
        path, is_written = arguments[1], True
    # Other paths are descriptors of files that are open already.
    if isinstance(path, str | bytes | os.PathLike):
        full = os.path.abspath(os.fsdecode(path))
        for each in _watching:
            (each.written if is_written else each.read).add(full)


def _source(path: str) -> str:
    if path.endswith(".pyc"):
        with suppress(ValueError):
            return source_from_cache(path)
    return path
