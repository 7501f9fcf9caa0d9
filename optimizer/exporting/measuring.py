"""Measure the original for one export: the reference for all files, and the request for the exporters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from exporters.base import Adapter, Captures, ExportRequest, named_inputs
from optimize_export.errors import ExportFailed, UsageError, VacuousError
from optimize_export.wording import listed
from optimizer.exporting.artifact_parity import ArtifactParity, Failures, factor_between_devices
from optimizer.exporting.fixed_dims import Suggestions
from optimizer.exporting.graph_files import GraphFiles
from optimizer.exporting.job import ExportJob, copy_for_export
from optimizer.faults import locate_in_refused
from optimizer.model import Samples, on_device
from optimizer.options import Effort
from optimizer.parity import (
    BATCH_SIZES,
    Reference,
    Rows,
    by_output,
    describe_carried_state,
    independent_rows,
    judge,
    measure_in_sequence,
    measure_reference,
    why_vacuous,
)
from optimizer.pipeline import Provenance, notes_on_modes
from passes.base import fewest_rows
from passes.graph.forwards import dtype_inside

# The number of batch sizes at which the rounding noise is measured; None for all of them.
_MEASURED_SIZES: Mapping[Effort, int | None] = {"quick": 1, "normal": 2, "thorough": None}
# If a row of an input has more elements than this, like an image of 224 x 224, files are compared at small batch sizes
# only: the feature maps of each row cost time and memory, and larger batches show nothing new.
_LARGE_ROW = 100_000
_FEW_ROWS = (1, 2, 3)
# The maximum number of fixed numbers that a note names.
_NUMBERS_TOLD = 4


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
    """Measure the original, and prepare the request for the exporters."""
    exported = copy_for_export(job.model, job.target)
    at_home = job.samples if job.home.type == job.target.type else job.samples.to(job.home)
    original, rounding = _measured(job, exported, at_home)
    reference = _lower_reference(rounding, job.provenance)
    inputs = named_inputs(original, at_home.given.args, at_home.given.kwargs, input_names=job.input_names)
    suggestions = Suggestions(inputs, at_home, reference)
    _refuse_sizes_not_taken(job, reference)
    request = _request_for(job, exported, reference)
    if reference is not rounding or job.home.type != job.target.type:
        # A less precise result, or one on another device, doesn't have the original's outputs.
        request = replace(request, outputs=None)
    fresh = partial(copy_for_export, job.model, job.target, reference.written, fixed=True)
    call = request.calls[fewest_rows(request.calls)]
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
    place_of = partial(locate_in_refused, reference=reference, flatten=flatten, device=device)
    request = replace(request, place_of=place_of, output_structure=adapter.outputs, captures=Captures(adapter))
    # The comparison reports a different number of outputs.
    own = reference.output_names
    names = dict(zip(own, adapter.output_names if len(adapter.output_names) == len(own) else own, strict=True))
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
        failures=Failures(parity=parity, job=job, exported=exported),
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
    rounding = measure_reference(
        original,
        at_home,
        batch_sizes=_sizes_of(job.samples, job.batch_sizes, job.static_batch, job.effort),
        draws=3 if job.effort == "thorough" else None,
        measured_sizes=_MEASURED_SIZES[job.effort],
        known=None if job.provenance is None else job.provenance.outputs,
        or_larger=job.batch_sizes is None,
        other_values=True,
    )
    _refuse_vacuous(rounding)
    _refuse_carried_state(original, rounding)
    return original, rounding


def _notes(job: ExportJob, suggestions: Suggestions, adapter: Adapter, *, open_batch: bool) -> list[str]:
    """The notes for the manifest that don't depend on the files."""
    itself = job.provenance is None or job.provenance.original is None
    notes = ["the artifacts are compared with the exported module itself"] if itself else []
    for told in notes_on_modes(job.model, adapter.model, "the files are in eval mode and were"):
        notes += told
    notes += _note_on_fixed_batch(job, suggestions.reference)
    notes += _note_on_one_row(job, suggestions.reference)
    if numbers := [f"{where} = {number}" for where, number in adapter.inputs.numbers()]:
        notes.append(f"fixed in the files at the values of the example inputs: {listed(numbers, _NUMBERS_TOLD)}")
    if job.dynamic is None:
        notes += suggestions.note_on_fixed_dims(open_batch=open_batch)
    return notes


# ---------------------------------------------------------------------------------------------------------- the reference


def _sizes_of(samples: Samples, batch_sizes: Sequence[int] | None, static: bool, effort: Effort) -> list[int] | None:
    """The batch sizes at which files are compared: the user's, if any; None if the inputs have no batch."""
    if static and (further := [size for size, _ in samples.further if size != samples.batch_size]):
        raise UsageError(
            f"static_batch fixes the batch size at {samples.batch_size}, but there are further inputs of batch size "
            f"{further[0]}."
        )
    if static or not samples.dynamic:
        return None if samples.batch_size is None else [samples.batch_size]
    own: list[int] = [] if samples.batch_size is None else [samples.batch_size]
    if batch_sizes is None:
        is_large = effort != "thorough" and samples.elements_of_a_row > _LARGE_ROW
        batch_sizes = _FEW_ROWS if is_large else BATCH_SIZES
    if effort == "quick":
        others = sorted((size for size in batch_sizes if size != samples.batch_size), key=lambda size: size == 1)
        return [*own, *others[:1]]
    return list(dict.fromkeys([*own, *batch_sizes]))


