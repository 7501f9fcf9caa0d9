"""Whether this project pays: geometric means over the models, and the goals of benchmarks/latency.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from contenders import (
    AUTOTUNE,
    BUDGET,
    COMPILE,
    EAGER,
    EXACT,
    FREEZING,
    JIT,
    LABELS,
    ONNX,
    OPENVINO,
)
from deployments import ACCURACY
from measure import Spread, ratios
from table import Table

# What a user would pick without a loss of accuracy.
EXACT_PEERS = (EAGER, COMPILE, AUTOTUNE, FREEZING, JIT, ONNX, OPENVINO)
# The least gain of the exact choice over any one of these, and of the choice within the budget over ONNX.
LEAST_GAINS = {EXACT: 1.1, BUDGET: 2.0}

Result = dict[str, Any]


def summary_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The geometric means of each contender over all results in which it is available."""
    names = dict.fromkeys(contender["name"] for result in results for contender in result["contenders"])
    summary = []
    for name in names:
        found = [_available(result)[name] for result in results if name in _available(result)]
        cosines = [each["cosine"] for each in found]
        summary.append(
            {
                "name": name,
                "measured": len(found),
                "of": len(results),
                "speed_up": _mean(each["speed_up"]["median"] for each in found if each["speed_up"]),
                "over_onnx": _mean(each["over_onnx"]["median"] for each in found if each["over_onnx"]),
                "cosine": None if None in cosines else min(cosines, default=None),
                "set_up_seconds": statistics.median(each["set_up_seconds"] for each in found) if found else None,
            }
        )
    return summary


def summary_table(summary: Sequence[dict[str, Any]]) -> Table:
    headings = ["contender", "measured", "speed-up over eager", "over onnxruntime", "least cosine", "set-up"]
    table = Table("Summary", headings)
    for row in summary:
        table.add(
            LABELS[row["name"]],
            f"{row['measured']} of {row['of']}",
            *("" if row[key] is None else f"{row[key]:.2f}×" for key in ("speed_up", "over_onnx")),
            "" if row["cosine"] is None else f"{row['cosine']:.5f}",
            "" if row["set_up_seconds"] is None else f"{row['set_up_seconds']:.0f} s",
        )
    table.caption.append(
        "Geometric means over the models, batch sizes and numbers of threads that were measured; the median set-up."
    )
    return table


def goals_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The goals, each with what was measured and whether it is met. A goal without figures isn't met."""
    return [
        _goal(
            "exact: on each model as fast as the best exact peer, within the noise",
            *_never_behind(results, EXACT, lambda contender: contender["name"] in EXACT_PEERS),
        ),
        _goal(f"exact: at least {LEAST_GAINS[EXACT]} times as fast as any one exact peer, overall", *_ahead(results)),
        _goal(
            f"accuracy {ACCURACY}: at least {LEAST_GAINS[BUDGET]} times as fast as {LABELS[ONNX]}, overall",
            *_gain_of(results, BUDGET, ONNX),
        ),
        _goal(
            f"accuracy {ACCURACY}: on each model as fast as the best peer with that cosine, within the noise",
            *_never_behind(results, BUDGET, lambda contender: contender["name"] != EXACT and _accurate(contender)),
        ),
    ]


def goals_table(goals: Sequence[dict[str, Any]]) -> Table:
    table = Table("Goals", ["goal", "measured", "met"], left=2)
    for goal in goals:
        table.add(goal["goal"], goal["measured"], "yes" if goal["met"] else "no")
    table.caption.append(
        "Within the noise: the quartiles of the ratio, taken within each round, include 1 or are above it. Overall: the"
        " geometric mean over all that was measured."
    )
    return table


def _goal(goal: str, measured: str, met: bool) -> dict[str, Any]:
    return {"goal": goal, "measured": measured, "met": met}


def _never_behind(results: Sequence[Result], ours: str, counts: Callable[[dict[str, Any]], bool]) -> tuple[str, bool]:
    """Compare ours with the fastest of the others that count, at each result."""
    behind = []
    for result in results:
        found = _available(result)
        place = f"{result['model']}, batch {result['batch']}, threads {result['threads']}"
        peers = [each for name, each in found.items() if name not in (ours, BUDGET) and counts(each)]
        if ours not in found:
            behind.append(f"{place}: not available")
        elif ours == BUDGET and not _accurate(found[ours]):
            behind.append(f"{place}: cosine {found[ours]['cosine']}")
        elif peers:
            best = min(peers, key=lambda each: each["seconds"]["median"])
            ratio = _ratio(best, found[ours])
            if ratio.high < 1:
                behind.append(f"{place}: {ratio.median:.2f}× {LABELS[best['name']]}")
    held = f"{len(results) - len(behind)} of {len(results)}"
    return "; ".join([held, *behind]), bool(results) and not behind


def _ahead(results: Sequence[Result]) -> tuple[str, bool]:
    """The overall gain of the exact choice over each exact peer that was measured."""
    gains = {name: _overall(results, EXACT, name) for name in EXACT_PEERS}
    known = {name: gain for name, gain in gains.items() if gain is not None}
    if not known:
        return "not measured", False
    shown = "; ".join(f"{gain:.2f}× {LABELS[name]}" for name, gain in sorted(known.items(), key=lambda item: item[1]))
    return shown, min(known.values()) >= LEAST_GAINS[EXACT]


def _gain_of(results: Sequence[Result], ours: str, peer: str) -> tuple[str, bool]:
    gain = _overall(results, ours, peer)
    return ("not measured", False) if gain is None else (f"{gain:.2f}×", gain >= LEAST_GAINS[ours])


def _overall(results: Sequence[Result], ours: str, peer: str) -> float | None:
    """The geometric mean of the gains over the results in which both are available."""
    found = [_available(result) for result in results]
    return _mean(_ratio(each[peer], each[ours]).median for each in found if ours in each and peer in each)


def _available(result: Result) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in result["contenders"] if each["unavailable"] is None}


def _accurate(contender: dict[str, Any]) -> bool:
    return contender["cosine"] is not None and contender["cosine"] >= ACCURACY


def _ratio(of: dict[str, Any], to: dict[str, Any]) -> Spread:
    """How many times as fast `to` is as `of`."""
    return ratios(of["seconds"]["values"], to["seconds"]["values"])


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.geometric_mean(found) if found else None
