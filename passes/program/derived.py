"""Tensors computed from parameters and buffers only, cached between calls."""

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
    """A call in a graph that computes a tensor from parameters and buffers and caches it while they stay unchanged.

    A source that was written to, moved, cast or replaced is noticed at the next call. The exception is a write through
    `.data`, which torch doesn't count. If gradients flow to the sources, or under autocast, the value is computed at
    each call and not cached.

    Args:
        function: computes the value; differentiable.
        what: a description of the value for reports.
        kept: an alternative function for the cached value, which needs no gradients; by default `function`.
        in_autocast: whether the function is part of the forward and follows an active autocast. If False, it is always
            run without autocast, and its value is cached under autocast too.
    """

    # torch.fx requires a name for functions in a graph.
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
        # Keyed by the ids of the sources: one captured graph can serve several equal modules.
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
                # Drop the values of sources that no longer exist.
                self._kept = {each: one for each, one in self._kept.items() if one.is_alive}
                self._kept[key] = kept = _Kept(sources, self.function_of_kept(*sources).detach())
            if kept.value.is_cuda:
                # The value may be used on another stream, so it must be complete.
                torch.cuda.current_stream(kept.value.device).synchronize()
        return kept.value


def function_of(graph: fx.Graph) -> Callable[..., Any]:
    """The Python function of a graph; it returns one value, or a tuple of several."""
    function: Callable[..., Any] = fx.GraphModule(nn.Module(), graph).forward
    (outputs,) = next(node for node in reversed(graph.nodes) if node.op == "output").args
    if isinstance(outputs, tuple) and len(outputs) == 1:
        return lambda *values: function(*values)[0]
    return function


class _Kept:
    """A cached value with the state of its sources."""

    def __init__(self, sources: tuple[torch.Tensor, ...], value: torch.Tensor) -> None:
        self.value = value
        self._sources = tuple(map(weakref.ref, sources))
        self.dtype = torch.get_default_dtype()
        # Keeps the memory alive, so that no other tensor can get the same address.
        self.then = tuple((source.detach(), source._version) for source in sources)

    @property
    def is_alive(self) -> bool:
        """Whether all source tensors still exist."""
        return all(source() is not None for source in self._sources)

    def holds_for(self, sources: tuple[torch.Tensor, ...]) -> bool:
        """Whether these are the source tensors, unchanged since the value was computed."""
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
