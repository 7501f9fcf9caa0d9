"""Put a bundle under load: calls back to back, or at a rate, and how long each took.

At a rate, the latency of a call counts from its scheduled arrival, which is drawn before. So a stall shows in all calls that
should have come meanwhile, not only in the one that was running (coordinated omission).
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from optimize_export.errors import UsageError
from optimize_export.manifest import read_manifest
from optimize_export.runtime.batching import BatchedModel, Batching, QueueFull, refuse_unjoined
from optimize_export.runtime.loading import first_inputs, load

Put = Callable[[], "Future[Any]"]
"""Begins a call; raises `QueueFull` if it is refused."""
Clock = Callable[[], float]

# Seconds of calls before the first measurement: runtimes allocate and optimize in their first calls.
_WARM_UP = 0.2


@dataclass(frozen=True)
class Traffic:
    """What calls met: seconds of a call, and calls a second."""

    offered: float | None
    """Calls a second that came; None where callers waited for an answer before they called again."""
    calls: int
    """Those that were answered."""
    failed: int
    """Those that the full queue refused, and at a rate those that waited too long for a run."""
    rate: float
    """Answers a second."""
    p50: float
    p95: float
    p99: float
    """Percentiles of the answered calls; infinite without one."""
    processor: float
    """Processor seconds of a call, with those of the callers; infinite without one."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrivals of independent callers, in seconds after the start; at least one.

    They are a Poisson process of known number, which is evenly distributed: a short load has the rate that it should have.
    """
    draw = random.Random(seed)
    return sorted(draw.uniform(0, seconds) for _ in range(max(1, round(rate * seconds))))


def at_rate(
    put: Put,
    rate: float,
    seconds: float,
    patience: float,
    seed: int = 0,
    *,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Traffic:
    """Open load: calls come at their times, whether or not earlier ones were answered.

    Args:
        rate: calls a second.
        seconds: in which they come.
        patience: seconds after that in which answers count; calls that still wait for a run then are given up.
    """
    schedule = arrivals(rate, seconds, seed)
    tally = _Tally(clock)
    for at in schedule:
        if (early := tally.started + at - clock()) > 0:
            sleep(early)
        tally.begin(put, tally.started + at)
    return tally.result(rate, patience)


def back_to_back(put: Put, callers: int, seconds: float, *, clock: Clock = time.perf_counter) -> Traffic:
    """Closed load: each caller calls again as soon as it has its answer; the last calls end with those that run."""
    room = threading.Semaphore(callers)
    tally = _Tally(clock)
    while True:
        room.acquire()
        since = clock()
        if since >= tally.started + seconds:
            return tally.result(None, 0.0)
        tally.begin(put, since, room.release)


class _Tally:
    """The calls of one load."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._latencies: list[float] = []
        self._failed = 0
        self._error: BaseException | None = None
        self._waiting: set[Future[Any]] = set()
        self._changed = threading.Condition()
        self._used = time.process_time()
        self.started = self._last = clock()

    def begin(self, put: Put, since: float, then: Callable[[], object] = lambda: None) -> None:
        """Begin a call whose latency counts from `since`."""
        try:
            answer = put()
        except QueueFull:
            self._failed += 1
            then()
            return
        with self._changed:
            self._waiting.add(answer)
        answer.add_done_callback(partial(self._ended, since, then))

    def _ended(self, since: float, then: Callable[[], object], answer: Future[Any]) -> None:
        now = self._clock()
        with self._changed:
            self._waiting.discard(answer)
            if answer.cancelled():
                self._failed += 1
            elif (error := answer.exception()) is not None:
                self._error = error
            else:
                self._latencies.append(now - since)
                self._last = now
            self._changed.notify_all()
        then()

    def result(self, offered: float | None, patience: float) -> Traffic:
        """Wait for the answers, and give up those that still wait for a run after `patience` seconds.

        Raises:
            Exception: that of a call that failed for another reason than a full queue.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, patience)
            waiting = list(self._waiting)
        for answer in waiting:
            answer.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
        if self._error is not None:
            raise self._error
        found, seconds = sorted(self._latencies), self._last - self.started
        p50, p95, p99 = (percentile(found, share) for share in (0.5, 0.95, 0.99))
        used = time.process_time() - self._used
        return Traffic(
            offered,
            len(found),
            0 if offered is None else self._failed,
            len(found) / seconds if seconds > 0 else 0.0,
            p50,
            p95,
            p99,
            used / len(found) if found else math.inf,
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The least of the sorted values that this share of them doesn't exceed (nearest rank); infinite without values."""
    return values[min(len(values), math.ceil(share * len(values))) - 1] if values else math.inf


def callers_of(batching: Batching) -> int:
    """As many callers as keep all instances at full batches: another batch waits while each runs."""
    return min(batching.queue, 2 * (batching.instances or 1) * (batching.max_batch or 1))


class Service:
    """A bundle that was loaded as a service, for loads of the rows of its first golden call."""

    def __init__(self, path: Path, threads: int | None, batching: Batching | None) -> None:
        """Load the bundle on the CPU.

        Args:
            threads: of each run; None with those of the recommended route.
            batching: None to answer one call after another.

        Raises:
            UsageError: its calls can't be joined, or numpy lacks the dtype of an input.
        """
        model = load(path, device="cpu", threads=threads, batching=batching or False)
        self._run = model if isinstance(model, BatchedModel) else BatchedModel([model], Batching(1, instances=1))
        self._alone = batching is None
        manifest = read_manifest(path)
        format = self._run.model.route.format
        refuse_unjoined(path, manifest, next(each for each in manifest["artifacts"] if each["format"] == format))
        inputs = first_inputs(path, manifest)
        if inputs is None:
            raise UsageError(f"{path} has inputs of a dtype that numpy lacks, so its golden inputs can't be its load.")
        self._rows = cycle([[each[row : row + 1] for each in inputs] for row in range(len(inputs[0]))])
        joined = self._run.batching
        # A full batch in each instance.
        self.back_to_back(1 if self._alone else (joined.instances or 1) * (joined.max_batch or 1), _WARM_UP)

    def __call__(self, kind: str, *args: Any) -> Traffic:
        """A load by the name of its method, for a parent process."""
        found: Traffic = getattr(self, kind)(*args)
        return found

    def back_to_back(self, callers: int, seconds: float) -> Traffic:
        return back_to_back(self._call if self._alone else self._put, callers, seconds)

    def at_rate(self, rate: float, seconds: float, patience: float, seed: int) -> Traffic:
        return at_rate(self._put, rate, seconds, patience, seed)

    def _put(self) -> Future[Any]:
        return self._run.put(list(next(self._rows)))

    def _call(self) -> Future[Any]:
        """The call of a program that does one after another, without a queue."""
        answer = Future[Any]()
        tensors = list(next(self._rows))
        self._run.model._check(tensors)
        answer.set_result(self._run.model._runner(*tensors))
        return answer
