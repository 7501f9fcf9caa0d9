"""What torch says of its own operations, by name: from the schemas that it has of them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from passes.torch_private import OpOverloadPacket, has_kernel

# Methods that are `to` with a dtype.
_CASTS = frozenset({
    "bfloat16", "bool", "byte", "cdouble", "cfloat", "chalf", "char", "double", "float", "half", "int", "long", "short",
})  # fmt: skip


@functools.lru_cache(maxsize=4096)
def schemas(name: str) -> tuple[Any, ...] | None:
    """The operations that torch has under the name; None where one of them writes to what it is given, or for no operation.

    Those that write to an `out` argument, and those on plain numbers that TorchScript has, are left out.
    """
    name = "to" if name in _CASTS else name
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    found = []
    for overload in packet.overloads() if isinstance(packet, OpOverloadPacket) else ():
        qualified = f"aten::{name}" if overload == "default" else f"aten::{name}.{overload}"
        if not has_kernel(qualified):
            continue
        operation = getattr(packet, overload)
        if any(argument.is_out for argument in operation._schema.arguments):
            continue
        if operation._schema.is_mutable:
            return None
        found.append(operation)
    return tuple(found) or None


@functools.lru_cache(maxsize=4096)
def draws_numbers(name: str) -> bool:
    """Whether an operation of the name may draw random numbers."""
    return any(torch.Tag.nondeterministic_seeded in operation.tags for operation in schemas(name) or ())
