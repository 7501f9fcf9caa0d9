"""The record of what one pass changed and left alone, and how it is taken back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from passes.program.edits import AttributeEdit, Edit, TensorEdit, undo_all
from passes.program.model_tree import ModelTree
from passes.program.tensors import TensorRef


@dataclass(frozen=True)
class Skip:
    """A place that a pass looked at and left alone.

    Attributes:
        where: the module path.
        reason: a sentence without its full stop.
    """

    where: str
    reason: str


class Place(NamedTuple):
    """What tells one change of a pass from its others, also when the pass is run again.

    Attributes:
        where, what: those of the change.
        number: of the changes with these words, counted from 0.
    """

    where: str
    what: str
    number: int


@dataclass(frozen=True)
class Remark:
    """A place that costs something and that the user may mend.

    Attributes:
        where: the module path, with the operation where one is meant: "encoder.layer1 (view)".
        text: a sentence without its full stop.
    """

    where: str
    text: str


@dataclass
class Change:
    """One rewrite.

    Attributes:
        where: the module path.
        what: what was done, in a few words.
        number: of the changes of the pass with these words, counted from 0.
        edits: what was done to the modules.
        sources: the tensors of the caller's module that new ones were computed from, each with its owner and name.
        left_alone: whether nothing of it is written.
        between: the paths of the two that it folds together, in the order of the run; None where it folds nothing.
    """

    where: str
    what: str
    number: int = 0
    edits: list[Edit] = field(default_factory=list)
    sources: list[TensorRef] = field(default_factory=list)
    left_alone: bool = False
    between: tuple[str, str] | None = None

    @property
    def place(self) -> Place:
        """What tells the change from the others of the pass."""
        return Place(self.where, self.what, self.number)


_Change = TypeVar("_Change", bound=Change)


class ChangeRecord(Generic[_Change]):
    """Base of what passes write to modules with: it keeps the record, and takes changes back.

    Attributes:
        tree: the model's modules and tensors.
        changes, skips: the record.
        edits: all edits of modules, in the order they were made.
    """

    def __init__(self, tree: ModelTree, left_alone: Mapping[Place, str] | None = None) -> None:
        """Args: `left_alone` are the changes of which nothing is written, each with the reason: a sentence without a full
        stop.
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
        """Record what is written in the block as one change; one that is to be left alone is noted as a skip instead.

        An error in the block takes back what was written in it.

        Raises:
            RuntimeError: inside of another change.
        """
        if self._open is not None:
            raise RuntimeError("a change is opened inside of another one")
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
            raise RuntimeError("a module is written to outside of a change")
        return self._open

    def _put(self, ref: TensorRef, value: Any) -> None:
        self._do(TensorEdit(ref.owner, ref.name, value))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._do(AttributeEdit(owner, name, value))

    def _do(self, edit: Edit) -> None:
        change = self._changing()
        edit.apply()
        change.edits.append(edit)
        # What runs of it were seen to do may be otherwise by now.
        self.tree.runs = None

    @property
    def edits(self) -> list[Edit]:
        """All edits of modules, in the order they were made."""
        return [edit for change in self.changes for edit in change.edits] + self._installed

    def roll_back(self) -> None:
        """Take everything back; passes that came later have to be taken back before."""
        undo_all(self.edits)
        self._installed.clear()
        # The record stays; there is nothing more to be taken back.
        for change in self.changes:
            change.edits = []
        self.tree.refresh()
