"""Calls of many threads as few runs of a model: waiting calls are joined into batches, and their outputs split.

A call is checked in the thread that makes it, so a wrong one never reaches a batch. A batch that fails is run again call by
call, so that only the calls at fault get an error.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from optimize_export.errors import OptimizeExportError, UsageError
from optimize_export.runtime.cpus import usable_cpus
from optimize_export.runtime.metrics import Metrics

if TYPE_CHECKING:
    from optimize_export.runtime.loading import LoadedModel

# The rows of a run, where the files were only compared at fewer. Rows were proven to be independent, whatever their number.
_ROWS = 8


class QueueFull(OptimizeExportError):
    """As many calls wait as may: the caller should try again later, or elsewhere."""


@dataclass(frozen=True)
class Batching:
    """How calls are gathered into batches."""

    max_batch: int | None = None
    """The most rows of one run; by default 8, or the largest batch that was compared with the original if that is larger.
    A call with more rows is a run of its own."""
    max_wait: float = 0.0
    """The longest time in seconds that a call waits for others to join it, while a run could start. Calls that come while
    all instances run are joined anyway."""
    queue: int = 1024
    """The most calls that wait; one more raises `QueueFull`."""
    instances: int | None = None
    """The runs at the same time; by default one for each processor that this process may use, and one on a GPU."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "queue", "instances"):
            value = getattr(self, name)
            if not (value is None and name != "queue") and (type(value) is not int or value < 1):
                raise UsageError(f"{name} must be a whole number above 0, not {value!r}.")
        if not isinstance(self.max_wait, int | float) or not 0 <= self.max_wait < 60:
            raise UsageError(f"max_wait must be seconds from 0 to 60, not {self.max_wait!r}.")

    def for_device(self, device: str, compared: Sequence[int]) -> Batching:
        """These settings with a number for each that was left open."""
        return replace(
            self,
            max_batch=self.max_batch or max([_ROWS, *compared]),
            instances=self.instances or (1 if device == "cuda" else usable_cpus()),
        )


@dataclass(slots=True)
class _Call:
    """The tensors of a call that waits, and the future of its outputs."""

    tensors: list[Any]
    rows: int
    home: Any
    outputs: Future[Any] = field(default_factory=Future)
    came: float = field(default_factory=time.monotonic)


