"""Give a result storage of its own before a state dict is loaded into it: until then its weights are the caller's."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from passes.graph.shared_memory import copied_together, groups_of
from passes.graph.storage import storages_of


class OwnStorage:
    """A `load_state_dict` pre-hook of every module of a result: copies the weights that are shared with the caller's model.

    Copies and pickles of the result have storage of their own from the start.
    """

    # torch copies the name of a hook.
    __name__ = "own_storage"

    def __init__(self, root: nn.Module | None = None, storages: Iterable[int] = ()) -> None:
        self._root = None if root is None else weakref.ref(root)
        # The addresses of the caller's storages.
        self._storages = set(storages)

    def __call__(self, *_: Any) -> None:
        root = None if self._root is None else self._root()
        shared = (
            []
            if root is None
            else [each for each in root.parameters() if self._storages.intersection(storages_of(each))]
        )
        self._root = None
        for group in groups_of(shared):
            for tensor, own in zip(group, copied_together(group), strict=True):
                tensor.data = own

    def __deepcopy__(self, memo: Any) -> OwnStorage:
        return OwnStorage()

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnStorage, ()


def share_until_loading(result: nn.Module, original: nn.Module) -> None:
    """Register the hook on all modules of a result that shares weights with the caller's model."""
    hook = OwnStorage(result, set[int]().union(*map(storages_of, original.parameters())))
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
