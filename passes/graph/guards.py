"""Forwards that stand in a module's `__dict__` where the class' own forward goes on working.

A fold inside a forward that can't be traced needs a guard. Such a forward may take another branch than in the recorded runs. A convolution that carries its BatchNorm is then only
right if its output goes into that BatchNorm and nowhere else: that is checked at every call, and a call that does
otherwise raises instead of answering wrong.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from passes.errors import UnseenCall


class InstanceForward:
    """Base of the callables that stand in a module's `__dict__` as its `forward`; copied and pickled with the module."""

    # Whether a call of the module is one operation, which no graph looks into.
    is_atom = False
    owner: nn.Module

    def _class_forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.owner).forward(self.owner, *args, **kwargs)


class FoldedPair:
    """One convolution and the BatchNorm that was folded into it: which outputs of the one the other still owes."""

    def __init__(self, conv_path: str, norm_path: str) -> None:
        self.conv_path = conv_path
        self.norm_path = norm_path
        # Values of different threads don't meet; a compiler traces one thread and can't trace thread-local state.
        self._threads = threading.local()
        self._compiled: list[torch.Tensor] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return FoldedPair, (self.conv_path, self.norm_path)

    def _open(self) -> list[torch.Tensor]:
        if torch.compiler.is_compiling():
            return self._compiled
        if not hasattr(self._threads, "open"):
            self._threads.open = []
        opened: list[torch.Tensor] = self._threads.open
        return opened

    def made(self, output: torch.Tensor) -> None:
        """The convolution made this output."""
        self._open().append(output)

    def taken(self, value: torch.Tensor) -> None:
        """The BatchNorm is given this value.

        Raises:
            UnseenCall: the convolution didn't make it.
        """
        opened = self._open()
        for index, output in enumerate(opened):
            if output is value:
                del opened[index]
                return
        opened.clear()
        raise UnseenCall(
            f"{self.norm_path} was folded into {self.conv_path} and is given a value that doesn't come from it:"
            " give optimize() example inputs that take this branch, or leave the pass out"
        )

    def settle(self) -> None:
        """The forward that calls both has returned.

        Raises:
            UnseenCall: an output of the convolution didn't go through the BatchNorm.
        """
        opened = self._open()
        if opened:
            opened.clear()
            raise UnseenCall(
                f"{self.conv_path} carries {self.norm_path}, and its output was used without it:"
                " give optimize() example inputs that take this branch, or leave the pass out"
            )

    def forget(self) -> None:
        """The forward that calls both was left by an exception."""
        self._open().clear()


class FoldedConvForward(InstanceForward):
    """The forward of a convolution that carries its BatchNorm."""

    is_atom = True

    def __init__(self, owner: nn.Module, pair: FoldedPair) -> None:
        self.owner = owner
        self.pair = pair

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        output = self.compute(input)
        self.pair.made(output)
        return output

    def compute(self, input: torch.Tensor) -> torch.Tensor:
        """The convolution alone, with nobody looking where its output goes."""
        output: torch.Tensor = self._class_forward(input)
        return output


class FoldedNormForward(InstanceForward):
    """The forward of a BatchNorm that its convolution carries: its input as it is."""

    is_atom = True

    def __init__(self, owner: nn.Module, pair: FoldedPair) -> None:
        self.owner = owner
        self.pair = pair

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        self.pair.taken(input)
        return self.compute(input)

    def compute(self, input: torch.Tensor) -> torch.Tensor:
        """The identity, wherever the input comes from."""
        return input


class SettlingForward(InstanceForward):
    """The forward of the module that calls both: as it was, then a look that nothing is owed."""

    def __init__(self, owner: nn.Module, pairs: tuple[FoldedPair, ...]) -> None:
        self.owner = owner
        self.pairs = pairs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            outputs = self._class_forward(*args, **kwargs)
        except BaseException:
            # What was left half-way is no output that went astray.
            for pair in self.pairs:
                pair.forget()
            raise
        for pair in self.pairs:
            pair.settle()
        return outputs

    @property
    def __signature__(self) -> inspect.Signature:
        # Code that asks a model for its arguments reads them here.
        return inspect.signature(self._class_forward)


class FormattedForward(InstanceForward):
    """The forward of a root, with the outputs in the memory format that the original gives them.

    A call that returns more or fewer values than the recorded ones has them all made contiguous, which is what
    convolutions on contiguous input give.
    """

    def __init__(self, owner: nn.Module, formats: tuple[torch.memory_format | None, ...], inner: Any) -> None:
        self.owner = owner
        self.formats = formats
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._class_forward if self.inner is None else self.inner
        outputs = forward(*args, **kwargs)
        if isinstance(outputs, torch.Tensor):
            return _formatted(outputs, self.formats[0] if len(self.formats) == 1 else torch.contiguous_format)
        leaves, spec = pytree.tree_flatten(outputs)
        known = len(leaves) == len(self.formats)
        formats = self.formats if known else (torch.contiguous_format,) * len(leaves)
        return pytree.tree_unflatten([_formatted(*pair) for pair in zip(leaves, formats, strict=True)], spec)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._class_forward if self.inner is None else self.inner)


def _formatted(leaf: Any, memory_format: torch.memory_format | None) -> Any:
    if memory_format is None or not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return leaf
    return leaf.contiguous(memory_format=memory_format)


def inner_forward(module: nn.Module) -> Any:
    """What stands in the module's `__dict__` as its forward, under the one that formats its outputs; None for nothing."""
    installed = module.__dict__.get("forward")
    return installed.inner if isinstance(installed, FormattedForward) else installed
