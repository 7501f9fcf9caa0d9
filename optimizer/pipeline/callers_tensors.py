"""The tensors of the caller's model, which no pass may write to."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from optimize_export.errors import OptimizeFailed
from optimizer.model import Source, WorkingCopy, is_script, reachable_modules
from passes.base import Pass
from passes.graph.model_tree import ModelTree
from passes.graph.storage import same_values


class CallersTensors:
    """The caller's tensors before a pass runs, with their versions.

    A run writes to the buffers of scripted modules and restores them, which changes their versions. So their values are
    kept too.
    """

    def __init__(self, copy: WorkingCopy, original: nn.Module, tree: ModelTree) -> None:
        named = [*original.named_parameters(), *original.named_buffers()]
        for path, module in tree.unregistered:
            own = copy.originals[id(module)]
            tensors = (*own.named_parameters(recurse=False), *own.named_buffers(recurse=False))
            named += ((f"{path}.{name}", tensor) for name, tensor in tensors)
        scripted = (module for module in reachable_modules(copy.root) if is_script(module))
        put_back = {id(tensor) for module in scripted for tensor in module.buffers(recurse=False)}
        self._before: list[tuple[Source, torch.Tensor | None]] = [
            (Source.of(name, tensor), tensor.detach().clone() if id(tensor) in put_back else None)
            for name, tensor in named
            if not is_lazy(tensor)
        ]

    def refuse_writes(self, item: Pass) -> None:
        """Check that the pass wrote to none of them, because that can't be undone.

        Raises:
            OptimizeFailed: the pass wrote to one.
        """
        written = [
            source.path
            for source, values in self._before
            if not source.unchanged and (values is None or not same_values(source.tensor, values))
        ]
        if written:
            raise OptimizeFailed(
                f"The pass {item.name} wrote in place to {written[0]}, which belongs to the caller's model: a pass "
                "must create a new tensor, so leave out the pass and load the model's weights again."
            )
