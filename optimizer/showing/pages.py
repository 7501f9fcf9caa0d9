"""Plain data for people: numbers as short texts, templates as HTML, and plots.

Everything in a page that comes from data is escaped, and nothing is loaded from elsewhere. Every value of a plot has its
place on an axis, so that a template only draws.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from optimize_export.errors import printable_lines
from optimize_export.manifest import number

_CODE = re.compile("`([^`]+)`")
_FOLDER = Path(__file__).parent / "templates"
# The operations of a profile that a table names one by one; the data has all.
_OPERATIONS = 10


@cache
def _environment() -> Any:
    # Importing jinja2 takes as long as many short commands, so it is imported when something is shown.
    import jinja2

    # Not by the name of the package, because a user's own package may have it.
    loader = jinja2.FileSystemLoader(_FOLDER)
    made = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters.update(
        bytes=size_text,
        seconds=seconds_text,
        number=number_text,
        percent=percent_text,
        count=count_text,
        counts=counts_text,
        profile_rows=profile_rows,
        marked=_marked,
    )
    return made


def _marked(text: str) -> Any:
    """The text with `code` between backticks marked as code."""
    from markupsafe import Markup, escape

    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


def page(template: str, **facts: Any) -> str:
    """A whole page, from a file in `templates`, named without its suffixes, and the template's variables."""
    rendered: str = _environment().get_template(f"{template}.html.jinja").render(facts)
    # Names of classes, inputs and files may contain characters that change the direction of the text around them.
    return printable_lines(rendered)


def fragment(template: str, **facts: Any) -> str:
    """A part of a page with its own style, for `_repr_html_` in notebooks; arguments as for `page`."""
    return page("fragment", part=f"{template}.html.jinja", **facts)


def size_text(count: int) -> str:
    """A number of bytes in the unit that fits: "97 MiB"."""
    size, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, bigger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 9.95 else f"{size:.1f} {unit}"


def seconds_text(seconds: float) -> str:
    """A time in the unit that fits: "110 ms"."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def rate_text(rate: float) -> str:
    """Calls a second: "24,400"."""
    return f"{float(f'{rate:.3g}'):,.0f}" if rate >= 100 else f"{rate:.3g}"


def number_text(value: float | str | None, digits: int = 2) -> str:
    """A number with at most `digits` digits, "-" for None. JSON has infinity and NaN as texts, which stay as they are."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.{digits}g}"


def percent_text(share: float) -> str:
    """A share in percent: "23 %", and "under 1 %" for less than one."""
    return "0 %" if share == 0 else "under 1 %" if share < 0.01 else f"{100 * share:.0f} %"


def count_text(count: int, noun: str) -> str:
    """A number with its noun: "1 file", "2 files"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def counts_text(counts: Mapping[str, int]) -> str:
    """Names with their counts: "conv2d, relu ×2"."""
    return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in counts.items())


def profile_rows(profile: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of a profile's table: the most expensive operations, all others in one row, and the time between them.

    Args:
        profile: in its JSON form.

    Returns:
        `share`, `seconds`, `calls` ("" for the last row), `name` and `where` of each row; they add up to the whole run.
    """
    seconds, operations = profile["seconds"], profile["operations"]
    rows = list(operations[:_OPERATIONS])
    if others := operations[_OPERATIONS:]:
        sums = {key: sum(each[key] for each in others) for key in ("share", "seconds", "calls")}
        rows.append({**sums, "name": "others", "where": ""})
    rest = max(0.0, seconds - sum(each["seconds"] for each in operations))
    if seconds and rest / seconds >= 0.001:
        rows.append({"share": rest / seconds, "seconds": rest, "calls": "", "name": "between operations", "where": ""})
    return rows


# -------------------------------------------------------------------------------------------------------- plots as data

_TICKS = 4


@dataclass(frozen=True)
class Axis:
    """One axis."""

    title: str
    """What it shows, with the unit."""
    ticks: tuple[tuple[float, str], ...]
    """The place of each tick from 0 to 1, and its text."""
    place: Callable[[float], float]
    """The place of a value, from 0 to 1."""


@dataclass(frozen=True)
class Point:
    """A mark in a plot."""

    # Its places on the axes, from 0 to 1.
    x: float
    y: float
    kind: str
    """A class of the style sheet, which gives its colour: "good", "bad", "other", "best" or "refused"."""
    hint: str
    """A sentence that shows when the mouse is over it."""
    label: str = ""
    """A short text in the mark, such as the number of a row; "" for a plain dot."""
    top: float | None = None
    """The place of a bound on the y axis, up to which a line goes; None for no line."""


@dataclass(frozen=True)
class Plot:
    """A scatter plot with lines."""

    title: str
    """A sentence for those who can't see the plot."""
    x: Axis
    y: Axis
    points: tuple[Point, ...]
    line: tuple[tuple[float, float], ...] = ()
    """The places of a line's corners; empty for no line."""
    limit: tuple[float, str] | None = None
    """The place of a horizontal line that shows a limit, with its text; None for no limit."""


