"""The only way to change tensors of a working copy.

Each change also installs its guards. Seals make the values between the two of a pair, and the changed tensors, unusable
for anything else. Checkpoint hooks handle the loading of old weights. Everything can be rolled back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from passes.program.changes import Change, Place, Skip
from passes.program.edits import MISSING
from passes.program.folded import FoldedConvForward, FoldedNormForward
from passes.program.judging import Judge
from passes.program.matching import (
    Affine,
    BatchNorm,
    ChannelScale,
    Convolution,
    Pair,
    affine_at,
    channels_at_end,
    convolution_at,
    pair_behind,
    pair_in_front,
)
from passes.program.model_tree import ModelTree
from passes.program.pairs import FoldedPair
from passes.program.recording import Node, Recording, shape_of
from passes.program.replay import Rewritten
from passes.program.sealed_edits import SealedEdits, without_values
from passes.program.tensors import TensorRef
from passes.program.weights import bare, folded_parameter, folded_tensor, is_folded

# Identifies a pair: the layer's weight, the tensor that identifies the affine operation, and whether that one leads.
_Key = tuple[int, str, int, str, bool]


class TensorChange(Change):
    """One rewrite of tensors.

    Attributes:
        rewritten: for each run, the rewritten pair with its tensors before and after.
    """

    rewritten: Mapping[Recording, Rewritten]


class TensorRewriter(SealedEdits[TensorChange]):
    """Finds the pairs in recorded runs and rewrites their tensors, for one pass.

    Attributes:
        mode: "inference" or "training".
        recordings: the recorded runs, one for each example call and each training state of the result. The value says
            which state: "in eval", "in training", or "" for the model's own flags.
    """

    weights_alone = True

    def __init__(
        self, tree: ModelTree, mode: str, recordings: Mapping[Recording, str], left_alone: Mapping[Place, str]
    ) -> None:
        super().__init__(tree, left_alone)
        self.mode = mode
        self.recordings = recordings
        self._judge = Judge(tree, mode)
        # The calls of each recording, keyed by a layer's weight or the tensor that identifies an affine operation.
        self._calls = {recording: _calls_in(recording) for recording in recordings}
        # The affine operations, in all recordings, whose work their layers do by now.
        self._folded: set[Node] = set()

    # Find -------------------------------------------------------------------------------------------------------------

    def pairs(self, *, in_front: bool = False) -> Iterator[Pair]:
        """Yield each pair once, in the order of the runs.

        A fold during the iteration makes the next affine operation in a row part of a new pair.

        Args:
            in_front: yield the pairs whose BatchNorm comes before the layer; by default those whose affine operation
                follows it.
        """
        seen: set[_Key] = set()
        known = -1
        while known != len(seen):
            known = len(seen)
            for recording in self.recordings:
                for pair in self._pairs_of(recording.nodes(), in_front):
                    if (key := _key_of(pair)) not in seen:
                        seen.add(key)
                        yield pair

    def where(self, place: Convolution | Affine) -> str:
        """The location for reports: a layer's path, or that of the surrounding module with the operation's name."""
        return self._judge.where(place.node)

    def skip_the_rest(self) -> None:
        """Skip, with the reason, the affine operations after a layer that make no pair with it."""
        for recording in self.recordings:
            for node in recording.nodes():
                if reason := self._judge.why_alone(node):
                    self.skips.append(Skip(self._judge.where(node), reason))
            return

    # Judge ------------------------------------------------------------------------------------------------------------

    def why_not(self, pair: Pair) -> str | None:
        """The reason why the pair can't be folded, as a clause; None if it can be folded in all runs."""
        for recording, when in self.recordings.items():
            found = self._found_in(recording, pair)
            if found:
                if reason := self._judge.why_not(found, recording):
                    return f"{when}, {reason}" if when else reason
            elif any(recording.uses(ref) for ref in (*pair.conv.tensors, *pair.affine.tensors)):
                return f"{when or 'in some run'} its output doesn't go to {self._judge.where(pair.second.node)}"
        return None

    def runs_of(self, pair: Pair) -> list[Pair]:
        """The pair in each of the runs."""
        return [one for recording in self.recordings for one in self._found_in(recording, pair)]

    def _found_in(self, recording: Recording, pair: Pair) -> list[Pair]:
        calls = self._calls[recording]
        nodes = calls.get(_place_of(pair.conv if pair.affine.leads else pair.affine), ())
        key = _key_of(pair)
        return [one for one in self._pairs_of(nodes, pair.affine.leads) if _key_of(one) == key]

    def _pairs_of(self, nodes: Iterable[Node], in_front: bool) -> Iterator[Pair]:
        for node in nodes:
            pair = (pair_in_front if in_front else pair_behind)(node, self._folded)
            if pair is not None:
                # A functional layer without a bias uses the bias that a fold added.
                yield replace(pair, conv=replace(pair.conv, bias=self._bias_of(pair)))

    def is_as_given(self, affine: Affine) -> bool:
        """Whether the operation is from a run with the model's own training flags."""
        return any(affine.node.graph is recording.graph and not when for recording, when in self.recordings.items())

    def skip(self, place: Convolution | Affine, reason: str) -> None:
        """Skip a candidate; the reason is a sentence without the full stop."""
        self.skips.append(Skip(self.where(place), reason))

    # Rewrite ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def change(self, place: Convolution | Affine, what: str, pair: Pair) -> Iterator[TensorChange]:
        """Record the edits of the block as one change; an excluded change is undone and recorded as a skip.

        An error in the block undoes its edits.
        """
        change = TensorChange(self.where(place), what, between=(self.where(pair.first), self.where(pair.second)))
        old, passed = self._tensors_of(pair), frozenset(self._folded)
        shown = {recording: found[0] for recording in self.recordings if (found := self._found_in(recording, pair))}
        with self._recorded(change):
            yield change
            new, bias = self._tensors_of(pair), self._bias_of(pair)
            carried = self._folded != passed
            change.rewritten = {
                recording: Rewritten(one, old, new, bias, carried, passed & frozenset(one.affine.moves))
                for recording, one in shown.items()
            }

    def fold(self, pair: Pair, weight: torch.Tensor, bias: torch.Tensor) -> None:
        """Give the layer a new weight and bias, with which it also does the affine operation's work.

        Args:
            weight: in the shape and dtype of the current weight.
            bias: (out,).
        """
        conv, affine = pair.conv, pair.affine
        change = self._changing()
        change.sources += (*conv.tensors, *affine.tensors)
        done = {one.affine.node for one in self.runs_of(pair)}
        folded = self._folded_pair(pair, carried=True)
        layer = self._layer_of(pair, folded, beyond=self._is_beyond(pair))
        needs_gradient = any(ref.value is not None and ref.value.requires_grad for ref in change.sources)
        self._put_folded(conv.weight, folded_parameter(weight, layer, requires_grad=needs_gradient))
        if layer.bias is None:
            layer.bias = TensorRef(conv.weight.owner, _free_name(conv.weight))
        if is_folded(layer.bias.owner.__dict__.get(layer.bias.name)):
            self._set(layer.bias.owner, layer.bias.name, MISSING)
        self._put_folded(layer.bias, folded_parameter(bias, layer, requires_grad=needs_gradient))
        if conv.module is not None:
            self._set_forward(conv.module, FoldedConvForward(conv.module, layer.pair, layer.front))
        self._take_norm_away(affine, folded)
        if not change.left_alone:
            self._folded |= done

    def move_bias(self, pair: Pair, mean: torch.Tensor | None, *, trained: bool) -> None:
        """Remove the layer's bias, which the BatchNorm's running mean contains from now on.

        Args:
            mean: the new running mean, (channels,); None for a BatchNorm without running statistics.
            trained: whether the original trains the bias when the BatchNorm uses its running statistics.
        """
        conv, norm = pair.conv, pair.affine
        assert conv.bias is not None
        assert isinstance(norm, BatchNorm)
        # In training, the tensors may be written to, so the result gets its own values.
        sources = [conv.bias, *([norm.mean] if norm.mean else [])]
        if self.mode != "training":
            self._changing().sources += sources
        folded = self._folded_pair(pair, carried=False, trained=trained)
        layer = self._layer_of(pair, folded, beyond=self._is_beyond(pair))
        bias = conv.bias_value
        if self.mode == "training":
            self._keep_in_checkpoints(pair)
        else:
            self._take_away(conv.bias)
        weight = conv.weight.value
        assert weight is not None
        if self.mode != "training":
            # Without its bias, the layer is only correct as part of this pair.
            self._put_folded(conv.weight, folded_parameter(bare(weight), layer, requires_grad=weight.requires_grad))
        if bias is not None:
            self._set(conv.bias.owner, conv.bias.name, folded_tensor(without_values(bias), layer=layer))
        if conv.module is not None:
            self._set_forward(conv.module, FoldedConvForward(conv.module, layer.pair, layer.front))
        if norm.mean is not None and mean is not None:
            self._put_folded(norm.mean, self._moved(mean, folded))
        if norm.module is not None:
            self._set_forward(norm.module, FoldedNormForward(norm.module, folded, carried=False))

    def _tensors_of(self, pair: Pair) -> dict[TensorRef, torch.Tensor]:
        bias = self._bias_of(pair)
        refs = [pair.conv.weight, *pair.affine.tensors, *([] if bias is None else [bias])]
        return {ref: value for ref in refs if (value := ref.value) is not None}

    def _bias_of(self, pair: Pair) -> TensorRef | None:
        """The current place of the layer's bias."""
        layer = getattr(pair.conv.weight.value, "sealed_layer", None)
        return pair.conv.bias if pair.conv.bias is not None or layer is None else layer.bias

    # Seals ------------------------------------------------------------------------------------------------------------

    def _folded_pair(self, pair: Pair, *, carried: bool, trained: bool = False) -> FoldedPair:
        conv, affine = pair.conv, pair.affine
        folded = FoldedPair(
            self.where(conv),
            self.where(affine),
            self._rank_of(pair),
            conv.dims,
            leads=affine.leads,
            trained=trained,
            carried=carried,
            function=None if affine.module is not None else affine.named_by,
            operation=affine.operation if isinstance(affine, ChannelScale) else "batch_norm",
            eps=affine.eps if isinstance(affine, BatchNorm) else 0.0,
            behind=self._dims_behind(pair),
        )
        folded.argument = _argument_of(affine)
        folded.taken = affine.tensors if carried and affine.module is None else ()
        return folded

    def _rank_of(self, pair: Pair) -> int | None:
        """The number of dims of the layer's input if the channel dim depends on it; None if it doesn't."""
        conv, affine = pair.conv, pair.affine
        if affine.leads:
            return None
        if isinstance(affine, ChannelScale) and not affine.moves:
            value = affine.tensor.value
            if value is not None and value.dim() <= conv.dims + 1:
                return None
        # Use the output, which has the same number of dims; the input may be one of several values of a call.
        shape = shape_of(conv.node)
        assert shape is not None
        return len(shape.sizes)

    def _dims_behind(self, pair: Pair) -> int:
        channels = channels_at_end(pair)
        assert channels is not None
        return channels.rank - channels.dim - 1

    def _is_beyond(self, pair: Pair) -> bool:
        """Whether an operation that was folded before lies between the two."""
        return any(node in self._folded for node in pair.affine.moves)

    def _moved(self, mean: torch.Tensor, folded: FoldedPair) -> torch.Tensor:
        # In training, buffers stay plain tensors, as optimizers, wrappers and checkpoints expect.
        return mean if self.mode == "training" else folded_tensor(mean, pair=folded)


