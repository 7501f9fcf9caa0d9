"""What a model keeps from one call for its answers to the next, which no file does as the model does."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from optimizer.errors import ExportFailed
from optimizer.parity import ParityReport, Reference
from optimizer.preserve import evaluated, kept_state
from passes.graph.side_effects import REGISTRIES, contents_of, items_of
from passes.graph.storage import same_values

# So many of them are named.
_NAMED = 3

_Judge = Callable[[Callable[..., Any]], ParityReport]


def refuse_carried_state(original: nn.Module, reference: Reference, judge: _Judge) -> None:
    """See that the original answers calls one after another as it answered each of them by itself.

    Args:
        reference: of the original, which was put back after each call.
        judge: the verdict on a callable that runs where the original does.

    Raises:
        ExportFailed: it answers otherwise, which names what it keeps.
    """

    @functools.wraps(original.forward)
    def without_putting_back(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    with kept_state(original, reference.written), evaluated(original):
        before = dict(_state_of(original))
        report = judge(without_putting_back)
        if report.verdict != "failed":
            return
        changed = [name for name, now in _state_of(original) if name not in before or not _is_same(before[name], now)]
    named = ", ".join(changed[:_NAMED]) + (f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else "")
    raise ExportFailed(
        f"The model keeps {named or 'something'} from one call to the next and answers otherwise then, as no file does:"
        f" take it as an input, and give what it becomes as an output. After other calls: {report.reason}"
    )


def _state_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What stands in each module, by a name for a sentence: values of tensors, and of other attributes what is in them."""
    for path, module in model.named_modules():
        where = f" of module `{path}`" if path else ""
        for name, buffer in module.named_buffers(recurse=False):
            yield f"buffer `{name}`{where}", buffer.detach().clone()
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, value in vars(module).items():
            if name in REGISTRIES or isinstance(value, nn.Module):
                continue
            if isinstance(value, torch.Tensor):
                yield f"attribute `{name}`{where}", value.detach().clone()
                continue
            contents = contents_of(value)
            yield f"attribute `{name}`{where}", (value, [] if contents is None else items_of(contents))


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor):
        both = isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor)
        return both and same_values(before, now)
    (value, items), (other, others) = before, now
    return value is other and len(items) == len(others) and all(map(operator.is_, items, others))
