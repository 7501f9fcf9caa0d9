"""Plots as data: every value has its place on an axis, so that a template only has to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_TICKS = 4


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        title: what it shows, with the unit.
        ticks: the place of each tick from 0 to 1, and its text.
        place: the place of a value, from 0 to 1.
    """

    title: str
    ticks: tuple[tuple[float, str], ...]
    place: Callable[[float], float]


@dataclass(frozen=True)
class Point:
    """A mark in a plot.

    Attributes:
        x, y: its places on the axes, from 0 to 1.
        kind: a class of the style sheet, which gives its colour: "good", "bad", "other", "best" or "refused".
        hint: a sentence that shows when the mouse is over it.
        label: a short text in the mark, such as the number of a row; "" for a plain dot.
    """

    x: float
    y: float
    kind: str
    hint: str
    label: str = ""


@dataclass(frozen=True)
class Plot:
    """A scatter plot with lines.

    Attributes:
        title: a sentence for those who can't see the plot.
        line: the places of a line's corners; empty for no line.
        limit: the place of a horizontal line that shows a limit, with its text; None for no limit.
    """

    title: str
    x: Axis
    y: Axis
    points: tuple[Point, ...]
    line: tuple[tuple[float, float], ...] = ()
    limit: tuple[float, str] | None = None


def linear(title: str, values: Iterable[float], text: Callable[[float], str]) -> Axis:
    """An axis from 0 to a round number that isn't below any value."""
    largest = max(values, default=0.0) or 1.0
    power = 10 ** math.floor(math.log10(largest / _TICKS))
    step = next(power * round_step for round_step in (1, 2, 2.5, 5, 10) if power * round_step * _TICKS >= largest)
    ticks = tuple((number / _TICKS, text(number * step)) for number in range(_TICKS + 1))
    return Axis(title, ticks, lambda value: value / (step * _TICKS))


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