class BatchedModel:
    """A loaded model whose calls are gathered into batches. It may be called by many threads at once.

    `await run.submit(…)` is the same for asyncio. Arguments must stay as they are until the outputs are there. `close()`
    answers the calls that wait and ends the threads; so does leaving a `with` block, and the end of the program.
    """

    model: LoadedModel
    """As `load` returns it without batching; `route`, `device` and `notes` are there."""
    batching: Batching
    """The settings, with numbers for those that were left open."""

    def __init__(self, models: Sequence[LoadedModel], batching: Batching) -> None:
        """Start the threads.

        Args:
            models: one for each instance; they may be the same.
        """
        self.model, self.batching = models[0], batching
        self._line = _Line(batching, Metrics(self.model.path.resolve().name))
        # The threads don't hold this object, so it goes when its user drops it, and they end. Nothing waits for that: the
        # garbage collector may run in one of the threads, or where locks are held that they need.
        weakref.finalize(self, self._line.close).atexit = False
        self._threads = [
            threading.Thread(target=_serve, args=(self._line, each), name=f"batching-{number}", daemon=True)
            for number, each in enumerate(models)
        ]
        for thread in self._threads:
            thread.start()
            _running[thread] = self._line

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, perhaps together with calls of other threads.

        Arguments, outputs and errors are those of `LoadedModel`. An output is an array or tensor of its own.

        Raises:
            QueueFull: as many calls wait as may.
            UsageError: as for `LoadedModel`; or it is closed, or was loaded before this process was forked.
        """
        return self.model._outputs.rebuild(self._put(args, kwargs).result())

    async def submit(self, *args: Any, **kwargs: Any) -> Any:
        """The same for asyncio. A call that is cancelled while it waits isn't run."""
        return self.model._outputs.rebuild(await asyncio.wrap_future(self._put(args, kwargs)))

    def metrics(self) -> str:
        """What happened to the calls since the model was loaded, as OpenMetrics 1.0 text.

        It has counters of calls by outcome, histograms of their latency and of the rows of a run, and the calls that wait
        now. Serve it as `application/openmetrics-text; version=1.0.0; charset=utf-8`. Calls with wrong arguments never reach
        the queue and aren't counted.

        Raises:
            UsageError: the model was loaded before this process was forked, so the counts are those of the other process.
        """
        self._line.refuse_fork()
        return self._line.metrics.text(self._line.waiting, self._line.room)

    def close(self) -> None:
        """Refuse further calls, answer those that wait, and end the threads."""
        self._line.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> BatchedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _put(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        return self.put(self.model._arguments.flatten(args, kwargs))

    def put(self, tensors: list[Any]) -> Future[Any]:
        """The outputs of a call, in the file's order as its tensors are; raises what a call raises."""
        home = self.model._check(tensors)
        if home is not None and home.type == "cuda":
            _refuse_other_stream(home)
        call = _Call(tensors, int(tensors[0].shape[0]), home)
        self._line.put(call, tuple(map(_kind, tensors)))
        return call.outputs


def refuse_unjoined(folder: Path, manifest: Mapping[str, Any], artifact: Mapping[str, Any]) -> None:
    """Raise `UsageError` if calls of a file can't be joined."""
    if reason := why_not_joined(manifest, artifact):
        raise UsageError(f"Calls of {folder} can't be joined into batches, because {reason}.")


def _refuse_other_stream(home: Any) -> None:
    """Raise UsageError in a `torch.cuda.stream`: the threads would read tensors that it has yet to write."""
    cuda = sys.modules["torch"].cuda
    if cuda.current_stream(home) != cuda.default_stream(home):
        raise UsageError(
            "Calls are joined on the GPU's default stream: call the model outside of a stream of your own."
        )


def why_not_joined(manifest: Mapping[str, Any], artifact: Mapping[str, Any]) -> str | None:
    """Why calls of a file can't be joined, as the end of a sentence; None if they can."""
    if not is_batched(manifest, artifact):
        return "dim 0 of its inputs and outputs isn't one open batch: build it without --static-batch, or name dim 0 in --dynamic"
    if not ((artifact["parity"] or {}).get("rows") or {}).get("ok"):
        return "nothing says that its rows don't depend on each other: build it with --row-independence"
    return None


def is_batched(manifest: Mapping[str, Any], artifact: Mapping[str, Any]) -> bool:
    """Whether dim 0 of every input and output is the batch, and no other dim is.

    Rows of an adjacency matrix, whose dims are both the number of nodes, can't be joined with those of another.
    """
    shapes = [list(map(str, tensor["shape"])) or [""] for tensor in (*artifact["inputs"], *artifact["outputs"])]
    first = {shape[0] for shape in shapes}
    return (
        len(first) == 1
        and first.isdisjoint(manifest.get("example_sizes", {}))
        and min(first).isidentifier()
        and not any(first & set(shape[1:]) for shape in shapes)
    )


# ------------------------------------------------------------------------------------------------------- the calls that wait


class _Line:
    """The calls that wait, in a queue for each kind that can be joined."""

    def __init__(self, batching: Batching, metrics: Metrics) -> None:
        self.metrics, self.room = metrics, batching.queue
        self._most, self._wait = batching.max_batch or 1, batching.max_wait
        self._queues: dict[Hashable, deque[_Call]] = {}
        self.waiting = 0
        self._changed = threading.Condition()
        self._closed = False
        self._process = os.getpid()

    def refuse_fork(self) -> None:
        """Raise UsageError in a fork, which has no serving threads, and where a lock may be held forever."""
        if os.getpid() != self._process:
            raise UsageError("The bundle was loaded before this process was forked: load it in each process.")

    def put(self, call: _Call, kind: Hashable) -> None:
        self.refuse_fork()
        with self._changed:
            if self._closed:
                raise UsageError("The model was closed: load the bundle again.")
            if self.waiting >= self.room:
                self._drop_cancelled()
            if self.waiting >= self.room:
                self.metrics.add("refused")
                raise QueueFull(
                    f"{self.waiting} calls wait, as many as may: try again later, or start another instance."
                )
            self._queues.setdefault(kind, deque()).append(call)
            self.waiting += 1
            # One thread decides on everything that waits, and wakes the next one if it leaves something.
            self._changed.notify()

    def take(self) -> list[_Call]:
        """Wait for the calls of the next run, which have the kind of the oldest one, or fill a batch; empty at the end."""
        with self._changed:
            while True:
                if not self._queues:
                    if self._closed:
                        return []
                    self._changed.wait()
                    continue
                kind: Hashable = min(self._queues, key=lambda each: self._queues[each][0].came)
                left = self._queues[kind][0].came + self._wait - time.monotonic()
                if left > 0 and not self._closed:
                    full = [
                        each for each, queue in self._queues.items() if sum(one.rows for one in queue) >= self._most
                    ]
                    if not full:
                        self._changed.wait(left)
                        continue
                    kind = full[0]
                return self._taken(kind)

    def _taken(self, kind: Hashable) -> list[_Call]:
        queue, found, rows = self._queues[kind], list[_Call](), 0
        while queue and (not rows or rows + queue[0].rows <= self._most):
            rows += 0 if queue[0].outputs.cancelled() else queue[0].rows
            found.append(queue.popleft())
        if not queue:
            del self._queues[kind]
        self.waiting -= len(found)
        if self._queues:
            self._changed.notify()
        return found

    def _drop_cancelled(self) -> None:
        """Make room of the calls whose callers no longer wait."""
        for kind, queue in list(self._queues.items()):
            kept = deque(call for call in queue if not call.outputs.cancelled())
            self.waiting -= len(queue) - len(kept)
            self.metrics.add("cancelled", len(queue) - len(kept))
            if kept:
                self._queues[kind] = kept
            else:
                del self._queues[kind]

    def close(self) -> None:
        # In a fork, another thread of the original may have held the lock.
        if os.getpid() != self._process:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _kind(tensor: Any) -> Hashable:
    """What tensors must have in common to be joined."""
    where = None if isinstance(tensor, numpy.ndarray) else tensor.device
    return where, tuple(tensor.shape[1:])


# The threads that run, and what they take from.
_running: weakref.WeakKeyDictionary[threading.Thread, _Line] = weakref.WeakKeyDictionary()


@atexit.register
def _end() -> None:
    """End the threads before Python does."""
    # In a fork, they don't exist.
    found = [(thread, line) for thread, line in _running.items() if thread.is_alive()]
    for _, line in found:
        line.close()
    for thread, _ in found:
        thread.join()


# -------------------------------------------------------------------------------------------------------------- their runs


def _serve(line: _Line, model: LoadedModel) -> None:
    """Run batches until the end."""
    while calls := line.take():
        running = [call for call in calls if call.outputs.set_running_or_notify_cancel()]
        if len(running) < len(calls):
            line.metrics.add("cancelled", len(calls) - len(running))
        if running:
            _run(model, running, line.metrics)
        # Not until the next batch comes: callers may hold large tensors.
        del calls, running


def _run(model: LoadedModel, calls: list[_Call], metrics: Metrics) -> None:
    """Answer calls by one run; if that fails, each by its own, which empties the list."""
    try:
        answers = _outputs_of(model, calls)
    # Each runtime has its own errors, and some derive from Exception alone. A thread that ended here would leave others
    # waiting, whatever a model raises.
    except BaseException as error:  # noqa: BLE001
        if len(calls) == 1:
            metrics.add("failed")
            # The error holds this frame. If the frame held the call, both would stay until the garbage collector comes.
            calls.pop().outputs.set_exception(error)
            return
        answers = []
    # Not where the batch's error is handled, which would become the context of theirs.
    if not answers:
        while calls:
            _run(model, [calls.pop(0)], metrics)
        return
    # Before the answers, so that a caller who has one finds it counted.
    now = time.monotonic()
    metrics.add_run(sum(call.rows for call in calls), [now - call.came for call in calls])
    for call, outputs in zip(calls, answers, strict=True):
        call.outputs.set_result(outputs)


def _outputs_of(model: LoadedModel, calls: Sequence[_Call]) -> list[tuple[Any, ...]]:
    """The outputs of each call."""
    rows = [call.rows for call in calls]
    joined = [_joined(each) for each in zip(*(call.tensors for call in calls), strict=True)]
    if model._limits and len(calls) > 1:
        # Each call is within them, but all of their rows may not be.
        model._check(joined)
    outputs = model._runner(*joined)
    if len(calls) == 1:
        return [model._at_home(outputs, calls[0].home)]
    if any(len(output) != sum(rows) for output in outputs):
        raise UsageError("An output doesn't have the rows of the inputs.")
    ends = numpy.cumsum(rows).tolist()
    parts = (tuple(_copy(output[end - own : end]) for output in outputs) for own, end in zip(rows, ends, strict=True))
    return [model._at_home(part, call.home) for part, call in zip(parts, calls, strict=True)]


def _joined(tensors: Sequence[Any]) -> Any:
    if len(tensors) == 1:
        return tensors[0]
    if isinstance(tensors[0], numpy.ndarray):
        return numpy.concatenate(tensors)
    torch = sys.modules["torch"]
    with torch.no_grad():
        return torch.cat(tensors)


def _copy(part: Any) -> Any:
    """A part as an array or tensor of its own, which doesn't keep the memory of the whole batch."""
    return part.copy() if isinstance(part, numpy.ndarray) else part.clone()
