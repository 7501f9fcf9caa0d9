"""Measure calls: their times side by side, which differences are more than noise, and their memory."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from optimizer.model import release_memory

# The time of one contender in one round; shorter calls are repeated.
_ROUND_SECONDS = 0.02
# Threads of a runtime wait busily for about 0.1 s after a call, and would take cores from the next contender. So wait
# until the process is idle: until it uses less than this share of one CPU, but not longer than the last number.
_PAUSE_SECONDS = 0.01
_IDLE_SHARE = 0.2
_LONGEST_PAUSE = 0.3
# No call of a runtime takes less. A clock that stands still for a moment, or goes back, can show less, even a time that
# nothing can be divided by.
_LEAST_SECONDS = 1e-6
_MOST_ROUNDS = 41
_FEWEST_ROUNDS = 3
# With fewer rounds, the sign test can't exclude chance, so a gain must be larger.
_FEW_ROUNDS = 6
_CLEAR_GAIN = 1.05
# A call that takes longer is timed once before the rounds, a shorter one twice.
_LONG_SECONDS = 0.5
# A gain below this isn't worth a choice, however certain it is.
LEAST_GAIN = 1.02
# The chance that noise alone shows a gain.
_CHANCE = 0.025

Call = Callable[[], object]


@dataclass(frozen=True)
class Latency:
    """Seconds of one call: the median and the 95th percentile over single calls, and the median of each round."""

    median: float
    p95: float
    rounds: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one contender is as another: the median over rounds, and the bounds of that median.

    With fewer than 6 rounds, the bounds are the extremes.
    """

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f}) times as fast"

    @property
    def may_pay(self) -> bool:
        """Whether the gain is large enough to matter, if it is more than noise."""
        return self.median >= LEAST_GAIN

    @property
    def pays(self) -> bool:
        """Whether the gain is more than noise and large enough to matter."""
        return self.low > (_CLEAR_GAIN if self.rounds < _FEW_ROUNDS else 1) and self.may_pay


def interleaved(
    calls: Mapping[str, Call], seconds: float, finished: Call = lambda: None, most_seconds: float = math.inf
) -> dict[str, Latency]:
    """Time all calls in rounds, each in every round and in random order, because a slow moment slows all.

    Args:
        calls: by name; each is called before, since many runtimes optimize in their first calls.
        seconds: the time for all rounds. There are at least 3 rounds, at most 41.
        finished: waits until the device has finished its work.
        most_seconds: if 3 rounds take longer, there are fewer, but at least one.
    """
    alone = {name: _warm(call, finished) for name, call in calls.items()}
    repeats = {name: max(1, math.ceil(_ROUND_SECONDS / each)) for name, each in alone.items()}
    one_round = sum(repeats[name] * alone[name] + _PAUSE_SECONDS for name in calls)
    fewest = max(1, int(min(_FEWEST_ROUNDS, most_seconds / one_round)))
    rounds = min(_MOST_ROUNDS, max(fewest, int(seconds / one_round)))
    single: dict[str, list[float]] = {name: [] for name in calls}
    medians: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for name in order:
            settle()
            times = [_time(calls[name], finished) for _ in range(repeats[name])]
            single[name] += times
            medians[name].append(statistics.median(times))
    return {name: Latency(statistics.median(single[name]), _p95(single[name]), tuple(medians[name])) for name in calls}


def ratio(of: Latency, to: Latency) -> Ratio:
    """How many times as fast `to` is as `of`, both from one `interleaved`.

    The bounds are order statistics: the chance that the true median lies beyond one of them is at most 2.5 %, whatever
    the distribution of the noise (the sign test's confidence interval).
    """
    ratios = sorted(slow / fast for slow, fast in zip(of.rounds, to.rounds, strict=True))
    cut = _cut(len(ratios))
    return Ratio(statistics.median(ratios), ratios[cut], ratios[-1 - cut], len(ratios))


def settle() -> None:
    """Wait until no thread of this process is busy, for about 0.3 s at most."""
    # Pauses are counted, because a clock that stands still would never reach an end.
    for _ in range(round(_LONGEST_PAUSE / _PAUSE_SECONDS)):
        started, used = time.perf_counter(), time.process_time()
        time.sleep(_PAUSE_SECONDS)
        if time.process_time() - used < _IDLE_SHARE * (time.perf_counter() - started):
            return


def _cut(count: int) -> int:
    """The number of values to leave out at each end for the bounds of the median."""
    chance, left_out = 0.0, -1
    while left_out < count // 2 and chance + math.comb(count, left_out + 1) / 2**count <= _CHANCE:
        left_out += 1
        chance += math.comb(count, left_out) / 2**count
    return max(left_out, 0)


def _warm(call: Call, finished: Call) -> float:
    first = _time(call, finished)
    return first if first > _LONG_SECONDS else min(_time(call, finished), _time(call, finished))


def _time(call: Call, finished: Call) -> float:
    started = time.perf_counter()
    call()
    finished()
    return max(time.perf_counter() - started, _LEAST_SECONDS)


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(0.95 * len(values)) - 1)]


class PeakMemory:
    """Measures how far the resident memory of this process rises above its level at the start of the block."""

    before: int
    """The resident memory at the start of the block, in bytes; 0 if not `exact`."""
    bytes: int
    """The rise to the peak, in bytes; set at the end of the block. 0 if not `exact`."""
    exact: bool
    """False if the system doesn't tell, or can't reset its high-water mark."""

    def __enter__(self) -> PeakMemory:
        # Otherwise the allocator would reuse freed memory that it kept, and this use wouldn't be seen.
        release_memory()
        before = None
        with suppress(OSError):
            # Set the high-water mark of this process to its current memory.
            Path("/proc/self/clear_refs").write_text("5")
            before = status("VmRSS")
        self.before, self.exact = before or 0, before is not None
        return self

    def __exit__(self, *error: object) -> None:
        peak = status("VmHWM") if self.exact else None
        self.exact = peak is not None
        # The kernel's counters lag by some pages, and under memory pressure it takes pages away: the peak that it tells
        # can be below the level that it told before.
        self.bytes = 0 if peak is None else max(0, peak - self.before)


def status(field: str) -> int | None:
    """A size in bytes from the status of this process, such as "VmRSS"; None where the system doesn't tell."""
    return _size_in(Path("/proc/self/status"), field)


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
