"""Find the first module that diverges from the original, for passes and for files whose values have no known names.

The inputs and outputs of all module calls are judged by the rule for a model's outputs. Modules are matched by path,
because both models have the same tree. A correct rewrite may change intermediate values. After conv–BN folding, the
output of the convolution differs, but the output of the following BatchNorm, which only passes the values on, doesn't.
So a call that differs isn't at fault if a call that reads its output is right again. Of the remaining calls, the first
one with right inputs is at fault, and the search continues inside it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from exporters.file_values import FileParts, FileValues
from exporters.places import Place, line_of_forward
from optimizer.faults.divergence import Divergence
from optimizer.faults.module_calls import (
    ROOT,
    Key,
    ModuleCall,
    Watch,
    copies_of,
    in_order_of_ending,
    tensors_in,
    watched_calls,
)
from optimizer.model import eager_only
from optimizer.parity import OutputParity, Reference, distance, is_exact, judged_values, reference_at

logger = logging.getLogger(__name__)

_Calls = Mapping[Key, ModuleCall]
_Name = tuple[Key, str, int, int]
"""The name of a value: the call, "inputs" or "outputs", the number of values on that side, and the index among them."""

# The values nearest to a module's output in a sample of this many elements are compared with the whole output.
_SAMPLE = 256
_NEAR = 4


def first_wrong_module(reference: Reference, candidate: nn.Module, where: str) -> Divergence | None:
    """Find the first module call of a candidate that diverges from the original's at one call of the reference."""
    if not isinstance(reference.target, nn.Module):
        return None
    own = watched_calls(reference, where, reference.target)
    got = _values_of(watched_calls(reference, where, candidate))
    verdicts = _Verdicts(reference, where, reference.target, own, got)
    return verdicts.divergence(verdicts.first_wrong())


def first_wrong_part(reference: Reference, exported: nn.Module, parts: FileParts, where: str) -> Divergence | None:
    """Find the first module of a file that diverges from the same module of the exported model.

    Each module of the file is called alone, on the input that the exported module gets. So an error before it has no
    effect. Only modules with one input tensor are called; an error elsewhere is reported for the innermost such module
    around it.
    """
    own = watched_calls(reference, where, exported)
    got: dict[_Name, torch.Tensor] = {}
    raised: dict[Key, str] = {}
    # A call ends before its caller ends, so inner modules come first.
    order = list(in_order_of_ending(own[ROOT]))
    for call in order:
        part = parts.part(*call.key, alone=call.alone) if len(call.inputs) == 1 else None
        if part is None:
            continue
        try:
            with torch.no_grad():
                outputs = copies_of(tensors_in(part(call.inputs[0].clone())))
        except Exception as error:  # the file is foreign code, and an exception in it is a divergence
            logger.debug("a part of the file raised", exc_info=True)
            raised[call.key] = f"raises {type(error).__name__}"
            continue
        got |= _named(call.key, "outputs", outputs)
    verdicts = _Verdicts(reference, where, exported, own, got, raised)
    return verdicts.divergence(next((call.key for call in order if verdicts.is_right(call.key) is False), None))


def first_module_without_value(
    reference: Reference, exported: nn.Module, file: FileValues, tensors: Sequence[torch.Tensor], where: str
) -> Divergence | None:
    """Find the first module of the exported model whose output isn't among the values of a file.

    The nearest value counts as the module's output in the file, under any name and in any shape.

    Args:
        tensors: the file's inputs at that call.
    """
    own = watched_calls(reference, where, exported)
    values, error = file.run(tensors)
    got: dict[_Name, torch.Tensor] = {}
    for name, tensor in _values_of(own).items():
        nearest = _nearest(tensor, (*values.values(), *tensors))
        # The file's constants aren't among its values. So an input without a similar value proves nothing, and neither
        # does an integer input, such as indices.
        if nearest is not None and (name[1] == "outputs" or not is_exact(tensor)):
            got[name] = nearest
    outputs = [values[name] for name in file.outputs if name in values]
    if len(outputs) == len(own[ROOT].outputs):
        got |= _named(ROOT, "outputs", outputs)
    raised = dict.fromkeys(own, "the file raises there") if error else {}
    verdicts = _Verdicts(reference, where, exported, own, got, raised)
    return verdicts.divergence(verdicts.first_wrong())


