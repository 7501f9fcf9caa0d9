"""Rules on modules: which aren't registered, are in the wrong mode, or lack what several processes need."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from optimizer.diagnosis.evidence import Evidence, Line, Seen
from optimizer.diagnosis.findings import rule
from passes.graph.effects import is_dropout_off
from passes.graph.layers import batch_norm_arguments
from passes.graph.recording import Node, call_of, operation_name
from passes.torch_private import AnyBatchNorm

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@rule("error")
def unregistered(evidence: Evidence) -> Iterator[Seen]:
    """Forward uses layers in a plain list or dict, or a parameter in one, which the model doesn't register.

    Layers whose parameters are all frozen are left out: they may be hidden on purpose.
    """
    called = {id(call_of(node).module): node for node in reversed(evidence.calls)}
    holders: dict[str, list[tuple[str, Node]]] = {}
    for path, module in evidence.tree.unregistered:
        own = list(module.parameters(recurse=False))
        if id(module) in called and any(parameter.requires_grad for parameter in own):
            holders.setdefault(path.partition("[")[0], []).append((path, called[id(module)]))
    for holder, found in holders.items():
        paths = tuple(path for path, _ in found)
        yield Seen(
            paths,
            found[0][1].meta["line"],
            f"{holder} holds layers that the model doesn't register ({len(paths)})",
            "an optimizer doesn't train them, state_dict doesn't save them, and .to() doesn't move them",
            "put them into an nn.ModuleList or nn.ModuleDict",
        )
    loose = [
        node for node in evidence.calls if node.meta["loose"] and evidence.tree.is_registered(call_of(node).module)
    ]
    yield from evidence.seen_at_lines(
        loose,
        "forward uses a parameter that no module registers",
        "an optimizer doesn't train it, state_dict doesn't save it, and .to() doesn't move it",
        "make it an attribute of the module, or put it into an nn.ParameterList",
    )


@rule("error")
def training_mode(evidence: Evidence) -> Iterator[Seen]:
    """Dropout or BatchNorm computes as in training, although the model is in eval mode."""
    if not evidence.model.training:
        left = [path for path, module in evidence.model.named_modules() if module.training and _acts(module)]
        if left:
            yield Seen(
                tuple(left),
                Line(),
                "layers are in training mode inside a model in eval mode",
                "the outputs are random, or depend on the other rows of the batch",
                "call model.eval()",
            )
    yield from evidence.seen_at_lines(
        filter(_drops, evidence.calls),
        "values are dropped in eval mode too, by {names}",
        "the outputs are random",
        "pass training=self.training (dropout_p=0.0 in eval for attention)",
    )
    yield from evidence.seen_at_lines(
        filter(_normalizes_by_batch, evidence.calls),
        "batch_norm normalizes by the statistics of the batch in eval mode too, and updates the running ones",
        "the outputs depend on the other rows of the batch",
        "pass training=self.training",
    )


@rule("note")
def not_in_eval(evidence: Evidence) -> Iterator[Seen]:
    """The model is in training mode, and has Dropout or BatchNorm. Not reported with a training step."""
    left = [path for path, module in evidence.model.named_modules() if module.training and _acts(module)]
    if evidence.model.training and left and evidence.step is None:
        yield Seen(
            tuple(left),
            Line(),
            "the model is in training mode",
            "its outputs are random, or depend on the other rows of the batch; it was diagnosed in eval mode",
            "call model.eval() before inference",
        )


@rule("warning")
def data_parallel(evidence: Evidence) -> Iterator[Seen]:
    """The model is, or has, a `torch.nn.DataParallel`."""
    paths = [path for path, module in evidence.model.named_modules() if isinstance(module, nn.DataParallel)]
    if paths:
        yield Seen(
            tuple(paths),
            Line(),
            "DataParallel copies the model to all GPUs at every call, from threads of one process",
            "the copies and Python's lock take time, and the first GPU holds all outputs",
            "use DistributedDataParallel with one process per GPU",
        )


@rule("warning")
def batch_norm_per_process(evidence: Evidence) -> Iterator[Seen]:
    """BatchNorm is trained under data parallelism without SyncBatchNorm."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    is_parallel = any(isinstance(module, nn.DataParallel) for module in evidence.model.modules()) or (
        distributed and torch.distributed.get_world_size() > 1
    )
    paths = [
        path
        for path, module in evidence.model.named_modules()
        if isinstance(module, AnyBatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
    ]
    if is_parallel and paths:
        yield Seen(
            tuple(paths),
            Line(),
            "BatchNorm is trained under data parallelism",
            "each process normalizes by its own rows, so results depend on the number of processes",
            "use the pass sync-batch-norm before DistributedDataParallel",
        )


def _acts(module: nn.Module) -> bool:
    """Whether a module computes something else in training mode."""
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    return isinstance(module, AnyBatchNorm) and module.running_mean is not None


def _drops(node: Node) -> bool:
    name = operation_name(node)
    if name == "scaled_dot_product_attention":
        return bool(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0))
    return "dropout" in name and not is_dropout_off(node)


def _normalizes_by_batch(node: Node) -> bool:
    given = batch_norm_arguments(node) or {}
    return given.get("training") is True and given.get("running_mean") is not None
