"""Check the kernels of fused units against the operations that they replace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from passes.fusion.fused import FusedUnit, differentiated

# The allowed error of a kernel: `_TIMES` times the largest error of its operations, plus `_ROUNDINGS` roundings of the
# value.
_TIMES, _ROUNDINGS = 4, 16


class KernelTrial:
    """Runs the kernel of each unit once, at its first call in the context; the operations compute all results.

    Args:
        training: whether to run with gradients and check the gradient kernels too.

    Attributes:
        units: the units that were called, by place.
        wrong: the wrong kernels, by place of the unit, each with the reason as a clause.
    """

    def __init__(self, *, training: bool = False) -> None:
        self.training = training
        self.units: dict[Any, FusedUnit] = {}
        self.wrong: dict[Any, str] = {}
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
            try:
                reason = self._why_wrong(unit, sources, value.detach())
                if reason is None and value.requires_grad:
                    reason = _why_gradients_wrong(unit, sources, value.detach())
            except Exception:  # noqa: BLE001 - a kernel that raises here would raise in a call too
                reason = "its kernel raises on the example values"
            if reason is not None:
                self.wrong[unit.place] = reason
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
