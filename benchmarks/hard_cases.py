"""Small models, each with one difficulty for folding a BatchNorm that tools are known to get wrong or to miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from exporters.isolation import torchscript_allowed

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_IMAGE = (3, 8, 8)


@dataclass(frozen=True)
class Case:
    """One model, and what is known about it.

    Attributes:
        name: its name in the table.
        hard: the difficulty, in a few words.
        make: makes a new module in its own dtype and modes, with the same values at every call under one seed.
        shape: the shape of the input, without the batch.
        folds: the number of BatchNorm calls, in a call of the model at batch size 2, that can be folded exactly. Only
            modules and tensors without any other use count. It is 0 if something is shared, hooked, parametrized or
            under autocast: leaving that alone is as right as folding it correctly.
        dtype: the dtype of the model and its input.
        draw: makes the inputs from a standard normal tensor, (batch, *shape), and the number of the draw: 0, or 1 for
            inputs that no tool has seen.
    """

    name: str
    hard: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    folds: int
    dtype: torch.dtype = torch.float32
    draw: Callable[[Tensor, int], Inputs] = lambda x, number: ((x,), {})

    def build(self) -> nn.Module:
        """Make the model, the same at every call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.make().to(self.dtype)

    def inputs(self, batch: int, number: int = 0) -> Inputs:
        """The positional and keyword arguments of one call."""
        generator = torch.Generator().manual_seed(10 * batch + number)
        return self.draw(torch.randn(batch, *self.shape, generator=generator).to(self.dtype), number)


CASES: dict[str, Case] = {}


def hard_case(
    name: str, hard: str, *, folds: int, shape: tuple[int, ...] = _IMAGE, **more: Any
) -> Callable[[Any], Any]:
    """Register a class, or a function that makes a module, as a case. The module is put into eval."""

    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        if name in CASES:
            raise ValueError(f"two cases are called {name!r}")
        CASES[name] = Case(name, hard, lambda: make().eval(), shape, folds, **more)
        return make

    return register


