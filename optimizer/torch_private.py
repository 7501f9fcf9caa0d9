"""Every private name of torch that `optimizer` uses, each with the reason and the version it was seen in.

If a name is missing, importing this file or calling the function that uses it raises an error that names it.
`optimizer` also uses names from `passes.torch_private`.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table


def decomposition_of(operator: Any) -> Callable[..., Any] | None:
    """The function by which torch decomposes an operator into simpler ones; None if there is none. Seen in 2.13."""
    return decomposition_table.get(operator)


def copied_script(module: Any, own: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy a scripted module and its descendants.

    `copy.copy` shares the children, and `copy.deepcopy` copies the weights. `_c`, the module in C++, accepts children
    and tensors one by one. Seen in torch 2.13. Without it, AttributeError is raised.

    Args:
        module: a `torch.jit.ScriptModule`.
        own: returns the copy's parameter or buffer for one of the module; it may be the same tensor.
    """
    twin = copy.copy(module)
    for name, child in module.named_children():
        twin._c.setattr(name, copied_script(child, own)._c)
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if (copied := own(tensor)) is not tensor:
            twin._c.setattr(name, copied)
    # Copy again, because the Python side of `twin` was made for the old children.
    return copy.copy(twin)


def is_profiling() -> bool:
    """Whether a profiler of torch records this thread. Another one would end it. Seen in torch 2.13."""
    return bool(torch._C._autograd._profiler_enabled())


def compile_budget(share: float) -> Any:
    """A context manager in which torch.compile keeps this share of the values that a step saves, and recomputes the rest.

    torch documents the setting in the file of its name alone. Seen in 2.11 to 2.13.
    """
    return importlib.import_module("torch._functorch.config").patch(activation_memory_budget=share)
