"""A training step `step(model, batch) -> loss`: forward and loss only, so that its caller chooses the rest of the step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from optimize_export.errors import LoadError, UsageError
from optimize_export.wording import a_type
from optimizer.model.inputs import Call


def batch_of(call: Call) -> Any:
    """The batch that the example inputs stand for: the only tensor, the tuple of arguments, or the dict of keyword ones."""
    if call.kwargs and call.args:
        raise UsageError(
            "The example inputs have positional and keyword arguments, so they don't say what a batch is: add "
            "`training_batch` to the model's file, or pass `batch=…`."
        )
    if call.kwargs:
        return dict(call.kwargs)
    return call.args[0] if len(call.args) == 1 else call.args


def loss_of(returned: Any) -> torch.Tensor:
    """The loss that a step returned: itself, the first of a tuple or list, or "loss" of a mapping or output object."""
    if isinstance(returned, Mapping):
        loss = returned.get("loss")
    elif isinstance(returned, tuple | list) and not hasattr(returned, "loss"):
        loss = returned[0] if returned else None
    else:
        loss = getattr(returned, "loss", returned)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = a_type(returned) if loss is None or not isinstance(loss, torch.Tensor) else "a tensor"
        why = ""
        if isinstance(loss, torch.Tensor):
            why = f" of shape {list(loss.shape)}" if loss.numel() != 1 else " that needs no gradient"
        raise LoadError(
            f"The training step returned {what}{why} instead of a loss: return the loss, a scalar tensor that needs a "
            'gradient, or a dict with "loss", or a tuple whose first is the loss.'
        )
    return loss.reshape(())


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader, from the start again after the last one. Raises LoadError if it has none."""
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise LoadError(
                "The loader has no batches left: it must be a DataLoader, or another iterable that starts again."
            )


def moved(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """The batch on a device: its tensors, and other values in its containers that have a method `to`."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=non_blocking) if callable(getattr(leaf, "to", None)) else leaf

    return pytree.tree_map(move, batch)


def optimizer_over(optimizer: torch.optim.Optimizer, model: nn.Module, copied: nn.Module) -> torch.optim.Optimizer:
    """A copy of an optimizer of the model, with its state, over the parameters of a copy of the model.

    Raises:
        UsageError: a parameter of the optimizer isn't the model's.
    """
    # Deep copies take what the memo has: the parameters are the keys of the state too.
    memo: dict[int, Any] = dict(zip(map(id, model.parameters()), copied.parameters(), strict=True))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if others := [parameter for parameter in held if id(parameter) not in memo]:
        raise UsageError(
            f"{len(others)} of the {len(held)} parameters of the optimizer aren't the model's: make it over the "
            "parameters of this model, in a model's file by `make_optimizer(parameters)`."
        )
    made: torch.optim.Optimizer = copy.deepcopy(optimizer, memo)
    # Moves the state to the devices of the parameters.
    made.load_state_dict(made.state_dict())
    return made
