"""Edits of a working copy's modules that can be taken back, one at a time."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from passes.torch_private import without_torch_function

_MISSING = object()


class Edit(Protocol):
    """One change of one place, and back."""

    def apply(self) -> None:
        """Put the new value in place, and keep what stands there now."""

    def undo(self) -> None:
        """Put back what stood there."""

    def keep(self) -> Callable[[], None]:
        """A function that puts back, after an `undo`, what stands there now."""


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

    def keep(self) -> Callable[[], None]:
        """A function that puts back, after an `undo`, what stands there now."""
        home, name = self.place
        return functools.partial(_put, home, name, home.get(name, _MISSING))


def _put(home: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        home.pop(name, None)
    else:
        home[name] = value


def _in_order(home: dict[str, Any], names: Sequence[str]) -> None:
    # Some may be missing still, or again, where several edits of one place are put back one by one.
    for name in names:
        if name in home:
            home[name] = home.pop(name)


@dataclass
class TensorEdit(_DictEdit):
    """Another tensor, or none, under the name of a parameter or buffer.

    A name without a tensor goes behind the others: torch.export finds the buffers that a forward writes to by counting,
    and doesn't leave out those that are none.
    """

    module: nn.Module
    name: str
    new: torch.Tensor | None
    old: Any = _MISSING
    order: tuple[str, ...] = ()

    def apply(self) -> None:
        """Put the new tensor in place, and keep what stands there now."""
        home, name = self.place
        self.order = tuple(home)
        super().apply()
        if self.new is None:
            _in_order(home, (name,))

    def undo(self) -> None:
        """Put back what stood there, where it stood."""
        home, _ = self.place
        super().undo()
        _in_order(home, self.order)

    def keep(self) -> Callable[[], None]:
        """A function that puts back, after an `undo`, what stands there now."""
        home, _ = self.place
        order, put_back = tuple(home), super().keep()

        def put_back_in_order() -> None:
            put_back()
            _in_order(home, order)

        return put_back_in_order

    @property
    def place(self) -> tuple[dict[str, Any], str]:
        """The dict of buffers for a name that is a buffer's, else that of the parameters."""
        is_buffer = self.name in self.module._buffers
        home: dict[str, Any] = self.module._buffers if is_buffer else self.module._parameters
        return home, self.name


@dataclass
class FormatEdit:
    """Another memory format of a parameter that a pass has made, which nobody else holds.

    A format can be had back to the bit: the values are held once, where another tensor would hold them twice for as long
    as it may be taken back.
    """

    parameter: nn.Parameter
    memory_format: torch.memory_format
    strides: tuple[int, ...] = ()

    def apply(self) -> None:
        """Bring the values into the format, and keep the strides that they have now."""
        self.strides = self.parameter.stride()
        self._convert()

    def undo(self) -> None:
        """Bring the values back into the strides that they had."""
        # Whoever watches for writes to values would take this for one, and keep a copy.
        with without_torch_function():
            self.parameter.data = _restrided(self.parameter.data, self.strides)

    def keep(self) -> Callable[[], None]:
        """A function that brings the values into the format again."""
        return self._convert

    def _convert(self) -> None:
        with without_torch_function():
            values = self.parameter.data
            if values.numel() <= _ELEMENTS:
                self.parameter.data = in_format(values, self.memory_format)
                return
            strides = torch.empty(values.shape, device="meta", memory_format=self.memory_format).stride()
            self.parameter.data = _restrided(values, strides)


def _restrided(values: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same values in other strides; many of them in the same memory, row by row, where each row stays in its place."""
    if values.numel() <= _ELEMENTS or not (
        _lies_in_rows(values.shape, values.stride()) and _lies_in_rows(values.shape, strides)
    ):
        return torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device).copy_(values)
    moved = values.as_strided(values.shape, strides)
    count = max(1, _ELEMENTS * len(values) // values.numel())
    for start in range(0, len(values), count):
        moved[start : start + count] = values[start : start + count].clone()
    return moved


# How many elements are moved at a time, and as many may lie in a second place for that: 1 MiB of float32.
_ELEMENTS = 1 << 18


def _lies_in_rows(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether each row fills a place of its own, one behind the other."""
    row = shape[1:].numel()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True))
    return row > 0 and strides[0] == row == reach


def in_format(values: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """A copy with the strides of the format, also of what `contiguous` takes to be in it already: one input channel."""
    return torch.empty_like(values, memory_format=memory_format).copy_(values)


@dataclass
class AttributeEdit(_DictEdit):
    """Another value of an instance attribute, such as the `forward` of a module."""

    module: Any
    name: str
    new: Any
    old: Any = _MISSING

    @property
    def place(self) -> tuple[dict[str, Any], str]:
        """The instance's `__dict__`."""
        return self.module.__dict__, self.name


@dataclass
class ClassEdit:
    """Another class of a module, which stays the object that it is: under every name, in lists, and for its hooks."""

    module: nn.Module
    new: type[nn.Module]
    old: type[nn.Module] | None = None

    def apply(self) -> None:
        """Give it the new class, and keep the one of now."""
        self.old = type(self.module)
        _set_class(self.module, self.new)

    def undo(self) -> None:
        """Give it back the class that it had."""
        assert self.old is not None
        _set_class(self.module, self.old)

    def keep(self) -> Callable[[], None]:
        """A function that gives it again, after an `undo`, the class of now."""
        return functools.partial(_set_class, self.module, type(self.module))


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    # A class of the user's may do anything when an attribute is set.
    object.__setattr__(module, "__class__", cls)


@dataclass
class HookEdit(_DictEdit):
    """Another hook in one of a module's dicts of hooks."""

    module: nn.Module
    registry: str
    name: str
    new: Any
    old: Any = _MISSING

    @property
    def place(self) -> tuple[dict[str, Any], str]:
        """The dict of hooks."""
        hooks: dict[str, Any] = self.module.__dict__[self.registry]
        return hooks, self.name


def undo_all(edits: Sequence[Edit]) -> None:
    """Take edits back, the last one first."""
    for edit in reversed(edits):
        edit.undo()


@contextmanager
def taken_back(edits: Iterable[Edit]) -> Iterator[None]:
    """The tree as it was before the edits, for the time of the block; afterwards it is as it is now.

    Later edits of the same places are to be taken back first: put such blocks inside theirs.
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
    """The tree with the edits, for the time of the block."""
    done: list[Edit] = []
    try:
        for edit in edits:
            edit.apply()
            done.append(edit)
        yield
    finally:
        undo_all(done)
