"""Replace a folder by a finished one: write it next to the target, then exchange the two.

    parent/NAME                                  the target
    parent/.NAME.RANDOM.optimize-export/         the staging place, next to the target on the same file system
        lock                                     names the target; locked while the writer lives
        new/                                     the new folder; after the exchange, the replaced one
        old/                                     the replaced folder, between two renames

On Linux, `renameat2` exchanges two folders in one step: after a crash the target is either the old folder or the new one.
Systems and file systems without it need two renames. After a crash between them the target is missing and both folders
are complete, and `recover` moves the new one to the target.

A lock (`flock`) ends with its process, so the next writer of a target knows the leftovers of killed ones and removes
them. A lock on the parent folder lets one process at a time exchange. Where there are no such locks (Windows, some network
file systems), leftovers stay.
"""

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from optimize_export.errors import BundleError, with_causes

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

SUFFIX = ".optimize-export"
# A pattern for the names of all staging places.
STAGING = f".*{SUFFIX}"
LOCK = "lock"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# The errors of a kernel, file system or sandbox that doesn't support an operation. All other errors are real ones.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM})
# A disk that fails, and not a place that may not be written.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
# Another writer holds the lock of the parent folder while it hashes the replaced bundle, which takes seconds.
_LONGEST_WAIT_SECONDS = 60.0

# The targets at which this process has put a new folder: an interrupt after that doesn't undo it.
published: set[Path] = set()


@contextlib.contextmanager
def replacement(target: Path, may_replace: Callable[[Path], None]) -> Iterator[Path]:
    """Yield an empty folder next to `target`, an absolute path, and move it to the target at the end of the block.

    If the block raises, the target stays as it is, and the new folder and the parent folders made for it are removed.

    `may_replace` raises if a folder must not be replaced. It checks the target first, and then the folder that was
    actually moved away. If it refuses that one, the exchange is undone. So no folder is deleted that it hasn't checked.
    """
    missing = [folder for folder in target.parents if not os.path.lexists(folder)]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _staging(target) as folder:
            yield folder
            sync_tree(folder)
            with _locked(target.parent):
                _publish(folder, target, may_replace)
                for parent in target.parents[: len(missing) + 1]:
                    sync_folder(parent)
    except BaseException:
        for parent in missing:
            # It isn't empty if another process has written to it.
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def staging_name(target: Path) -> str:
    """A random hidden name for the staging place, short enough even if the target's name has the maximum length."""
    return f".{target.name[:40]}.{secrets.token_hex(4)}{SUFFIX}"


