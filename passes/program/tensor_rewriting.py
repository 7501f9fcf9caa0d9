"""The one way to change the tensors of a working copy.

Whatever is changed here gets its seal and its guard on checkpoints with it: the values between the two of a pair can be used
by these alone, and so can the tensors that were changed. All of it can be taken back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from passes.program.changes import Change, ChangeRecord, Place, Skip
from passes.program.checkpoint_guard import refuse_checkpoint
from passes.program.edits import AttributeEdit, HookEdit, TensorEdit
from passes.program.folded import FoldedConvForward, FoldedNormForward, NoSealsLeave
from passes.program.forwards import InstanceForward, in_place_of, inner_forward, standing_around
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
from passes.program.moved_bias import MovedBias
from passes.program.pairs import FoldedPair
from passes.program.recording import Node, Recording, shape_of
from passes.program.replay import Rewritten
from passes.program.tensors import TensorRef
from passes.program.weights import FoldedLayer, folded_parameter, folded_tensor

# A pair by the layer's weight, what names the affine operation, and which of the two leads.
_Key = tuple[int, str, int, str, bool]


class TensorChange(Change):
    """One rewrite of tensors.

    Attributes:
        rewritten: the pairs that it is about, as each run shows them, with their tensors before and after.
    """

    rewritten: Mapping[Recording, Rewritten]


class TensorRewriter(ChangeRecord[TensorChange]):
    """Finds the pairs that recorded runs show, and rewrites their tensors, for one pass.

    Attributes:
        mode: "inference" or "training".
        recordings: the runs that are rewritten for: one for each example call, in each state that a result can be in, with
            the state as "in eval" or "in training"; "" for the one that the model was given in.
    """

    def __init__(
        self, tree: ModelTree, mode: str, recordings: Mapping[Recording, str], left_alone: Mapping[Place, str]
    ) -> None:
        super().__init__(tree, left_alone)
        self.mode = mode
        self.recordings = recordings
        self._judge = Judge(tree, mode)
        # By the tensor that names an affine operation, or a layer's weight: the calls with it.
        self._calls = {recording: _calls_in(recording) for recording in recordings}
        # The affine operations that their layers do by now, in all recordings.
        self._folded: set[Node] = set()

    # Find -------------------------------------------------------------------------------------------------------------

    def pairs(self, *, in_front: bool = False) -> Iterator[Pair]:
        """Each pair once, in the order of the runs: those with the affine operation behind the layer, or in front of it.

        What is folded meanwhile makes the next operation in a row a part of a pair.
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
        """The place, for people: a layer's path, or that of the module around it with the operation's name."""
        return self._judge.where(place.node)

    def skip_the_rest(self) -> None:
        """Leave alone, with the reason, the BatchNorms behind a layer that make no pair with it."""
        for recording in self.recordings:
            for node in recording.nodes():
                if reason := self._judge.why_alone(node):
                    self.skips.append(Skip(self._judge.where(node), reason))
            return

    # Judge ------------------------------------------------------------------------------------------------------------

    def why_not(self, pair: Pair) -> str | None:
        """The reason why the two can't be rewritten together, as a clause; None where they can in all of the runs."""
        for recording, when in self.recordings.items():
            found = self._found_in(recording, pair)
            if found:
                if reason := self._judge.why_not(found, recording):
                    return f"{when}, {reason}" if when else reason
            elif any(recording.uses(ref) for ref in (*pair.conv.tensors, *pair.affine.tensors)):
                return f"{when or 'in some run'} its output doesn't go to {self._judge.where(pair.second.node)}"
        ranks = {shape.sizes for shape in map(shape_of, self._inputs_of(pair)) if shape is not None}
        if len(set(map(len, ranks))) > 1:
            return "its input hasn't the same number of dims in all runs"
        return None

    def runs_of(self, pair: Pair) -> list[Pair]:
        """The pair as each of the runs shows it."""
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
                # A function that is called without a bias gets the one that a fold has made.
                yield replace(pair, conv=replace(pair.conv, bias=self._bias_of(pair)))

    def _inputs_of(self, pair: Pair) -> Iterator[Node]:
        return (one.first.input for one in self.runs_of(pair))

    def is_as_given(self, affine: Affine) -> bool:
        """Whether it is of a run in the state of the training flags that the model was given in."""
        return any(affine.node.graph is recording.graph and not when for recording, when in self.recordings.items())

    def is_tied(self, affine: Affine) -> bool:
        """Whether it does its own work, and is right only behind the one layer that it was folded together with."""
        named = affine.named_by
        pair = getattr(None if named is None else named.value, "sealed_pair", None)
        forward = None if affine.module is None else inner_forward(affine.module)
        pair = forward.pair if isinstance(forward, FoldedNormForward) else pair
        return pair is not None and not pair.carried

    def skip(self, place: Convolution | Affine, reason: str) -> None:
        """Leave a place alone, for a reason that is a sentence without its full stop."""
        self.skips.append(Skip(self.where(place), reason))

    # Rewrite ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def change(self, place: Convolution | Affine, what: str, pair: Pair) -> Iterator[TensorChange]:
        """Record what is written in the block as one change; one that is to be left alone is noted as a skip instead.

        An error in the block takes back what was written in it.
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
        """Give the layer this weight and bias, with which it does the affine operation's work too.

        Args:
            weight: in the shape and dtype of the one of now.
            bias: (out,).
        """
        conv, affine = pair.conv, pair.affine
        change = self._changing()
        change.sources += (*conv.tensors, *affine.tensors)
        done = {one.affine.node for one in self.runs_of(pair)}
        folded = self._folded_pair(pair, carried=True)
        layer = self._layer_of(pair, folded)
        needs_gradient = any(ref.value is not None and ref.value.requires_grad for ref in change.sources)
        self._put(conv.weight, folded_parameter(weight, layer, requires_grad=needs_gradient))
        if layer.bias is None:
            layer.bias = folded.added = TensorRef(conv.weight.owner, _free_name(conv.weight))
        self._put(layer.bias, folded_parameter(bias, layer, requires_grad=needs_gradient))
        if conv.module is not None:
            self._set_forward(conv.module, FoldedConvForward(conv.module, layer.pair, layer.front))
        self._take_norm_away(affine, folded)
        if not change.left_alone:
            self._folded |= done

    def move_bias(self, pair: Pair, mean: torch.Tensor | None, *, trained: bool) -> None:
        """Leave the layer without its bias, which the BatchNorm's running mean holds from now on.

        Args:
            mean: (channels,); None for a BatchNorm that keeps none.
            trained: whether the bias would be trained where the BatchNorm takes running statistics.
        """
        conv, norm = pair.conv, pair.affine
        assert conv.bias is not None
        assert isinstance(norm, BatchNorm)
        # What is trained on may be written to: there the values are the result's own.
        sources = [conv.bias, *([norm.mean] if norm.mean else [])]
        if self.mode != "training":
            self._changing().sources += sources
        folded = self._folded_pair(pair, carried=False, trained=trained)
        layer = self._layer_of(pair, folded)
        if self.mode == "training":
            self._keep_in_checkpoints(pair)
        else:
            self._take_away(conv.bias)
        if conv.module is not None:
            self._set_forward(conv.module, FoldedConvForward(conv.module, layer.pair, layer.front))
        weight = conv.weight.value
        assert weight is not None
        if self.mode != "training":
            # The layer is right without its bias in this place alone.
            self._put(conv.weight, folded_parameter(weight.detach(), layer, requires_grad=weight.requires_grad))
        if norm.module is not None:
            self._set_forward(norm.module, FoldedNormForward(norm.module, folded, carried=False))
        if norm.mean is not None and mean is not None:
            self._put(norm.mean, self._moved(mean, folded))

    def _tensors_of(self, pair: Pair) -> dict[TensorRef, torch.Tensor]:
        bias = self._bias_of(pair)
        refs = [pair.conv.weight, *pair.affine.tensors, *([] if bias is None else [bias])]
        return {ref: value for ref in refs if (value := ref.value) is not None}

    def _bias_of(self, pair: Pair) -> TensorRef | None:
        """Where the layer has its bias by now."""
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
        folded.convolves = conv.module is None
        folded.taken = affine.tensors if carried and affine.module is None else ()
        return folded

    def _rank_of(self, pair: Pair) -> int | None:
        """The dims of the layer's input, where the channels depend on them and nothing else tells."""
        conv, affine = pair.conv, pair.affine
        if affine.leads or self._is_beyond(pair):
            return None
        if isinstance(affine, ChannelScale) and not affine.moves:
            value = affine.tensor.value
            if value is not None and value.dim() <= conv.dims + 1:
                return None
        shape = shape_of(conv.input)
        return None if shape is None else len(shape.sizes)

    def _dims_behind(self, pair: Pair) -> int | None:
        if not isinstance(pair.affine, ChannelScale):
            return None
        channels = channels_at_end(pair)
        assert channels is not None
        return channels.rank - channels.dim - 1

    def _is_beyond(self, pair: Pair) -> bool:
        """Whether what was folded before lies between the two."""
        return any(node in self._folded for node in pair.affine.moves)

    def _layer_of(self, pair: Pair, folded: FoldedPair) -> FoldedLayer:
        """The layer with the pair in its place: next to it, or beyond what it was folded together with before."""
        conv = pair.conv
        earlier = getattr(conv.weight.value, "sealed_layer", None)
        forward = None if conv.module is None else inner_forward(conv.module)
        layer = FoldedLayer(conv.weight, conv.bias, conv.dims, module=conv.module is not None)
        if isinstance(forward, FoldedConvForward):
            layer.pair, layer.front = forward.pair, forward.front
        elif earlier is not None:
            layer.pair, layer.front, layer.bias = earlier.pair, earlier.front, earlier.bias
        nearest = layer.front if pair.affine.leads else layer.pair
        if nearest is not None and self._is_beyond(pair):
            while nearest.farther is not None:
                nearest = nearest.farther
            self._set(nearest, "farther", folded)
        elif pair.affine.leads:
            layer.front = folded
        else:
            layer.pair = folded
        return layer

    def _moved(self, mean: torch.Tensor, folded: FoldedPair) -> torch.Tensor:
        # In training the buffers stay plain ones, as optimizers, wrappers and checkpoints handle them.
        return mean if self.mode == "training" else folded_tensor(mean, pair=folded)

    def _take_norm_away(self, affine: Affine, folded: FoldedPair) -> None:
        norm = affine.module
        for ref in affine.tensors:
            held = ref.value
            self._take_away(ref)
            if held is not None:
                # What it was like can be asked for; the values are in the layer's.
                empty = torch.zeros((), dtype=held.dtype, device=held.device).expand(held.shape)
                self._set(ref.owner, ref.name, folded_tensor(empty, pair=folded))
        if norm is None:
            return
        self._set_forward(norm, FoldedNormForward(norm, folded, carried=True))
        self._set(norm, "reset_running_stats", folded.refuse_reset)
        self._set(norm, "track_running_stats", False)
        if norm._buffers.get("num_batches_tracked") is not None:
            self._put(TensorRef(norm, "num_batches_tracked"), None)

    def _take_away(self, ref: TensorRef) -> None:
        """Leave the name without a tensor, and make loading one an error in any case."""
        self._put(ref, None)
        hooks = ref.owner._load_state_dict_pre_hooks
        if not any(getattr(hook, "hook", None) is refuse_checkpoint for hook in hooks.values()):
            self._set(ref.owner, "_load_state_dict_pre_hooks", OrderedDict(hooks))
            ref.owner.register_load_state_dict_pre_hook(refuse_checkpoint)

    def _keep_in_checkpoints(self, pair: Pair) -> None:
        """Have checkpoints go on holding the bias, as zero: what is saved loads into the original, and the reverse."""
        conv, norm = pair.conv, pair.affine
        assert conv.bias is not None
        assert conv.bias_value is not None
        assert isinstance(norm, BatchNorm)
        path = self.tree.path
        moved = MovedBias(
            (path(conv.bias.owner), conv.bias.owner, conv.bias.name),
            None if norm.mean is None else (path(norm.mean.owner), norm.mean.owner, norm.mean.name),
            (conv.weight.owner, conv.weight.name),
            conv.bias_value.numel(),
        )
        self._put(conv.bias, None)
        for owner_path, registry, hook in moved.hooks():
            self._do(HookEdit(self.tree.root.get_submodule(owner_path), registry, moved.key, hook))

    def _set_forward(self, module: nn.Module, forward: InstanceForward) -> None:
        """Give one module another forward, within what is around the one of now."""
        self._set(module, "forward", in_place_of(module.__dict__.get("forward"), forward))

    @property
    def made(self) -> Iterator[nn.Parameter]:
        """The parameters that were made, which nobody but the working copy holds."""
        tensors = (edit.new for edit in self.edits if isinstance(edit, TensorEdit))
        return (tensor for tensor in tensors if isinstance(tensor, nn.Parameter))

    def finish(self) -> None:
        """Have the root refuse to give out a value that is under a seal: nobody behind it could tell what it is."""
        root = self.tree.root
        if not self.changes:
            return
        edits = []
        if standing_around(root, NoSealsLeave) is None:
            edits.append(AttributeEdit(root, "forward", NoSealsLeave(root, root.__dict__.get("forward"))))
        for module in self.tree.modules():
            inner = standing_around(module, NoSealsLeave)
            if inner is not None and module is not root:
                edits.append(AttributeEdit(inner, "is_root", False))
        for edit in edits:
            edit.apply()
            self._installed.append(edit)


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
    """By which of its arguments a functional BatchNorm is known."""
    named = affine.named_by
    if not isinstance(affine, BatchNorm) or named is None:
        return "running_mean"
    names = ("running_mean", "weight", "bias", "running_var")
    refs = (affine.mean, affine.weight, affine.bias, affine.var)
    return next(name for name, ref in zip(names, refs, strict=True) if ref == named)


def _free_name(weight: TensorRef) -> str:
    """A name for a bias beside the weight."""
    registered: Mapping[str, nn.Parameter | None] = weight.owner._parameters
    if weight.name == "weight" and "bias" in registered and registered["bias"] is None:
        return "bias"
    name = f"{weight.name}_bias"
    while hasattr(weight.owner, name):
        name += "_"
    return name
