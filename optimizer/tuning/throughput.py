"""Find the settings at which a bundle answers the most calls a second, within a target for the latency.

Each setting is measured in a process of its own. All are first tried back to back: the better half gets twice the time, and
so on. The best few and the program that calls one by one are then put under calls that come at rates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from exporters.child_process import OwnChild
from exporters.errors import RuntimeCrashed
from optimize_export.errors import BundleError, OptimizeExportError
from optimize_export.manifest import damage_of, plain
from optimize_export.runtime import Batching, processor, usable_cpus
from optimize_export.runtime.cpus import status
from optimize_export.runtime.traffic import Service, Traffic, callers_of
from optimize_export.wording import quote
from optimizer.bundle import keep_in_manifest, open_bundle
from optimizer.showing import rate_text, seconds_text

# The largest last: it takes longest, where the time may be up.
_MAX_BATCHES = (8, 4, 16, 1, 32)
# The settings that meet calls at rates, besides the program that calls one by one.
_FINALISTS = 3
# The share of the time for the loads back to back.
_BACK_TO_BACK = 0.5
# The share of the time for the second load of the program that calls one by one.
_SHARE_OF_BASE = 0.04
# Seconds of one load: with fewer there is no percentile, and with more no news.
_LEAST, _MOST = 0.3, 10.0
# The rates of the curve without a target, as shares of the rate back to back.
_RATES = (0.5, 0.7, 0.8, 0.9)
# The loads of a bisection: its last step is a 32nd of the rate back to back.
_STEPS = 5
# With fewer calls, the 95th percentile is the slowest one.
_FEW = 20
# The least gain over calls one by one that is worth the queue and the threads.
_PAYS = 1.05
# Seconds that a load may take longer than it should before the process counts as hanging.
_HANGS = 300.0


@dataclass(frozen=True)
class Setting:
    """A way to serve a bundle on the CPU."""

    instances: int
    threads: int
    """Of each instance."""
    max_batch: int
    max_wait: float = 0.0
    """In seconds."""
    one_by_one: bool = False
    """Whether no calls are joined, as in a program that calls the loaded bundle itself."""

    @property
    def batching(self) -> Batching | None:
        return None if self.one_by_one else Batching(self.max_batch, self.max_wait, instances=self.instances)

    @property
    def callers(self) -> int:
        return 1 if self.batching is None else callers_of(self.batching)

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        if self.one_by_one:
            return f"one by one, {threads}"
        wait = f", wait {1000 * self.max_wait:g} ms" if self.max_wait else ""
        return f"{self.instances} x {threads}, batch {self.max_batch}{wait}"


class Load(Protocol):
    """A setting that runs, and can be put under load."""

    def back_to_back(self, callers: int, seconds: float) -> Traffic: ...
    def at_rate(self, rate: float, seconds: float, patience: float, seed: int) -> Traffic: ...
    def memory(self) -> int | None:
        """The peak of its resident memory, in bytes; None where the system doesn't tell."""


Start = Callable[[Setting], AbstractContextManager[Load]]


@dataclass
class ServiceFigure:
    """What one setting was measured at."""

    setting: Setting
    closed: Traffic | None = None
    """The last load back to back."""
    at_rates: list[Traffic] = field(default_factory=list)
    memory: int | None = None
    dropped: str | None = None
    """Why it isn't a choice."""

    def within(self, target: float | None) -> Traffic | None:
        """The load of most calls a second: back to back without a target, else the highest rate that meets it."""
        if target is None:
            return self.closed
        return max((each for each in self.at_rates if meets(each, target)), key=_rate_of, default=None)

    def to_json(self, target: float | None) -> dict[str, Any]:
        """The figures; `load` is the one to compare, at the lowest rate if none meets the target."""
        rates = sorted(self.at_rates, key=lambda each: each.offered or 0)
        load = self.within(target) or next(iter(rates), self.closed)
        return {
            "name": str(self.setting),
            "setting": asdict(self.setting),
            "load": load and load.to_json(),
            "back_to_back": self.closed and self.closed.to_json(),
            "at_rates": [each.to_json() for each in rates],
            "memory": self.memory,
            "dropped": self.dropped,
        }


