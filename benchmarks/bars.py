"""A picture of the speed-ups over eager: one group of bars per model, with the accuracy next to each bar."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from contenders import BUDGET, EAGER, EXACT, LABELS

_BAR, _GAP, _GROUP = 15, 3, 24
_LEFT, _WIDTH, _RIGHT = 270, 420, 150
_STYLE = """
text { font: 11px sans-serif; fill: #24292f } .model { font-weight: bold; font-size: 13px } .name { text-anchor: end }
.peer { fill: #afb8c1 } .ours { fill: #0969da } .eager { stroke: #24292f; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .peer { fill: #6e7681 } .ours { fill: #58a6ff } .eager { stroke: #e6edf3 }
}
"""


def picture_of(results: Sequence[dict[str, Any]]) -> str:
    """An SVG. Speed-ups are geometric means over the batch sizes and numbers of threads, cosines the least of these."""
    groups = {model: _bars([each for each in results if each["model"] == model]) for model in _models(results)}
    longest = max((speed_up for bars in groups.values() for _, speed_up, _ in bars), default=1.0)
    unit = _WIDTH / max(longest, 1.0)
    parts, y = [], _GAP
    for model, bars in groups.items():
        parts.append(f'<text class="model" x="{_GAP}" y="{y + _BAR}">{escape(model)}</text>')
        y += _BAR + 2 * _GAP
        top = y
        for name, speed_up, cosine in bars:
            kind = "ours" if name in (EXACT, BUDGET) else "peer"
            said = f"{speed_up:.2f}×" + ("" if cosine is None else f"  cosine {cosine:.5f}")
            low = y + _BAR - 4
            parts += [
                f'<text class="name" x="{_LEFT - 6}" y="{low}">{escape(LABELS[name])}</text>',
                f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{speed_up * unit:.1f}" height="{_BAR}"/>',
                f'<text x="{_LEFT + speed_up * unit + 6:.1f}" y="{low}">{said}</text>',
            ]
            y += _BAR + _GAP
        x = _LEFT + unit
        parts.append(f'<line class="eager" x1="{x:.1f}" y1="{top - _GAP}" x2="{x:.1f}" y2="{y}"/>')
        y += _GROUP
    size = f'width="{_LEFT + _WIDTH + _RIGHT}" height="{y}"'
    title = "<title>Speed-up over eager (dashed) per model</title>"
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', title, f"<style>{_STYLE}</style>", *parts, "</svg>\n"]
    )


def _models(results: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(result["model"] for result in results))


def _bars(results: Sequence[dict[str, Any]]) -> list[tuple[str, float, float | None]]:
    """The name, speed-up and least cosine of each contender, in the order of the table."""
    found: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        for contender in result["contenders"]:
            if contender["unavailable"] is None and contender["name"] != EAGER and contender["speed_up"]:
                found.setdefault(contender["name"], []).append(contender)
    bars = []
    for name, each in found.items():
        cosines = [one["cosine"] for one in each]
        least = None if None in cosines else min(cosines)
        bars.append((name, statistics.geometric_mean(one["speed_up"]["median"] for one in each), least))
    return bars
