"""The edits that passes make in modules, each of which can be undone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from passes.base import Edit

_MISSING = object()


@dataclass
class AttributeEdit:
    """Put another value into the `__dict__` of an instance: `AttributeEdit(module, "forward", function)`."""

    module: Any
    name: str
    new: Any
    old: Any = _MISSING

    @property
    def home(self) -> dict[str, Any]:
        """The dict that is written to."""
        home: dict[str, Any] = self.module.__dict__
        return home

    def apply(self) -> None:
        """Write the new value, and remember the current one."""
        self.old = self.home.get(self.name, _MISSING)
        self.home[self.name] = self.new

    def undo(self) -> None:
        """Restore the value from before `apply`; a name that was new is removed."""
        if self.old is _MISSING:
            self.home.pop(self.name, None)
        else:
            self.home[self.name] = self.old


class TensorEdit(AttributeEdit):
    """Put another tensor under the name of a parameter, then an `nn.Parameter`, or of a buffer."""

    @property
    def home(self) -> dict[str, Any]:
        """The dict of buffers if the name is a buffer, otherwise the dict of parameters."""
        home: dict[str, Any] = self.module._parameters
        return self.module._buffers if self.name in self.module._buffers else home


@dataclass
class ClassEdit:
    """Change the class of a module in place, so that all references to it and its hooks stay valid."""

    module: nn.Module
    new: type[nn.Module]
    old: type[nn.Module] | None = None

    def apply(self) -> None:
        """Set the new class, and remember the current one."""
        self.old = type(self.module)
        # A user's class may override `__setattr__`.
        object.__setattr__(self.module, "__class__", self.new)

    def undo(self) -> None:
        """Restore the old class."""
        object.__setattr__(self.module, "__class__", self.old)


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
    undo_all(done)
    try:
        yield
    finally:
        for edit in done:
            edit.apply()


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