def meets(load: Traffic, target: float) -> bool:
    return not load.failed and load.p95 <= target


@dataclass(frozen=True)
class Throughput:
    """The figures of all settings, and the chosen one."""

    target: float | None
    """For the 95th percentile of a call, in seconds."""
    cpus: int
    """The processors that this process may use."""
    figures: Sequence[ServiceFigure]
    """Calls one by one first, then the best few, then the others in the order of their trials."""
    chosen: Setting | None
    """None if nothing meets the target."""
    reason: str
    """A sentence about the choice."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "cpus": self.cpus,
            "figures": [each.to_json(self.target) for each in self.figures],
            "chosen": self.chosen and asdict(self.chosen),
            "reason": self.reason,
            "notes": list(self.notes),
        }

    def in_manifest(self) -> dict[str, Any]:
        """The manifest's `service`; there must be a choice."""
        found = next(each for each in self.figures if each.setting == self.chosen)
        load = found.within(self.target)
        assert load is not None
        setting = {name: value for name, value in asdict(found.setting).items() if name != "one_by_one"}
        measured = {"rate": load.rate, "p95": load.p95, "target": self.target}
        return {**setting, "cpus": self.cpus, "processor": processor(), **measured}


def bench_throughput(
    path: str | Path, *, target: float | None = None, seconds: float = 60.0, save: bool = False
) -> tuple[Throughput, str | None]:
    """Measure how many calls a second a bundle answers on the CPU of this machine, and how to serve it.

    Args:
        path: the bundle.
        target: for the 95th percentile of a call under load, in seconds; None for the most calls back to back.
        seconds: for everything, about.
        save: put the choice into the manifest, for `load(path, batching=True)`. The bundle is exchanged in one step.

    Returns:
        The figures, and the SHA-256 of the new SHA256SUMS if the choice was saved.

    Raises:
        BundleError: there is no bundle, a file was changed, or it can't be replaced.
        UsageError: nothing says that its calls can be joined.
    """
    bundle = open_bundle(path)
    if damage := damage_of(bundle.path, bundle.manifest):
        raise BundleError(f"{bundle.path} is damaged, and no file is run: {next(iter(damage.values()))}")
    cpus = usable_cpus()
    recommended = (bundle.benchmark or {}).get("recommended") or {"settings": {}}
    # Without a number, a runtime takes about one thread for each processor.
    base = Setting(1, min(cpus, int(recommended["settings"].get("threads", cpus))), 1, one_by_one=True)
    found = Search(partial(_started, bundle.path), base, cpus, target, seconds).run()
    if not save or found.chosen is None:
        return found, None
    return found, keep_in_manifest(bundle.path, {"service": plain(found.in_manifest())}).sha256sums


class _Started:
    def __init__(self, child: OwnChild) -> None:
        self._child = child

    def back_to_back(self, callers: int, seconds: float) -> Traffic:
        found: Traffic = self._child("back_to_back", callers, seconds, longest=seconds + _HANGS)
        return found

    def at_rate(self, rate: float, seconds: float, patience: float, seed: int) -> Traffic:
        longest = seconds + patience + _HANGS
        found: Traffic = self._child("at_rate", rate, seconds, patience, seed, longest=longest)
        return found

    def memory(self) -> int | None:
        return status("VmHWM", self._child.pid)


@contextmanager
def _started(path: Path, setting: Setting) -> Iterator[_Started]:
    threads = None if setting.one_by_one else setting.threads
    child = OwnChild(partial(Service, path, threads, setting.batching), f"the service ({setting})")
    try:
        yield _Started(child)
    finally:
        child.close()


