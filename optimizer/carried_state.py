"""What a model keeps from one call for its answers to the next, which no file does as the model does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from optimizer.errors import ExportFailed
from optimizer.locating import named_first
from optimizer.locating_modules import ModuleCall, in_order_of_ending, watched_calls
from optimizer.reference import Reference
from optimizer.verdict import judge
from passes.graph.side_effects import REGISTRIES, contents_of, items_of
from passes.graph.storage import same_values

# So many of them are named.
_NAMED = 3
# At so many calls it is looked for where the difference comes from.
_LOOKED_AT = 4
# How many levels of containers and objects are looked into, from the attributes of a module on.
_DEPTH = 4


def refuse_carried_state(original: nn.Module, reference: Reference, names: Mapping[str, str]) -> None:
    """See that the original answers calls one after another as it answered each of them by itself.

    By its own noise alone: it is one module on one device, and nobody's tolerance is for that.

    Args:
        reference: of the original in its own dtypes.
        names: of the outputs, for messages.

    Raises:
        ExportFailed: it answers otherwise, by the module and the attributes that it keeps something in.
    """
    measurement = reference.in_turn()
    report = judge(measurement, names=names)
    if report.verdict != "failed":
        return
    found = _first_to_differ(original, reference, named_first(reference, measurement)[:_LOOKED_AT])
    if found is None:
        who, kept = "The model", ""
    else:
        line = f", called at {found.call.line}" if found.call.line else ""
        who = (
            f"Module `{found.call.path}` ({found.call.kind}{line})"
            if found.call.path
            else f"The model ({found.call.kind})"
        )
        more = f" and {len(found.changed) - _NAMED} more" if len(found.changed) > _NAMED else ""
        kept = f", as it keeps {', '.join(found.changed[:_NAMED])}{more}" if found.changed else ""
    raise ExportFailed(
        f"{who} answers the same inputs otherwise after other calls{kept}, and no file does so alike: take what it goes by as"
        f" an input, and give what that becomes as an output. Called again and again:"
        f" {report.reason.replace('The candidate', 'The model')}"
    )


@dataclass(frozen=True)
class _Found:
    call: ModuleCall
    changed: list[str]


def _first_to_differ(original: nn.Module, reference: Reference, wheres: Sequence[str]) -> _Found | None:
    """The innermost module, the first of these, that gives another answer to the same inputs after all other calls.

    None where no module does: what comes and goes isn't seen after the last call.
    """
    runs = [reference.reruns(where, original).own for where in wheres]
    pairs = [(run, watched_calls(original, run)) for run in runs]
    found: list[tuple[ModuleCall, nn.Module, dict[str, Any]]] = []

    def look() -> None:
        for run, alone in pairs:
            later = watched_calls(original, run, may_raise=True)
            for call in in_order_of_ending(alone["", 1]):
                again = later.get(call.key)
                if again and _are_same(call.inputs, again.inputs) and not _are_same(call.outputs, again.outputs):
                    module = original.get_submodule(call.path)
                    found.append((call, module, _state_of(module)))
                    return

    reference.in_turn(look)
    if not found:
        return None
    ((call, module, after),) = found
    before = _state_of(module)
    names = dict.fromkeys((*after, *before))
    changed = [name for name in names if not (name in before and name in after and _is_same(before[name], after[name]))]
    return _Found(call, changed)


def _state_of(module: nn.Module) -> dict[str, Any]:
    """What a module itself holds, by a name for a sentence."""
    found: dict[str, Any] = {}
    for kind, registry in zip(("parameter", "buffer", "child"), REGISTRIES, strict=True):
        for name, value in getattr(module, registry).items():
            found[f"{kind} `{name}`"] = value if kind == "child" else _held(value)
    if not isinstance(module, torch.jit.ScriptModule):
        own = {name: value for name, value in vars(module).items() if name not in REGISTRIES}
        found |= {f"attribute `{name}`": _held(value) for name, value in own.items()}
    return found


def _held(value: Any, depth: int = _DEPTH) -> Any:
    """A copy of the numbers in a value, or in what stands in it; the value itself where there are none."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.ndarray):
        return value.copy()
    contents = contents_of(value) if depth and not isinstance(value, nn.Module) else None
    return value if contents is None else [_held(item, depth - 1) for item in items_of(contents)]


def _is_same(before: Any, now: Any) -> bool:
    if type(before) is not type(now):
        return False
    if isinstance(before, torch.Tensor):
        return same_values(before, now)
    if isinstance(before, np.ndarray):
        return before.shape == now.shape and before.tobytes() == now.tobytes()
    if isinstance(before, list):
        return len(before) == len(now) and all(map(_is_same, before, now))
    return before is now or (isinstance(before, int | float | complex | str | bytes) and before == now)


def _are_same(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return len(these) == len(those) and all(map(same_values, these, those))
