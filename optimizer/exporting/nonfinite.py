"""Whether a way to run a file keeps NaN and infinity: it must give them for the inputs for which the original does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from optimize_export.runtime import Runner
from optimizer.exporting.measuring import MeasuredExport
from optimizer.model import Call, keeps_values
from optimizer.parity import outputs_on

_VALUES = {"NaN": math.nan, "infinity": math.inf}


class NonFinite:
    """The original's outputs for the example inputs with NaN or infinity in them, computed at the first comparison.

    Args:
        measured: the original.
        inputs: the flat inputs of the example call, on the device of the files.
    """

    def __init__(self, measured: MeasuredExport, inputs: Sequence[torch.Tensor]) -> None:
        self._measured = measured
        self._inputs = inputs

    def lost_by(self, runner: Runner) -> str | None:
        """How a runner differs from the original, as a clause; None if it has NaN or infinity at the same elements."""
        for word, tensors, originals in self._calls:
            outputs = runner(*tensors)
            for name, value, target in zip(self._measured.adapter.output_names, outputs, originals, strict=True):
                # The order of NaN isn't defined: a label, or the number of detections, says nothing.
                if not target.is_floating_point() or value.shape != target.shape:
                    continue
                finite, should_be = value.cpu().isfinite(), target.isfinite()
                for mine, theirs, wrong in (
                    ("finite numbers", "NaN or infinity", finite & ~should_be),
                    ("NaN or infinity", "finite numbers", ~finite & should_be),
                ):
                    if count := int(wrong.count_nonzero()):
                        return (
                            f"with {word} in an input, it gives {mine} where the original gives {theirs} "
                            f"({count} of {target.numel()} elements of {name})"
                        )
        return None

    @cached_property
    def _calls(self) -> list[tuple[str, tuple[torch.Tensor, ...], list[torch.Tensor]]]:
        """The kind of value, the inputs and the original's outputs of each call."""
        reference, found = self._measured.reference, []
        # Masks and the like are left out: nobody puts NaN there.
        floats = [
            number
            for number, each in enumerate(self._inputs)
            if each.is_floating_point() and each.numel() and not keeps_values(each)
        ]
        for word, value in _VALUES.items() if floats else ():
            tensors = tuple(each.clone() for each in self._inputs)
            for order, number in enumerate(floats):
                _put(value, tensors[number], order, len(floats))
            there = [each.to(reference.original.device) for each in tensors]
            outputs = outputs_on(reference, Call(*self._measured.adapter.call_arguments(there)))
            # It may refuse such inputs.
            if outputs is not None:
                found.append((word, tensors, list(outputs.values())))
        return found


def _put(value: float, tensor: torch.Tensor, order: int, count: int) -> None:
    """Write a value into the middle of some rows of an input; of several inputs, each has rows of its own if it can."""
    rows = tensor if tensor.dim() > 1 else tensor.reshape(1, -1)
    step = min(len(rows), count)
    middle: tuple[Any, ...] = tuple(size // 2 for size in rows.shape[1:])
    rows[slice(order % step, None, step), *middle] = value
