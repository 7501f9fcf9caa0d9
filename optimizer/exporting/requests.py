"""Make the request for the exporters from the sizes at which the original ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from exporters.base import Adapter, ExportRequest
from optimize_export.errors import ExportFailed, UsageError
from optimize_export.wording import listed
from optimizer.exporting.fixed_dims import Suggestions
from optimizer.exporting.job import ExportJob
from optimizer.exporting.references import sizes_of
from optimizer.parity import Reference
from optimizer.pipeline import notes_on_modes
from passes.base import fewest_rows
from passes.graph.forwards import dtype_inside

# The maximum number of fixed numbers that a note names.
_NUMBERS_TOLD = 4


def notes_on_training_mode(job: ExportJob, adapter: Adapter) -> list[str]:
    """Notes on modules of the model that are in training mode; those of the files are in eval mode."""
    warnings, notes = notes_on_modes(job.model, adapter.model, "the files are in eval mode and were")
    return [*warnings, *notes]


def note_on_numbers(adapter: Adapter) -> list[str]:
    """A note on the Python numbers in the example inputs, which are constants in the files."""
    told = [f"{where} = {number}" for where, number in adapter.inputs.numbers()]
    return [f"fixed in the files at the values of the example inputs: {listed(told, _NUMBERS_TOLD)}"] if told else []


def request_for(job: ExportJob, model: nn.Module, reference: Reference) -> ExportRequest:
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
        chosen=reference.chosen,
        dynamic_batch=len(batches) > 1,
        open_dims=job.dims.of,
        input_names=None if job.input_names is None else tuple(job.input_names),
        output_names=None if job.output_names is None else tuple(job.output_names),
        computes_in=dtype_inside(model),
        opset=job.opset,
        metadata=job.metadata or {},
    )


def smallest_call(request: ExportRequest) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The call with the fewest rows."""
    return request.calls[fewest_rows(request.calls)]


def names_in_files(reference: Reference, adapter: Adapter) -> dict[str, str]:
    """Map the reference's name of each output to its name in the files."""
    own = reference.output_names
    # The comparison reports a different number of outputs.
    shown = adapter.output_names if len(adapter.output_names) == len(own) else own
    return dict(zip(own, shown, strict=True))


def refuse_sizes_not_taken(job: ExportJob, reference: Reference, suggestions: Suggestions) -> None:
    """Refuse an open dim for which the original itself accepts only one size.

    Raises:
        ExportFailed: the original raises at every other size of the dim.
        UsageError: `batch_sizes` has only the size of the example inputs.
    """
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
        what = f"dynamic opens {where}, but the model raises at every other size that was tried ({why})"
        if option := suggestions.with_equal_dims(name):
            raise ExportFailed(f"{what}.{option}")
        raise ExportFailed(f"{what}: leave {where} out, or change that line.")


def note_on_fixed_batch(job: ExportJob, reference: Reference, suggestions: Suggestions) -> list[str]:
    """A note if the files accept only one batch size although the user didn't ask for that."""
    if job.static_batch or not job.samples.dynamic or len(reference.batch_sizes) > 1:
        return []
    why = reference.why_not(None)
    if why is None:
        return ["the batch size is fixed, as with static_batch: batch_sizes has only the size of the example inputs"]
    option = suggestions.with_equal_dims(job.dims.batch)
    raised = f"the model raises at every other size that was tried ({why})"
    return [
        f"the batch size is fixed, as with static_batch: {raised}{f'.{option}' if option else ''}".removesuffix(".")
    ]


def note_on_one_row(job: ExportJob, reference: Reference) -> list[str]:
    """A note if the files accept one row, but aren't compared there, because the user chose other batch sizes."""
    if job.static_batch or len(reference.batch_sizes) < 2:
        return []
    if 1 in (sizes_of(job.samples, job.batch_sizes, job.static_batch, job.effort) or ()):
        return []
    chosen = "the quick effort" if job.batch_sizes is None else "batch_sizes"
    return [
        f"batch size 1 isn't compared, because {chosen} leaves it out: models that squeeze behave differently there"
    ]
