"""Trace functions with their own backward pass (`torch.autograd.Function`) as the operations of their forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from exporters.torch_private import is_tracing


@contextmanager
def traced_by_their_forwards() -> Iterator[None]:
    """Inside, a trace records the operations of a `torch.autograd.Function`'s forward instead of one call to Python.

    No file format can hold a call to Python. Without gradients, the forward is all that the function does. Calls
    through names that were bound before (`gelu = Gelu.apply` at module level) stay calls to Python.
    """
    own = vars(torch.autograd.Function)["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not is_tracing() or torch.is_grad_enabled():
            return own.__get__(None, cls)(*args, **kwargs)
        if cls.setup_context is not torch.autograd.Function.setup_context:
            # setup_context saves data for a backward pass, and there is none.
            return cls.forward(*args, **kwargs)
        context = FunctionCtx()
        context.needs_input_grad = (False,) * len(args)  # type: ignore[attr-defined]
        return cls.forward(context, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]
