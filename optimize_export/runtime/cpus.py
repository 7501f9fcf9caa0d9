"""The processors that this process may use, and its use of them and of memory.

It may use those of its affinity, within the quota of its control group (a container's limit).
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def processor() -> str:
    """The name of the processor, such as "AMD EPYC 7B13"; the architecture where the system doesn't tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cpus() -> int:
    """The number of CPUs that this process may use: in a container often fewer than the machine has.

    A quota is rounded up, so that 1.5 processors are two threads.
    """
    return quota_threads() or affine_cpus()


def affine_cpus() -> int:
    """The number of CPUs on which the scheduler may put this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota_threads() -> int | None:
    """The threads that the quota of this process keeps busy, if they are fewer than its CPUs; None otherwise.

    Runtimes follow the affinity by themselves, but not the quota: with more threads than it pays for, all are stopped
    for the rest of each period (0.1 s) once it is used up.
    """
    quota = cgroup_cpus()
    return math.ceil(quota) if quota is not None and math.ceil(quota) < affine_cpus() else None


def own_threads(chosen: object, otherwise: int | None) -> int | None:
    """The threads for a runtime: those chosen at most as many as are usable here, else `otherwise`.

    A bundle's choice may have been measured on a machine, or in a container, with more processors.
    """
    return otherwise if chosen is None else min(int(str(chosen)), usable_cpus())


def cgroup_cpus(folder: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """The processors whose time the control group of this process and those above it may use; None without a limit.

    Args:
        folder: where control groups are mounted, of version 1 or 2.
        membership: the file with the groups of this process, a line "number:controllers:path" for each hierarchy.
    """
    quotas: list[float] = []
    for line in _lines_of(membership):
        number, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if number == "0" and not controllers:
            quotas += [_of_two(each / "cpu.max") for each in _groups(folder, path)]
        elif "cpu" in controllers.split(","):
            root = next((each for each in (folder / controllers, folder / "cpu") if each.is_dir()), folder)
            quotas += [_of_one(each) for each in _groups(root, path)]
    least = min(quotas, default=math.inf)
    return None if math.isinf(least) else least


def _groups(root: Path, path: str) -> Iterator[Path]:
    """The folders of a group and of those above it. In a container, the path may be the host's, which isn't there."""
    inner = PurePosixPath(path.lstrip("/"))
    for each in (inner, *inner.parents):
        if ".." not in each.parts:
            yield root / each


def _of_two(file: Path) -> float:
    """The quota of "150000 100000", microseconds of each period; infinite for "max 100000" or without the file."""
    return _ratio(" ".join(_lines_of(file)).split())


def _of_one(group: Path) -> float:
    return _ratio([" ".join(_lines_of(group / f"cpu.cfs_{name}_us")).strip() for name in ("quota", "period")])


def _ratio(words: list[str]) -> float:
    """Of two numbers above zero; infinite for anything else, since a wrong number of threads is better than no model."""
    numbers = [int(word) for word in words if word.isascii() and word.isdecimal()]
    return numbers[0] / numbers[1] if len(words) == len(numbers) == 2 and min(numbers) > 0 else math.inf


def _lines_of(file: Path) -> list[str]:
    """The lines of a file of the kernel; none where it doesn't exist, as on other systems, or may not be read."""
    try:
        # Names of groups may have any bytes.
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


# What this process uses --------------------------------------------------------------------------------------------

# Threads of a runtime wait busily for about 0.1 s after a call, and would take cores from the next contender. So wait
# until the process is idle: until it uses less than this share of one CPU, but not longer than the last number.
PAUSE_SECONDS = 0.01
_IDLE_SHARE = 0.2
_LONGEST_PAUSE = 0.3


def settle() -> None:
    """Wait until no thread of this process is busy, for about 0.3 s at most."""
    # Pauses are counted, because a clock that stands still would never reach an end.
    for _ in range(round(_LONGEST_PAUSE / PAUSE_SECONDS)):
        started, used = time.perf_counter(), time.process_time()
        time.sleep(PAUSE_SECONDS)
        if time.process_time() - used < _IDLE_SHARE * (time.perf_counter() - started):
            return


def status(field: str, process: int | str = "self") -> int | None:
    """A size in bytes from the status of a process, such as "VmRSS"; None where the system doesn't tell."""
    return _size_in(Path(f"/proc/{process}/status"), field)


def available_memory() -> int | None:
    """The memory that new programs can use without swapping, in bytes; None where the system doesn't tell."""
    return _size_in(Path("/proc/meminfo"), "MemAvailable")


def _size_in(path: Path, field: str) -> int | None:
    try:
        # The name of the process stands there too, in any bytes.
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)
