"""Measure the latency and memory of the ways to run a model, next to eager, and recommend one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from optimize_export.errors import BundleError
from optimize_export.manifest import check_benchmark, plain
from optimize_export.runtime import Route
from optimize_export.wording import quote
from optimizer.bundle import is_reproducible_build
from optimizer.parity import WITHIN_BUDGET, Accuracy
from optimizer.tuning.timing import LEAST_GAIN, Latency, PeakMemory, Ratio, interleaved, ratio

EAGER = "eager"
# The share of the time for all candidates; the rest is for two of them, if the choice is in doubt.
_FOR_ALL = 0.7

Run = Callable[[], object]


@dataclass(frozen=True)
class Candidate:
    """One way to run the model."""

    name: str
    """The name in the table."""
    open: Callable[[], Run] = field(repr=False)
    """Makes it ready and returns its call on the example inputs. It may raise: then the candidate is dropped by
    whoever asks for it."""
    route: Route | None = None
    """The artifact and its runtime; None for what only runs in Python, such as eager."""
    bytes: int | None = None
    """The size of the artifact's files; None without an artifact."""
    accuracy: Accuracy | None = None
    """The accuracy of a lossy candidate; None where only rounding differs."""
    device: str = "cpu"
    """Where the artifact runs, "cpu" or "cuda"."""


@dataclass(frozen=True)
class Figure:
    """The figures of one candidate."""

    name: str
    route: Route | None
    bytes: int | None = None
    memory: int | None = None
    """How far loading the artifact and one call raise the memory of the process at most, in bytes; None on a GPU."""
    seconds: float | None = None
    p95: float | None = None
    """The median and the 95th percentile of one call; None if it wasn't timed. A dropped candidate has those of a short
    timing."""
    speed_up: Ratio | None = None
    """The speed-up over eager."""
    accuracy: Accuracy | None = None
    dropped: str | None = None
    """Why it isn't a choice; None if it is."""

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "route": None if self.route is None else self.route.to_json(),
            "speed_up": None if self.speed_up is None else vars(self.speed_up),
            "accuracy": None if self.accuracy is None else self.accuracy.to_json(),
        }


@dataclass(frozen=True)
class Benchmark:
    """The figures of all candidates, and the recommended one."""

    batch_sizes: tuple[int, ...]
    """The batch sizes at which the candidates were timed."""
    threads: int
    """The number of torch's threads."""
    rounds: int
    """The number of rounds, in each of which the candidates ran in turn."""
    figures: tuple[Figure, ...]
    recommended: Route | None
    """The route to ship; None if there is none to recommend."""
    reason: str
    """A sentence about the recommendation."""
    notes: tuple[str, ...] = ()
    """Sentences about the measurement."""

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "batch_sizes": list(self.batch_sizes),
            "figures": [figure.to_json() for figure in self.figures],
            "recommended": None if self.recommended is None else self.recommended.to_json(),
            "notes": list(self.notes),
        }

    def in_manifest(self) -> dict[str, Any]:
        """The manifest's `benchmark`; empty if the bundle must be reproducible byte for byte, as times vary.

        Times that the manifest's readers would refuse are left out: proven files are published all the same.
        """
        is_measured = self.rounds > 0 or self.recommended is None
        if is_measured and is_reproducible_build():
            return {}
        kept = plain(self.to_json())
        try:
            check_benchmark(kept)
        except BundleError as error:
            unknown = replace(self, figures=(), rounds=0, notes=(*self.notes, f"no times are kept: {error}"))
            return {"benchmark": unknown.to_json()}
        return {"benchmark": kept}

    def lossy_choice(self) -> dict[str, str]:
        """The accuracy of the recommended candidate, by its name; empty if it is exact or there is none."""
        chosen = (each for each in self.figures if each.route is not None and each.route == self.recommended)
        return next(({each.name: str(each.accuracy)} for each in chosen if each.accuracy is not None), {})


@dataclass(frozen=True)
class Opened:
    """A candidate that is ready to run, with the peak memory of getting there; None on a GPU.

    `run` raises `Refused` for any error.
    """

    candidate: Candidate
    run: Run = field(repr=False)
    memory: int | None


def opened(candidate: Candidate) -> Opened:
    """Open a candidate and run it once."""
    with PeakMemory() as peak:
        run = candidate.open()
        run()

    def checked() -> object:
        try:
            return run()
        # A runtime may fail in a later call, for example for lack of memory. Proven files are published all the same.
        except Exception as error:
            raise Refused(f"{candidate.name} failed when it ran again: {quote(error)}") from error

    is_known = candidate.route is not None and candidate.device == "cpu" and peak.exact
    return Opened(candidate, checked, peak.bytes if is_known else None)


class Refused(Exception):
    """A candidate isn't a choice; the message is the reason, a clause."""

    def __init__(self, reason: str, accuracy: Accuracy | None = None, seconds: float | None = None) -> None:
        super().__init__(reason)
        # Of a lossy candidate that is outside the budget, and of one of its calls; None if it wasn't timed.
        self.accuracy = accuracy
        self.seconds = seconds


def open_all(
    candidates: Iterable[Candidate], prove: Callable[[Opened], Opened] = lambda ready: ready
) -> tuple[list[Opened], list[Figure]]:
    """Open candidates. Those that can't run, and those that `prove` refuses, are dropped with the reason.

    Args:
        prove: returns what it gets, with the accuracy if the candidate is lossy; or raises `Refused`.
    """
    ready: list[Opened] = []
    dropped: list[Figure] = []
    for candidate in candidates:
        found, refused = try_candidate(candidate, lambda each: prove(opened(each)))
        ready += found
        dropped += refused
    return ready, dropped