def linear(title: str, values: Iterable[float], text: Callable[[float], str]) -> Axis:
    """An axis of round numbers with 0 that has all values."""
    known = [0.0, *values]
    lowest, largest = min(known), max(known)
    span = (largest - lowest) or 1.0
    power = 10 ** math.floor(math.log10(span / _TICKS))
    steps = (scale * round_step for scale in (power, 10 * power) for round_step in (1, 2, 2.5, 5))
    first, step = next(
        (first, step)
        for step in steps
        if (first := math.floor(lowest / step) if lowest else 0) * step + step * _TICKS >= (largest or span + lowest)
    )
    ticks = tuple((number / _TICKS, text((first + number) * step)) for number in range(_TICKS + 1))
    return Axis(title, ticks, lambda value: (value / step - first) / _TICKS)


def logarithmic(title: str, values: Sequence[float], text: Callable[[float], str], *, least: float) -> Axis:
    """An axis of whole powers of ten; NaN is placed at the last one.

    Args:
        least: values below this, such as 0, are placed at a tick "≈ 0" before the first power.
    """
    finite = [value for value in values if math.isfinite(value)]
    shown = [value for value in finite if value >= least] or [least]
    first = math.floor(math.log10(min(shown)))
    high = max(first + 1, math.ceil(math.log10(max(shown))))
    low = first - 1 if any(value < least for value in finite) else first
    powers = range(first, high + 1, math.ceil((high - first) / (_TICKS + 1)))
    ticks = tuple(((power - low) / (high - low), text(10.0**power)) for power in powers)
    ticks = ticks if low == first else ((0.0, "≈ 0"), *ticks)

    def place(value: float) -> float:
        if math.isnan(value):
            return 1.0
        return (min(high, math.log10(value)) - low) / (high - low) if value >= least else 0.0

    return Axis(title, ticks, place)


def categories(title: str, names: Sequence[str]) -> Axis:
    """An axis with one place for each name; the values are the numbers of the names."""
    places = [(number + 0.5) / len(names) for number in range(len(names))]
    return Axis(title, tuple(zip(places, names, strict=True)), lambda value: (value + 0.5) / len(names))


# ------------------------------------------------------------------------------------------------------------ the plots

_LEAST_SHARE = 1e-4
_LEAST_LOSS = 1e-7


def parity_plot(parity: Mapping[str, Any]) -> Plot | None:
    """The error of each output of an artifact at each call as a share of the allowed error; None without such errors."""
    # A tolerance of the user limits another difference: that from the original's own output.
    # A lossy file is limited by a budget.
    outputs = (each for each in parity.get("outputs", ()) if each.get("judged", True) and not each.get("by_user"))
    judged = [each for each in outputs if each["tolerance"] is not None]
    found = [
        (call, output["name"], number(call["max_error"]), number(output["tolerance"]))
        for output in judged
        for call in output.get("calls", ())
        if call.get("max_error") is not None and number(output["tolerance"]) > 0
    ]
    if not found:
        return None
    names = sorted({_batch(call) for call, *_ in found}, key=lambda name: (not name.isdigit(), name.zfill(9)))
    x = categories("batch size", names)
    shares = [error / allowed for *_, error, allowed in found]
    y = logarithmic(
        "error, % of the allowed error", [1.0, *shares], lambda each: f"{100 * each:g} %", least=_LEAST_SHARE
    )
    points = tuple(
        Point(
            x.place(names.index(_batch(call))),
            y.place(error / allowed),
            "good" if error <= allowed else "bad",
            f"{name}, batch size {_batch(call)}: error {number_text(error)}, {number_text(allowed)} is allowed",
        )
        for call, name, error, allowed in found
    )
    return Plot("Error of each output at each call", x, y, points, limit=(y.place(1.0), "allowed"))


def _batch(call: Mapping[str, Any]) -> str:
    return "given" if call["batch_size"] is None else str(call["batch_size"])


Figures = Sequence[Mapping[str, Any]]
"""Those of the manifest that have times."""


def memory_plot(timed: Figures, refused: Figures = (), *, of: str = "a call") -> Plot | None:
    """Latency and memory of the candidates; None if fewer than two have both.

    Args:
        timed: the rows of a table that is numbered from 1.
        refused: those outside the budget.
        of: what has the latency.
    """
    if not any(each["memory"] for each in timed):
        return None
    every = (*timed, *refused)
    held = {row: each["memory"] for row, each in enumerate(every) if each["memory"]}
    # The ticks are round numbers of this unit.
    unit = next(size for size in (2**30, 2**20, 2**10, 1) if max(held.values()) >= size)
    costs = {row: size / unit for row, size in held.items()}
    axis = linear("peak memory", costs.values(), lambda size: size_text(int(size * unit)))
    return _trade_off("memory", every, len(timed), axis, costs, of)


