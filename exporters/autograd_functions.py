"""Functions with a backward pass of their own (`torch.autograd.Function`), as a trace can hold them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import FunctionCtx


@contextmanager
def traced_by_their_forwards() -> Iterator[None]:
    """While it is active, a trace holds the operations of such a function's forward, and not one call of Python.

    No file has a form for that call. Where there are no gradients the forward is all that the function does. What was bound
    before (`gelu = Gelu.apply` in a module's file) stays a call of Python.
    """
    own = vars(torch.autograd.Function)["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not torch._C._get_tracing_state() or torch.is_grad_enabled():
            return own.__get__(None, cls)(*args, **kwargs)
        if cls.setup_context is not torch.autograd.Function.setup_context:
            # It keeps what a backward pass takes, and there is none.
            return cls.forward(*args, **kwargs)
        context = FunctionCtx()
        context.needs_input_grad = (False,) * len(args)  # type: ignore[attr-defined]
        return cls.forward(context, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]
