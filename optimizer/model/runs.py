"""Runs of a model, each on a fresh copy: every run starts from the same state, and nothing must be restored.

A copy shares the memory of its weights with the caller's model, so a forward that writes to a weight must be stopped:
`nn.Embedding(max_norm=1.0)` shortens the rows that it looks up, and some forwards clamp or normalize a weight in place.
`WriteGuard` ends such a run before it writes, and the run is repeated on a copy that has its own memory for this parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from optimize_export.errors import LoadError, OptimizeExportError
from optimize_export.structure import leaves_of
from optimize_export.wording import error_summary, listed
from optimizer.model.inputs import Call
from optimizer.model.working_copy import (
    functions_over_modules,
    is_plain,
    private_state,
    reachable_modules,
    unregistered_modules,
    working_copy,
)
from passes.graph.forwards import is_compiled
from passes.graph.memory import storages_of
from passes.torch_private import COMPILED_CALL, schema_of, without_torch_function

_T = TypeVar("_T")


class Runs:
    """Provides a fresh copy of the model for each run.

    A module with compiled parts runs itself, with copies of its attributes, because a copy would compile again. The
    same holds for a module that keeps functions over its own modules, because in a copy these would still use the
    original's modules. A callable that isn't a module runs as it is.

    Args:
        in_eval: whether it runs in eval mode.
        written: names of the parameters that forward writes to. Each copy has its own of these, and shares the others.
    """

    def __init__(self, target: Callable[..., Any], *, in_eval: bool, written: frozenset[str] = frozenset()) -> None:
        self.target = target
        self.in_eval = in_eval
        self.written = written
        # Called with the module that runs; returns a context for the run.
        self.watch: Callable[[nn.Module], AbstractContextManager[Any]] | None = None

    @functools.cached_property
    def is_run_itself(self) -> bool:
        """Whether the model itself runs instead of a copy."""
        modules = reachable_modules(self.target) if isinstance(self.target, nn.Module) else []
        return any(map(_is_compiled, modules)) or any(
            functions_over_modules([module for module in modules if is_plain(module)], modules)
        )

    @contextmanager
    def fresh(self) -> Iterator[Callable[..., Any]]:
        """Yield the module for one run, in the current state of the model."""
        with ExitStack() as stack:
            if not isinstance(self.target, nn.Module):
                yield self.target
                return
            module = self.target
            if self.is_run_itself:
                stack.enter_context(private_state(module, self._written_here()))
                if self.in_eval:
                    stack.enter_context(_evaluated(module))
            else:
                module = self._copy(module)
            if self.watch is not None:
                stack.enter_context(self.watch(module))
            # A copy shares the version counters of its weights with the model, and so shows writes to them.
            before = _versions(self.target)
            if self.is_run_itself:
                # Inside the private state, the model holds its own copies of these.
                before = {name: version for name, version in before.items() if name not in self.written}
            yield module
            _refuse_writes(before, self.target)

    def _copy(self, target: nn.Module) -> nn.Module:
        copied = working_copy(target, private=self._written_here(), check_functions=False).root
        # A frozen TorchScript module has no `training` flag.
        if self.in_eval and any(hasattr(module, "training") for module in copied.modules()):
            copied.eval()
        return copied

    def _written_here(self) -> list[str]:
        """The names that the target has; a result may have folded a parameter away."""
        if not self.written or not isinstance(self.target, nn.Module):
            return []
        own = {name for name, _ in self.target.named_parameters(remove_duplicate=False)}
        return sorted(self.written & own)

    def first(self, run: Callable[[Callable[..., Any]], _T]) -> _T:
        """Run once, and find the parameters that forward writes to.

        Each attempt ends before the first write to a shared weight. The next attempt gets its own copy of that weight.
        """
        if not isinstance(self.target, nn.Module):
            return run(self.target)
        shared = list(named_tensors(self.target))
        while True:
            with self.fresh() as module:
                assert isinstance(module, nn.Module)
                guard, before = WriteGuard(shared, self.target), layouts_of(module)
                result: Any = None
                try:
                    with guard:
                        result = run(module)
                except WritesToWeights:
                    pass
                except Exception:
                    # Foreign code may have caught the guard's exception and raised another one.
                    if not guard.found:
                        raise
                now = layouts_of(module)
                found = (
                    guard.found or frozenset(name for name in before if before[name] != now.get(name)) - self.written
                )
            if not found:
                return result
            if found <= self.written:
                raise LoadError(
                    f"Forward writes to {listed(sorted(found))} in TorchScript, where copies share the weights: "
                    "don't write to them in forward."
                )
            self.written |= found


class RunsOfCopy(Runs):
    """Runs of one working copy, so that its modules are the same objects in each run; each run restores their state."""

    def __init__(self, target: nn.Module, copy: nn.Module) -> None:
        super().__init__(target, in_eval=False)
        self._copied = copy

    @contextmanager
    def fresh(self) -> Iterator[Callable[..., Any]]:
        assert isinstance(self.target, nn.Module)
        before = _versions(self.target)
        try:
            with private_state(self._copied, {*self._written_here(), *self._its_own()}):
                yield self._copied
        finally:
            _refuse_writes(before, self.target)

    def _its_own(self) -> Iterator[str]:
        """The parameters that have their own memory in the copy, so that the guard doesn't stop writes to them."""
        assert isinstance(self.target, nn.Module)
        shared = {place for one in self.target.parameters() if not is_lazy(one) for place in storages_of(one)}
        for name, parameter in self._copied.named_parameters(remove_duplicate=False):
            if not is_lazy(parameter) and shared.isdisjoint(storages_of(parameter)):
                yield name