def accuracy_plot(timed: Figures, refused: Figures = ()) -> Plot | None:
    """Latency and loss of accuracy of the candidates; None if none is lossy. Arguments as for `memory_plot`."""
    every = (*timed, *refused)
    cosines = {row: each["accuracy"]["cosine"] for row, each in enumerate(every) if each["accuracy"]}
    lossy = {row: 1 - cosine for row, cosine in cosines.items() if cosine is not None}
    if not lossy:
        return None
    costs = {**{row: 0.0 for row, each in enumerate(timed) if not each["accuracy"]}, **lossy}
    axis = logarithmic(
        "1 - cosine", list(costs.values()), lambda value: f"{value:g}".replace("e-0", "e-"), least=_LEAST_LOSS
    )
    return _trade_off("loss of accuracy", every, len(timed), axis, costs)


def metric_plot(timed: Figures, refused: Figures = ()) -> Plot | None:
    """Latency and the drop of the user's metric, with its bound and the budget; None if it wasn't measured.

    Arguments as for `memory_plot`; each figure also has `said`, its accuracy in words.
    """
    every = (*timed, *refused)
    metrics = {row: metric for row, each in enumerate(every) if (metric := (each["accuracy"] or {}).get("metric"))}
    if not metrics:
        return None
    first = next(iter(metrics.values()))
    unit = 0.01 if first["percent"] else 1.0
    tops = {row: metric["upper"] / unit for row, metric in metrics.items()}
    costs = {row: metric["drop"] / unit for row, metric in metrics.items()}
    costs |= {row: 0.0 for row, each in enumerate(timed) if not each["accuracy"]}
    budget = first["budget"] / unit
    title = f"drop of the metric{', points' if first['percent'] else ''}"
    axis = linear(title, [budget, *costs.values(), *tops.values()], "{:.3g}".format)
    drawn = _trade_off("drop of the metric", every, len(timed), axis, costs, tops=tops)
    return drawn and replace(drawn, limit=(axis.place(budget), "budget"))


@dataclass(frozen=True)
class Bar:
    """The drop of a metric with its bound, next to the budget; places from 0 to 1."""

    zero: float
    drop: float
    upper: float
    budget: float


def metric_bar(metric: Mapping[str, Any]) -> Bar:
    """The bar of a metric of the manifest."""
    values = 0.0, metric["drop"], metric["upper"], metric["budget"]
    low, high = min(values), max(values)
    return Bar(*((value - low) / (high - low) for value in values))


def _trade_off(
    what: str,
    every: Figures,
    usable: int,
    y: Axis,
    costs: Mapping[int, float],
    of: str = "a call",
    tops: Mapping[int, float] | None = None,
) -> Plot | None:
    """The plot of all figures; those from the number `usable` on are refused.

    Args:
        tops: by figure, the bound of its cost.
    """
    tops = tops or {}
    if len(costs) < 2:
        return None
    seconds = {row: every[row]["seconds"] for row in costs}
    x = linear(f"latency of {of}", seconds.values(), seconds_text)
    choices = [row for row in costs if row < usable]
    best = [
        row for row in choices if not any(_beats((seconds[o], costs[o]), (seconds[row], costs[row])) for o in choices)
    ]
    points = tuple(
        Point(
            x.place(seconds[row]),
            y.place(cost),
            "best" if row in best else "other" if row < usable else "refused",
            f"{every[row]['name']}: {seconds_text(seconds[row])}"
            + (f", {every[row]['said']}" if row in tops else "")
            + (f", not used: {every[row]['dropped']}" if row >= usable else ""),
            str(row + 1) if row < usable else "",
            y.place(tops[row]) if row in tops else None,
        )
        # The best ones are drawn last, over the others.
        for row, cost in sorted(costs.items(), key=lambda each: each[0] in best)
    )
    line = tuple(sorted((x.place(seconds[row]), y.place(costs[row])) for row in best))
    return Plot(f"Latency and {what} of the candidates", x, y, points, line)


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def checkpoint_plot(detail: Mapping[str, Any] | None) -> Plot | None:
    """The cheapest training steps by their peak; None for the detail of another pass."""
    if not detail or "curve" not in detail:
        return None
    eager, forward = detail["eager_peak_bytes"], detail["forward_flops"] or 1
    named = [
        ("eager", "other", {"peak_bytes": eager, "recomputed_flops": 0}),
        *(("one of the cheapest plans", "other", each) for each in detail["curve"]),
        ("equal parts", "bad", detail["uniform"]),
        ("the chosen plan", "best", detail),
    ]
    shares = [
        (name, kind, 100 * each["peak_bytes"] / eager, 100 * each["recomputed_flops"] / forward, each["peak_bytes"])
        for name, kind, each in named
    ]
    x = linear("peak memory, % of eager", [share[2] for share in shares], "{:g} %".format)
    y = linear("computed again, % of the forward", [share[3] for share in shares], "{:g} %".format)
    points = tuple(
        Point(
            x.place(peak),
            y.place(again),
            kind,
            f"{name}: peak {size_text(size)}, {again:.0f} % of the forward computed again",
        )
        for name, kind, peak, again, size in shares
    )
    line = tuple(
        (point.x, point.y) for point in sorted(points, key=lambda each: (each.x, each.y)) if point.kind != "bad"
    )
    return Plot("Memory and recomputation of training steps", x, y, points, line)
