"""Call a file for a long time: does its memory grow, does it get slower, do threads or file handles pile up?

Two memories are read: the anonymous one of this process (RssAnon), which was allocated and touched, without mapped files;
and the bytes that the C library's heap has handed out (mallinfo2), where a leak shows before freed pages are used up. After
a warm-up, the run is cut into blocks of equal time, each with its growth per 1,000 calls. A leak grows in most blocks, and
its mean is above zero by a t-test; a cache that fills, or an allocator's step, grows in few of them.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy

from optimize_export.errors import DeviceError, ExporterError
from optimize_export.manifest import describe_environment
from optimize_export.runtime.cpus import settle, status
from optimize_export.runtime.route import Route, open_route

_BLOCKS = 12
_WARM_UP = 1 / 5
# The one-sided 99 % point of Student's t with 11 degrees of freedom, and the two-sided 95 % point, for the error.
_T_ONE_SIDED, _T_TWO_SIDED = 2.718, 2.201
# Growth below this is no leak: tables and pages of the interpreter move by as much, in bytes.
_LEAST_GROWTH = 256 * 1024
# The latencies of a block are those of at most this many calls, evenly spread.
_MOST_LATENCIES = 10_000
# The least time of a call, in case the clock stands still: times are divided by each other.
_LEAST_SECONDS = 1e-6
# Seconds of calls before those that are timed, in a process that was idle.
_AWAKE = 0.05

Packed = tuple[str, tuple[int, ...], bytes]
"""An array for another process, whose numpy may be another version: its dtype, shape and values."""


@dataclass(frozen=True)
class Block:
    """A part of the run."""

    calls: int
    seconds: float
    memory: tuple[int, int]
    """At its end, in bytes: resident and anonymous; handed out by the heap, 0 where the C library doesn't tell."""
    latency: float
    """The median, in seconds."""
    threads: int
    handles: int
    """Open file handles."""


@dataclass(frozen=True)
class Growth:
    """Of a memory, in bytes per 1,000 calls."""

    mean: float
    """Over the blocks."""
    error: float
    """Half of its 95 % interval."""
    leaks: bool

    def __str__(self) -> str:
        return f"{_kb(self.mean)} ± {_kb(self.error)} KB per 1,000 calls"


@dataclass(frozen=True)
class Soak:
    """What a long run showed."""

    calls: int
    """Without those of the warm-up, as everything here."""
    seconds: float
    resident: Growth
    heap: Growth
    drift: float
    """The median latency of the last third over that of the first."""
    blocks: tuple[Block, ...]

    @property
    def leaks(self) -> bool:
        return self.resident.leaks or self.heap.leaks

    def growth(self) -> str:
        """The growth of both memories in words."""
        return f"resident memory grows by {self.resident}, the heap by {self.heap}"

    def sentence(self) -> str:
        """The findings as a sentence."""
        first, last = self.blocks[0], self.blocks[-1]
        verdict = "a leak" if self.leaks else "no leak was found"
        told = f"{self.calls:,} calls in {self.seconds:.0f} s: {self.growth()}: {verdict}; the latency of the last third is "
        told += f"{self.drift:.2f} times that of the first"
        changed = [
            f"{name} went from {before} to {after}"
            for name, before, after in (
                ("threads", first.threads, last.threads),
                ("file handles", first.handles, last.handles),
            )
            if before != after
        ]
        return "; ".join([told, *changed])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def soak(
    call: Callable[[], object],
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    memory: Callable[[], tuple[int, int] | None] = lambda: _memory(),
) -> Soak | None:
    """Call a function for a time, one call after another.

    Args:
        seconds: for everything.
        clock: seconds.
        memory: the two memories in bytes.

    Returns:
        The findings; None where the system doesn't tell the memory of a process.
    """
    _called(call, seconds * _WARM_UP, clock)
    before = _settled(memory)
    if before is None:
        return None
    blocks: list[Block] = []
    for _ in range(_BLOCKS):
        calls, spent, latency = _called(call, seconds * (1 - _WARM_UP) / _BLOCKS, clock)
        blocks.append(Block(calls, spent, _settled(memory) or before, latency, _threads(), _handles()))
    third = _BLOCKS // 3
    first, last = (statistics.median(each.latency for each in part) for part in (blocks[:third], blocks[-third:]))
    spent = sum(each.seconds for each in blocks)
    resident, heap = (_growth([before[kind], *(each.memory[kind] for each in blocks)], blocks) for kind in (0, 1))
    return Soak(sum(each.calls for each in blocks), spent, resident, heap, last / first, tuple(blocks))


