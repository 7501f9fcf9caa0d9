"""Find out whether the original carries state from one call to the next, which exported files can't do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from optimize_export.wording import listed
from optimizer.model import REGISTRIES, AsItIs, eager_only, is_script, one_at_a_time, pinned_settings
from optimizer.parity.comparison import Comparison
from optimizer.parity.original import without_warnings
from optimizer.parity.reference import Reference
from optimizer.parity.results import Measurement
from passes.graph.memory import same_values

# The maximum number of changed tensors and attributes that the message names.
_NAMED = 4


def measure_in_sequence(reference: Reference) -> Measurement:
    """Compare the outputs of one copy that answers all measured calls, and at the end the smallest batch again."""
    with _sequence() as settings:
        comparison = reference.original.runs.first(lambda module: _answers(reference, module))
    if comparison.is_doubtful():
        reference.refine_noise()
        comparison.noises = reference.noises
    return replace(comparison.finish(reference.blank), settings=settings)


def describe_carried_state(reference: Reference) -> str:
    """A clause that the original carries state, with the tensors and attributes that its calls change."""
    with _sequence(), reference.original.runs.fresh() as module:
        assert isinstance(module, nn.Module)
        before = _state_of(module)
        _answers(reference, module)
        after = _state_of(module)
    names = dict.fromkeys((*after, *before))
    changed = [name for name in names if not _is_same(before.get(name, []), after.get(name, []))]
    told = f" (its calls change {listed(changed, _NAMED)})" if changed else ""
    return f"The model carries state from call to call{told}"


@contextmanager
def _sequence() -> Iterator[dict[str, str]]:
    with one_at_a_time, pinned_settings() as settings, eager_only(), without_warnings():
        yield settings


def _answers(reference: Reference, module: Callable[..., Any]) -> Comparison:
    noises = reference.first_noises()
    comparison = Comparison(noises, flat=False, in_detail=False, slices=reference.slices, who="the model")
    runs = AsItIs(module, in_eval=True)
    calls = [one for one in reference.original.calls if one.measured]
    for one in (*calls, min(calls, key=lambda one: one.batch_size or 0)):
        comparison.run(runs, one, reference.original.inputs_of(one), None, training=False)
    return comparison


def _state_of(model: nn.Module) -> dict[str, list[Any]]:
    """The buffers, parameters and attributes of all modules, by names for a message."""
    found = {f"buffer `{name}`": _leaves(value) for name, value in model.named_buffers()}
    found |= {f"parameter `{name}`": _leaves(value) for name, value in model.named_parameters()}
    for path, module in model.named_modules():
        own = {} if is_script(module) else vars(module)
        for name, value in own.items():
            if name not in (*REGISTRIES, "training"):
                found[f"attribute `{path}.{name}`".replace("`.", "`")] = _leaves(value)
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
    return before is now or (type(before) is type(now) and before == now)
