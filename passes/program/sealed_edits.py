"""Put changed tensors into a model, each with its seal and the hooks that handle checkpoints of the old weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn

from passes.program.changes import Change, ChangeRecord
from passes.program.checkpoint_guard import refuse_checkpoint
from passes.program.edits import AttributeEdit, HookEdit, TensorEdit
from passes.program.folded import FoldedConvForward, FoldedNormForward, NoSealsLeave
from passes.program.folded_checkpoint import admit_checkpoint, save_plain
from passes.program.forwards import InstanceForward, in_place_of, inner_forward, standing_around
from passes.program.matching import Affine, BatchNorm, Pair
from passes.program.moved_bias import MovedBias, ResetWithBias
from passes.program.pairs import FoldedPair
from passes.program.tensors import TensorRef
from passes.program.weights import FoldedLayer, bare, folded_tensor, is_folded

_Change = TypeVar("_Change", bound=Change)


class SealedEdits(ChangeRecord[_Change]):
    """The edits of the tensors, forwards and hooks of folded layers."""

    def is_tied(self, affine: Affine) -> bool:
        """Whether the operation still does its own work, but is only correct after the layer it was folded with."""
        named = affine.named_by
        pair = getattr(None if named is None else named.value, "sealed_pair", None)
        forward = None if affine.module is None else inner_forward(affine.module)
        pair = forward.pair if isinstance(forward, FoldedNormForward) else pair
        return pair is not None and not pair.carried

    def _layer_of(self, pair: Pair, folded: FoldedPair, *, beyond: bool) -> FoldedLayer:
        """The folded layer with the pair added.

        Args:
            beyond: put it after the pairs that were folded earlier, not next to the layer.
        """
        conv = pair.conv
        earlier = getattr(conv.weight.value, "sealed_layer", None)
        forward = None if conv.module is None else inner_forward(conv.module)
        layer = FoldedLayer(conv.weight, conv.bias, conv.dims, module=conv.module is not None)
        if isinstance(forward, FoldedConvForward):
            layer.pair, layer.front = forward.pair, forward.front
        elif earlier is not None:
            layer.pair, layer.front, layer.bias = earlier.pair, earlier.front, earlier.bias
        nearest = layer.front if pair.affine.leads else layer.pair
        if nearest is not None and beyond:
            while nearest.farther is not None:
                nearest = nearest.farther
            self._set(nearest, "farther", folded)
        elif pair.affine.leads:
            layer.front = folded
        else:
            layer.pair = folded
        return layer

    def _take_norm_away(self, affine: Affine, folded: FoldedPair) -> None:
        norm = affine.module
        for ref in affine.tensors:
            held = ref.value
            self._take_away(ref)
            if held is not None:
                self._set(ref.owner, ref.name, folded_tensor(without_values(held), pair=folded))
        if norm is None:
            return
        self._set_forward(norm, FoldedNormForward(norm, folded, carried=True))
        self._set(norm, "reset_running_stats", folded.refuse_reset)
        self._set(norm, "track_running_stats", False)
        if norm._buffers.get("num_batches_tracked") is not None:
            self._put(TensorRef(norm, "num_batches_tracked"), None)

    def _take_away(self, ref: TensorRef) -> None:
        """Remove the tensor, and make each attempt to load it an error."""
        self._put(ref, None)
        self._before_load(ref.owner, refuse_checkpoint)

    def _put_folded(self, ref: TensorRef, tensor: torch.Tensor) -> None:
        """Register a folded tensor, and let it be saved to checkpoints and loaded from them."""
        self._put(ref, tensor)
        owner = ref.owner
        if not is_folded(tensor) or save_plain in owner._state_dict_hooks.values():
            return
        self._set(owner, "_state_dict_hooks", OrderedDict(owner._state_dict_hooks))
        owner.register_state_dict_post_hook(save_plain)
        self._before_load(owner, admit_checkpoint)

    def _before_load(self, owner: nn.Module, hook: Callable[..., None]) -> None:
        """Register a `load_state_dict` pre-hook of a module, once, so that it can be rolled back."""
        hooks = owner._load_state_dict_pre_hooks
        if not any(getattr(each, "hook", None) is hook for each in hooks.values()):
            self._set(owner, "_load_state_dict_pre_hooks", OrderedDict(hooks))
            owner.register_load_state_dict_pre_hook(hook)

    def _keep_in_checkpoints(self, pair: Pair) -> None:
        """Keep the bias in checkpoints, as zeros, so that they load into the original and the reverse."""
        conv, norm = pair.conv, pair.affine
        assert conv.bias is not None
        assert conv.bias_value is not None
        assert isinstance(norm, BatchNorm)
        path = self.tree.path
        moved = MovedBias(
            (path(conv.bias.owner), conv.bias.owner, conv.bias.name),
            None if norm.mean is None else (path(norm.mean.owner), norm.mean.owner, norm.mean.name),
            (conv.weight.owner, conv.weight.name),
            bare(conv.bias_value).clone(),
        )
        self._put(conv.bias, None)
        if norm.mean is not None and hasattr(type(norm.mean.owner), "reset_running_stats"):
            self._set(norm.mean.owner, "reset_running_stats", ResetWithBias(norm.mean.owner, moved))
        for owner_path, registry, hook in moved.hooks():
            self._do(HookEdit(self.tree.root.get_submodule(owner_path), registry, moved.key, hook))

    def _set_forward(self, module: nn.Module, forward: InstanceForward) -> None:
        """Replace the forward of a module, inside of the wrappers around the current one."""
        self._set(module, "forward", in_place_of(module.__dict__.get("forward"), forward))

    @property
    def made(self) -> Iterator[nn.Parameter]:
        """The new parameters, which only the working copy holds."""
        tensors = (edit.new for edit in self.edits if isinstance(edit, TensorEdit))
        return (tensor for tensor in tensors if isinstance(tensor, nn.Parameter))

    def finish(self) -> None:
        """Make the root raise if it would return a sealed value, which no caller could use."""
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


def without_values(held: torch.Tensor) -> torch.Tensor:
    """Values for a placeholder: shape, dtype and device can be read; code that bypasses the seal gets NaN or 0."""
    nothing = float("nan") if held.is_floating_point() else 0
    return torch.full((), nothing, dtype=held.dtype, device=held.device).expand(held.shape)
