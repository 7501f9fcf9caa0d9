"""Find the module that carries state from one call to the next, which exported files can't do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from optimize_export.elementwise import distance, is_exact, unit, wide
from optimize_export.wording import listed
from optimizer.faults.locating import suspect_calls
from optimizer.faults.locating_modules import ROOT, ModuleCall, in_order_of_ending, record_calls
from optimizer.model import REGISTRIES, AsItIs
from optimizer.parity import Measurement, Reference, after_all_calls
from passes.graph.memory import same_values

# The maximum number of changed attributes that the message names.
_NAMED = 3
# The maximum number of calls at which to search for the module.
_LOOKED_AT = 4
# Two runs of a module on the same inputs may differ by this many epsilons of the largest value (atomic additions).
_UNITS = 64


def describe_carried_state(original: nn.Module, reference: Reference, measurement: Measurement) -> str:
    """A clause on the module and the attributes that carry state, as far as they are found.

    Args:
        reference: of the original in its own dtypes.
        measurement: of one copy that answered all calls in sequence.
    """
    wheres = suspect_calls(reference, measurement)[:_LOOKED_AT]
    found = (_first_to_differ(original, reference, where) for where in wheres)
    return next(filter(None, found), "The model carries state from call to call")


def _first_to_differ(original: nn.Module, reference: Reference, where: str) -> str:
    """A clause on the first module call whose outputs change after all other calls, although its inputs are equal.

    Inner modules come before outer ones. "" if there is no such call: state that is reset before the last call ends
    can't be seen afterwards.
    """
    alone = record_calls(reference, where, original, may_raise=True)
    if ROOT not in alone:
        return ""

    def again(module: nn.Module) -> ModuleCall | None:
        later = record_calls(reference, where, AsItIs(module, in_eval=True), may_raise=True)
        for call in in_order_of_ending(alone[ROOT]):
            other = later.get(call.key)
            if other is None or call.other_arguments != other.other_arguments:
                continue
            if _are_alike(call.inputs, other.inputs) and not _are_alike(call.outputs, other.outputs):
                return call
        return None

    call = after_all_calls(reference, again)
    if call is None:
        return ""
    states: list[dict[str, list[Any]]] = []

    def keep_state(module: nn.Module) -> None:
        states.append(_state_of(dict(module.named_modules())[call.path]))

    after_all_calls(reference, keep_state, before=keep_state)
    before, after = states
    names = dict.fromkeys((*after, *before))
    changed = [name for name in names if not _is_same(before.get(name, []), after.get(name, []))]
    line = f", called at {call.line}" if call.line else ""
    who = f"Module `{call.path}` ({call.kind}{line})" if call.path else f"The model ({call.kind})"
    kept = f" in {listed(changed, _NAMED)}" if changed else ""
    return f"{who} carries state from call to call{kept}"


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


def _state_of(module: nn.Module) -> dict[str, list[Any]]:
    """The parameters, buffers, children and attributes of a module itself, by names for a message."""
    scripted = isinstance(module, torch.jit.ScriptModule)
    found = {f"parameter `{name}`": _leaves(value) for name, value in module.named_parameters(recurse=scripted)}
    found |= {f"buffer `{name}`": _leaves(value) for name, value in module.named_buffers(recurse=scripted)}
    if not scripted:
        found |= {f"child `{name}`": [child] for name, child in module.named_children()}
        own = {name: value for name, value in vars(module).items() if name not in (*REGISTRIES, "training")}
        found |= {f"attribute `{name}`": _leaves(value) for name, value in own.items()}
    return found


def _leaves(value: Any) -> list[Any]:
    """The tensors, copied, and the numbers and texts in a value and in its lists, tuples and dicts."""
    try:
        leaves = pytree.tree_leaves(value)
    except RecursionError:
        # A list that contains itself.
        return []
    return [
        leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor | int | float | str)
    ]


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_is_same, before, now))
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        return same_values(before, now)
    return before is now or (isinstance(now, int | float | str) and type(before) is type(now) and before == now)