def try_candidate(candidate: Candidate, make: Callable[[Candidate], Opened]) -> tuple[list[Opened], list[Figure]]:
    """What `make` returns; or the dropped candidate with the reason, if it raises."""
    try:
        return [make(candidate)], []
    except Refused as refused:
        return [], [dropped_figure(candidate, str(refused), refused.accuracy)]
    # Any exception of a runtime that can't load or run a file is a reason not to choose it, and is reported as one.
    except Exception as error:  # noqa: BLE001
        return [], [dropped_figure(candidate, f"it can't run: {quote(error)}")]


def dropped_figure(candidate: Candidate, reason: str, accuracy: Accuracy | None = None) -> Figure:
    return Figure(candidate.name, candidate.route, candidate.bytes, accuracy=accuracy, dropped=reason)


@dataclass(frozen=True)
class Timed:
    """What `timed` measured."""

    rounds: int
    figures: tuple[Figure, ...]
    """The figures of all candidates."""
    chosen: str | None
    """The name of the candidate to ship; None if there is none to choose from."""
    notes: tuple[str, ...] = ()
    """Sentences about the choice."""

    @property
    def route(self) -> Route | None:
        """The route of the chosen candidate."""
        return next((figure.route for figure in self.figures if figure.name == self.chosen), None)


def timed(candidates: Sequence[Opened], preferred: Sequence[str], seconds: float, finished: Run) -> Timed:
    """Time candidates side by side, and choose one; the first one is the base of the speed-ups.

    Args:
        preferred: the names to choose from, simplest first.
        seconds: for everything.

    Raises:
        Refused: one of them fails.
    """
    runs = {each.candidate.name: each.run for each in candidates}
    latencies = interleaved(runs, _FOR_ALL * seconds, finished)
    base = latencies[candidates[0].candidate.name]
    figures = tuple(_figure(each, latencies[each.candidate.name], base) for each in candidates)
    if not preferred:
        return Timed(len(base.rounds), figures, None)
    # If another candidate has a better median and isn't surely faster, these two are timed again alone: with only two,
    # there are more rounds in the same time.
    best = chosen(latencies, preferred)
    gains = {name: ratio(latencies[best], latencies[name]) for name in preferred}
    fastest = max(preferred, key=lambda name: gains[name].median)
    if not gains[fastest].may_pay:
        return Timed(len(base.rounds), figures, best)
    again = interleaved({name: runs[name] for name in (best, fastest)}, (1 - _FOR_ALL) * seconds, finished)
    gain = ratio(again[best], again[fastest])
    note = f"timed again, only these two: {fastest} is {gain} as {best}"
    return Timed(len(base.rounds), figures, fastest if gain.pays else best, (note,))


def _figure(opened: Opened, latency: Latency, base: Latency) -> Figure:
    made, seconds, p95, gain = opened.candidate, latency.median, latency.p95, ratio(base, latency)
    return Figure(made.name, made.route, made.bytes, opened.memory, seconds, p95, gain, made.accuracy)


def chosen(latencies: Mapping[str, Latency], preferred: Sequence[str]) -> str:
    """The name of the first preferred contender, unless a later one is surely faster, and so on.

    Args:
        latencies: by name, from one `interleaved`.
    """
    best, *others = preferred
    for name in others:
        if ratio(latencies[best], latencies[name]).pays:
            best = name
    return best


def recommendation(figures: Sequence[Figure], name: str | None) -> str:
    """A sentence about the chosen candidate, given its name; None if there is nothing to choose from."""
    figure = next((each for each in figures if each.name == name), None)
    if figure is None or figure.speed_up is None:
        dropped = next((each for each in figures if each.route is not None and each.dropped), None)
        return "no file could be timed" if dropped is None else f"ship no file yet: {dropped.name}: {dropped.dropped}"
    gain = figure.speed_up
    told = f"ship {figure.name}{_gain_text(gain)}{budget_text(figure.accuracy)}"
    # In the table, another file may look faster than the one that is shipped.
    files = [each for each in figures if each.route is not None and each.speed_up is not None and not each.dropped]
    fastest = max(files, key=lambda each: 0.0 if each.speed_up is None else each.speed_up.median)
    if fastest.speed_up is not None and fastest.speed_up.median >= LEAST_GAIN * gain.median:
        kept = "exact file is shipped"
        if fastest.accuracy is None or figure.accuracy is not None:
            # A quantized file and its runtimes have one format.
            is_same_file = fastest.route and figure.route and fastest.route.format == figure.route.format
            kept = "simpler way to run it is recommended" if is_same_file else "simpler file is shipped"
        told += (
            f"; tie: {fastest.name}, {fastest.speed_up.median:.2f} times as fast as eager here, isn't surely faster, "
            f"and the {kept}"
        )
    rest = [each for each in figures if each.route is None and each.name != EAGER and each.seconds is not None]
    if faster := [each for each in rest if (each.seconds or 0) * 1.05 < (figure.seconds or 0)]:
        told += f"; in Python, {faster[0].name} is faster"
        told += "" if faster[0].speed_up is None else f": {faster[0].speed_up.median:.2f} times as fast as eager"
    return told


def _gain_text(gain: Ratio) -> str:
    """The speed-up over eager after the name of a file, in words that hold for its bounds."""
    if gain.pays:
        return f": {gain.median:.2f} times as fast as eager"
    if gain.high < 1:
        return f", but not for speed: it is slower than eager, {gain} as eager"
    if gain.may_pay:
        return f", but a gain isn't sure: it is {gain} as eager, and the times vary too much to tell"
    return f", but expect no gain: it is {gain} as eager, which is within the noise"


def budget_text(accuracy: Accuracy | None) -> str:
    """The figures of a lossy candidate after a sentence on it; "" for an exact one."""
    return "" if accuracy is None else f", {WITHIN_BUDGET}: {accuracy}"
