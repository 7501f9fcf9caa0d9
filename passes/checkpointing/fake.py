"""Run a module on fake tensors, which have shapes and no data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from passes.torch_private import FakeTensorMode


@contextmanager
def faked(
    root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int | None = None
) -> Iterator[tuple[Any, Any]]:
    """Replace all tensors that the modules of `root` hold by fake ones, with gradients for those that need one.

    Args:
        batch_size: the batch size of the fake arguments; None keeps their own. It replaces the first dim of each tensor
            whose first dim is as long as that of the first tensor.

    Yields:
        The arguments (args, kwargs) as fake tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twins: dict[int, tuple[Tensor, Tensor]] = {}

    def twin(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in twins:
            fake = mode.from_tensor(value)
            if value.requires_grad and value.is_leaf:
                with mode:
                    fake.grad = torch.empty_like(value if value.grad is None else value.grad)
            # Keep the original alive, so that no other tensor gets its id.
            twins[id(value)] = value, fake
        return twins[id(value)][1]

    replaced = [
        (home, name, value)
        for module in root.modules()
        for home in homes_of(module)
        for name, value in home.items()
        if isinstance(value, Tensor)
    ]
    try:
        for home, name, value in replaced:
            home[name] = twin(value)
        fakes = tree_map(twin, (args, kwargs))
        with mode:
            yield fakes if batch_size is None else _resized(fakes, batch_size)
    finally:
        for home, name, value in replaced:
            home[name] = value


def _resized(given: Any, batch_size: int) -> Any:
    """Change the batch size of fake arguments."""
    observed = next((leaf.shape[0] for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.dim()), None)

    def resized(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != observed:
            return value
        is_last = (
            value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)
        )
        rows = value.new_empty((batch_size, *value.shape[1:]))
        return rows.to(memory_format=torch.channels_last if is_last else torch.preserve_format).requires_grad_(
            value.requires_grad
        )

    return tree_map(resized, given)


def homes_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """The dicts in which a module holds its tensors."""
    return vars(module), module._parameters, module._buffers
