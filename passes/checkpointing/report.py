"""Report the memory and the recomputation of a plan, compared with alternatives."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotext
from rich import box
from rich.console import Console
from rich.table import Table

from passes.checkpointing.budget import shown
from passes.checkpointing.profile import Profile
from passes.checkpointing.regions import RegionRecord

_WIDTH, _HEIGHT = 72, 18
# The least share of the peak for which it is said what can't be recomputed.
_LEAST_KEPT = 0.1
_BETWEEN = "a custom autograd function or TorchScript makes it"


@dataclass(frozen=True)
class Point:
    """One way to run the step.

    Attributes:
        name: the name in the report.
        peak: the maximum number of bytes alive.
        flops: the FLOPs of the recomputation.
    """

    name: str
    peak: int
    flops: int


@dataclass(frozen=True)
class CheckpointReport:
    """A plan, its regions, and its place in the trade-off between memory and recomputation.

    Attributes:
        chosen: the plan, measured on fake tensors, or on real ones if the model doesn't run on fake ones.
        eager: the step without a plan.
        uniform: the step divided into √n ranges of equal work, out of n parts, each recomputed as a whole.
        curve: the cheapest plans found within several budgets, from the largest to the smallest.
        forward: the FLOPs of the forward.
        regions: the calls that are recomputed together.
    """

    chosen: Point
    eager: Point
    uniform: Point
    curve: tuple[Point, ...]
    forward: int
    regions: tuple[RegionRecord, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-serializable data."""
        return {
            "eager_peak_bytes": self.eager.peak,
            "peak_bytes": self.chosen.peak,
            "forward_flops": self.forward,
            "recomputed_flops": self.chosen.flops,
            "uniform": self._plain(self.uniform),
            "curve": [self._plain(point) for point in self.curve],
            "regions": [
                {
                    "where": region.path,
                    "calls": list(region.calls),
                    "dropped_bytes": region.dropped,
                    "flops": region.flops,
                }
                for region in self.regions
            ],
        }

    def _plain(self, point: Point) -> dict[str, int]:
        return {"peak_bytes": point.peak, "recomputed_flops": point.flops}

    def __str__(self) -> str:
        return f"{self.ways()}\n{self.table()}\n{self.picture()}"

    def share(self, point: Point) -> float:
        """The FLOPs of the recomputation, in percent of the forward's FLOPs."""
        return 100 * point.flops / self.forward if self.forward else 0.0

    def ways(self) -> str:
        """A table of the ways to run the step."""
        table = Table("", "peak", "of eager", "computed again", box=box.SIMPLE)
        for point in (self.eager, self.chosen, self.uniform):
            part = f"{100 * point.peak / self.eager.peak:.1f} %"
            table.add_row(point.name, shown(point.peak), part, f"{self.share(point):.1f} % of the forward")
        return _text(table)

    def table(self) -> str:
        """A table of the regions."""
        table = Table("region", "calls", "not kept", "FLOPs", box=box.SIMPLE)
        for region in self.regions:
            part = f"{100 * region.flops / self.forward if self.forward else 0:.1f} %"
            table.add_row(region.path or "the root", region.names, shown(region.dropped), part)
        return _text(table)

    def picture(self) -> str:
        """A plot of the peak and the recomputation, both in percent."""
        plotext.clear_figure()
        plotext.theme("clear")
        plotext.plot_size(_WIDTH, _HEIGHT)
        plotext.title("the cheapest plans by their peak")
        plotext.xlabel("peak, % of eager")
        plotext.ylabel("computed again, % of the forward's FLOPs")
        curve = sorted((self.eager, *self.curve, self.chosen), key=lambda point: point.peak)
        # Leave room for the names of the points in the upper corner.
        plotext.ylim(0, 1.4 * max(self.share(point) for point in (*curve, self.uniform)) or 1)
        plotext.plot(*self._axes(curve), marker=".")
        for marker, point in (("E", self.eager), ("U", self.uniform), ("X", self.chosen)):
            plotext.scatter(*self._axes([point]), marker=marker, label=point.name)
        lines = plotext.uncolorize(plotext.build()).splitlines()
        return "\n".join(line.rstrip() for line in lines)

    def _axes(self, points: Sequence[Point]) -> tuple[list[float], list[float]]:
        return [100 * point.peak / self.eager.peak for point in points], [self.share(point) for point in points]


def why_kept(profile: Profile) -> str:
    """Which saved values can't be recomputed, and why for most of them; "" if they are a small part of the peak."""
    sizes, places = Counter[str](), dict[str, dict[str, None]]()
    for value in profile.values:
        call = profile.calls[value.call]
        why = call.kept_because if call.kept_because or value.numbers else _BETWEEN
        if value.savers and why:
            sizes[why] += value.size
            places.setdefault(why, {})[f"{call.name} in {call.path or 'the root'}"] = None
    total = sum(sizes.values())
    if total < _LEAST_KEPT * profile.peak:
        return ""
    why, _ = sizes.most_common(1)[0]
    first, *others = places[why]
    where = "" if why == _BETWEEN else f"from {first}{f' and {len(others)} more' if others else ''}, "
    return f"{shown(total)} can't be recomputed, most of it {where}because {why}"


def _text(table: Table) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().strip("\n").splitlines())
