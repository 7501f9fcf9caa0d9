"""Calls of several threads are joined into batches; each gets its own rows, its own error, and none is lost."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from torch import nn

from optimize_export import BatchedModel, Batching, LoadedModel, QueueFull, load
from optimize_export.errors import UsageError
from optimize_export.relations import Relation
from optimize_export.runtime.batching import _refuse_other_stream
from optimize_export.runtime.metrics import Metrics
from optimizer import Bundle, export


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"product": x * weight, "sum": (x + 1).sum(-1)}


def a_call(rows: int = 1, length: int = 4, start: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows * length).reshape(rows, length) + 1.0 + start, torch.full((rows, 1), 2.0)


def made(folder: Path, name: str, model: nn.Module, *args: torch.Tensor, **options: Any) -> Bundle:
    return export(model, example_inputs=args, output=folder / name, formats=("torchscript",), effort="quick", **options)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    args = a_call(3)
    return made(
        tmp_path_factory.mktemp("joined"),
        "net",
        Scaled(),
        *args,
        row_independence=True,
        dynamic={"x": (0, 1), "weight": (0,)},
    )


class Gate:
    """Holds the first run until it is opened, and counts the rows of all."""

    def __init__(self, model: LoadedModel) -> None:
        self.own, self.rows = model._runner, list[int]()
        self.entered, self.opened = threading.Event(), threading.Event()
        self.device = model.device
        model._runner = self

    def __call__(self, *tensors: Any) -> Any:
        self.rows.append(len(tensors[0]))
        self.entered.set()
        assert self.opened.wait(60)
        if bool((torch.as_tensor(tensors[0]) > 1e6).any()):
            raise RuntimeError("An index is out of range.")
        return self.own(*tensors)


Opened = tuple[BatchedModel, Gate]


@pytest.fixture
def gated(bundle: Bundle) -> Iterator[Callable[..., Opened]]:
    """A function of settings that loads the bundle with one instance, whose first run waits."""
    every: list[Opened] = []

    def opened(**settings: Any) -> Opened:
        model = load(bundle)
        gate = Gate(model)
        every.append((BatchedModel([model], Batching(instances=1, **settings).for_device("cpu", ())), gate))
        return every[-1]

    yield opened
    for run, gate in every:
        gate.opened.set()
        run.close()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


def waiting(run: BatchedModel) -> int:
    return run._line.waiting


def asked(run: BatchedModel, gate: Gate, pool: ThreadPoolExecutor, calls: Sequence[Any]) -> list[Future[Any]]:
    """The answers to calls, the first of which runs, and the others wait in their order."""
    answers = [pool.submit(run, *calls[0])]
    assert gate.entered.wait(60)
    for each in calls[1:]:
        answers.append(pool.submit(run, *each))
        until(lambda: waiting(run) == len(answers) - 1)
    return answers


def assert_answers(got: dict[str, Any], call: tuple[torch.Tensor, torch.Tensor]) -> None:
    wanted = Scaled()(*call)
    assert list(got) == list(wanted)
    for name, each in wanted.items():
        assert torch.equal(torch.as_tensor(got[name]), each)


def test_calls_that_wait_are_one_run_and_each_gets_its_rows(gated: Callable[..., Opened]) -> None:
    run, gate = gated(max_batch=8)
    calls = [a_call(rows, start=100.0 * number) for number, rows in enumerate((1, 2, 1, 3, 5, 20))]
    with ThreadPoolExecutor(8) as pool:
        answers = asked(run, gate, pool, calls)
        gate.opened.set()
        for answer, call in zip(answers, calls, strict=True):
            assert_answers(answer.result(60), call)
    # The last one has more rows than a batch, so it runs by itself.
    assert gate.rows == [1, 6, 5, 20]


def test_an_output_is_an_array_of_its_own(gated: Callable[..., Opened]) -> None:
    run, gate = gated()
    with ThreadPoolExecutor(3) as pool:
        arrays = [tuple(each.numpy() for each in a_call(1, start=number)) for number in range(3)]
        answers = asked(run, gate, pool, arrays)
        gate.opened.set()
        joined = [each.result(60)["product"] for each in answers]
    assert sorted(gate.rows) == [1, 2]
    for each in joined:
        assert isinstance(each, numpy.ndarray)
        assert each.base is None or each.base.nbytes == each.nbytes


def test_only_calls_that_fit_together_are_joined(gated: Callable[..., Opened]) -> None:
    run, gate = gated()
    first, short, other = a_call(), a_call(1, 4, 7.0), a_call(1, 6)
    with ThreadPoolExecutor(6) as pool:
        arrays = tuple(each.numpy() for each in short)
        calls = [first, short, other, arrays, short, arrays]
        answers = asked(run, gate, pool, calls)
        gate.opened.set()
        for answer, call in zip(answers, (first, short, other, short, short, short), strict=True):
            assert_answers(answer.result(60), call)
    assert gate.rows == [1, 2, 1, 2]


def test_a_wrong_call_is_refused_before_it_waits(gated: Callable[..., Opened]) -> None:
    run, gate = gated()
    gate.opened.set()
    with pytest.raises(UsageError, match="has the shape"):
        run(torch.ones(2, 4), torch.ones(3, 1))
    with pytest.raises(UsageError, match="is int64, but the file takes float32"):
        run(torch.ones(2, 4).long(), torch.ones(2, 1))
    assert gate.rows == []


def test_a_call_that_fails_leaves_its_neighbours_alone(gated: Callable[..., Opened]) -> None:
    run, gate = gated()
    calls = [a_call(), a_call(1, start=1.0), a_call(1, start=1e7), a_call(1, start=3.0)]
    with ThreadPoolExecutor(4) as pool:
        answers = asked(run, gate, pool, calls)
        gate.opened.set()
        with pytest.raises(RuntimeError, match="out of range"):
            answers.pop(2).result(60)
        del calls[2]
        for answer, call in zip(answers, calls, strict=True):
            assert_answers(answer.result(60), call)
    assert gate.rows == [1, 3, 1, 1, 1]


def test_an_error_tells_nothing_of_the_batch_and_keeps_no_call(gated: Callable[..., Opened]) -> None:
    run, gate = gated()
    first = run._put(a_call(), {})
    assert gate.entered.wait(60)
    calls = [a_call(1, start=1e7), a_call(1, start=1e8)]
    kept = [weakref.ref(x) for x, _ in calls]
    answers = [run._put(each, {}) for each in calls]
    gc.disable()
    try:
        gate.opened.set()
        errors = [each.exception(60) for each in answers]
        assert [type(error) for error in errors] == [RuntimeError, RuntimeError]
        assert [error.__context__ for error in errors if error is not None] == [None, None]
        del calls, answers, errors
        until(lambda: [each() for each in kept] == [None, None])
    finally:
        gc.enable()
    assert_answers(run.model._outputs.rebuild(first.result(60)), a_call())


def test_a_model_that_ends_its_thread_leaves_nobody_waiting(gated: Callable[..., Opened]) -> None:
    run, gate = gated()
    gate.opened.set()
    own = gate.own

    def exits(*tensors: Any) -> Any:
        raise SystemExit(3)

    gate.own = exits
    with pytest.raises(SystemExit):
        run(*a_call())
    gate.own = own
    assert_answers(run(*a_call()), a_call())


def test_a_batch_beyond_the_limits_of_the_file_isnt_run(gated: Callable[..., Opened]) -> None:
    run, gate = gated()
    # x is [batch, 4].
    batch = run.model._specs[0][2][0]
    run.model._limits = (Relation(f"{batch} <= 4"),)
    calls = [a_call(rows, start=100.0 * rows) for rows in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:
        answers = asked(run, gate, pool, calls)
        gate.opened.set()
        for answer, call in zip(answers, calls, strict=True):
            assert_answers(answer.result(60), call)
    assert gate.rows == [1, 2, 3]


def test_a_nan_stays_in_its_call(gated: Callable[..., Opened]) -> None:
    run, gate = gated()
    with ThreadPoolExecutor(3) as pool:
        answers = asked(run, gate, pool, [a_call(1, start=start) for start in (0.0, float("nan"), 5.0)])
        gate.opened.set()
        found = [answer.result(60)["product"] for answer in answers]
    assert [bool(each.isnan().all()) for each in found] == [False, True, False]
    assert torch.equal(found[2], a_call(1, start=5.0)[0] * 2)


def test_a_full_queue_says_so_and_cancelled_calls_make_room(gated: Callable[..., Opened]) -> None:
    run, gate = gated(queue=2)

    async def ask() -> None:
        tasks = []
        for number in range(3):
            tasks.append(asyncio.create_task(run.submit(*a_call(1, start=number))))
            await asyncio.sleep(0)
            until(gate.entered.is_set)
        with pytest.raises(QueueFull, match="2 calls wait, as many as may"):
            await run.submit(*a_call())
        tasks[1].cancel()
        await asyncio.sleep(0)
        late = asyncio.create_task(run.submit(*a_call(1, start=9.0)))
        await asyncio.sleep(0)
        gate.opened.set()
        assert_answers(await tasks[0], a_call(1, start=0.0))
        assert_answers(await tasks[2], a_call(1, start=2.0))
        assert_answers(await late, a_call(1, start=9.0))
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]

    asyncio.run(ask())
    assert gate.rows == [1, 2]


def test_a_call_waits_for_others_at_most_as_long_as_it_may(bundle: Bundle) -> None:
    model = load(bundle)
    gate = Gate(model)
    gate.opened.set()
    with BatchedModel([model], Batching(4, max_wait=0.2, instances=1)) as run, ThreadPoolExecutor(5) as pool:
        started = time.monotonic()
        run(*a_call())
        assert time.monotonic() - started >= 0.2
        # As many as a batch takes don't wait.
        with BatchedModel([model], Batching(4, max_wait=50.0, instances=1)) as full:
            # A call of another shape that waits doesn't hold them back.
            other = pool.submit(full, *a_call(1, 6))
            until(lambda: waiting(full) == 1)
            for answer in [pool.submit(full, *a_call()) for _ in range(4)]:
                answer.result(30)
            assert not other.done()
            full.close()
            assert_answers(other.result(30), a_call(1, 6))
    assert gate.rows == [1, 4, 1]


def test_closing_answers_what_waits_and_refuses_the_rest(gated: Callable[..., Opened]) -> None:
    run, gate = gated()
    with ThreadPoolExecutor(4) as pool:
        answers = asked(run, gate, pool, [a_call(1, start=number) for number in range(3)])
        closing = pool.submit(run.close)
        until(lambda: run._line._closed)
        with pytest.raises(UsageError, match="was closed: load the bundle again"):
            run(*a_call())
        gate.opened.set()
        closing.result(60)
        for number, answer in enumerate(answers):
            assert_answers(answer.result(60), a_call(1, start=number))
    assert not any(thread.is_alive() for thread in run._threads)
    run.close()


def test_a_dropped_model_ends_its_threads(bundle: Bundle) -> None:
    run = load(bundle, batching=True)
    threads = run._threads
    assert_answers(run(*a_call()), a_call())
    del run
    gc.collect()
    until(lambda: not any(thread.is_alive() for thread in threads))


def test_a_dropped_model_is_collected_wherever_the_collector_runs(bundle: Bundle) -> None:
    """It may run in a thread of the model, where it has its lock."""
    run = load(bundle, batching=Batching(instances=2))
    line, threads = run._line, run._threads
    cycle: list[Any] = [run]
    cycle.append(cycle)
    del run
    with line._changed:
        del cycle
        gc.collect()
        assert line._closed
    until(lambda: not any(thread.is_alive() for thread in threads))


def test_a_call_wakes_no_more_threads_than_it_needs(bundle: Bundle) -> None:
    with load(bundle, batching=Batching(instances=16)) as run:
        wait, woken = run._line._changed.wait, list[None]()

        def counted(timeout: float | None = None) -> bool:
            woken.append(None)
            return wait(timeout)

        run._line._changed.wait = counted  # type: ignore[method-assign]
        for _ in range(20):
            run(*a_call())
    assert len(woken) <= 2 * 20 + 16


def test_cancelled_calls_take_no_room_in_a_batch(gated: Callable[..., Opened]) -> None:
    run, gate = gated(max_batch=4)
    with ThreadPoolExecutor(8) as pool:
        first = asked(run, gate, pool, [a_call()])
        for _ in range(3):
            run._put(a_call(1, start=50.0), {}).cancel()
        rest = [run._put(a_call(1, start=number), {}) for number in range(4)]
        gate.opened.set()
        assert_answers(first[0].result(60), a_call())
        for each in rest:
            each.result(60)
    assert gate.rows == [1, 4]


def counts(run: BatchedModel) -> dict[str, float]:
    """The samples of the metrics, without the name that all begin with; of the labels only the outcome or the bound."""
    found = {}
    for family in text_string_to_metric_families(run.metrics()):
        for each in family.samples:
            labels = {**each.labels}
            assert labels.pop("model") == run.model.path.name
            found[" ".join([each.name.removeprefix("optimize_export_"), *labels.values()])] = each.value
    return found


def test_the_metrics_count_each_call_once(gated: Callable[..., Opened]) -> None:
    run, gate = gated(max_batch=4, queue=4)
    with ThreadPoolExecutor(8) as pool:
        first = asked(run, gate, pool, [a_call()])
        bad = run._put(a_call(1, start=1e7), {})
        given_up = run._put(a_call(1, start=50.0), {})
        good = [run._put(a_call(1, start=number), {}) for number in range(2)]
        with pytest.raises(QueueFull):
            run(*a_call())
        found = counts(run)
        assert (found["waiting_calls"], found["queue_limit_calls"]) == (4, 4)
        assert found["calls_total answered"] == 0
        given_up.cancel()
        gate.opened.set()
        for each in (*first, *good):
            each.result(60)
        assert isinstance(bad.exception(60), RuntimeError)
    found = counts(run)
    outcomes = {name: found[f"calls_total {name}"] for name in ("answered", "failed", "refused", "cancelled")}
    assert outcomes == {"answered": 3, "failed": 1, "refused": 1, "cancelled": 1}
    # The batch that failed ran again call by call.
    assert gate.rows == [1, 3, 1, 1, 1]
    assert (found["batch_rows_count"], found["batch_rows_sum"], found["batch_rows_bucket 1.0"]) == (3, 3, 3)
    assert found["latency_seconds_count"] == found["latency_seconds_bucket +Inf"] == 3
    assert 0 < found["latency_seconds_sum"] < 60
    assert found["waiting_calls"] == 0


def test_the_metrics_of_a_model_with_an_odd_name_can_be_read() -> None:
    metrics = Metrics('a"b\\c\nd')
    metrics.add_run(200, [0.003, 20.0])
    families = {each.name: each for each in text_string_to_metric_families(metrics.text(0, 1))}
    latency = families["optimize_export_latency_seconds"]
    assert (latency.unit, latency.samples[0].labels["model"]) == ("seconds", 'a"b\\c\nd')
    buckets = {each.labels["le"]: each.value for each in latency.samples if "le" in each.labels}
    assert (buckets["0.0025"], buckets["0.005"], buckets["10.0"], buckets["+Inf"]) == (0, 1, 1, 2)
    rows = {each.labels.get("le"): each.value for each in families["optimize_export_batch_rows"].samples}
    assert (rows["128.0"], rows["+Inf"]) == (0, 1)


def test_the_program_ends_though_nobody_closed_it(bundle: Bundle) -> None:
    code = f"import torch\nfrom optimize_export import load\nrun = load({str(bundle.path)!r}, batching=True)\n"
    code += "print(run(torch.ones(2, 4), torch.ones(2, 1))['sum'].tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[8.0, 8.0]\n", "")


def _call_in_fork(run: BatchedModel, told: Any) -> None:
    with pytest.raises(UsageError, match="before this process was forked"):
        run.metrics()
    try:
        run(*a_call())
    except UsageError as error:
        told.put(str(error))


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_must_load_its_own(bundle: Bundle) -> None:
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    with load(bundle, batching=True) as run:
        child = context.Process(target=_call_in_fork, args=(run, told))
        child.start()
        assert "load it in each process" in told.get(timeout=60)
        child.join(60)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_fork_ends_though_the_lock_was_held(bundle: Bundle) -> None:
    code = f"""
