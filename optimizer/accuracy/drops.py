"""A sequential test of a drop in a user's metric, example by example, and how its error is shared in a search.

Both models score the same examples. The drop of one example is the original's score minus the candidate's, the drop of
the metric is the (weighted) mean of these. A test looks at them at counts that double, and may stop at each look. Each
look has its own share of alpha, and the shares sum to alpha (Lan and DeMets, "Discrete sequential boundaries for clinical
trials", 1983, with the union bound in place of the joint distribution). So the bound holds however often it is checked.

The bound at a look is the one of N. Gaffke ("Three test statistics for a nonparametric one-sided hypothesis on the mean of
a nonnegative variable", 2005): a Bayesian bootstrap over the examples and one more that loses as much as an example can. For
scores of 0 and 1 where no answer improves, it is the exact bound of Clopper and Pearson; where none changed among n
examples, it is about 3/n at 95 %. That it holds for every bounded score is confirmed by simulation and not proven (Phan,
Thomas and Learned-Miller, "Towards practical mean bounds for small samples", 2021).

An aggregate, such as an F1 score, is bounded by a few resamples of the pairs (H. Lam, "A cheap bootstrap method for fast
inference", 2022), and a lost example: it takes twice its share of the original's aggregate with it. This bound is asymptotic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from optimize_export.errors import UsageError

Floats = npt.NDArray[np.float64]
Verdict = Literal["within", "outside"]

# The count of the first look, and the factor to the next. With an aggregate it is larger: of a few statistics there may be
# none, because they have no positive, and each look takes a hundred resamples.
FIRST_LOOK, FIRST_OF_AGGREGATE = 32, 512
GROWTH = 2
# The look k = 0, 1, … takes PATIENCE / ((k + PATIENCE) (k + 1 + PATIENCE)) of alpha. So after n looks the end of the data has
# PATIENCE / (n + PATIENCE) of it. The larger, the fewer tests end early, and the stronger is the test at the end.
PATIENCE = 12
# The share of what is left of a search's alpha that its next final test gets, and the alpha of a quick test. Of 200 simulated
# searches that begin with wrong candidates, 95 % found a right one. With three quarters for the next final test it was
# 87 %, with 0.25 for the quick tests 93 %.
NEXT_FINAL = 0.5
QUICK = 0.15
# Resamples of an aggregate at one look: these many, or fewer where they would take more than these seconds. The bound
# holds for any number; with 10 it is some 15 % further from the drop than with 100.
RESAMPLES = (10, 100)
SECONDS = 10.0
# How many times its share of the original's aggregate an example can lose. An answer among rare ones, such as the positives of
# an F1 score, has a larger share of it than others.
LOST = 2.0
# Counts above this are no answer to how many examples a decision takes.
ENDLESS = 10**9


class PairedTest:
    """Test whether a metric drops by at most a budget, while the examples come in.

    The examples must be independent. A decision before the end of the data is one about the rest, too, so the verdict is
    "within" before the end only if their order is random. Scores between 0 and 1 are assumed to stay there; of other
    scores, no example is assumed to lose more than the difference between the largest and the smallest of 0 and the scores
    so far.

    Args:
        budget: the largest allowed drop, in units of the metric.
        alpha: the largest allowed probability that the verdict is "within" where the drop is larger than the budget.
        aggregate: the metric of a list of statistics, one of each example; None for the mean of scores.
        random_order: whether the order of the examples says nothing about them.

    Attributes:
        verdict: "within" or "outside" the budget, or None: not decided by the examples so far.
    """

    def __init__(
        self,
        budget: float,
        alpha: float,
        aggregate: Callable[[Sequence[Any]], float] | None = None,
        *,
        random_order: bool = True,
    ) -> None:
        self.budget, self.alpha, self.random_order = budget, alpha, random_order
        self.verdict: Verdict | None = None
        self._sample = _Scores() if aggregate is None else _Statistics(aggregate)
        self._within, self._outside = _Spending(alpha), _Spending(alpha)
        self._next = FIRST_LOOK if aggregate is None else FIRST_OF_AGGREGATE
        self._level = alpha

    def add(
        self,
        original: Sequence[Any] | Floats,
        candidate: Sequence[Any] | Floats,
        weights: Sequence[float] | Floats | None = None,
    ) -> None:
        """Add the next examples: scores, or statistics of an aggregate, of both models for the same examples.

        Raises:
            ValueError: the lengths differ, a weight is negative, statistics have weights, or the test is decided.
        """
        if self.verdict is not None:
            raise ValueError(f"the test is decided: {self.verdict}")
        if len(original) != len(candidate) or (weights is not None and len(weights) != len(original)):
            raise ValueError("original, candidate and weights must have the same length")
        self._sample.add(original, candidate, weights)
        if self.count >= self._next:
            self._next = GROWTH * self.count
            self._look()

    def finish(self) -> Verdict | None:
        """Look once more, with all that is left of alpha: no further examples will come. Return the verdict."""
        if self.verdict is None and self.count:
            self._level = self._within.left
            self._decide(self._within.left, self._outside.left)
        return self.verdict

    def _look(self) -> None:
        self._level = self._within.share
        # Where even an unchanged candidate couldn't be within the budget, the look would waste its share.
        possible = self.random_order and self._sample.unchanged(self.budget, self._level)
        self._decide(self._within.take() if possible else 0.0, self._outside.take())

    def _decide(self, within: float, outside: float) -> None:
        if within and self._sample.at_most(self.budget, within):
            self.verdict = "within"
        elif self._sample.at_least(self.budget, outside):
            self.verdict = "outside"

    @property
    def count(self) -> int:
        """The examples so far, without those of weight 0."""
        return self._sample.count

    @property
    def drop(self) -> float:
        """The original's metric minus the candidate's, so far."""
        return self._sample.drop

    @property
    def upper(self) -> float:
        """The upper bound of the drop, at the level of the last look."""
        return self._sample.upper(self._level)

    @property
    def effective(self) -> float:
        """The number of examples of equal weight whose mean is as certain: (sum w)² / sum w²."""
        return self._sample.effective

    def needed(self) -> int | None:
        """About how many examples a decision takes if drop and variance stay as they are; None: more than 10⁹."""
        if not self.count:
            return None
        decides = self._sample.at_most if self.drop < self.budget else self._sample.at_least
        low, high = 0.0, 1.0
        while not decides(self.budget, self._within.left, high):
            low, high = high, high * 2
            if high * self.count > ENDLESS:
                return None
        while high - low > 0.01 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if decides(self.budget, self._within.left, middle) else (middle, high)
        return math.ceil(high * self.count)


class Search:
    """The tests of a search over candidates, of which at most alpha ship one beyond the budget.

    Quick tests choose candidates, on examples of their own, so their errors cost no alpha. Final tests, on examples that no
    quick test has seen, share it: each gets half of what is left, and the last one all of it.

    Args:
        budget, alpha, aggregate, random_order: as of `PairedTest`.
    """

    def __init__(
        self,
        budget: float,
        alpha: float,
        aggregate: Callable[[Sequence[Any]], float] | None = None,
        *,
        random_order: bool = True,
    ) -> None:
        self.budget, self.left, self.aggregate, self.random_order = budget, alpha, aggregate, random_order

    def quick(self) -> PairedTest:
        """A test for the search part: a candidate comes to a final test if this is "within", or undecided with a small drop."""
        return PairedTest(self.budget, QUICK, self.aggregate)

    def final(self, *, is_last: bool) -> PairedTest:
        """The next test for the final part; after the last one, there must be no further."""
        alpha = self.left if is_last else self.left * NEXT_FINAL
        self.left -= alpha
        return PairedTest(self.budget, alpha, self.aggregate, random_order=self.random_order)


class _Spending:
    """What is left of alpha, and the share of the next look."""

    def __init__(self, alpha: float) -> None:
        self.left, self._alpha, self._looks = alpha, alpha, 0

    @property
    def share(self) -> float:
        k = self._looks + PATIENCE
        return self._alpha * PATIENCE / (k * (k + 1))

    def take(self) -> float:
        share = self.share
        self.left -= share
        self._looks += 1
        return share


class _Scores:
    """Scores of both models, as weighted drops."""

    def __init__(self) -> None:
        self.count = 0
        # One complex number for each example, drop + i weight, so that equal ones are found by one sort.
        self._new: list[npt.NDArray[np.complex128]] = []
        self._pairs, self._counts = np.empty(0, np.complex128), np.empty(0, np.float64)
        # Besides the scores, 0: where all are alike, their own range would say that none can be lost.
        self._lowest = self._highest = 0.0

    def add(self, original: Any, candidate: Any, weights: Any) -> None:
        scores = np.array([original, candidate], np.float64)
        weight = np.ones(scores.shape[1]) if weights is None else np.asarray(weights, np.float64)
        if (weight < 0).any():
            raise ValueError("a weight is negative")
        scores, weight = scores[:, weight > 0], weight[weight > 0]
        self.count += len(weight)
        if len(weight):
            self._lowest = min(self._lowest, float(scores.min()))
            self._highest = max(self._highest, float(scores.max()))
            self._new.append(scores[0] - scores[1] + 1j * weight)

    def _distinct(self) -> tuple[Floats, Floats, Floats]:
        """The distinct pairs of a drop and a weight, as two arrays, and how many examples have each."""
        if self._new:
            pairs = np.concatenate([self._pairs, *self._new])
            counts = np.concatenate([self._counts, np.ones(len(pairs) - len(self._pairs))])
            self._pairs, which = np.unique(pairs, return_inverse=True)
            self._counts = np.bincount(which, counts).astype(np.float64)
            self._new = []
        return self._pairs.real, self._pairs.imag, self._counts

    @property
    def _worst(self) -> float:
        """The most that one example can lose."""
        return 1.0 if self._lowest >= 0 and self._highest <= 1 else self._highest - self._lowest

    @property
    def drop(self) -> float:
        drops, weights, counts = self._distinct()
        return float((drops * weights) @ counts / (weights @ counts))

    @property
    def effective(self) -> float:
        _, weights, counts = self._distinct()
        return float((weights @ counts) ** 2 / (weights**2 @ counts))

    def unchanged(self, budget: float, level: float) -> bool:
        """Whether a candidate with the original's scores would be within the budget."""
        _, weights, counts = self._distinct()
        worst = float(weights.max()) * (self._worst - budget)
        # _chance() of equal values has a closed form.
        return worst <= 0 or math.exp(-float(counts @ np.log1p(weights * budget / worst))) <= level

    def at_most(self, drop: float, level: float, copies: float = 1.0) -> bool:
        """Whether the upper bound is at most this drop, if there were as many copies of each example."""
        drops, weights, counts = self._distinct()
        return _chance(weights * (drops - drop), counts * copies, weights.max() * (self._worst - drop)) <= level

    def at_least(self, drop: float, level: float, copies: float = 1.0) -> bool:
        """Whether the lower bound is at least this drop."""
        drops, weights, counts = self._distinct()
        return _chance(weights * (drop - drops), counts * copies, weights.max() * (self._worst + drop)) <= level

    def upper(self, level: float) -> float:
        low, high = self.drop, self._worst
        while high - low > 1e-4 * (high - self.drop):
            middle = (low + high) / 2
            low, high = (low, middle) if self.at_most(middle, level) else (middle, high)
        return high