def packed(array: numpy.ndarray) -> Packed:
    return array.dtype.str, array.shape, array.tobytes()


def unpacked(array: Packed) -> numpy.ndarray:
    dtype, shape, values = array
    # A copy, because a file may write to its inputs.
    return numpy.frombuffer(values, dtype).reshape(shape).copy()


class MeasuredFile:
    """A file in a runtime, in a process of its own: its outputs, latency and memory, for a parent process that judges.

    It needs numpy and the runtime only, so that it also runs in an environment with other versions.
    """

    def __init__(self, path: Path, route: Route, inputs: Sequence[Packed]) -> None:
        """Open the file on the CPU.

        Args:
            inputs: for the latency and the memory.

        Raises:
            DeviceError: the runtime can't load the file.
            ExporterError: the file is for another machine.
        """
        try:
            self._runner = open_route(path, route)
        except DeviceError as error:
            if isinstance(error.__cause__, ExporterError):
                raise error.__cause__ from None
            raise
        self._inputs = [*map(unpacked, inputs)]

    def __call__(self, kind: str, *args: Any) -> Any:
        """Call the method of this name, for a parent process."""
        return getattr(self, kind)(*args)

    def outputs(self, inputs: Sequence[Packed], seed: int | None) -> list[Packed]:
        """The outputs. The seed is that of torch's random numbers."""
        torch: Any = sys.modules.get("torch")
        if seed is not None and torch is not None:
            torch.manual_seed(seed)
        return [packed(numpy.asarray(each)) for each in self._runner(*map(unpacked, inputs))]

    def latencies(self, count: int) -> list[float]:
        """The seconds of each call. Afterwards the process is idle, so that another one can be timed."""
        # Its threads slept while the other process was timed.
        _called(self._call, _AWAKE, time.perf_counter)
        found = [max(_called(self._call, 0.0, time.perf_counter)[1], _LEAST_SECONDS) for _ in range(count)]
        settle()
        return found

    def soak(self, seconds: float) -> Soak | None:
        return soak(self._call, seconds)

    def about(self) -> tuple[dict[str, str], dict[str, str]]:
        """The versions of the installed libraries, and the settings of the runtime."""
        return describe_environment()["libraries"], self._runner.settings

    def _call(self) -> object:
        return self._runner(*self._inputs)


def _growth(levels: Sequence[int], blocks: Sequence[Block]) -> Growth:
    """The growth of a memory from its levels before, between and after the blocks."""
    rises = [
        1000 * (after - before) / each.calls for (before, after), each in zip(pairwise(levels), blocks, strict=True)
    ]
    mean, spread = statistics.fmean(rises), statistics.stdev(rises) / math.sqrt(len(rises))
    goes_on = statistics.median(rises) > 0 and mean > _T_ONE_SIDED * spread
    return Growth(mean, _T_TWO_SIDED * spread, goes_on and levels[-1] - levels[0] >= _LEAST_GROWTH)


def _called(call: Callable[[], object], seconds: float, clock: Callable[[], float]) -> tuple[int, float, float]:
    """The calls in some seconds, one at least; the seconds that they took; and the median of a call."""
    started = now = clock()
    calls, step, latencies = 0, 1, list[float]()
    while not calls or now - started < seconds:
        before = now
        call()
        now = clock()
        if calls % step == 0:
            latencies.append(now - before)
            if len(latencies) == _MOST_LATENCIES:
                # Kept evenly, in memory that doesn't grow.
                latencies, step = latencies[::2], 2 * step
        calls += 1
    return calls, now - started, statistics.median(latencies)


def _settled(memory: Callable[[], tuple[int, int] | None]) -> tuple[int, int] | None:
    """The memory without garbage that the interpreter hasn't collected yet."""
    gc.collect()
    return memory()


def _memory() -> tuple[int, int] | None:
    if (resident := status("RssAnon")) is None:
        return None
    if (told := getattr(ctypes.CDLL(None), "mallinfo2", None)) is None:
        # A C library other than glibc.
        return resident, 0
    told.restype = _Mallinfo
    heap = told()
    return resident, heap.uordblks + heap.hblkhd


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, of which `uordblks` are the bytes in use, and `hblkhd` those in mappings of their own."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _threads() -> int:
    return len(_listed("/proc/self/task"))


def _handles() -> int:
    return len(_listed("/proc/self/fd"))


def _listed(folder: str) -> list[str]:
    return os.listdir(folder) if Path(folder).is_dir() else []


def _kb(size: float) -> str:
    return f"{size / 1000:.3g}"
