"""A group of pointwise operations that runs as one kernel."""

from __future__ import annotations

import itertools
import linecache
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import fx, nn

from passes.fusion.kernels import KERNELS, Backend, Kernels, tell, why_none
from passes.fusion.pointwise import PointwiseGroup, is_linear, name_of_pointwise
from passes.torch_private import has_autocast, is_in_forward_mode, is_transformed, is_watched

# The smallest number of elements for a kernel on a CPU. Below it, the call of a kernel may take longer than the
# operations, whose values stay in the cache: of 10^5 elements on one thread, 2 operations took 0.98 of the kernel's time,
# 3 and 5 took 1.5 times as long; of 10^4 elements, 2 took 0.5 of it.
_FEWEST_ELEMENTS = 1 << 17


class FusedUnit:
    """A call in a graph that computes a group of pointwise operations as one kernel.

    The operations run one by one instead if the call is traced, exported or compiled; under torch function or dispatch
    modes and torch.func transforms; for tensor subclasses; and if no kernel can be made. Gradients are computed by one
    kernel as well, except for double backward and batched gradients, which use the operations.

    Args:
        graph: the graph of the group: its inputs are tensors, its output is one tensor.
        name: the names of its operations.
        backend: makes the kernel.
        place: identifies the unit in the kernel trial.
    """

    # torch.fx requires a name for functions in a graph.
    __name__ = "fused"
    takes_and_gives = True
    # If set, computes the values of all units, while their kernels are tried.
    trial: ClassVar[Callable[[FusedUnit, Sequence[torch.Tensor]], torch.Tensor] | None] = None

    def __init__(self, graph: fx.Graph, name: str, backend: Backend, place: Any = None) -> None:
        self.graph = graph
        self.name = name
        self.backend = backend
        self.place = place
        self.kept = tuple(_kept_for_gradients(graph))
        self._plain: Callable[..., Any] = compile_graph(graph, name)
        self._kernels: dict[tuple[torch.device, ...], Kernels | None] = {}
        self._with_gradient: dict[Any, bool] = {}

    @classmethod
    def of(cls, group: PointwiseGroup, backend: Backend, place: Any = None) -> FusedUnit:
        """Make the unit of a group in a graph."""
        graph = fx.Graph()
        twins = {source: graph.placeholder(f"source_{number}") for number, source in enumerate(group.inputs)}
        for node in group.nodes:
            # Equal graphs must have equal node names.
            twins[node] = graph.create_node(
                node.op, node.target, *fx.map_arg((node.args, node.kwargs), twins.__getitem__), name_of_pointwise(node)
            )
        graph.output(twins[group.nodes[-1]])
        return cls(graph, "_".join(map(name_of_pointwise, group.nodes)), backend, place)

    @property
    def operations(self) -> int:
        """The number of operations in the unit."""
        return sum(node.op in ("call_function", "call_method") for node in self.graph.nodes)

    def __call__(self, *sources: torch.Tensor) -> torch.Tensor:
        if is_watched():
            return self.plain(*sources)
        trial = FusedUnit.trial
        if trial is not None:
            return trial(self, sources)
        if not _is_large(sources) or not self.can_run_kernel(sources):
            return self.plain(*sources)
        return self.by_kernel(sources)

    def plain(self, *sources: torch.Tensor) -> torch.Tensor:
        """Compute the value operation by operation."""
        value: torch.Tensor = self._plain(None, *sources)
        return value

    def by_kernel(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the value by the kernel, or by the operations if there is no kernel."""
        kernels = self.kernels(sources)
        if kernels is None:
            return self.plain(*sources)
        # Detached, so that the same kernel serves sources with and without gradients.
        given = [source.detach() if source.requires_grad else source for source in sources]
        if not torch.is_grad_enabled():
            value = kernels.value(given)
            return self.plain(*sources) if value is None else value
        with torch.no_grad():
            value = kernels.value(given)
        if value is None:
            return self.plain(*sources)
        return differentiated(self, value, sources) if self._has_gradient(sources) else value

    def kernels(self, sources: Sequence[torch.Tensor]) -> Kernels | None:
        """The kernels for the devices of the sources; None if none can be made."""
        devices = tuple([source.device for source in sources])
        if devices not in self._kernels:
            reason = why_none(self.backend, next((each for each in devices if each.type == "cuda"), devices[0]))
            if reason is not None:
                tell(reason)
            self._kernels[devices] = KERNELS[self.backend](self._plain, self.graph) if reason is None else None
        return self._kernels[devices]

    def _has_gradient(self, sources: Sequence[torch.Tensor]) -> bool:
        """Whether the value is differentiable; that of a comparison isn't."""
        if not any(source.requires_grad for source in sources):
            return False
        key = tuple((source.dtype, source.dim(), source.requires_grad) for source in sources)
        if key not in self._with_gradient:
            empty = (torch.empty((0,) * dims, dtype=dtype, requires_grad=needed) for dtype, dims, needed in key)
            # Hide this call from hooks that count saved tensors, so that they count the same at each call.
            with torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value):
                self._with_gradient[key] = self.plain(*empty).requires_grad
        return self._with_gradient[key]

    def can_run_kernel(self, sources: Sequence[torch.Tensor]) -> bool:
        """Whether a kernel can compute the value for these sources."""
        if self.backend == "torchscript" and has_autocast():
            return False
        if is_in_forward_mode():
            # Kernels don't support forward-mode derivatives.
            return False
        return all(map(_is_plain, sources))


