"""The provenance of a result of `optimize`: its original, its report, and the tensors it was computed from."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from optimize_export.errors import ExportFailed, UsageError
from optimizer.model import Samples, Source
from optimizer.parity import OriginalOutputs
from optimizer.pipeline.warm_up import WarmUp
from optimizer.report import Report
from passes.base import DeclaredError, Pass, Precision
from passes.errors import UnknownPass
from passes.graph.backend import refresh
from passes.registry import pass_named

_ATTRIBUTE = "_optimize_export"


@dataclass
class Provenance:
    """The provenance of a result, kept in its `__dict__`.

    Copies of the result share it. A pickle doesn't contain the original: an unpickled result can be run and exported,
    and its files are compared with the result itself.

    Attributes:
        original: the caller's module, which shares all weights with the result that no pass changed; None after
            unpickling.
        report: the report of `optimize`.
        sources: the caller's tensors that the result holds converted copies of.
        precisions: the reasons why the result is less precise than the original: half precisions, and declared errors.
        passes: the passes in order, which can run again; empty after unpickling.
        batch_sizes: the argument of `optimize`.
        outputs: the original's outputs, for an export on the same inputs; None in training mode, or if they take much
            memory.
        operations: of a run of the original, as `recorded_operations`; empty after unpickling.
    """

    original: nn.Module | None
    report: Report
    sources: tuple[Source, ...] = field(default=(), repr=False)
    precisions: tuple[Precision | DeclaredError, ...] = ()
    passes: tuple[Pass, ...] = field(default=(), repr=False)
    batch_sizes: tuple[int, ...] | None = None
    outputs: OriginalOutputs | None = field(default=None, repr=False)
    operations: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def applied(self) -> tuple[Pass, ...]:
        """The passes whose changes are exported; compiled calls aren't."""
        pairs = zip(self.passes, self.report.passes, strict=True) if self.passes else ()
        return tuple(item for item, record in pairs if record.status == "applied" and not item.is_barrier)

    def __deepcopy__(self, memo: dict[int, Any]) -> Provenance:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Provenance, (None, self.report)

    def check_sources(self) -> None:
        """Check that the original still has the values that the result was computed from.

        Raises:
            ExportFailed: the caller wrote to one of them since.
        """
        for source in self.sources:
            if not source.unchanged:
                raise ExportFailed(
                    f"{source.path} was modified after optimize() copied it: the "
                    "result has the old values, so optimize the model again before you export it."
                )


class StaysInEval:
    """Replaces `train` in the `__dict__` of an inference result: the result stays in eval, and warns once."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner
        self.warned = False

    def __call__(self, mode: bool = True) -> nn.Module:
        if mode and not self.warned:
            self.warned = True
            warnings.warn(
                f"this {type(self.owner).__name__} was optimized for inference and stays in eval: train the original, or"
                " use optimize(model, mode='training')",
                UserWarning,
                stacklevel=2,
            )
        return self.owner


class Refresh:
    """The `refresh` of a result: call it after writes to its weights that torch doesn't count, through `.data` or numpy."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def __call__(self) -> None:
        refresh(self.owner)


def attach(module: nn.Module, provenance: Provenance, samples: Samples | None, *, stays_in_eval: bool) -> None:
    """Attach the provenance, and `.report`, `.refresh()` and `.warm_up()` where the model has no such attributes."""
    module.__dict__[_ATTRIBUTE] = provenance
    if not hasattr(module, "report"):
        module.__dict__["report"] = provenance.report
    if not hasattr(module, "refresh"):
        module.__dict__["refresh"] = Refresh(module)
    if not hasattr(module, "warm_up"):
        module.__dict__["warm_up"] = WarmUp(module, samples)
    if stays_in_eval:
        module.__dict__["train"] = StaysInEval(module)


def provenance_of(module: object) -> Provenance | None:
    """The provenance of a result of `optimize`; None for any other module."""
    found = getattr(module, "__dict__", {}).get(_ATTRIBUTE)
    return found if isinstance(found, Provenance) else None


def detach(module: nn.Module) -> None:
    """Remove everything that `attach` added."""
    module.__dict__.pop(_ATTRIBUTE, None)
    if isinstance(module.__dict__.get("train"), StaysInEval):
        del module.__dict__["train"]
    if isinstance(module.__dict__.get("refresh"), Refresh):
        del module.__dict__["refresh"]
    if isinstance(module.__dict__.get("warm_up"), WarmUp):
        del module.__dict__["warm_up"]
    if isinstance(module.__dict__.get("report"), Report):
        del module.__dict__["report"]


def report_of(model: nn.Module) -> Report:
    """The report of a module that `optimize` returned.

    Raises:
        UsageError: `optimize` didn't return this module.
    """
    provenance = provenance_of(model)
    if provenance is None:
        raise UsageError(f"This {type(model).__name__} has no report: optimize() didn't return it.")
    return provenance.report


def kind_of(name: str, provenance: Provenance | None) -> type[Pass] | None:
    """The class of a pass by its name; None for a pass of a package that isn't installed here."""
    known = {} if provenance is None else {item.name: type(item) for item in provenance.passes}
    try:
        return known.get(name) or pass_named(name)
    except UnknownPass:
        # An unpickled result has no passes.
        return None