_NORMS: dict[int, type[nn.modules.batchnorm._BatchNorm]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def lively(norm: nn.Module) -> nn.Module:
    """Give a BatchNorm values as after training, in place, and return it.

    With mean 0 and variance 1 it is almost the identity, and hides errors.
    """
    with torch.no_grad():
        for name, low, high in (
            ("running_mean", -0.5, 0.5),
            ("running_var", 0.5, 2.0),
            ("weight", 0.5, 1.5),
            ("bias", -0.3, 0.3),
        ):
            value = getattr(norm, name, None)
            if value is not None:
                value.uniform_(low, high)
    return norm


def batch_norm(channels: int = 4, dims: int = 2, **options: Any) -> nn.Module:
    """A BatchNorm with that many dims, and with values as after training."""
    return lively(_NORMS[dims](channels, **options))


def pair(conv: Callable[[], nn.Module], dims: int = 2, channels: int = 4, **options: Any) -> Callable[[], nn.Module]:
    """Return a function that makes a convolution, its BatchNorm and an activation, in sequence."""
    return lambda: nn.Sequential(conv(), batch_norm(channels, dims, **options), nn.ReLU())


class Pair(nn.Module):
    """A convolution, its BatchNorm and an activation; each subclass changes something."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = batch_norm()
        self.more()

    def more(self) -> None:
        """Add or replace modules in a subclass."""

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)).relu()


# Kinds of layers.

for _name, _hard, _make, _shape, _folds in (
    ("conv2d", "nothing: the plain pair", pair(lambda: nn.Conv2d(3, 4, 3)), _IMAGE, 1),
    ("conv1d", "other dims", pair(lambda: nn.Conv1d(3, 4, 3), 1), (3, 9), 1),
    ("conv3d", "other dims", pair(lambda: nn.Conv3d(3, 4, 3), 3), (3, 5, 5, 5), 1),
    ("grouped conv", "fewer input channels per weight", pair(lambda: nn.Conv2d(4, 4, 3, groups=2)), (4, 8, 8), 1),
    ("reflect padding", "padding by another call", pair(lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")), _IMAGE, 1),
    ("transposed conv", "output channels in dim 1", pair(lambda: nn.ConvTranspose2d(3, 4, 3)), _IMAGE, 1),
    ("grouped transposed conv", "output channels in dims 0 and 1 of the weight",
     pair(lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), channels=6), (4, 5, 5), 1),
    ("transposed conv, output_padding", "outputs that only the bias reaches",
     pair(lambda: nn.ConvTranspose2d(3, 4, 2, stride=3, output_padding=1)), (3, 5, 5), 1),
    ("transposed conv1d", "other dims", pair(lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), 1), (3, 9), 1),
    ("transposed conv3d", "other dims", pair(lambda: nn.ConvTranspose3d(3, 4, 2), 3), (3, 3, 3, 3), 1),
    ("linear, 2-D", "no convolution", pair(lambda: nn.Linear(5, 4), 1), (5,), 1),
    ("linear, 3-D", "channels are dim 1, and features the last; as many of both", pair(lambda: nn.Linear(5, 4), 1), (4, 5), 0),
):  # fmt: skip
    hard_case(_name, _hard, folds=_folds, shape=_shape)(_make)


@hard_case("linear, 3-D, transposed", "features are brought to dim 1 before the BatchNorm", folds=1, shape=(6, 5))
class TransposedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(5, 4), batch_norm(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.linear(x).transpose(1, 2)).relu()


# Kinds of BatchNorm.

hard_case("no scale and shift", "affine=False", folds=1)(pair(lambda: nn.Conv2d(3, 4, 3), affine=False))
hard_case("momentum None", "a plain mean over batches", folds=1)(pair(lambda: nn.Conv2d(3, 4, 3), momentum=None))
hard_case("no running statistics", "those of the batch are used in eval too", folds=0)(
    pair(lambda: nn.Conv2d(3, 4, 3), track_running_stats=False)
)


@hard_case("BatchNorm in training", "left in training mode inside of an eval model", folds=0)
class LeftInTraining(Pair):
    def train(self, mode: bool = True) -> LeftInTraining:
        super().train(mode)
        self.bn.train()
        return self


class BatchNormAct(nn.BatchNorm2d):
    """A BatchNorm as in image models: with an activation inside, and with a call of the function."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return F.silu(x)


@hard_case("BatchNorm with activation", "a subclass with a forward of its own", folds=1)
class WithActivation(Pair):
    def more(self) -> None:
        self.bn = lively(BatchNormAct(4))


class Statistics(nn.Module):
    """Has the tensors of a BatchNorm, but isn't one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.empty(4).uniform_(0.5, 1.5)), nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("var", torch.empty(4).uniform_(0.5, 2.0))


@hard_case("F.batch_norm", "a function on parameters and buffers of the model", folds=1)
class Functional(Statistics):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return F.batch_norm(y, self.mean, self.var, self.gain, self.shift, False, 0.1, 1e-3).relu()


@hard_case("F.conv2d and F.batch_norm", "functions only, with keywords", folds=1)
class AllFunctional(Statistics):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3, 3, 3) / 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(x, self.w, padding=1)
        return F.batch_norm(running_var=self.var, running_mean=self.mean, weight=self.gain, input=y).relu()


class StandardisedConv(nn.Conv2d):
    """Weight standardization, by a batch_norm that belongs to no BatchNorm of the model."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, padding=1)


@hard_case("weight standardisation", "the weight is made anew by F.batch_norm(training=True)", folds=0)
class Standardised(Pair):
    def more(self) -> None:
        self.conv = StandardisedConv(3, 4, 3)


# Precision.

for _dtype, _word in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
    hard_case(_word, "folded weights are rounded again", folds=1, dtype=_dtype)(pair(lambda: nn.Conv2d(3, 4, 3)))


class CancellingWeights(Pair):
    """Weights that sum to zero, in values that these dtypes represent exactly. After rounding they no longer cancel."""

    def more(self) -> None:
        # No padding, because nothing cancels next to it.
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        first, second = (torch.randint(1, 17, (4, 9)).float() / 64 for _ in range(2))
        with torch.no_grad():
            self.conv.weight.copy_(torch.stack([first, second, -(first + second)], 2).view(4, 3, 3, 3))


for _dtype, _word in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
    hard_case(
        f"{_word}, cancelling weights", "a large input cancels, and not with rounded weights", folds=0, dtype=_dtype,
        draw=lambda x, number: ((x + 1000,), {}),
    )(CancellingWeights)  # fmt: skip


# Something besides the BatchNorm uses the same value.


@hard_case("conv used elsewhere", "its output is used without the BatchNorm too", folds=0)
class UsedBesides(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.bn(y).relu() + y.mean((2, 3), keepdim=True)


@hard_case("conv called twice", "once without the BatchNorm", folds=0)
class CalledTwice(Pair):
    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)).relu() + self.conv(x * 0.5).tanh()


@hard_case("conv under two names", "once without the BatchNorm, by the other name", folds=0)
class TwoNames(Pair):
    def more(self) -> None:
        self.alias = self.conv

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)).relu() + self.alias(x * 0.5).tanh()