def _key_of(pair: Pair) -> _Key:
    return (*_place_of(pair.conv), *_place_of(pair.affine), pair.affine.leads)


def _place_of(place: Convolution | Affine) -> tuple[int, str]:
    named = place.weight if isinstance(place, Convolution) else place.named_by
    return (id(place.module), "") if named is None else (id(named.owner), named.name)


def _calls_in(recording: Recording) -> dict[tuple[int, str], list[Node]]:
    found: dict[tuple[int, str], list[Node]] = {}
    for node in recording.nodes():
        for place in (convolution_at(node), affine_at(node)):
            if place is not None:
                found.setdefault(_place_of(place), []).append(node)
    return found


def _argument_of(affine: Affine) -> str:
    """The name of the argument that identifies a functional BatchNorm."""
    named = affine.named_by
    if not isinstance(affine, BatchNorm) or named is None:
        return "running_mean"
    names = ("running_mean", "weight", "bias", "running_var")
    refs = (affine.mean, affine.weight, affine.bias, affine.var)
    return next(name for name, ref in zip(names, refs, strict=True) if ref == named)


def _free_name(weight: TensorRef) -> str:
    """An unused name for a new bias next to the weight."""
    registered: Mapping[str, nn.Parameter | None] = weight.owner._parameters
    if weight.name == "weight" and "bias" in registered and registered["bias"] is None:
        return "bias"
    name = f"{weight.name}_bias"
    while hasattr(weight.owner, name):
        name += "_"
    return name
