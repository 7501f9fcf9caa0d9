"""Tune the files of an export, or take the result that was kept when the same files were tuned on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optimizer.exporting.bench import Bench
from optimizer.exporting.choices import Choices
from optimizer.exporting.graph_files import remove
from optimizer.exporting.lossy import Lossy
from optimizer.exporting.replaying import prove_again, with_notes
from optimizer.exporting.tune_cache import Kept, cache_file, keep, read_kept
from optimizer.exporting.tuner import Tuner
from optimizer.exporting.writing import WrittenFiles
from optimizer.tuning import Benchmark, Candidate, Refused, opened_all


def tuned(bench: Bench, lossy: Lossy | None, written: WrittenFiles) -> Benchmark:
    """Recommend one of the files. A recommended quantized file is added to those written."""
    path = cache_file(bench, lossy)
    kept = read_kept(path, bench, lossy)
    if kept is not None and _is_still_proven(kept, bench, lossy, written):
        return replace(kept.found, notes=(*kept.found.notes, kept.note))
    found, entry = _newly_tuned(bench, lossy, written)
    if found.recommended is None:
        return found
    note = keep(path, found, None if entry is None else entry["quantization"], bench.job.tune_seconds)
    return found if note is None else replace(found, notes=(*found.notes, note))


def _is_still_proven(kept: Kept, bench: Bench, lossy: Lossy | None, written: WrittenFiles) -> bool:
    route = kept.found.recommended
    assert route is not None

    choices = Choices(kept.path, route, kept.recipe)
    # A runtime's own errors count too: the file of the cache may ask for a setting that the runtime lacks.
    proof = Candidate(str(route), lambda: lambda: prove_again(bench, lossy, written, choices))
    proven, _ = opened_all([proof])
    return bool(proven)


def _newly_tuned(
    bench: Bench, lossy: Lossy | None, written: WrittenFiles
) -> tuple[Benchmark, Mapping[str, Any] | None]:
    """The result, and the manifest's entry of the quantized file if one is recommended; the others are removed."""
    tuner = Tuner(bench, lossy, bench.job.tune_seconds)
    try:
        found = tuner.run()
    except Refused as reason:
        found = bench.unmeasured(f"not measured: {reason}")
    chosen = tuner.entries.pop("" if found.recommended is None else found.recommended.format, None)
    if chosen is not None:
        written.entries.append(chosen)
    for entry in tuner.entries.values():
        remove(bench.files.folder / name for name in entry["files"])
    return with_notes(found, lossy), chosen
