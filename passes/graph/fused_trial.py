"""What the kernels of fused units compute beside the operations that they were made of."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch

from passes.graph.fused import FusedUnit

# What a kernel may be off by: so many times what its operations are off by, and so many roundings of its value.
_TIMES, _ROUNDINGS = 4, 16


class KernelTrial:
    """Runs the kernel of each unit once, at its first call inside, whatever its size; the operations answer all calls.

    Args:
        units: those that are tried.

    Attributes:
        wrong: by the number of the unit, the clause why its kernel is wrong, of those that are.
        tried: the numbers of the units that were called.
    """

    def __init__(self, units: Sequence[FusedUnit]) -> None:
        self.units = units
        self.tried: set[int] = set()
        self.wrong: dict[int, str] = {}
        self._numbers = {id(unit): number for number, unit in enumerate(units)}

    def __enter__(self) -> Self:
        for unit in self.units:
            unit.trial = self._run
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for unit in self.units:
            unit.trial = None

    def _run(self, unit: FusedUnit, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        value = unit.plain(*sources)
        number = self._numbers[id(unit)]
        if number not in self.tried and unit.can_run_kernel(sources):
            self.tried.add(number)
            reason = self._why_wrong(unit, sources, value)
            if reason is not None:
                self.wrong[number] = reason
        return value

    def _why_wrong(self, unit: FusedUnit, sources: Sequence[torch.Tensor], value: torch.Tensor) -> str | None:
        kernels = unit.kernels(sources)
        if kernels is None:
            return None
        got = kernels.value(sources)
        if got is None:
            return kernels.failure
        if (got.shape, got.dtype, got.device) != (value.shape, value.dtype, value.device):
            return (
                f"its kernel gives {got.dtype} of shape {tuple(got.shape)} where its operations give {value.dtype} of shape"
                f" {tuple(value.shape)}"
            )
        return _why_apart(got, value, unit.plain(*map(_in_float64, sources)))


def _why_apart(got: torch.Tensor, value: torch.Tensor, exact: torch.Tensor) -> str | None:
    """Why a value isn't as good as another one, by what both should be; None where it is."""
    eps = torch.finfo(value.dtype).eps if value.dtype.is_floating_point else 0.0
    got, value, exact = got.double(), value.double(), exact.double()
    same = torch.isclose(got, value, rtol=0, atol=0, equal_nan=True)
    # What overflows in between, and not where it is computed exactly, may be either.
    open_to = ~value.isfinite() & exact.isfinite()
    off, may_be = (got - exact).abs(), (value - exact).abs()
    noise = float(may_be[may_be.isfinite()].max()) if may_be.isfinite().any() else 0.0
    near = off <= _TIMES * noise + _ROUNDINGS * eps * exact.abs()
    wrong = ~(same | open_to | (near & value.isfinite()))
    if not wrong.any():
        return None
    apart = float(off[wrong].nan_to_num(posinf=torch.inf, nan=torch.inf).max())
    return (
        f"its kernel computes otherwise than its operations, {int(wrong.sum())} of {wrong.numel()} values: off by up to"
        f" {apart:.1e} where they are off by {noise:.1e}"
    )


def _in_float64(source: torch.Tensor) -> torch.Tensor:
    return source.double() if source.is_floating_point() else source
