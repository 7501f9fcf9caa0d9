"""Refuse vacuous outputs, which can't prove a file right or wrong, before any file is written."""

from optimize_export.errors import VacuousError
from optimizer.parity import Reference, why_vacuous


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
