"""Measure the latency and memory of the ways to run a model, next to eager, and recommend one.

Times are taken side by side, because a slow moment slows all, and only a difference that is more than noise counts.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from optimize_export.errors import BundleError
from optimize_export.manifest import check_benchmark, is_reproducible_build, plain
from optimize_export.runtime import Route
from optimize_export.runtime.cpus import PAUSE_SECONDS, settle, status
from optimize_export.wording import quote
from optimizer.model import release_memory
from optimizer.parity import WITHIN_BUDGET, Accuracy

EAGER = "eager"
# The share of the time for all candidates; the rest is for two of them, if the choice is in doubt.
_FOR_ALL = 0.7

Run = Callable[[], object]
Timer = Callable[[int], list[float]]
"""Makes the given number of calls, and returns the seconds of each."""


# ---------------------------------------------------------------------------------------------------- time and memory

# The time of one contender in one round; shorter calls are repeated.
_ROUND_SECONDS = 0.02
# No call of a runtime takes less. A clock that stands still for a moment, or goes back, can show less, even a time that
# nothing can be divided by.
_LEAST_SECONDS = 1e-6
_MOST_ROUNDS = 41
# The rounds end early if they take this many times as long as they may.
_OVERTIME = 1.2
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
    calls: Mapping[str, Run], seconds: float, finished: Run = lambda: None, most_seconds: float = math.inf
) -> dict[str, Latency]:
    """Time all calls in rounds, each in every round and in random order, because a slow moment slows all.

    Args:
        calls: by name; each is called before, since many runtimes optimize in their first calls.
        seconds: the time for all rounds. There are at least 3 rounds, at most 41.
        finished: waits until the device has finished its work.
        most_seconds: if 3 rounds take longer, there are fewer, but at least one.
    """

    def timer(call: Run) -> Timer:
        return lambda count: [_time(call, finished) for _ in range(count)]

    return in_turn({name: timer(call) for name, call in calls.items()}, seconds, most_seconds)


def in_turn(calls: Mapping[str, Timer], seconds: float, most_seconds: float = math.inf) -> dict[str, Latency]:
    """As `interleaved`, for calls that are timed elsewhere, such as in other processes."""
    alone = {name: _warm(timer) for name, timer in calls.items()}
    repeats = {name: max(1, math.ceil(_ROUND_SECONDS / each)) for name, each in alone.items()}
    one_round = sum(repeats[name] * alone[name] + PAUSE_SECONDS for name in calls)
    fewest = max(1, int(min(_FEWEST_ROUNDS, most_seconds / one_round)))
    rounds = min(_MOST_ROUNDS, max(fewest, int(seconds / one_round)))
    single: dict[str, list[float]] = {name: [] for name in calls}
    medians: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    started = time.perf_counter()
    for number in range(rounds):
        # Where threads stay busy, pauses take longer than reckoned.
        if number >= fewest and time.perf_counter() - started > _OVERTIME * seconds:
            break
        random.Random(number).shuffle(order)
        for name in order:
            settle()
            times = calls[name](repeats[name])
            single[name] += times
            medians[name].append(statistics.median(times))
    return {name: Latency(statistics.median(single[name]), _p95(single[name]), tuple(medians[name])) for name in calls}


def full_timing(latencies: Iterable[float]) -> float:
    """How long `timed` takes at most for calls that take these times, in seconds."""
    return _MOST_ROUNDS * sum(max(_ROUND_SECONDS, each) + PAUSE_SECONDS for each in latencies) / _FOR_ALL


def ratio(of: Latency, to: Latency) -> Ratio:
    """How many times as fast `to` is as `of`, both from one `interleaved`.

    The bounds are order statistics: the chance that the true median lies beyond one of them is at most 2.5 %, whatever
    the distribution of the noise (the sign test's confidence interval).
    """
    ratios = sorted(slow / fast for slow, fast in zip(of.rounds, to.rounds, strict=True))
    cut = _cut(len(ratios))
    return Ratio(statistics.median(ratios), ratios[cut], ratios[-1 - cut], len(ratios))


def _cut(count: int) -> int:
    """The number of values to leave out at each end for the bounds of the median."""
    chance, left_out = 0.0, -1
    while left_out < count // 2 and chance + math.comb(count, left_out + 1) / 2**count <= _CHANCE:
        left_out += 1
        chance += math.comb(count, left_out) / 2**count
    return max(left_out, 0)


def _warm(timer: Timer) -> float:
    (first,) = timer(1)
    return first if first > _LONG_SECONDS else min(timer(2))


def _time(call: Run, finished: Run) -> float:
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


# -------------------------------------------------------------------------------------------------------- candidates


@dataclass(frozen=True)
class Candidate:
    """One way to run the model."""

    name: str
    """The name in the table."""
    open: Callable[[], Run] = field(repr=False)
    """Makes it ready and returns its call on the example inputs. It may raise: then the candidate is dropped by
    whoever asks for it."""
    route: Route | None = None
    """The artifact and its runtime; None for what only runs in Python, such as eager."""
    bytes: int | None = None
    """The size of the artifact's files; None without an artifact."""
    accuracy: Accuracy | None = None
    """The accuracy of a lossy candidate; None where only rounding differs."""
    device: str = "cpu"
    """Where the artifact runs, "cpu" or "cuda"."""


@dataclass(frozen=True)
class Figure:
    """The figures of one candidate."""

    name: str
    route: Route | None
    bytes: int | None = None
    memory: int | None = None
    """How far loading the artifact and one call raise the memory of the process at most, in bytes; None on a GPU."""
    seconds: float | None = None
    p95: float | None = None
    """The median and the 95th percentile of one call; None if it wasn't timed. A dropped candidate has those of a short
    timing."""
    speed_up: Ratio | None = None
    """The speed-up over eager."""
    accuracy: Accuracy | None = None
    dropped: str | None = None
    """Why it isn't a choice; None if it is."""

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "route": None if self.route is None else self.route.to_json(),
            "speed_up": None if self.speed_up is None else vars(self.speed_up),
            "accuracy": None if self.accuracy is None else self.accuracy.to_json(),
        }