@hard_case("conv under two names, two BatchNorms", "each name has a BatchNorm of its own", folds=0)
class TwoNamesTwoNorms(Pair):
    def more(self) -> None:
        self.alias, self.second = self.conv, batch_norm()

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)).relu() + self.second(self.alias(x * 0.5))


@hard_case("shared BatchNorm", "behind two convolutions", folds=0)
class SharedNorm(Pair):
    def more(self) -> None:
        self.second = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)).relu() + self.bn(self.second(x))


@hard_case("shared BatchNorm, besides", "behind a convolution, and behind none", folds=0)
class SharedNormBesides(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.bn(self.conv(x)).relu()
        return self.bn(y * 2)


@hard_case("block called twice", "what it holds is used in one way still", folds=2)
class SharedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), batch_norm(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x).relu())


@hard_case("tied weights", "two convolutions, one weight, one BatchNorm", folds=0)
class Tied(Pair):
    def more(self) -> None:
        self.second = nn.Conv2d(3, 4, 3, padding=1)
        self.second.weight = self.conv.weight

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)).relu() + self.second(x)


@hard_case("tied bias", "two convolutions, one bias, one BatchNorm", folds=0)
class TiedBias(Pair):
    def more(self) -> None:
        self.second = nn.Conv2d(3, 4, 3, padding=1)
        self.second.bias = self.conv.bias

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)).relu() + self.second(x)


@hard_case("tied statistics", "two BatchNorms, one running mean", folds=0)
class TiedStatistics(Pair):
    def more(self) -> None:
        self.second = batch_norm(3)
        self.third = batch_norm()
        self.third.running_mean = self.bn.running_mean

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)).relu() + self.third(self.second(x).mean(1, keepdim=True).expand(-1, 4, -1, -1))


@hard_case("weight read elsewhere", "the forward reads conv.weight too", folds=0)
class ReadsWeight(Pair):
    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)).relu(), self.conv.weight.square().sum((1, 2, 3))


@hard_case("statistics read elsewhere", "the forward reads bn.running_mean too", folds=0)
class ReadsStatistics(Pair):
    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)).relu() + self.bn.running_mean.reshape(1, -1, 1, 1)