def _lower_reference(reference: Reference, provenance: Provenance | None) -> Reference:
    """Adapt the reference to the precision of a result whose passes lower it."""
    if provenance is None or provenance.original is None:
        return reference
    for lowered in provenance.precisions:
        reference = reference.less_precise(lowered)
        _refuse_vacuous(reference)
    return reference


def _refuse_vacuous(reference: Reference) -> None:
    """Raise if no output of the reference can prove anything. If some can't, a note of the reference says so."""
    # Files are compared by outputs only, not by changed inputs. Exporters refuse a model without outputs.
    outputs = [noise for noise in reference.noises.values() if noise.kind == "output"]
    reason = why_vacuous(outputs) if outputs else None
    if reason is None:
        return
    computed = f"computed in {reference.precision}, " if reference.precision else ""
    told = f"{computed}{reason}, so nothing could be proven"
    if not any(noise.deterministic for noise in reference.noises.values()):
        advice = "make the model return the same outputs for the same inputs"
    else:
        ways = "leave out cast-precision, " if reference.precision else ""
        advice = f"{ways}load trained weights, or use other example inputs"
    raise VacuousError(f"{told[0].upper()}{told[1:]}: {advice}.")


def _refuse_carried_state(original: nn.Module, reference: Reference) -> None:
    """Check that the original's outputs don't depend on earlier calls.

    One copy answers all measured calls in sequence. Each output must equal that of a separate run, within the
    original's noise. The user's tolerances don't apply, because both runs use the same module on the same device. A
    model that answers the same call differently each time, whatever calls came before, isn't refused here but in the
    comparison.
    """
    measurement = measure_in_sequence(reference)
    report = judge(measurement)
    if report.verdict != "failed" or judge(reference.compare(original)).verdict == "failed":
        return
    raise ExportFailed(
        f"{describe_carried_state(reference)}, and exported files can't: make the state an "
        f"explicit input and output. In repeated calls: {report.reason}"
    )


# ------------------------------------------------------------------------------------------------------------ the request


def _request_for(job: ExportJob, model: nn.Module, reference: Reference) -> ExportRequest:
    """Make the request for the exporters: the calls at which a file must be right, with the original's outputs."""
    samples, taken = job.samples, reference.taken
    worked = list(reference.batch_sizes)
    own, bases = samples.batch_size, taken.bases()
    batches = [own]
    if not job.static_batch and len(worked) > 1:
        # The first call is traced. It has more than one row, because every tracer specializes to a batch of one. Two
        # further sizes are enough to show the dependence on the batch size.
        larger = sorted(size for size in worked if size > 1)
        own = samples.batch_size if samples.batch_size in larger else larger[0]
        others = [size for size in (*larger, *worked) if size != own]
        batches = list(dict.fromkeys([own, *others[:2], *([1] if 1 in worked else [])]))
    asked = [(size, bases) for size in batches]
    asked += [(own, tuple({**dict(bases), name: size}.items())) for name in taken.given for size in taken.others(name)]
    asked += taken.together
    calls = [samples.at(size, sizes=sizes) for size, sizes in asked]
    known = [(size, tuple(one for one in sizes if one not in samples.sizes.items())) for size, sizes in asked]
    return ExportRequest(
        model=model,
        calls=tuple((call.args, call.kwargs) for call in calls),
        outputs=reference.outputs_at(known),
        varying=reference.varying_dims(),
        undecided=reference.undecided,
        dynamic_batch=len(batches) > 1,
        open_dims=job.dims.of,
        input_names=None if job.input_names is None else tuple(job.input_names),
        output_names=None if job.output_names is None else tuple(job.output_names),
        computes_in=dtype_inside(model),
        opset=job.opset,
        metadata=job.metadata or {},
    )


def _refuse_sizes_not_taken(job: ExportJob, reference: Reference) -> None:
    """Refuse an open dim for which the original itself accepts only one size."""
    dims = job.dims
    fixed = [name for name, sizes in reference.taken.alone.items() if not sizes]
    if job.samples.dynamic and dims.places(dims.batch) and len(reference.batch_sizes) < 2:
        fixed.append(dims.batch)
    for name in fixed:
        where = dims.places(name)
        why = reference.why_not(None if name == dims.batch else name)
        if why is None:
            raise UsageError(
                f"dynamic opens {where}, but batch_sizes has only the size of the example inputs: add another size."
            )
        raise ExportFailed(
            f"dynamic opens {where}, but the model raises at every other size that was tried ({why}): leave {where} out, "
            "or change that line."
        )


def _note_on_fixed_batch(job: ExportJob, reference: Reference) -> list[str]:
    """A note if the files accept only one batch size although the user didn't ask for that."""
    if job.static_batch or not job.samples.dynamic or len(reference.batch_sizes) > 1:
        return []
    why = reference.why_not(None)
    if why is None:
        return ["the batch size is fixed, as with static_batch: batch_sizes has only the size of the example inputs"]
    return [
        f"the batch size is fixed, as with static_batch: the model raises at every other size that was tried ({why})"
    ]


def _note_on_one_row(job: ExportJob, reference: Reference) -> list[str]:
    """A note if the files accept one row, but aren't compared there, because the user chose other batch sizes."""
    if job.static_batch or len(reference.batch_sizes) < 2:
        return []
    if 1 in (_sizes_of(job.samples, job.batch_sizes, job.static_batch, job.effort) or ()):
        return []
    chosen = "the quick effort" if job.batch_sizes is None else "batch_sizes"
    return [
        f"batch size 1 isn't compared, because {chosen} leaves it out: models that squeeze behave differently there"
    ]
