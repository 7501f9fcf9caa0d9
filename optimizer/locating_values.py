"""Where a file first computes something else, where it isn't known which of its values is which: they are told by what they are.

The file is run once, giving all its values, and the module that it was made from beside it. What a module gives is somewhere
among the values, whatever the file calls it, as it is or with the same numbers in another shape; a module that gives what
stands nowhere is wrong in the file, or was merged with the one behind it. Which of the two is decided as for modules: what
reads its output is right again where it was merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from exporters.steps import FileValues, Seen
from optimizer.divergence import Divergence, Off
from optimizer.inputs import Call
from optimizer.locating_modules import FourRuns, ModuleCall, divergence_at, first_wrong_call, line_in, watched_calls
from optimizer.parity import Reference, distance, is_exact, wide

ROOT = ("", 1)

_PARTS = 64


def first_module_without_value(
    reference: Reference,
    exported: nn.Module,
    values: FileValues,
    flatten: Callable[[Call], Sequence[torch.Tensor]],
    wheres: Sequence[str],
) -> Divergence | None:
    """The first module that gives what the file has nowhere, at the first of the calls that shows one.

    Args:
        exported: the module that the file was made from.
        values: the file, ready to give all its values.
        flatten: gives the file's inputs at a call.
    """
    calls = dict(reference.calls())
    for where in wheres:
        given = flatten(calls[where])
        seen = values.run(given)
        runs = reference.of(exported, where).reruns(where, exported)
        own, truth, off = (watched_calls(runs.original, run) for run in (runs.own, runs.in_float64, runs.perturbed))
        four = _BesideFile(own, truth, off, _Found(seen, given, values.outputs).calls(own), stopped=bool(seen.error))
        key = first_wrong_call(ROOT, four)
        worst = None if key is None else four.worst(key, "outputs")
        if key is not None and worst is not None:
            found = divergence_at(own[key], worst, exported, where)
            return replace(found, line=line_in(reference.target, key, reference, where) or found.line)
    return None


class _Found:
    """The values of a file, to be found by what they are."""

    def __init__(self, seen: Seen, given: Sequence[torch.Tensor], outputs: Sequence[str]) -> None:
        self._outputs = [seen.values[name] for name in outputs if name in seen.values]
        self._alike: dict[tuple[torch.dtype, int], Alike] = {}
        for value in (*seen.values.values(), *(tensor.detach().cpu() for tensor in given)):
            self._alike.setdefault((value.dtype, value.numel()), Alike()).add(value)

    def calls(self, own: Mapping[tuple[str, int], ModuleCall]) -> dict[tuple[str, int], ModuleCall]:
        """The calls as they are in the file, without those of which it has nothing alike."""
        found = {}
        for key, call in own.items():
            inputs, outputs = ([self._nearest(tensor) for tensor in side] for side in (call.inputs, call.outputs))
            if key == ROOT and len(self._outputs) == len(call.outputs):
                outputs = list(self._outputs)
            given = [tensor for tensor in outputs if tensor is not None]
            if len(given) == len(outputs):
                # Nothing alike is no proof of anything, nor are indices: constants of the file aren't among its values.
                pairs = zip(inputs, call.inputs, strict=True)
                known = [mine if one is None or is_exact(mine) else one for one, mine in pairs]
                found[key] = replace(call, inputs=known, outputs=given)
        return found

    def _nearest(self, tensor: torch.Tensor) -> torch.Tensor | None:
        alike = self._alike.get((tensor.dtype, tensor.numel()))
        return None if alike is None else alike.nearest(tensor)


class Alike:
    """Values of one dtype and number of elements.

    A large model has hundreds, and as many modules whose outputs are looked for among them. No two tensors are nearer to
    each other than the sums over their parts are: by these few numbers nearly all values are left out.
    """

    def __init__(self) -> None:
        self._values: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []

    def add(self, value: torch.Tensor) -> None:
        self._values.append(value)
        self._sums.append(_sums(value))

    def nearest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value that is nearest to a tensor, in its shape."""
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
    """Attributes:
    stopped: whether the file raised: what it doesn't have it didn't come to.
    """

    stopped: bool = False

    def worst(self, key: tuple[str, int], side: str) -> Off | None:
        found = super().worst(key, side)
        if not self.stopped or side == "inputs" or key not in self.own or (found is not None and not found.problem):
            return found
        return Off(problem="the file raises there")
