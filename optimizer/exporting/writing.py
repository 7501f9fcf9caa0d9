"""Write and prove the files of one export, then write the golden data, the manifest's body and the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exporters.base import Artifact, Exporter
from exporters.child_process import start_early
from exporters.errors import ExporterError, ExportError, MetadataError, StructureError
from optimize_export.errors import ParityError, UsageError
from optimize_export.manifest import is_reproducible_build, plain
from optimize_export.onnx_runtime import CPU
from optimize_export.wording import listed
from optimizer.bundle import (
    artifact_entry,
    describe_device,
    graph_of,
    weights_hash,
    write_golden,
    write_report,
)
from optimizer.exporting.artifact_parity import FileProof
from optimizer.exporting.graph_files import remove
from optimizer.exporting.job import ExportJob
from optimizer.exporting.measuring import MeasuredExport
from optimizer.model import release_memory
from optimizer.parity import WITHIN_BUDGET, ParityReport, golden_entries
from optimizer.profiling import profile_export
from optimizer.report import Report


@dataclass
class WrittenFiles:
    """The proven files of an export, and the reasons why others are missing."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    """The manifest's entries of the proven files."""
    reports: dict[str, ParityReport] = field(default_factory=dict)
    """The judgements of the proven files, by format."""
    missing: dict[str, Exception] = field(default_factory=dict)
    """By format, the error that keeps the file out of the bundle."""
    unproven: list[dict[str, Any]] = field(default_factory=list)
    """The entries of files that were written but not proven."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the manifest."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each format took, by its name."""

    def raise_missing(self, hint: str = "") -> None:
        """Raise the error of the missing formats; a wrong file takes precedence over one that couldn't be made.

        Args:
            hint: a clause for the message of files that couldn't be made.
        """
        figures = [*(plain({**entry, "measurement": None}) for entry in self.entries), *self.unproven]
        errors = list(self.missing.values())
        if wrong := next((error for error in errors if isinstance(error, ParityError)), None):
            raise ParityError(str(wrong), {"artifacts": figures, **wrong.figures})
        if len(errors) == 1 and not hint:
            raise errors[0]
        hints = [f"{hint[0].upper()}{hint[1:]}."] if hint else []
        raise ExportError(" ".join([*map(str, errors), *hints])) from errors[0]


def write_files(job: ExportJob, measured: MeasuredExport, folder: Path) -> WrittenFiles:
    """Write a file in each format, and remove the files that aren't proven."""
    written = WrittenFiles()
    if any(exporter.name == "onnx" for exporter in job.exporters):
        start_early()
    for number, exporter in enumerate(job.exporters):
        release_memory()
        job.progress("export", number, len(job.exporters), exporter.name, exporter.name)
        started = time.monotonic()
        _write(job, measured, exporter, folder, written, number)
        written.seconds[exporter.name] = time.monotonic() - started
    job.progress("export", len(job.exporters), len(job.exporters), "")
    written.notes.extend(measured.graph.notes(written.missing))
    if written.missing and (job.strict or not written.entries):
        written.raise_missing(measured.batch_elsewhere)
    return written


