"""Watching the calls of the modules of one tree while it runs."""

from __future__ import annotations

import functools
import sys
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

    `call(*args, **kwargs)` makes the call itself, hooks included. The interception stands in `nn.Module` for the time of
    the block, and lets the calls of other modules and other threads through. Modules aren't written to, but for what
    `torch.compile(module)` gives: that holds a method of the module, which no interception sees, and calls it by itself.
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

    compiled = [(vars(module), vars(module)["forward"]) for module in inside.values() if is_compiled(module)]
    try:
        for attributes, forward in compiled:
            attributes["forward"] = _calling(attributes["_modules"]["_orig_mod"], forward)
        nn.Module.__call__ = call_module  # type: ignore[method-assign]
        yield
    finally:
        nn.Module.__call__ = original_call  # type: ignore[method-assign]
        for attributes, forward in compiled:
            attributes["forward"] = forward


def is_compiled(module: nn.Module) -> bool:
    """Whether the module is what `torch.compile` made of another one."""
    # Who has compiled nothing hasn't loaded the compiler, which takes seconds.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def _calling(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return call
