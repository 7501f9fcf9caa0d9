"""The accuracy of a lossy candidate, and whether it is within the user's budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optimize_export.elementwise import is_exact
from optimize_export.wording import listed
from optimizer.model import Call
from optimizer.options import AccuracyBudget, points
from optimizer.parity.comparison import OTHER_ROWS
from optimizer.parity.differences import Pool
from optimizer.parity.golden import GoldenEntry, compare_stored
from optimizer.parity.orders import RowOrder
from optimizer.parity.results import (
    NOTHING_MEASURED,
    OMIT_IF_EMPTY,
    CallErrors,
    Measurement,
    OutputNoise,
    from_json,
    to_json,
)
from optimizer.parity.verdict import worst_of

WITHIN_BUDGET = "within budget"
"""The verdict on a file that differs from the original by more than rounding, and that the user's budget allows."""

_LARGEST = ("max_error", "mean_error", "p999_error")
_SMALLEST = ("cosine", "agreement")


@dataclass(frozen=True)
class OutputAccuracy:
    """One output of a lossy candidate."""

    name: str
    calls: tuple[CallErrors, ...] = ()
    held_out: tuple[CallErrors, ...] = ()
    """The errors at each call that was held out of the calibration; `draw` is the number of the call."""
    problem: str | None = None

    def is_below(self, budget: AccuracyBudget) -> bool:
        """Whether a figure of it is outside a budget."""
        own = self.to_json()
        # Integers have no cosine.
        least = budget.top1 if own["cosine"] is not None else budget.top1 or budget.cosine
        least_cosine = _other_least(budget) if own["agreement"] is None else budget.cosine
        return _is_counted(self.problem, budget) or any(
            figure is not None and most is not None and not figure >= most
            for figure, most in ((own["cosine"], least_cosine), (own["agreement"], least))
        )

    def to_json(self) -> dict[str, Any]:
        """As an `OutputParity` with the worst figures and without an allowed error."""
        every = (*self.calls, *self.held_out)
        return {
            "name": self.name,
            "judged": True,
            "problem": self.problem,
            "tolerance": None,
            "by_user": False,
            **{name: worst_of(max, (getattr(call, name) for call in every)) for name in _LARGEST},
            **{name: worst_of(min, (getattr(call, name) for call in every)) for name in _SMALLEST},
            "undecided": sum(call.undecided for call in every),
            "calls": [*map(to_json, self.calls), *({**to_json(call), "held_out": True} for call in self.held_out)],
        }


@dataclass(frozen=True)
class Metric:
    """The user's metric of a lossy candidate, compared with the original's on the same examples."""

    score: float
    """The original's metric."""
    drop: float
    """The original's metric minus the candidate's."""
    upper: float
    """The largest drop that the examples allow, at the confidence."""
    confidence: float
    budget: float
    percent: bool
    """Whether the budget was given in percent."""
    examples: int
    of: int | None
    """The number of all examples of the part; None if evaluate wasn't read to its end."""
    needed: int | None
    """About how many examples evaluate must yield for a decision; None if it is made, or no number would do."""
    verdict: str
    """One of "within", "outside" and "undecided"."""
    part: str
    """The examples: "search" for those that choose candidates, "final" for those that decide what is shipped."""
    changed: tuple[tuple[int, float, float], ...] = ()
    """Examples with another score, at most 20, the largest drops first: the number of the example in the order of evaluate,
    from 0, the original's score and the candidate's."""
    changed_count: int | None = None
    """The number of all examples with another score; None with an aggregate, which has no scores."""

    @property
    def why_not(self) -> str | None:
        """The reason why it is no candidate, or isn't shipped; None if it is."""
        # What the search part is too small to decide, or had no time for, the final test decides.
        is_open = self.verdict == "undecided" and self.part == "search"
        if self.verdict == "within" or (is_open and self.drop <= self.budget):
            return None
        allowed = points(self.budget, percent=self.percent)
        if self.verdict == "outside" or is_open:
            return f"the metric may drop {allowed}, and it has {self}"
        more = "no number would do" if self.needed is None else f"about {self.needed:,} would do"
        return f"too few examples to decide whether the metric drops at most {allowed}: {self}; {more}"

    def __str__(self) -> str:
        score = f"{100 * self.score:.4g} %" if self.percent else f"{self.score:.4g}"
        of = "" if self.of in (None, self.examples) else f" of {self.of:,}"
        known = f"{100 * self.confidence:g} %, {self.examples:,}{of} examples"
        upper = points(self.upper, percent=self.percent).removesuffix(" points")
        return f"drop {points(self.drop, percent=self.percent)}, at most {upper} ({known}) from {score}"


