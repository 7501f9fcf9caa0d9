"""Compare a value with its expected value, and describe the first divergence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from exporters.steps import Place
from optimizer.parity import FACTOR, all_finite, distance, floors, in_units_of, is_exact, special, wide


@dataclass(frozen=True)
class Divergence:
    """The first operation whose result differs from the original's.

    Attributes:
        module, call, line, operation: its place in the model, as in `exporters.steps.Place`.
        error, noise: the largest error, and the rounding noise there; 0 if `problem` isn't about the size of an error.
        problem: a description of the error.
        where: the call that shows it: "batch size 3, draw 1".
        value: the name of the wrong value in the file; "" for the output of a module.
        also: other places that may be at fault instead, in the order of the model. The file has no values between them.
    """

    module: str
    call: int
    line: str
    operation: str
    error: float
    noise: float
    problem: str
    where: str
    value: str
    also: tuple[Place, ...] = ()

    @property
    def place(self) -> Place:
        return Place(self.module, self.call, self.line, self.operation)

    def __str__(self) -> str:
        return f"first differs at {self.place}: {self.problem}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "also": [asdict(place) for place in self.also]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Divergence:
        return cls(**{**data, "also": tuple(Place(**place) for place in data["also"])})


@dataclass(frozen=True)
class Off:
    """The error of a value.

    Attributes:
        error: the largest absolute error; 0 if `problem` isn't about the size of an error.
        noise: the largest rounding noise; 0 in the same case.
        ratio: the error in units of the noise, for the maximum or the root mean square, whichever is larger.
        problem: a description of the error; "" if the value is right.
    """

    error: float = 0.0
    noise: float = 0.0
    ratio: float = 0.0
    problem: str = ""


def how_far_off(value: torch.Tensor, own: torch.Tensor, truth: torch.Tensor, off: torch.Tensor) -> Off:
    """Compare a value with its expected value.

    All tensors are on the CPU. `own`, `truth` and `off` have the same shape.

    Args:
        value: the value to judge.
        own: the value in the original.
        truth: the same, computed in float64.
        off: the same, computed from inputs and weights that are off by one ulp.
    """
    if problem := _another_kind(own, value):
        return Off(problem=problem)
    if is_exact(own):
        wrong = int(((own != value) & (own == truth) & (own == off)).sum())
        return Off(problem=f"{wrong} of {own.numel()} elements differ" if wrong else "")
    plain = torch.ones(own.shape, dtype=torch.bool)
    if not all_finite(own, value, truth, off):
        odd = special(own)
        other = (odd != special(value)) & (odd == special(truth)) & (odd == special(off))
        if count := int(other.sum()):
            return Off(problem=f"NaN or inf in {count} other places")
        plain = (odd == 0) & (special(value) == 0) & (special(truth) == 0) & (special(off) == 0)
    if not bool(plain.any()):
        return Off()
    right = wide(own)[plain]
    error, *noises = (distance(a, b)[plain] for a, b in ((value, truth), (own, truth), (off, own)))
    least, least_rms = floors(own.dtype, float(right.abs().max()), _rms(right.abs()))
    noise = max(least, *(float(figures.max()) for figures in noises))
    noise_rms = max(least_rms, *map(_rms, noises))
    largest = float(error.max())
    ratio = max(in_units_of(noise, largest), in_units_of(noise_rms, _rms(error)))
    problem = f"off by {largest:.2e}, {ratio:.3g} times its rounding noise" if ratio > FACTOR else ""
    return Off(largest, noise, ratio, problem)


def _another_kind(own: torch.Tensor, value: torch.Tensor) -> str:
    if own.shape != value.shape:
        return f"its shape is {list(value.shape)} in place of {list(own.shape)}"
    return (
        f"its dtype is {value.dtype} in place of {own.dtype}".replace("torch.", "") if own.dtype != value.dtype else ""
    )


def _rms(figures: torch.Tensor) -> float:
    return float(figures.square().mean().sqrt())
