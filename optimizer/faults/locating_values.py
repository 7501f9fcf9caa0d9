"""Find where a file first diverges if its values can't be matched by name: they are matched by content.

The file runs once and returns all its intermediate values. The module that it was made from runs too. The output of
each submodule is searched among the file's values, under any name and in any shape. If a submodule's output isn't
found, the submodule is wrong in the file, or was merged with the next one. As in `locating_modules`, it was merged if a
call that reads its output is right again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from exporters.steps import FileValues, Seen
from optimizer.faults.divergence import Divergence, Off
from optimizer.faults.locating_modules import (
    FourRuns,
    ModuleCall,
    divergence_at,
    first_wrong_call,
    line_in,
    watched_calls,
)
from optimizer.model import Call
from optimizer.parity import Reference, distance, is_exact, reference_of, reruns, wide

ROOT = ("", 1)

_PARTS = 64


def first_module_without_value(
    reference: Reference,
    exported: nn.Module,
    values: FileValues,
    flatten: Callable[[Call], Sequence[torch.Tensor]],
    wheres: Sequence[str],
) -> Divergence | None:
    """Find the first module whose output isn't among the file's values, at the first of the calls that shows one.

    Args:
        exported: the module that the file was made from.
        values: returns all values of the file.
        flatten: returns the file's inputs for a call.
        wheres: the calls of the reference to search, by their names there.
    """
    calls = dict(reference.calls())
    for where in wheres:
        given = flatten(calls[where])
        seen = values.run(given)
        runs = reruns(reference_of(exported, reference, where), where, exported)
        own, truth, off = (watched_calls(runs.original, run) for run in (runs.own, runs.in_float64, runs.perturbed))
        four = _BesideFile(own, truth, off, _Found(seen, given, values.outputs).calls(own), stopped=bool(seen.error))
        key = first_wrong_call(ROOT, four)
        worst = None if key is None else four.worst(key, "outputs")
        if key is not None and worst is not None:
            found = divergence_at(own[key], worst, exported, where)
            return replace(found, line=line_in(reference.target, key, reference, where) or found.line)
    return None


class _Found:
    """The values of a file, searched by content."""

    def __init__(self, seen: Seen, given: Sequence[torch.Tensor], outputs: Sequence[str]) -> None:
        self._outputs = [seen.values[name] for name in outputs if name in seen.values]
        self._alike: dict[tuple[torch.dtype, int], Alike] = {}
        for value in (*seen.values.values(), *(tensor.detach().cpu() for tensor in given)):
            self._alike.setdefault((value.dtype, value.numel()), Alike()).add(value)

    def calls(self, own: Mapping[tuple[str, int], ModuleCall]) -> dict[tuple[str, int], ModuleCall]:
        """The calls with the nearest values of the file as their inputs and outputs.

        A call is left out if the file has no value with the dtype and number of elements of one of its outputs.
        """
        found = {}
        for key, call in own.items():
            inputs, outputs = ([self._nearest(tensor) for tensor in side] for side in (call.inputs, call.outputs))
            if key == ROOT and len(self._outputs) == len(call.outputs):
                outputs = list(self._outputs)
            given = [tensor for tensor in outputs if tensor is not None]
            if len(given) == len(outputs):
                # The file's constants aren't among its values. So an input without a similar value proves nothing, and
                # neither does an integer input, such as indices: count both as right.
                pairs = zip(inputs, call.inputs, strict=True)
                known = [mine if one is None or is_exact(mine) else one for one, mine in pairs]
                found[key] = replace(call, inputs=known, outputs=given)
        return found

    def _nearest(self, tensor: torch.Tensor) -> torch.Tensor | None:
        alike = self._alike.get((tensor.dtype, tensor.numel()))
        return None if alike is None else alike.nearest(tensor)


class Alike:
    """Values with the same dtype and number of elements.

    A large model has hundreds of them, and searches the outputs of as many modules among them. The distance of two
    tensors (L1) is at least the distance of the sums over their parts, by the triangle inequality. So a few sums per
    tensor rule out nearly all values.
    """

    def __init__(self) -> None:
        self._values: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []

    def add(self, value: torch.Tensor) -> None:
        self._values.append(value)
        self._sums.append(_sums(value))

    def nearest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value nearest to a tensor, reshaped to the tensor's shape."""
        least = torch.nan_to_num((torch.stack(self._sums) - _sums(tensor)).abs().sum(1), nan=0.0)
        best, smallest = self._values[0], math.inf
        for index in least.argsort(stable=True).tolist():
            if least[index] > smallest:
                break
            apart = self._apart(self._values[index], tensor)
            if apart < smallest:
                best, smallest = self._values[index], apart
        return best.reshape(tensor.shape)

    def _apart(self, value: torch.Tensor, tensor: torch.Tensor) -> float:
        return float(torch.nan_to_num(distance(value.reshape(tensor.shape), tensor), nan=torch.inf).sum())


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """The sums over `_PARTS` parts of a tensor, in the order of its elements."""
    flat = wide(tensor).flatten()
    width = max(1, -(-len(flat) // _PARTS))
    return torch.nn.functional.pad(flat, (0, _PARTS * width - len(flat))).view(_PARTS, width).sum(1)


@dataclass(frozen=True)
class _BesideFile(FourRuns):
    """The original's runs compared with the values of a file.

    Attributes:
        stopped: whether the file raised. Then the outputs that it lacks were never computed.
    """

    stopped: bool = False

    def worst(self, key: tuple[str, int], side: str) -> Off | None:
        found = super().worst(key, side)
        if not self.stopped or side == "inputs" or key not in self.own or (found is not None and not found.problem):
            return found
        return Off(problem="the file raises there")
