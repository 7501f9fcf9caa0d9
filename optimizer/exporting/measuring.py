"""Measure the original for one export, and prepare the request for the exporters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from exporters.base import Adapter, Captures, ExportRequest, named_inputs
from optimizer.exporting.artifact_parity import ArtifactParity, Failures, factor_between_devices
from optimizer.exporting.copies import copy_for_export
from optimizer.exporting.fixed_dims import Suggestions, note_on_fixed_dims
from optimizer.exporting.graph_files import GraphFiles
from optimizer.exporting.job import ExportJob
from optimizer.exporting.references import lower_reference, measured_reference, sizes_of
from optimizer.exporting.requests import (
    names_in_files,
    note_on_fixed_batch,
    note_on_numbers,
    note_on_one_row,
    notes_on_training_mode,
    refuse_sizes_not_taken,
    request_for,
    smallest_call,
)
from optimizer.faults import locate_in_refused, refuse_carried_state
from optimizer.model import Samples, on_device
from optimizer.parity import Reference, Rows, by_output, independent_rows


@dataclass(frozen=True, kw_only=True)
class MeasuredExport:
    """The measured original, which all files are compared with, and the request for the exporters."""

    original: nn.Module
    """The module that was measured."""
    reference: Reference
    request: ExportRequest
    adapter: Adapter
    fresh: Callable[[], nn.Module]
    """Makes a copy of the module to export."""
    graph: GraphFiles
    parity: ArtifactParity
    failures: Failures
    absolute: Mapping[str, float]
    relative: Mapping[str, float]
    """The user's absolute and relative tolerances, by the reference's output names."""
    rows: Rows | None
    """The rows for the check of row independence; None without that check."""
    exact: bool
    """Whether rounding is the only difference that files may have from the original."""
    notes: tuple[str, ...]
    """Sentences for the manifest."""
    batch_elsewhere: str = ""
    """The note on a batch that isn't dim 0; "" if there is none."""


def measure(job: ExportJob) -> MeasuredExport:
    """Measure the original, and prepare the request for the exporters.

    Raises:
        ExportFailed: the original carries state from call to call, or accepts only one size of a dim that must be open.
        VacuousError: the original's outputs prove nothing.
        ParityError: rows of the original depend on each other, and the user asks for independent rows.
        UsageError: an option contradicts the inputs or names an unknown output.
    """
    exported = copy_for_export(job.model, job.target)
    at_home = job.samples if job.home.type == job.target.type else job.samples.to(job.home)
    original, rounding = _measured(job, exported, at_home)
    reference = lower_reference(rounding, job.provenance)
    inputs = named_inputs(original, at_home.given.args, at_home.given.kwargs, input_names=job.input_names)
    suggestions = Suggestions(inputs, at_home, job.dims, reference)
    refuse_sizes_not_taken(job, reference, suggestions)
    request = request_for(job, exported, reference)
    if reference is not rounding or job.home.type != job.target.type:
        # A less precise result, or one on another device, doesn't have the original's outputs.
        request = replace(request, outputs=None)
    fresh = partial(copy_for_export, job.model, job.target, reference.written, fixed=True)
    call = smallest_call(request)
    try:
        # The adapter runs the model once.
        adapter = Adapter(fresh(), *call, input_names=job.input_names, output_names=job.output_names)
    except (AttributeError, KeyError):
        # Forward reads the tensors that a weight is computed from, such as `weight_g`.
        fresh = partial(copy_for_export, job.model, job.target, reference.written)
        adapter = Adapter(fresh(), *call, input_names=job.input_names, output_names=job.output_names)
    elsewhere = "" if job.dynamic or job.static_batch else suggestions.batch_elsewhere(original)
    notes = [*_notes(job, suggestions, adapter, open_batch=request.dynamic_batch), *filter(None, [elsewhere])]
    flatten, device = adapter.flatten_inputs, job.target.type
    place_of = partial(locate_in_refused, reference=reference, exported=exported, flatten=flatten, device=device)
    request = replace(request, place_of=place_of, output_structure=adapter.outputs, captures=Captures(adapter))
    names = names_in_files(reference, adapter)
    absolute, relative = by_output("atol", job.atol, names), by_output("rtol", job.rtol, names)
    factor, factor_notes = factor_between_devices(job.home, job.target)
    rows = independent_rows(rounding, atol=absolute, rtol=relative) if job.row_independence else None
    parity = ArtifactParity(
        reference=reference,
        flatten=flatten,
        device=job.target,
        atol=job.atol,
        rtol=job.rtol,
        factor=factor,
        names=names,
    )
    return MeasuredExport(
        original=original,
        reference=reference,
        request=request,
        adapter=adapter,
        fresh=fresh,
        graph=GraphFiles.of(job.model, fresh, adapter, request),
        parity=parity,
        failures=Failures(
            parity=parity,
            job=job,
            exported=exported,
        ),
        absolute=absolute,
        relative=relative,
        rows=rows,
        # Tolerances beyond rounding would also hide an exporter's errors.
        exact=request.outputs is not None and job.atol is None and job.rtol is None,
        notes=(*notes, *factor_notes),
        batch_elsewhere=elsewhere,
    )


def _measured(job: ExportJob, exported: nn.Module, at_home: Samples) -> tuple[nn.Module, Reference]:
    """The original, and its reference at all batch sizes."""
    given = None if job.provenance is None else job.provenance.original
    original = on_device(exported if given is None else given, job.home)
    job.progress("parity", 0, len(job.exporters) + 1, "running the original")
    sizes = sizes_of(job.samples, job.batch_sizes, job.static_batch, job.effort)
    outputs = None if job.provenance is None else job.provenance.outputs
    rounding = measured_reference(original, at_home, sizes, job.effort, outputs, or_larger=job.batch_sizes is None)
    refuse_carried_state(original, rounding)
    return original, rounding


def _notes(job: ExportJob, suggestions: Suggestions, adapter: Adapter, *, open_batch: bool) -> list[str]:
    """The notes for the manifest that don't depend on the files."""
    itself = job.provenance is None or job.provenance.original is None
    reference = suggestions.reference
    notes = ["the artifacts are compared with the exported module itself"] if itself else []
    notes += notes_on_training_mode(job, adapter)
    notes += note_on_fixed_batch(job, reference, suggestions)
    notes += suggestions.notes_on_broadcast()
    notes += note_on_one_row(job, reference)
    notes += note_on_numbers(adapter)
    if job.dynamic is None:
        notes += note_on_fixed_dims(suggestions.inputs, suggestions.samples, reference, open_batch=open_batch)
    return notes
