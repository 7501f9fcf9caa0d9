"""BatchNorm(conv(x) + b) == BatchNorm'(conv(x)), with running_mean' = running_mean - b."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from passes.base import GraphPass
from passes.folding import are_finite, scale_of, why_not
from passes.graph.capture import same_graphs
from passes.graph.match import BatchNorm, Convolution, conv_bn_chains, way_of
from passes.graph.moved_bias import mean_without
from passes.graph.program import Program
from passes.graph.rewriter import Rewriter

_Pair = tuple[Convolution, BatchNorm]
# A convolution and a BatchNorm by the tensors that they read.
_Key = tuple[tuple[int, str] | None, ...]


@dataclass(frozen=True)
class FoldConvBias(GraphPass):
    """Move a convolution's bias into the running mean of the BatchNorm behind it.

    With y = conv(x) + b, a BatchNorm on running statistics gives

        (y - mean) / sqrt(var + eps) * w + c  ==  (conv(x) - (mean - b)) / sqrt(var + eps) * w + c

    so the bias goes, the mean moves by it, and nothing else changes. A BatchNorm on the statistics of the batch takes b
    out again with the mean of the batch, and the running mean that it keeps goes on being less by b. One addition per
    output element is saved where the convolution can't fuse it, and in training the sum that is the bias' gradient.

    In training, outputs, all other gradients and statistics are those of the original; the running mean is a buffer of
    the result's own, where all others stay the caller's. The `state_dict` keeps an entry for the bias, which is zero:
    it loads into the original and is right there, and one of the original loads into the result, whatever its bias.
    The original's bias has a gradient of zero but for rounding. Weight decay moves it all the same, and so does an
    optimizer that divides by the size of the gradient: after 20 steps of AdamW in float32 it had moved by 3e-3, which
    the original's running mean follows only in part. The result has nothing that could drift so.

    Does not handle: in inference, a BatchNorm on the statistics of the batch that keeps running ones; in training, a
    BatchNorm in eval (its bias does get a gradient) unless the bias is frozen too, a bias or mean in the memory of
    another tensor, and forwards by functions that differ between training and eval in how they use the two; an output
    with other users, shared or parametrized modules, modules with hooks, tensors that something else reads or may read
    in a branch of its code, a mean or scale that isn't finite.
    """

    name: ClassVar[str] = "fold-conv-bias"

    def rewrite(self, graph: Rewriter) -> None:
        """Fold every bias that can be folded."""
        elsewhere = [(state, _pairs_of(state)) for state in graph.program.other_states]
        for conv, norm in conv_bn_chains(graph.program):
            if conv.bias is None or not conv.bias.is_there:
                continue
            if reason := _why_not(graph.program, conv, norm) or _why_not_elsewhere(
                graph.program, elsewhere, conv, norm
            ):
                graph.skip(conv.node, reason)
                continue
            moved = _moved_mean(conv, norm)
            assert conv.bias_value is not None
            if are_finite(*([conv.bias_value] if moved is None else [moved, scale_of(norm)])):
                there = [pairs[key] for _, pairs in elsewhere if (key := _key_of(conv, norm)) in pairs]
                _fold(graph, conv, norm, moved, there)
            elif moved is None:
                graph.skip(conv.node, "its bias isn't finite")
            else:
                graph.skip(conv.node, f"the mean or scale of {graph.program.where(norm.node)} wouldn't be finite")


def _why_not(program: Program, conv: Convolution, norm: BatchNorm) -> str | None:
    return (
        _why_not_statistics(program, norm)
        or _why_not_saved(program, conv, norm)
        or _why_not_trained(program, conv, norm)
        or why_not(program, conv, norm)
    )


def _why_not_statistics(program: Program, norm: BatchNorm) -> str | None:
    where = f"the BatchNorm {program.where(norm.node)}"
    if (norm.mean is None) != (norm.var is None):
        return f"{where} keeps one of its running statistics without the other"
    # Without running statistics it takes off the mean of the batch in training and in eval.
    if norm.mean is not None and norm.uses_batch_statistics and program.mode != "training":
        return f"{where} uses the statistics of the batch"
    return None


def _why_not_saved(program: Program, conv: Convolution, norm: BatchNorm) -> str | None:
    """Whether checkpoints don't hold the bias and the mean under one name each."""
    if program.mode != "training" or conv.bias_value is None:
        return None
    for owner in (ref.owner for ref in (conv.bias, norm.mean) if ref is not None):
        where, *aliases = program.paths[id(owner)]
        if not program.is_registered(owner):
            return f"{where} stands in a plain container, where checkpoints don't find it: put it into an nn.ModuleList"
        if aliases:
            return f"checkpoints hold its tensors under two names, {where} and {aliases[0]}"
    return None