class AsItIs(Runs):
    """Runs of one module, each in the state that the earlier runs left."""

    @contextmanager
    def fresh(self) -> Iterator[Callable[..., Any]]:
        with ExitStack() as stack:
            if self.watch is not None:
                assert isinstance(self.target, nn.Module)
                stack.enter_context(self.watch(self.target))
            yield self.target


def called(module: Callable[..., Any], call: Call) -> Any:
    """Call a module that runs provide, with copies of the inputs, because forward may write to them."""
    copied = call.copied()
    return module(*copied.args, **copied.kwargs)


def _is_compiled(module: nn.Module) -> bool:
    return is_compiled(module) or getattr(module, "__dict__", {}).get(COMPILED_CALL) is not None


@contextmanager
def _evaluated(target: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in target.modules() if hasattr(module, "training")]
    try:
        target.eval()
        yield
    finally:
        for module, training in flags:
            # Not `.train()`: a module may override it, and it would change the children too.
            module.training = training


def _versions(module: nn.Module) -> dict[str, int]:
    named = module.named_parameters()
    return {name: one._version for name, one in named if not (is_lazy(one) or one.is_inference())}


def _refuse_writes(before: dict[str, int], module: nn.Module) -> None:
    written = [name for name, version in _versions(module).items() if before.get(name, version) != version]
    if written:
        raise LoadError(
            f"Forward wrote to {listed(written)} of the model, but not in its first call: load the weights again, "
            "and don't write to them in forward."
        )


@contextmanager
def errors_of_model(call: Call, on: str = "the example inputs") -> Iterator[None]:
    """Turn an error of the user's model into a `LoadError`; this program's own errors pass through."""
    try:
        yield
    except OptimizeExportError:
        raise
    except Exception as error:  # the module is foreign code
        why = error_summary(error)
        refuse_arrays(call, why, error)
        raise LoadError(f"The model raises on {on}: {why}.") from error


def refuse_arrays(call: Call, why: str, error: Exception) -> None:
    """Raise if the inputs on which a model raised contain a numpy array."""
    if any(isinstance(value, numpy.ndarray) for value in leaves_of((call.args, call.kwargs)).values):
        raise LoadError(
            f"The model raises on the example inputs, which contain a numpy array: {why.rstrip('.')}. Convert it to a "
            "tensor with torch.from_numpy."
        ) from error


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
    """

    supports_higher_order_operators = True

    def __init__(self, shared: Iterable[tuple[str, torch.Tensor]], target: nn.Module) -> None:
        super().__init__()
        self.found = frozenset[str]()  # the names of the parameters at which a write was stopped
        self._parameters = {name for name, _ in target.named_parameters(remove_duplicate=False)}
        self._places: dict[int, set[str]] = {}
        for name, tensor in shared:
            for place in storages_of(tensor):
                self._places.setdefault(place, set()).add(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        # Calls from TorchScript arrive here without passing the function modes, which must not see the calls below.
        with without_torch_function():
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


def layouts_of(module: nn.Module) -> dict[str, Any]:
    """Address, shape, strides and version of each parameter; two results differ if the parameter changed."""
    return {name: _layout_of(one) for name, one in module.named_parameters() if not is_lazy(one)}


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else ()
    return storages_of(tensor), tensor.shape, strides, None if tensor.is_inference() else tensor._version


def _written_by(schema: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments that it writes to; higher-order operators have no schema."""
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
            values = value if isinstance(value, list | tuple) else (value,)
            yield from (one for one in values if isinstance(one, torch.Tensor))


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