def _chance(values: Floats, counts: Floats, worst: float) -> float:
    """P(sum of G_i v_i + E worst >= 0) for an exponential E and G_i of gamma distributions with the counts as shapes.

    By the saddlepoint approximation of Lugannani and Rice (1980), from the cumulant generating function
    K(t) = -sum of n_i log(1 - t v_i), which here is 0 to 3 % too large. exp(K) at its minimum is the inverse of the wealth of
    the best constant bet against the mean 0 (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
    betting", 2024). Returns 1 where the chance is about a half or more.
    """
    mean = float(counts @ values) + worst
    if mean >= 0:
        return 1.0
    if worst <= 0:
        return 0.0
    # K'(s / worst) = 0 for s in (0, 1), by Newton's method between bounds. K' times (1 - s) has no pole.
    ratios, low, high, s = values / worst, 0.0, 1.0, 0.5
    for _ in range(100):
        slopes = ratios / (1 - s * ratios)
        total = float(counts @ slopes)
        value = (1 - s) * total + 1
        low, high = (s, high) if value < 0 else (low, s)
        step = s - value / ((1 - s) * float(counts @ slopes**2) - total)
        previous, s = s, step if low < step < high else (low + high) / 2
        if abs(s - previous) <= 1e-9 * (1 - s):
            break
    cumulant = -float(counts @ np.log1p(-s * ratios)) - math.log1p(-s)
    curvature = float(counts @ (ratios / (1 - s * ratios)) ** 2) + (1 - s) ** -2
    w, v = math.sqrt(max(-2 * cumulant, 0.0)), s * math.sqrt(curvature)
    # Where w is small, so is the distance to a half, and the formula cancels.
    normal = NormalDist()
    return normal.cdf(-w) + normal.pdf(w) * (1 / v - 1 / w) if w > 1e-3 else 1.0


