"""Ways from a layer to its BatchNorm, or from a BatchNorm to the layer after it, by operations that only move values.

There are also layers and BatchNorms whose classes have their own forward. All take and return maps (batch, channels,
*sizes).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from folding_models import BatchNormAct
from torch import Tensor, nn


class WithWay(nn.Module):
    """A layer, its BatchNorm, and what is between the two; `branches` adds a data-dependent branch that is never taken."""

    def __init__(self, way: Way, conv: nn.Module, norm: nn.Module, act: nn.Module, *, branches: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.act = conv, norm, act
        self.through, self.branches = way.through, branches
        for name, make in way.more.items():
            setattr(self, name, make(norm))

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and x.sum() > 1e6:
            return x
        return self.act(self.through(self, x))


def _as_given(dims: int) -> int:
    return dims


def _one(dims: int) -> int:
    return 1


@dataclass(frozen=True)
class Way:
    """How a layer and its BatchNorm are joined."""

    through: Callable[[Any, Tensor], Tensor]
    """The value after both, from the module with `conv` and `norm`, and the maps."""
    conv_dims: Callable[[int], int] = _as_given
    """The number of spatial dims of the convolution, on maps with that many dims."""
    norm_dims: Callable[[int], int] = _as_given
    leads: bool = False
    """Whether the BatchNorm comes before the layer."""
    is_linear: bool = False
    more: Mapping[str, Callable[[Any], nn.Module]] = field(default_factory=dict)
    """Further modules by name, made from the BatchNorm."""

    def joined(self, conv: nn.Module, norm: nn.Module, act: nn.Module, *, branches: bool) -> nn.Module:
        """The module with all of them."""
        return WithWay(self, conv, norm, act, branches=branches)


def _flat(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.norm(y.flatten(2)).reshape_as(y)


def _flat_by_module(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.norm(m.flat(y)).reshape(y.shape)


def _more_dims(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.norm(y.unsqueeze(2)).squeeze(2) if y.dim() < 5 else m.norm(y)


def _channels_last_and_back(m: Any, x: Tensor) -> Tensor:
    y = torch.swapaxes(m.conv(x), 1, -1)
    return m.norm(y.contiguous().swapdims(1, -1))


def _rows(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    last = y.permute(0, *range(2, y.dim()), 1)
    return _maps(m.norm(last.reshape(-1, y.shape[1])).reshape_as(last))


def _rows_of_size(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    last = torch.permute(y, (0, *range(2, y.dim()), 1)).contiguous()
    return _maps(m.norm(last.view(-1, 4)).reshape_as(last))


def _maps(last: Tensor) -> Tensor:
    return last.permute(0, -1, *range(1, last.dim() - 1))


def _by_position(normalise: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A linear layer on the channels of every position, and `normalise` from (batch, positions, channels)."""

    def through(m: Any, x: Tensor) -> Tensor:
        return normalise(m, m.conv(x.flatten(2).transpose(1, 2))).reshape(x.shape)

    return through


def _gate(x: Tensor, gate: Tensor) -> Tensor:
    return x * gate.reshape(*gate.shape, *[1] * (x.dim() - 2))


def _other_dim(m: Any, x: Tensor) -> Tensor:
    """The BatchNorm normalizes the dim of the positions, not the features: it must never be folded."""
    y = m.conv(F.adaptive_avg_pool1d(x.flatten(2), 4).transpose(1, 2))
    return x + m.norm(y.clone()).mean()


def _move_used(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x).transpose(-1, 2)
    return (m.norm(y) + y).transpose(-1, 2)


def _move_written(m: Any, x: Tensor) -> Tensor:
    """The value is written to in place through the moved one."""
    y = m.conv(x)
    y.transpose(-1, 2).mul_(2)
    return m.norm(y)


def _front_used(m: Any, x: Tensor) -> Tensor:
    y = m.norm(x)
    return m.conv(y) + y


def _another(norm: Any) -> nn.Module:
    return type(norm)(norm.num_features)


