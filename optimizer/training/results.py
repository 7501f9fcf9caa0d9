"""The data of a tuned training step: what was measured and proven, and what is recommended. JSON both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from optimize_export.errors import printable_lines
from optimizer.parity import from_json, to_json
from optimizer.training import showing
from optimizer.training.setup import Setup
from optimizer.tuning import Latency, Ratio

ORIGINAL = "original"
BIT_IDENTICAL = "bit-identical"
WITHIN_ROUNDING = "within rounding"
DECLARED = "declared difference"
REFUSED = "refused"
NOT_PROVEN = "not proven"
STANDINGS = (ORIGINAL, BIT_IDENTICAL, WITHIN_ROUNDING, DECLARED, REFUSED, NOT_PROVEN)


@dataclass(frozen=True)
class Candidate:
    """One way to run the step: a row of the table."""

    name: str
    """The name in the table, such as "bf16 autocast"."""
    setup: Setup = field(default_factory=Setup)
    latency: Latency | None = None
    """Seconds of one optimizer step; None if it wasn't timed."""
    speedup: Ratio | None = None
    """How many times as fast a step is as the step as it is, paired by rounds; at other batch sizes, the rows a second
    are compared. None if it wasn't timed."""
    samples: float | None = None
    """Rows a second; None if it wasn't timed, or the batch has no rows."""
    peak: int | None = None
    """Bytes at the peak of a step beyond parameters, buffers, their gradients and the optimizer's state. On a GPU the
    allocator's, for compiled steps on a CPU those of the process; None if not measured."""
    standing: str = NOT_PROVEN
    """Either "original", "bit-identical", "within rounding", "declared difference", "refused", or "not proven" for a
    candidate that wasn't compared because it isn't faster or wasn't tried; the note says which."""
    differences: Mapping[str, float] = field(default_factory=dict)
    """Only the figures that were measured: "loss_error" and "gradient_error" are the largest errors against float64, in
    units of the largest magnitude; "loss_noise" and "gradient_noise" the same of the original's rounding; "loss_times"
    and "gradient_times" the errors as multiples of the noise (4 are allowed); "gradient_cosine" between the gradients
    and those in float64; "update_error", "update_noise" and "update_times" are of the optimizer's update. With `steps`,
    "loss_change" is the relative difference of the loss after that many steps, the mean over seeds, and "loss_spread"
    its spread over the original's seeds."""
    taken: bool = False
    """Whether it is part of the recommended combination."""
    note: str = ""
    """One sentence: why it is refused, not measured, or not taken."""


@dataclass(frozen=True)
class TrainingTuning:
    """All measured ways to run a training step, and the recommended one.

    The first candidate is the step as it is. If anything is recommended, the last one is the recommended combination.
    """

    model: str
    """The class of the model."""
    device: str
    """"cpu", or the name of the GPU."""
    batch: int
    """The rows of the batch that was given; 0 if it has none."""
    threads: int
    """The number of torch's threads."""
    rounds: int
    """The rounds of the last timing, in each of which the candidates ran in turn."""
    seconds: float
    """The time of the whole call."""
    candidates: tuple[Candidate, ...]
    recommended: Setup
    notes: tuple[str, ...] = ()
    """Sentences about the measurement."""
    optimizer: str = "AdamW"
    """The class of the optimizer."""
    loss: str = ""
    """Where the loss is in what the step returns, as Python after the call, such as '["loss"]'; "" for the loss itself."""
    example: tuple[str, ...] = ("example_inputs",)
    """The arguments of `optimize` that have a call of the model: "example_inputs", "example_kwargs" or both."""
    blocks: tuple[str, ...] = ()
    """The paths of the blocks that the recommended setup compiles."""

    @property
    def code(self) -> str:
        """The recommended training loop as Python to paste."""
        return showing.code_of(self, "cpu" if self.device == "cpu" else "cuda")

    def __str__(self) -> str:
        return printable_lines("\n".join(showing.lines(self)))

    def _repr_html_(self) -> str:
        return showing.to_html(self)

    def to_toml(self) -> str:
        """The recommended choices, for `optimize(model, choices=…, mode="training")`."""
        return showing.to_toml(self)

    def save(self, path: str | Path) -> None:
        """Write report.html, training.toml and training.json into a new folder, in one step.

        A path that ends with .html, .toml or .json is one new file.

        Raises:
            UsageError: there is something at the path already.
            BundleError: the folder can't be written.
        """
        showing.save(self, path)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The tuning that `to_json` wrote, before or after a round trip through a JSON file."""
        return from_json(cls, data)
