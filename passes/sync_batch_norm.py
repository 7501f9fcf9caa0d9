"""BatchNorm over the batches of all processes: its layers become torch.nn.SyncBatchNorm."""

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
    is_stock,
    tensor_of,
)
from passes.torch_private import AnyBatchNorm, AnyInstanceNorm

_LAYERS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# What a subclass may define of its own and lose: nobody asks the layer for it once it is made.
_OF_THE_MAKING = frozenset({
    "__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__annotate__", "__annotate_func__",
    "__annotations_cache__", "__static_attributes__", "__firstlineno__", "__parameters__", "__orig_bases__",
    "__constants__", "extra_repr", "__repr__",
})  # fmt: skip


@dataclass(frozen=True)
class SyncBatchNorm(ModulePass):
    """Take the statistics of BatchNorm layers over the batches of all processes: make each a torch.nn.SyncBatchNorm.

    Of processes k = 1 … K that train together, of which each has n_k values x_k of a channel, all normalise by

        mean = sum_k sum(x_k) / sum_k n_k        var = sum_k sum((x_k - mean)²) / sum_k n_k

    as one process would that has the whole batch. Without a process group, on one process, and in eval a SyncBatchNorm
    computes what the BatchNorm did: that is what is compared. The layer stays the object that it is and is given another
    class: parameters and buffers, names, hooks, training flag and settings are those of before, and an optimizer that
    was made earlier goes on working. Convert before DistributedDataParallel is put around the model.

    The group is the whole world of `torch.distributed`; for another one set `process_group` of the layers, as
    `convert_sync_batchnorm` does. torch synchronises on GPUs: with a process group, a training step on a CPU raises.

    Does not handle: subclasses that compute something else or have methods of their own, parametrized layers and
    TorchScript, calls of `F.batch_norm`, layers that count no batches, InstanceNorm, which has no statistics of a batch;
    code that asks for a layer by its class, which isn't nn.BatchNorm2d any more, and input of other dims than the
    BatchNorm took, which isn't refused any more; a process group that is made behind the first call of compiled code, for
    which torch.compile has it that there is none. A model without any BatchNorm raises.
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
    """Where a run normalises by the statistics of the batch and keeps running ones, without a layer."""
    recorded = model.runs(context)
    found: dict[str, None] = {}
    for run in () if recorded is None else recorded.runs:
        for node in run.recording.nodes():
            given = batch_norm_arguments(node)
            # Without running statistics it may as well be a weight that is standardised.
            if given is None or tensor_of(given.get("running_mean")) is None:
                continue
            # A layer with such a forward of its own is named itself.
            module = call_of(node).module
            if not isinstance(module, AnyBatchNorm):
                found[f"{model.tree.path(module) or 'the root'} (batch_norm)"] = None
    return list(found)


def _why_not(module: nn.Module) -> str | None:
    """The reason why a layer stays what it is."""
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
    if not is_stock(module, _LAYERS):
        what = f"its class {kind}" if inner_forward(module) is None else "it"
        return f"{what} has its own forward, which a SyncBatchNorm wouldn't run"
    if own := _own_names(module):
        return f"its class {kind} has its own {own[0]}, which a SyncBatchNorm doesn't have"
    if module.num_features == 0:
        return "it has no channels, which a SyncBatchNorm doesn't accept"
    if module.track_running_stats and module._buffers.get("num_batches_tracked") is None:
        return "it has no num_batches_tracked, without which a SyncBatchNorm keeps no running statistics"
    return None


def _own_names(module: nn.Module) -> list[str]:
    """What the classes of the layer define that torch's own don't, and that somebody may ask the layer for."""
    stock = next(cls for cls in _LAYERS if isinstance(module, cls))
    added = [vars(cls) for cls in type(module).__mro__ if cls not in stock.__mro__]
    return [name for names in added for name in names if name not in _OF_THE_MAKING]


def _convert(model: ModuleRewriter, module: nn.Module) -> None:
    what = f"{type(module).__name__} converted to SyncBatchNorm"
    with model.change(model.tree.path(module), what, module):
        model.set_class(module, nn.SyncBatchNorm)
        model.set_attribute(module, "process_group", None)
