"""Tensors that are made of parameters and buffers alone, made once and not at every call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from passes.program.weights import PLAIN_TENSORS
from passes.torch_private import has_autocast, is_capturing_cuda, is_watched, without_subclasses


class Derived:
    """A call in a graph: the value of a function of tensors, kept as long as these are what they were.

    A tensor that was written to, moved, cast or replaced is seen at the next call; only a write by its `.data` isn't, which
    torch doesn't count. The value is computed anew, and not kept, where gradients go to the tensors, and under autocast.

    Args:
        kept: the function for a value that is kept, through which no gradients go; `function` itself by default.
        in_autocast: whether the function is part of the forward, and computes under autocast as that says; else it never
            is run under it, and its value is kept there too.
    """

    # As torch.fx asks of what a graph calls.
    __name__ = "derived"
    takes_and_gives = True

    def __init__(
        self,
        function: Callable[..., Any],
        what: str,
        kept: Callable[..., Any] | None = None,
        *,
        in_autocast: bool = True,
    ) -> None:
        self.function = function
        self.function_of_kept = kept or function
        self.what = what
        self.in_autocast = in_autocast
        self._lock = threading.Lock()
        # By the identity of the tensors: one captured graph serves all equal modules that are called one by one.
        self._kept: dict[tuple[int, ...], _Kept] = {}

    def __call__(self, *sources: torch.Tensor) -> torch.Tensor:
        if self.in_autocast or not has_autocast():
            return self._value_of(sources)
        with torch.autocast(sources[0].device.type, enabled=False):
            return self._value_of(sources)

    def _value_of(self, sources: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if not _may_keep(sources):
            with without_subclasses():
                value: torch.Tensor = self.function(*sources)
            return value
        key = tuple(map(id, sources))
        kept = self._kept.get(key)
        if kept is None or not kept.holds_for(sources):
            with self._lock, torch.inference_mode(False), torch.no_grad(), without_subclasses():
                # What was replaced goes with what was made of it.
                self._kept = {each: one for each, one in self._kept.items() if one.is_alive}
                self._kept[key] = kept = _Kept(sources, self.function_of_kept(*sources).detach())
            if kept.value.is_cuda:
                # Whoever uses it on another stream finds it done.
                torch.cuda.current_stream(kept.value.device).synchronize()
        return kept.value


def function_of(graph: fx.Graph) -> Callable[..., Any]:
    """The function of a graph that gives one value, or a tuple of several."""
    function: Callable[..., Any] = fx.GraphModule(nn.Module(), graph).forward
    (outputs,) = next(node for node in reversed(graph.nodes) if node.op == "output").args
    if isinstance(outputs, tuple) and len(outputs) == 1:
        return lambda *values: function(*values)[0]
    return function


class _Kept:
    """A value with what it was computed from."""

    def __init__(self, sources: tuple[torch.Tensor, ...], value: torch.Tensor) -> None:
        self.value = value
        self._sources = tuple(map(weakref.ref, sources))
        self.dtype = torch.get_default_dtype()
        # Holds the memory, so that no other tensor comes to lie there.
        self.then = tuple((source.detach(), source._version) for source in sources)

    @property
    def is_alive(self) -> bool:
        """Whether anybody has these tensors still."""
        return all(source() is not None for source in self._sources)

    def holds_for(self, sources: tuple[torch.Tensor, ...]) -> bool:
        """Whether these are the tensors that it was computed from, and have their values of then."""
        if torch.get_default_dtype() is not self.dtype:
            return False
        for source, known, (then, version) in zip(sources, self._sources, self.then, strict=True):
            if (
                source is not known()
                or source._version != version
                or source.data_ptr() != then.data_ptr()
                or source.dtype is not then.dtype
                or source.shape != then.shape
                or source.stride() != then.stride()
            ):
                return False
        return True


def _may_keep(sources: tuple[torch.Tensor, ...]) -> bool:
    if is_watched() or has_autocast() or is_capturing_cuda():
        return False
    gradients = torch.is_grad_enabled()
    return all(
        type(source) in PLAIN_TENSORS
        and not (gradients and source.requires_grad)
        and not source.is_meta
        and not source.is_inference()
        for source in sources
    )
