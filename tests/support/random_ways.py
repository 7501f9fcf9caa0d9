"""Ways from a layer to its BatchNorm, or from a BatchNorm to the layer after it, by operations that only move values.

There are also layers and BatchNorms whose classes have their own forward. All take and return maps (batch, channels,
*sizes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from folding_models import BatchNormAct
from torch import Tensor, nn


class Way(nn.Module):
    """A layer, its BatchNorm, and operations between the two that only move values.

    Attributes:
        branches: whether the forward has a data-dependent branch that is never taken.
    """

    leads = False
    is_linear = False

    @staticmethod
    def conv_dims(dims: int) -> int:
        """The number of spatial dims of the convolution, on maps with that many dims."""
        return dims

    @staticmethod
    def norm_dims(dims: int) -> int:
        """The number of spatial dims of the BatchNorm, on maps with that many dims."""
        return dims

    def __init__(self, conv: nn.Module, norm: nn.Module, act: nn.Module, *, branches: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.act = conv, norm, act
        self.branches = branches
        self.more()

    def more(self) -> None:
        """Add modules in a subclass."""

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and x.sum() > 1e6:
            return x
        return self.act(self.through(x))

    def through(self, x: Tensor) -> Tensor:
        """The value after both."""
        raise NotImplementedError


class Cloned(Way):
    def through(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x).clone().contiguous())


class Dropped(Way):
    """Dropout as a module and as a function, which do nothing in eval."""

    def more(self) -> None:
        self.drop = nn.Dropout(0.3)

    def through(self, x: Tensor) -> Tensor:
        return self.norm(F.dropout(self.drop(self.conv(x)), 0.2, self.training))


class OneDim(Way):
    """Flattens all positions into one dim, and then restores the shape."""

    @staticmethod
    def norm_dims(dims: int) -> int:
        return 1

    def through(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y.flatten(2)).reshape_as(y)


class OneDimByModule(OneDim):
    def more(self) -> None:
        self.flat = nn.Flatten(2)

    def through(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(self.flat(y)).reshape(y.shape)


class MoreDims(Way):
    @staticmethod
    def norm_dims(dims: int) -> int:
        return min(dims + 1, 3)

    def through(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y.unsqueeze(2)).squeeze(2) if y.dim() < 5 else self.norm(y)


class Swapped(Way):
    """Swaps two of the other dims."""

    def through(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x).transpose(-1, 2)).transpose(-1, 2)


class ThereAndBack(Way):
    """Moves the channels to the last dim and back."""

    def through(self, x: Tensor) -> Tensor:
        y = torch.swapaxes(self.conv(x), 1, -1)
        return self.norm(y.contiguous().swapdims(1, -1))


class Rows(Way):
    """Makes each position a row."""

    @staticmethod
    def norm_dims(dims: int) -> int:
        return 1

    def through(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        last = y.permute(0, *range(2, y.dim()), 1)
        rows = self.norm(last.reshape(-1, y.shape[1])).reshape_as(last)
        return rows.permute(0, -1, *range(1, y.dim() - 1))


class RowsOfSize(Rows):
    """As `Rows`, with the number of channels as a constant."""

    def through(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        last = torch.permute(y, (0, *range(2, y.dim()), 1)).contiguous()
        rows = self.norm(last.view(-1, 4)).reshape_as(last)
        return rows.permute(0, -1, *range(1, y.dim() - 1))


class Linear(Way):
    """A linear layer on the channels of every position; they go back to dim 1 for the BatchNorm."""

    is_linear = True

    @staticmethod
    def norm_dims(dims: int) -> int:
        return 1

    def through(self, x: Tensor) -> Tensor:
        y = self.conv(x.flatten(2).transpose(1, 2))
        return self.normalised(y).reshape(x.shape)

    def normalised(self, y: Tensor) -> Tensor:
        """The normalized value, (batch, channels, positions), from (batch, positions, channels)."""
        return self.norm(y.transpose(1, 2))


class LinearPermuted(Linear):
    def normalised(self, y: Tensor) -> Tensor:
        return self.norm(torch.permute(y, (0, 2, 1)).contiguous())


class LinearFlat(Linear):
    def normalised(self, y: Tensor) -> Tensor:
        return self.norm(y.flatten(0, 1)).reshape_as(y).transpose(1, 2)


class LinearViewed(Linear):
    def normalised(self, y: Tensor) -> Tensor:
        return self.norm(y.view(-1, 4)).view(y.shape).transpose(1, 2)


class Pooled(Linear):
    """A linear layer on 2-D input, as a gate for the channels."""

    def through(self, x: Tensor) -> Tensor:
        gate = self.norm(self.conv(x.flatten(2).mean(2)))
        return x * gate.reshape(*gate.shape, *[1] * (x.dim() - 2))


class OtherWay(Linear):
    """The BatchNorm normalizes the dim of the positions, not the features: it must never be folded."""

    def through(self, x: Tensor) -> Tensor:
        y = self.conv(F.adaptive_avg_pool1d(x.flatten(2), 4).transpose(1, 2))
        return x + self.norm(y.clone()).mean()


class MoveUsed(Way):
    """The moved value has another use."""

    def through(self, x: Tensor) -> Tensor:
        y = self.conv(x).transpose(-1, 2)
        return (self.norm(y) + y).transpose(-1, 2)


class MoveWritten(Way):
    """The value is written to in place through the moved one."""

    def through(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = y.transpose(-1, 2)
        z.mul_(2)
        return self.norm(y)


class Front(Way):
    """The BatchNorm comes before the layer."""

    leads = True

    def through(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x))


class FrontBoth(Front):
    """Another BatchNorm comes after the layer."""

    def more(self) -> None:
        channels = self.norm.num_features
        self.behind = type(self.norm)(channels)

    def through(self, x: Tensor) -> Tensor:
        return self.behind(self.conv(self.norm(x)))


class FrontTwo(Front):
    """Two BatchNorms come before the layer."""

    def more(self) -> None:
        self.first = type(self.norm)(self.norm.num_features)

    def through(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(self.first(x)))


class FrontSwapped(Front):
    def through(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x).clone().transpose(-1, 2)).transpose(-1, 2)


class FrontOneDim(Front):
    @staticmethod
    def conv_dims(dims: int) -> int:
        return 1

    def through(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x).flatten(2)).reshape(x.shape)


class FrontLinear(Front):
    is_linear = True

    @staticmethod
    def norm_dims(dims: int) -> int:
        return 1

    def through(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x.flatten(2)).transpose(1, 2)).transpose(1, 2).reshape(x.shape)


class FrontPooled(FrontLinear):
    def through(self, x: Tensor) -> Tensor:
        gate = self.conv(self.norm(x.flatten(2).mean(2)))
        return x * gate.reshape(*gate.shape, *[1] * (x.dim() - 2))


class FrontUsed(Front):
    """The normalized value has another use."""

    def through(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.conv(y) + y


PLAIN_WAYS: dict[str, type[Way]] = {
    "cloned": Cloned, "dropped": Dropped, "one dim": OneDim, "one dim by module": OneDimByModule,
    "more dims": MoreDims, "swapped": Swapped, "there and back": ThereAndBack, "rows of size": RowsOfSize,
    "linear": Linear, "linear permuted": LinearPermuted, "linear flat": LinearFlat, "linear viewed": LinearViewed,
    "pooled": Pooled, "front": Front, "front both": FrontBoth, "front two": FrontTwo, "front swapped": FrontSwapped,
    "front one dim": FrontOneDim, "front linear": FrontLinear, "front pooled": FrontPooled,
}  # fmt: skip
WAYS: dict[str, type[Way]] = PLAIN_WAYS | {
    "rows": Rows, "other way": OtherWay, "move used": MoveUsed, "move written": MoveWritten, "front used": FrontUsed,
}  # fmt: skip
# With batch statistics, their BatchNorm would have one value per channel at batch size 1.
POOLED = {"pooled", "front pooled"}


# ---- classes with their own forward

_FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED_FUNCTIONS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _convolve(self: Any, input: Tensor) -> Tensor:
    function = _FUNCTIONS[self.weight.dim() - 2]
    return function(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def _convolve_transposed(self: Any, input: Tensor) -> Tensor:
    function = _TRANSPOSED_FUNCTIONS[self.weight.dim() - 2]
    settings = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
    return function(input, self.weight, self.bias, *settings)


class OwnConv1d(nn.Conv1d):
    forward = _convolve


class OwnConv2d(nn.Conv2d):
    forward = _convolve


class OwnConv3d(nn.Conv3d):
    forward = _convolve


class OwnTransposed1d(nn.ConvTranspose1d):
    forward = _convolve_transposed


class OwnTransposed2d(nn.ConvTranspose2d):
    forward = _convolve_transposed


class OwnTransposed3d(nn.ConvTranspose3d):
    forward = _convolve_transposed


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


def _normalise(self: Any, input: Tensor) -> Tensor:
    statistics = self.running_mean, self.running_var
    uses_batch = self.training or self.running_mean is None
    return F.batch_norm(input, *statistics, self.weight, self.bias, uses_batch, self.momentum or 0.0, self.eps)


class OwnNorm1d(nn.BatchNorm1d):
    forward = _normalise


class OwnNorm2d(nn.BatchNorm2d):
    forward = _normalise


class OwnNorm3d(nn.BatchNorm3d):
    forward = _normalise


class BatchNormAct1d(nn.BatchNorm1d):
    forward = BatchNormAct.forward


class BatchNormAct3d(nn.BatchNorm3d):
    forward = BatchNormAct.forward


OWN_CONVOLUTIONS: dict[int, Callable[..., nn.Module]] = {1: OwnConv1d, 2: OwnConv2d, 3: OwnConv3d}
OWN_TRANSPOSED: dict[int, Callable[..., nn.Module]] = {1: OwnTransposed1d, 2: OwnTransposed2d, 3: OwnTransposed3d}
OWN_NORMS: dict[int, Callable[..., nn.Module]] = {1: OwnNorm1d, 2: OwnNorm2d, 3: OwnNorm3d}
ACTIVATED: dict[int, Callable[..., nn.Module]] = {1: BatchNormAct1d, 2: BatchNormAct, 3: BatchNormAct3d}


@dataclass
class Output:
    """A possible output of a forward; torch doesn't know it as a container."""

    features: Any
    rest: Any = None
