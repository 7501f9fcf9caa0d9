"""Latencies under load count from the arrivals, and what isn't answered counts as failed."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from exporters.child_process import OwnChild
from optimize_export.errors import UsageError
from optimize_export.runtime import Batching, QueueFull
from optimize_export.runtime.traffic import Service, arrivals, at_rate, back_to_back, percentile
from optimizer import Bundle, export


class OneAtATime:
    """A service that answers one call after another on a clock of its own, which only its work and sleep move."""

    def __init__(self, seconds: float, stall_at: int = -1, stall: float = 0.0) -> None:
        self.now, self.calls = 100.0, 0
        self._seconds, self._stall_at, self._stall = seconds, stall_at, stall

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> Future[Any]:
        self.now += self._seconds + (self._stall if self.calls == self._stall_at else 0)
        self.calls += 1
        answer = Future[Any]()
        answer.set_result(None)
        return answer


def test_a_stall_shows_in_all_calls_that_came_meanwhile() -> None:
    service = OneAtATime(0.001, stall_at=100, stall=1.0)
    found = at_rate(service, 100, 10, 10, clock=service.clock, sleep=service.sleep)
    # One call in a thousand stalls, and a tenth of all wait for it: 100 calls a second come while it does.
    assert found.p99 > 0.8
    assert found.p50 < 0.002
    assert (found.calls, found.failed, found.offered) == (len(arrivals(100, 10, 0)), 0, 100)
    steady = OneAtATime(0.001)
    assert at_rate(steady, 100, 10, 10, clock=steady.clock, sleep=steady.sleep).p99 < 0.01


def test_the_answers_of_an_overloaded_service_come_ever_later() -> None:
    service = OneAtATime(0.02)
    found = at_rate(service, 100, 10, 10, clock=service.clock, sleep=service.sleep)
    assert found.rate == pytest.approx(50, rel=0.02)
    assert found.p95 > 8


def test_callers_back_to_back_meet_the_time_of_a_call() -> None:
    service = OneAtATime(0.004)
    found = back_to_back(service, 1, 2.0, clock=service.clock)
    assert (found.calls, found.offered) == (500, None)
    assert (found.rate, found.p50, found.p99) == pytest.approx((250, 0.004, 0.004))


def test_refused_and_forgotten_calls_are_failed() -> None:
    service = OneAtATime(0.01)
    forgotten: list[Future[Any]] = []

    def put() -> Future[Any]:
        if len(forgotten) == 2:
            raise QueueFull("2 calls wait, as many as may.")
        forgotten.append(Future())
        service.now += 0.01
        return forgotten[-1]

    found = at_rate(put, 100, 0.1, 0.1, clock=service.clock, sleep=service.sleep)
    assert (found.calls, found.failed) == (0, len(arrivals(100, 0.1, 0)))
    assert (found.rate, found.p95, found.processor) == (0, math.inf, math.inf)
    assert all(each.cancelled() for each in forgotten)


def test_an_error_of_the_model_ends_the_load() -> None:
    def put() -> Future[Any]:
        answer = Future[Any]()
        answer.set_exception(RuntimeError("An index is out of range."))
        return answer

    service = OneAtATime(0.01)
    with pytest.raises(RuntimeError, match="out of range"):
        at_rate(put, 100, 0.1, 0.1, clock=service.clock, sleep=service.sleep)


def test_never_more_calls_wait_than_there_are_callers() -> None:
    waiting: list[Future[Any]] = []
    most = 0
    lock = threading.Lock()

    def put() -> Future[Any]:
        nonlocal most
        with lock:
            waiting.append(Future())
            most = max(most, len(waiting))
            if len(waiting) == 3:
                threading.Timer(0.001, answer).start()
            return waiting[-1]

    def answer() -> None:
        with lock:
            ready, waiting[:] = list(waiting), []
        for each in ready:
            if each.set_running_or_notify_cancel():
                each.set_result(None)

    ticks = iter(range(10**6))
    found = back_to_back(put, 3, 25, clock=lambda: next(ticks))
    assert most == 3
    # Those that wait at the end are neither answered nor failed.
    assert found.calls > 3 > found.failed == 0


def test_arrivals_are_drawn_from_a_seed() -> None:
    times = arrivals(50, 100, 1)
    assert times == arrivals(50, 100, 1) == sorted(times) != arrivals(50, 100, 2)
    assert (len(times), len(arrivals(0.001, 1, 0))) == (5000, 1)
    assert 0 <= times[0] <= times[-1] <= 100
    # Poisson: as many gaps are longer than the mean as an exponential distribution has, 1 in e.
    gaps = [after - before for before, after in pairwise(times)]
    assert sum(gap > 0.02 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)


def test_percentiles() -> None:
    values = [float(each) for each in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99)] == [50, 95, 99]
    assert (percentile([3.0], 0.99), percentile([], 0.5)) == (3, math.inf)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    options: dict[str, Any] = {"formats": ("onnx",), "effort": "quick", "row_independence": True}
    return export(
        Doubled(), example_inputs=(torch.randn(3, 4),), output=tmp_path_factory.mktemp("put") / "net", **options
    )


def test_a_bundle_is_put_under_load_in_a_child(bundle: Bundle) -> None:
    child = OwnChild(partial(Service, bundle.path, 1, Batching(4, instances=1)), "the service")
    try:
        closed = child("back_to_back", 8, 0.1, longest=60)
        offered = child("at_rate", 50.0, 0.2, 60.0, 0, longest=60)
    finally:
        child.close()
    assert closed.calls > 0 < closed.processor
    assert (offered.calls, offered.failed) == (len(arrivals(50, 0.2, 0)), 0)


def test_the_load_is_single_rows_of_the_golden_inputs(bundle: Bundle) -> None:
    service = Service(bundle.path, None, None)
    taken = [next(service._rows)[0] for _ in range(3)]
    assert {each.shape for each in taken} == {(1, 4)}
    assert not numpy.array_equal(taken[0], taken[1])


def test_rows_that_may_depend_on_each_other_are_refused(tmp_path: Path) -> None:
    made = export(Doubled(), example_inputs=(torch.randn(3, 4),), output=tmp_path / "net", formats=("onnx",))
    for batching in (None, Batching(4, instances=1)):
        with pytest.raises(UsageError, match="build it with --row-independence"):
            Service(made.path, 1, batching)
