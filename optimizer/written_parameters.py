"""Parameters that a forward writes to, and their values from before it.

`nn.Embedding(max_norm=1.0)` shortens the rows that it looks up, and some forwards clamp or normalise a weight in place. A
second copy of all weights is too much to keep them from that: a parameter is copied at the first write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from optimizer.float64 import written_tensors
from passes.graph.calls import moved_statistics, name_of
from passes.graph.storage import parts_of, write_values

# Attributes that are set without a write to the tensor's numbers: a reentrant checkpoint sets them of its inputs.
_NO_VALUES = frozenset({"requires_grad", "grad"})


@contextmanager
def kept_parameters(target: Any) -> Iterator[set[str]]:
    """Parameters that are written to inside are afterwards what they were, their versions too; yields their names.

    What TorchScript and compiled code write isn't seen: run it eagerly (`optimizer.preserve.eager_only`). Nothing for
    callables that are no modules.
    """
    names: set[str] = set()
    if not isinstance(target, nn.Module) or not any(True for _ in target.parameters()):
        yield names
        return
    guard = _Guard(target)
    try:
        with guard:
            yield names
    finally:
        names.update(kept.name for kept in guard.kept.values())
        for kept in guard.kept.values():
            kept.restore()


@contextmanager
def kept_values(target: Any, names: Iterable[str]) -> Iterator[None]:
    """The parameters of these names, those of them that `target` has, are afterwards what they were before."""
    parameters = dict(target.named_parameters()) if names and isinstance(target, nn.Module) else {}
    kept = [_KeptParameter(name, parameters[name]) for name in names if name in parameters]
    try:
        yield
    finally:
        for parameter in kept:
            parameter.restore()


class _KeptParameter:
    """The values of one parameter, and how to put them back."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self._parameter = parameter
        # Another view of the storage: a forward may give the parameter another one (`weight.data = …`).
        self._place = parameter.detach()
        self._values = self._place.clone()
        # The values come back bit by bit, so nobody who watches the version needs to know of the write.
        self._versions = None if parameter.is_inference() else _unsafe_preserve_version_counter(parameter)

    def restore(self) -> None:
        with torch.no_grad(), torch.inference_mode(self._versions is None):
            if _layout_of(self._parameter) != _layout_of(self._place):
                self._parameter.data = self._place
            write_values(self._place, self._values)
        if self._versions is not None:
            self._versions.__exit__(None, None, None)


class _Guard(TorchFunctionMode):
    """Copies a parameter before the first call that writes into its storage."""

    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        self.kept: dict[int, _KeptParameter] = {}
        self._places: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in target.named_parameters():
            if (place := _storage_of(parameter)) is not None:
                self._places.setdefault(place, []).append((name, parameter))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        written = [*written_tensors(name, args, kwargs), *moved_statistics(func, args, kwargs)]
        if name == "__set__" and getattr(getattr(func, "__self__", None), "__name__", "") not in _NO_VALUES:
            written = [args[0]]
        for tensor in written:
            for path, parameter in self._places.get(_storage_of(tensor) or 0, ()):
                if id(parameter) not in self.kept:
                    self.kept[id(parameter)] = _KeptParameter(path, parameter)
        return func(*args, **kwargs)


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple((part.data_ptr(), part.shape, part.stride()) for part in parts_of(tensor))


def _storage_of(tensor: Any) -> int | None:
    """Where a tensor's numbers lie; None where they don't lie in one place of their own."""
    if not isinstance(tensor, torch.Tensor) or is_lazy(tensor) or type(tensor) not in (torch.Tensor, nn.Parameter):
        return None
    if tensor.is_mkldnn or tensor.is_meta:
        return None
    # Of a sparse tensor the numbers are the last part.
    *_, numbers = parts_of(tensor) or (None,)
    return None if numbers is None else numbers.untyped_storage().data_ptr() or None
