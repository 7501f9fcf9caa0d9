"""The reference that files are compared with; a model whose outputs can't prove anything is refused before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from optimize_export.errors import UsageError, VacuousError
from optimizer.model import Samples
from optimizer.options import Effort
from optimizer.parity import BATCH_SIZES, OriginalOutputs, Reference, measure_reference, why_vacuous
from optimizer.pipeline import Provenance

# The number of batch sizes at which the rounding noise is measured; None for all of them.
_MEASURED_SIZES: Mapping[Effort, int | None] = {"quick": 1, "normal": 2, "thorough": None}

# If a row of an input has more elements than this, like an image of 224 x 224, files are compared at small batch sizes
# only: the feature maps of each row cost time and memory, and larger batches show nothing new.
_LARGE_ROW = 100_000
_FEW_ROWS = (1, 2, 3)


def measured_reference(
    original: nn.Module,
    samples: Samples,
    batch_sizes: Sequence[int] | None,
    effort: Effort,
    known: OriginalOutputs | None = None,
    *,
    or_larger: bool = False,
) -> Reference:
    """Measure the reference for all files.

    Args:
        original: the module.
        samples: the example inputs.
        batch_sizes: from `sizes_of`.
        effort: determines the number of draws and of measured batch sizes.
        known: outputs of the original from `optimize`, which need not be computed again.
        or_larger: as for `measure_reference`.

    Raises:
        VacuousError: the outputs prove nothing.
    """
    reference = measure_reference(
        original,
        samples,
        batch_sizes=batch_sizes,
        draws=3 if effort == "thorough" else None,
        measured_sizes=_MEASURED_SIZES[effort],
        known=known,
        or_larger=or_larger,
        other_values=True,
    )
    refuse_vacuous(reference)
    return reference


def sizes_of(samples: Samples, batch_sizes: Sequence[int] | None, static: bool, effort: Effort) -> list[int] | None:
    """The batch sizes at which files are compared; None if the inputs have no batch.

    Args:
        batch_sizes: those that the user chose; None to choose them here.

    Raises:
        UsageError: the batch is fixed, and further inputs have another batch size.
    """
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


def lower_reference(reference: Reference, provenance: Provenance | None) -> Reference:
    """Adapt the reference to the precision of a result whose passes lower it.

    Raises:
        VacuousError: the outputs prove nothing at that precision.
    """
    if provenance is None or provenance.original is None:
        return reference
    for lowered in provenance.precisions:
        reference = reference.less_precise(lowered)
        refuse_vacuous(reference)
    return reference


def is_vacuous(reference: Reference) -> bool:
    """Whether none of the original's outputs can prove anything about a file."""
    return _reason(reference) is not None


def refuse_vacuous(reference: Reference) -> None:
    """Raise if no output of the reference can prove anything.

    If only some outputs prove nothing, a note of the reference says so.

    Raises:
        VacuousError: no output can prove anything; the message has the reasons.
    """
    if (reason := _reason(reference)) is None:
        return
    computed = f"computed in {reference.precision}, " if reference.precision else ""
    told = f"{computed}{reason}, so nothing could be proven"
    if not any(noise.deterministic for noise in reference.noises.values()):
        advice = "make the model return the same outputs for the same inputs"
    else:
        ways = "leave out cast-precision, " if reference.precision else ""
        advice = f"{ways}load trained weights, or use other example inputs"
    raise VacuousError(f"{told[0].upper()}{told[1:]}: {advice}.")


def _reason(reference: Reference) -> str | None:
    # Files are compared by outputs only, not by changed inputs. Exporters refuse a model without outputs.
    outputs = [noise for noise in reference.noises.values() if noise.kind == "output"]
    return why_vacuous(outputs) if outputs else None
