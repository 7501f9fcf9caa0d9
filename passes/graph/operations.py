"""Query torch's operator schemas by name."""

from __future__ import annotations

import functools
from typing import Any

import torch

from passes.torch_private import OpOverloadPacket, has_kernel

# Tensor methods that are `to` with a fixed dtype.
_CASTS = frozenset({
    "bfloat16", "bool", "byte", "cdouble", "cfloat", "chalf", "char", "double", "float", "half", "int", "long", "short",
})  # fmt: skip


def _packet(name: str) -> Any:
    return getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None


@functools.lru_cache(maxsize=4096)
def schemas(name: str) -> tuple[Any, ...] | None:
    """torch's operators of that name; None if there are none, or if one of them writes to an input.

    Variants with an `out` argument, and TorchScript's variants on plain numbers, are left out.
    """
    name = "to" if name in _CASTS else name
    packet = _packet(name)
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
    """Whether an operator of that name may draw random numbers."""
    packet = _packet(name)
    overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads)


@functools.cache
def kind_of_operator(name: str) -> str:
    """Classify an operator of ATen by its schemas: "aliases" inputs, "writes" to one, or "computes" a tensor; "answers" for other names."""
    packet = _packet(name)
    if packet is None:
        return "answers"
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads() if not overload.endswith("out")]
    returns = [result for schema in schemas for result in schema.returns if "Tensor" in str(result.type)]
    if any(result.alias_info is None for result in returns):
        return "computes"
    if any(result.alias_info.is_write for result in returns):
        return "writes"
    return "aliases" if returns else "answers"
