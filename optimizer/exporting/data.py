"""Write the golden data of an export, and build the manifest's body."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimizer.bundle import (
    describe_device,
    graph_of,
    is_to_be_repeated,
    weights_hash,
    write_golden,
    write_report,
)
from optimizer.exporting.job import ExportJob
from optimizer.exporting.measuring import MeasuredExport
from optimizer.exporting.writing import WrittenFiles, all_notes
from optimizer.parity import WITHIN_BUDGET, ParityReport, golden_entries
from optimizer.profiling import profile_export
from optimizer.report import Report


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
    told = None if report is None else _told(report)
    before = [] if report is None else report.notes
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
        "passes": [] if told is None else told["passes"],
        "notes": all_notes([*before, *measured.notes, *written.notes], written.reports),
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
    told = None if provenance is None else _told(provenance.report)
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
        optimize=told and {name: value for name, value in told.items() if name not in ("passes", "coverage")},
        # Times differ from build to build.
        profile={} if is_to_be_repeated() else profiles,
        unproven=written.unproven,
    )


def _told(report: Report) -> dict[str, Any]:
    """The report for a bundle; without times if the bundle must be reproducible byte for byte."""
    told = report.to_json()
    if not is_to_be_repeated():
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
