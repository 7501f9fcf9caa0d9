"""Watching the calls of the modules of one tree while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from passes.program.edits import AttributeEdit, in_place
from passes.program.forwards import AroundForward, is_atom
from passes.torch_private import compiled_module_types

Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _WatchedForward(AroundForward):
    """The forward of a module that is watched; what another thread calls goes by unseen."""

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
def intercepted_calls(root: nn.Module, around: Around, besides: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Run `around(module, forward, args, kwargs)` instead of the forward of every module of `root`, by this thread.

    `besides` are modules that `root` calls and doesn't register. `forward(*args, **kwargs)` is what the module would run;
    its hooks run around both. The watch stands in the `__dict__` of each module for the time of the block.
    """
    thread = threading.get_ident()
    modules = {id(module): module for module in (*root.modules(), *besides)}
    with in_place(
        [
            AttributeEdit(module, "forward", _WatchedForward(module, _forward_of(module), around, thread))
            for module in modules.values()
        ]
    ):
        yield


def _forward_of(module: nn.Module) -> Any:
    """What the module runs; None for the forward of its class.

    What `torch.compile(module)` gives runs the module as it is, for compiled code calls nothing that could be watched.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return module.forward
    if is_compiled(module):
        return module._modules["_orig_mod"]
    return module.__dict__.get("forward")


def is_compiled(module: nn.Module) -> bool:
    """Whether the module is what `torch.compile` made of another one."""
    return isinstance(module, compiled_module_types())
