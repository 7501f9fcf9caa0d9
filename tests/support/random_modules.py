"""Random modules: plain descriptions that can be read and repeated, and the modules that they describe.

    description = Description(blocks=(Pair(Conv(groups=2), Norm(), style="besides"),))
    model = build(description).model
    (x,) = inputs_of(description)(2, torch.Generator())

A block takes and returns CHANNELS channels. Only the first block of a model may change the size of the maps, so that
all others can be added and concatenated.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from folding_models import Reader
from hypothesis import strategies as st
from random_ways import (
    ACTIVATED,
    OWN_CONVOLUTIONS,
    OWN_NORMS,
    OWN_TRANSPOSED,
    PLAIN_WAYS,
    POOLED,
    WAYS,
    Output,
    OwnLinear,
)
from tiny_models import enliven
from torch import Tensor, nn

CHANNELS = 4
_SIZES = {1: 6, 2: 6, 3: 5}
_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED_FUNCTIONS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
DTYPES = {
    "float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
# The dtypes in which a fold alone has a smaller error than the noise of the model.
EXACT = {"float32", "float64"}


@dataclass(frozen=True)
class Conv:
    """A convolution.

    Attributes:
        resize: "" keeps the size of the maps; "stride" halves it, or doubles it with an output padding if transposed;
            "valid" pads nothing.
        own: whether its class has its own forward, which calls the function.
    """

    kernel: int = 3
    bias: bool = True
    groups: int = 1
    dilation: int = 1
    transposed: bool = False
    padding: str = "zeros"
    resize: str = ""
    own: bool = False

    @property
    def pads(self) -> bool:
        """Whether it reads zeros beyond the border of the maps."""
        return self.kernel > 1 and self.resize != "valid" and self.padding in ("zeros", "same")


@dataclass(frozen=True)
class Norm:
    """A BatchNorm.

    Attributes:
        running: whether it keeps running statistics.
        training: whether it is left in training mode.
        activated: whether its class contains an activation.
        own: whether its class has its own forward, which calls the function.
    """

    affine: bool = True
    momentum: float | None = 0.1
    running: bool = True
    training: bool = False
    activated: bool = False
    own: bool = False

    @property
    def is_function(self) -> bool:
        """Whether its class calls the function."""
        return self.activated or self.own


@dataclass(frozen=True)
class Pair:
    """A convolution and its BatchNorm.

    Attributes:
        style: how the two are joined, and what else uses them; a key of `STYLES` or `WAYS`.
        act: what follows, a key of `ACTIVATIONS`.
        extra: a hook or a parametrization, a key of `EXTRAS`.
        wide: whether there are twice as many channels between the two.
        branches: whether the forward of a way has a data-dependent branch.
    """

    conv: Conv = Conv()
    norm: Norm = Norm()
    style: str = "modules"
    act: str = "none"
    extra: str = "none"
    wide: bool = False
    branches: bool = False

    @property
    def leads(self) -> bool:
        """Whether the BatchNorm comes before the layer."""
        return self.style in WAYS and WAYS[self.style].leads

    @property
    def is_linear(self) -> bool:
        """Whether the layer is linear, not a convolution."""
        return self.style in WAYS and WAYS[self.style].is_linear

    @property
    def is_plain(self) -> bool:
        """Whether the pair has no difficulty, so that it must be folded."""
        usual = self.norm.running and not self.norm.training
        if self.leads and (self.norm.activated or (not self.is_linear and (self.conv.pads or self.conv.transposed))):
            return False
        plain = self.style in PLAIN_STYLES or self.style in PLAIN_WAYS
        return plain and self.extra in ("none", "frozen") and usual

    def kinds(self) -> Iterator[str]:
        """What a fold of this pair is an example of."""
        yield f"style {self.style}"
        yield "in front" if self.leads else "behind"
        if self.is_linear:
            yield "linear"
        else:
            yield "transposed" if self.conv.transposed else "convolution"
            yield f"padding {self.conv.padding}{' in front' if self.leads else ''}"
            yield "grouped" if self.conv.groups > 1 else "one group"
        if self.conv.own or self.norm.is_function:
            yield "function: " + " and ".join(["layer"] * self.conv.own + ["norm"] * self.norm.is_function)
        if self.branches:
            yield "a branch in the way"
        if self.extra == "frozen":
            yield "frozen"


@dataclass(frozen=True)
class Combined:
    """Several blocks in one. `kind` is one of `COMBINATIONS`, and determines the number of blocks."""

    kind: str
    parts: tuple[Block, ...]


Block = Pair | Combined


@dataclass(frozen=True)
class Description:
    """A model and its inputs.

    Attributes:
        head: what follows the blocks: "none", or a linear layer on 2-D or 3-D input with a BatchNorm; a key of
            `_HEADS`.
        output: a key of `_ROOTS`: "tensor", "tuple", "dict" or "object".
        layout: the layout of the inputs: "contiguous", "channels_last", or "strided" with gaps between the elements.
        scaled: whether a second tensor is passed as a keyword.
        training: whether the model is in training mode when `optimize` gets it.
        batch: the rows of the example inputs; 0 if they are a function of the batch size.
    """

    blocks: tuple[Block, ...]
    dims: int = 2
    head: str = "none"
    output: str = "tensor"
    dtype: str = "float32"
    layout: str = "contiguous"
    scaled: bool = False
    training: bool = False
    batch: int = 2
    seed: int = 0

    @property
    def may_be_unseen(self) -> bool:
        """Whether a branch uses a convolution's output without its BatchNorm, which possibly no example shows.

        A BatchNorm at the start of one of two branches belongs to a convolution before both, and a BatchNorm before both
        belongs to a convolution at the start of one of them, if that one pads no zeros.
        """
        either = [block for block in self._combined() if block.kind.startswith("either")]
        begins = any(
            pair.leads or pair.is_linear or not pair.conv.pads for block in either for pair in _pairs_in(block)
        )
        return begins or any(pair.style in UNSEEN_STYLES for pair in self.pairs())

    def _combined(self) -> Iterator[Combined]:
        """Every combination of blocks, at any depth."""
        blocks = list(self.blocks)
        while blocks:
            block = blocks.pop()
            if isinstance(block, Combined):
                yield block
                blocks += block.parts

    def pairs(self) -> Iterator[Pair]:
        """Every pair, at any depth."""
        for block in self.blocks:
            yield from _pairs_in(block)


def _pairs_in(block: Block) -> Iterator[Pair]:
    if isinstance(block, Pair):
        yield block
        return
    for part in block.parts:
        yield from _pairs_in(part)


# ---- how a pair is joined


Run = Callable[[Any, Tensor], Tensor]
Style = Callable[[Any, Any, nn.Module], nn.Module]


class Joined(nn.Module):
    """Holds the two, an activation and what a style adds, and runs them by the function of the style."""

    def __init__(self, run: Run, conv: nn.Module, norm: nn.Module, act: nn.Module, add: Callable[[Any], None]) -> None:
        super().__init__()
        self.run = run
        self.conv, self.norm, self.act = conv, norm, act
        add(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def _style(run: Run, add: Callable[[Any], None] = lambda m: None) -> Style:
    """A style from a function of the module and the maps; `add` gives the module more attributes."""
    return lambda conv, norm, act: Joined(run, conv, norm, act, add)


def _in_sequence(m: Any, x: Tensor) -> Tensor:
    return m.act(m.norm(m.conv(x)))


def _in_turn(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x)
    return x


class Stem(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.tanh())


class Head(nn.Module):
    def __init__(self, norm: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.norm, self.act = norm, act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


class Hidden(nn.Module):
    """Holds its layers only in a plain list: they aren't in the module tree."""

    def __init__(self, conv: nn.Module, norm: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.layers = [conv, norm, act]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Functional(nn.Module):
    """Uses functions, on its own parameters and buffers."""

    def __init__(self, conv: Any, norm: Any, act: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.transposed = conv.transposed
        self.convolve = (_TRANSPOSED_FUNCTIONS if conv.transposed else _FUNCTIONS)[conv.weight.dim() - 2]
        padding = (conv.padding, conv.output_padding) if conv.transposed else (conv.padding,)
        self.settings = (conv.stride, *padding)
        self.groups, self.dilation = conv.groups, conv.dilation
        self.gain, self.shift = norm.weight, norm.bias
        self.register_buffer("mean", norm.running_mean)
        self.register_buffer("var", norm.running_var)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolve(x, self.weight, self.bias, *self.settings, groups=self.groups, dilation=self.dilation)
        return self.act(F.batch_norm(y, self.mean, self.var, self.gain, self.shift, self.mean is None))


def _besides(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.act(m.norm(y) + y)


def _tied(name: str, of: str) -> Callable[[Any], None]:
    """Add a second layer that shares one parameter or buffer with the first."""

    def add(m: Any) -> None:
        m.second = _like(getattr(m, of))
        setattr(m.second, name, getattr(getattr(m, of), name))

    return add


def _norm_read(m: Any, x: Tensor) -> Tensor:
    y = m.norm(m.conv(x))
    if m.norm.running_var is not None:
        y = y * m.norm.running_var.mean()
    return m.act(y)


def _changed_between(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y += 1
    return m.act(m.norm(y))


def _view_changed(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    first = y[:, :1]
    first.mul_(2)
    return m.act(m.norm(y))


def _counting(m: Any, x: Tensor) -> Tensor:
    """Counts its calls in a buffer, which its output depends on."""
    m.calls += 1
    return _in_sequence(m, x) + m.calls / 8


def _with_state(m: Any) -> None:
    m.kept, m.size = {}, None


def _keeps(m: Any, x: Tensor) -> Tensor:
    """Stores values of the call in an attribute and in a dict."""
    y = _in_sequence(m, x)
    m.size = x.shape[-1]
    m.kept["last"] = y
    return y


def _keeps_between(m: Any, x: Tensor) -> Tensor:
    m.kept["between"] = m.conv(x)
    return m.act(m.norm(m.kept["between"])) + m.kept["between"].mean()


def _no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.conv(x)
    return m.act(m.norm(y))


def _unless(leaves: Callable[[Tensor], Any]) -> Run:
    """A branch on the input, after which the convolution's output is returned without its BatchNorm."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        if leaves(x):
            return y
        return m.act(m.norm(y))

    return run


def _sequential(conv: nn.Module, norm: nn.Module, act: nn.Module) -> nn.Module:
    return nn.Sequential(conv, norm, act)


def _nested(conv: nn.Module, norm: nn.Module, act: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Sequential(conv), nn.Identity()), nn.Sequential(norm, act))


def _across(conv: nn.Module, norm: nn.Module, act: nn.Module) -> nn.Module:
    return nn.Sequential(Stem(conv), Head(norm, act))


PLAIN_STYLES: dict[str, Style] = {
    "modules": _style(_in_sequence),
    "sequential": _sequential,
    "nested": _nested,
    "across": _across,
    "identity": _style(
        lambda m, x: m.act(m.norm(m.between(m.conv(x)))), lambda m: m.add_module("between", nn.Identity())
    ),
    "keywords": _style(lambda m, x: m.act(m.norm(input=m.conv(input=x)))),
    "two norms": _style(
        lambda m, x: m.act(m.second(m.norm(m.conv(x)))), lambda m: m.add_module("second", _like(m.norm))
    ),
}
STYLES: dict[str, Style] = PLAIN_STYLES | {
    "functional": Functional,
    # A data-dependent branch that is never taken.
    "island": _style(_unless(lambda x: x.sum() > 1e6)),
    "listed": _style(_in_turn, lambda m: setattr(m, "layers", [m.conv, m.norm, m.act])),
    "hidden": Hidden,
    "twice": _style(lambda m, x: m.act(m.norm(m.conv(x)) + m.conv(x.tanh()))),
    "besides": _style(_besides),
    "norm twice": _style(lambda m, x: _in_sequence(m, x) + m.norm(x).mean()),
    "shared norm": _style(
        lambda m, x: m.act(m.norm(m.conv(x)) + m.norm(m.second(x))), lambda m: m.add_module("second", _like(m.conv))
    ),
    "two names": _style(_in_sequence, lambda m: m.add_module("alias", m.conv)),
    "two names used": _style(
        lambda m, x: m.act(m.norm(m.conv(x)) + m.alias(x.tanh())), lambda m: m.add_module("alias", m.conv)
    ),
    "norm two names": _style(lambda m, x: m.act(m.alias(m.conv(x))), lambda m: m.add_module("alias", m.norm)),
    "tied weight": _style(lambda m, x: m.act(m.norm(m.conv(x)) + m.second(x)), _tied("weight", "conv")),
    "tied bias": _style(lambda m, x: m.act(m.norm(m.conv(x)) + m.second(x)), _tied("bias", "conv")),
    "tied statistics": _style(lambda m, x: m.second(_in_sequence(m, x)), _tied("running_mean", "norm")),
    "weight read": _style(lambda m, x: m.act(m.norm(m.conv(x)) * (1 + m.conv.weight.mean()))),
    "norm read": _style(_norm_read),
    "read by sibling": _style(
        lambda m, x: m.reader(_in_sequence(m, x)), lambda m: m.add_module("reader", Reader(m.conv))
    ),
    "changed between": _style(_changed_between),
    "view changed": _style(_view_changed),
    "norm first": _style(lambda m, x: m.act(m.conv(m.norm(x)))),
    "counter": _style(_counting, lambda m: m.register_buffer("calls", torch.zeros((), dtype=torch.int64))),
    "keeps": _style(_keeps, _with_state),
    "keeps between": _style(_keeps_between, _with_state),
    "no grad": _style(_no_grad),
    "raw by data": _style(_unless(lambda x: x.mean() > 0)),
    "raw by batch": _style(_unless(lambda x: len(x) > 4)),
    "over rows": _style(lambda m, x: torch.cat([_in_sequence(m, row.unsqueeze(0)) for row in x])),
}
UNSEEN_STYLES = {"raw by data", "raw by batch"}


# ---- activations, hooks and parametrizations


class Dropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity, "relu": nn.ReLU, "relu in place": lambda: nn.ReLU(inplace=True), "silu": nn.SiLU,
    "silu in place": lambda: nn.SiLU(inplace=True), "dropout": nn.Dropout, "dropout by function": Dropout,
}  # fmt: skip


def _scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 1.25


def _watch(module: nn.Module, args: Any, output: Tensor) -> None:
    output.sum()


def _shift(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + 0.5,)


def _old_weight_norm(conv: nn.Module) -> None:
    with warnings.catch_warnings():
        # It is deprecated, but many older models use it.
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(conv)


EXTRAS: dict[str, Callable[[nn.Module, nn.Module], object]] = {
    "none": lambda conv, norm: None,
    "hook on conv": lambda conv, norm: conv.register_forward_hook(_scale),
    "watched conv": lambda conv, norm: conv.register_forward_hook(_watch),
    "hook before norm": lambda conv, norm: norm.register_forward_pre_hook(_shift),
    "hook on norm": lambda conv, norm: norm.register_forward_hook(_scale),
    "weight_norm": lambda conv, norm: nn.utils.parametrizations.weight_norm(conv),
    "spectral_norm": lambda conv, norm: nn.utils.parametrizations.spectral_norm(conv),
    "old weight_norm": lambda conv, norm: _old_weight_norm(conv),
    "old spectral_norm": lambda conv, norm: nn.utils.spectral_norm(conv),
    "frozen": lambda conv, norm: conv.requires_grad_(False),
}


# ---- how blocks are combined


class One(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Residual(One):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class ResidualInPlace(One):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y += x
        return y


class Repeated(One):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).tanh())


class Aliased(One):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.alias = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.alias(self.inner(x).tanh())


class GivesDict(One):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"y": self.inner(x), "rest": [x.mean(), None]}


class GivesObject(One):
    """Returns a dataclass instance."""

    def forward(self, x: Tensor) -> Output:
        return Output(self.inner(x), {"mean": x.mean()})


class TakesObject(One):
    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        return found.features + found.rest["mean"]


class ListOfModules(nn.Module):
    """Holds its blocks in a plain list: they aren't in the module tree."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.parts = [first, second]

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class TakesDict(One):
    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        return found["y"] + found["rest"][0]


class Guarded(One):
    """A data-dependent branch that is never taken, around blocks with graphs."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e6 else self.inner(x)


class BatchLoop(One):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.inner(row.unsqueeze(0)) for row in x])


class NumberOfLoops(One):
    """Calls its block once for each row, at most three times."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(min(len(x), 3)):
            x = self.inner(x).tanh()
        return x


class Two(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second


class Sum(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


class Concatenated(Two):
    """Concatenates the channels of both, and brings them back to the number of one by a convolution."""

    def __init__(self, first: nn.Module, second: nn.Module, narrow: nn.Module) -> None:
        super().__init__(first, second)
        self.narrow = narrow

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.cat([self.first(x), self.second(x)], 1))


class GivesBoth(Two):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return y, self.second(y)


class TakesBoth(One):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.inner(x)
        return first - second


class EitherByData(Two):
    def forward(self, x: Tensor) -> Tensor:
        # Don't use the mean: after a BatchNorm, it may be zero except for rounding.
        if x.flatten()[0] > 0:
            return self.first(x)
        return self.second(x)


class EitherByBatch(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if len(x) > 4 else self.second(x)


_ONE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "residual": Residual, "residual in place": ResidualInPlace, "repeated": Repeated, "aliased": Aliased,
    "dict": lambda inner: TakesDict(GivesDict(inner)), "guarded": Guarded, "batch loop": BatchLoop,
    "number of loops": NumberOfLoops, "object": lambda inner: TakesObject(GivesObject(inner)),
}  # fmt: skip
_TWO: dict[str, Callable[[nn.Module, nn.Module], nn.Module]] = {
    "sequence": nn.Sequential, "sum": Sum, "tuple": lambda first, second: TakesBoth(GivesBoth(first, second)),
    "either by data": EitherByData, "either by batch": EitherByBatch, "plain list": ListOfModules,
}  # fmt: skip
COMBINATIONS = (*_ONE, *_TWO, "concatenated")
# Combinations in which a part is called only for some batches, is in the tree twice or not at all, or is called once
# for each row.
_UNFOLDED_IN = {"aliased", "either by data", "either by batch", "batch loop", "number of loops", "plain list"}


# ---- the whole


class Root(nn.Module):
    """The blocks in sequence, and then the head."""

    def __init__(self, blocks: list[nn.Module], head: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Any:
        for block in self.blocks:
            x = block(x)
        if scale is not None:
            x = x * scale.reshape(-1, *[1] * (x.dim() - 1))
        return x if self.head is None else self.head(x)


class RootOfTuple(Root):
    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Any:
        return super().forward(x, scale=scale), (x,)


class RootOfDict(Root):
    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Any:
        features = []
        for block in self.blocks:
            x = block(x)
            features.append(x)
        if scale is not None:
            x = x * scale.reshape(-1, *[1] * (x.dim() - 1))
        return {"y": x if self.head is None else self.head(x), "features": features, "kind": "maps"}


class LinearOn2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(CHANNELS, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x.flatten(2).mean(2)))


class LinearOn3d(nn.Module):
    """The channels of the BatchNorm aren't the outputs of the linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(F.adaptive_avg_pool1d(x.flatten(2), CHANNELS)))


class RootOfObject(Root):
    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Any:
        return Output(super().forward(x, scale=scale), [x])


_ROOTS = {"tensor": Root, "tuple": RootOfTuple, "dict": RootOfDict, "object": RootOfObject}
_HEADS: dict[str, type[nn.Module]] = {"linear on 2-D": LinearOn2d, "linear on 3-D": LinearOn3d}


@dataclass(frozen=True)
class BuiltPair:
    """A layer and its BatchNorm in a model.

    Attributes:
        conv, norm: the paths of the two.
        kinds: what a fold of the two is an example of.
        is_plain: whether it must be folded if there are example inputs.
        has_bias: whether the layer has a bias that must be moved into the BatchNorm.
    """

    conv: str
    norm: str
    kinds: tuple[str, ...]
    is_plain: bool
    has_bias: bool


@dataclass(frozen=True)
class Built:
    """A model and its pairs. A pair isn't included if its modules aren't in the model: see `Functional`."""

    model: nn.Module
    pairs: tuple[BuiltPair, ...]


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with its path; those in plain lists with the paths that reports use."""
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        children = list(module.named_children())
        for name, value in module.__dict__.items():
            if isinstance(value, list):
                children += [(f"{name}[{n}]", item) for n, item in enumerate(value) if isinstance(item, nn.Module)]
        # Registered children come first, so that a module in the tree gets its path in the tree.
        waiting[:0] = [(f"{path}.{name}".lstrip("."), child) for name, child in reversed(children)]


def build(description: Description) -> Built:
    """Make the model, the same at every call, with weights and statistics that make comparisons meaningful."""
    builder = _Builder(description)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(description.seed)
        blocks = [builder.block(block, foldable=True) for block in description.blocks]
        head = _HEADS[description.head]() if description.head in _HEADS else None
        if isinstance(head, LinearOn2d):
            builder.pairs.append((head.linear, head.norm, ("style head", "linear"), True, True))
        model = _ROOTS[description.output](blocks, head)
        registered = {id(module) for module in model.modules()}
        everything = dict(modules_of(model))
        trees = [model, *(module for module in everything.values() if id(module) not in registered)]
        for tree in trees:
            enliven(tree, description.seed).to(DTYPES[description.dtype])
        model.train(description.training)
        for part in trees[1:]:
            # It isn't in the module tree, so `eval` of the model doesn't reach it.
            part.eval()
        for norm in builder.in_training:
            norm.train()
        for extra in builder.extras:
            extra()
    paths = {id(module): path for path, module in everything.items()}
    pairs = tuple(
        BuiltPair(paths[id(conv)], paths[id(norm)], kinds, plain, has_bias)
        for conv, norm, kinds, plain, has_bias in builder.pairs
        if id(conv) in paths and id(norm) in paths
    )
    return Built(model, pairs)


class _Builder:
    def __init__(self, description: Description) -> None:
        self.dims = description.dims
        # Layer, BatchNorm, kinds, whether it is plain, whether the layer has a bias to be moved.
        self.pairs: list[tuple[nn.Module, nn.Module, tuple[str, ...], bool, bool]] = []
        self.in_training: list[nn.Module] = []
        self.extras: list[Callable[[], object]] = []

    def block(self, block: Block, *, foldable: bool) -> nn.Module:
        if isinstance(block, Pair):
            return self.pair(block, foldable=foldable)
        foldable = foldable and block.kind not in _UNFOLDED_IN
        parts = [self.block(part, foldable=foldable) for part in block.parts]
        if block.kind == "concatenated":
            return Concatenated(*parts, _CONVOLUTIONS[self.dims](2 * CHANNELS, CHANNELS, 1))
        return (_ONE if block.kind in _ONE else _TWO)[block.kind](*parts)

    def pair(self, pair: Pair, *, foldable: bool) -> nn.Module:
        out = 2 * CHANNELS if pair.wide else CHANNELS
        way = WAYS.get(pair.style)
        conv, norm = self.layer(pair, out), self.norm(pair.norm, out, way.norm_dims(self.dims) if way else self.dims)
        act = ACTIVATIONS[pair.act]()
        joined = way.joined(conv, norm, act, branches=pair.branches) if way else STYLES[pair.style](conv, norm, act)
        has_bias = pair.conv.bias and not pair.leads
        self.pairs.append((conv, norm, (*pair.kinds(),), foldable and pair.is_plain, has_bias))
        if pair.norm.training:
            self.in_training.append(norm)
        self.extras.append(lambda: EXTRAS[pair.extra](conv, norm))
        return nn.Sequential(joined, _CONVOLUTIONS[self.dims](out, CHANNELS, 1)) if pair.wide else joined

    def layer(self, pair: Pair, out: int) -> nn.Module:
        if pair.is_linear:
            return (OwnLinear if pair.conv.own else nn.Linear)(CHANNELS, out, bias=pair.conv.bias)
        way = WAYS.get(pair.style)
        return self.conv(pair.conv, out, way.conv_dims(self.dims) if way else self.dims)

    def conv(self, conv: Conv, out: int, dims: int) -> nn.Module:
        same = conv.dilation * (conv.kernel - 1) // 2
        options: dict[str, Any] = {
            "padding": 0 if conv.resize == "valid" else same,
            "stride": 2 if conv.resize == "stride" else 1,
            "dilation": conv.dilation,
            "groups": conv.groups,
            "bias": conv.bias,
        }
        if conv.transposed:
            options["output_padding"] = 1 if conv.resize == "stride" else 0
            return (OWN_TRANSPOSED if conv.own else _TRANSPOSED)[dims](CHANNELS, out, conv.kernel, **options)
        if conv.padding == "same":
            options["padding"] = "same"
        else:
            options["padding_mode"] = conv.padding
        return (OWN_CONVOLUTIONS if conv.own else _CONVOLUTIONS)[dims](CHANNELS, out, conv.kernel, **options)

    def norm(self, norm: Norm, out: int, dims: int) -> nn.Module:
        kind = (ACTIVATED if norm.activated else OWN_NORMS if norm.own else _NORMS)[dims]
        return kind(out, affine=norm.affine, momentum=norm.momentum, track_running_stats=norm.running)


def _like(module: Any) -> Any:
    """A module of the same class with the same settings, and with its own weights."""
    other = copy.deepcopy(module)
    other.reset_parameters()
    return other


def inputs_of(description: Description) -> Callable[[int, torch.Generator], tuple[Tensor, ...]]:
    """Return a function that makes the positional arguments at a batch size."""

    def inputs(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        shape = (batch, CHANNELS, *[_SIZES[description.dims]] * description.dims)
        gap = 2 if description.layout == "strided" else 1
        x = torch.randn(*shape[:-1], shape[-1] * gap, generator=generator).to(DTYPES[description.dtype])[..., ::gap]
        if description.layout == "channels_last" and description.dims in _FORMATS:
            x = x.contiguous(memory_format=_FORMATS[description.dims])
        return (x,)

    return inputs


# ---- strategies


def _convs(*, resizes: bool) -> st.SearchStrategy[Conv]:
    return st.builds(
        Conv,
        kernel=st.sampled_from([3, 1]),
        bias=st.sampled_from([True, True, False]),
        groups=st.sampled_from([1, 1, 2, CHANNELS]),
        dilation=st.sampled_from([1, 1, 1, 2]),
        transposed=st.sampled_from([False, False, True]),
        padding=st.sampled_from(["zeros", "zeros", "same", "reflect", "circular", "replicate"]),
        resize=st.sampled_from(["", "stride", "valid"] if resizes else [""]),
        own=st.sampled_from([False] * 3 + [True]),
    ).map(_possible)


def _possible(conv: Conv) -> Conv:
    """The most similar convolution that torch supports."""
    if conv.transposed or conv.own or (conv.padding == "same" and conv.resize):
        conv = replace(conv, padding="zeros")
    if conv.padding == "reflect" or conv.resize:
        # Reflection padding must be smaller than the maps, which are small.
        conv = replace(conv, dilation=1)
    if conv.transposed and conv.resize == "stride":
        # A kernel of 1 would leave only the bias in three of four places. On such a map, torch's channels-last kernel
        # for batch statistics has ten times the rounding error of the other kernel. No public model has such a layer.
        conv = replace(conv, kernel=3)
    return conv


_NORMS_DRAWN = st.builds(
    Norm,
    affine=st.sampled_from([True, True, False]),
    momentum=st.sampled_from([0.1, None]),
    running=st.sampled_from([True] * 5 + [False]),
    training=st.sampled_from([False] * 4 + [True]),
    activated=st.sampled_from([False] * 3 + [True]),
    own=st.sampled_from([False] * 3 + [True]),
)


def _pairs(*, resizes: bool) -> st.SearchStrategy[Pair]:
    # Many pairs have no difficulty, so that one model has several rewrites in addition to refused ones.
    return st.builds(
        Pair,
        conv=_convs(resizes=resizes),
        norm=_NORMS_DRAWN,
        style=st.sampled_from([*PLAIN_STYLES, *STYLES, *PLAIN_WAYS, *WAYS]),
        act=st.sampled_from([*ACTIVATIONS]),
        extra=st.sampled_from(["none"] * 2 * len(EXTRAS) + [*EXTRAS]),
        wide=st.booleans(),
        branches=st.sampled_from([False, False, True]),
    ).map(_fitting)


def _fitting(pair: Pair) -> Pair:
    """Adapt settings: some ways of joining use input and output together, or don't support a setting."""
    if pair.norm.activated:
        # Its forward passes both to the function as they are.
        pair = replace(pair, norm=replace(pair.norm, momentum=0.1, running=True))
    if pair.style == "keywords":
        extra = "none" if pair.extra == "hook before norm" else pair.extra
        pair = replace(pair, norm=replace(pair.norm, activated=False), extra=extra)
    if pair.style in WAYS:
        # The output has the sizes of the input. Many convolutions after a BatchNorm would pad with zeros.
        pair = replace(pair, wide=False, conv=replace(pair.conv, resize=""))
        if pair.leads and not pair.is_linear:
            conv = pair.conv
            pads = conv.pads or conv.transposed
            pair = replace(pair, conv=replace(conv, kernel=1, transposed=False) if pads and pair.branches else conv)
        if pair.style in POOLED:
            pair = replace(pair, norm=replace(pair.norm, running=True))
    else:
        pair = replace(pair, branches=False)
    if pair.style in ("norm twice", "norm first"):
        pair = replace(pair, wide=False)
    if pair.style == "functional":
        conv = replace(pair.conv, padding="zeros")
        return replace(pair, conv=conv, norm=replace(pair.norm, training=False), extra="none")
    return pair


def _combined(inner: st.SearchStrategy[Block]) -> st.SearchStrategy[Combined]:
    one = st.builds(Combined, st.sampled_from([*_ONE]), st.tuples(inner))
    two = st.builds(Combined, st.sampled_from([*_TWO, "concatenated"]), st.tuples(inner, inner))
    return one | two


_BLOCKS: st.SearchStrategy[Block] = _pairs(resizes=False) | _combined(
    _pairs(resizes=False) | _combined(_pairs(resizes=False))
)
_DIMS = st.sampled_from([2, 2, 1, 3])
_DTYPES = st.sampled_from(["float32", "float32", "float32", "float64", "bfloat16", "float16"])
DESCRIPTIONS: st.SearchStrategy[Description] = st.builds(
    Description,
    blocks=st.tuples(_pairs(resizes=True)) | st.tuples(_BLOCKS) | st.tuples(_pairs(resizes=True), _BLOCKS),
    dims=_DIMS,
    head=st.sampled_from(["none", "none", *_HEADS]),
    output=st.sampled_from([*_ROOTS]),
    dtype=_DTYPES,
    layout=st.sampled_from(["contiguous", "channels_last", "strided"]),
    scaled=st.booleans(),
    training=st.booleans(),
    batch=st.sampled_from([2, 3, 1, 0]),
    seed=st.integers(0, 7),
)
# One pair, with nothing around it that could prevent a fold.
LONE_PAIRS: st.SearchStrategy[Description] = st.builds(
    Description, blocks=st.tuples(_pairs(resizes=True)), dims=_DIMS, dtype=_DTYPES
)