def _is_large(sources: Sequence[torch.Tensor]) -> bool:
    """Whether a kernel is faster than the operations; False if not all sources are plain tensors, as in a trace."""
    is_large = False
    for source in sources:
        if type(source) is not torch.Tensor and type(source) is not nn.Parameter:
            return False
        is_large = is_large or source.is_cuda or source.numel() >= _FEWEST_ELEMENTS
    return is_large


def _is_plain(source: torch.Tensor) -> bool:
    """Whether the tensor's memory holds exactly its values."""
    return (
        type(source) in (torch.Tensor, nn.Parameter)
        and source.layout is torch.strided
        and not source.is_meta
        and not source.is_nested
        # The memory of lazily negated or conjugated tensors holds other values.
        and not source.is_neg()
        and not source.is_conj()
        # A tensor under a torch.func transform represents a batch of tensors.
        and not is_transformed(source)
    )


def differentiated(unit: FusedUnit, value: torch.Tensor, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attach gradients to a value that the unit's kernel computed from these sources."""
    result: torch.Tensor = _Fused.apply(unit, (value,), *sources)
    return result


class _Fused(torch.autograd.Function):
    """The autograd function of a value that a kernel computed."""

    @staticmethod
    def forward(ctx: Any, unit: FusedUnit, value: tuple[torch.Tensor], *sources: torch.Tensor) -> torch.Tensor:
        """Save the sources that gradients depend on."""
        ctx.unit = unit
        ctx.save_for_backward(*(source for source, is_kept in zip(sources, unit.kept, strict=True) if is_kept))
        ctx.others = [
            None if is_kept else (source.shape, source.dtype, source.device)
            for source, is_kept in zip(sources, unit.kept, strict=True)
        ]
        types = dict.fromkeys(source.device.type for source in sources)
        # The backward pass runs outside of autocast.
        ctx.casts = [(kind, torch.get_autocast_dtype(kind)) for kind in types if torch.is_autocast_enabled(kind)]
        return value[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Compute the gradients, by the kernel if possible."""
        unit, (gradient,) = ctx.unit, gradients
        kept = iter(ctx.saved_tensors)
        sources = [next(kept) if other is None else _like(*other) for other in ctx.others]
        wanted = tuple(number for number, is_wanted in enumerate(ctx.needs_input_grad[2:]) if is_wanted)
        with ExitStack() as stack:
            for kind, dtype in ctx.casts:
                stack.enter_context(torch.autocast(kind, dtype))
            found = _gradients(unit, wanted, gradient, sources)
        by_number = dict(zip(wanted, found, strict=True))
        return (None, None, *map(by_number.get, range(len(sources))))


def _gradients(
    unit: FusedUnit, wanted: tuple[int, ...], gradient: torch.Tensor, sources: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    if not torch.is_grad_enabled() and not is_watched() and unit.can_run_kernel((gradient, *sources)):
        kernels = unit.kernels(sources)
        given = [source.detach() if source.requires_grad else source for source in sources]
        found = None if kernels is None else kernels.gradients(wanted, gradient, given)
        if found is not None:
            return found
    return gradients_by_operations(unit, wanted, gradient, sources)


def gradients_by_operations(
    unit: FusedUnit, wanted: tuple[int, ...], gradient: torch.Tensor, sources: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """Compute the gradients of some sources by the operations; differentiable if gradients are on."""
    again, given = torch.is_grad_enabled(), list(sources)
    with torch.enable_grad():
        for number in wanted:
            source = sources[number]
            # One source may be computed from another; a view cuts that connection, which isn't part of the unit.
            given[number] = source.view_as(source) if source.requires_grad else source.detach().requires_grad_()
        value = unit.plain(*given)
    return torch.autograd.grad(
        value, [given[number] for number in wanted], gradient, create_graph=again, allow_unused=True
    )


def _like(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A stand-in for a source whose values no gradient depends on."""
    with torch.enable_grad():
        has_gradient = dtype.is_floating_point or dtype.is_complex
        return torch.zeros((), dtype=dtype, device=device, requires_grad=has_gradient).expand(shape)


def _kept_for_gradients(graph: fx.Graph) -> Iterator[bool]:
    """For each input, whether gradients depend on its values; they don't for inputs that are only added."""
    needed: dict[fx.Node, bool] = {}
    for node in reversed(graph.nodes):
        users = (user for user in node.users if user.op != "output")
        needed[node] = any(needed[user] or not is_linear(user) for user in users)
    return (needed[node] for node in graph.nodes if node.op == "placeholder")


_numbers = itertools.count()
# Keyed by the source code and the objects that it names.
_known_functions: weakref.WeakValueDictionary[Any, Callable[..., Any]] = weakref.WeakValueDictionary()


def compile_graph(graph: fx.Graph, title: str) -> Callable[..., Any]:
    """The function `f(owner, *tensors) -> list of leaves` of a graph; equal graphs share one function.

    torch.compile identifies functions by their code, so code compiled for one of several equal modules serves the
    others too. Tracebacks show the lines of the graph, under the title of the first graph.
    """
    code = graph.python_code("self")
    key = code.src, tuple((name, id(value)) for name, value in code.globals.items())
    known = _known_functions.get(key)
    if known is not None:
        return known
    name = f"<graph of {title} {next(_numbers)}>"
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
    namespace = dict(code.globals)
    exec(compile(code.src, name, "exec"), namespace)
    function: Callable[..., Any] = namespace["forward"]
    weakref.finalize(function, linecache.cache.pop, name, None)
    # The function keeps the objects alive, so the ids in the key stay valid.
    _known_functions[key] = function
    return function


# The allowed error of a kernel: `_TIMES` times the largest error of its operations, plus `_ROUNDINGS` roundings of the
# value.
_TIMES, _ROUNDINGS = 4, 16


class KernelTrial:
    """Runs the kernel of each unit once, at its first call in the context; the operations compute all results.

    Args:
        training: whether to run with gradients and check the gradient kernels too.
        timed: whether to time the kernels as well, and refuse those that aren't faster than their operations.
    """

    def __init__(self, *, training: bool = False, timed: bool = False) -> None:
        self.training = training
        self.timed = timed
        self.units: dict[Any, FusedUnit] = {}  # the units that were called, by place
        # The kernels that must not be used, by place of the unit, each with the reason as a clause
        self.refused: dict[Any, str] = {}
        self._tried: set[Any] = set()
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        if self.training:
            self._entered.enter_context(torch.enable_grad())
        FusedUnit.trial = self._run
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        FusedUnit.trial = None
        self._entered.close()

    def _run(self, unit: FusedUnit, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        self.units.setdefault(unit.place, unit)
        value = unit.plain(*sources)
        if unit.place not in self._tried and unit.can_run_kernel(sources):
            self._tried.add(unit.place)
            if self.timed and not _is_large(sources):
                fewest = f"{_FEWEST_ELEMENTS:,} elements aren't used, and the example inputs have fewer"
                self.refused[unit.place] = f"it wouldn't pay: on a CPU, kernels of fewer than {fewest}"
                return value
            try:
                reason = self._why_wrong(unit, sources, value.detach())
                if reason is None and value.requires_grad:
                    reason = _why_gradients_wrong(unit, sources, value.detach())
                if reason is None and self.timed:
                    reason = _why_slow(unit, sources)
            except Exception:  # noqa: BLE001 - a kernel that raises here would raise in a call too
                reason = "its kernel raises on the example values"
            if reason is not None:
                self.refused[unit.place] = reason
        return value

    def _why_wrong(self, unit: FusedUnit, sources: Sequence[torch.Tensor], value: torch.Tensor) -> str | None:
        kernels = unit.kernels(sources)
        if kernels is None:
            return None
        with torch.no_grad():
            got = kernels.value([source.detach() for source in sources])
            exact = unit.plain(*map(_in_float64, sources))
        if got is None:
            return kernels.failure
        if (got.shape, got.dtype, got.device) != (value.shape, value.dtype, value.device):
            return (
                f"its kernel returns {got.dtype} of shape {tuple(got.shape)}, but its operations return "
                f"{value.dtype} of shape {tuple(value.shape)}"
            )
        reason = _why_apart(got, value, exact)
        return None if reason is None else f"its kernel {reason}"


def _why_gradients_wrong(unit: FusedUnit, sources: Sequence[torch.Tensor], value: torch.Tensor) -> str | None:
    """The reason why a gradient kernel is less accurate than the unit's operations; None if it isn't."""
    wanted = [number for number, source in enumerate(sources) if source.requires_grad]
    # Values of both signs, and not powers of two, which would make products exact.
    gradient = torch.linspace(-1.3, 1.7, value.numel(), device=value.device).to(value.dtype).reshape(value.shape)

    def gradients_of(run: Callable[..., torch.Tensor], given: Sequence[torch.Tensor]) -> Sequence[Any]:
        leaves = [each.detach().requires_grad_(number in wanted) for number, each in enumerate(given)]
        return torch.autograd.grad(run(*leaves), [leaves[number] for number in wanted], gradient, allow_unused=True)

    got = gradients_of(lambda *leaves: differentiated(unit, value, leaves), sources)
    own = gradients_of(unit.plain, sources)
    # Elementwise gradients: that of a broadcast source is a sum, whose rounding error depends on the size of its terms.
    wide = [
        _in_float64(source).expand(value.shape) if number in wanted else _in_float64(source)
        for number, source in enumerate(sources)
    ]
    parts = gradients_of(unit.plain, wide)
    for number, found, expected, part in zip(wanted, got, own, parts, strict=True):
        if expected is None or part is None:
            # A source that the value doesn't depend on has no gradient, or zeros.
            if found is not None and found.count_nonzero():
                return f"its kernel returns a gradient for input {number}, on which no output depends"
            continue
        if found is None:
            return f"its kernel returns no gradient for input {number}"
        shape = sources[number].shape
        reason = _why_apart(found, expected, part.sum_to_size(shape), part.abs().sum_to_size(shape))
        if reason is not None:
            return f"the kernel of its gradients {reason}"
    return None


# The fuser of TorchScript generates a kernel in the third call at the latest.
_WARMING_CALLS = 3
_MOST_ROUNDS, _SECONDS_OF_ROUNDS = 5, 0.1


def _why_slow(unit: FusedUnit, sources: Sequence[torch.Tensor]) -> str | None:
    """The reason why a call of the unit, with its gradients if they are on, is no faster than its operations."""
    wanted = [number for number, source in enumerate(sources) if source.requires_grad]
    leaves = [source.detach().requires_grad_(source.requires_grad) for source in sources]

    def step(run: Callable[..., torch.Tensor]) -> None:
        value = run(*leaves)
        if value.requires_grad:
            given = [leaves[number] for number in wanted]
            torch.autograd.grad(value, given, torch.ones_like(value), allow_unused=True)

    kernel, operations = _shortest([lambda: step(lambda *given: unit.by_kernel(given)), lambda: step(unit.plain)])
    if kernel < operations:
        return None
    took = f"its kernel takes {1e6 * kernel:.0f} µs, and its operations {1e6 * operations:.0f} µs"
    return f"it wouldn't pay: on the example inputs, {took}"


def _shortest(runs: Sequence[Callable[[], None]]) -> list[float]:
    """The seconds of one call of each, the shortest of some rounds."""

    def seconds_of(run: Callable[[], None], times: int) -> float:
        started = _now()
        for _ in range(times):
            run()
        return (_now() - started) / times

    for run in runs:
        for _ in range(_WARMING_CALLS):
            run()
    # Several calls at once, so that the GPU may run one while the next is prepared, as in a model.
    times = max(1, min(10, int(2e-3 / max(*(seconds_of(run, 1) for run in runs), 1e-6))))
    found, until = [math.inf] * len(runs), _now() + _SECONDS_OF_ROUNDS
    for _ in range(_MOST_ROUNDS):
        found = [min(known, seconds_of(run, times)) for known, run in zip(found, runs, strict=True)]
        if _now() > until:
            break
    return found


def _now() -> float:
    """The seconds of a clock, once the GPU has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _why_apart(
    got: torch.Tensor, value: torch.Tensor, exact: torch.Tensor, size: torch.Tensor | None = None
) -> str | None:
    """The reason why `got` is less accurate than `value`, given the exact result; None if it isn't.

    Args:
        got, value, exact: the results of the kernel, of the operations, and of the operations in float64.
        size: the magnitudes that rounding errors are relative to, if not those of `exact`; for a sum, those of its
            terms.
    """
    size = exact if size is None else size
    eps = torch.finfo(value.dtype).eps if value.dtype.is_floating_point else 0.0
    got, value, exact = got.double(), value.double(), exact.double()
    same = torch.isclose(got, value, rtol=0, atol=0, equal_nan=True)
    # A value that overflows in between, but is finite in float64, may have either result.
    open_to = ~value.isfinite() & exact.isfinite()
    off, may_be = (got - exact).abs(), (value - exact).abs()
    noise = float(may_be[may_be.isfinite()].max()) if may_be.isfinite().any() else 0.0
    near = off <= _TIMES * noise + _ROUNDINGS * eps * size.double().abs()
    wrong = ~(same | open_to | (near & value.isfinite()))
    if not wrong.any():
        return None
    apart = float(off[wrong].nan_to_num(posinf=torch.inf, nan=torch.inf).max())
    return (
        f"computes something different from its operations in {int(wrong.sum())} of {wrong.numel()} values: off by "
        f"up to {apart:.1e}, where the operations are off by {noise:.1e}"
    )


def _in_float64(source: torch.Tensor) -> torch.Tensor:
    return source.double() if source.is_floating_point() else source
