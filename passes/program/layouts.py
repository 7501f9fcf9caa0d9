"""Find out whether the strides of a value matter to anything that uses it; most operations accept any strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.program.captured import example_of, name_of, value_with


def why_layout_shows(node: fx.Node, instead: torch.Tensor) -> str | None:
    """The reason why a value can't have other strides, as a clause; None if nothing depends on its strides.

    The users of the value are recomputed on fake tensors, as far as the strides differ. Views pass on the new strides;
    most other operations don't.

    Args:
        node: the node of the value.
        instead: an example of the same shape with the other strides.
    """
    known: dict[fx.Node, Any] = {node: instead}
    waiting = dict.fromkeys(node.users) if _strides(instead) != _strides(example_of(node)) else {}
    while waiting:
        # In the order of execution, so that all inputs of a node are up to date.
        user = min(waiting)
        del waiting[user]
        name = name_of(user)
        if user.op == "output":
            return "its output leaves the forward, and its memory layout would change"
        if name.startswith("as_strided"):
            return f"its output goes to {name}, which depends on its memory layout"
        try:
            value = value_with(user, known)
        except (RuntimeError, ValueError):
            return f"its output goes to {name}, which doesn't accept rows of a wider tensor"
        if value is None:
            return f"its output goes to {name}, which isn't known to accept rows of a wider tensor"
        if _strides(value) != _strides(example_of(user)):
            known[user] = value
            waiting |= dict.fromkeys(user.users)
    return None


def _strides(value: Any) -> list[Any]:
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [leaf.stride() if leaf.layout is torch.strided else leaf.layout for leaf in tensors]
