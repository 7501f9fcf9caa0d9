"""The record of what one pass changed and skipped, and how it is rolled back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from passes.graph.edits import AttributeEdit, Edit, TensorEdit, undo_all
from passes.graph.model_tree import ModelTree
from passes.graph.tensors import TensorRef


@dataclass(frozen=True)
class Skip:
    """A candidate that a pass checked and did not change.

    Attributes:
        where: the module path.
        reason: a sentence without the full stop.
    """

    where: str
    reason: str


class Place(NamedTuple):
    """Identifies one change of a pass, also across repeated runs of the pass.

    Attributes:
        where, what: as in the change.
        number: the index of the change among those with the same `where` and `what`.
    """

    where: str
    what: str
    number: int


@dataclass(frozen=True)
class Remark:
    """A place that costs performance and that only the user can fix.

    Attributes:
        where: the module path, with the operation if the remark is about one: "encoder.layer1 (view)".
        text: a sentence without the full stop.
    """

    where: str
    text: str


@dataclass
class Change:
    """One rewrite.

    Attributes:
        where: the module path.
        what: what was done, in a few words.
        number: the index of the change among those with the same `where` and `what`.
        edits: the edits of the modules.
        sources: the tensors of the caller's module that new tensors were computed from.
        left_alone: whether this change is excluded, so that nothing of it is kept.
    """

    where: str
    what: str
    number: int = 0
    edits: list[Edit] = field(default_factory=list)
    sources: list[TensorRef] = field(default_factory=list)
    left_alone: bool = False

    @property
    def place(self) -> Place:
        """The key that identifies the change among those of the pass."""
        return Place(self.where, self.what, self.number)


_Change = TypeVar("_Change", bound=Change)


class ChangeRecord(Generic[_Change]):
    """Base of the rewriters that passes use: keeps the record of changes and rolls them back.

    Attributes:
        tree: the model's modules and tensors.
        changes, skips: the record.
        edits: all edits of modules, in the order in which they were made.
    """

    def __init__(self, tree: ModelTree, left_alone: Mapping[Place, str] | None = None) -> None:
        """Start an empty record.

        Args:
            left_alone: the changes that must not be made, each with the reason: a sentence without the full stop.
        """
        self.tree = tree
        self.changes: list[_Change] = []
        self.skips: list[Skip] = []
        self._left_alone = left_alone or {}
        self._words: Counter[tuple[str, str]] = Counter()
        self._open: _Change | None = None
        self._installed: list[Edit] = []

    @contextmanager
    def _recorded(self, change: _Change) -> Iterator[_Change]:
        """Record the edits of the block as one change; an excluded change is undone and recorded as a skip.

        An error in the block undoes its edits.

        Raises:
            RuntimeError: another change is open.
        """
        if self._open is not None:
            raise RuntimeError("a change is opened inside another one")
        words = change.where, change.what
        change.number = self._words[words]
        self._words[words] += 1
        reason = self._left_alone.get(change.place)
        change.left_alone = reason is not None
        self._open = change
        try:
            yield change
        except BaseException:
            undo_all(change.edits)
            raise
        finally:
            self._open = None
        if reason is None:
            self.changes.append(change)
        else:
            undo_all(change.edits)
            change.edits.clear()
            self.skips.append(Skip(change.where, reason))

    def _changing(self) -> _Change:
        if self._open is None:
            raise RuntimeError("a module is modified outside a change")
        return self._open

    def _put(self, ref: TensorRef, value: Any) -> None:
        self._do(TensorEdit(ref.owner, ref.name, value))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._do(AttributeEdit(owner, name, value))

    def _do(self, edit: Edit) -> None:
        change = self._changing()
        edit.apply()
        change.edits.append(edit)
        self.tree.forget_runs()

    @property
    def edits(self) -> list[Edit]:
        """All edits of modules, in the order in which they were made."""
        return [edit for change in self.changes for edit in change.edits] + self._installed

    def roll_back(self) -> None:
        """Undo all edits; later passes must be rolled back first."""
        undo_all(self.edits)
        self._installed.clear()
        # The record is kept, but there is nothing left to undo.
        for change in self.changes:
            change.edits = []
        self.tree.refresh()
