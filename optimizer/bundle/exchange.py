"""Replace a folder with a finished one, atomically if the system supports it.

    parent/NAME                                  the target
    parent/.NAME.RANDOM.optimize-export/         the staging place, next to the target on the same file system
        owner.json                               the marker: the name of the target, and the writing process
        new/                                     the new folder; after an atomic exchange, the replaced folder
        old/                                     the replaced folder, after the first of two renames
        trash/                                   files that are being deleted

On Linux, `renameat2` swaps two folders atomically: after a crash the target is either the old folder or the new one.
Systems and file systems without it need two renames, and between them the target doesn't exist. At that moment `old`
and `new` are both complete, and `recover` finishes the exchange after a crash.

The next writer of the same target removes the staging places of processes that have ended. It leaves alone the staging
places of live processes, other machines and other containers, and every folder without a marker.
"""

import contextlib
import ctypes
import errno
import json
import logging
import os
import platform
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from optimize_export.manifest import read_json

logger = logging.getLogger(__name__)

SUFFIX = ".optimize-export"
MARKER = "owner.json"
_TOOL = "optimize-export"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# The errors of a kernel, file system or sandbox that doesn't support the exchange. All other errors are real ones.
_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM})
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
# How long a live writer may take for its two renames, in seconds, before a reader finishes the exchange for it.
_GRACE_SECONDS = 0.2


# The targets at which this process has put a new folder: an interrupt after that doesn't undo it.
published: set[Path] = set()


class Occupied(Exception):
    """The target was written by another process at the same time; the message is one sentence."""


@dataclass
class Staging:
    """A staging place next to `target`; the new folder is written to `folder`."""

    target: Path
    place: Path
    made_parents: list[Path] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.place / "new"

    @property
    def _old(self) -> Path:
        return self.place / "old"

    def outdate(self) -> None:
        """Move the replaced folder to `trash`, because another folder is at the target now."""
        os.rename(self._old, self.place / "trash")


# -------------------------------------------------------------------------------------------------- the writing process


def _first_line(path: str) -> str | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """The start time of a process in clock ticks since boot; None if `/proc` doesn't have it."""
    line = _first_line(f"/proc/{pid}/stat")
    # The name in parentheses may contain blanks and parentheses. The start time is the 20th field after it.
    return line.rpartition(")")[2].split()[19] if line else None