import gc, os, threading, torch
from optimize_export import load
run = load({str(bundle.path)!r}, batching=True)
held, done = threading.Event(), threading.Event()
def hold(condition):
    with condition:
        held.set()
        done.wait()
threading.Thread(target=hold, args=(run._line._changed,), daemon=True).start()
held.wait()
if os.fork() == 0:
    run.close()
    del run
    gc.collect()
else:
    os.wait()
    done.set()
    print(run(torch.ones(2, 4), torch.ones(2, 1))['sum'].tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[8.0, 8.0]\n")


def test_rows_that_may_depend_on_each_other_are_refused(tmp_path: Path) -> None:
    unchecked = made(tmp_path, "unchecked", Scaled(), *a_call(3))
    with pytest.raises(
        UsageError, match="nothing says that its rows don't depend on each other: build it with --row-ind"
    ):
        load(unchecked, batching=True)
    assert isinstance(load(unchecked, batching=False), LoadedModel)
    fixed = made(tmp_path, "fixed", Scaled(), *a_call(3), static_batch=True)
    with pytest.raises(UsageError, match="isn't one open batch: build it without --static-batch"):
        load(fixed, batching=True)


def test_calls_in_a_stream_of_the_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "default")
    _refuse_other_stream(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "other")
    with pytest.raises(UsageError, match="outside of a stream of your own"):
        _refuse_other_stream(torch.device("cuda"))


