"""Make one kernel for a function of pointwise operations, and one for its gradients."""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import fx, nn

from passes.compiling.compiler import import_inductor, missing_compiler
from passes.torch_private import compiler_failures, compiler_named, settings_of_now

logger = logging.getLogger(__name__)

Backend = Literal["torchscript", "inductor"]
Tensors = Sequence[torch.Tensor]
_numbers = itertools.count()


class Kernels(Protocol):
    """The kernels of one function, for tensors without gradients."""

    failure: str  # the reason why the last call failed to make a kernel, as a clause; "" if none failed

    def value(self, sources: Tensors) -> torch.Tensor | None:
        """Compute the function; None if no kernel can be made for such sources."""

    def gradients(self, wanted: tuple[int, ...], gradient: torch.Tensor, sources: Tensors) -> Tensors | None:
        """Compute the gradients of the wanted sources, given that of the value; None if no kernel can be made."""


# The largest number of kinds of calls whose code is remembered; a model with more sizes than that starts again.
_MOST_KINDS = 1024


class InductorKernels:
    """Inductor kernels with dynamic shapes.

    torch.compile finds the code of a call by its guards, in some 50 microseconds, as long as several operations take.
    The guards are on sizes, strides, dtypes, devices and the settings of torch. So the first call of a kind, in which all
    of these are equal, goes through torch.compile, and later ones run the same code directly.

    If the compiler gives up on a kind of call, for example because it is the ninth kind, that kind isn't tried again.

    Args:
        function: f(None, *sources); equal graphs have the same function, and share their kernels.
        graph: not used.
    """

    def __init__(self, function: Callable[..., Any], graph: fx.Graph) -> None:
        import_inductor()
        self.failure = ""
        # The errors of a failed compilation: too many kinds of calls, unsupported operations, or a failure of the C++
        # or Triton compiler. Errors of the operations themselves aren't among them.
        self._failures = compiler_failures()
        self._function = function
        self._value = _compiled(function)
        self._gradients = _compiled(_gradients_of(function))
        self._without: set[Any] = set()
        self._direct: dict[Any, _Direct] = {}

    def value(self, sources: Tensors) -> torch.Tensor | None:
        """See `Kernels.value`."""
        found: torch.Tensor | None = self._run(self._value, (None,), sources)
        return found

    def gradients(self, wanted: tuple[int, ...], gradient: torch.Tensor, sources: Tensors) -> Tensors | None:
        """See `Kernels.gradients`."""
        found: Tensors | None = self._run(self._gradients, (self._function, wanted), (gradient, *sources))
        return found

    def _run(self, kernel: Callable[..., Any], options: tuple[Any, ...], tensors: Tensors) -> Any:
        kind = options, *[(each.shape, each.stride(), each.dtype, each.device) for each in tensors]
        direct = self._direct.get(kind)
        if direct is not None and direct.settings.check():
            return direct(tensors)
        if self._without and (options, _kind_of(tensors)) in self._without:
            return None
        _last.run = None
        try:
            result = kernel(*options, *tensors)
            if _last.run is not None and (direct := _Direct.of(*_last.run, tensors, result)) is not None:
                if len(self._direct) >= _MOST_KINDS:
                    self._direct = {}
                self._direct[kind] = direct
            return result
        except self._failures as error:
            # Don't try this kind of call again.
            self._without.add((options, _kind_of(tensors)))
            self.failure = f"inductor generates no kernel for it ({type(error).__name__}: {_first_line(error)})"
            tell(self.failure)
            return None
        finally:
            _last.run = None


class _Last(threading.local):
    """The last code of a kernel that this thread ran, with its arguments and outputs."""

    run: tuple[Callable[..., Any], tuple[Any, ...], Sequence[Any]] | None = None


_last = _Last()


