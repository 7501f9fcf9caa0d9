"""A profile as data and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimize_export.errors import printable_lines
from optimizer.model import Mode
from optimizer.profiling.operations import Operation, one_path, without_numbers
from optimizer.profiling.peak_memory import PeakMemory
from optimizer.showing import profile_rows

# The table has the most expensive ones; the data has all.
_SHOWN = 10
_MOST_NAMED = 3


@dataclass(frozen=True)
class Profile:
    """The time of one run by operation and module."""

    seconds: float
    """The time of one run under the profiler, which itself takes some: on a CPU the wall-clock time, on a GPU the sum
    of its kernels' times."""
    operations: tuple[Operation, ...]
    """The most expensive first. On a CPU the rest of the time is spent between them, in Python."""
    device: str
    mode: Mode = "inference"
    """In "inference", a run is a forward without gradients, and in "training" a training step."""
    peak_memory: PeakMemory | None = None
    """The memory of a training step; None in inference."""

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {
            "seconds": self.seconds,
            "device": self.device,
            "mode": self.mode,
            "operations": [operation.to_json() for operation in self.operations],
            "peak_memory": None if self.peak_memory is None else self.peak_memory.to_json(),
        }

    def __str__(self) -> str:
        return printable_lines("\n".join(profile_lines(self.to_json(), "profile")))


def profile_lines(profile: Mapping[str, Any], title: str, unit: str = "module") -> Iterator[str]:
    """The table of a profile in its JSON form: the ten most expensive operations, and the ten largest modules.

    Args:
        unit: the heading of the column with the modules, or with the nodes of a file.
    """
    run = "training step" if profile["mode"] == "training" else "run"
    yield f"{title}: {_milliseconds(profile['seconds'])} a {run} on {profile['device']}"
    operations = profile["operations"]
    kinds: Counter[str] = Counter()
    for each in operations:
        kinds[each["name"]] += each["share"]
    if kinds:
        yield f"mostly {', '.join(f'{name} {_percent(share)}' for name, share in kinds.most_common(_MOST_NAMED))}"
    rows = [
        (_percent(row["share"]), _milliseconds(row["seconds"]), str(row["calls"]), row["name"], row["where"])
        for row in profile_rows(profile)
    ]
    yield from _aligned(("share", "time", "calls", "operation", unit), rows)
    if (memory := profile["peak_memory"]) is not None:
        yield ""
        yield from _memory_lines(memory)


def _memory_lines(memory: Mapping[str, Any]) -> Iterator[str]:
    total, modules = memory["bytes"], memory["modules"]
    yield f"peak memory: {total:,} bytes, without parameters, buffers and inputs"
    groups: dict[tuple[str, int], list[str]] = {}
    for each in modules:
        groups.setdefault((without_numbers(each["module"]), each["bytes"]), []).append(each["module"])
    held = [(size * len(paths), len(paths), one_path(paths)) for (_, size), paths in groups.items()]
    held.sort(key=lambda row: -row[0])
    rows = held[:_SHOWN]
    if others := held[_SHOWN:]:
        rows.append((sum(size for size, _, _ in others), sum(count for _, count, _ in others), "others"))
    cells = [(_percent(size / total), f"{size:,}", str(count), path) for size, count, path in rows]
    if outside := memory["outside"]:
        cells.append((_percent(outside / total), f"{outside:,}", "", "loss and gradients"))
    yield from _aligned(("share", "bytes", "modules", "module"), cells)


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align the rows; the first three columns to the right."""
    widths = [max(len(row[number]) for row in (columns, *rows)) for number in range(len(columns))]
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if number < 3 else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _milliseconds(seconds: float) -> str:
    shown = 1000 * seconds
    return f"{shown:.{0 if shown >= 100 else 1 if shown >= 10 else 2 if shown >= 1 else 3}f} ms"
