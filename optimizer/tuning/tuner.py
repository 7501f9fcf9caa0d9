"""Try runtimes, precisions and settings for the files of an export, within a time and an accuracy budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from exporters.aoti import AotiExporter
from exporters.onnx_quantization import kinds
from exporters.registry import QUANTIZED, exported_format, half_of
from optimize_export.runtime import (
    Route,
    Runner,
    Setting,
    is_installed,
    openvino_precisions,
    own_routes,
    usable_cpus,
)
from optimizer.accuracy import EvaluateError
from optimizer.tuning.benchmark import (
    Benchmark,
    Candidate,
    Figure,
    Latency,
    Opened,
    Ratio,
    Refused,
    dropped_by,
    dropped_figure,
    full_timing,
    interleaved,
    open_all,
    ratio,
    recommendation,
)
from optimizer.tuning.candidates import Bench, frozen, in_graph
from optimizer.tuning.lossy import Lossy, alike, is_lossy
from passes.cast_precision import fast_dtypes

# Seconds of the first timing of each candidate, next to the first file: eager would take several times as long.
_FIRST_TIMING = 0.6
# Its longest time as a share of the whole: calls that take seconds are timed in one round instead of three.
_LONGEST_FIRST_TIMING = 0.02
# A candidate that is this much slower than the best in its first timing isn't timed again.
_FAR_BEHIND = 1.5
# The time that compiling needs at least, in seconds.
_COMPILING = 25.0
# The number of routes whose settings are tried, and of files that stay open for the last timing.
_WITH_SETTINGS = 2
_FINALISTS = 6
# The number of kinds of lossy files that stay open for a last test of the metric, however fast the others are.
_RESERVES = 2
# The largest share of the time that is left for the last timing.
_LAST_TIMING = 0.3
_LEAST_LAST_TIMING = 0.15


class Tuner:
    """Collects candidates, those that need the least work first, until the time is up; lossy ones if `lossy` isn't None."""

    def __init__(self, bench: Bench, lossy: Lossy | None, seconds: float) -> None:
        # The manifest's entries of the files that were made, by format.
        self.entries: dict[str, dict[str, Any]] = {}
        self._bench, self._lossy, self._seconds = bench, lossy, seconds
        self._started = time.monotonic()
        # The longest time that a candidate took so far: one that needs as much isn't begun too late.
        self._longest = 0.0
        self._own = bench.files.own_routes
        # By format, how long its file takes to make.
        self._making = {AotiExporter.name: _COMPILING, **bench.seconds}
        self._dropped: list[Figure] = []
        # The proven files in the order of their trials, each with its speed relative to the first one, from its first
        # timing.
        self._ready: list[tuple[Opened, float]] = []
        # The formats that compile in the background.
        self._begun: set[str] = set()
        # The formats in their runtimes whose settings were tried.
        self._with_settings: set[tuple[str, str]] = set()
        # The names of those that run and, unless they are far behind, are proven.
        self._fit: set[str] = set()
        self._first: Opened | None = None
        self._in_python: list[Opened] = []
        self._notes: list[str] = []
        self._tried = 0
        # By candidate, from its first timing.
        self._latencies: dict[str, Latency] = {}
        if lossy is not None:
            lossy.left = self._left
            lossy.seconds_of = self._seconds_of
            lossy.searches = True

    def run(self) -> Benchmark:
        """Try all candidates, and time the best of them side by side.

        Raises:
            Refused: the original can't run, or one of the best fails in the last timing.
        """
        eager = self._bench.open_eager()
        # Before what may take the time.
        self._in_python += self._opened(self._bench.in_python())
        self._try_all(self._candidates())
        self._try_other_passes(eager)
        if self._bench.files.device == "cpu":
            # Here it takes longest, and other files are mostly faster.
            self._try_all(self._compiled_files())
        # Last, because compiling can't be stopped here; and only where there is no compiled file.
        name = AotiExporter.name
        if all(exported_format(entry["format"]) != name for entry in self._bench.files.entries):
            self._in_python += self._opened(self._bench.compiled(), needed=self._making[name])
        # What still compiles would disturb the last timing.
        self._bench.end_compiling()
        # The line of a stage has its last text.
        self._bench.job.progress("tune", self._tried, self._tried, f"{self._tried} ways to run the model")
        ready = [eager, *self._finalists(), *self._in_python]
        while True:
            spent = time.monotonic() - self._started
            seconds = max(self._seconds - spent, _LEAST_LAST_TIMING * self._seconds)
            found = self._bench.conclude(ready, self._dropped, seconds)
            chosen = next((each for each in ready if each.candidate.route == found.recommended), eager).candidate
            if self._lossy is None or chosen.accuracy is None:
                break
            try:
                is_last = len(_lossy_kinds(each.candidate for each in ready)) == 1
                found = self._shipped(self._lossy, chosen, found, is_last=is_last)
                break
            except Refused as refused:
                ready = self._without(chosen, refused, ready)
        return replace(found, notes=(*found.notes, *self._notes))

    def _shipped(self, lossy: Lossy, chosen: Candidate, found: Benchmark, *, is_last: bool) -> Benchmark:
        """The outcome with the last judgement of the lossy file that it recommends.

        Raises:
            Refused: it is outside the budget.
        """
        assert chosen.route is not None
        self._bench.job.progress("tune", self._tried, self._tried, f"the last test of {chosen.name}")
        accuracy = lossy.shipped(chosen, self._bench.files, is_last=is_last).accuracy
        assert accuracy is not None
        if chosen.route.format in self.entries:
            self.entries[chosen.route.format] |= lossy.judged(accuracy)
        figures = [replace(each, accuracy=accuracy) if each.name == chosen.name else each for each in found.figures]
        return replace(found, figures=tuple(figures), reason=recommendation(figures, chosen.name))

    def _without(self, chosen: Candidate, refused: Refused, ready: Sequence[Opened]) -> list[Opened]:
        """The candidates without one that failed its last test, and without those that differ from it in speed only."""
        assert chosen.route is not None
        kept, kind = list[Opened](), alike(chosen.route)
        for opened in ready:
            route = opened.candidate.route
            if route is None or alike(route) != kind:
                kept.append(opened)
            else:
                self._dropped.append(dropped_figure(opened.candidate, str(refused), refused.accuracy))
        return kept

    def _left(self) -> float:
        """The seconds until the last timing, which takes less where calls are short."""
        known = [
            self._latencies[name].median
            for opened, _ in self._ready
            if (name := opened.candidate.name) in self._latencies
        ]
        last = min(_LAST_TIMING * self._seconds, full_timing(known) if known else math.inf)
        return self._seconds - last - (time.monotonic() - self._started)

    def _is_late(self, needed: float = 0.0) -> bool:
        """Whether the time is up, or would be after this many seconds."""
        return self._left() < needed

    def _cut(self, needed: float) -> str:
        """The reason why a candidate isn't tried that takes this many seconds."""
        left = self._left()
        if left < 0:
            return "not tried: the time was up"
        return f"not tried: it takes about {needed:.0f} s, and {left:.0f} s were left"

    def _candidates(self) -> Iterator[Candidate]:
        files = self._bench.files
        for ways in (self._run, self._otherwise):
            for route in self._own:
                yield from ways(route)
        if self._lossy is None:
            self._begin(AotiExporter.name)
        yield from self._in_half_precision()
        # Settings take seconds each; quantizing and compiling can take minutes.
        yield from self._settings_of_best()
        if files.device == "cuda":
            yield from self._compiled_files()
        yield from self._quantized_files()
        # Those that are best for a file made since then may differ.
        yield from self._settings_of_best()

    def _run(self, route: Route) -> Iterator[Candidate]:
        """A file in its own runtime; on a GPU in a CUDA graph, and as it is only if it can't run in one.

        Without a graph, the time of the launches hides how fast a file is.
        """
        files = self._bench.files
        if files.device == "cuda":
            candidate = files.candidate(replace(route, settings={**route.settings, "cuda_graph": True}))
            yield candidate
            if candidate.name in self._fit:
                return
        yield files.candidate(route)

    def _otherwise(self, own: Route) -> Iterator[Candidate]:
        """A file frozen, and in other runtimes."""
        if (fast := frozen(own)) is not None:
            yield from self._run(fast)
        yield from self._in_openvino(own.format)

    def _in_half_precision(self) -> Iterator[Candidate]:
        """Every file from the module in float16 or bfloat16: the first of the two that is within the budget.

        The formats that take the least time come first.
        """
        if self._lossy is None:
            return
        device = self._bench.job.target
        for dtype in fast_dtypes(device):
            self._begin(f"{AotiExporter.name}-{dtype}")
            # onnxruntime has no kernels for half precision on CPUs, and few for bfloat16 on GPUs.
            in_onnx = device.type == "cuda" and dtype == "float16"
            for route in sorted(self._own, key=lambda route: self._making.get(route.format, 0.0)):
                if route.format != "onnx" or in_onnx:
                    yield from self._lossy_file(self._lossy, f"{route.format}-{dtype}")
            if any(half_of(format) == dtype for format in self.entries):
                return

    def _compiled_files(self) -> Iterator[Candidate]:
        """The module compiled for this machine, in half precision first, without anybody asking for the format."""
        name = AotiExporter.name
        if not self._compiles:
            return
        if self._lossy is not None:
            made = {half_of(format) for format in self.entries}
            tried = made | {half_of(figure.name) for figure in self._dropped}
            dtypes = fast_dtypes(self._bench.job.target)
            # The one that is within the budget, or that no other format could try.
            for dtype in [dtype for dtype in dtypes if dtype in made or dtype not in tried][:1]:
                yield from self._lossy_file(self._lossy, f"{name}-{dtype}")
        yield from self._made(name, lambda: self._bench.further.write(name, self._bench.files.folder, self._left()))

    @property
    def _compiles(self) -> bool:
        """Whether compiled files are made here: not if the export has one."""
        return self._bench.can_compile and all(route.format != AotiExporter.name for route in self._own)

    def _begin(self, format: str) -> None:
        """On a GPU, start to compile a file in the background: it takes minutes and other processors.

        On a CPU it would disturb the timing.
        """
        if self._bench.files.device != "cuda" or not self._compiles or self._is_late(_COMPILING):
            return
        # Making the file is refused for the same reason, which is told then.
        with suppress(Refused):
            self._bench.further.begin(format)
            self._begun.add(format)

    def _quantized_files(self) -> Iterator[Candidate]:
        device = self._bench.files.device
        if self._lossy is None or all(route.format != "onnx" for route in self._own):
            return
        source = self._bench.files.folder / self._bench.files.entry("onnx")["path"]
        for format in QUANTIZED:
            (own,) = own_routes([format])
            in_openvino = device == "cpu" and is_installed("openvino")
            if own.runtime == "openvino" and not (in_openvino and kinds(format, source)):
                # It wouldn't pay.
                continue
            if device == "cuda" and format.startswith("onnx-int8"):
                reason = "not tried: on a GPU, onnxruntime computes in int8 only with TensorRT"
                self._dropped.append(Figure(format, None, dropped=reason))
            else:
                yield from self._lossy_file(self._lossy, format)

    def _settings_of_best(self) -> Iterator[Candidate]:
        """The best files with one setting added, for each that may pay on the device; on a GPU also with all and without.

        Without its CUDA graph, a file needs less memory, and is as fast where the kernels take long.
        """
        files = self._bench.files
        for opened, _ in _by_speed(self._ready)[:_WITH_SETTINGS]:
            route = opened.candidate.route
            assert route is not None
            if (route.format, route.runtime) in self._with_settings:
                continue
            self._with_settings.add((route.format, route.runtime))
            for setting in settings_of(route, files.device, exact=self._lossy is None):
                yield files.candidate(replace(route, settings={**route.settings, **setting}))
            if in_graph(opened.candidate):
                rest = {name: value for name, value in route.settings.items() if name != "cuda_graph"}
                yield files.candidate(replace(route, settings=rest))

    def _in_openvino(self, format: str) -> Iterator[Candidate]:
        if not format.startswith("onnx") or self._bench.files.device != "cpu" or not is_installed("openvino"):
            return
        precisions = ["float32"] if self._lossy is None else ["float32", *openvino_precisions()]
        for precision in precisions:
            yield self._bench.files.candidate(self._bench.files.in_openvino(format, precision))

    def _lossy_file(self, lossy: Lossy, format: str) -> Iterator[Candidate]:
        """Make a file of a lossy format within the budget, and run it in every runtime."""
        return self._made(format, lambda: lossy.made(format, self._bench.files))

    def _made(self, format: str, make: Callable[[], dict[str, Any]]) -> Iterator[Candidate]:
        """Make a file if the time allows it, and run it in every runtime."""
        files, started = self._bench.files, time.monotonic()
        # A quantized file is made of an ONNX file, the others are exports as the first one of their format.
        exported = format if format in QUANTIZED else exported_format(format)
        needed = max(self._longest, 0.0 if format in self._begun else self._making.get(exported, 0.0))
        try:
            if self._is_late(needed):
                raise Refused(self._cut(needed))
            self._bench.job.progress("tune", self._tried, self._tried + 1, f"making the {format} file")
            entry = make()
        except Refused as refused:
            figure = Figure(format, None, accuracy=refused.accuracy, seconds=refused.seconds, dropped=str(refused))
            self._dropped.append(figure)
            return
        if format not in self._begun:
            self._making[exported] = time.monotonic() - started
        self.entries[format] = entry
        files.entries = [*files.entries, entry]
        (own,) = own_routes([format])
        if own.runtime != "openvino":
            yield from self._run(own)
        yield from self._otherwise(own)

    def _try_all(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            started = time.monotonic()
            self._try(candidate)
            self._longest = max(self._longest, time.monotonic() - started)

    def _try(self, candidate: Candidate) -> None:
        """Time a file next to the first one, and prove it unless it is far slower than the best."""
        for opened in self._opened(candidate):
            try:
                gain = self._gain(opened)
                if self._is_far_behind(gain) and not self._may_be_next(candidate, gain):
                    self._fit.add(candidate.name)
                    raise Refused(self._behind(gain))
                self._ready.append((self._proven(opened), gain))
                self._fit.add(candidate.name)
            except EvaluateError:
                raise
            except Exception as error:  # noqa: BLE001 - as in `open_all`
                dropped = dropped_by(error, candidate)
                # Those outside the budget are drawn with the time that they would take.
                if dropped.accuracy is not None and (latency := self._latencies.get(candidate.name)):
                    dropped = replace(dropped, seconds=latency.median, p95=latency.p95, memory=opened.memory)
                self._dropped.append(dropped)
            self._close_others()

    def _is_far_behind(self, gain: float) -> bool:
        return gain * _FAR_BEHIND < self._best_gain()

    def _may_be_next(self, candidate: Candidate, gain: float) -> bool:
        """Whether a slow file may be shipped, because the last test may refuse the faster ones."""
        exact, route = self._fastest_exact(), candidate.route
        if self._lossy is None or not self._lossy.tests_last or route is None or not is_lossy(route):
            return False
        kinds = _lossy_kinds(self._reserves())
        pays = all(gain > other for opened, other in self._ready if opened is exact)
        return pays and (str(alike(route)) in kinds or len(kinds) < _RESERVES)

    def _reserves(self) -> list[Candidate]:
        """What may be shipped if the last test refuses the fastest files: the next lossy ones, and the exported files.

        Of the lossy ones, the fastest of each of the fastest kinds.
        """
        if self._lossy is None or not self._lossy.tests_last:
            return []
        fastest: dict[str, Candidate] = {}
        for opened, _ in _by_speed(self._ready):
            route = opened.candidate.route
            if route is not None and opened.candidate.accuracy is not None:
                fastest.setdefault(str(alike(route)), opened.candidate)
        exported = [opened.candidate for opened, _ in self._ready if opened.candidate.route in self._own]
        return [*list(fastest.values())[:_RESERVES], *exported]

    def _behind(self, gain: float) -> str:
        best = max(self._ready, key=lambda each: each[1])[0].candidate.name
        return f"{best} is {self._best_gain() / gain:.2f} times as fast as it"

    def _best_gain(self) -> float:
        return max((gain for _, gain in self._ready), default=0.0)

    def _try_other_passes(self, eager: Opened) -> None:
        """Time further modules, to show what other passes would gain."""
        base = self._in_python[0] if self._in_python else eager
        report = None if self._bench.job.provenance is None else self._bench.job.provenance.report
        for candidate in self._bench.with_other_passes():
            # It optimizes the model again.
            for opened in self._opened(candidate, needed=0.0 if report is None else report.seconds):
                self._keep_if_it_pays(opened, base)

    def _keep_if_it_pays(self, opened: Opened, base: Opened) -> None:
        try:
            gain = self._compared(opened, base)
        except Refused as refused:
            self._drop(opened.candidate, str(refused))
            return
        told = f"{gain} as {base.candidate.name}"
        if not gain.pays:
            self._drop(opened.candidate, f"no clear gain: {told}")
            return
        self._in_python.append(opened)
        self._notes.append(f"in Python, {opened.candidate.name} is {told}: choose these passes, and export again")

    def _opened(self, candidate: Candidate | None, needed: float = 0.0) -> list[Opened]:
        """The candidate, ready to run; nothing if it is dropped.

        Args:
            needed: the time that it takes at least, in seconds.
        """
        if candidate is None:
            return []
        self._bench.job.progress("tune", self._tried, self._tried + 1, candidate.name)
        self._tried += 1
        # Timing a file that was made and judged takes least of all, so it's never too late for that.
        judged = self._lossy is not None and self._lossy.is_judged(candidate)
        needed = max(needed, self._longest)
        if self._is_late(needed) and self._ready and not judged:
            self._drop(candidate, self._cut(needed))
            return []
        ready, dropped = open_all([candidate])
        self._dropped += dropped
        return ready

    def _gain(self, opened: Opened) -> float:
        """How many times as fast a candidate is as the first file."""
        if self._first is None:
            self._first = opened
            return 1.0
        return self._compared(opened, self._first, _LONGEST_FIRST_TIMING * self._seconds).median

    def _compared(self, opened: Opened, base: Opened, longest: float = math.inf) -> Ratio:
        first, other = base.candidate.name, opened.candidate.name
        found = interleaved({first: base.run, other: opened.run}, _FIRST_TIMING, self._bench.finished, longest)
        self._latencies |= found
        return ratio(found[first], found[other])

    def _seconds_of(self, name: str, runner: Runner) -> float | None:
        """The time of one call of a file that is outside the budget; None if the time is up."""
        if self._is_late():
            return None
        inputs = self._bench.files.inputs
        longest = _LONGEST_FIRST_TIMING * self._seconds
        found = interleaved({name: lambda: runner(*inputs)}, _FIRST_TIMING / 2, self._bench.finished, longest)
        return found[name].median

    def _proven(self, opened: Opened) -> Opened:
        route = opened.candidate.route
        assert route is not None
        if self._lossy is not None and is_lossy(route):
            candidate = self._lossy.proven(opened.candidate, self._bench.files)
            self._bench.keep_nonfinite(route, self._bench.files.open_for_proof(route))
            return replace(opened, candidate=candidate)
        self._bench.prove(route)
        return opened

    def _close_others(self) -> None:
        """Drop files that are slower than the finalists: each open file keeps its weights in memory.

        The exported files in their own runtimes stay. They are the simplest to ship if all are equally fast.
        """
        exact, reserves = self._fastest_exact(), self._reserves()
        for opened, _ in _by_speed(self._ready)[_FINALISTS:]:
            if opened.candidate.route not in self._own and opened is not exact and opened.candidate not in reserves:
                self._ready = [each for each in self._ready if each[0] is not opened]
                self._drop(opened.candidate, f"{_FINALISTS} others are at least as fast")

    def _finalists(self) -> list[Opened]:
        """The files of the last timing; those far slower than the best are dropped, except for the fastest exact one.

        Where a last test of the metric may refuse the best, the next kinds of lossy files stay too.
        """
        kept, exact, reserves = list[Opened](), self._fastest_exact(), self._reserves()
        for opened, gain in self._ready:
            if self._is_far_behind(gain) and opened is not exact and opened.candidate not in reserves:
                self._drop(opened.candidate, self._behind(gain))
            else:
                kept.append(opened)
        return kept

    def _fastest_exact(self) -> Opened | None:
        """The proven file without a loss of accuracy that was the fastest in its first timing."""
        files = (opened for opened, _ in _by_speed(self._ready) if opened.candidate.accuracy is None)
        return next(files, None)

    def _drop(self, candidate: Candidate, reason: str) -> None:
        self._dropped.append(dropped_figure(candidate, reason, candidate.accuracy))


def settings_of(route: Route, device: str, *, exact: bool) -> list[dict[str, Setting]]:
    """The settings to add to a route, each for itself; on a GPU also all of them. Exact ones lose no accuracy."""
    runtime = route.runtime
    if device == "cuda":
        names = ["cudnn_benchmark"] if runtime == "torch" else []
        # In float32, cuDNN's kernels for channels-last are no faster.
        names += ["nhwc"] if route.format == "onnx-float16" else []
        names += [] if exact or exported_format(route.format) != route.format else ["tf32"]
        alone: list[dict[str, Setting]] = [{name: True} for name in names]
        return [*alone, dict.fromkeys(names, True)] if len(names) > 1 else alone
    if runtime == "torch":
        # torch's threads belong to the whole process, so eager would get them too.
        return []
    cpus = usable_cpus()
    found: list[dict[str, Setting]] = [{"threads": count} for count in sorted({1, max(1, cpus // 2), cpus})]
    return [*found, {"spinning": False}] if runtime == "onnxruntime" else found


def _lossy_kinds(candidates: Iterable[Candidate]) -> set[str]:
    """The lossy routes, without the settings that change only how fast they are."""
    return {str(alike(each.route)) for each in candidates if each.route is not None and each.accuracy is not None}


def _by_speed(files: Iterable[tuple[Opened, float]]) -> list[tuple[Opened, float]]:
    return sorted(files, key=lambda each: -each[1])
