"""Paths of bundles, and the errors of the disk in one sentence."""

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from exporters.errors import ExporterError
from optimize_export.errors import BundleError, OptimizeExportError
from optimize_export.manifest import entries_below
from optimizer.paths import is_utf8

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def absolute(path: str | Path) -> Path:
    """Make a path absolute, with the home folder for `~`. If its last part is a symbolic link, it isn't followed.

    Raises:
        BundleError: the path contains a null character, can't be resolved or isn't UTF-8.
    """
    given = Path(os.path.expanduser(path))
    if "\0" in str(given):
        raise BundleError(f"{str(given)!r} is not a valid path: it contains a null character.")
    try:
        path = given.resolve() if given.name in {"", ".."} else given.parent.resolve() / given.name
    # Python before 3.13 raises RuntimeError for a loop of links.
    except (OSError, RuntimeError) as error:
        raise BundleError(f"{given} can't be resolved: {error}.") from error
    if not is_utf8(str(path)):
        raise BundleError(
            f"{path} isn't UTF-8, which the libraries that write and read a bundle need: use another path."
        )
    return path


@contextmanager
def bundle_errors(target: Path, done: str) -> Iterator[None]:
    """Turn an OSError into a one-sentence BundleError."""
    try:
        yield
    except OSError as error:
        raise BundleError(f"The bundle {target} can't be {done}: {_cause(error)}.") from error


def _cause(error: OSError) -> str:
    where = f" ({error.filename})" if isinstance(error.filename, str) and error.filename else ""
    known = {
        errno.EACCES: "this user may not write there; choose another folder or change its permissions",
        errno.EPERM: "the system doesn't allow it; choose another folder",
        errno.ENOTEMPTY: "another program wrote there at the same time; run again to replace its result",
        errno.EROFS: "the file system is read-only; choose another folder",
        errno.ENAMETOOLONG: "the path is too long; choose a shorter one",
        errno.ENOTDIR: "a part of the path is a file; choose another folder",
        errno.EBUSY: "the folder is in use by the system; choose another one",
        errno.ENOSPC: "the disk is full; free some space or choose another folder",
        errno.EDQUOT: "the disk quota is used up; free some space or choose another folder",
        errno.EFBIG: "a file is larger than the system allows here; raise the limit or choose another folder",
    }
    return known.get(error.errno or 0, error.strerror or str(error)) + where


@contextmanager
def disk_failures(target: Path, folder: Path) -> Iterator[None]:
    """Turn the errors that a failing disk causes in the writers into a one-sentence BundleError.

    The libraries that write artifacts wrap the system's error in their own error types. This searches the whole chain
    of causes for the error's number or text. The message gives file sizes, so it is built before the files are removed.
    """
    try:
        yield
    except Exception as error:
        code = _disk_error(error)
        if code == errno.ENOSPC:
            raise BundleError(_disk_full(target, folder)) from error
        if code is not None:
            raise BundleError(
                f"The bundle {target} can't be written: {_cause(OSError(code, os.strerror(code)))}."
            ) from error
        if isinstance(error, SafetensorError):
            raise BundleError(f"The bundle {target} can't be written: {error}.") from error
        raise


def _disk_error(error: BaseException) -> int | None:
    """The errno of the disk error that caused an exception; None if a disk error isn't the cause."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, OSError) and link.errno in _DISK_ERRORS:
            return link.errno
        found = None if isinstance(link, BundleError) else re.search(r"\(os error (\d+)\)", str(link))
        if found and int(found[1]) in _DISK_ERRORS:
            return int(found[1])
        if isinstance(link, OptimizeExportError | ExporterError | RuntimeError) and (code := _named_error(str(link))):
            return code
        link = link.__cause__ or link.__context__
    return None


def _named_error(text: str) -> int | None:
    return next((code for code in _DISK_ERRORS if os.strerror(code) in text), None)


def _disk_full(target: Path, folder: Path) -> str:
    written = sum(status.st_size for status in entries_below(folder).values() if stat.S_ISREG(status.st_mode))
    free = shutil.disk_usage(folder).free
    return (
        f"The bundle {target} can't be written: the disk is full ({_size(free)} are free after writing "
        f"{_size(written)}, which is too little); free some space or choose another folder."
    )


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
