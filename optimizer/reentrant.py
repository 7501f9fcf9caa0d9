"""Gradients of a computation that holds a reentrant checkpoint, which `torch.autograd.grad` refuses.

`torch.utils.checkpoint(…, use_reentrant=True)` computes its part anew inside of the backward pass and calls `backward` there.
So the gradients land in `.grad`, of tensors too that the outer graph doesn't show: each of them has its own back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

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
    parameters: Sequence[tuple[str, torch.Tensor]],
) -> tuple[torch.Tensor | None, ...]:
    """As `torch.autograd.grad` of the outputs with `allow_unused`, by a `backward`; every `.grad` is afterwards as before.

    Args:
        edges: those of the outputs: a function mode that is active stays so for what is computed anew.
        leaves: what the gradients are wanted of.
        cotangents: one for each output.
        parameters: those of the model, with their names.

    Raises:
        LoadError: a tensor has a hook that runs when its gradient is there, as an optimizer in the backward pass has.
    """
    kept = _KeptGradients({id(parameter): name for name, parameter in reversed(parameters)})
    try:
        for leaf in (*leaves, *(parameter for _, parameter in parameters), *_leaves_behind(edges)):
            kept.set_aside(leaf)
        with kept:
            torch.autograd.backward(edges, cotangents)
        with torch._C.DisableTorchFunction():
            return tuple(leaf.grad for leaf in leaves)
    finally:
        kept.put_back()


class _KeptGradients(TorchFunctionMode):
    """Takes the gradient off each leaf before the first call that uses it, and puts all of them back."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        # With the tensor, else its id could name another one later.
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.backward:
            # That of a checkpoint, in which there may be another one: the modes around this one have to stay active, which
            # don't see a `backward` of edges. What is in there was seen when the outer one was computed anew.
            outputs, *others = args
            return func([get_gradient_edge(output) for output in outputs], *others, **kwargs)
        if getattr(func, "__name__", "") not in ("__get__", "__set__"):
            # `.grad` of an input of the checkpoint is read when it is there already.
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self.set_aside(leaf)
        return func(*args, **kwargs)

    def set_aside(self, tensor: torch.Tensor) -> None:
        # Else the modes that are active would answer in the tensor's place.
        with torch._C.DisableTorchFunction():
            if id(tensor) in self._kept or not (tensor.is_leaf and tensor.requires_grad):
                return
            if getattr(tensor, "_post_accumulate_grad_hooks", None):
                name = self._names.get(id(tensor), f"a tensor of the shape {tuple(tensor.shape)}")
                raise LoadError(
                    f"The model has a reentrant checkpoint, and {name} a hook that runs when its gradient is there, as an"
                    " optimizer in the backward pass has: a comparison of gradients would run it, so take the hook off"
                    " first, or make the checkpoint with use_reentrant=False."
                )
            self._kept[id(tensor)] = tensor, tensor.grad
            tensor.grad = None

    def put_back(self) -> None:
        with torch._C.DisableTorchFunction():
            for tensor, gradient in self._kept.values():
                tensor.grad = gradient


def _leaves_behind(edges: Sequence[GradientEdge]) -> list[torch.Tensor]:
    """The leaves that these outputs were computed from; those inside of a reentrant checkpoint aren't among them."""
    found = (getattr(node, "variable", None) for node in _nodes_behind(edges))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def _nodes_behind(edges: Sequence[GradientEdge]) -> Iterator[Node]:
    waiting = [edge.node for edge in edges]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting += new
