"""Simulate searches among lossy candidates: how often does one ship whose metric drops by more than the budget?

    python benchmarks/drops.py --json build/drops.json --markdown build/drops.md

The budget is 0.5 points at a confidence of 95 %. Candidates have known drops, so each decision is known to be right or
wrong. The tests of `optimizer.accuracy` run next to others on the same examples. The same seed gives the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
from measure import caption, command, positive, prepared
from table import Table, publish

from optimizer.accuracy import PairedTest, Search

Floats = npt.NDArray[np.float64]
Pair = tuple[Floats, Floats]

BUDGET, ALPHA = 0.005, 0.05
CANDIDATES = 20
# Examples of one search: a quarter for the quick tests, the others for the final ones.
EXAMPLES = 6_000
QUARTER = EXAMPLES // 4
CHANGED = (0.005, 0.01, 0.02, 0.05)
COUNTS = (1_000, 3_000, 10_000, 30_000)
# The shares of an example's largest possible bet that the betting test averages over.
BETS = np.geomspace(0.003, 0.999, 60)


def answers(generator: np.random.Generator, count: int, drop: float, changed: float) -> Pair:
    """Scores of 0 and 1, of which this share differs: more are lost than won, by the drop."""
    draws = generator.random(count, np.float32)
    return 1.0 - (draws > 1 - (changed - drop) / 2), 1.0 - (draws < (changed + drop) / 2)


def qualities(generator: np.random.Generator, count: int, drop: float, changed: float) -> Pair:
    """Scores from 0 to 1, all with a little noise; ten times this share also loses, most of it little, some of it much."""
    drops = generator.uniform(-0.05, 0.05, count)
    losing = np.flatnonzero(generator.random(count, np.float32) < 10 * changed)
    if drop:
        # The mean of these losses is 0.95 / (1 + more).
        more = 0.95 * 10 * changed / drop - 1
        drops[losing] = 0.95 * generator.beta(1, more, len(losing))
    return np.full(count, 0.95), 0.95 - drops


KINDS = {"0/1": answers, "real": qualities}


def outcome(test: PairedTest, original: Floats, candidate: Floats) -> str | None:
    """The verdict on these examples, which come in parts that reach from one look to the next."""
    start, stop = 0, 500
    while test.verdict is None and start < len(original):
        test.add(original[start:stop], candidate[start:stop])
        start, stop = stop, 2 * stop
    return test.finish()


def normal_bound(original: Floats, candidate: Floats, alpha: float) -> float:
    """The upper bound of the drop if its mean is normally distributed; the point estimate, with an alpha of a half."""
    drops = original - candidate
    return float(drops.mean() + NormalDist().inv_cdf(1 - alpha) * drops.std() / np.sqrt(len(drops)))


def betting(original: Floats, candidate: Floats) -> int | None:
    """The count at which a betting test of scores in [0, 1] decides for "within"; None if it doesn't.

    The mean wealth of constant bets is a martingale if the drop is the budget; it may be checked at each example. Here it is
    checked 100 times. Of Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (2024).
    """
    counts = np.linspace(0, len(original), 101).astype(int)[1:]
    drops = original - candidate
    kinds = np.stack([np.cumsum(drops == kind)[counts - 1] for kind in (-1, 0, 1)], 1)
    gains = np.log1p(-BETS[:, None] / (1 - BUDGET) * (np.array([-1, 0, 1]) - BUDGET))
    wealth = np.exp(np.minimum(kinds @ gains.T, 700)).mean(1)
    passed = np.flatnonzero(wealth >= 1 / ALPHA)
    return int(counts[passed[0]]) if len(passed) else None


def power(generator: np.random.Generator, count: int, changed: float, drop: float, runs: int) -> dict[str, Any]:
    """How often each test is sure that a drop is within the budget, and the examples that it takes on average."""
    found = dict.fromkeys(("ours", "betting", "fixed-size"), 0)
    taken = dict.fromkeys(found, 0)
    for _ in range(runs):
        pair = answers(generator, count, drop, changed)
        test = PairedTest(BUDGET, ALPHA)
        found["ours"] += outcome(test, *pair) == "within"
        taken["ours"] += test.count
        stopped = betting(*pair)
        found["betting"] += stopped is not None
        taken["betting"] += stopped or count
        found["fixed-size"] += normal_bound(*pair, ALPHA) <= BUDGET
        taken["fixed-size"] += count
    shares = {name: {"power": found[name] / runs, "examples": taken[name] / runs} for name in found}
    return {"count": count, "changed": changed, "drop": drop, "runs": runs, **shares}


def ours(pairs: Sequence[Pair]) -> tuple[int | None, int]:
    """The candidate that a search ships, and the examples that candidates were run on."""
    search, taken, promising = Search(BUDGET, ALPHA), 0, []
    for number, (original, candidate) in enumerate(pairs):
        test = search.quick()
        verdict = outcome(test, original[:QUARTER], candidate[:QUARTER])
        if verdict == "within" or (verdict is None and test.drop <= BUDGET):
            promising.append(number)
        taken += test.count
    for number in promising:
        original, candidate = pairs[number]
        test = search.final(is_last=number == promising[-1])
        verdict = outcome(test, original[QUARTER:], candidate[QUARTER:])
        taken += test.count
        if verdict == "within":
            return number, taken
    return None, taken


def first(pairs: Sequence[Pair], alpha: float) -> tuple[int | None, int]:
    """The first candidate whose normal bound on all examples is within the budget, and the examples run until then."""
    for number, pair in enumerate(pairs):
        if normal_bound(*pair, alpha) <= BUDGET:
            return number, (number + 1) * EXAMPLES
    return None, len(pairs) * EXAMPLES


WAYS: dict[str, Callable[[Sequence[Pair]], tuple[int | None, int]]] = {
    "ours": ours,
    "normal bound of each at 95 %": lambda pairs: first(pairs, ALPHA),
    "normal bound of each at 99.75 %": lambda pairs: first(pairs, ALPHA / CANDIDATES),
    "point estimate": lambda pairs: first(pairs, 0.5),
}
# The drops of the candidates, the fastest first.
CASES = {
    "all at 1.001 times the budget": np.full(CANDIDATES, 1.001 * BUDGET),
    "from twice the budget to none": np.linspace(2 * BUDGET, 0, CANDIDATES),
    "three: 0.1, 0.05 and 0.3 times the budget": np.array([0.1, 0.05, 0.3]) * BUDGET,
}


def searches(generator: np.random.Generator, kind: str, case: str, runs: int) -> Iterator[dict[str, Any]]:
    """Run this many searches each way, on the same examples."""
    drops = CASES[case]
    counts = {way: {"wrong": 0, "right": 0, "examples": 0} for way in WAYS}
    for _ in range(runs):
        changed = np.maximum(generator.choice(CHANGED, len(drops)), drops)
        pairs = [KINDS[kind](generator, EXAMPLES, drop, share) for drop, share in zip(drops, changed, strict=True)]
        for way, ship in WAYS.items():
            shipped, taken = ship(pairs)
            counts[way]["examples"] += taken
            if shipped is not None:
                counts[way]["right" if drops[shipped] <= BUDGET else "wrong"] += 1
    for way, count in counts.items():
        yield {"kind": kind, "case": case, "way": way, "runs": runs, **{k: v / runs for k, v in count.items()}}


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def search_table(results: Sequence[dict[str, Any]], environment: dict[str, Any]) -> Table:
    headings = ["scores", "drops of the candidates", "way", "ships one beyond the budget", "ships one within it"]
    table = Table(f"What searches ship among {CANDIDATES} candidates, or three", [*headings, "examples run"], left=3)
    for one in results:
        shares = percent(one["wrong"]), percent(one["right"])
        table.add(one["kind"], one["case"], one["way"], *shares, f"{one['examples']:,.0f}")
    runs = results[0]["runs"]
    table.caption = [
        f"Budget 0.5 points at 95 %. {runs:,} searches in each row, {EXAMPLES:,} examples, of which each candidate changes"
        " 0.5 to 5 % (real scores: all a little, and ten times as many clearly). The fastest that passes ships. The standard"
        f" error of 5 % is {percent((ALPHA * (1 - ALPHA) / runs) ** 0.5)}.",
        caption(environment),
    ]
    return table


def power_table(results: Sequence[dict[str, Any]], environment: dict[str, Any]) -> Table:
    headings = [
        "true drop",
        "changed answers",
        "examples",
        "ours",
        "betting",
        "fixed-size",
        "ours runs",
        "betting runs",
    ]
    table = Table("How often a test is sure that a drop is within the budget", headings, left=2)
    for one in results:
        shares = [percent(one[name]["power"]) for name in ("ours", "betting", "fixed-size")]
        runs = [f"{one[name]['examples']:,.0f}" for name in ("ours", "betting")]
        table.add(f"{100 * one['drop']:.2f} points", percent(one["changed"]), f"{one['count']:,}", *shares, *runs)
    table.caption = [
        f"Budget 0.5 points at 95 %; scores of 0 and 1; {results[0]['runs']} runs in each row. The fixed-size test is the"
        " normal bound of all examples. The last two columns are means.",
        caption(environment),
    ]
    return table


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--searches", type=positive, default=1000, help="in each row (default: %(default)s)")
    parser.add_argument("--runs", type=positive, default=200, help="in each row of the power (default: %(default)s)")
    arguments = parser.parse_args()
    environment = prepared(parser, arguments)
    generator = np.random.default_rng(0)
    found = [row for kind in KINDS for case in CASES for row in searches(generator, kind, case, arguments.searches)]
    powers = [
        power(generator, count, changed, drop, arguments.runs)
        for drop in (BUDGET / 2, 0.0)
        for changed in CHANGED
        for count in COUNTS
    ]
    data = {"environment": environment, "budget": BUDGET, "alpha": ALPHA, "searches": found, "power": powers}
    tables = [search_table(found, environment), power_table(powers, environment)]
    publish(tables, data, arguments.json, arguments.markdown)


if __name__ == "__main__":
    main()
