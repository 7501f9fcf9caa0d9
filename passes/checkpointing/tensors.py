"""Tensors as views of their storage, and the tensors in the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from passes.torch_private import no_torch_function

# A tensor's view of its storage: size, stride and offset, as for `Tensor.as_strided`.
View = tuple[torch.Size, tuple[int, ...], int]


def view_of(tensor: Tensor) -> View:
    """The size, stride and offset of a tensor in its storage."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()  # type: ignore[return-value]


# A tensor class that overrides it computes differently.
_PLAIN = (Tensor.__torch_function__, no_torch_function)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but a strided view of its storage."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and (type(tensor) is Tensor or type(tensor).__torch_function__ in _PLAIN)
    )


def fills_its_memory(tensor: Tensor) -> bool:
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def version_of(tensor: Tensor) -> int:
    """The number of writes to a tensor; 0 for a tensor of inference mode, which has no version counter."""
    return 0 if tensor.is_inference() else tensor._version


_ROWS = (tuple, list)
CONTAINERS = (*_ROWS, dict, slice)


def leaves(value: Any) -> list[Any]:
    """The items in the containers of a call's arguments."""
    # Every call of a forward comes here several times, and a list takes less than half of the time of a generator.
    if isinstance(value, _ROWS):
        items: Iterable[Any] = value
    elif isinstance(value, dict):
        items = value.values()
    elif isinstance(value, slice):
        items = (value.start, value.stop, value.step)
    else:
        return [value]
    found = []
    for item in items:
        if isinstance(item, CONTAINERS):
            found += leaves(item)
        else:
            found.append(item)
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def tensors_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call."""
    found = []
    for item in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, CONTAINERS):
            found += tensors_in(item)
    return found


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild the containers of a call's arguments, with their items changed."""
    if isinstance(value, tuple):
        # A named tuple takes its items one by one; one of torch's own (`torch.return_types`) takes a sequence.
        items = [change(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [change(item) for item in value]
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(change(value.start), change(value.stop), change(value.step))
    return value