def _identity() -> dict[str, str | int | None]:
    try:
        namespace: str | None = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = None
    return {
        "host": platform.node(),
        "boot": _first_line("/proc/sys/kernel/random/boot_id"),
        "namespace": namespace,
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def _has_ended(owner: dict[str, object]) -> bool:
    """Whether the process that wrote a marker has certainly ended; False if this process can't know."""
    mine = _identity()
    pid = owner.get("pid")
    # Signal 0 checks whether a process exists. On Windows it would interrupt the process.
    if os.name != "posix" or not isinstance(pid, int) or not 0 < pid < 2**31 or owner.get("host") != mine["host"]:
        return False
    if owner.get("boot") != mine["boot"]:
        return True
    if owner.get("namespace") != mine["namespace"]:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    # Another process may have got the same process id since then.
    started = _started(pid)
    return started is not None and owner.get("started") is not None and started != owner["started"]


# ----------------------------------------------------------------------------------------------------- flushing to disk


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems (network, FUSE) don't support fsync of folders. Nothing more can be done there.
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}:
            raise
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk. Windows doesn't support this and doesn't need it."""
    if os.name == "posix":
        _sync(folder, os.O_RDONLY)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder of a tree to disk; the files of a folder before the folder, the deepest first."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync(Path(root, name), os.O_RDONLY if os.name == "posix" else os.O_RDWR)
        sync_folder(Path(root))


# -------------------------------------------------------------------------------------------------------------- staging


def _write_marker(staging: Staging) -> None:
    owner = {"tool": _TOOL, "target": staging.target.name, **_identity()}
    data = json.dumps(owner).encode("ascii")
    handle = os.open(staging.place / MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.write(handle, data)
    finally:
        os.close(handle)


def _make_parents(parent: Path) -> list[Path]:
    """Make the missing folders of a path; return those made here, the deepest first."""
    missing = [folder for folder in (parent, *parent.parents) if not os.path.lexists(folder)]
    made: list[Path] = []
    try:
        for folder in reversed(missing):
            # Another process may make the same folder at the same time. Then this process must not remove it.
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                made.insert(0, folder)
    except BaseException:
        _remove_empty(made)
        raise
    return made


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        # The folder isn't empty if another process has written to it.
        with contextlib.suppress(OSError):
            folder.rmdir()


def staging_name(target: Path) -> str:
    """A random hidden name for the staging place, short enough even if the target's name has the maximum length."""
    return f".{target.name[:40]}.{secrets.token_hex(4)}{SUFFIX}"


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Staging]:
    """Make a staging place next to `target`, and the missing parent folders; remove the staging place at the end.

    If the body raises, the parent folders made here are removed too, unless they are no longer empty.

    Args:
        target: an absolute path.

    Raises:
        OSError: the staging place can't be made.
    """
    staging = Staging(target, target.parent / staging_name(target))
    try:
        staging.made_parents = _make_parents(target.parent)
        staging.place.mkdir()
        _write_marker(staging)
        staging.folder.mkdir()
        yield staging
    except BaseException:
        _clear_own(staging)
        _remove_empty(staging.made_parents)
        raise
    _clear_own(staging)


def _clear_own(staging: Staging) -> None:
    """Remove the staging place, unless it contains the only copy of the folder that was at the target."""
    if staging._old.is_dir() and not os.path.lexists(staging.target):
        logger.warning(
            "The previous contents of %s couldn't be restored; they are in %s.", staging.target, staging._old
        )
        return
    _clear(staging.place)


def _clear(place: Path) -> None:
    """Remove a staging place. The marker is removed last, so that leftovers of a crash can still be identified."""
    try:
        for name in ("trash", "old", "new"):
            if not os.path.lexists(place / name):
                continue
            # Rename before deleting: `recover` must never mistake a half-deleted `old` or `new` for a complete one.
            if name != "trash":
                os.rename(place / name, place / "trash")
            shutil.rmtree(place / "trash")
        (place / MARKER).unlink(missing_ok=True)
        place.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s couldn't be removed (%s); you can delete it by hand.", place, error.strerror or error)


def _owner_of(place: Path) -> dict[str, object] | None:
    """The content of a staging place's marker; None if there is no marker from this program."""
    try:
        owner = read_json(place / MARKER)
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) and owner.get("tool") == _TOOL else None


def _places(target: Path) -> list[tuple[Path, dict[str, object]]]:
    """The staging places of one target, each with the content of its marker."""
    try:
        names = sorted(name for name in os.listdir(target.parent) if name.startswith(".") and name.endswith(SUFFIX))
    except OSError:
        return []
    found = ((target.parent / name, _owner_of(target.parent / name)) for name in names)
    return [(place, owner) for place, owner in found if owner is not None and owner.get("target") == target.name]


def recover(target: Path) -> bool:
    """Finish an exchange that stopped between its two renames.

    Both folders are complete at that moment, and the new one is moved to the target. A live writer gets
    `_GRACE_SECONDS` to do so itself; if it comes later, it accepts the finished exchange.

    Returns:
        Whether this call finished an exchange, or another process did at the same moment.

    Raises:
        OSError: the rename is refused.
    """
    deadline = time.monotonic() + _GRACE_SECONDS
    while not os.path.lexists(target):
        halfway = [entry for entry in _places(target) if (entry[0] / "old").is_dir() and (entry[0] / "new").is_dir()]
        if not halfway:
            return os.path.lexists(target)
        place, owner = halfway[0]
        if not _has_ended(owner) and time.monotonic() < deadline:
            time.sleep(0.01)
            continue
        with contextlib.suppress(FileNotFoundError):
            os.rename(place / "new", target)
            sync_folder(target.parent)
        return True
    return False


