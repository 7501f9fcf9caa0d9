"""Random modules: plain descriptions that can be read and repeated, and the modules that they describe.

    description = Description(blocks=(Pair(Conv(groups=2), Norm(), style="besides"),))
    model = build(description).model
    (x,) = inputs_of(description)(2, torch.Generator())

A block takes and returns CHANNELS channels. Only the first block of a model may change the size of the maps, so that
all others can be added and concatenated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from folding_models import BatchNormAct
from hypothesis import strategies as st
from tiny_models import Net, enliven
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
    """A convolution."""

    kernel: int = 3
    bias: bool = True
    groups: int = 1
    dilation: int = 1
    transposed: bool = False
    padding: str = "zeros"
    # "" keeps the size of the maps; "stride" halves it, or doubles it with an output padding if transposed; "valid" pads
    # nothing.
    resize: str = ""
    own: bool = False  # whether its class has its own forward, which calls the function

    @property
    def pads(self) -> bool:
        """Whether it reads zeros beyond the border of the maps."""
        return self.kernel > 1 and self.resize != "valid" and self.padding in ("zeros", "same")


@dataclass(frozen=True)
class Norm:
    """A BatchNorm."""

    affine: bool = True
    momentum: float | None = 0.1
    running: bool = True  # whether it keeps running statistics
    training: bool = False  # whether it is left in training mode
    activated: bool = False  # whether its class contains an activation
    own: bool = False  # whether its class has its own forward, which calls the function


@dataclass(frozen=True)
class Pair:
    """A convolution and its BatchNorm."""

    conv: Conv = Conv()
    norm: Norm = Norm()
    style: str = "modules"  # how the two are joined, and what else uses them; a key of `STYLES`
    act: str = "none"  # what follows, a key of `ACTIVATIONS`
    extra: str = "none"  # a hook or a parametrization, a key of `EXTRAS`
    wide: bool = False  # whether there are twice as many channels between the two

    @property
    def is_plain(self) -> bool:
        """Whether the pair has no difficulty, so that it must be folded."""
        usual = self.norm.running and not self.norm.training
        return self.style in PLAIN_STYLES and self.extra in ("none", "frozen") and usual


@dataclass(frozen=True)
class Combined:
    """Several blocks in one. `kind` is a key of `_ONE` or `_TWO`, or "concatenated"."""

    kind: str
    parts: tuple[Block, ...]


Block = Pair | Combined


@dataclass(frozen=True)
class Description:
    """A model and its inputs."""

    blocks: tuple[Block, ...]
    dims: int = 2
    head: str = "none"  # what follows the blocks: "none", or a key of `_HEADS`
    output: str = "tensor"  # a key of `_ROOTS`
    dtype: str = "float32"
    layout: str = "contiguous"  # of the inputs, or "channels_last", or "strided" with gaps between the elements
    scaled: bool = False  # whether a second tensor is passed as a keyword
    training: bool = False  # whether the model is in training mode when `optimize` gets it
    batch: int = 2  # the rows of the example inputs; 0 if they are a function of the batch size
    seed: int = 0

    @property
    def may_be_unseen(self) -> bool:
        """Whether a branch uses a convolution's output without its BatchNorm, which possibly no example shows.

        A BatchNorm at the start of one of two branches belongs to a convolution before both, and a BatchNorm before both
        belongs to a convolution at the start of one of them, if that one pads no zeros.
        """
        either = [block for block in self._combined() if block.kind.startswith("either")]
        begins = any(not pair.conv.pads for block in either for pair in _pairs_in(block))
        return begins or any(pair.style in UNSEEN_STYLES for pair in self.pairs())

    @property
    def breaks_graphs(self) -> bool:
        """Whether a branch on data breaks the graph in the loop over the blocks, which then runs as written."""
        branches = any(pair.style in ("island", "raw by data") for pair in self.pairs())
        return branches or any(block.kind in ("guarded", "either by data") for block in self._combined())

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


def _style(run: Run, add: Callable[[Any], None] = lambda m: None) -> Style:
    """A style from a function of the module and the maps; `add` gives the module more attributes."""

    def joined(conv: nn.Module, norm: nn.Module, act: nn.Module) -> nn.Module:
        module = Net(run, conv=conv, norm=norm, act=act)
        add(module)
        return module

    return joined


def _in_sequence(m: Any, x: Tensor) -> Tensor:
    return m.act(m.norm(m.conv(x)))


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
    stem = Net(lambda m, x: m.conv(x.tanh()), conv=conv)
    return nn.Sequential(stem, Net(lambda m, x: m.act(m.norm(x)), norm=norm, act=act))


PLAIN_STYLES: dict[str, Style] = {
    "modules": _style(_in_sequence),
    "sequential": _sequential,
    "nested": _nested,
    "across": _across,
    "identity": _style(
        lambda m, x: m.act(m.norm(m.between(m.conv(x)))), lambda m: m.add_module("between", nn.Identity())
    ),
    "cloned": _style(lambda m, x: m.act(m.norm(m.conv(x).clone().contiguous()))),
    "keywords": _style(lambda m, x: m.act(m.norm(input=m.conv(input=x)))),
    "two norms": _style(
        lambda m, x: m.act(m.second(m.norm(m.conv(x)))), lambda m: m.add_module("second", _like(m.norm))
    ),
}
STYLES: dict[str, Style] = PLAIN_STYLES | {
    "functional": Functional,
    # A data-dependent branch that is never taken.
    "island": _style(_unless(lambda x: x.sum() > 1e6)),
    "twice": _style(lambda m, x: m.act(m.norm(m.conv(x)) + m.conv(x.tanh()))),
    "besides": _style(_besides),
    "changed between": _style(_changed_between),
    "view changed": _style(_view_changed),
    "swapped": _style(lambda m, x: m.act(m.norm(m.conv(x).transpose(-1, 2)).transpose(-1, 2))),
    "move used": _style(lambda m, x: m.act((m.norm(y := m.conv(x).transpose(-1, 2)) + y).transpose(-1, 2))),
    "move written": _style(lambda m, x: m.act((y := m.conv(x), y.transpose(-1, 2).mul_(2), m.norm(y))[2])),
    "norm first, used": _style(lambda m, x: m.act(m.conv(y := m.norm(x)) + y)),
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


# ---- classes with their own forward


def _convolve(self: Any, input: Tensor) -> Tensor:
    function = _FUNCTIONS[self.weight.dim() - 2]
    return function(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def _convolve_transposed(self: Any, input: Tensor) -> Tensor:
    function = _TRANSPOSED_FUNCTIONS[self.weight.dim() - 2]
    settings = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
    return function(input, self.weight, self.bias, *settings)


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


EXTRAS: dict[str, Callable[[nn.Module, nn.Module], object]] = {
    "none": lambda conv, norm: None,
    "hook on conv": lambda conv, norm: conv.register_forward_hook(_scale),
    "watched conv": lambda conv, norm: conv.register_forward_hook(_watch),
    "hook before norm": lambda conv, norm: norm.register_forward_pre_hook(_shift),
    "hook on norm": lambda conv, norm: norm.register_forward_hook(_scale),
    "weight_norm": lambda conv, norm: nn.utils.parametrizations.weight_norm(conv),
    "spectral_norm": lambda conv, norm: nn.utils.parametrizations.spectral_norm(conv),
    "frozen": lambda conv, norm: conv.requires_grad_(False),
}


# ---- how blocks are combined


def _residual_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.inner(x)
    y += x
    return y


def _by_number(m: Any, x: Tensor) -> Tensor:
    """Calls its block once for each row, at most three times."""
    for _ in range(min(len(x), 3)):
        x = m.inner(x).tanh()
    return x


def _one(run: Run) -> Callable[[nn.Module], nn.Module]:
    return lambda inner: Net(run, inner=inner)


def _two(run: Run) -> Callable[[nn.Module, nn.Module], nn.Module]:
    return lambda first, second: Net(run, first=first, second=second)


def _gives_and_takes_dict(inner: nn.Module) -> nn.Module:
    gives = Net(lambda m, x: {"y": m.inner(x), "rest": [x.mean(), None]}, inner=inner)
    return Net(lambda m, x: (found := m.inner(x))["y"] + found["rest"][0], inner=gives)


def _gives_and_takes_both(first: nn.Module, second: nn.Module) -> nn.Module:
    gives = Net(lambda m, x: (y := m.first(x), m.second(y)), first=first, second=second)
    return Net(lambda m, x: (both := m.inner(x))[0] - both[1], inner=gives)


class Guarded(nn.Module):
    """A data-dependent branch that is never taken, around blocks with graphs. It ends a graph, so it is in a `forward`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e6 else self.inner(x)


