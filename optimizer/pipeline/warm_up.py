"""Capture the graphs of a result before its first real call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from optimize_export.errors import UsageError
from optimizer.model import Call, Samples
from optimizer.pipeline.copy_runs import fresh
from passes.base import device_of

# The bytes of example inputs that a result keeps.
_LARGEST_KEPT = 64 * 2**20
_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": torch.enable_grad,
}


class WarmUp:
    """The `warm_up` of a result: call it in a new process, or on a new device, before requests arrive.

    The first call captures the forward again after unpickling, which takes seconds. A batch of one row, `no_grad` and
    `inference_mode` each need a capture of their own; all batch sizes above 1 share one.

    Args:
        owner: the result.
        samples: the example inputs of `optimize`; None if there were none.
    """

    def __init__(self, owner: nn.Module, samples: Samples | None) -> None:
        self.owner = owner
        self.samples = None if samples is None or _bytes_of(samples.given) > _LARGEST_KEPT else samples.as_given()

    def __call__(self, batch_sizes: Sequence[int] | None = None, modes: Sequence[str] = ("no_grad",)) -> None:
        """Call the result on its example inputs, at each batch size and in each mode.

        The calls count for a forward that keeps state between calls.

        Args:
            batch_sizes: None for the batch size of the example inputs.
            modes: "no_grad", "inference_mode" or "grad".

        Raises:
            UsageError: there is no such mode, the example inputs have no batch dim or none of this size can be made, or
                the result has no example inputs, as they took more than 64 MiB or weren't given.
        """
        if unknown := [mode for mode in modes if mode not in _MODES]:
            raise UsageError(f"warm_up has no mode {unknown[0]!r}; the modes are: {', '.join(_MODES)}.")
        if self.samples is None:
            raise UsageError(
                "warm_up() needs the example inputs, and this result has none: optimize() got none, or they take more "
                "than 64 MiB. Call the result once on inputs of your own instead."
            )
        samples = self.samples.to(device_of(self.owner))
        sizes: Sequence[int | None] = batch_sizes or [samples.batch_size]
        calls = [samples.at(size) for size in sizes]
        for mode in modes:
            for call in calls:
                given = fresh(call)
                with _MODES[mode]():
                    self.owner(*given.args, **given.kwargs)
                    if mode == "inference_mode":
                        # Inputs that are made in inference mode need another capture than those from outside.
                        made = fresh(call)
                        self.owner(*made.args, **made.kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> WarmUp:
        twin = copy.copy(self)
        twin.owner = copy.deepcopy(self.owner, memo)
        return twin


def _bytes_of(call: Call) -> int:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))