class _Verdicts:
    """The judgements of the inputs and outputs of all module calls.

    Args:
        target: the module that is right.
        own: its calls.
        got: the values to judge; values without a counterpart in `own` are ignored.
        raised: by call, what happened instead of outputs that are missing in `got`.
    """

    def __init__(
        self,
        reference: Reference,
        where: str,
        target: nn.Module,
        own: _Calls,
        got: Mapping[_Name, torch.Tensor],
        raised: Mapping[Key, str] | None = None,
    ) -> None:
        self._reference, self._where, self._target = reference, where, target
        self._own, self._raised = own, raised or {}
        names = list(_values_of(own))
        one = reference.call_at(where)
        with eager_only():
            # A capture of a graph would break at every module that is watched.
            expected = reference_at(_AllValues(target), reference.original.inputs_of(one), where, seed=one.seed)
        judged = judged_values(expected, [got.get(name) for name in names])
        self._worst: dict[tuple[Key, str], OutputParity] = {}
        for (key, side, *_), found in zip(names, judged, strict=True):
            worst = self._worst.get((key, side))
            if found is not None and (worst is None or (worst.ok, -worst.ratio) > (found.ok, -found.ratio)):
                self._worst[key, side] = found

    def is_right(self, key: Key, side: str = "outputs") -> bool | None:
        """Whether the inputs or outputs of a call are right; None if they are unknown."""
        worst = self._worst.get((key, side))
        if worst is None:
            return False if side == "outputs" and key in self._raised else None
        return worst.ok

    def first_wrong(self, key: Key = ROOT) -> Key | None:
        """Find the first wrong call at or below a call, as deep as possible; None if that call isn't wrong."""
        if self.is_right(key) is not False:
            return None
        suspects: list[Key] = []
        for child in self._own[key].children:
            right = self.is_right(child.key)
            if right:
                # Its output is right, so different values in its inputs are only a rewrite.
                suspects = [suspect for suspect in suspects if suspect not in child.reads]
            elif right is False and self.is_right(child.key, "inputs") is not False:
                suspects.append(child.key)
        return (self.first_wrong(suspects[0]) or suspects[0]) if suspects else key

    def divergence(self, key: Key | None) -> Divergence | None:
        """Describe a wrong call; None for None."""
        if key is None:
            return None
        call, original = self._own[key], self._reference.target
        line = call.line
        if isinstance(original, nn.Module) and original is not self._target:
            # Code that passes generate has no lines, but the original's code has.
            same = watched_calls(self._reference, self._where, original).get(key)
            line = same.line if same is not None and same.line else line
        place = Place(call.path, call.number, line or line_of_forward(self._target, call.path), call.kind)
        return Divergence.at(place, self._raised.get(key) or self._worst[key, "outputs"], self._where)


class _AllValues(nn.Module):
    """Returns the inputs and outputs of all module calls of a model, in place of its outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        watch = Watch()
        with watch.watching(self.model):
            self.model(*args, **kwargs)
        return tuple(_values_of(watch.calls).values())


def _values_of(calls: _Calls) -> dict[_Name, torch.Tensor]:
    values: dict[_Name, torch.Tensor] = {}
    for key, call in calls.items():
        values |= _named(key, "inputs", call.inputs)
        values |= _named(key, "outputs", call.outputs)
    return values


def _named(key: Key, side: str, tensors: Sequence[torch.Tensor]) -> dict[_Name, torch.Tensor]:
    return {(key, side, len(tensors), index): tensor for index, tensor in enumerate(tensors)}


def _nearest(tensor: torch.Tensor, values: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The value with the dtype and number of elements of a tensor that is nearest to it, in its shape."""
    alike = [
        value.cpu().reshape(tensor.shape)
        for value in values
        if value.dtype == tensor.dtype and value.numel() == tensor.numel()
    ]
    near = sorted(alike, key=lambda value: _apart(_sample(value), _sample(tensor)))[:_NEAR]
    return min(near, key=lambda value: _apart(value, tensor), default=None)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)[:: max(1, tensor.numel() // _SAMPLE)]


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nan_to_num(distance(a, b), nan=torch.inf).sum())
