"""Intercept the forwards of all modules of a tree during a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from passes.graph.edits import AttributeEdit, in_place
from passes.graph.forwards import AroundForward, is_atom
from passes.torch_private import compiled_module_types

Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _WatchedForward(AroundForward):
    """The wrapped forward of an intercepted module; calls from other threads are not intercepted."""

    def __init__(self, owner: nn.Module, inner: Any, around: Around, thread: int) -> None:
        self.owner = owner
        self.inner = inner
        self.is_atom = is_atom(owner)
        self._around = around
        self._thread = thread

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return self._inner_forward(*args, **kwargs)
        return self._around(self.owner, self._inner_forward, args, kwargs)


@contextmanager
def intercepted_calls(
    root: nn.Module, around: Around, besides: Iterable[nn.Module] = (), *, leave: Collection[int] = ()
) -> Iterator[None]:
    """In the block, run `around(module, forward, args, kwargs)` instead of the forward of each module, in this thread.

    Args:
        root: the tree; all its modules are intercepted.
        around: the replacement. It may call `forward(*args, **kwargs)`, the module's own forward. The module's hooks
            run around the replacement.
        besides: further modules that `root` calls but doesn't register.
        leave: the ids of modules that aren't intercepted.
    """
    thread = threading.get_ident()
    modules = {id(module): module for module in (*root.modules(), *besides)}
    with in_place(
        [
            AttributeEdit(module, "forward", _WatchedForward(module, _forward_of(module), around, thread))
            for key, module in modules.items()
            if key not in leave
        ]
    ):
        yield


def _forward_of(module: nn.Module) -> Any:
    """The module's current forward; None for the forward of its class.

    The result of `torch.compile(module)` runs the original module instead, because compiled code makes no module calls
    that can be intercepted.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return module.forward
    if is_compiled(module):
        return module._modules["_orig_mod"]
    return module.__dict__.get("forward")


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made the module from another one."""
    return isinstance(module, compiled_module_types())
