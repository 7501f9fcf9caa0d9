"""Edits of a working copy's modules that can be taken back, one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
        """Put the new value in place, and keep what stands there now."""

    def undo(self) -> None:
        """Put back what stood there."""

    @property
    def place(self) -> tuple[dict[str, Any], str]:
        """The dict that the edit writes to, and its key there."""


class _DictEdit(ABC):
    """What is common: another value under one key of a dict; a key that is new goes again."""

    new: Any
    old: Any

    @property
    @abstractmethod
    def place(self) -> tuple[dict[str, Any], str]:
        """The dict that the edit writes to, and its key there."""

    def apply(self) -> None:
        """Put the new value in place, and keep what stands there now."""
        home, name = self.place
        self.old = home.get(name, _MISSING)
        home[name] = self.new

    def undo(self) -> None:
        """Put back what stood there."""
        home, name = self.place
        _put(home, name, self.old)


def _put(home: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        home.pop(name, None)
    else:
        home[name] = value


@dataclass
class TensorEdit(_DictEdit):
    """Another tensor, or none, under the name of a parameter or buffer."""

    module: nn.Module
    name: str
    new: torch.Tensor | None
    old: Any = _MISSING

    @property
    def place(self) -> tuple[dict[str, Any], str]:
        """The dict of buffers for a name that is a buffer's, else that of the parameters."""
        is_buffer = self.name in self.module._buffers
        home: dict[str, Any] = self.module._buffers if is_buffer else self.module._parameters
        return home, self.name


@dataclass
class AttributeEdit(_DictEdit):
    """Another value of an instance attribute, such as `forward`."""

    module: nn.Module
    name: str
    new: Any
    old: Any = _MISSING

    @property
    def place(self) -> tuple[dict[str, Any], str]:
        """The instance's `__dict__`."""
        return self.module.__dict__, self.name


@dataclass
class ModuleEdit(_DictEdit):
    """Another module under a child's name."""

    parent: nn.Module
    name: str
    new: nn.Module
    old: Any = _MISSING

    @property
    def place(self) -> tuple[dict[str, Any], str]:
        """The dict of the parent's children."""
        home: dict[str, Any] = self.parent._modules
        return home, self.name


@dataclass
class MetaEdit(_DictEdit):
    """Another note on a node of a graph."""

    meta: dict[str, Any]
    name: str
    new: Any
    old: Any = _MISSING

    @property
    def place(self) -> tuple[dict[str, Any], str]:
        """The dict of the node's notes."""
        return self.meta, self.name


@contextmanager
def taken_back(edits: Iterable[Edit]) -> Iterator[None]:
    """The tree as it was before the edits, for the time of the block; afterwards it is as it is now.

    Later edits of the same places are to be taken back first: put such blocks inside theirs.
    """
    done = list(edits)
    places = [edit.place for edit in done]
    values = [home.get(name, _MISSING) for home, name in places]
    for edit in reversed(done):
        edit.undo()
    try:
        yield
    finally:
        for (home, name), value in zip(places, values, strict=True):
            _put(home, name, value)


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