def test_settings(bundle: Bundle) -> None:
    with pytest.raises(UsageError, match="batching must be True, False or a Batching, not 'yes'"):
        load(bundle, batching="yes")  # type: ignore[call-overload]
    for wrong in ({"max_batch": 0}, {"queue": None}, {"instances": True}, {"max_wait": -1}, {"max_wait": float("nan")}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            Batching(**wrong)  # type: ignore[arg-type]
    with load(bundle, batching=Batching(instances=3)) as run:
        assert (run.batching.max_batch, run.batching.instances, len(run._threads)) == (8, 3, 3)
    assert Batching().for_device("cuda", (1, 32)) == Batching(32, instances=1)


@pytest.mark.slow
def test_under_load_every_answer_belongs_to_its_call(bundle: Bundle) -> None:
    """64 callers, random sizes, wrong shapes, NaN, calls that fail and calls that are cancelled."""
    model = load(bundle)
    gate = Gate(model)
    gate.opened.set()
    end, answered = time.monotonic() + 5, [0] * 64

    def ask(run: BatchedModel, number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end:
            call = a_call(draw.randint(1, 5), draw.choice((2, 4, 4, 7)), start=draw.random() * 1e5)
            kind = draw.random()
            try:
                if kind < 0.1:
                    with pytest.raises(UsageError):
                        run(call[0], call[1][:, :0])
                elif kind < 0.2:
                    assert bool(run(call[0] * torch.nan, call[1])["sum"].isnan().all())
                elif kind < 0.25:
                    with pytest.raises(RuntimeError, match="out of range"):
                        run(call[0] + 1e7, call[1])
                elif kind < 0.35:
                    run._put(call, {}).cancel()
                else:
                    assert_answers(run(*call), call)
                answered[number] += 1
            except QueueFull:
                time.sleep(0.001)

    with (
        BatchedModel([model] * 3, Batching(16, 0.001, queue=48)) as run,
        ThreadPoolExecutor(64) as pool,
    ):
        for each in [pool.submit(ask, run, number) for number in range(64)]:
            each.result(120)
        until(lambda: waiting(run) == 0)
    assert min(answered) > 0
    assert max(gate.rows) > 5
