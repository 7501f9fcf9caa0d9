"""A long run finds a leak, doesn't accuse what settles, and tells drift, threads and file handles."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optimize_export import export, load
from optimize_export.errors import BundleError
from optimize_export.runtime.growth import Soak, soak
from optimizer.command import engine
from optimizer.options import BenchOptions

MEGABYTE = 1 << 20


class Machine:
    """A fake clock, which each call moves, and a memory that a function of the finished calls gives."""

    def __init__(self, memory: Callable[[int], float], latency: Callable[[int], float] = lambda calls: 0.01) -> None:
        self.now, self.calls, self.own, self.latency = 0.0, 0, memory, latency

    def call(self) -> None:
        self.now += self.latency(self.calls)
        self.calls += 1

    def run(self, seconds: float = 60.0) -> Soak:
        found = soak(self.call, seconds, clock=lambda: self.now, memory=lambda: (int(self.own(self.calls)), 0))
        assert found is not None
        return found


def noisy(size: float) -> float:
    return random.uniform(-size, size)


@pytest.mark.parametrize(
    ("memory", "leaks"),
    [
        (lambda calls: 10 * MEGABYTE, False),
        # An allocator's noise without a trend, up to a megabyte.
        (lambda calls: 10 * MEGABYTE + noisy(MEGABYTE), False),
        # A cache that fills in the first half.
        (lambda calls: 10 * MEGABYTE + 4096 * min(calls, 3000), False),
        # One step of an arena.
        (lambda calls: 10 * MEGABYTE + 20 * MEGABYTE * (calls > 4000), False),
        # Less than the pages that an interpreter moves.
        (lambda calls: 10 * MEGABYTE + 20 * calls, False),
        (lambda calls: 10 * MEGABYTE + 1024 * calls, True),
        (lambda calls: 10 * MEGABYTE + 1024 * calls + noisy(100_000), True),
        # The leak shows in steps of the allocator.
        (lambda calls: 10 * MEGABYTE + 1024 * calls // 135_168 * 135_168, True),
    ],
)
def test_a_leak_is_growth_that_goes_on(memory: Callable[[int], float], leaks: bool) -> None:
    random.seed(0)
    found = Machine(memory).run()
    assert found.leaks == leaks
    assert ("a leak;" in found.sentence()) == leaks
    assert found.calls == pytest.approx(4800, abs=20)


def test_the_growth_and_its_error() -> None:
    found = Machine(lambda calls: 1024 * calls).run()
    assert found.resident.mean == pytest.approx(1_024_000)
    assert found.resident.error < 1e-6
    assert (
        "resident memory grows by 1.02e+03 ± 0 KB per 1,000 calls, the heap by 0 ± 0 KB per 1,000 calls: a leak"
        in found.sentence()
    )


def test_drift_is_that_of_the_latency() -> None:
    assert Machine(lambda calls: 0).run().drift == pytest.approx(1)
    slower = Machine(lambda calls: 0, lambda calls: 0.01 if calls < 3000 else 0.02).run()
    assert slower.drift == pytest.approx(2)
    assert "2.00 times that of the first" in slower.sentence()


def test_threads_and_file_handles_that_pile_up_are_told(tmp_path: Any) -> None:
    machine, end = Machine(lambda calls: 0), threading.Event()
    files: list[Any] = []

    def call() -> None:
        machine.call()
        if machine.calls % 1000 == 0:
            files.append((tmp_path / str(machine.calls)).open("w"))
            threading.Thread(target=end.wait).start()

    found = soak(call, 60, clock=lambda: machine.now, memory=lambda: (0, 0))
    end.set()
    for each in files:
        each.close()
    assert found is not None
    assert "threads went from" in found.sentence()
    assert "file handles went from" in found.sentence()


def test_a_call_that_takes_longer_than_a_block_is_made_once() -> None:
    found = Machine(lambda calls: 0, lambda calls: 30.0).run(6.0)
    assert [each.calls for each in found.blocks] == [1] * 12
    assert dataclasses.asdict(found) == found.to_json()


def test_where_the_system_tells_no_memory_nothing_is_claimed() -> None:
    machine = Machine(lambda calls: 0)
    assert soak(machine.call, 1, clock=lambda: machine.now, memory=lambda: None) is None


def test_a_leak_of_the_heap_is_found_in_few_calls() -> None:
    """What was freed before hides it from the resident memory; the heap is really read here."""
    kept: list[bytes] = []
    now = [0.0]

    def call() -> None:
        now[0] += 0.1
        kept.append(bytes(1024))

    found = soak(call, 60, clock=lambda: now[0])
    assert found is not None
    assert found.calls < 500
    if sys.platform == "linux":
        assert found.heap.leaks
        assert 1_024_000 <= found.heap.mean < 1_400_000
        kept_before = len(kept)
        clean = soak(lambda: now.__setitem__(0, now[0] + 0.1), 60, clock=lambda: now[0])
        assert clean is not None
        assert not clean.leaks
        assert len(kept) == kept_before


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = torch.randn(2, 4)
    output = tmp_path_factory.mktemp("soak") / "net"
    return export(nn.Linear(4, 4), example_inputs=(x,), output=output, formats=("torchscript",)).path


def test_a_file_that_fails_after_some_calls_is_a_sentence(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    def failing(path: Path, device: str) -> Any:
        model, calls = load(path, device=device), itertools.count()
        own = model._runner

        def runner(*tensors: Any) -> Any:
            if next(calls) > 10:
                raise RuntimeError("out of memory\nin line 7")
            return own(*tensors)

        model._runner = runner
        return model

    monkeypatch.setattr("optimizer.tuning.soak.load", failing)
    with pytest.raises(BundleError, match="torchscript in torch fails after some calls: RuntimeError: out of memory"):
        engine.bench(BenchOptions(path, "cpu", soak=5.0))


def test_the_command_has_an_exit_code_for_a_leak(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    clean = engine.bench(BenchOptions(path, "cpu", soak=0.5))
    assert (clean["exit_code"], clean["route"]) == (0, "torchscript in torch")
    assert clean["soak"]["calls"] > 0
    assert "no leak was found" in clean["notes"][0]

    def leaking(path: Path, device: str) -> Any:
        model, kept = load(path, device=device), list[bytes]()
        own = model._runner

        def runner(*tensors: Any) -> Any:
            kept.append(bytes(10_000))
            return own(*tensors)

        model._runner = runner
        return model

    monkeypatch.setattr("optimizer.tuning.soak.load", leaking)
    leaky = engine.bench(BenchOptions(path, "cpu", soak=2.0))
    assert leaky["exit_code"] == 10
    assert leaky["error"]["message"].startswith(f"{path} leaks in torchscript in torch: over ")
