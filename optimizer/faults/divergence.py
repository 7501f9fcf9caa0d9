"""The place at which a result first diverges from the original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from exporters.places import Place
from optimizer.parity import FACTOR, OutputParity


@dataclass(frozen=True)
class Divergence:
    """The first value that differs from the original's.

    Attributes:
        module, call, line, operation: its place in the model, as in `exporters.places.Place`.
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

    @classmethod
    def at(
        cls, place: Place, wrong: OutputParity | str, where: str, value: str = "", also: tuple[Place, ...] = ()
    ) -> Divergence:
        """The divergence at a place.

        Args:
            wrong: the judgement of the wrong value, or what happened instead of a value: "raises".
        """
        error = noise = 0.0
        if isinstance(wrong, str):
            problem = f"{wrong} at {where}"
        elif wrong.ratio > FACTOR:
            error, noise = wrong.max_error, wrong.noise
            problem = f"off by {error:.2e}, {wrong.ratio:.3g} times its rounding noise at {where}"
        else:
            problem = str(wrong.problem).removeprefix("it: ")
        return cls(**asdict(place), error=error, noise=noise, problem=problem, where=where, value=value, also=also)
