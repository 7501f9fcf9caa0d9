"""The edits that passes make in modules, each of which can be undone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes.base import Edit

# The value of a missing key; as the new value of an edit, it removes the key.
MISSING = object()


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
    """

    module: nn.Module
    name: str
    new: torch.Tensor | None  # an `nn.Parameter` for a parameter
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

    @property
    def place(self) -> tuple[dict[str, Any], str]:
        """The dict of buffers if the name is a buffer, otherwise the dict of parameters."""
        is_buffer = self.name in self.module._buffers
        home: dict[str, Any] = self.module._buffers if is_buffer else self.module._parameters
        return home, self.name


@dataclass
class AttributeEdit(_DictEdit):
    """Put another value into the `__dict__` of an instance: `AttributeEdit(module, "forward", function)`."""

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