def remove_stale(target: Path) -> None:
    """Finish an interrupted exchange of this target, then remove the staging places whose processes have ended."""
    recover(target)
    for place, owner in _places(target):
        if _has_ended(owner):
            _clear(place)


# --------------------------------------------------------------------------------------------------------- the exchange


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders atomically; return False if the system doesn't support that."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(second))


def is_empty_folder(path: Path) -> bool:
    """Whether the path is an empty folder, and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode) and not os.listdir(path)
    except OSError:
        return False


def publish(staging: Staging, may_replace: Callable[[Path], None]) -> None:
    """Move the new folder to the target. `staged` deletes the replaced folder at its end.

    Args:
        may_replace: called with a folder; raises if that folder must not be replaced. It checks the target first, and
            then the folder that was actually moved away. If it refuses that one, the exchange is undone. So no folder
            is deleted that it hasn't checked.

    Raises:
        Occupied: another process wrote the target at the same time.
        OSError: a file system operation fails.
        Exception: any exception of `may_replace`.
    """
    target = staging.target
    sync_tree(staging.folder)
    sync_folder(staging.place)
    try:
        if not os.path.lexists(target) or is_empty_folder(target):
            _put_fresh(staging)
        else:
            _ask(target, may_replace)
            _replace(staging, may_replace)
    except FileNotFoundError as error:
        raise Occupied(f"another process wrote {target} at the same time: run again to replace its result.") from error
    sync_folder(target.parent)
    for folder in staging.made_parents:
        sync_folder(folder.parent)


def _ask(target: Path, may_replace: Callable[[Path], None]) -> None:
    """Call `may_replace` for the target; repeat a refusal if another writer exchanged the target during the check."""
    for _ in range(100):
        before = _incarnation(target)
        try:
            may_replace(target)
        except Exception:
            if _incarnation(target) == before:
                raise
        else:
            return
    raise Occupied(f"other processes keep writing {target}: run again when they are done.")


def _incarnation(target: Path) -> tuple[int, int]:
    """Distinguish a folder from another one with the same name: (inode, change time). A rename changes the latter."""
    status = os.lstat(target)
    return status.st_ino, status.st_ctime_ns


def _put_fresh(staging: Staging) -> None:
    if os.name != "posix" and is_empty_folder(staging.target):
        staging.target.rmdir()
    try:
        os.rename(staging.folder, staging.target)
        published.add(staging.target)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        raise Occupied(f"another process created {staging.target} in the meantime: run again to replace it.") from error


def _replace(staging: Staging, may_replace: Callable[[Path], None]) -> None:
    if not _exchange(staging.folder, staging.target):
        _replace_by_two_renames(staging, may_replace)
        return
    published.add(staging.target)
    sync_folder(staging.target.parent)
    try:
        may_replace(staging.folder)
    except BaseException:
        _exchange(staging.folder, staging.target)
        published.discard(staging.target)
        raise


def _replace_by_two_renames(staging: Staging, may_replace: Callable[[Path], None]) -> None:
    os.rename(staging.target, staging._old)
    try:
        may_replace(staging._old)
        sync_folder(staging.place)
        _put_second(staging)
    except Occupied:
        staging.outdate()
        raise
    except BaseException:
        if staging._old.is_dir() and not os.path.lexists(staging.target):
            os.rename(staging._old, staging.target)
        raise
    staging.outdate()
    sync_folder(staging.target.parent)


def _put_second(staging: Staging) -> None:
    try:
        _put_fresh(staging)
    except FileNotFoundError:
        # If a reader found no target, its `recover` has already moved the new folder there.
        if staging.folder.exists() or not os.path.lexists(staging.target):
            raise
