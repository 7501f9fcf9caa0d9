"""Put a finished folder in the place of another one, in a single step where the system can.

    parent/NAME                                  the target
    parent/.NAME.RANDOM.optimize-export/         the staging place, beside it, on the same file system
        owner.json                               the marker: whose target, and which process writes
        new/                                     the folder that is written; after an exchange, the one that was replaced
        old/                                     between the two renames of a system that can't exchange
        trash/                                   what is being deleted

A crash leaves the target as it was or as it shall be. Where the system has no exchange there is one moment in which
nothing stands at the target: `old` and `new` are both complete then, and `recover` finishes the work. Staging places of
processes that ended are removed by the next writer of the same target; one of a living process, of another machine or of
another container is left alone, and so is everything that has no marker.
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

from optimizer.regular_files import read_text_bytes

logger = logging.getLogger(__name__)

SUFFIX = ".optimize-export"
MARKER = "owner.json"
_TOOL = "optimize-export"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# What a kernel, a file system or a sandbox without the exchange answers; everything else is an error of its own.
_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM})
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
# How long the two renames of a living writer may take before a reader finishes them for it.
_GRACE_SECONDS = 0.2


class Occupied(Exception):
    """Something stands at the target that may not be replaced; the message is one sentence."""


@dataclass
class Staging:
    """A staging place beside `target`; `folder` is where to write."""

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
        """Another folder stands at the target: the one that was moved away needn't come back."""
        os.rename(self._old, self.place / "trash")


# ---------------------------------------------------------------------------------------------------- who is writing


def _first_line(path: str) -> str | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """The start time of a process in clock ticks since boot; None where the system doesn't tell or there is no such."""
    line = _first_line(f"/proc/{pid}/stat")
    # The name in parentheses may hold blanks and parentheses; the start time is the 20th field after it.
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
    """Whether the process that wrote a marker has certainly ended; False where that can't be known from here."""
    mine = _identity()
    pid = owner.get("pid")
    # Signal 0 asks whether a process exists; on Windows it would interrupt it.
    if os.name != "posix" or not isinstance(pid, int) or pid <= 0 or owner.get("host") != mine["host"]:
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
    # The number may have gone to another process since.
    started = _started(pid)
    return started is not None and owner.get("started") is not None and started != owner["started"]


# ---------------------------------------------------------------------------------------------------- making it last


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems (network and FUSE ones) have no fsync for folders; there is nothing more to do there.
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}:
            raise
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Force a folder's own entries to the disk. Windows can't and needn't."""
    if os.name == "posix":
        _sync(folder, os.O_RDONLY)


def sync_tree(folder: Path) -> None:
    """Force every file below a folder to the disk, then every folder, the deepest first."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync(Path(root, name), os.O_RDONLY if os.name == "posix" else os.O_RDWR)
        sync_folder(Path(root))


# -------------------------------------------------------------------------------------------------------- the staging


def _write_marker(staging: Staging) -> None:
    owner = {"tool": _TOOL, "target": staging.target.name, **_identity()}
    data = json.dumps(owner).encode("ascii")
    handle = os.open(staging.place / MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.write(handle, data)
    finally:
        os.close(handle)


def _make_parents(parent: Path) -> list[Path]:
    """Make the missing folders of a path; the ones made here, the deepest first."""
    missing = [folder for folder in (parent, *parent.parents) if not os.path.lexists(folder)]
    made: list[Path] = []
    try:
        for folder in reversed(missing):
            # Another process may make the same folder at the same time: then it is not this one's to remove.
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                made.insert(0, folder)
    except BaseException:
        _remove_empty(made)
        raise
    return made


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        # Not empty any more: another process put something there.
        with contextlib.suppress(OSError):
            folder.rmdir()


def staging_name(target: Path) -> str:
    """A hidden name beside the target. It is cut short, so that a target of the greatest length still has one."""
    return f".{target.name[:40]}.{secrets.token_hex(4)}{SUFFIX}"


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Staging]:
    """A staging place beside `target`, which is absolute; missing parents are made.

    On leaving, the staging place is removed, whatever happened. Where the body raised, the parents that were made here are
    removed too. OSError where the place can't be made.
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
    """Remove the staging place, except where it holds the only copy of what stood at the target."""
    if staging._old.is_dir() and not os.path.lexists(staging.target):
        logger.warning("What stood at %s couldn't be put back; it is in %s.", staging.target, staging._old)
        return
    _clear(staging.place)