_linear = partial(Way, norm_dims=_one, is_linear=True)
_front = partial(Way, leads=True)

PLAIN_WAYS: dict[str, Way] = {
    "cloned": Way(lambda m, x: m.norm(m.conv(x).clone().contiguous())),
    "dropped": Way(
        lambda m, x: m.norm(F.dropout(m.drop(m.conv(x)), 0.2, m.training)), more={"drop": lambda norm: nn.Dropout(0.3)}
    ),
    "one dim": Way(_flat, norm_dims=_one),
    "one dim by module": Way(_flat_by_module, norm_dims=_one, more={"flat": lambda norm: nn.Flatten(2)}),
    "more dims": Way(_more_dims, norm_dims=lambda dims: min(dims + 1, 3)),
    "swapped": Way(lambda m, x: m.norm(m.conv(x).transpose(-1, 2)).transpose(-1, 2)),
    "there and back": Way(_channels_last_and_back),
    "rows of size": Way(_rows_of_size, norm_dims=_one),
    "linear": _linear(_by_position(lambda m, y: m.norm(y.transpose(1, 2)))),
    "linear permuted": _linear(_by_position(lambda m, y: m.norm(torch.permute(y, (0, 2, 1)).contiguous()))),
    "linear flat": _linear(_by_position(lambda m, y: m.norm(y.flatten(0, 1)).reshape_as(y).transpose(1, 2))),
    "linear viewed": _linear(_by_position(lambda m, y: m.norm(y.view(-1, 4)).view(y.shape).transpose(1, 2))),
    # A linear layer on 2-D input, as a gate for the channels.
    "pooled": _linear(lambda m, x: _gate(x, m.norm(m.conv(x.flatten(2).mean(2))))),
    "front": _front(lambda m, x: m.conv(m.norm(x))),
    "front both": _front(lambda m, x: m.behind(m.conv(m.norm(x))), more={"behind": _another}),
    "front two": _front(lambda m, x: m.conv(m.norm(m.first(x))), more={"first": _another}),
    "front swapped": _front(lambda m, x: m.conv(m.norm(x).clone().transpose(-1, 2)).transpose(-1, 2)),
    "front one dim": _front(lambda m, x: m.conv(m.norm(x).flatten(2)).reshape(x.shape), conv_dims=_one),
    "front linear": _linear(
        lambda m, x: m.conv(m.norm(x.flatten(2)).transpose(1, 2)).transpose(1, 2).reshape(x.shape), leads=True
    ),
    "front pooled": _linear(lambda m, x: _gate(x, m.conv(m.norm(x.flatten(2).mean(2)))), leads=True),
}
WAYS: dict[str, Way] = PLAIN_WAYS | {
    "rows": Way(_rows, norm_dims=_one),
    "other way": _linear(_other_dim),
    "move used": Way(_move_used),
    "move written": Way(_move_written),
    "front used": _front(_front_used),
}
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


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


def _normalise(self: Any, input: Tensor) -> Tensor:
    statistics = self.running_mean, self.running_var
    uses_batch = self.training or self.running_mean is None
    return F.batch_norm(input, *statistics, self.weight, self.bias, uses_batch, self.momentum or 0.0, self.eps)


def _with_forward(base: type[nn.Module], forward: Any) -> type[nn.Module]:
    return type(f"Own{base.__name__}", (base,), {"forward": forward, "__module__": __name__})


_BASES = {
    "conv": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "transposed": (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    "norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
}


def _by_dims(kind: str, forward: Any) -> dict[int, Callable[..., nn.Module]]:
    return {dims: _with_forward(base, forward) for dims, base in enumerate(_BASES[kind], 1)}


OWN_CONVOLUTIONS = _by_dims("conv", _convolve)
OWN_TRANSPOSED = _by_dims("transposed", _convolve_transposed)
OWN_NORMS = _by_dims("norm", _normalise)
ACTIVATED = _by_dims("norm", BatchNormAct.forward)


@dataclass
class Output:
    """A possible output of a forward; torch doesn't know it as a container."""

    features: Any
    rest: Any = None
