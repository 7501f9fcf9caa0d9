"""Render the latency and memory of files as text for people."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.text import Text

from optimizer.command.text_tables import table
from optimizer.parity import accuracy_text
from optimizer.showing import seconds_text, size_text

Document = Mapping[str, Any]


def benchmark_lines(benchmark: Document, width: int) -> Iterable[Text | str]:
    """A table of all candidates, the recommendation, and the candidates that were dropped."""
    timed = [figure for figure in benchmark["figures"] if figure["seconds"] is not None and not figure["dropped"]]
    with_accuracy = any(figure["accuracy"] for figure in timed)
    if timed:
        columns = ["latency of", "median", "p95", "speed-up", "memory", "size", *["accuracy"] * with_accuracy]
        rows = [[*_row(figure), *[_accuracy(figure)] * with_accuracy] for figure in timed]
        yield from table(columns, rows, width)
    for figure in benchmark["figures"]:
        if figure["dropped"]:
            yield f"not used: {figure['name']}: {figure['dropped']}"
    yield from (f"note: {note}" for note in benchmark["notes"])
    where = [f"batch {size}" for size in benchmark["batch_sizes"]]
    if benchmark["rounds"]:
        threads = benchmark["threads"]
        where += [f"{threads} thread{'' if threads == 1 else 's'} of torch", f"{benchmark['rounds']} rounds"]
    yield benchmark["reason"] + (f" ({', '.join(where)})" if where else "")


def _row(figure: Document) -> list[str]:
    gain = figure["speed_up"]
    return [
        figure["name"],
        seconds_text(figure["seconds"]),
        seconds_text(figure["p95"]),
        "" if gain is None else f"{gain['median']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})",
        "" if figure["memory"] is None else size_text(figure["memory"]),
        "" if figure["bytes"] is None else size_text(figure["bytes"]),
    ]


def _accuracy(figure: Document) -> str:
    return accuracy_text(figure["accuracy"]) if figure["accuracy"] else "rounding only"