_ONE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "residual": _one(lambda m, x: x + m.inner(x)),
    "residual in place": _one(_residual_in_place),
    "repeated": _one(lambda m, x: m.inner(m.inner(x).tanh())),
    "dict": _gives_and_takes_dict,
    "guarded": Guarded,
    "batch loop": _one(lambda m, x: torch.cat([m.inner(row.unsqueeze(0)) for row in x])),
    "number of loops": _one(_by_number),
}
_TWO: dict[str, Callable[[nn.Module, nn.Module], nn.Module]] = {
    "sequence": nn.Sequential,
    "sum": _two(lambda m, x: m.first(x) + m.second(x)),
    "tuple": _gives_and_takes_both,
    # Don't use the mean: after a BatchNorm, it may be zero except for rounding.
    "either by data": _two(lambda m, x: m.first(x) if x.flatten()[0] > 0 else m.second(x)),
    "either by batch": _two(lambda m, x: m.first(x) if len(x) > 4 else m.second(x)),
}
# Combinations in which a part is called only for some batches, or once for each row.
_UNFOLDED_IN = {"either by data", "either by batch", "batch loop", "number of loops"}


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


def _linear_on_2d() -> nn.Module:
    layers = {"linear": nn.Linear(CHANNELS, 6), "norm": nn.BatchNorm1d(6)}
    return Net(lambda m, x: m.norm(m.linear(x.flatten(2).mean(2))), **layers)