@dataclass(frozen=True)
class Accuracy:
    """The worst figures over all outputs and calls; None where no output has the figure."""

    cosine: float | None = None
    """The cosine of the angle between an output and the original's, both flattened."""
    top1: float | None = None
    """The share of rows whose largest score is at the original's class, for outputs of shape (rows, classes)."""
    equal: float | None = None
    """The share of equal elements of integer outputs."""
    max_error: float | None = None
    snr: float | None = None
    """Signal-to-noise ratio, 20 log10(rms of the original / rms of the error), in dB."""
    calls: int = 0
    problem: str | None = None
    """A difference that no budget allows, such as another shape; None where there is none. Of a model that chooses by
    scores, another number of rows is one unless only the user's metric judges it."""
    metric: Metric | None = None
    """The user's metric; None if nobody asked for it. It isn't measured again where a bundle is verified."""
    orders: tuple[RowOrder, ...] = field(default=(), compare=False, metadata=OMIT_IF_EMPTY)
    """The outputs whose rows scores put in order, by the names in the files."""
    outputs: tuple[OutputAccuracy, ...] = field(default=(), repr=False, compare=False)
    """The figures of each output at each call; not part of the JSON."""
    other_cosine: float | None = None
    """The cosine of outputs without a top-1 agreement, which a budget of that alone judges by it."""

    def and_worse(self, other: Accuracy) -> Accuracy:
        """The worse of both figures each."""
        return Accuracy(
            worst_of(min, (self.cosine, other.cosine)),
            worst_of(min, (self.top1, other.top1)),
            worst_of(min, (self.equal, other.equal)),
            worst_of(max, (self.max_error, other.max_error)),
            worst_of(min, (self.snr, other.snr)),
            self.calls + other.calls,
            _worse_problem(self.problem, other.problem),
            self.metric or other.metric,
            self.orders or other.orders,
            _joined(self.outputs, other.outputs),
            worst_of(min, (self.other_cosine, other.other_cosine)),
        )

    def why_not(self, budget: AccuracyBudget) -> str | None:
        """The reason why this is outside a budget; None if it is within."""
        if _is_counted(self.problem, budget):
            return self.problem
        if budget.top1 is not None and self.top1 is None and self.equal is None:
            return "no output has classes, so there is no top-1 agreement"
        if _is_top1_alone(budget) and (rows := [name for order in self.orders for name in order.unjudged]):
            return f"a top-1 agreement doesn't judge {listed(rows)}, whose rows are in the order of scores"
        if budget.cosine is not None and self.cosine is None and self.equal is None:
            return "no output could be compared"
        if (below := next(self._below(budget), None)) is not None:
            return below
        return None if self.metric is None else self.metric.why_not

    def is_below(self, budget: AccuracyBudget) -> bool:
        """Whether a figure is outside a budget, so that no further call can bring it within."""
        return _is_counted(self.problem, budget) or any(self._below(budget))

    def _below(self, budget: AccuracyBudget) -> Iterator[str]:
        for name, figure, least in (
            ("cosine", self.cosine, budget.cosine),
            ("top-1 agreement", self.top1, budget.top1),
            ("cosine of an output without classes", self.other_cosine, _other_least(budget)),
            ("share of equal integers", self.equal, budget.top1 or budget.cosine),
        ):
            if least is not None and figure is not None and not figure >= least:
                yield f"{name} {_digits(figure)} is below {least}"
        if budget.cosine is not None and self.snr is not None and self.snr < (least := _least_snr(budget.cosine)):
            yield (
                f"signal-to-noise ratio {self.snr:.1f} dB is below {least:.1f} dB, so an output is larger or smaller than the "
                "original's, which its cosine doesn't show"
            )

    def to_json(self) -> dict[str, Any]:
        found = to_json(replace(self, outputs=()))
        optional = {"metric": None, "other_cosine": None}.items()
        return {name: value for name, value in found.items() if name != "outputs" and (name, value) not in optional}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Accuracy:
        """Read what `to_json` wrote; other fields are ignored."""
        return from_json(cls, {name: value for name, value in data.items() if name != "outputs"})

    def __str__(self) -> str:
        shown = [] if self.metric is None else [str(self.metric)]
        shown += [] if self.cosine is None else [f"cosine {_digits(self.cosine)}"]
        shown += [] if self.top1 is None else [f"top-1 {100 * self.top1:.4g} %"]
        shown += [] if self.equal is None else [f"{100 * self.equal:.4g} % equal"]
        shown += [] if self.snr is None else [f"{self.snr:.0f} dB"]
        return ", ".join(shown) or "no float output"


def accuracy_text(accuracy: Mapping[str, Any]) -> str:
    """The figures of an `Accuracy` as JSON for people, with the budget if the manifest has it there."""
    said = str(Accuracy.from_json(accuracy))
    budget = accuracy.get("budget")
    return said if budget is None else f"{said} (budget: {AccuracyBudget(**budget)})"


