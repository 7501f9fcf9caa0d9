"""Choose the file of an export to ship, and the way to run it: by timing, or as chosen earlier."""

from __future__ import annotations

import gc
from pathlib import Path

from optimizer.exporting.bench import Bench
from optimizer.exporting.calibration import Calibration
from optimizer.exporting.job import ExportJob
from optimizer.exporting.lossy import Lossy
from optimizer.exporting.measuring import MeasuredExport
from optimizer.exporting.replaying import replayed
from optimizer.exporting.tuned import tuned
from optimizer.exporting.writing import WrittenFiles
from optimizer.model import random_state, release_memory
from optimizer.tuning import Benchmark, Opened, Refused, frozen, opened_all

# Seconds for all rounds of the timing that every export ends with.
_SECONDS = 3.0


def choose(
    job: ExportJob, measured: MeasuredExport, calibration: Calibration | None, written: WrittenFiles, folder: Path
) -> Benchmark | None:
    """Recommend one of the files; None if nobody asks for it. A chosen quantized file is added to those written.

    Args:
        calibration: None if nothing lossy is allowed.

    Raises:
        ExportFailed: what was chosen earlier couldn't be exported.
        ParityError: what was chosen earlier isn't proven, or is outside the budget.
    """
    if not (job.bench or job.tune or job.choices):
        return None
    # Once, because a collection takes long after an export: it visits all objects of torch's exporters.
    gc.collect()
    bench = Bench.of(job, measured, written, folder)
    lossy = None if calibration is None else Lossy(measured, job.accuracy, calibration)
    try:
        # The timed model may draw random numbers.
        with random_state():
            if job.choices is not None:
                return replayed(bench, lossy, written, job.choices)
            if (reason := bench.too_large) is not None:
                return bench.unmeasured(reason)
            return tuned(bench, lossy, written) if job.tune else _timed(bench)
    finally:
        if bench.settings is not None:
            bench.settings.put_in_force()
        release_memory()


def _timed(bench: Bench) -> Benchmark:
    """Time each file in its own runtime next to the original."""
    bench.job.progress("bench", 0, 1, "latency and memory")
    candidates = [bench.files.candidate(route) for route in bench.files.own_routes]

    def proven(opened: Opened) -> Opened:
        assert opened.candidate.route is not None
        bench.prove(opened.candidate.route)
        return opened

    variants = [bench.files.candidate(route) for each in candidates if (route := frozen(each.route)) is not None]
    try:
        eager = bench.opened_eager()
        ready, dropped = opened_all(candidates, proven)
        more, refused = opened_all(variants, proven)
        return bench.concluded([eager, *ready, *more], [*dropped, *refused], _SECONDS)
    except Refused as reason:
        return bench.unmeasured(f"not measured: {reason}")
