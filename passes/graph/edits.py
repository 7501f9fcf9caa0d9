"""Edits of modules that can be undone one at a time."""

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
class FormatEdit:
    """Change the memory format of a parameter that a pass has made and nobody else holds.

    The values are converted in place, because that can be undone exactly. A second tensor would double the memory for
    as long as the edit can be undone.
    """

    parameter: nn.Parameter
    memory_format: torch.memory_format
    strides: tuple[int, ...] = ()

    def apply(self) -> None:
        """Convert the values to the format, and remember their current strides."""
        self.strides = self.parameter.stride()
        self._convert()

    def undo(self) -> None:
        """Convert the values back to their old strides."""
        # Hide the write from modes that would otherwise copy the values.
        with without_torch_function():
            self.parameter.data = _restrided(self.parameter.data, self.strides)

    def keep(self) -> Callable[[], None]:
        """Return a function that converts the values to the format again."""
        return self._convert

    def _convert(self) -> None:
        with without_torch_function():
            values = self.parameter.data
            if values.numel() <= _ELEMENTS:
                self.parameter.data = in_format(values, self.memory_format)
                return
            self.parameter.data = _restrided(values, _strides_in(values.shape, self.memory_format))


def _restrided(values: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same values with other strides.

    A large tensor is rearranged in its own memory, row by row, if each row stays within its own part of the memory.
    """
    if values.numel() <= _ELEMENTS or not (
        _lies_in_rows(values.shape, values.stride()) and _lies_in_rows(values.shape, strides)
    ):
        return torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device).copy_(values)
    moved = values.as_strided(values.shape, strides)
    count = max(1, _ELEMENTS * len(values) // values.numel())
    for start in range(0, len(values), count):
        moved[start : start + count] = values[start : start + count].clone()
    return moved


# The number of elements that are moved at a time, and so the size of the temporary copy: 1 MiB of float32.
_ELEMENTS = 1 << 18


def _lies_in_rows(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether each row fills a contiguous part of the memory, in order and without gaps."""
    row = shape[1:].numel()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True))
    return row > 0 and strides[0] == row == reach


def _strides_in(shape: torch.Size, memory_format: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=memory_format).stride()


def in_format(values: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """Return the tensor with the strides of a memory format: a copy, or a view if both order the values the same way.

    Unlike `contiguous(memory_format=…)`, this also changes tensors that are in both formats, such as those with one
    channel: a convolution chooses its format by the strides of its weight.
    """
    if values.is_contiguous() and values.is_contiguous(memory_format=memory_format):
        return values.as_strided(values.shape, _strides_in(values.shape, memory_format))
    return torch.empty_like(values, memory_format=memory_format).copy_(values)


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
