"""The state of passes that ran: what each changed, and how its changes were judged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from optimizer.model import is_script
from optimizer.parity import RegionParity
from optimizer.report import PassRecord
from passes.base import DeclaredError, Pass, PassResult, Precision
from passes.graph.changes import Change, Place
from passes.graph.edits import Edit

Lowered = Precision | DeclaredError
"""The reason why a result may be less precise than the original."""


@dataclass
class AppliedPass:
    """A pass that ran and hasn't been rolled back."""

    number: int
    record: PassRecord
    result: PassResult
    declared: DeclaredError | None = None

    @property
    def lowered(self) -> tuple[Lowered, ...]:
        """The reasons why this pass makes the result less precise."""
        return tuple(one for one in (self.declared, self.result.precision) if one is not None)


def with_changes(applied: Iterable[AppliedPass]) -> list[AppliedPass]:
    """The passes that changed something."""
    return [one for one in applied if one.result.changes]


def edits_of(applied: Iterable[AppliedPass]) -> list[Edit]:
    """All edits of these passes, in order."""
    return [edit for one in applied for edit in one.result.rewriter.edits]


def lowered_by(applied: Iterable[AppliedPass]) -> tuple[Lowered, ...]:
    """The reasons why these passes make the result less precise."""
    return tuple(dict.fromkeys(lowered for one in with_changes(applied) for lowered in one.lowered))


@dataclass
class CheckedChanges:
    """The judgement of one pass's changes.

    Attributes:
        worst: the largest error of a change, in units of the noise there; None if no change was compared.
        error: the largest error of a change, as a share of the largest magnitude there.
        wrong: the sentence about a change that computes something else; None if there is none.
        imprecise: the changes that lose too much to rounding, each with the reason.
    """

    worst: float | None = None
    error: float | None = None
    wrong: str | None = None
    imprecise: dict[Place, str] = field(default_factory=dict)

    @classmethod
    def of(cls, record: PassRecord, result: PassResult) -> CheckedChanges:
        """Judge the changes up to the first one that computes something else; store their errors in the record."""
        found = cls()
        for change, pairs in result.checked:
            for algebra, rounding in pairs:
                found._add(change, algebra, rounding)
                record.parity, record.error = found.worst, found.error
                if found.wrong is not None:
                    return found
        return found

    def _add(self, change: Change, algebra: RegionParity, rounding: RegionParity | None) -> None:
        self.worst = max(self.worst or 0.0, algebra.ratio)
        self.error = max(self.error or 0.0, algebra.error / algebra.scale if algebra.scale else 0.0)
        if not algebra.ok:
            self.wrong = f"{change.where or 'the root'} ({change.what}): {algebra.reason}"
        elif rounding is not None and not rounding.ok:
            reason = rounding.reason.rstrip(".")
            self.imprecise[change.place] = f"undone ({change.what}), because it loses too much to rounding: {reason}"
        elif rounding is not None:
            self.worst = max(self.worst, rounding.ratio)


class TreeState:
    """The attributes, tensors and children of every module, by reference."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = [
            (holder, dict(holder))
            for module in modules
            if not is_script(module)
            for holder in (module.__dict__, module._parameters, module._buffers, module._modules)
        ]

    def restore(self) -> None:
        """Put everything back."""
        for holder, before in self._kept:
            holder.clear()
            holder.update(before)


def is_own(item: Pass) -> bool:
    """Whether a pass belongs to this project, and not to another package."""
    return type(item).__module__.partition(".")[0] == "passes"


def is_lossy(item: Pass) -> bool:
    """Whether a pass makes the result less precise on purpose."""
    return item.lowers_precision or item.max_error is not None