@dataclass(frozen=True)
class Benchmark:
    """The figures of all candidates, and the recommended one."""

    batch_sizes: tuple[int, ...]
    """The batch sizes at which the candidates were timed."""
    threads: int
    """The number of torch's threads."""
    rounds: int
    """The number of rounds, in each of which the candidates ran in turn."""
    figures: tuple[Figure, ...]
    recommended: Route | None
    """The route to ship; None if there is none to recommend."""
    reason: str
    """A sentence about the recommendation."""
    notes: tuple[str, ...] = ()
    """Sentences about the measurement."""

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "batch_sizes": list(self.batch_sizes),
            "figures": [figure.to_json() for figure in self.figures],
            "recommended": None if self.recommended is None else self.recommended.to_json(),
            "notes": list(self.notes),
        }

    def in_manifest(self) -> dict[str, Any]:
        """The manifest's `benchmark`; empty if the bundle must be reproducible byte for byte, as times vary.

        Times that the manifest's readers would refuse are left out: proven files are published all the same.
        """
        is_measured = self.rounds > 0 or self.recommended is None
        if is_measured and is_reproducible_build():
            return {}
        kept = plain(self.to_json())
        try:
            check_benchmark(kept)
        except BundleError as error:
            unknown = replace(self, figures=(), rounds=0, notes=(*self.notes, f"no times are kept: {error}"))
            return {"benchmark": unknown.to_json()}
        return {"benchmark": kept}

    def lossy_choice(self) -> dict[str, str]:
        """The accuracy of the recommended candidate, by its name; empty if it is exact or there is none."""
        chosen = (each for each in self.figures if each.route is not None and each.route == self.recommended)
        return next(({each.name: str(each.accuracy)} for each in chosen if each.accuracy is not None), {})


@dataclass(frozen=True)
class Opened:
    """A candidate that is ready to run, with the peak memory of getting there; None on a GPU.

    `run` raises `Refused` for any error.
    """

    candidate: Candidate
    run: Run = field(repr=False)
    memory: int | None


def opened(candidate: Candidate) -> Opened:
    """Open a candidate and run it once."""
    with PeakMemory() as peak:
        run = candidate.open()
        run()

    def checked() -> object:
        try:
            return run()
        # A runtime may fail in a later call, for example for lack of memory. Proven files are published all the same.
        except Exception as error:
            raise Refused(f"{candidate.name} failed when it ran again: {quote(error)}") from error

    is_known = candidate.route is not None and candidate.device == "cpu" and peak.exact
    return Opened(candidate, checked, peak.bytes if is_known else None)


class Refused(Exception):
    """A candidate isn't a choice; the message is the reason, a clause."""

    def __init__(self, reason: str, accuracy: Accuracy | None = None, seconds: float | None = None) -> None:
        super().__init__(reason)
        # Of a lossy candidate that is outside the budget, and of one of its calls; None if it wasn't timed.
        self.accuracy = accuracy
        self.seconds = seconds


def open_all(
    candidates: Iterable[Candidate], prove: Callable[[Opened], Opened] = lambda ready: ready
) -> tuple[list[Opened], list[Figure]]:
    """Open candidates. Those that can't run, and those that `prove` refuses, are dropped with the reason.

    Args:
        prove: returns what it gets, with the accuracy if the candidate is lossy; or raises `Refused`.
    """
    ready: list[Opened] = []
    dropped: list[Figure] = []
    for candidate in candidates:
        try:
            ready.append(prove(opened(candidate)))
        # Any exception of a runtime that can't load or run a file is a reason not to choose it, and is reported as one.
        except Exception as error:  # noqa: BLE001
            dropped.append(dropped_by(error, candidate))
    return ready, dropped


def dropped_by(error: Exception, candidate: Candidate) -> Figure:
    reason = str(error) if isinstance(error, Refused) else f"it can't run: {quote(error)}"
    return dropped_figure(candidate, reason, error.accuracy if isinstance(error, Refused) else None)


