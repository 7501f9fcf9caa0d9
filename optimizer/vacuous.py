"""Outputs that prove nothing, whatever a file gives: told before any file is written."""

from optimizer.errors import VacuousError
from optimizer.parity import Reference, why_vacuous


def is_vacuous(reference: Reference) -> bool:
    """Whether none of the original's outputs proves anything of a file."""
    return _reason(reference) is not None


def refuse_vacuous(reference: Reference) -> None:
    """Raise where none of the original's outputs proves anything; where only some don't, a note of the reference says so.

    Raises:
        VacuousError: it names the outputs, each with the reason.
    """
    if (reason := _reason(reference)) is None:
        return
    computed = f"computed in {reference.precision}, " if reference.precision else ""
    told = f"{computed}{reason}, so nothing could be proven"
    if not any(noise.deterministic for noise in reference.noises.values()):
        advice = "make the model give the same answer to the same inputs"
    else:
        ways = "leave cast-precision out, " if reference.precision else ""
        advice = f"{ways}load trained weights (--weights FILE on the command line), or give other example inputs"
    raise VacuousError(f"{told[0].upper()}{told[1:]}: {advice}.")


def _reason(reference: Reference) -> str | None:
    # Files are compared by these alone. Of a model without any the exporters say so.
    outputs = [noise for noise in reference.noises.values() if noise.kind == "output"]
    return why_vacuous(outputs) if outputs else None
