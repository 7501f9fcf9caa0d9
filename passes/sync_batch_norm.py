"""BatchNorm over the batches of all processes: its layers become torch.nn.SyncBatchNorm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from passes.base import Context, ProgramPass
from passes.errors import RequirementNotMet
from passes.graph.hooks import is_parametrized
from passes.graph.program import Program
from passes.graph.rewriter import Rewriter
from passes.program.forwards import inner_forward
from passes.program.matching import BATCH_NORMS, arguments_of, is_stock
from passes.program.recording import Node

_LAYERS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# What a subclass may define of its own and lose: nobody asks the layer for it once it is made.
_OF_THE_MAKING = frozenset({
    "__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__annotate__", "__annotate_func__",
    "__annotations_cache__", "__static_attributes__", "__firstlineno__", "__parameters__", "__orig_bases__",
    "__constants__", "extra_repr", "__repr__",
})  # fmt: skip


@dataclass(frozen=True)
class SyncBatchNorm(ProgramPass):
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

    def rewrite(self, graph: Rewriter) -> None:
        """Only `rewrite_in` knows the device."""
        self.rewrite_in(graph, Context("training", torch.device("cpu")))

    def rewrite_in(self, graph: Rewriter, context: Context) -> None:
        """Convert every layer that can be converted.

        Raises:
            RequirementNotMet: there is no BatchNorm.
        """
        layers = list(_layers(graph.program))
        calls = list(_calls_of_functions(graph.program))
        if not layers and not calls:
            raise RequirementNotMet(
                f"{self.name} finds no BatchNorm in {type(graph.program.root).__name__}: leave the pass out."
            )
        for path in _instance_norms(graph.program):
            graph.skip_module(path, "an InstanceNorm normalises each sample by itself: there is nothing to synchronise")
        for path, module in layers:
            if reason := _why_not(module):
                graph.skip_module(path, reason)
            else:
                _convert(graph, path, module)
        for node in calls:
            graph.skip(node, "it is a call of a function: only an nn.BatchNorm layer can be synchronised")
        if graph.changes and context.device.type == "cpu":
            graph.remark("", "torch synchronises on a GPU: with a process group, a training step on this CPU raises")


def _layers(program: Program) -> Iterator[tuple[str, nn.Module]]:
    for module in program.modules():
        if isinstance(module, _BatchNorm) or _is_scripted(module):
            yield program.paths[id(module)][0], module


def _instance_norms(program: Program) -> Iterator[str]:
    for module in program.modules():
        if isinstance(module, _InstanceNorm):
            yield program.paths[id(module)][0]


def _is_scripted(module: nn.Module) -> bool:
    names = {cls.__name__ for cls in _LAYERS}
    return isinstance(module, torch.jit.ScriptModule) and getattr(module, "original_name", "") in names


def _calls_of_functions(program: Program) -> Iterator[Node]:
    """Where a forward normalises by the statistics of the batch and keeps running ones, without a layer."""
    for node in program.nodes():
        names = BATCH_NORMS.get(node.target) if node.op == "call_function" else None
        # Without running statistics it may as well be a weight that is standardised.
        if names is None or getattr(arguments_of(node, names).get("running_mean"), "op", "") != "get_attr":
            continue
        # A layer with such a forward of its own is named itself.
        if not isinstance(program.home(node).module, _BatchNorm):
            yield node


def _why_not(module: nn.Module) -> str | None:
    """The reason why a layer stays what it is."""
    if _is_scripted(module):
        return "it is TorchScript, which can't be changed"
    assert isinstance(module, _BatchNorm)
    kind = type(module).__name__
    if isinstance(module, nn.SyncBatchNorm):
        return "it is a SyncBatchNorm already"
    if isinstance(module, LazyModuleMixin):
        return f"it is a {kind}, not initialised yet: run the model once first"
    if is_parametrized(module):
        return "it has parametrizations"
    if not is_stock(module, _LAYERS):
        what = f"its class {kind}" if inner_forward(module) is None else "it"
        return f"{what} has a forward of its own, which a SyncBatchNorm wouldn't run"
    if own := _own_names(module):
        return f"its class {kind} has {own[0]} of its own, which a SyncBatchNorm hasn't"
    if module.num_features == 0:
        return "it has no channels, which a SyncBatchNorm refuses"
    if module.track_running_stats and module._buffers.get("num_batches_tracked") is None:
        return "it has no num_batches_tracked, without which a SyncBatchNorm keeps no running statistics"
    return None


def _own_names(module: nn.Module) -> list[str]:
    """What the classes of the layer define that torch's own don't, and that somebody may ask the layer for."""
    stock = next(cls for cls in _LAYERS if isinstance(module, cls))
    added = [vars(cls) for cls in type(module).__mro__ if cls not in stock.__mro__]
    return [name for names in added for name in names if name not in _OF_THE_MAKING]


def _convert(graph: Rewriter, path: str, module: nn.Module) -> None:
    what = f"{type(module).__name__} made a SyncBatchNorm"
    # Of several calls, the first shows what all of them compute.
    with graph.change(path, what, graph.program.calls_of(module)[:1]) as change:
        graph.set_class(change, module, nn.SyncBatchNorm)
        graph.set_attribute(change, module, "process_group", None)
