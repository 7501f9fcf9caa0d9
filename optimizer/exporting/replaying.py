"""Take a route that was chosen earlier instead of timing."""

from __future__ import annotations

from dataclasses import replace

from exporters.registry import QUANTIZED, exported_format
from optimize_export.errors import ExportFailed, ParityError
from optimizer.exporting.bench import Bench
from optimizer.exporting.choices import Choices, is_lossy
from optimizer.exporting.graph_files import remove
from optimizer.exporting.lossy import Lossy
from optimizer.exporting.writing import WrittenFiles
from optimizer.parity import Accuracy
from optimizer.tuning import Benchmark, Figure, Refused, budget_text


def with_notes(found: Benchmark, lossy: Lossy | None) -> Benchmark:
    return found if lossy is None else replace(found, notes=(*found.notes, *lossy.notes))


def replayed(bench: Bench, lossy: Lossy | None, written: WrittenFiles, choices: Choices) -> Benchmark:
    """Take the route that was chosen earlier, and prove it again; nothing is timed."""
    try:
        accuracy = prove_again(bench, lossy, written, choices)
    except Refused as refused:
        raise ParityError(
            f"{choices.route}, which {choices.path} chooses, can't be used: {refused}. If it was chosen for another "
            "model, tune this one."
        ) from refused
    found = bench.unmeasured(f"ship {choices.route}, as chosen earlier{budget_text(accuracy)}")
    figures = () if accuracy is None else (Figure(str(choices.route), choices.route, accuracy=accuracy),)
    notes = tuple(f"{route}: {lost}" for route, lost in bench.lost.items())
    found = replace(found, recommended=choices.route, figures=figures, notes=notes)
    return with_notes(found, lossy)


def prove_again(bench: Bench, lossy: Lossy | None, written: WrittenFiles, choices: Choices) -> Accuracy | None:
    """Prove a route. If its file is a quantized one, it is made before, and added to those written afterwards.

    Returns:
        The accuracy of a lossy route; None for an exact one.

    Raises:
        Refused: it isn't proven, or is outside the budget. No file is left then.
        ExportFailed: its file couldn't be exported.
    """
    route = choices.route
    needed = exported_format(route.format)
    if needed in written.missing:
        raise ExportFailed(
            f"{choices.path} chooses {route}, and its file couldn't be exported: {written.missing[needed]}"
        )
    if not is_lossy(route):
        bench.prove(route)
        return None
    assert lossy is not None
    if route.format not in QUANTIZED:
        accuracy = lossy.proven(bench.files.candidate(route), bench.files).accuracy
        bench.keep_nonfinite(route, bench.files.opened_for_proof(route))
        return accuracy
    entry = lossy.made(route.format, bench.files, choices.recipe)
    files = replace(bench.files, entries=[*bench.files.entries, entry])
    try:
        accuracy = lossy.proven(files.candidate(route), files).accuracy
        bench.keep_nonfinite(route, files.opened_for_proof(route))
    except BaseException:
        remove(files.folder / name for name in entry["files"])
        raise
    written.entries.append(entry)
    return accuracy
