"""Values that a graph makes of parameters, buffers and numbers alone, computed once and not at every call."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import fx, nn

from passes.graph.forward import compile_graph, graph_of, nodes_of


class Computed(ABC):
    """A function of parameters and buffers, whose value is kept as long as these are what they were.

    A tensor that was written to, moved, cast or replaced is seen at the next call; only a write by its `.data` isn't, which
    torch doesn't count. The value is computed anew, and not kept, where more than the numbers counts: where gradients go
    to the tensors, under autocast, while something traces or watches the call.

    Attributes:
        under_autocast: whether the value is the same under autocast, and kept there too.
    """

    under_autocast: ClassVar[bool] = False

    @abstractmethod
    def compute(self, *sources: torch.Tensor) -> torch.Tensor:
        """The value of these tensors."""


class Constant(Computed):
    """A `Computed` that a graph computes.

    Args:
        graph: its inputs are the tensors, its output the value.
        where: what tracebacks call it.
    """

    def __init__(self, graph: fx.Graph, where: str) -> None:
        self.graph = graph
        self.where = where
        self._function: Callable[..., Any] = compile_graph(graph, where)

    def compute(self, *sources: torch.Tensor) -> torch.Tensor:
        """The value of these tensors."""
        value: torch.Tensor = self._function(None, *sources)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return _constant_of, (nodes_of(self.graph), self.where)

    def __deepcopy__(self, memo: dict[int, Any]) -> Constant:
        # Another one, for another value is kept of it, and the same function, for that never changes.
        twin = object.__new__(Constant)
        twin.__dict__.update(self.__dict__)
        return twin


def _constant_of(nodes: Any, where: str) -> Constant:
    return Constant(graph_of(nodes), where)


class _Kept:
    """A value with what it was computed from."""

    def __init__(self, sources: tuple[torch.Tensor, ...], value: torch.Tensor) -> None:
        self.value = value
        self.sources = sources
        self.dtype = torch.get_default_dtype()
        # Holds the memory, so that no other tensor comes to lie there, and counts writes with its source.
        self.then = tuple((source.detach(), source._version) for source in sources)

    def holds_for(self, sources: tuple[torch.Tensor, ...]) -> bool:
        """Whether these are the tensors that it was computed from, and have their values of then."""
        if torch.get_default_dtype() is not self.dtype:
            return False
        for source, known, (then, version) in zip(sources, self.sources, self.then, strict=True):
            if (
                source is not known
                or source._version != version
                or source.data_ptr() != then.data_ptr()
                or source.dtype is not then.dtype
                or source.shape != then.shape
            ):
                return False
        return True


# Not in the constants themselves, which stand in modules: nothing that a call changes is to be seen there.
_kept: weakref.WeakKeyDictionary[Computed, _Kept] = weakref.WeakKeyDictionary()


def value_of(constant: Computed, *sources: torch.Tensor) -> torch.Tensor:
    """The value of these tensors, which no one may write to."""
    if not _may_keep(sources, constant.under_autocast):
        return constant.compute(*sources)
    kept = _kept.get(constant)
    if kept is None or not kept.holds_for(sources):
        with torch.inference_mode(False), torch.no_grad():
            kept = _Kept(sources, constant.compute(*sources).detach())
        if any(source.is_cuda for source in (*sources, kept.value)):
            # Whoever uses it on another stream finds it done.
            torch.cuda.current_stream(kept.value.device).synchronize()
        _kept[constant] = kept
    return kept.value


def _may_keep(sources: tuple[torch.Tensor, ...], under_autocast: bool) -> bool:
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._is_any_autocast_enabled() and not under_autocast:
        return False
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    gradients = torch.is_grad_enabled()
    return all(
        type(source) in (torch.Tensor, nn.Parameter)
        and not (gradients and source.requires_grad)
        and not source.is_meta
        and not source.is_inference()
        and not torch._C._functorch.is_functorch_wrapped_tensor(source)
        for source in sources
    )