def dropped_figure(candidate: Candidate, reason: str, accuracy: Accuracy | None = None) -> Figure:
    return Figure(candidate.name, candidate.route, candidate.bytes, accuracy=accuracy, dropped=reason)


class Timed(NamedTuple):
    rounds: int
    figures: tuple[Figure, ...]
    chosen: str | None
    """The name of the candidate to ship; None if there is none to choose from."""
    notes: tuple[str, ...] = ()

    @property
    def route(self) -> Route | None:
        """The route of the chosen candidate."""
        return next((figure.route for figure in self.figures if figure.name == self.chosen), None)


def timed(candidates: Sequence[Opened], preferred: Sequence[str], seconds: float, finished: Run) -> Timed:
    """Time candidates side by side, and choose one; the first one is the base of the speed-ups.

    Args:
        preferred: the names to choose from, simplest first.
        seconds: for everything.

    Raises:
        Refused: one of them fails.
    """
    runs = {each.candidate.name: each.run for each in candidates}
    latencies = interleaved(runs, _FOR_ALL * seconds, finished)
    base = latencies[candidates[0].candidate.name]
    figures = tuple(_figure(each, latencies[each.candidate.name], base) for each in candidates)
    if not preferred:
        return Timed(len(base.rounds), figures, None)
    # If another candidate has a better median and isn't surely faster, these two are timed again alone: with only two,
    # there are more rounds in the same time.
    best = chosen(latencies, preferred)
    gains = {name: ratio(latencies[best], latencies[name]) for name in preferred}
    fastest = max(preferred, key=lambda name: gains[name].median)
    if not gains[fastest].may_pay:
        return Timed(len(base.rounds), figures, best)
    again = interleaved({name: runs[name] for name in (best, fastest)}, (1 - _FOR_ALL) * seconds, finished)
    gain = ratio(again[best], again[fastest])
    note = f"timed again, only these two: {fastest} is {gain} as {best}"
    return Timed(len(base.rounds), figures, fastest if gain.pays else best, (note,))


def _figure(opened: Opened, latency: Latency, base: Latency) -> Figure:
    made, seconds, p95, gain = opened.candidate, latency.median, latency.p95, ratio(base, latency)
    return Figure(made.name, made.route, made.bytes, opened.memory, seconds, p95, gain, made.accuracy)


def chosen(latencies: Mapping[str, Latency], preferred: Sequence[str]) -> str:
    """The name of the first preferred contender, unless a later one is surely faster, and so on."""
    best, *others = preferred
    for name in others:
        if ratio(latencies[best], latencies[name]).pays:
            best = name
    return best


def recommendation(figures: Sequence[Figure], name: str | None) -> str:
    """A sentence about the chosen candidate, given its name; None if there is nothing to choose from."""
    figure = next((each for each in figures if each.name == name), None)
    if figure is None or figure.speed_up is None:
        dropped = next((each for each in figures if each.route is not None and each.dropped), None)
        return "no file could be timed" if dropped is None else f"ship no file yet: {dropped.name}: {dropped.dropped}"
    gain = figure.speed_up
    told = f"ship {figure.name}{_gain_text(gain)}{budget_text(figure.accuracy)}"
    # In the table, another file may look faster than the one that is shipped.
    files = [each for each in figures if each.route is not None and each.speed_up is not None and not each.dropped]
    fastest = max(files, key=lambda each: 0.0 if each.speed_up is None else each.speed_up.median)
    if fastest.speed_up is not None and fastest.speed_up.median >= LEAST_GAIN * gain.median:
        kept = "exact file is shipped"
        if fastest.accuracy is None or figure.accuracy is not None:
            # A quantized file and its runtimes have one format.
            is_same_file = fastest.route and figure.route and fastest.route.format == figure.route.format
            kept = "simpler way to run it is recommended" if is_same_file else "simpler file is shipped"
        told += (
            f"; tie: {fastest.name}, {fastest.speed_up.median:.2f} times as fast as eager here, isn't surely faster, "
            f"and the {kept}"
        )
    rest = [each for each in figures if each.route is None and each.name != EAGER and not each.dropped]
    if faster := [each for each in rest if each.seconds and each.seconds * 1.05 < (figure.seconds or 0)]:
        told += f"; in Python, {faster[0].name} is faster"
        told += "" if faster[0].speed_up is None else f": {faster[0].speed_up.median:.2f} times as fast as eager"
    return told


def _gain_text(gain: Ratio) -> str:
    """The speed-up over eager after the name of a file, in words that hold for its bounds."""
    if gain.pays:
        return f": {gain.median:.2f} times as fast as eager"
    if gain.high < 1:
        return f", but not for speed: it is slower than eager, {gain} as eager"
    if gain.may_pay:
        return f", but a gain isn't sure: it is {gain} as eager, and the times vary too much to tell"
    return f", but expect no gain: it is {gain} as eager, which is within the noise"


def budget_text(accuracy: Accuracy | None) -> str:
    """The figures of a lossy candidate after a sentence on it; "" for an exact one."""
    return "" if accuracy is None else f", {WITHIN_BUDGET}: {accuracy}"
