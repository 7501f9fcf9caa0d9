"""Private names of torch that this package uses: each with the reason, the versions it was seen in, and the way without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch


def copied_script(module: Any, own: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a scripted module and of those below it.

    `copy.copy` shares the modules below, and `copy.deepcopy` copies the weights; `_c`, the module in C++, takes children and
    tensors one by one. Seen in torch 2.13. Where it is missing, AttributeError.

    Args:
        module: a `torch.jit.ScriptModule`.
        own: gives the parameter or buffer of the copy in the place of one, which may be the same.
    """
    twin = copy.copy(module)
    for name, child in module.named_children():
        twin._c.setattr(name, copied_script(child, own)._c)
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if (copied := own(tensor)) is not tensor:
            twin._c.setattr(name, copied)
    # Its Python side was made for the children of before.
    return copy.copy(twin)


def schema_of(function: Any) -> Any:
    """The schema of an operator that a `TorchDispatchMode` is given; None for a higher-order operator, which has none.

    It tells which arguments the operator writes to. Seen in torch 2.13.
    """
    return getattr(function, "_schema", None)
