"""What makes one kernel of a function of pointwise operations, and one of its gradients."""

from __future__ import annotations

import functools
import itertools
import logging
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import fx, nn

from passes.compiling.compiler import import_inductor, missing_compiler
from passes.torch_private import compiler_failures

logger = logging.getLogger(__name__)

Backend = Literal["torchscript", "inductor"]
Tensors = Sequence[torch.Tensor]
_numbers = itertools.count()


class Kernels(Protocol):
    """The kernels of one function, for tensors that have no gradients.

    Attributes:
        failure: a clause why the last call got none; "" for no such call.
    """

    failure: str

    def value(self, sources: Tensors) -> torch.Tensor | None:
        """The value of the function; None where no kernel can be made for such sources."""

    def gradients(self, wanted: tuple[int, ...], gradient: torch.Tensor, sources: Tensors) -> Tensors | None:
        """The gradients of those sources, given that of the value; None where no kernel can be made."""


class InductorKernels:
    """Kernels of inductor, of all sizes, as each element is computed by itself.

    Where the compiler gives up, as at the ninth kind of call, that kind isn't tried again.

    Args:
        function: f(None, *sources); equal ones are one function, and share their kernels.
    """

    def __init__(self, function: Callable[..., Any], graph: fx.Graph) -> None:
        import_inductor()
        self.failure = ""
        # No kernel is made: for one kind of call too many, of what it doesn't know, or as the compiler of C++ or of triton
        # fails. None comes from the operations, and all of them only the compiler can tell.
        self._failures = compiler_failures()
        self._function = function
        self._value = _compiled(function)
        self._gradients = _compiled(_gradients_of(function))
        self._without: set[Any] = set()

    def value(self, sources: Tensors) -> torch.Tensor | None:
        """As said there."""
        found: torch.Tensor | None = self._run(self._value, (None,), sources)
        return found

    def gradients(self, wanted: tuple[int, ...], gradient: torch.Tensor, sources: Tensors) -> Tensors | None:
        """As said there."""
        found: Tensors | None = self._run(self._gradients, (self._function, wanted), (gradient, *sources))
        return found

    def _run(self, kernel: Callable[..., Any], options: tuple[Any, ...], tensors: Tensors) -> Any:
        if self._without and (options, _kind_of(tensors)) in self._without:
            return None
        try:
            return kernel(*options, *tensors)
        except self._failures as error:
            # Whoever calls so again pays for it no more.
            self._without.add((options, _kind_of(tensors)))
            self.failure = f"inductor makes no kernel of it ({type(error).__name__}: {_first_line(error)})"
            tell(self.failure)
            return None


class TorchScriptKernels:
    """Kernels of TorchScript's fuser."""

    def __init__(self, function: Callable[..., Any], graph: fx.Graph) -> None:
        self.failure = ""
        with warnings.catch_warnings():
            # TorchScript is deprecated, and asked for; what it says of annotations is about a class of torch's own.
            warnings.simplefilter("ignore")
            self._scripted: Callable[..., Any] = torch.jit.script(fx.GraphModule(nn.Module(), graph))

    def value(self, sources: Tensors) -> torch.Tensor | None:
        """As said there."""
        value: torch.Tensor = self._scripted(*sources)
        return value

    def gradients(self, wanted: tuple[int, ...], gradient: torch.Tensor, sources: Tensors) -> Tensors | None:
        """As said there."""
        with torch.enable_grad():
            given = [value.detach().requires_grad_(number in wanted) for number, value in enumerate(sources)]
            value = self._scripted(*given)
        return torch.autograd.grad(value, [given[number] for number in wanted], gradient, allow_unused=True)


KERNELS: Mapping[Backend, Callable[[Callable[..., Any], fx.Graph], Kernels]] = {
    "inductor": InductorKernels,
    "torchscript": TorchScriptKernels,
}


def why_none(backend: Backend, device: torch.device) -> str | None:
    """What the backend lacks to make kernels on the device, where it can be known before; None for nothing."""
    # A model may be loaded on another machine than it was made on.
    return missing_compiler(device) if backend == "inductor" else None


@functools.cache
def tell(reason: str) -> None:
    """Say once, for all units, why operations run one by one."""
    logger.warning("fused operations run one by one: %s", reason)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True, fullgraph=True, backend="inductor")
    return compiled


_known_gradients: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakKeyDictionary()


def _gradients_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """`gradients` with a code of its own for each function: torch.compile counts what it makes of a code."""
    if function not in _known_gradients:
        code = gradients.__code__.replace(co_name=f"gradients_{next(_numbers)}")
        _known_gradients[function] = types.FunctionType(code, gradients.__globals__)
    return _known_gradients[function]


def gradients(
    function: Callable[..., Any], wanted: tuple[int, ...], gradient: torch.Tensor, *sources: torch.Tensor
) -> Any:
    """What the gradients of some sources are, in a form that torch.compile follows."""

    def of_wanted(*values: torch.Tensor) -> Any:
        given = list(sources)
        for number, value in zip(wanted, values, strict=True):
            given[number] = value
        return function(None, *given)

    backward: Callable[..., Any] = torch.func.vjp(of_wanted, *[sources[number] for number in wanted])[1]
    return backward(gradient)


def _kind_of(tensors: Tensors) -> Any:
    """What torch.compile makes one program for, about."""
    return tuple(
        (each.dtype, each.device, tuple(min(size, 2) for size in each.shape), _order_of(each.stride()))
        for each in tensors
    )


def _order_of(strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(strides)), key=lambda dim: (strides[dim], dim)))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
