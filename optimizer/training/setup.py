"""How a training step is run: the choices that `tune_training` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from optimizer.parity import from_json, to_json

AS_IT_IS = "as-is"
PRECISIONS = (AS_IT_IS, "tf32", "bf16", "fp16")
HALF = ("bf16", "fp16")
OPTIMIZERS = (AS_IT_IS, "foreach", "fused")
COMPILES = ("", "whole", "blocks")


@dataclass(frozen=True)
class Setup:
    """How a training step is run; the defaults are the step as it is."""

    precision: str = AS_IT_IS
    """Either "as-is"; "tf32" for products and convolutions on a GPU; "bf16" or "fp16" for autocast around the step, the
    latter with a GradScaler."""
    channels_last: bool = False
    """Whether the model's convolutions and the batch's images (4 dims) are in `torch.channels_last`."""
    passes: tuple[str, ...] = ()
    """Passes in the form of `optimize(…, mode="training")`, such as "insert-checkpoints:memory_budget=0.5"."""
    compile: str = ""
    """Either "whole" for `model.compile()`, "blocks" for `.compile()` of each repeated block, "" for neither."""
    compile_budget: float = 1.0
    """The share of what a compiled step saves for its backward pass that torch's compiler keeps; it recomputes the rest."""
    optimizer: str = AS_IT_IS
    """Either "foreach" or "fused", the argument of the optimizer that is True."""
    set_to_none: bool = True
    """The argument of `zero_grad`."""
    cudnn_benchmark: bool = False
    """Whether cuDNN tries its algorithms for each new shape."""
    workers: int | None = None
    """`num_workers` of the DataLoader; None: as it is."""
    pin_memory: bool = False
    """Whether the DataLoader pins its batches, which are then copied to the GPU with `non_blocking=True`."""
    batch_size: int | None = None
    """The rows of one optimizer step; None: as they are."""
    accumulate: int = 1
    """The number of parts in which the rows of one optimizer step go through the model."""

    def __or__(self, other: Setup) -> Setup:
        """This setup with the choices of another, where those differ from the defaults; the passes of both, in order."""
        default = Setup()
        chosen = {
            each.name: getattr(other, each.name)
            for each in fields(Setup)
            if getattr(other, each.name) != getattr(default, each.name)
        }
        if "passes" in chosen:
            chosen["passes"] = tuple(dict.fromkeys((*self.passes, *other.passes)))
        return replace(self, **chosen)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """A setup from what `to_json` wrote; missing fields have their defaults."""
        return from_json(cls, data)
