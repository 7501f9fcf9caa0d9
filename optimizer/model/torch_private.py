"""Private names of torch that this package uses.

Each one has the reason, the version of torch where it was seen, and the behaviour without it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch


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
    # The Python side of `twin` was made for the old children.
    return copy.copy(twin)


def schema_of(function: Any) -> Any:
    """The schema of an operator in a `TorchDispatchMode`; None for a higher-order operator, which has none.

    The schema says which arguments the operator writes to. Seen in torch 2.13.
    """
    return getattr(function, "_schema", None)
