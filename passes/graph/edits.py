"""Edits of a working copy's modules that can be taken back, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

_MISSING = object()


class Edit(Protocol):
    """One change of one place, and back."""

    def apply(self) -> None:
        """Put the new value in place."""

    def undo(self) -> None:
        """Put the old value back."""


@dataclass
class TensorEdit:
    """Another tensor, or none, under the name of a parameter or buffer."""

    module: nn.Module
    name: str
    new: torch.Tensor | None
    old: Any = _MISSING

    def apply(self) -> None:
        """Put the new tensor in place."""
        home = self._home()
        self.old = home.get(self.name, _MISSING)
        home[self.name] = self.new

    def undo(self) -> None:
        """Put the old tensor back."""
        home = self._home()
        if self.old is _MISSING:
            del home[self.name]
        else:
            home[self.name] = self.old

    def _home(self) -> dict[str, Any]:
        is_buffer = self.name in self.module._buffers
        return self.module._buffers if is_buffer else self.module._parameters


@dataclass
class AttributeEdit:
    """Another value of an instance attribute, such as `forward`."""

    module: nn.Module
    name: str
    new: Any
    old: Any = _MISSING

    def apply(self) -> None:
        """Put the new value in place."""
        self.old = self.module.__dict__.get(self.name, _MISSING)
        self.module.__dict__[self.name] = self.new

    def undo(self) -> None:
        """Put the old value back."""
        if self.old is _MISSING:
            self.module.__dict__.pop(self.name, None)
        else:
            self.module.__dict__[self.name] = self.old


@dataclass
class ModuleEdit:
    """Another module under a child's name."""

    parent: nn.Module
    name: str
    new: nn.Module
    old: nn.Module | None = None

    def apply(self) -> None:
        """Put the new module in place."""
        self.old = self.parent._modules[self.name]
        self.parent._modules[self.name] = self.new

    def undo(self) -> None:
        """Put the old module back."""
        self.parent._modules[self.name] = self.old


@contextmanager
def taken_back(edits: Iterable[Edit]) -> Iterator[None]:
    """The tree as it was before the edits, for the time of the block."""
    done = list(edits)
    for edit in reversed(done):
        edit.undo()
    try:
        yield
    finally:
        for edit in done:
            edit.apply()


@contextmanager
def in_place(edits: Iterable[Edit]) -> Iterator[None]:
    """The tree with the edits, for the time of the block."""
    done: list[Edit] = []
    try:
        for edit in edits:
            edit.apply()
            done.append(edit)
        yield
    finally:
        for edit in reversed(done):
            edit.undo()
