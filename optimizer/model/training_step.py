"""A training step `step(model, batch) -> loss`: forward and loss only, so that its caller chooses the rest of the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn

from optimize_export.errors import LoadError, UsageError
from optimize_export.structure import rebuild
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


_PLACES: dict[str, Callable[[Any], Any]] = {
    "": lambda result: result,
    '["loss"]': itemgetter("loss"),
    ".loss": attrgetter("loss"),
    "[0]": itemgetter(0),
}


def place_of_loss(result: Any) -> str:
    """Where the loss is in the result of a step, as Python after the call: "", '["loss"]', ".loss" or "[0]"."""
    if isinstance(result, Mapping) and "loss" in result:
        return '["loss"]'
    if not isinstance(result, torch.Tensor) and getattr(result, "loss", None) is not None:
        return ".loss"
    return "[0]" if isinstance(result, tuple | list) and result else ""


def loss_from(result: Any) -> torch.Tensor:
    """The loss in the result of a step: a scalar tensor, `loss` of a mapping or object, or the first of a tuple.

    Raises:
        UsageError: it isn't a scalar that needs a gradient.
    """
    loss = _PLACES[place_of_loss(result)](result)
    if not isinstance(loss, torch.Tensor):
        raise UsageError(f"The training step returns {a_type(result)}: return the loss, a scalar tensor.")
    if loss.numel() != 1:
        raise UsageError(f"The training step returns a loss of shape {tuple(loss.shape)}: return a scalar.")
    if not loss.requires_grad:
        raise UsageError(
            "The loss of the training step needs no gradient: return it as it was computed, without item() or detach(), "
            "and with gradients enabled."
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
    """The batch with its tensors on a device."""
    return rebuild(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def refuse_other_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise `UsageError` if a parameter of the optimizer isn't the model's."""
    own = {id(parameter) for parameter in model.parameters()}
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if others := [key for key in held if key not in own]:
        raise UsageError(
            f"{len(others)} of the {len(held)} parameters of the optimizer aren't the model's: make it over the "
            "parameters of this model, in a model's file by `make_optimizer(parameters)`."
        )


def optimizer_over(optimizer: torch.optim.Optimizer, model: nn.Module, copied: nn.Module) -> torch.optim.Optimizer:
    """A copy of an optimizer of the model, with its state, over the parameters of a copy of the model.

    Raises:
        UsageError: a parameter of the optimizer isn't the model's.
    """
    refuse_other_parameters(optimizer, model)
    # Deep copies take what the memo has: the parameters are the keys of the state too.
    memo: dict[int, Any] = dict(zip(map(id, model.parameters()), copied.parameters(), strict=True))
    made: torch.optim.Optimizer = copy.deepcopy(optimizer, memo)
    # Moves the state to the devices of the parameters.
    made.load_state_dict(made.state_dict())
    return made
