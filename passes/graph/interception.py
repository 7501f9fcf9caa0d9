"""Watching the calls of the modules of one tree while it runs."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def intercepted_calls(root: nn.Module, around: Around, besides: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Run `around(module, call, args, kwargs)` instead of every call of a module of `root` by this thread.

    `besides` are modules that `root` calls and doesn't register.

    `call(*args, **kwargs)` makes the call itself, hooks included. No module is written to: the interception stands in
    `nn.Module` for the time of the block, and lets the calls of other modules and other threads through.
    """
    # The modules themselves keep their identity from being given to others while the forward replaces them.
    inside = {id(module): module for module in (*root.modules(), *besides)}
    thread = threading.get_ident()
    original_call = nn.Module.__call__

    def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) not in inside or threading.get_ident() != thread:
            return original_call(module, *args, **kwargs)

        # A bound method is no further frame: a deep tree may have few to spare.
        return around(module, types.MethodType(original_call, module), args, kwargs)

    nn.Module.__call__ = call_module  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original_call  # type: ignore[method-assign]