class _Statistics:
    """Statistics of both models, and the user's aggregate of them."""

    def __init__(self, aggregate: Callable[[Sequence[Any]], float]) -> None:
        self._aggregate = aggregate
        self._original: list[Any] = []
        self._candidate: list[Any] = []
        # The number of examples for which the aggregates are known, and these; of the last resampling too.
        self._known = (0, 0.0, 0.0)
        self._resampled = (0, 0.0, 0)

    def add(self, original: Any, candidate: Any, weights: Any) -> None:
        if weights is not None:
            raise ValueError("statistics of an aggregate have no weights")
        self._original += original
        self._candidate += candidate

    @property
    def count(self) -> int:
        return len(self._original)

    @property
    def effective(self) -> float:
        return float(self.count)

    @property
    def drop(self) -> float:
        original, candidate = self._aggregates()
        return original - candidate

    def unchanged(self, budget: float, level: float) -> bool:
        return self._lost(level) <= budget

    def at_most(self, drop: float, level: float, copies: float = 1.0) -> bool:
        return self.drop + self._margin(level, copies) <= drop

    def at_least(self, drop: float, level: float, copies: float = 1.0) -> bool:
        return self.drop - self._margin(level, copies) >= drop

    def upper(self, level: float) -> float:
        return self.drop + self._margin(level)

    def _margin(self, level: float, copies: float = 1.0) -> float:
        """The distance of the bounds from the drop: by Student's t, and by what may be lost without a trace so far."""
        error, resamples = self._standard_error()
        # The quantile of t by D. L. Wallace, "Bounds on normal approximations to Student's and the chi-square
        # distributions", 1959, within 1 % here.
        z = NormalDist().inv_cdf(1 - level) * (8 * resamples + 3) / (8 * resamples + 1)
        t = math.sqrt(resamples * math.expm1(z * z / resamples))
        return t * error / math.sqrt(copies) + self._lost(level) / copies

    def _lost(self, level: float) -> float:
        return LOST * abs(self._aggregates()[0]) * -math.log(level) / self.count

    def _aggregates(self) -> tuple[float, float]:
        if self._known[0] != self.count:
            self._known = (self.count, self._of(self._original), self._of(self._candidate))
        return self._known[1:]

    def _standard_error(self) -> tuple[float, int]:
        """The root of the mean square of the resampled drops' distances from the drop, and the number of resamples."""
        count, drop = self.count, self.drop
        if self._resampled[0] != count:
            generator, started = np.random.default_rng(0), time.perf_counter()
            squares: list[float] = []
            few, many = RESAMPLES
            while len(squares) < few or (len(squares) < many and time.perf_counter() - started < SECONDS):
                chosen = generator.integers(count, size=count).tolist()
                original, candidate = (
                    self._of([statistics[i] for i in chosen]) for statistics in (self._original, self._candidate)
                )
                squares.append((original - candidate - drop) ** 2)
            self._resampled = (count, math.sqrt(sum(squares) / len(squares)), len(squares))
        return self._resampled[1:]

    def _of(self, statistics: list[Any]) -> float:
        value = float(self._aggregate(statistics))
        if not math.isfinite(value):
            raise UsageError(
                f"`aggregate` returned {value} for {len(statistics)} statistics; it must return a finite number."
            )
        return value
