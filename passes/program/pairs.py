"""A folded pair, and the errors that are raised when its two parts are used without each other."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from passes.errors import UnseenCall
from passes.program.tensors import TensorRef

_ADVICE = "call optimize() with example inputs that take this branch, or leave out the pass."


class FoldedPair:
    """A layer and the affine operation that it was folded with.

    Both refer to this object, and copies of both share one copy of it.

    Attributes:
        conv_path, norm_path: the paths of the layer and of the affine operation.
        leads: whether the BatchNorm comes before the layer.
        rank: the number of dims of the layer's input in the recorded runs; with another number, the BatchNorm's
            channels may not be the layer's. None if any number is correct.
        dims: the number of spatial dims of the layer, which follow the channel dim.
        trained: whether the layer had a trained bias that the fold removed.
        carried: whether the layer does the work of the affine operation.
        function: the tensor that identifies the affine operation if no torch.nn BatchNorm computes it: the running
            mean, or the tensor of a product or sum.
        argument: for a functional BatchNorm, the name of the argument that receives that tensor.
        operation: "batch_norm", or the name of the product or sum.
        eps: the BatchNorm's `eps` at the time of the fold.
        behind: the number of dims after the channel dim in the input of the second.
        taken: the tensors, given to a function, whose values are now in the layer.
        farther: the pair of the same layer with the next affine operation further away, if the layer does that one's
            work too.
    """

    def __init__(
        self,
        conv_path: str,
        norm_path: str,
        rank: int | None,
        dims: int,
        *,
        leads: bool = False,
        trained: bool = False,
        carried: bool = True,
        function: TensorRef | None = None,
        operation: str = "batch_norm",
        eps: float = 0.0,
        behind: int = 0,
    ) -> None:
        self.conv_path = conv_path
        self.norm_path = norm_path
        self.leads = leads
        self.rank = rank
        self.dims = dims
        self.trained = trained
        self.carried = carried
        self.function = function
        self.operation = operation
        self.eps = eps
        self.behind = behind
        self.farther: FoldedPair | None = None
        self.argument = "running_mean"
        self.taken: tuple[TensorRef, ...] = ()
        self.warned = False

    def is_named_by(self, given: Mapping[str, Any]) -> bool:
        """Whether the arguments are those of the pair's functional BatchNorm."""
        place = self.function
        return place is not None and given.get(self.argument) is getattr(place.owner, place.name)

    @property
    def is_given_back(self) -> bool:
        """Whether one of the `taken` tensors is registered again, although the layer contains its values."""
        registered = (ref.owner._parameters.get(ref.name, ref.owner._buffers.get(ref.name)) for ref in self.taken)
        return any(tensor is not None for tensor in registered)

    @property
    def first(self) -> str:
        """The path of the one that runs first."""
        return self.norm_path if self.leads else self.conv_path

    @property
    def second(self) -> str:
        """The path of the one that takes the output of the first."""
        return self.conv_path if self.leads else self.norm_path

    def came_from_elsewhere(self) -> UnseenCall:
        """The error for an input of the second that is not the output of the first."""
        return UnseenCall(
            f"{self.second} was folded together with {self.first}, but its input doesn't come from it: {_ADVICE}",
            (self.first, self.second),
        )

    def other_rank(self, input: torch.Tensor) -> UnseenCall:
        """The error for an input of the layer with another number of dims."""
        return UnseenCall(
            f"{self.conv_path} was folded together with {self.norm_path} for {self.rank}-D input, but got "
            f"{input.dim()}-D input: leave out the pass."
        )

    def other_dim(self, dim: int, wanted: int) -> UnseenCall:
        """The error for an input of the second whose channels are in another dim than it expects."""
        return UnseenCall(
            f"{self.first} was folded together with {self.second}, which takes dim {wanted} as the channels, but "
            f"they are in dim {dim}: {_ADVICE}"
        )

    def went_astray(self) -> UnseenCall:
        """The error for a use of the first one's output by anything but the second."""
        return UnseenCall(
            f"{self.first} was folded together with {self.second}, but its output was used without it: {_ADVICE}",
            (self.first, self.second),
        )

    def read_elsewhere(self, path: str) -> UnseenCall:
        """The error for a read of a folded tensor, at the path, outside of the pair."""
        return UnseenCall(
            f"{path} was changed when {self.conv_path} was folded together with {self.norm_path}, but is used "
            f"without the two: {_ADVICE}"
        )

    def written(self, path: str) -> UnseenCall:
        """The error for a write to a folded tensor, at the path."""
        return UnseenCall(
            f"{path} was changed when {self.conv_path} was folded together with {self.norm_path}, so its tensors "
            "can't be modified: modify the original model and optimize it again (to train, optimize it with "
            'mode="training").'
        )

    def other_weight(self) -> UnseenCall:
        """The error for a layer that was given a parameter in the place of a folded one."""
        return UnseenCall(
            f"{self.conv_path} has a different weight or bias than the one that was folded together with "
            f"{self.norm_path}: set it in the original model and optimize that again."
        )

    def other_mean(self) -> UnseenCall:
        """The error for a BatchNorm that was given a running mean in the place of the one that a bias was moved into."""
        return UnseenCall(
            f"{self.norm_path} has a different running mean than the one that the bias of {self.conv_path} was "
            "moved into: set it in the original model and optimize that again."
        )

    def other_tensors(self, path: str) -> UnseenCall:
        """The error for a module, at the path, that has parameters again after the fold removed them."""
        return UnseenCall(
            f"{path} has parameters again, but they were folded into another module when {self.conv_path} was "
            f"folded together with {self.norm_path}: load or set weights in the original model, and optimize it "
            "again."
        )

    def in_training(self) -> UnseenCall:
        """The error for a BatchNorm in training mode, although the layer contains its running statistics."""
        return UnseenCall(
            f"{self.norm_path} was put in training mode, but it was folded together with {self.conv_path} in eval "
            'mode: put it in eval mode, or optimize the original model with mode="training".'
        )

    def other_eps(self) -> UnseenCall:
        """The error for a BatchNorm whose `eps` was changed after the fold."""
        return UnseenCall(
            f"{self.norm_path} has a different eps than when it was folded into {self.conv_path}: set it in the "
            "original model and optimize that again."
        )

    def other_padding(self) -> UnseenCall:
        """The error for a layer that now pads with zeros, which is wrong after the fold of a preceding BatchNorm."""
        return UnseenCall(
            f"{self.conv_path} pads with zeros now, but {self.norm_path} was folded into it when it didn't: set the "
            "padding in the original model and optimize that again."
        )

    def refuse_reset(self) -> NoReturn:
        """Replaces the `reset_running_stats` of a BatchNorm whose statistics were folded into other weights."""
        raise UnseenCall(
            f"the running statistics of {self.norm_path} were folded into {self.conv_path}: reset them in the "
            "original model and optimize that again."
        )

    def warn_of_lost_gradient(self, gradient: torch.Tensor) -> None:
        """Warn once that a gradient of the original's bias is lost; a hook on the output of a BatchNorm in eval."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"a gradient flowed back through {self.norm_path} in eval mode, where it would train the bias of "
                f"{self.conv_path}: optimize() moved that into the running mean, so it isn't trained. To train with "
                "this BatchNorm in eval mode, put it in eval mode before optimize().",
                UserWarning,
                stacklevel=2,
            )
