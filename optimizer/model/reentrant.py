"""Gradients of a computation with a reentrant checkpoint, which `torch.autograd.grad` refuses.

`torch.utils.checkpoint(…, use_reentrant=True)` recomputes its part in the backward pass and calls `backward` there. So
the gradients go to `.grad` of the parameters, which belong to a copy of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.autograd.graph import GradientEdge, Node

from optimize_export.errors import LoadError
from passes.torch_private import without_torch_function

# The graph node of torch's `CheckpointFunction`. Those of Megatron and DeepSpeed do the same and have the same name.
_REENTRANT = "CheckpointFunctionBackward"


def is_reentrant(edges: Sequence[GradientEdge]) -> bool:
    """Whether the graph of these outputs contains a reentrant checkpoint."""
    return any(node.name() == _REENTRANT for node in _nodes_behind(edges))


def gradients_by_backward(
    edges: Sequence[GradientEdge],
    leaves: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor] | None,
) -> tuple[torch.Tensor | None, ...]:
    """Compute gradients as `torch.autograd.grad` with `allow_unused` does, by a `backward`, and restore every `.grad`.

    Args:
        edges: the gradient edges of the outputs. With edges, an active function mode stays active for recomputed parts.
        leaves: the tensors to compute gradients for.
        cotangents: one per output.
        parameters: those of the module that ran; None for a callable, whose parameters are unknown.

    Raises:
        LoadError: a callable ran, or a tensor has a hook that runs once its gradient is accumulated, as an optimizer in
            the backward pass has.
    """
    if parameters is None:
        raise LoadError(
            "The function uses a reentrant checkpoint, which writes gradients to tensors that the comparison can't "
            "find: pass the module itself, or create the checkpoint with use_reentrant=False."
        )
    # Otherwise active function modes would intercept the access to `.grad`.
    with without_torch_function():
        kept = [(leaf, leaf.grad) for leaf in (*leaves, *parameters) if leaf.is_leaf and leaf.requires_grad]
        if any(getattr(leaf, "_post_accumulate_grad_hooks", None) for leaf, _ in kept):
            raise LoadError(
                "The model has a reentrant checkpoint and a hook that runs when a gradient is computed, such as an "
                "optimizer in the backward pass. Comparing gradients would run the hook: remove it first, or "
                "create the checkpoint with use_reentrant=False."
            )
    try:
        with without_torch_function():
            for leaf, _ in kept:
                leaf.grad = None
        torch.autograd.backward(edges, cotangents)
        with without_torch_function():
            return tuple(leaf.grad for leaf in leaves)
    finally:
        with without_torch_function():
            for leaf, gradient in kept:
                leaf.grad = gradient


def _nodes_behind(edges: Sequence[GradientEdge]) -> Iterator[Node]:
    waiting = [edge.node for edge in edges]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting += new
