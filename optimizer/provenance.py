"""What the result of `optimize` carries with it: the original, the report, and what it was computed from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from optimizer.errors import ExportFailed, UsageError
from optimizer.parity import OriginalOutputs
from optimizer.report import Report
from optimizer.written_parameters import Source
from passes.base import DeclaredError, Pass, Precision

_ATTRIBUTE = "_optimize_export"


@dataclass
class Provenance:
    """Stands in the `__dict__` of a result.

    Copies of the result share it. A pickle doesn't hold the original: what is read from it can be run and exported, and
    its exports are compared with itself.

    Attributes:
        original: the caller's module; it shares its weights with the result but for those that were changed.
        report: the record of what was done.
        sources: see `Source`.
        precisions: what makes the result less precise than the original and is allowed for: half precisions, and errors that
            passes declare.
        passes: those that were run, in order, which can be run again; none in what is read from a pickle.
        batch_sizes: those that `optimize` was given.
        ran: the runs of the original, for an export on the same inputs; None where they take much memory.
    """

    original: nn.Module | None
    report: Report
    sources: tuple[Source, ...] = field(default=(), repr=False)
    precisions: tuple[Precision | DeclaredError, ...] = ()
    passes: tuple[Pass, ...] = field(default=(), repr=False)
    batch_sizes: tuple[int, ...] | None = None
    ran: OriginalOutputs | None = field(default=None, repr=False)

    @property
    def applied(self) -> tuple[Pass, ...]:
        """The passes that changed something which is exported: what compiles isn't."""
        pairs = zip(self.passes, self.report.passes, strict=True) if self.passes else ()
        return tuple(item for item, record in pairs if record.status == "applied" and not item.is_barrier)

    def __deepcopy__(self, memo: dict[int, Any]) -> Provenance:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Provenance, (None, self.report)

    def check_sources(self) -> None:
        """See that the original still has the values that the result was computed from.

        Raises:
            ExportFailed: the caller wrote to one of them since.
        """
        for source in self.sources:
            if not source.unchanged:
                raise ExportFailed(
                    f"{source.path} was written to after optimize() folded it into other weights: the result has the old"
                    " values, so optimize the model again before you export it."
                )


def attach(module: nn.Module, provenance: Provenance) -> None:
    """Make the provenance, and the report as `.report` where the model has no attribute of that name, its own."""
    module.__dict__[_ATTRIBUTE] = provenance
    if not hasattr(module, "report"):
        module.__dict__["report"] = provenance.report


def provenance_of(module: object) -> Provenance | None:
    """The provenance of a result of `optimize`; None for any other module."""
    found = getattr(module, "__dict__", {}).get(_ATTRIBUTE)
    return found if isinstance(found, Provenance) else None


def detach(module: nn.Module) -> None:
    """Take off what `attach` put on."""
    module.__dict__.pop(_ATTRIBUTE, None)
    if isinstance(module.__dict__.get("report"), Report):
        del module.__dict__["report"]


def report_of(model: nn.Module) -> Report:
    """The report of a module that `optimize` returned.

    Raises:
        UsageError: it didn't.
    """
    provenance = provenance_of(model)
    if provenance is None:
        raise UsageError(f"This {type(model).__name__} has no report: it doesn't come from optimize().")
    return provenance.report