def _why_not_trained(program: Program, conv: Convolution, norm: BatchNorm) -> str | None:
    """Whether somebody counts on the bias being trained."""
    bias = conv.bias_value
    if program.mode != "training" or bias is None or not bias.requires_grad:
        return None
    if not norm.uses_batch_statistics:
        where = program.where(norm.node)
        other = "" if norm.module is None else f"put {where} in training before optimize(), or "
        return f"the BatchNorm {where} uses running statistics, with which the bias is trained: {other}freeze the bias"
    if bias._backward_hooks or getattr(bias, "_post_accumulate_grad_hooks", None):
        return "its bias has hooks, which see its gradient"
    return None


def _pairs_of(program: Program) -> dict[_Key, _Pair]:
    return {_key_of(*pair): pair for pair in conv_bn_chains(program)}


def _key_of(conv: Convolution, norm: BatchNorm) -> _Key:
    refs = (conv.weight, norm.weight, norm.bias, norm.mean, norm.var)
    places = (None if ref is None else (id(ref.owner), ref.name) for ref in refs)
    return (None if norm.module is None else (id(norm.module), ""), *places)


def _why_not_elsewhere(
    program: Program, states: Sequence[tuple[Program, Mapping[_Key, _Pair]]], conv: Convolution, norm: BatchNorm
) -> str | None:
    """Whether the two aren't for each other alone in training or in eval, where that is another state than that of now."""
    for state, pairs in states:
        when = "in training" if state.flags[id(state.root)] else "in eval"
        there = pairs.get(_key_of(conv, norm))
        if there is None:
            if None in (conv.module, norm.module) or not _is_unused(state, conv, norm):
                return f"{when} its output doesn't go to the BatchNorm {program.where(norm.node)}"
        elif reason := why_not(state, *there):
            return f"{when}, {reason}"
    return _why_not_replaced(program, conv, norm)


def _is_unused(state: Program, conv: Convolution, norm: BatchNorm) -> bool:
    """Whether neither is called, as in a head for training alone; a seal sees to it that it stays so."""
    modules = [module for module in (conv.module, norm.module) if module is not None]
    if state.recordings is not None:
        return all(state.calls_in_a_run(module) == 0 for module in modules)
    return not state.islands and not any(state.calls_of(module) for module in modules)


def _why_not_replaced(program: Program, conv: Convolution, norm: BatchNorm) -> str | None:
    """Whether a forward that graphs will stand in for has none for one of the states that a result can be in."""
    if program.mode != "training":
        return None
    for home in (program.home(place.node) for place in (conv, norm) if place.module is None):
        where = home.path or "the root"
        if any(item.name == "training" and item.home() is not home.module for item in home.baked):
            return (
                f"the forward of {where}, which a graph would stand in for, reads the training flag of another module"
            )
        known = {home.module.training: home}
        for state in program.other_states:
            other = state.graphs.get(id(home.module))
            if other is None or not other.traced or not home.structure.same_as(other.structure):
                return f"the forward of {where}, which a graph would stand in for, has none in the other mode"
            same = known.setdefault(state.flags[id(home.module)], other)
            if same.outputs != other.outputs or not same_graphs(same.graph, other.graph):
                return f"the forward of {where}, which a graph would stand in for, goes by more than its training flag"
        if set(known) != {True, False}:
            return f"the forward of {where}, which a graph would stand in for, is known in one mode only"
    return None


def _may_be_trained(conv: Convolution, norm: BatchNorm, elsewhere: Sequence[_Pair]) -> bool:
    """Whether the bias would be trained where the BatchNorm takes running statistics, as it does in another state."""
    assert conv.bias_value is not None
    if not elsewhere or not conv.bias_value.requires_grad or norm.mean is None:
        return False
    return norm.module is not None or any(not other.uses_batch_statistics for _, other in elsewhere)


def _moved_mean(conv: Convolution, norm: BatchNorm) -> torch.Tensor | None:
    """The running mean less the bias, (channels,); None where there is no running mean."""
    if norm.mean is None:
        return None
    bias, mean = conv.bias_value, norm.mean.value
    assert bias is not None
    assert mean is not None
    return mean_without(mean, bias)


def _fold(
    graph: Rewriter, conv: Convolution, norm: BatchNorm, moved: torch.Tensor | None, elsewhere: Sequence[_Pair]
) -> None:
    assert conv.bias is not None
    into = graph.program.where(norm.node)
    trained = _may_be_trained(conv, norm, elsewhere)
    what = f"bias moved into the running mean of {into}" if norm.mean else f"bias dropped, as {into} takes it out again"
    with graph.change(graph.program.where(conv.node), what, way_of(conv, norm)) as change:
        if graph.program.mode == "training":
            graph.move_bias(change, conv, norm)
        else:
            change.sources += [conv.bias, *([norm.mean] if norm.mean else [])]
            graph.drop_bias(change, conv)
        if norm.mean is not None and moved is not None:
            graph.set_tensor(change, norm.mean, moved)
        graph.tie(change, conv, norm, elsewhere=elsewhere, trained=trained)
