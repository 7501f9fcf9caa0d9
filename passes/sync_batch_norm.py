"""Convert BatchNorm layers to torch.nn.SyncBatchNorm, to train with several processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from passes.base import Context
from passes.errors import RequirementNotMet
from passes.module_interface import (
    ModulePass,
    ModuleRewriter,
    batch_norm_arguments,
    call_of,
    inner_forward,
    is_parametrized,
    tensor_of,
)
from passes.torch_private import AnyBatchNorm, AnyInstanceNorm

_LAYERS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class SyncBatchNorm(ModulePass):
    """Convert BatchNorm layers to torch.nn.SyncBatchNorm, whose statistics cover the batches of all processes.

    K processes train together, and process k = 1 … K has n_k values x_k of a channel. All of them normalize by

        mean = sum_k sum(x_k) / sum_k n_k        var = sum_k sum((x_k - mean)²) / sum_k n_k

    as one process with the whole batch would. Without a process group, on one process, and in eval, a SyncBatchNorm
    computes what the BatchNorm did, and this is what the comparison checks. Each layer stays the same object, and only
    its class changes. It keeps its parameters, buffers, names, hooks, training flag and settings. An optimizer that was
    created earlier keeps working. Convert before you wrap the model in DistributedDataParallel.

    The statistics cover all processes of `torch.distributed`. For another group, set `process_group` of the layers, as
    `convert_sync_batchnorm` does. torch synchronizes on GPUs: with a process group, a training step on a CPU raises.

    Does not handle:

    - subclasses, layers with a forward of their own, parametrized layers, and lazy layers that never ran
    - TorchScript, calls of `F.batch_norm`, and layers without `num_batches_tracked`
    - InstanceNorm, which has no batch statistics
    - code that checks the class of a layer, which isn't nn.BatchNorm2d any more
    - inputs with other numbers of dims, which the BatchNorm refused and the SyncBatchNorm accepts
    - a process group that is created after the first call of compiled code, for which torch.compile assumes that there is
      none

    A model without any BatchNorm raises.
    """

    name: ClassVar[str] = "sync-batch-norm"
    modes: ClassVar[tuple[str, ...]] = ("training",)

    def rewrite(self, model: ModuleRewriter, context: Context) -> None:
        """Convert every layer that can be converted.

        Raises:
            RequirementNotMet: there is no BatchNorm.
        """
        tree = model.tree
        layers = [module for module in tree.modules() if isinstance(module, AnyBatchNorm) or _is_scripted(module)]
        calls = _calls_of_functions(model, context)
        if not layers and not calls:
            raise RequirementNotMet(
                f"{self.name} finds no BatchNorm in {type(tree.root).__name__}: leave the pass out."
            )
        for module in tree.modules():
            if isinstance(module, AnyInstanceNorm):
                model.skip(
                    tree.path(module),
                    "an InstanceNorm normalizes each sample on its own: there is nothing to synchronize",
                )
        for module in layers:
            if reason := _why_not(module):
                model.skip(tree.path(module), reason)
            else:
                _convert(model, module)
        for where in calls:
            model.skip(where, "it is a function call: only an nn.BatchNorm layer can be synchronized")
        if model.changes and context.device.type == "cpu":
            model.remark("", "torch synchronizes on a GPU: with a process group, a training step on this CPU raises")


def _is_scripted(module: nn.Module) -> bool:
    names = {cls.__name__ for cls in _LAYERS}
    return isinstance(module, torch.jit.ScriptModule) and getattr(module, "original_name", "") in names


def _calls_of_functions(model: ModuleRewriter, context: Context) -> Sequence[str]:
    """The places where a run calls `batch_norm` with running statistics outside of a BatchNorm layer."""
    recorded = model.runs(context)
    found: dict[str, None] = {}
    for run in () if recorded is None else recorded.runs:
        for node in run.recording.nodes():
            given = batch_norm_arguments(node)
            # Without running statistics, it may also be a weight standardization.
            if given is None or tensor_of(given.get("running_mean")) is None:
                continue
            # A BatchNorm layer with its own forward is reported as a layer.
            module = call_of(node).module
            if not isinstance(module, AnyBatchNorm):
                found[f"{model.tree.path(module) or 'the root'} (batch_norm)"] = None
    return list(found)


def _why_not(module: nn.Module) -> str | None:
    """The reason why a layer isn't converted; None if it can be."""
    if _is_scripted(module):
        return "it is TorchScript, which can't be changed"
    assert isinstance(module, AnyBatchNorm)
    kind = type(module).__name__
    if isinstance(module, nn.SyncBatchNorm):
        return "it is already a SyncBatchNorm"
    if isinstance(module, LazyModuleMixin):
        return f"it is a {kind}, not initialised yet: run the model once first"
    if is_parametrized(module):
        return "it has parametrizations"
    if type(module) not in _LAYERS:
        return f"its class {kind} may compute something else, which a SyncBatchNorm wouldn't"
    if inner_forward(module) is not None:
        return "it has its own forward, which a SyncBatchNorm wouldn't run"
    if module.num_features == 0:
        return "it has no channels, which a SyncBatchNorm doesn't accept"
    if module.track_running_stats and module._buffers.get("num_batches_tracked") is None:
        return "it has no num_batches_tracked, without which a SyncBatchNorm keeps no running statistics"
    return None


def _convert(model: ModuleRewriter, module: nn.Module) -> None:
    what = f"{type(module).__name__} converted to SyncBatchNorm"
    with model.change(model.tree.path(module), what, module):
        model.set_class(module, nn.SyncBatchNorm)
        model.set_attribute(module, "process_group", None)
