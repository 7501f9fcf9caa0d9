"""Count what happens to the calls of a service, and write it as OpenMetrics text, which Prometheus reads."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence

# Upper bounds, in seconds: those of Prometheus's own clients, and two for small models.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_OUTCOMES = ("answered", "failed", "refused", "cancelled")


class Metrics:
    """The counts of one batched model. Threads may add to it at the same time."""

    def __init__(self, model: str) -> None:
        """Start at zero.

        Args:
            model: the value of the label `model`.
        """
        self._label = f'model="{_escaped(model)}"'
        self._outcomes = dict.fromkeys(_OUTCOMES, 0)
        self._latency, self._rows = _Histogram(_SECONDS), _Histogram(_ROWS)
        self._lock = threading.Lock()

    def add(self, outcome: str, calls: int = 1) -> None:
        """Count calls that ended without an answer: "failed", "refused" by a full queue, or "cancelled"."""
        with self._lock:
            self._outcomes[outcome] += calls

    def add_run(self, rows: int, latencies: Sequence[float]) -> None:
        """Count a run of the model, and the seconds that each of its calls took from its arrival to its answer."""
        with self._lock:
            self._outcomes["answered"] += len(latencies)
            self._rows.add(rows)
            for each in latencies:
                self._latency.add(each)

    def text(self, waiting: int, room: int) -> str:
        """The counts as text.

        Args:
            waiting: calls in the queue now.
            room: calls that may wait.
        """
        with self._lock:
            return "\n".join([*self._lines(waiting, room), "# EOF", ""])

    def _lines(self, waiting: int, room: int) -> Iterator[str]:
        label = self._label
        yield from _head("calls", "counter", "Calls that ended, by outcome.")
        for outcome, count in self._outcomes.items():
            yield f'optimize_export_calls_total{{{label},outcome="{outcome}"}} {count}'
        yield from _head("latency_seconds", "histogram", "Time from the arrival of a call to its answer.", "seconds")
        yield from self._latency.lines("optimize_export_latency_seconds", label)
        yield from _head("batch_rows", "histogram", "Rows of a run of the model.")
        yield from self._rows.lines("optimize_export_batch_rows", label)
        yield from _head("waiting_calls", "gauge", "Calls in the queue.")
        yield f"optimize_export_waiting_calls{{{label}}} {waiting}"
        yield from _head("queue_limit_calls", "gauge", "Calls that may wait; further ones are refused.")
        yield f"optimize_export_queue_limit_calls{{{label}}} {room}"


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, label: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{label},le="{bound}"}} {total}'
        yield f"{name}_count{{{label}}} {total}"
        yield f"{name}_sum{{{label}}} {self._sum}"


def _head(name: str, kind: str, told: str, unit: str | None = None) -> Iterator[str]:
    yield f"# TYPE optimize_export_{name} {kind}"
    if unit is not None:
        yield f"# UNIT optimize_export_{name} {unit}"
    yield f"# HELP optimize_export_{name} {told}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