class Reader(nn.Module):
    """Reads a weight of its sibling, in a data-dependent branch."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.convs = [conv]

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.convs[0].weight.mean()) if x.sum() < 1e6 else x


@hard_case("weight read by a sibling", "which can't be traced", folds=0)
class ReadBySibling(Pair):
    def more(self) -> None:
        self.reader = Reader(self.conv)

    def forward(self, x: Tensor) -> Any:
        return self.reader(self.bn(self.conv(x)).relu())


@hard_case("hook that changes", "a forward hook on the convolution", folds=0)
class HookChanges(Pair):
    def more(self) -> None:
        self.conv.register_forward_hook(lambda module, args, output: output.tanh())


@hard_case("hook that keeps", "a forward hook keeps features, and the model returns them", folds=0)
class HookKeeps(Pair):
    def more(self) -> None:
        self.conv.register_forward_hook(lambda module, args, output: setattr(module, "kept", output))

    def forward(self, x: Tensor) -> Any:
        y = self.bn(self.conv(x)).relu()
        return y, self.conv.kept


@hard_case("pre-hook on the BatchNorm", "changes what comes in", folds=0)
class PreHook(Pair):
    def more(self) -> None:
        self.bn.register_forward_pre_hook(lambda module, args: (args[0].clamp(min=0),))


@hard_case("hook on a container", "between the convolution and the BatchNorm", folds=0)
class HookOnContainer(Pair):
    def more(self) -> None:
        self.conv = nn.Sequential(nn.Sequential(self.conv))
        self.conv[0].register_forward_hook(lambda module, args, output: output.tanh())


@hard_case("backward hook", "the gradient between the two is looked at", folds=0)
class BackwardHook(Pair):
    def more(self) -> None:
        self.conv.register_full_backward_hook(lambda module, inputs, outputs: None)


@hard_case("in-place between", "relu_ on the output of the convolution", folds=0)
class InPlaceBetween(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        torch.relu_(y)
        return self.bn(y)


@hard_case("view changed between", "one channel is written to through a view", folds=0)
class ViewBetween(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        y[:, :1].mul_(3)
        return self.bn(y)


@hard_case("in-place behind", "relu_ on the output of the BatchNorm", folds=1)
class InPlaceBehind(Pair):
    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)).relu_()


# Kinds of convolution modules.


class OwnForward(nn.Conv2d):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class KeptForward(nn.Conv2d):
    """A subclass that inherits forward."""

    def describe(self) -> str:
        return "a convolution"


@hard_case("conv subclass, own forward", "an activation inside of it", folds=0)
class OwnForwardPair(Pair):
    def more(self) -> None:
        self.conv = OwnForward(3, 4, 3)


@hard_case("conv subclass, kept forward", "not the class that a tool looks for", folds=1)
class KeptForwardPair(Pair):
    def more(self) -> None:
        self.conv = KeptForward(3, 4, 3)


@hard_case("parametrized weight_norm", "the weight is made anew at every read", folds=0)
class WeightNorm(Pair):
    def more(self) -> None:
        torch.nn.utils.parametrizations.weight_norm(self.conv)
        with torch.no_grad():
            self.conv.parametrizations.weight.original0.mul_(1.7)


@hard_case("old weight_norm", "the weight is set by a hook", folds=0)
class OldWeightNorm(Pair):
    def more(self) -> None:
        gain, direction = (
            nn.Parameter(torch.empty(4, 1, 1, 1).uniform_(0.5, 2)),
            nn.Parameter(self.conv.weight.detach()),
        )
        # Do what torch.nn.utils.weight_norm does. It is deprecated, and warns.
        del self.conv._parameters["weight"]
        self.conv.register_parameter("weight_g", gain)
        self.conv.register_parameter("weight_v", direction)

        def recompute(module: nn.Module, args: Any) -> None:
            module.weight = torch._weight_norm(module.weight_v, module.weight_g, 0)

        recompute(self.conv, ())
        self.conv.register_forward_pre_hook(recompute)


@hard_case("spectral_norm", "the weight is made anew at every read", folds=0)
class SpectralNorm(Pair):
    def more(self) -> None:
        torch.nn.utils.parametrizations.spectral_norm(self.conv)


@hard_case("old spectral_norm", "the weight is set by a hook", folds=0)
class OldSpectralNorm(Pair):
    def more(self) -> None:
        torch.nn.utils.spectral_norm(self.conv)


@hard_case("parametrized BatchNorm", "its weight is made anew at every read", folds=0)
class ParametrizedNorm(Pair):
    def more(self) -> None:
        nn.utils.parametrize.register_parametrization(self.bn, "weight", nn.Softplus())


@hard_case("quantization stubs", "which quantize nothing yet", folds=1)
class Stubs(Pair):
    def more(self) -> None:
        self.quantize, self.dequantize = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()

    def forward(self, x: Tensor) -> Any:
        return self.dequantize(self.bn(self.conv(self.quantize(x))).relu())


@hard_case("lazy modules, initialised", "they became others at their first call", folds=1)
def lazy_modules() -> nn.Module:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU()).eval()
    model(torch.zeros(1, *_IMAGE))
    lively(model[1])
    return model


# Other orders.


@hard_case("BatchNorm before, padding", "zeros of the padding pass no BatchNorm", folds=0)
class BeforePadded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn, self.conv = batch_norm(3), nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.bn(x)).relu()


@hard_case("BatchNorm before, no padding", "the convolution is behind", folds=1)
def before_conv() -> nn.Module:
    return nn.Sequential(batch_norm(3), nn.Conv2d(3, 4, 3), nn.ReLU())


@hard_case("BatchNorm before linear", "the linear layer is behind", folds=1, shape=(5,))
def before_linear() -> nn.Module:
    return nn.Sequential(batch_norm(5, 1), nn.Linear(5, 4), nn.ReLU())


@hard_case("two BatchNorms", "one after the other", folds=2)
def two_norms() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), batch_norm(), batch_norm(), nn.ReLU())


@hard_case("scale between", "the output times a parameter", folds=1)
class ScaleBetween(Pair):
    def more(self) -> None:
        self.gamma = nn.Parameter(torch.empty(4, 1, 1).uniform_(0.5, 2))

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x) * self.gamma).relu()


@hard_case("dropout between", "does nothing in eval", folds=1)
def dropout_between() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), batch_norm(), nn.ReLU())


@hard_case("residual", "the input goes around", folds=2)
class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 3, 3, padding=1), batch_norm(3)
        self.conv2, self.bn2 = nn.Conv2d(3, 3, 3, padding=1, bias=False), batch_norm(3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + x).relu()


# Structure and Python.


@hard_case("across modules", "convolution and BatchNorm in different modules", folds=1)
class Across(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Identity(), nn.Sequential(nn.Conv2d(3, 4, 3)))
        self.head = nn.Sequential(nn.Sequential(batch_norm()), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x))


@hard_case("nested Sequential", "three deep", folds=2)
def nested() -> nn.Module:
    inner = nn.Sequential(nn.Conv2d(3, 4, 3), batch_norm(), nn.ReLU())
    return nn.Sequential(nn.Sequential(inner), nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 1)), batch_norm()))


@hard_case("modules in a list", "in a plain Python list, not in the tree", folds=1)
class InList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Conv2d(3, 4, 3), batch_norm().eval()]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.relu()

    def _apply(self, fn: Any, recurse: bool = True) -> InList:
        # The usual fix of people who notice that `.double()` skips their list.
        for layer in self.layers:
            layer._apply(fn, recurse)
        return super()._apply(fn, recurse)


def _shifted(x: Tensor, number: int) -> Inputs:
    """Shift the inputs, so that the second draw takes other branches than the first."""
    return (x + 3 if number else x - 3,), {}


@hard_case("branch on data", "both branches behind the BatchNorm", folds=1, draw=_shifted)
class Branch(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.bn(self.conv(x))
        return y.relu() if x.sum() > 0 else y.tanh() - 1


@hard_case("branch on data in a child", "both branches behind the BatchNorm", folds=2, draw=_shifted)
class BranchInChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), batch_norm(3)
        self.child = Branch()

    def forward(self, x: Tensor) -> Tensor:
        return self.child(self.bn(self.conv(x)) + x)


@hard_case("branch past the BatchNorm", "on data, and one branch leaves the BatchNorm out", folds=0, draw=_shifted)
class BranchPast(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return y.relu() if x.sum() > 0 else self.bn(y).tanh()


@hard_case("loop over the batch", "as many calls as there are images", folds=2)
class LoopOverBatch(Pair):
    def forward(self, x: Tensor) -> Any:
        return torch.cat([self.bn(self.conv(image.unsqueeze(0))).relu() for image in x])


@hard_case("dict output", "outputs by name", folds=1)
class DictOutput(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.bn(self.conv(x))
        return {"features": y, "rest": [y.mean((2, 3)), None]}


@dataclass
class Output:
    """A possible output of a model."""

    features: Tensor
    pooled: Tensor


@hard_case("dataclass output", "outputs by name, in a class of the user", folds=1)
class DataclassOutput(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.bn(self.conv(x))
        return Output(y, y.mean((2, 3)))


@hard_case(
    "keyword arguments",
    "a tensor and a flag by name",
    folds=1,
    draw=lambda x, number: ((), {"image": x, "double": True}),
)
class Keywords(Pair):
    def forward(self, image: Tensor, mask: Tensor | None = None, *, double: bool = False) -> Any:
        y = self.bn(self.conv(image))
        if mask is not None:
            y = y * mask
        return y * 2 if double else y


@hard_case("buffer written by forward", "each output depends on the calls before", folds=1)
class WritesBuffer(Pair):
    def more(self) -> None:
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.seen += x.abs().mean()
        return self.bn(self.conv(x)) * self.seen


class _Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return x * 2
        return x - 1


@hard_case("scripted submodule", "a torch.jit.script with a branch, behind the pair", folds=1, draw=_shifted)
class ScriptedSubmodule(Pair):
    def more(self) -> None:
        with torchscript_allowed():
            self.tail = torch.jit.script(_Scripted())

    def forward(self, x: Tensor) -> Any:
        return self.tail(self.bn(self.conv(x)))


@hard_case("autocast inside", "the convolution runs in bfloat16", folds=0)
class Autocast(Pair):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.conv(x)
        return self.bn(y.to(x.dtype)).relu()


@hard_case("autocast around a child", "which doesn't show that it runs in bfloat16", folds=0)
class AutocastAround(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = Pair()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.child(x).to(x.dtype)


@hard_case("autocast as a decorator", "of the forward", folds=0)
class AutocastDecorated(Pair):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)).to(x.dtype).relu()


@hard_case("autocast that is off", "a context manager around the pair that changes nothing", folds=1)
class AutocastOff(Pair):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.bn(self.conv(x)).relu()


@hard_case("inference_mode inside", "a context manager around the pair", folds=1)
class InferenceMode(Pair):
    def forward(self, x: Tensor) -> Any:
        with torch.inference_mode():
            return self.bn(self.conv(x)).relu()


@hard_case("no_grad inside", "a context manager around the pair", folds=1)
class NoGrad(Pair):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            return self.bn(self.conv(x)).relu()


@hard_case("checkpoint", "the user's own, around the pair", folds=1)
class Checkpointed(Pair):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda y: self.bn(self.conv(y)).relu(), x, use_reentrant=False)
