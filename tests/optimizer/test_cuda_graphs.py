"""CUDA graphs of a runner, with a GPU made of fakes. tests/test_gpu.py has those on a real one."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from optimize_export.runtime import cuda_graphs
from optimize_export.runtime.cuda_graphs import CaptureFailed, Graphed


class Gpu:
    """What the fakes saw, and what they answer."""

    def __init__(self) -> None:
        self.graph: Any = None  # the graph that is being captured
        self.captures: list[tuple[Any, Any, str]] = []  # pool, stream and mode of each capture
        self.free, self.total, self.cached = 90, 100, 0
        self.taken = 0  # by each capture
        self.pools = 0


class Graph:
    replay: Callable[[], None]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    class Event:
        def wait(self) -> None: ...
        def record(self) -> None: ...

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

    def pool() -> int:
        gpu.pools += 1
        return gpu.pools

    @contextmanager
    def capture(graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        gpu.captures.append((pool, stream, capture_error_mode))
        gpu.graph = graph
        try:
            yield
        except RuntimeError:
            raise RuntimeError("the capture was invalidated") from None
        finally:
            gpu.graph = None
        gpu.free -= gpu.taken

    fakes = {
        **{"Event": Event, "Stream": Stream, "CUDAGraph": Graph, "graph": capture, "graph_pool_handle": pool},
        **{"stream": lambda stream: nullcontext(), "current_stream": Stream},
        **{"mem_get_info": lambda: (gpu.free, gpu.total), "memory_allocated": lambda: 0},
        "memory_reserved": lambda: gpu.cached,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    # All tensors are on the CPU here.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return gpu


class Doubled:
    """A function that a fake graph can replay, and that can't be captured at some sizes."""

    def __init__(self, gpu: Gpu, unfit: tuple[int, ...] = ()) -> None:
        self.gpu, self.unfit = gpu, unfit
        self.calls: list[int] = []

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        self.calls.append(len(x))
        if len(x) == 13:
            raise ValueError("13 rows are too many")
        if self.gpu.graph is not None and len(x) in self.unfit:
            raise RuntimeError("operation not permitted when stream is capturing\nand further lines")
        out = x * 2
        if self.gpu.graph is not None:
            self.gpu.graph.replay = lambda: out.copy_(x * 2)
        return (out,)


def right(run: Graphed, size: int) -> torch.Tensor:
    x = torch.rand(size)
    (out,) = run(x)
    assert torch.equal(out, x * 2)
    return out


def test_a_shape_is_recorded_once_and_its_outputs_are_the_callers(gpu: Gpu) -> None:
    function = Doubled(gpu)
    run = Graphed(function)
    first = right(run, 3)
    kept = first.clone()
    right(run, 3)
    assert torch.equal(first, kept)
    # Three warm runs and the capture.
    assert function.calls == [3] * 4
    right(run, 5)
    assert function.calls == [3] * 4 + [5] * 4
    assert run.why_none == ""


def test_all_graphs_of_a_runner_share_a_pool_and_a_stream(gpu: Gpu) -> None:
    run, other = Graphed(Doubled(gpu)), Graphed(Doubled(gpu))
    for size in (3, 5):
        right(run, size)
        right(other, size)
    (first, again), (its, its_again) = gpu.captures[::2], gpu.captures[1::2]
    assert first == again
    assert its == its_again
    assert first[0] != its[0]
    assert {mode for *_, mode in gpu.captures} == {"thread_local"}


def test_a_shape_that_cannot_be_recorded_runs_without_a_graph(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    function = Doubled(gpu, unfit=(4, 6))
    run = Graphed(function)
    right(run, 3)
    for size in (4, 4, 6, 3, 4):
        right(run, size)
    told = [record for record in caplog.records if record.name == cuda_graphs.__name__]
    assert [(record.levelno, record.getMessage()) for record in told] == [
        (
            logging.WARNING,
            "calls of some shapes run without a CUDA graph: operation not permitted when stream is capturing",
        )
    ]
    assert run.why_none == "operation not permitted when stream is capturing"
    # Not captured again, and later graphs take nothing from the pool of a failed capture.
    assert len(gpu.captures) == 3
    right(run, 7)
    assert len({pool for pool, *_ in gpu.captures}) == 3


def test_an_error_of_the_function_is_raised(gpu: Gpu) -> None:
    run = Graphed(Doubled(gpu))
    for _ in range(2):
        with pytest.raises(ValueError, match="13 rows are too many"):
            run(torch.rand(13))
    assert (run.why_none, gpu.captures) == ("", [])
    right(run, 3)


def test_other_captures_may_fail_too(gpu: Gpu) -> None:
    def record(tensors: Any) -> Any:
        raise CaptureFailed("onnxruntime can't")

    run = Graphed(Doubled(gpu), record)
    right(run, 3)
    assert run.why_none == "onnxruntime can't"


def test_further_shapes_run_without_a_graph(gpu: Gpu) -> None:
    run = Graphed(Doubled(gpu))
    for size in range(20, 40):
        right(run, size)
        right(run, size)
    assert len(gpu.captures) == 16


def test_graphs_leave_memory_free(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    run = Graphed(Doubled(gpu))
    gpu.taken = 35
    right(run, 2)
    right(run, 3)
    # 20 are left: another graph of this size would leave less than a tenth.
    right(run, 4)
    right(run, 4)
    assert len(gpu.captures) == 2
    assert "GiB of the GPU's memory are free" in caplog.text
    # What torch keeps for later is free too.
    gpu.cached = 30
    right(run, 5)
    assert len(gpu.captures) == 3


def test_calls_of_several_threads_wait_for_each_other(gpu: Gpu) -> None:
    inside = threading.Semaphore(1)

    class Alone(Doubled):
        def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            assert inside.acquire(blocking=False)
            try:
                return super().__call__(x)
            finally:
                inside.release()

    run = Graphed(Alone(gpu, unfit=(4, 6)))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: right(run, 3 + number % 5), range(200)))
    assert len(gpu.captures) == 5
