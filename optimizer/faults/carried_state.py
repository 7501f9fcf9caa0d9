"""Refuse models that carry state from one call to the next, because exported files can't do that."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from optimize_export.errors import ExportFailed
from optimize_export.wording import listed
from optimizer.faults.locating import suspect_calls
from optimizer.faults.locating_modules import ROOT, ModuleCall, in_order_of_ending, record_calls
from optimizer.model import REGISTRIES, AsItIs
from optimizer.parity import (
    Reference,
    after_all_calls,
    distance,
    is_exact,
    judge,
    measure_in_sequence,
    unit,
    wide,
)
from passes.graph.containers import contents_of, items_of, numbers_in, slots_of
from passes.graph.memory import same_values

# The maximum number of changed attributes that the message names.
_NAMED = 3
# The maximum number of calls at which to search for the module.
_LOOKED_AT = 4
# The levels of containers and objects that are searched below the attributes of a module.
_DEPTH = 4
# Two runs of a module on the same inputs may differ by this many epsilons of the largest value (atomic additions).
_UNITS = 64


def refuse_carried_state(original: nn.Module, reference: Reference) -> None:
    """Check that the original's outputs don't depend on earlier calls.

    One copy answers all measured calls in sequence. Each output must equal that of a separate run, within the
    original's noise. The user's tolerances don't apply, because both runs use the same module on the same device. A
    model that answers the same call differently each time, whatever calls came before, isn't refused here but in the
    comparison.

    Args:
        original: the model.
        reference: of the original in its own dtypes.

    Raises:
        ExportFailed: an output depends on earlier calls. The message names the module and the attributes that carry
            the state, if they are found.
    """
    measurement = measure_in_sequence(reference)
    report = judge(measurement)
    if report.verdict != "failed" or judge(reference.compare(original)).verdict == "failed":
        return
    wheres = suspect_calls(reference, measurement)[:_LOOKED_AT]
    found = next(filter(None, (_first_to_differ(original, reference, where) for where in wheres)), None)
    raise ExportFailed(
        f"{found or 'The model carries state from call to call'}, and exported files can't: make the state an "
        f"explicit input and output. In repeated calls: {report.reason}"
    )


@dataclass(frozen=True)
class _Found:
    """A call of the module that carries state, and the names of the state that changes."""

    call: ModuleCall
    changed: Sequence[str]

    def __str__(self) -> str:
        line = f", called at {self.call.line}" if self.call.line else ""
        who = (
            f"Module `{self.call.path}` ({self.call.kind}{line})" if self.call.path else f"The model ({self.call.kind})"
        )
        kept = f" in {listed(self.changed, _NAMED)}" if self.changed else ""
        return f"{who} carries state from call to call{kept}"


def _first_to_differ(original: nn.Module, reference: Reference, where: str) -> _Found | None:
    """Find the first module call whose outputs change after all other calls, although its inputs are equal.

    Inner modules come before outer ones. None if there is no such call: state that is reset before the last call ends
    can't be seen afterwards.
    """
    alone = record_calls(reference, where, original, may_raise=True)
    if ROOT not in alone:
        return None

    def again(module: nn.Module) -> ModuleCall | None:
        later = record_calls(reference, where, AsItIs(module, in_eval=True), may_raise=True)
        for call in in_order_of_ending(alone[ROOT]):
            other = later.get(call.key)
            if other and _given_alike(call, other) and not _are_alike(call.outputs, other.outputs):
                return call
        return None

    call = after_all_calls(reference, again)
    if call is None:
        return None
    states: list[dict[str, Any]] = []

    def keep_state(module: nn.Module) -> None:
        states.append(_state_of(dict(module.named_modules())[call.path]))

    after_all_calls(reference, keep_state, before=keep_state)
    before, after = states
    names = dict.fromkeys((*after, *before))
    changed = [name for name in names if not _is_same(before.get(name, _Absent), after.get(name, _Absent))]
    return _Found(call, changed)


class _Absent:
    """A placeholder for missing state."""


def _given_alike(call: ModuleCall, again: ModuleCall) -> bool:
    return call.other_arguments == again.other_arguments and _are_alike(call.inputs, again.inputs)


def _are_alike(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> bool:
    return len(these) == len(those) and all(map(_is_alike, these, those))


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors differ by rounding at most."""
    if same_values(one, other):
        return True
    if one.shape != other.shape or one.dtype != other.dtype or is_exact(one):
        return False
    finite = wide(one).isfinite()
    if not torch.equal(finite, wide(other).isfinite()) or not finite.any():
        return False
    apart = distance(one, other)[finite]
    return bool((apart <= _UNITS * unit(one.dtype) * wide(one)[finite].abs().max()).all())


def _state_of(module: nn.Module) -> dict[str, Any]:
    """The parameters, buffers, children and attributes of a module itself, by names for a message."""
    scripted = isinstance(module, torch.jit.ScriptModule)
    found = {f"parameter `{name}`": _held(value) for name, value in module.named_parameters(recurse=scripted)}
    found |= {f"buffer `{name}`": _held(value) for name, value in module.named_buffers(recurse=scripted)}
    if not scripted:
        found |= {f"child `{name}`": child for name, child in module.named_children()}
        own = {name: value for name, value in vars(module).items() if name not in (*REGISTRIES, "training")}
        found |= {f"attribute `{name}`": _held(value) for name, value in own.items()}
    return found


@dataclass(frozen=True)
class _Numbers:
    """The internal state of an array or random generator, which can be compared by `==`; a user's tuple might not."""

    state: Any


def _held(value: Any, depth: int = _DEPTH) -> Any:
    """Copy the numbers in a value and in its contents, `depth` levels deep; return a value without numbers as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if (numbers := numbers_in(value)) is not None:
        return _Numbers(numbers)
    if isinstance(value, Iterator):
        # A run uses a copy of the iterator, so its identity says nothing. Only `itertools.count` shows its position.
        return repr(value) if isinstance(value, itertools.count) else None
    if not depth:
        return value
    if isinstance(value, tuple):
        return [_held(item, depth - 1) for item in value]
    contents = vars(value) if isinstance(value, nn.Module) else contents_of(value)
    inside = [] if contents is None else items_of(contents)
    slots = slots_of(value)
    return [_held(item, depth - 1) for item in (*inside, *slots.values())] if contents is not None or slots else value


def _is_same(before: Any, now: Any) -> bool:
    if type(before) is not type(now):
        return False
    if isinstance(before, torch.Tensor):
        return same_values(before, now)
    if isinstance(before, list):
        return len(before) == len(now) and all(map(_is_same, before, now))
    return before is now or (isinstance(before, int | float | complex | str | bytes | _Numbers) and before == now)
