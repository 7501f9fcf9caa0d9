"""A layer and the BatchNorm, product or sum that it was folded together with, and the errors where the two are parted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from passes.errors import UnseenCall
from passes.program.tensors import TensorRef

_ADVICE = "give optimize() example inputs that take this branch, or leave the pass out."


class FoldedPair:
    """One layer and the affine operation it was folded together with; both hold it, and copies of both hold one copy.

    Attributes:
        conv_path, norm_path: where the two are in the tree.
        leads: whether the BatchNorm comes before the layer.
        rank: the dims of the layer's input that the recorded runs showed: on others the BatchNorm's channels may not be
            the layer's. None where they are the same on any.
        dims: the spatial dims of the layer, after that of the channels.
        trained: whether the layer had a bias that was trained, and isn't any more.
        carried: whether the layer does the affine operation's work.
        function: the place of the tensor that names the affine operation, where no stock BatchNorm computes it: its running
            mean, or the tensor of a product or sum.
        argument: of a functional BatchNorm, under which name it is given that tensor.
        operation: of a function, "batch_norm" or the name of the product or sum.
        eps: the BatchNorm's, when it was folded.
        behind: how many dims there are after that of the channels in what a function is given; None for dim 1.
        taken: the places of the tensors that a function is given and whose values the layer has.
        convolves: whether a function computes the layer, and no stock module.
        added: the bias that such a call isn't given, as the layer had none; None for no such bias.
        farther: the pair of the same layer and the next affine operation, beyond this one, which the layer does too.
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
        behind: int | None = None,
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
        self.convolves = False
        self.added: TensorRef | None = None
        self.warned = False

    def is_named_by(self, given: Mapping[str, Any]) -> bool:
        """Whether the arguments are those of the functional BatchNorm of the pair."""
        place = self.function
        return place is not None and given.get(self.argument) is getattr(place.owner, place.name)

    @property
    def is_given_back(self) -> bool:
        """Whether a place has a tensor again whose values the layer has."""
        registered = (ref.owner._parameters.get(ref.name, ref.owner._buffers.get(ref.name)) for ref in self.taken)
        return any(tensor is not None for tensor in registered)

    @property
    def first(self) -> str:
        """The path of the one whose output goes to the other."""
        return self.norm_path if self.leads else self.conv_path

    @property
    def second(self) -> str:
        """The path of the other."""
        return self.conv_path if self.leads else self.norm_path

    def came_from_elsewhere(self) -> UnseenCall:
        """The error where the second is given something else than the first one's output."""
        return UnseenCall(
            f"{self.second} was folded together with {self.first} and is given a value that doesn't come from it: {_ADVICE}",
            (self.first, self.second),
        )

    def other_rank(self, input: torch.Tensor) -> UnseenCall:
        """The error where the layer is given an input of other dims."""
        return UnseenCall(
            f"{self.conv_path} was folded together with {self.norm_path} for {self.rank}-D input and is given"
            f" {input.dim()}-D input: leave the pass out."
        )

    def other_dim(self, dim: int, wanted: int) -> UnseenCall:
        """The error where the channels come to the second one in another dim than it takes them from."""
        return UnseenCall(
            f"{self.first} was folded together with {self.second}, which takes dim {wanted} for the channels, and they"
            f" come to it in dim {dim}: {_ADVICE}"
        )

    def went_astray(self) -> UnseenCall:
        """The error where something else than the second one uses the output of the first."""
        return UnseenCall(
            f"{self.first} was folded together with {self.second}, and its output was used without it: {_ADVICE}",
            (self.first, self.second),
        )

    def read_elsewhere(self, path: str) -> UnseenCall:
        """The error where something else than the two reads a tensor of theirs, at the path."""
        return UnseenCall(
            f"{path} was changed when {self.conv_path} was folded together with {self.norm_path}, and is used without the"
            f" two: {_ADVICE}"
        )

    def other_tensors(self, path: str) -> UnseenCall:
        """The error where one of the two, at the path, has parameters that the rewrite took from it."""
        return UnseenCall(
            f"{path} has parameters again that went into another module when {self.conv_path} was folded together with"
            f" {self.norm_path}: load weights into the original model, or give them to it, and optimize it again."
        )

    def in_training(self) -> UnseenCall:
        """The error where the BatchNorm is to take the statistics of the batch, for which the layer's weights are wrong."""
        return UnseenCall(
            f"{self.norm_path} was put in training, and it was folded together with {self.conv_path} as it is in eval: put"
            ' it in eval, or optimize the original model with mode="training".'
        )

    def other_eps(self) -> UnseenCall:
        """The error where the BatchNorm's `eps`, which is in the layer's weights, was set anew."""
        return UnseenCall(
            f"{self.norm_path} has another eps than when it was folded into {self.conv_path}: set it in the original"
            " model and optimize that again."
        )

    def other_padding(self) -> UnseenCall:
        """The error where a layer after its BatchNorm pads zeros, which would have to be shifted."""
        return UnseenCall(
            f"{self.conv_path} pads zeros now, and {self.norm_path} was folded into it when it didn't: set the padding in"
            " the original model and optimize that again."
        )

    def refuse_reset(self) -> NoReturn:
        """Stands in a BatchNorm's `__dict__` as its `reset_running_stats`, where its statistics are in other weights."""
        raise UnseenCall(
            f"the running statistics of {self.norm_path} went into {self.conv_path} when the two were folded together:"
            " reset them in the original model and optimize that again."
        )

    def warn_of_lost_gradient(self, gradient: torch.Tensor) -> None:
        """A hook of the BatchNorm's output in eval, where the original's bias would get a gradient: says so once."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"a gradient went back through {self.norm_path} in eval, where it would train the bias of"
                f" {self.conv_path}: optimize() moved that into the running mean, and it isn't trained. To train with this"
                " BatchNorm in eval, put it in eval before optimize().",
                UserWarning,
                stacklevel=2,
            )