@contextlib.contextmanager
def _staging(target: Path) -> Iterator[Path]:
    place = target.parent / staging_name(target)
    lock = None
    try:
        with _locked(target.parent):
            _finish_interrupted(target)
            for leftover in _leftovers(target):
                _remove(leftover)
            place.mkdir()
            lock = os.open(place / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            _lock(lock)
            os.write(lock, os.fsencode(target.name))
        (place / "new").mkdir()
        yield place / "new"
    finally:
        if _is_halfway(place, target):
            logger.warning("The previous contents of %s couldn't be restored; they are in %s.", target, place / "old")
        else:
            _remove(place)
        if lock is not None:
            os.close(lock)


def _remove(place: Path) -> None:
    # The lock file last, so that the next writer recognizes what a crash leaves.
    try:
        for folder in (place / "old", place / "new"):
            if folder.exists():
                shutil.rmtree(folder)
        (place / LOCK).unlink(missing_ok=True)
        place.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s couldn't be removed (%s); you can delete it by hand.", place, error.strerror or error)


# ---------------------------------------------------------------------------------------------------- after a crash


def recover(target: Path) -> None:
    """Finish an exchange whose writer ended between the two renames: move the complete new folder to the target."""
    if not os.path.lexists(target) and _leftovers(target):
        with _locked(target.parent):
            _finish_interrupted(target)


def _finish_interrupted(target: Path) -> None:
    for place in _leftovers(target):
        if _is_halfway(place, target):
            os.rename(place / "new", target)
            sync_folder(target.parent)


def _is_halfway(place: Path, target: Path) -> bool:
    return not os.path.lexists(target) and (place / "old").is_dir() and (place / "new").is_dir()


def _leftovers(target: Path) -> list[Path]:
    """The staging places of writers of this target that have ended."""
    try:
        names = sorted(name for name in os.listdir(target.parent) if name.startswith(".") and name.endswith(SUFFIX))
    except OSError:
        return []
    return [place for name in names if _is_leftover(place := target.parent / name, target)]


def _is_leftover(place: Path, target: Path) -> bool:
    """Whether the lock file names this target and no process holds it; False where that can't be known."""
    try:
        handle = os.open(place / LOCK, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return False
    try:
        # Only a file has contents to read: a FIFO or a device is nothing that this program made. A writer that was
        # killed at once leaves an empty file.
        own = stat.S_ISREG(os.fstat(handle).st_mode) and os.read(handle, 1024) in (b"", os.fsencode(target.name))
        return own and _lock(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder if the system supports that. Other writers wait for it, and readers after a crash."""
    handle = None
    # Windows opens no folders.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
    try:
        if handle is not None:
            _lock(handle, seconds=_LONGEST_WAIT_SECONDS)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _lock(handle: int, *, seconds: float = 0) -> bool:
    """Lock an open file until it is closed. Returns False if another process has it locked, or there are no locks."""
    if sys.platform == "win32":
        return False
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        except OSError:
            return False
        else:
            return True


# ----------------------------------------------------------------------------------------------------- the exchange


def _publish(folder: Path, target: Path, may_replace: Callable[[Path], None]) -> None:
    if not os.path.lexists(target) or is_empty_folder(target):
        if os.name != "posix" and is_empty_folder(target):
            target.rmdir()
        os.rename(folder, target)
    else:
        may_replace(target)
        _exchange(folder, target)
        try:
            may_replace(folder)
        except BaseException:
            _exchange(folder, target)
            raise
    published.add(target)


def is_empty_folder(path: Path) -> bool:
    """Whether the path is an empty folder, and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode) and not os.listdir(path)
    except OSError:
        return False


def _exchange(first: Path, second: Path) -> None:
    if _exchange_in_one_step(first, second):
        return
    old = first.with_name("old")
    try:
        os.rename(second, old)
        os.rename(first, second)
        os.rename(old, first)
    except BaseException:
        if old.is_dir():
            if not first.exists():
                os.rename(second, first)
            os.rename(old, second)
        raise


def _exchange_in_one_step(first: Path, second: Path) -> bool:
    """Exchange two folders atomically; return False if the system doesn't support that."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(second))


# ------------------------------------------------------------------------------------------------- flushing to disk


def sync_tree(folder: Path) -> None:
    """Flush every file and folder of a tree to disk; the files of a folder before the folder, the deepest first."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync(Path(root, name), os.O_RDONLY if os.name == "posix" else os.O_RDWR)
        sync_folder(Path(root))


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk. Windows doesn't support this and doesn't need it."""
    if os.name == "posix":
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems (network, FUSE) don't support fsync of folders. Nothing more can be done there.
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------------------- paths and errors


def absolute(path: str | Path) -> Path:
    """Make a path absolute, with the home folder for `~`; a link as its last part isn't followed. May raise BundleError."""
    given = Path(os.path.expanduser(path))
    try:
        path = given.resolve() if given.name in {"", ".."} else given.parent.resolve() / given.name
    # Python before 3.13 raises RuntimeError for a loop of links.
    except (OSError, RuntimeError) as error:
        raise BundleError(f"{given} can't be resolved: {error}.") from error
    return path


@contextlib.contextmanager
def bundle_errors(target: Path, done: str) -> Iterator[None]:
    """Turn an OSError, also one that a library reports in an error of its own, into a one-sentence BundleError."""
    try:
        yield
    except BundleError:
        raise
    except Exception as error:
        failure = error if isinstance(error, OSError) else _disk_failure(error)
        if failure is None:
            raise
        where = f" ({failure.filename})" if isinstance(failure.filename, str) and failure.filename else ""
        advice = ": correct that, or choose another folder" if done == "written" else ""
        raise BundleError(
            f"The bundle {target} can't be {done}: {failure.strerror or failure}{where}{advice}."
        ) from error


def _disk_failure(error: BaseException) -> OSError | None:
    """The failure of a disk that caused an error; the libraries that write artifacts quote its text or its number."""
    for link in with_causes(error):
        if isinstance(link, OSError) and link.errno in _DISK_ERRORS:
            return link
        for code in _DISK_ERRORS:
            if os.strerror(code) in str(link) or f"(os error {code})" in str(link):
                return OSError(code, os.strerror(code))
    return None
