"""Find the parameters that a forward writes to, before it writes.

`nn.Embedding(max_norm=1.0)` shortens the rows that it looks up, and some forwards clamp or normalize a weight in place.
A copy of a model shares the memory of its weights with the caller's model, so such a write must not happen. The guard
stops it, and the run is repeated on a copy that has its own memory for this parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from optimize_export.errors import LoadError
from optimizer.model.module_tree import reachable_modules, unregistered_modules
from optimizer.torch_private import schema_of
from passes.graph.tensors import storages_of
from passes.torch_private import without_torch_function

# Batch normalization kernels write to these arguments if one of the flags is set; not all schemas say so.
_STATISTICS = frozenset({"running_mean", "running_var"})
_FLAGS = frozenset({"training", "train", "use_input_stats"})


class WritesToWeights(BaseException):
    """Ends a run before the first write to a shared weight.

    It is a `BaseException`, so that no forward handles it as one of its own errors.
    """


class WriteGuard(TorchDispatchMode):
    """Stops a run of a copy before it writes to a tensor of the model.

    The guard doesn't see compiled code, which must therefore run eagerly (`eager_only`).

    Args:
        shared: the tensors of the model, with their names.
        target: the model.
        module: the module that runs.

    Attributes:
        found: the names of the parameters at which a write was stopped.
    """

    supports_higher_order_operators = True

    def __init__(self, shared: Iterable[tuple[str, torch.Tensor]], target: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self.found = frozenset[str]()
        self._parameters = {name for name, _ in target.named_parameters(remove_duplicate=False)}
        self._in_training = module.training
        self._places: dict[int, set[str]] = {}
        for name, tensor in shared:
            for place in storages_of(tensor):
                self._places.setdefault(place, set()).add(name)
        own = {id(tensor) for one in reachable_modules(module) for tensor in _tensors_of(one)}
        # Only modules of the model itself read these tensors; modules of the copy have their own.
        self._readers = {
            id(tensor): one for one in reachable_modules(target) for tensor in _tensors_of(one) if id(tensor) not in own
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        # Calls from TorchScript arrive here without passing the function modes, which must not see the calls below.
        with without_torch_function():
            for value in args:
                if (reader := self._readers.get(id(value))) is not None and (reader.training or self._in_training):
                    self._refuse_reader(reader)
            for tensor in _written_by(schema_of(func), args, kwargs):
                names = {name for place in storages_of(tensor) for name in self._places.get(place, ())}
                if names:
                    self._stop(names)
            return func(*args, **kwargs)

    def _stop(self, names: set[str]) -> None:
        others = sorted(names - self._parameters)
        if others:
            raise LoadError(
                f"Forward writes to {others[0]} of the model through a reference outside the module, such as a "
                "global or a function that holds the model: use self instead."
            )
        self.found |= names
        raise WritesToWeights

    def _refuse_reader(self, reader: nn.Module) -> None:
        raise LoadError(
            f"Forward runs {type(reader).__name__} modules of the model in training mode through a reference "
            "outside the module, such as a global or a function that holds the model: use self instead."
        )


def layouts_of(module: nn.Module) -> dict[str, Any]:
    """Address, shape, strides and version of each parameter; two results differ if the parameter changed."""
    return {name: _layout_of(one) for name, one in module.named_parameters() if not is_lazy(one)}


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else ()
    return storages_of(tensor), tensor.shape, strides, None if tensor.is_inference() else tensor._version


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _written_by(schema: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments that it writes to."""
    if schema is None:
        return
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    moves = any(given.get(name) is True for name in _FLAGS & given.keys()) and not _STATISTICS.isdisjoint(given)
    if not schema.is_mutable and not moves:
        return
    for argument in schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or (moves and argument.name in _STATISTICS):
            value = given.get(argument.name)
            yield from (one for one in _listed(value) if isinstance(one, torch.Tensor))


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def named_tensors(target: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a model with their names, including those of modules in plain containers.

    Lazy tensors and tensors on the meta device are left out.
    """
    places = [("", target), *((f"{path}.", module) for path, module in unregistered_modules(target))]
    for prefix, module in places:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not (is_lazy(tensor) or tensor.is_meta):
                yield prefix + name, tensor


@dataclass(frozen=True)
class Source:
    """A tensor of the model from which something was computed, with its version at that time."""

    path: str
    tensor: torch.Tensor
    version: int | None

    @classmethod
    def of(cls, path: str, tensor: torch.Tensor) -> Source:
        """Record the tensor with its current version; a tensor that was made in inference mode has none."""
        return cls(path, tensor, _version_of(tensor))

    @property
    def unchanged(self) -> bool:
        """Whether the tensor was not written to since then, as far as its version shows."""
        return _version_of(self.tensor) == self.version


def _version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
