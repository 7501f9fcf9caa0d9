"""Give a result storage of its own before a state dict is loaded into it: until then its weights are the caller's."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from passes.program.shared_memory import copied_together, groups_of


class OwnStorage:
    """A `load_state_dict` pre-hook of every module of a result: copies the weights that are shared with the caller's model.

    Copies and pickles of the result have storage of their own from the start.
    """

    # torch copies the name of a hook.
    __name__ = "own_storage"

    def __init__(self, shared: Iterable[nn.Parameter] = ()) -> None:
        self._shared = [weakref.ref(parameter) for parameter in shared]

    def __call__(self, *_: Any) -> None:
        shared = [parameter for reference in self._shared if (parameter := reference()) is not None]
        self._shared = []
        for group in groups_of(shared):
            for tensor, own in zip(group, copied_together(group), strict=True):
                tensor.data = own

    def __deepcopy__(self, memo: Any) -> OwnStorage:
        return OwnStorage()

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnStorage, ()


def share_until_loading(result: nn.Module, original: nn.Module) -> None:
    """Register the hook on all modules of a result that shares weights with the caller's model."""
    callers = set(original.parameters())
    own = [parameter for parameter in result.parameters() if parameter not in callers]
    hook = OwnStorage(own)
    for module in result.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_load_state_dict_pre_hook(hook)


def remove_hooks(result: nn.Module) -> None:
    """Remove the hooks of an earlier `share_until_loading`."""
    for module in result.modules():
        hooks = module.__dict__.get("_load_state_dict_pre_hooks", {})
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "hook", None), OwnStorage):
                del hooks[key]