def _noting(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend inductor of torch.compile, whose code notes its last run."""
    code = compiler_named("inductor")(graph, inputs)

    def run(*given: Any) -> Any:
        outputs = code(*given)
        _last.run = code, given, outputs
        return outputs

    return run


@dataclass(frozen=True)
class _Direct:
    """The code of one kind of call, run without torch.compile's guards."""

    code: Callable[..., Any]
    # For each argument of the code the index of a source, or a number, which depends on sizes and strides only
    arguments: tuple[tuple[int | None, Any], ...]
    is_single: bool  # whether the result is one tensor instead of a tuple
    settings: Any  # tells whether torch's settings are still those of the first call

    @classmethod
    def of(
        cls, code: Callable[..., Any], given: Sequence[Any], outputs: Sequence[Any], sources: Tensors, result: Any
    ) -> _Direct | None:
        """The code that has just run; None if its result is more than its outputs."""
        places = {id(source): place for place, source in enumerate(sources)}
        is_single = isinstance(result, torch.Tensor)
        results = (result,) if is_single else result
        # With one tensor as two sources, the code may have one argument for both.
        if len(places) < len(sources) or len(results) != len(outputs) or not all(map(operator.is_, results, outputs)):
            return None
        arguments = tuple((places.get(id(each)), None if id(each) in places else each) for each in given)
        if not all(place is not None or isinstance(each, int) for place, each in arguments):
            return None
        return cls(code, arguments, is_single, settings_of_now())

    def __call__(self, sources: Tensors) -> Any:
        outputs = self.code(*[each if place is None else sources[place] for place, each in self.arguments])
        return outputs[0] if self.is_single else tuple(outputs)


class TorchScriptKernels:
    """Kernels of TorchScript's fuser."""

    def __init__(self, function: Callable[..., Any], graph: fx.Graph) -> None:
        self.failure = ""
        with warnings.catch_warnings():
            # Ignore the deprecation of TorchScript, which was selected on purpose, and a warning about a class of
            # torch's own.
            warnings.simplefilter("ignore")
            # The method, without the call of a module around it.
            self._scripted: Callable[..., Any] = torch.jit.script(fx.GraphModule(nn.Module(), graph)).forward

    def value(self, sources: Tensors) -> torch.Tensor | None:
        """See `Kernels.value`."""
        value: torch.Tensor = self._scripted(*sources)
        return value

    def gradients(self, wanted: tuple[int, ...], gradient: torch.Tensor, sources: Tensors) -> Tensors | None:
        """See `Kernels.gradients`."""
        with torch.enable_grad():
            given = [value.detach().requires_grad_(number in wanted) for number, value in enumerate(sources)]
            value = self._scripted(*given)
        return torch.autograd.grad(value, [given[number] for number in wanted], gradient, allow_unused=True)


KERNELS: Mapping[Backend, Callable[[Callable[..., Any], fx.Graph], Kernels]] = {
    "inductor": InductorKernels,
    "torchscript": TorchScriptKernels,
}


def why_none(backend: Backend, device: torch.device) -> str | None:
    """The reason, known before a call, why the backend can't make kernels on the device; None if there is none."""
    # A model may be loaded on another machine than the one that optimized it.
    return missing_compiler(device) if backend == "inductor" else None


@functools.cache
def tell(reason: str) -> None:
    """Warn once, for all units, that operations run one by one."""
    logger.warning("fused operations run one by one: %s", reason)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True, fullgraph=True, backend=_noting)
    return compiled


_known_gradients: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakKeyDictionary()


def _gradients_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of `gradients` with its own code object, because torch.compile counts recompilations per code object."""
    if function not in _known_gradients:
        code = gradients.__code__.replace(co_name=f"gradients_{next(_numbers)}")
        _known_gradients[function] = types.FunctionType(code, gradients.__globals__)
    return _known_gradients[function]


def gradients(
    function: Callable[..., Any], wanted: tuple[int, ...], gradient: torch.Tensor, *sources: torch.Tensor
) -> Any:
    """Compute the gradients of the wanted sources, in a form that torch.compile can capture."""

    def of_wanted(*values: torch.Tensor) -> Any:
        given = list(sources)
        for number, value in zip(wanted, values, strict=True):
            given[number] = value
        return function(None, *given)

    backward: Callable[..., Any] = torch.func.vjp(of_wanted, *[sources[number] for number in wanted])[1]
    return backward(gradient)


def _kind_of(tensors: Tensors) -> Any:
    """Approximately the key by which torch.compile distinguishes programs."""
    return tuple(
        (each.dtype, each.device, tuple(min(size, 2) for size in each.shape), _order_of(each.stride()))
        for each in tensors
    )


def _order_of(strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(strides)), key=lambda dim: (strides[dim], dim)))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