def _write(
    job: ExportJob, measured: MeasuredExport, exporter: Exporter, folder: Path, written: WrittenFiles, number: int
) -> None:
    before = set(folder.iterdir())
    proof = FileProof(measured.parity, measured.rows)
    request = replace(measured.request, proof=proof if measured.exact else None)
    rewritten = measured.graph.export_and_measure(exporter, request, folder, proof)
    try:
        # Each exporter gets a fresh copy, because it runs the model.
        artifact = rewritten[0] if rewritten else exporter.export(replace(request, model=measured.fresh()), folder)
        written.notes.extend(artifact.crashes)
        if twice := sorted(path.name for path in before.intersection(artifact.files)):
            raise UsageError(
                f"The format {exporter.name!r} writes {listed(twice)} over the file of another format: export them to two folders."
            )
        artifact = replace(artifact, metadata=exporter.read_metadata(artifact.path))
        job.progress("parity", number + 1, len(job.exporters) + 1, exporter.name)
        measurement, placement = rewritten[1:] if rewritten else proof.measure(artifact, exporter)
    except (StructureError, MetadataError):
        # The other formats would fail for the same reason.
        raise
    except ExporterError as error:
        written.missing[exporter.name] = error
        # A third-party exporter may leave an incomplete file.
        remove(set(folder.iterdir()) - before)
        return
    parity = measured.parity.judge(measurement)
    entry = artifact_entry(artifact, folder, parity.to_json(), measurement.to_json(), placement)
    entry["without_passes"] = measured.graph.without(exporter.name, job.provenance)
    if parity.ok:
        written.notes.extend(_note_on_metadata(artifact, job.metadata or {}))
        written.notes.extend(_note_on_limits(artifact))
        written.notes.extend(note_on_placement(artifact.path.name, placement))
        written.reports[exporter.name] = parity
        written.entries.append(entry)
        return
    remark = ""
    if parity.verdict == "failed":
        found, remark = measured.failures.explain(artifact, measurement, parity)
        entry |= found.to_json()
    written.missing[exporter.name] = ParityError(
        f"The {exporter.name} artifact isn't proven to compute the same as the original: {parity.reason}"
        f"{f' {remark}' if remark else ''}",
        {"notes": all_notes((), {exporter.name: parity})},
    )
    written.unproven.append(plain({**entry, "measurement": None}))
    remove(artifact.files)


def _note_on_metadata(artifact: Artifact, own: Mapping[str, str]) -> Sequence[str]:
    """A note if a file lacks the user's metadata, because a third-party exporter may not write them."""
    lacking = [key for key, text in own.items() if artifact.metadata.get(key) != text]
    if not lacking:
        return ()
    return [f"the {artifact.format} file lacks the metadata {', '.join(lacking)}: its exporter doesn't write metadata"]


def note_on_placement(file: str, placement: Mapping[str, int] | None) -> Sequence[str]:
    """A note if a GPU leaves nodes of a file to the CPU, where calls may wait for them.

    Args:
        placement: the number of nodes by provider; None for formats without providers.
    """
    nodes = placement or {}
    on_cpu, others = nodes.get(CPU, 0), sum(nodes.values()) - nodes.get(CPU, 0)
    if not (on_cpu and others):
        return ()
    return [f"{file}: {on_cpu} of {on_cpu + others} nodes run on the CPU, for shapes and constants"]


def _note_on_limits(artifact: Artifact) -> Sequence[str]:
    """A note on sizes beyond which the model takes another path, at inputs that are too large to compare."""
    if not artifact.limits:
        return ()
    conditions = " and ".join(dict.fromkeys(f"`{each.condition}`" for each in artifact.limits))
    least: dict[str, int] = {}
    for each in artifact.limits:
        least[each.size] = min(each.largest, least.get(each.size, each.largest))
    largest = ", ".join(f"{size} {number}" for size, number in least.items())
    return [
        f"{artifact.path.name} is right where {conditions} (up to {largest}, with the other sizes of the example): beyond "
        "that the model takes another path; `load` refuses such sizes, other runtimes may not"
    ]


def all_notes(own: Sequence[str], reports: Mapping[str, ParityReport]) -> list[str]:
    """The notes of the export and of its comparisons, without duplicates."""
    return list(dict.fromkeys([*own, *(note for report in reports.values() for note in report.notes)]))


def write_data(
    job: ExportJob, measured: MeasuredExport, written: WrittenFiles, folder: Path, lossy: Mapping[str, str]
) -> dict[str, Any]:
    """Write the golden data, and return the fields of the manifest.

    Args:
        lossy: the accuracy of the recommended way to run a file, by its name, if that is lossy; otherwise empty.
    """
    job.progress("bundle", 0, 1, str(job.output))
    reference, adapter = measured.reference, measured.adapter
    golden = write_golden(
        folder,
        golden_entries(reference),
        reference.noises,
        flatten=adapter.flatten_inputs,
        input_names=adapter.input_names,
        output_names=adapter.output_names,
        device=job.home,
        atol=measured.absolute,
        rtol=measured.relative,
        precision=reference.precision,
    )
    report = None if job.provenance is None else job.provenance.report
    return {
        "device": describe_device(job.target),
        "mode": "inference",
        "seed": job.seed,
        "model": _describe(measured.original, job.source),
        "input_structure": adapter.input_structure,
        "positional": adapter.positional_names,
        "output_structure": adapter.output_structure,
        **({"example_sizes": dict(job.dims.given)} if job.dims.given else {}),
        "artifacts": written.entries,
        "missing": {name: str(error) for name, error in written.missing.items()},
        "parity": {
            **_overall(written, measured, lossy),
            "effort": job.effort,
            "reference_device": describe_device(job.home),
        },
        "golden": golden,
        "coverage": None if report is None else report.coverage.to_json(),
        "passes": [] if report is None else _told(report)["passes"],
        "notes": all_notes(
            [*([] if report is None else report.notes), *measured.notes, *written.notes], written.reports
        ),
    }


