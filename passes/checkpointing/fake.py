"""Running a module on tensors that have shapes and no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map


@contextmanager
def faked(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Put fake tensors into the place of all that the modules of `root` hold, with gradients for those that need one.

    Yields:
        The arguments as fake tensors.
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
            # The original is held with it: else its identity might become another's.
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
            yield fakes
    finally:
        for home, name, value in replaced:
            home[name] = value


def homes_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module holds its tensors."""
    return vars(module), module._parameters, module._buffers
