"""Gradients of a computation that holds a reentrant checkpoint, which `torch.autograd.grad` refuses.

`torch.utils.checkpoint(…, use_reentrant=True)` computes its part anew inside of the backward pass and calls `backward` there.
So the gradients land in `.grad`: of a copy of the model, whose parameters are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from optimizer.errors import LoadError

# What `CheckpointFunction` of torch leaves in the graph; those of Megatron and DeepSpeed, which do the same, have its name.
_REENTRANT = "CheckpointFunctionBackward"


def is_reentrant(edges: Sequence[GradientEdge]) -> bool:
    """Whether a reentrant checkpoint is among what these outputs were computed by."""
    return any(node.name() == _REENTRANT for node in _nodes_behind(edges))


def gradients_by_backward(
    edges: Sequence[GradientEdge],
    leaves: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor] | None,
) -> tuple[torch.Tensor | None, ...]:
    """As `torch.autograd.grad` of the outputs with `allow_unused`, by a `backward`; every `.grad` is afterwards as before.

    Args:
        edges: those of the outputs: a function mode that is active stays so for what is computed anew.
        leaves: what the gradients are wanted of.
        cotangents: one for each output.
        parameters: those of the module that was run; None for a callable, whose parameters nothing tells.

    Raises:
        LoadError: it is a callable, or a tensor has a hook that runs when its gradient is there, as an optimizer in the
            backward pass has.
    """
    if parameters is None:
        raise LoadError(
            "The function has a reentrant checkpoint, which writes gradients to tensors that nothing here knows of: give the"
            " module itself, or make the checkpoint with use_reentrant=False."
        )
    # Else the modes that are active would answer in the tensors' place.
    with torch._C.DisableTorchFunction():
        kept = [(leaf, leaf.grad) for leaf in (*leaves, *parameters) if leaf.is_leaf and leaf.requires_grad]
        if any(getattr(leaf, "_post_accumulate_grad_hooks", None) for leaf, _ in kept):
            raise LoadError(
                "The model has a reentrant checkpoint and a hook that runs when a gradient is there, as an optimizer in the"
                " backward pass has: a comparison of gradients would run it, so take the hook off first, or make the"
                " checkpoint with use_reentrant=False."
            )
    try:
        with torch._C.DisableTorchFunction():
            for leaf, _ in kept:
                leaf.grad = None
        with _NestedBackward():
            torch.autograd.backward(edges, cotangents)
        with torch._C.DisableTorchFunction():
            return tuple(leaf.grad for leaf in leaves)
    finally:
        with torch._C.DisableTorchFunction():
            for leaf, gradient in kept:
                leaf.grad = gradient


class _NestedBackward(TorchFunctionMode):
    """Keeps the modes around this one active in the `backward` of a checkpoint, in which there may be another checkpoint.

    A function mode is off inside the functions that it sees, and it doesn't see a `backward` of edges.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.autograd.backward:
            outputs, *others = args
            args = ([get_gradient_edge(output) for output in outputs], *others)
        return func(*args, **(kwargs or {}))


def _nodes_behind(edges: Sequence[GradientEdge]) -> Iterator[Node]:
    waiting = [edge.node for edge in edges]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting += new
