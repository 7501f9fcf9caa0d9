"""Record the size of the tensors that a piece of code makes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LargestResult(TorchDispatchMode):
    """The elements of the largest tensor that an operation returned, by dtype; views of arguments don't count."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in _tensors(args, kwargs)}
        for leaf in _tensors(result):
            if leaf.untyped_storage()._cdata not in given:
                self.of[leaf.dtype] = max(self.of.get(leaf.dtype, 0), leaf.numel())
        return result


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