def splits(cpus: int) -> list[tuple[int, int]]:
    """Instances and threads that use all processors, the most instances first."""
    return [(cpus // threads, threads) for threads in range(1, cpus + 1) if cpus % threads == 0]


class Search:
    """A search whose time goes where the choice is decided."""

    def __init__(
        self,
        start: Start,
        base: Setting,
        cpus: int,
        target: float | None,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._target, self._cpus, self._clock = start, target, cpus, clock
        self._begun, self._seconds = clock(), seconds
        self._base = ServiceFigure(base)
        same = (base.instances, base.threads, base.max_batch)
        made = [(count, threads, batch) for batch in _MAX_BATCHES for count, threads in splits(cpus)]
        self._others = [ServiceFigure(Setting(*each)) for each in made if each != same]
        self._notes: list[str] = []

    def run(self) -> Throughput:
        self._back_to_back(self._base, self._left(_BACK_TO_BACK) / (len(self._others) + 1))
        if self._base.dropped:
            raise BundleError(f"The bundle can't be measured: {self._base.dropped}")
        best = self._best_few(self._halved())
        # Again, near the loads of the best: a slow moment at the start would look like a gain.
        self._back_to_back(self._base, _SHARE_OF_BASE * self._seconds)
        finalists = [self._base, *best]
        # One more, which waits for others to join.
        waits = self._target is not None
        for number, figure in enumerate(finalists):
            self._at_rates(figure, self._left() / (len(finalists) - number + waits))
        if (waiting := self._waiting(best)) is not None:
            self._at_rates(waiting, self._left())
            finalists.append(waiting)
        chosen, reason = self._choice(finalists)
        if any(0 < each.calls + each.failed < _FEW for figure in finalists for each in figure.at_rates):
            self._notes.append(f"some percentiles are of fewer than {_FEW} calls: more --seconds make them surer")
        figures = [*finalists, *(each for each in self._others if each not in finalists)]
        return Throughput(self._target, self._cpus, figures, chosen, reason, tuple(self._notes))

    def _left(self, share: float = 1.0) -> float:
        """The seconds until this share of the time is over."""
        return max(0.0, self._begun + share * self._seconds - self._clock())

    # Loads back to back ----------------------------------------------------------------------------------------------

    def _halved(self) -> list[ServiceFigure]:
        """The best settings, each round with half as many of them and the same time."""
        alive, tried = self._others, list[ServiceFigure]()
        rounds = max(1, math.ceil(math.log2(max(1, len(alive)) / _FINALISTS)))
        for number in range(rounds):
            end = (number + 1) / rounds * _BACK_TO_BACK
            for place, figure in enumerate(alive):
                if not self._left(_BACK_TO_BACK):
                    break
                self._back_to_back(figure, self._left(end) / (len(alive) - place))
            tried = sorted((each for each in alive if each.closed and not each.dropped), key=_closed_rate, reverse=True)
            alive = tried[: max(_FINALISTS, math.ceil(len(tried) / 2))]
        if untried := sum(each.closed is None and not each.dropped for each in self._others):
            self._notes.append(f"{untried} of {len(self._others)} settings weren't tried: the time was up")
        return tried

    def _back_to_back(self, figure: ServiceFigure, seconds: float) -> None:
        with self._running(figure, seconds) as (load, left):
            figure.closed = load.back_to_back(figure.setting.callers, _within(left))

    def _best_few(self, figures: Sequence[ServiceFigure]) -> list[ServiceFigure]:
        """The fastest, and the fastest with another number of threads, whose single run takes another time.

        Of those that are about as fast as the fastest, the one with the shortest calls comes first.
        """
        near = [each for each in figures if _closed_rate(each) * _PAYS >= _closed_rate(figures[0])]
        ranked = sorted(near, key=lambda each: each.closed.p95 if each.closed else math.inf)
        ranked += [each for each in figures if each not in ranked]
        other = [each for each in ranked if each.setting.threads != ranked[0].setting.threads][:1]
        return [*ranked[:1], *other, *(each for each in ranked[1:] if each not in other)][:_FINALISTS]

    # Loads at rates --------------------------------------------------------------------------------------------------

    def _at_rates(self, figure: ServiceFigure, seconds: float) -> None:
        if figure.closed is None or not figure.closed.rate:
            return
        if not seconds:
            self._notes.append(f"{figure.setting} met no calls at rates: the time was up")
            return
        top, late = figure.closed.rate, max(2 * figure.closed.p95, self._target or 0)
        low, high = 0.0, 1.0
        count = len(_RATES) if self._target is None else _STEPS
        with self._running(figure, seconds) as (load, left):
            end = self._clock() + left
            for seed in range(count):
                share = _RATES[seed] if self._target is None else (low + high) / 2
                # Fewer loads that tell, rather than more that don't.
                each = _within(max(left / count, _FEW / (share * top)))
                if seed and self._clock() + each > end + _LEAST:
                    break
                found = load.at_rate(share * top, each, max(each, late), seed)
                figure.at_rates.append(found)
                low, high = (share, high) if self._target and meets(found, self._target) else (low, share)

    def _waiting(self, figures: Sequence[ServiceFigure]) -> ServiceFigure | None:
        """The best setting with a wait of a quarter of the target."""
        found = [each for each in figures if each.within(self._target) and each.setting.max_batch > 1]
        if self._target is None or not found:
            return None
        best = max(found, key=self._rate)
        wait = min(self._target / 4, 10.0)
        return ServiceFigure(replace(best.setting, max_wait=wait), best.closed)

    @contextmanager
    def _running(self, figure: ServiceFigure, seconds: float) -> Iterator[tuple[Load, float]]:
        """A setting that runs, and the seconds that are left of these; if it fails, that drops it."""
        begun = self._clock()
        try:
            with self._start(figure.setting) as load:
                yield load, seconds - (self._clock() - begun)
                figure.memory = load.memory()
        except OptimizeExportError:
            raise
        except RuntimeCrashed as error:
            figure.dropped = str(error)
        # Each runtime has its own errors, such as for lack of memory, and some derive from Exception alone.
        except Exception as error:  # noqa: BLE001
            figure.dropped = quote(error)

    # The choice ------------------------------------------------------------------------------------------------------

    def _rate(self, figure: ServiceFigure) -> float:
        load = None if figure.dropped else figure.within(self._target)
        return 0.0 if load is None else _rate_of(load)

    def _p95(self, figure: ServiceFigure) -> float:
        load = figure.within(self._target)
        return math.inf if load is None else load.p95

    def _choice(self, figures: Sequence[ServiceFigure]) -> tuple[Setting | None, str]:
        base, best = self._base, max(figures, key=self._rate)
        if not self._rate(best):
            if self._target is None:
                return None, f"no setting kept running: {base.dropped}"
            least = min((each.p95 for figure in figures for each in figure.at_rates), default=math.inf)
            told = "no calls came at rates" if math.isinf(least) else f"the least p95 was {seconds_text(least)}"
            return None, f"nothing meets a p95 of {seconds_text(self._target)} here: {told}"
        # Of those that differ by less than what pays: calls one by one, or else the one that answers soonest.
        near = [each for each in figures if self._rate(each) * _PAYS >= self._rate(best)]
        best = base if base in near else min(near, key=self._p95)
        load = best.within(self._target)
        assert load is not None
        within = "" if self._target is None else f" within a p95 of {seconds_text(self._target)}"
        told = f"{best.setting}: {rate_text(_rate_of(load))} calls a second{within}, at {seconds_text(load.processor)} of a processor each"
        if best is base:
            return base.setting, f"{told}; batching doesn't pay here"
        if not self._rate(base):
            return best.setting, f"{told}; calls one by one don't meet it at any rate that was tried"
        return best.setting, f"{told}; {self._rate(best) / self._rate(base):.2f} times as many as one by one"


def _rate_of(load: Traffic) -> float:
    return load.rate if load.offered is None else load.offered


def _closed_rate(figure: ServiceFigure) -> float:
    return figure.closed.rate if figure.closed else 0.0


def _within(seconds: float) -> float:
    return min(max(seconds, _LEAST), _MOST)