def _linear_on_3d() -> nn.Module:
    """The channels of the BatchNorm aren't the outputs of the linear layer."""
    layers = {"linear": nn.Linear(CHANNELS, CHANNELS), "norm": nn.BatchNorm1d(CHANNELS)}
    return Net(lambda m, x: m.norm(m.linear(F.adaptive_avg_pool1d(x.flatten(2), CHANNELS))), **layers)


_ROOTS = {"tensor": Root, "tuple": RootOfTuple, "dict": RootOfDict}
_HEADS: dict[str, Callable[[], Any]] = {"linear on 2-D": _linear_on_2d, "linear on 3-D": _linear_on_3d}


@dataclass(frozen=True)
class BuiltPair:
    """A layer and its BatchNorm in a model, by their paths."""

    conv: str
    norm: str
    is_plain: bool  # whether it must be folded if there are example inputs
    has_bias: bool  # whether the layer has a bias that must be moved into the BatchNorm


@dataclass(frozen=True)
class Built:
    """A model and its pairs. A pair isn't included if its modules aren't in the model: see `Functional`."""

    model: nn.Module
    pairs: tuple[BuiltPair, ...]


def build(description: Description) -> Built:
    """Make the model, the same at every call, with weights and statistics that make comparisons meaningful."""
    builder = _Builder(description)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(description.seed)
        blocks = [builder.block(block, foldable=True) for block in description.blocks]
        head = _HEADS[description.head]() if description.head in _HEADS else None
        if description.head == "linear on 2-D":
            builder.pairs.append((head.linear, head.norm, True, True))
        model = _ROOTS[description.output](blocks, head)
        enliven(model, description.seed).to(DTYPES[description.dtype])
        model.train(description.training)
        for norm in builder.in_training:
            norm.train()
        for extra in builder.extras:
            extra()
    paths = {id(module): path for path, module in model.named_modules()}
    pairs = tuple(
        BuiltPair(paths[id(conv)], paths[id(norm)], plain, has_bias)
        for conv, norm, plain, has_bias in builder.pairs
        if id(conv) in paths and id(norm) in paths
    )
    return Built(model, pairs)


class _Builder:
    def __init__(self, description: Description) -> None:
        self.dims = description.dims
        # Layer, BatchNorm, whether it is plain, whether the layer has a bias to be moved.
        self.pairs: list[tuple[nn.Module, nn.Module, bool, bool]] = []
        self.in_training: list[nn.Module] = []
        self.extras: list[Callable[[], object]] = []

    def block(self, block: Block, *, foldable: bool) -> nn.Module:
        if isinstance(block, Pair):
            return self.pair(block, foldable=foldable)
        foldable = foldable and block.kind not in _UNFOLDED_IN
        parts = [self.block(part, foldable=foldable) for part in block.parts]
        if block.kind == "concatenated":
            # A convolution brings the channels of both back to the number of one.
            first, second = parts
            narrow = _CONVOLUTIONS[self.dims](2 * CHANNELS, CHANNELS, 1)
            run = lambda m, x: m.narrow(torch.cat([m.first(x), m.second(x)], 1))  # noqa: E731
            return Net(run, first=first, second=second, narrow=narrow)
        return (_ONE if block.kind in _ONE else _TWO)[block.kind](*parts)

    def pair(self, pair: Pair, *, foldable: bool) -> nn.Module:
        out = 2 * CHANNELS if pair.wide else CHANNELS
        conv, norm = self.conv(pair.conv, out, self.dims), self.norm(pair.norm, out, self.dims)
        joined = STYLES[pair.style](conv, norm, ACTIVATIONS[pair.act]())
        self.pairs.append((conv, norm, foldable and pair.is_plain, pair.conv.bias))
        if pair.norm.training:
            self.in_training.append(norm)
        self.extras.append(lambda: EXTRAS[pair.extra](conv, norm))
        return nn.Sequential(joined, _CONVOLUTIONS[self.dims](out, CHANNELS, 1)) if pair.wide else joined

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
        style=st.sampled_from([*PLAIN_STYLES, *STYLES]),
        act=st.sampled_from([*ACTIVATIONS]),
        extra=st.sampled_from(["none"] * 2 * len(EXTRAS) + [*EXTRAS]),
        wide=st.booleans(),
    ).map(_fitting)


def _fitting(pair: Pair) -> Pair:
    """Adapt settings: some ways of joining use input and output together, or don't support a setting."""
    if pair.norm.activated:
        # Its forward passes both to the function as they are.
        pair = replace(pair, norm=replace(pair.norm, momentum=0.1, running=True))
    if pair.style == "keywords":
        extra = "none" if pair.extra == "hook before norm" else pair.extra
        pair = replace(pair, norm=replace(pair.norm, activated=False), extra=extra)
    if pair.style.startswith("norm first"):
        pair = replace(pair, wide=False, conv=replace(pair.conv, resize=""))
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