def _overall(written: WrittenFiles, measured: MeasuredExport, lossy: Mapping[str, str]) -> dict[str, Any]:
    reports = written.reports
    worst = max(reports.values(), key=lambda report: report.ratio)
    return {
        "ok": all(report.ok for report in reports.values()),
        **_verdict(worst, written, lossy),
        "reference": worst.reference,
        "precision": worst.precision,
        "batch_sizes": list(measured.reference.batch_sizes),
        "draws": worst.draws,
        "factor": worst.factor,
        "settings": dict(item for report in reports.values() for item in report.settings.items()),
    }


def _verdict(worst: ParityReport, written: WrittenFiles, lossy_choice: Mapping[str, str]) -> dict[str, str]:
    """The verdict on all files and on the recommended way to run one."""
    lossy = {entry["path"]: entry["parity"]["reason"] for entry in written.entries if entry.get("accuracy")}
    told = ", and ".join(
        f"{name} differs from the original within the accuracy budget: {said}"
        for name, said in (lossy or lossy_choice).items()
    )
    if not told:
        return {"verdict": worst.verdict, "reason": worst.reason}
    rest = f"In the exact files, {worst.reason[:1].lower()}{worst.reason[1:]}"
    return {"verdict": WITHIN_BUDGET, "reason": f"{told}. {rest}"}


def profiled(
    job: ExportJob, measured: MeasuredExport, written: WrittenFiles, folder: Path, directory: Path
) -> dict[str, Any]:
    """Profile the original, the model and the ONNX file in a folder, as `profile_export` does."""
    given = job.samples.given
    return profile_export(
        measured.original,
        job.model,
        job.samples,
        onnx=next((folder / entry["path"] for entry in written.entries if entry["format"] == "onnx"), None),
        inputs=measured.adapter.flatten_inputs(given.args, given.kwargs),
        device=job.target,
        directory=directory,
        progress=job.tell,
    )


def add_report(
    job: ExportJob,
    measured: MeasuredExport,
    written: WrittenFiles,
    profiles: Mapping[str, Any],
    folder: Path,
    manifest: Mapping[str, Any],
) -> None:
    """Write the report of an export whose manifest is finished."""
    provenance = job.provenance
    told = {} if provenance is None else _told(provenance.report)
    before = () if provenance is None else provenance.operations
    write_report(
        folder,
        manifest,
        graph_of(
            {path: type(module).__name__ for path, module in measured.original.named_modules()},
            before,
            measured.graph.operations(measured.request.captures),
        ),
        # The manifest has these two.
        optimize={name: value for name, value in told.items() if name not in ("passes", "coverage")} or None,
        # Times differ from build to build.
        profile={} if is_reproducible_build() else profiles,
        unproven=written.unproven,
    )


def _told(report: Report) -> dict[str, Any]:
    """The report for a bundle; without times if the bundle must be reproducible byte for byte."""
    told = report.to_json()
    if not is_reproducible_build():
        return told
    return {**told, "seconds": None, "stages": None, "passes": [{**each, "seconds": None} for each in told["passes"]]}


def _describe(model: nn.Module, source: str | None) -> dict[str, Any]:
    state = model.state_dict()
    return {
        "class": type(model).__name__,
        "source": source or type(model).__module__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(t.numel() * t.element_size() for t in state.values() if isinstance(t, torch.Tensor)),
        "weights_sha256": weights_hash(state),
    }
