"""The routes of an exporter, tried one after another until one holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from exporters.base import Artifact, Exporter, ExportRequest
from exporters.eager_runs import lists_as_long_as_a_size
from exporters.errors import ExportError, RouteRefused, RuntimeCrashed, WrongFile
from exporters.evidence import Evidence, join_words
from exporters.tracing import first_read

# Maximum bytes of a wrong file to keep until its first wrong operation is located. The other routes may need the disk
# space of a larger one.
_LARGEST_KEPT = 2**30


@dataclass(frozen=True)
class Route:
    """One way to produce a format."""

    name: str
    # Writes the files into an empty folder, proves them, and returns them, main file first. Raises RouteRefused if the
    # result isn't right.
    write: Callable[[Path], tuple[Path, ...]]


def first_right(
    exporter: Exporter,
    request: ExportRequest,
    evidence: Evidence,
    routes: Sequence[Route],
    directory: Path,
    known: Callable[[Artifact], Artifact] = lambda artifact: artifact,
) -> Artifact:
    """The artifact of the first route that isn't refused; its proven files are moved into `directory`.

    Args:
        known: adds exporter-specific fields to an artifact, also to one whose route was refused.

    Raises:
        ExportError: every route was refused.
        OSError: a file couldn't be written.
    """
    refused: list[tuple[str, RouteRefused]] = []

    def made(route: Route, files: Sequence[Path]) -> Artifact:
        reasons = tuple((name, str(refusal)) for name, refusal in refused)
        specs = (evidence.input_specs, evidence.output_specs)
        artifact = Artifact(
            exporter.name,
            files[0],
            tuple(files),
            route.name,
            reasons,
            *specs,
            evidence.notes,
            loader=exporter.load,
            crashes=tuple(
                f"the {exporter.name} file of the route {name!r} isn't used: {refusal}"
                for name, refusal in refused
                if isinstance(refusal, RuntimeCrashed)
            ),
        )
        return known(artifact)

    with ExitStack() as until_told:
        wrong: tuple[Artifact, WrongFile] | None = None
        for route in routes:
            folder = TemporaryDirectory(dir=directory, prefix=".export-", ignore_cleanup_errors=True)
            staging = Path(until_told.enter_context(folder))
            try:
                written = route.write(staging)
            except RouteRefused as refusal:
                size = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
                if wrong is None and isinstance(refusal, WrongFile) and size <= _LARGEST_KEPT:
                    wrong = made(route, [staging / exporter.file_name]), refusal
                else:
                    folder.cleanup()
                refused.append((route.name, refusal))
                continue
            return made(route, [path.replace(directory / path.name) for path in written])
        place = ""
        if wrong is not None and request.place_of is not None:
            artifact, shown = wrong
            found = request.place_of(artifact, shown.inputs)
            place = f" The file of the route {artifact.route!r} {found}." if found else ""
    lists = list(lists_as_long_as_a_size(evidence))
    reasons = _reasons(refused, [clause for _, clause in lists])
    hint = _hint(evidence, [*(refusal.size for _, refusal in refused), *(size for size, _ in lists)])
    if not place and ".py:" not in reasons and (read := first_read(evidence.adapter, evidence.inputs[0])):
        place = (
            f" The model reads a tensor's value into Python at {read}: compute with tensors there. If the value is a "
            "constant, compute it in the constructor."
        )
    message = f"The model can't be exported to {exporter.name} ({reasons}).{place}{hint}"
    raise ExportError(message, reasons)


def _reasons(refused: Sequence[tuple[str, RouteRefused]], clauses: Iterable[str]) -> str:
    routes_by_reason: dict[str, list[str]] = {}
    for tried, refusal in refused:
        routes_by_reason.setdefault(str(refusal), []).append(tried)
    for clause in clauses:
        routes_by_reason.setdefault(clause, [])
    return "; ".join(
        f"{join_words(tried)}: {reason}" if tried else reason for reason, tried in routes_by_reason.items()
    )


def _hint(evidence: Evidence, sizes: Iterable[str]) -> str:
    """Advice for the user; each sentence starts with a space."""
    hint = ""
    if (half := evidence.half) is not None:
        word = str(half).removeprefix("torch.")
        others = " in float16, or" if half is torch.bfloat16 else ""
        hint = (
            f" It computes in {word}, which not every operator of a format and not every runtime supports: export "
            f"it{others} in float32."
        )
    return hint + "".join(dict.fromkeys(map(evidence.way_out, sizes)))
