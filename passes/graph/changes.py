"""The record of what one pass changed and skipped, and how it is rolled back."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from passes.graph.model_tree import ModelTree, TensorRef

# The value of a missing key; as the new value of an edit, it removes the key.
MISSING = object()


class Edit(Protocol):
    """One change at one place in a module, which can be undone. `in_place` makes edits temporarily."""

    def apply(self) -> None:
        """Write the new value, and remember the current one."""

    def undo(self) -> None:
        """Restore the value from before `apply`."""

    def keep(self) -> Callable[[], None]:
        """Return a function that restores, after an `undo`, the value that is there now."""


class _DictEdit(ABC):
    """Base of the edits that write one key of a dict; `undo` removes a key that was new."""

    new: Any
    old: Any

    @property
    @abstractmethod
    def place(self) -> tuple[dict[str, Any], str]:
        """The dict, and the key in it."""

    def apply(self) -> None:
        """Write the new value, and remember the current one."""
        home, name = self.place
        self.old = home.get(name, MISSING)
        _put(home, name, self.new)

    def undo(self) -> None:
        """Restore the value from before `apply`."""
        home, name = self.place
        _put(home, name, self.old)

    def keep(self) -> Callable[[], None]:
        """Return a function that restores, after an `undo`, the value that is there now."""
        home, name = self.place
        return functools.partial(_put, home, name, home.get(name, MISSING))


def _put(home: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        home.pop(name, None)
    else:
        home[name] = value


def _in_order(home: dict[str, Any], names: Sequence[str]) -> None:
    # Some names may be missing while several edits of one dict are undone one by one.
    for name in names:
        if name in home:
            home[name] = home.pop(name)


@dataclass
class TensorEdit(_DictEdit):
    """Put another tensor, or None, under the name of a parameter or buffer.

    A name whose tensor is removed is moved to the end of its dict: torch.export finds the buffers that a forward writes
    to by counting, and includes the names without a tensor.

    Attributes:
        module, name: the place.
        new: the tensor; an `nn.Parameter` for a parameter.
    """

    module: nn.Module
    name: str
    new: torch.Tensor | None
    old: Any = MISSING
    order: tuple[str, ...] = ()

    def apply(self) -> None:
        """Put the new tensor in place, and remember the current one."""
        home, name = self.place
        self.order = tuple(home)
        super().apply()
        if self.new is None:
            _in_order(home, (name,))

    def undo(self) -> None:
        """Restore the old tensor and the order of the names."""
        home, _ = self.place
        super().undo()
        _in_order(home, self.order)

    def keep(self) -> Callable[[], None]:
        """Return a function that restores, after an `undo`, the tensor and the order that are there now."""
        home, _ = self.place
        order, put_back = tuple(home), super().keep()

        def put_back_in_order() -> None:
            put_back()
            _in_order(home, order)

        return put_back_in_order

    @property
    def place(self) -> tuple[dict[str, Any], str]:
        """The dict of buffers if the name is a buffer, otherwise the dict of parameters."""
        is_buffer = self.name in self.module._buffers
        home: dict[str, Any] = self.module._buffers if is_buffer else self.module._parameters
        return home, self.name


@dataclass
class AttributeEdit(_DictEdit):
    """Put another value into the `__dict__` of an instance: `AttributeEdit(module, "forward", function)`.

    Attributes:
        module, name: the instance and the attribute.
        new: the value.
    """

    module: Any
    name: str
    new: Any
    old: Any = MISSING

    @property
    def place(self) -> tuple[dict[str, Any], str]:
        """The instance's `__dict__`, and the name."""
        return self.module.__dict__, self.name


@dataclass
class ClassEdit:
    """Change the class of a module in place, so that all references to it and its hooks stay valid."""

    module: nn.Module
    new: type[nn.Module]
    old: type[nn.Module] | None = None

    def apply(self) -> None:
        """Set the new class, and remember the current one."""
        self.old = type(self.module)
        _set_class(self.module, self.new)

    def undo(self) -> None:
        """Restore the old class."""
        assert self.old is not None
        _set_class(self.module, self.old)

    def keep(self) -> Callable[[], None]:
        """Return a function that sets, after an `undo`, the class that the module has now."""
        return functools.partial(_set_class, self.module, type(self.module))


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    # A user's class may override `__setattr__`.
    object.__setattr__(module, "__class__", cls)


def undo_all(edits: Sequence[Edit]) -> None:
    """Undo edits in reverse order."""
    for edit in reversed(edits):
        edit.undo()


@contextmanager
def taken_back(edits: Iterable[Edit]) -> Iterator[None]:
    """Undo the edits for the block, and make them again afterwards.

    Later edits of the same places must be undone first: nest the blocks accordingly.
    """
    done = list(edits)
    kept = [edit.keep() for edit in done]
    undo_all(done)
    try:
        yield
    finally:
        for put_back in kept:
            put_back()


@contextmanager
def in_place(edits: Iterable[Edit]) -> Iterator[None]:
    """Make the edits for the block and undo them afterwards, also after an error."""
    done: list[Edit] = []
    try:
        for edit in edits:
            edit.apply()
            done.append(edit)
        yield
    finally:
        undo_all(done)


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
    """Identifies one change of a pass, also across repeated runs of the pass."""

    # where, what: as in the change
    where: str
    what: str
    number: int  # the index of the change among those with the same `where` and `what`


@dataclass(frozen=True)
class Remark:
    """A place that costs performance and that only the user can fix."""

    where: str  # the module path, with the operation if the remark is about one: "encoder.layer1 (view)"
    text: str  # a sentence without the full stop


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