def accuracy_of(measurement: Measurement, names: Sequence[str]) -> Accuracy:
    """The accuracy of a candidate that was compared with the original at the calls of the export.

    Args:
        names: of the outputs, in the files.
    """
    found = Accuracy(calls=max((len(output.calls) for output in measurement.outputs), default=0))
    problems = [*measurement.problems, *(problem for output in measurement.outputs for problem in output.problems)]
    for output in measurement.outputs:
        for call in output.calls:
            top1, equal = (None, call.agreement) if output.noise.is_exact else (call.agreement, None)
            other = call.cosine if call.agreement is None else None
            found = found.and_worse(Accuracy(call.cosine, top1, equal, call.max_error, other_cosine=other))
        if not output.noise.is_exact:
            found = found.and_worse(Accuracy(snr=_decibels(output.noise.rms, output.rms_error)))
    named = tuple(
        OutputAccuracy(name, each.calls, problem=_worse_problem(*each.problems))
        for name, each in zip(names, measurement.outputs, strict=False)
    )
    return replace(found, problem=_worse_problem(*problems), outputs=named)


def accuracy_between(
    names: Sequence[str],
    pairs: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    calls: Iterable[CallErrors] | None = None,
    orders: tuple[RowOrder, ...] = (),
) -> Accuracy:
    """The accuracy over calls, each a pair (outputs of the candidate, outputs of the original).

    Args:
        names: of the outputs, in the files.
        calls: identifies each call of the export; None if the calls were held out of the calibration.
        orders: the outputs whose rows scores put in order, by these names.
    """
    found = Accuracy(orders=orders)
    known = None if calls is None else iter(calls)
    for number, (outputs, originals) in enumerate(pairs):
        rows = next((tensor.shape[0] for tensor in originals if tensor.dim()), None)
        call = CallErrors(rows, number) if known is None else next(known)
        stored = {name: value.cpu() for name, value in zip(names, originals, strict=True)}
        entry = GoldenEntry(call.batch_size, call.draw, Call((), {}), stored, {}, tuple(call.sizes.items()))
        noises = {name: _noise_of(name, value) for name, value in stored.items()}
        seen = accuracy_of(compare_stored(noises, [(entry, outputs)], orders).finish(NOTHING_MEASURED), names)
        if known is None:
            seen = replace(seen, outputs=tuple(replace(each, calls=(), held_out=each.calls) for each in seen.outputs))
        found = found.and_worse(replace(seen, calls=1))
    return found


def _noise_of(name: str, value: torch.Tensor) -> OutputNoise:
    """Of the magnitude of an output, and nothing else."""
    sizes = Pool()
    if not is_exact(value):
        sizes.add_sizes(value)
    return replace(OutputNoise.unknown(name, value), rms=sizes.rms)


def _worse_problem(*problems: str | None) -> str | None:
    """The first problem that every budget counts, or else the first."""
    known = [problem for problem in problems if problem is not None]
    return min(known, key=lambda problem: problem.startswith(OTHER_ROWS), default=None)


def _is_counted(problem: str | None, budget: AccuracyBudget) -> bool:
    """Whether a problem puts a candidate outside a budget."""
    is_metric_alone = budget.drop is not None and budget.cosine is None and budget.top1 is None
    return problem is not None and not (is_metric_alone and problem.startswith(OTHER_ROWS))


def _is_top1_alone(budget: AccuracyBudget) -> bool:
    return budget.top1 is not None and budget.cosine is None and budget.drop is None


def _other_least(budget: AccuracyBudget) -> float | None:
    """The least cosine of outputs without a top-1 agreement."""
    return budget.top1 if _is_top1_alone(budget) else budget.cosine


def _least_snr(cosine: float) -> float:
    """The signal-to-noise ratio of an output that has this cosine and also another size, each with the same error.

    With the right size, the square of the error is 1 / cosine² - 1 of the original's, as noise at a right angle.
    """
    return -10 * math.log10(2 * (1 / cosine**2 - 1))


def _decibels(signal: float, error: float) -> float | None:
    if not (signal > 0 and error > 0 and math.isfinite(signal) and math.isfinite(error)):
        return None
    return 20 * math.log10(signal / error)


def _joined(first: tuple[OutputAccuracy, ...], second: tuple[OutputAccuracy, ...]) -> tuple[OutputAccuracy, ...]:
    """The calls of both, by output."""
    found = {output.name: output for output in first}
    for output in second:
        known = found.get(output.name, OutputAccuracy(output.name))
        found[output.name] = OutputAccuracy(
            output.name,
            (*known.calls, *output.calls),
            (*known.held_out, *output.held_out),
            _worse_problem(known.problem, output.problem),
        )
    return tuple(found.values())


def _digits(cosine: float) -> str:
    """A share with as many digits as tell it from 1: 0.99987, not 1.0; rounded down."""
    digits = 4 if cosine >= 1 or cosine <= 0 else min(8, max(4, 2 - math.floor(math.log10(1 - cosine))))
    return f"{math.floor(cosine * 10**digits) / 10**digits:.{digits}f}"