def _clear(place: Path) -> None:
    """Remove a staging place, its marker last, so that what a crash leaves of it is still recognised."""
    try:
        for name in ("trash", "old", "new"):
            if not os.path.lexists(place / name):
                continue
            # First out of the names that `recover` looks at: half of a folder must never be taken for a whole one.
            if name != "trash":
                os.rename(place / name, place / "trash")
            shutil.rmtree(place / "trash")
        (place / MARKER).unlink(missing_ok=True)
        place.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s couldn't be removed (%s); it may be deleted by hand.", place, error.strerror or error)


def _owner_of(place: Path) -> dict[str, object] | None:
    """What the marker of a staging place says; None where there is no marker of this program."""
    try:
        owner = json.loads(read_text_bytes(place / MARKER))
    except (OSError, ValueError, RecursionError):
        return None
    return owner if isinstance(owner, dict) and owner.get("tool") == _TOOL else None


def _places(target: Path) -> list[tuple[Path, dict[str, object]]]:
    """The staging places of one target, with what their markers say."""
    try:
        names = sorted(name for name in os.listdir(target.parent) if name.startswith(".") and name.endswith(SUFFIX))
    except OSError:
        return []
    found = ((target.parent / name, _owner_of(target.parent / name)) for name in names)
    return [(place, owner) for place, owner in found if owner is not None and owner.get("target") == target.name]


def recover(target: Path) -> bool:
    """Finish an exchange by two renames that stopped between them; whether there was one.

    Both folders are complete at that moment, and the new one is put in place. A living writer gets a moment to do it
    itself; it takes it as done if it comes later. OSError where the rename is refused.
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
    """Remove the staging places of this target whose processes have ended."""
    recover(target)
    for place, owner in _places(target):
        if _has_ended(owner):
            _clear(place)


# ------------------------------------------------------------------------------------------------------- the exchange


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step; False where the system can't."""
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
    """Whether a real folder, not a link to one, stands there and holds nothing."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode) and not os.listdir(path)
    except OSError:
        return False


def publish(staging: Staging, may_replace: Callable[[Path], None]) -> None:
    """Put the folder that was written at the target, and remove the one that stood there.

    `may_replace(folder)` raises where what stands at the target may not be replaced. It is asked again about the very
    folder that was taken away, and the exchange is undone if it refuses then: nothing is deleted that it hasn't seen.
    Raises what `may_replace` raises, Occupied where another process was faster, and OSError.
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
    """Ask about what stands at the target; again where another writer exchanged it while it was being looked at."""
    for _ in range(100):
        before = _incarnation(target)
        try:
            may_replace(target)
        except Exception:
            if _incarnation(target) == before:
                raise
        else:
            return
    raise Occupied(f"other processes write {target} all the time: run again when they are done.")


def _incarnation(target: Path) -> tuple[int, int]:
    """What tells a folder from another one that took its name; a rename changes the second part."""
    status = os.lstat(target)
    return status.st_ino, status.st_ctime_ns


def _put_fresh(staging: Staging) -> None:
    if os.name != "posix" and is_empty_folder(staging.target):
        staging.target.rmdir()
    try:
        os.rename(staging.folder, staging.target)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        raise Occupied(
            f"{staging.target} was made by another process in the meantime: run again to replace it."
        ) from error


def _replace(staging: Staging, may_replace: Callable[[Path], None]) -> None:
    if not _exchange(staging.folder, staging.target):
        _replace_by_two_renames(staging, may_replace)
        return
    sync_folder(staging.target.parent)
    try:
        may_replace(staging.folder)
    except BaseException:
        _exchange(staging.folder, staging.target)
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
        # A reader that found nothing at the target has finished the work: `recover`.
        if staging.folder.exists() or not os.path.lexists(staging.target):
            raise
