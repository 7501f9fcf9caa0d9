"""Every reason not to fold, with its message in the report, and outputs that stay right."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_models import (
    AcrossModules,
    BatchNormAct,
    Functional,
    Head,
    Island,
    IslandRawOutput,
    Output,
    Pair,
    Reader,
    Stem,
    image,
)
from pass_contract import captured, check_fold, check_same, sentences_of, tree_of
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import check_parity, optimize, report_of
from optimizer.errors import LoadError
from passes import FoldConvBias, FoldConvBn
from passes.errors import UnseenCall
from passes.program.arithmetic import are_finite

LOG: list[Any] = []


class Residual(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.bn(y) + y


class Returned(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.bn(y), y


class NamedAsAQuestion(Pair):
    """The module that uses the output is named `size`, like a method that only reads the shape."""

    def more(self) -> None:
        self.size = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.bn(y) + self.size(y)


class CalledTwice(Pair):
    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.conv(x.tanh())


class NormTwice(Pair):
    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.bn(x[:, :1].expand(-1, 4, -1, -1))


class TwoNames(Pair):
    def more(self) -> None:
        self.alias = self.conv


class TwoNamesUsed(Pair):
    def more(self) -> None:
        self.alias = self.conv

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.alias(x.tanh())


class NormTwoNames(Pair):
    def more(self) -> None:
        self.alias = self.bn


class TwoConvsOneNorm(Pair):
    def more(self) -> None:
        self.second = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.bn(self.second(x))


class OneConvTwoNorms(Pair):
    def more(self) -> None:
        self.second = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.second(self.conv(x.tanh()))


class TiedWeight(Pair):
    def more(self) -> None:
        self.other = nn.Conv2d(3, 4, 3, padding=1)
        self.other.weight = self.conv.weight

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.other(x)


class TiedBias(Pair):
    def more(self) -> None:
        self.other = nn.Conv2d(3, 4, 3, padding=1)
        self.other.bias = self.conv.bias

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.other(x)


class TiedStatistic(Pair):
    def more(self) -> None:
        self.other = nn.BatchNorm2d(4)
        self.other.running_mean = self.bn.running_mean

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.other(x[:, :1].expand(-1, 4, -1, -1))


class WeightRead(Pair):
    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) * self.conv.weight.mean()


class BiasRead(Pair):
    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.conv.bias.reshape(1, -1, 1, 1)


class StatisticRead(Pair):
    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) * self.bn.running_var.mean()


class WeightReadByOther(Pair):
    """A child reads the weight of its sibling, and has a data-dependent branch, so that it can't be traced."""

    def more(self) -> None:
        self.reader = Reader(self.conv)

    def forward(self, x: Tensor) -> Any:
        return self.reader(self.bn(self.conv(x)))


class ReadByIsland(Pair):
    """Its forward reads a tensor of the pair, and has a data-dependent branch."""

    def forward(self, x: Tensor) -> Any:
        y = self.bn(self.conv(x))
        return y + self.read().reshape(1, -1, 1, 1) if x.sum() < 1e6 else y

    def read(self) -> Tensor:
        raise NotImplementedError


class BiasReadByIsland(ReadByIsland):
    def read(self) -> Tensor:
        return self.conv.bias


class StatisticReadByIsland(ReadByIsland):
    def read(self) -> Tensor:
        return self.bn.running_mean


class WeightReadByTwin(nn.Module):
    """Two modules of one class use the same weight; one of them converts data to Python, so it can't be traced."""

    class Part(nn.Module):
        def __init__(self, weight: nn.Parameter | None) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3, 3, 3)) if weight is None else weight
            self.bn = nn.BatchNorm2d(4)
            self.others: list[nn.Module] = []
            self.wild = weight is not None

        def forward(self, x: Tensor) -> Tensor:
            y = self.bn(F.conv2d(x, self.others[0].weight if self.others else self.weight))
            if self.wild:
                for _ in range(x.shape[0]):
                    y = y + float(x.sum() > 1e6)
            return y

    def __init__(self) -> None:
        super().__init__()
        self.shown = self.Part(None)
        self.hidden = self.Part(nn.Parameter(torch.ones(4, 3, 3, 3)))
        self.hidden.others.append(self.shown)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.shown(x) + self.hidden(x)


class InPlace(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        y.mul_(2)
        return self.bn(y)


class ViewMutated(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        y[:, 0].add_(1)
        return self.bn(y)


class OutputKept(Pair):
    """Stores the output in an attribute."""

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        self.last = y
        return self.bn(y)


class OutputInList(Pair):
    def more(self) -> None:
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        self.kept[:] = [y]
        return self.bn(y) + self.kept[0]


class Noise(nn.Identity):
    def forward(self, input: Tensor) -> Tensor:
        return input * 2


class OwnIdentity(Pair):
    def more(self) -> None:
        self.between = Noise()

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.between(self.conv(x)))


class HookedIdentity(Pair):
    def more(self) -> None:
        self.between = nn.Identity()
        self.between.register_forward_hook(lambda module, args, output: LOG.append(output.mean()))

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.between(self.conv(x)))


class Passing(nn.Module):
    """Returns its input, except in a branch on the value of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limit", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.limit > 1 else x


class ThroughIsland(Pair):
    def more(self) -> None:
        self.between = Passing()

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.between(self.conv(x)))


class HookedBorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = Stem(), Head()
        enliven(self)
        self.stem.register_forward_hook(lambda module, args, output: LOG.append(output.mean()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x))


class Contained(nn.Module):
    """The convolution is in a container, and the BatchNorm follows the container."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3))), nn.BatchNorm2d(4)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.stem(x)).relu()


class InAutocast(Pair):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.bn(self.conv(x)).float()


class ConvInAutocast(Pair):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.conv(x)
        return self.bn(y)


class FunctionsInAutocast(Functional):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class AroundAutocast(nn.Module):
    """Calls a child under autocast, which the child's own forward doesn't show."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Pair()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inside(x).float()


class DecoratedAutocast(Pair):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x))


class PlainWeight(Pair):
    """The weight is a plain attribute, so a parameter of the same name would never be read."""

    def more(self) -> None:
        weight = self.conv.weight.detach().clone()
        del self.conv.weight
        self.conv.weight = weight


def _set_over(module: str, name: str) -> Callable[[], nn.Module]:
    """Set a plain attribute that hides the registered tensor of the same name."""

    def make() -> nn.Module:
        model = Pair()
        owner = model.get_submodule(module)
        vars(owner)[name] = getattr(owner, name).detach() * 2 + 1
        return model

    return make


class ComputedWeight(Pair):
    class Conv(nn.Conv2d):
        @property
        def weight(self) -> Tensor:
            return self._parameters["weight"] * 2

    def more(self) -> None:
        self.conv.__class__ = self.Conv


class ComputedScale(Pair):
    class Norm(nn.BatchNorm2d):
        @property
        def weight(self) -> Tensor:
            return self.gain * 2

        @weight.setter
        def weight(self, value: Tensor) -> None:
            raise AttributeError

    def more(self) -> None:
        gain = self.bn._parameters.pop("weight")
        self.bn.__class__ = self.Norm
        self.bn.gain = gain


def _parametrized_bias() -> nn.Module:
    model = Pair()
    nn.utils.parametrize.register_parametrization(model.conv, "bias", nn.Softplus())
    return model


class OwnCall(Pair):
    class Conv(nn.Conv2d):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) * 2

    def more(self) -> None:
        self.conv = self.Conv(3, 4, 3)


class OwnForward(Pair):
    class Conv(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    def more(self) -> None:
        self.conv = self.Conv(3, 4, 3)


class OwnLinear(nn.Module):
    class Linear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn = self.Linear(5, 4), nn.BatchNorm1d(4)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.linear(x))


class Doubled(Pair):
    class Conv(nn.Conv2d):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(input, weight, bias) * 2

    def more(self) -> None:
        self.conv = self.Conv(3, 4, 3)


class StraightLine(nn.Module):
    """A linear layer on 3-D input: BatchNorm's channels are the positions, not the features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(5, 4), nn.BatchNorm1d(4)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.linear(x))


class Unbatched(nn.Module):
    """A 1-D convolution on unbatched input; BatchNorm1d treats its output as a batch of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class OtherChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(1)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return F.batch_norm(y, self.bn.running_mean.expand(4), self.bn.running_var.expand(4))


class Flagged(Pair):
    """Calls `otherwise` in a branch that no example takes."""

    def forward(self, x: Tensor, besides: bool = False) -> Any:
        y = self.bn(self.conv(x))
        return self.otherwise(y) if besides else y

    def otherwise(self, y: Tensor) -> Any:
        raise NotImplementedError


class BranchReadsWeight(Flagged):
    def otherwise(self, y: Tensor) -> Any:
        return y + self.conv.weight.sum()


class BranchReadsStatistic(Flagged):
    def otherwise(self, y: Tensor) -> Any:
        norm = self.bn
        return y + norm.running_mean.sum()


class BranchReadsByText(Flagged):
    def otherwise(self, y: Tensor) -> Any:
        return y + sum(getattr(self.conv, name).sum() for name in ("weight", "bias"))


class BranchReadsAll(Flagged):
    def otherwise(self, y: Tensor) -> Any:
        return y + sum(parameter.sum() for parameter in self.parameters())


class BranchAsksKind(Flagged):
    """Reads only the dtype and the device of folded parameters, which a fold doesn't change."""

    def more(self) -> None:
        self.dense = nn.Linear(8, 8)

    @property
    def kind(self) -> torch.dtype:
        return next(parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())

    def otherwise(self, y: Tensor) -> Any:
        y = y.to(next(self.parameters()).dtype).to(self.conv.weight.device)
        return y.to(self.kind) + self.dense.weight


class AsksForType(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.bn(y) if isinstance(x, Tensor) and type(y) is Tensor else x


class Borrower(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.borrowed = {"conv": [conv]}

    def forward(self, x: Tensor) -> Any:
        y = self.borrowed["conv"][0](x)
        for _ in range(x.shape[0]):
            y = y * 0.5
        return y


class Borrowed(Pair):
    def more(self) -> None:
        self.borrower = Borrower(self.conv)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.borrower(x)


def _hooked(path: str, kind: str, make: type[nn.Module] = Pair) -> Callable[[], nn.Module]:
    hooks: dict[str, Callable[..., Any]] = {
        "register_forward_hook": lambda module, args, output: output * 2,
        "register_forward_pre_hook": lambda module, args: (args[0] * 2,),
    }

    def made() -> nn.Module:
        model = make()
        getattr(model.get_submodule(path), kind)(hooks.get(kind, lambda *call: None))
        return model

    return made


def _normed(norm: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Pair()
        norm(model.conv)
        return model.eval()

    return make


def _parametrized_norm() -> nn.Module:
    model = Pair()
    nn.utils.parametrize.register_parametrization(model.bn, "weight", nn.Softplus())
    return model


def _parametrized_as_it_is() -> nn.Module:
    """A parametrization that returns the parameter itself."""
    model = Pair()
    nn.utils.parametrize.register_parametrization(model.conv, "weight", nn.Identity())
    return model


def _left_in_training() -> nn.Module:
    class Model(Pair):
        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self.bn.train()
            return self

    return Model()


def _with_norm(norm: nn.Module) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Pair()
        model.bn = norm
        return enliven(model)

    return make


class BatchStatistics(Functional):
    def forward(self, x: Tensor) -> Any:
        return F.batch_norm(F.conv2d(x, self.w), None, None, self.gain, training=True)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "other user": (Residual, "its output is also used by the root (add)"),
    "used by one named as a question": (NamedAsAQuestion, "its output is also used by size"),
    "returned": (Returned, "its output is also used by the caller of the root, which returns it"),
    "called twice": (CalledTwice, "conv.weight is also used by another call of conv"),
    "norm called twice": (NormTwice, "bn.weight is also used by another call of bn"),
    "two names, both used": (TwoNamesUsed, "conv.weight is also used by another call of conv"),
    "one norm behind two": (TwoConvsOneNorm, "bn.weight is also used by another call of bn"),
    "one conv before two": (OneConvTwoNorms, "conv.weight is also used by another call of conv"),
    "tied weight": (TiedWeight, "conv.weight is shared with another module"),
    "tied bias": (TiedBias, "conv.bias is shared with another module"),
    "tied statistic": (TiedStatistic, "bn.running_mean is shared with another module"),
    "weight read": (WeightRead, "conv.weight is also read by the root"),
    "bias read": (BiasRead, "conv.bias is also read by the root"),
    "statistic read": (StatisticRead, "bn.running_var is also read by the root"),
    "bias read by an island": (BiasReadByIsland, "conv.bias is also read by the root"),
    "statistic read by an island": (StatisticReadByIsland, "bn.running_mean is also read by the root"),
    "weight read by an island": (WeightReadByOther, "conv.weight is also read by"),
    "weight read by a twin": (WeightReadByTwin, "shown.weight is also read by"),
    "borrowed": (Borrowed, "conv.weight is also used by another call of conv"),
    "view mutated": (ViewMutated, "its output is also used by the root (getitem)"),
    "kept in an attribute": (OutputKept, "its output is kept somewhere outside the graph"),
    "kept in a list": (OutputInList, "its output is"),
    "hooked identity": (HookedIdentity, "its output is also used by the root (mean)"),
    "hooked border": (HookedBorder, "its output is also used by the root (mean)"),
    "pre-hook on conv": (_hooked("conv", "register_forward_pre_hook"), "the convolution conv has hooks"),
    "hook on bn": (_hooked("bn", "register_forward_hook"), "the BatchNorm bn has hooks"),
    "backward hook on conv": (_hooked("conv", "register_full_backward_hook"), "the convolution conv has hooks"),
    "backward pre-hook on bn": (_hooked("bn", "register_full_backward_pre_hook"), "the BatchNorm bn has hooks"),
    "pre-hook on an inner container": (
        _hooked("stem.0", "register_forward_pre_hook", Contained),
        "its output passes through the hooks of stem.0",
    ),
    "backward hook on a container": (
        _hooked("stem.0", "register_full_backward_hook", Contained),
        "its output passes through the hooks of stem.0",
    ),
    "under autocast": (InAutocast, "it runs under autocast to bfloat16, where a fold changes the dtypes of"),
    "conv under autocast": (ConvInAutocast, "it runs under autocast to bfloat16"),
    "functions under autocast": (FunctionsInAutocast, "it runs under autocast to bfloat16"),
    "called under autocast": (AroundAutocast, "it runs under autocast to bfloat16"),
    "decorated by autocast": (DecoratedAutocast, "it runs under autocast to bfloat16"),
    "linear on 3-D": (StraightLine, "its input is 3-D, where the BatchNorm's channels are not the outputs"),
    "unbatched": (Unbatched, "its input is 2-D, where the BatchNorm's channels are not the outputs"),
}
# Models that only seem to have a pair: the report names the BatchNorm.
ALIKE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "weight_norm": (_normed(nn.utils.parametrizations.weight_norm), "the weight of conv"),
    "spectral_norm": (_normed(nn.utils.parametrizations.spectral_norm), "the weight of conv"),
    "old weight_norm": (_normed(nn.utils.weight_norm), "the weight of conv"),
    "old spectral_norm": (_normed(nn.utils.spectral_norm), "the weight of conv"),
    "parametrized norm": (_parametrized_norm, "its weight is computed or set by other code"),
    "parametrized as it is": (_parametrized_as_it_is, "conv has parametrizations"),
    "parametrized bias": (_parametrized_bias, "the bias of conv"),
    "computed scale": (ComputedScale, "its weight is computed or set by other code"),
    "plain weight": (PlainWeight, "the weight of conv"),
    "computed weight": (ComputedWeight, "the weight of conv"),
    "weight set over the parameter": (_set_over("conv", "weight"), "the weight of conv"),
    "bias set over the parameter": (_set_over("conv", "bias"), "the bias of conv"),
    "scale set over the parameter": (_set_over("bn", "weight"), "its weight is computed or set by other code"),
    "mean set over the buffer": (_set_over("bn", "running_mean"), "its running_mean is computed or set by other code"),
    "norm left in training": (_left_in_training, "it uses the statistics of the batch"),
    "statistics not tracked": (_with_norm(nn.BatchNorm2d(4, track_running_stats=False)), "it uses the statistics of"),
    "function on batch statistics": (BatchStatistics, "it uses the statistics of the batch"),
}
# Models without a pair: nothing is changed.
UNTOUCHED: dict[str, Callable[[], nn.Module]] = {
    "forward of its own": OwnForward,
    "linear of its own": OwnLinear,
    "conv_forward of its own": Doubled,
    "in place": InPlace,
    "hook on conv": _hooked("conv", "register_forward_hook"),
    "pre-hook on bn": _hooked("bn", "register_forward_pre_hook"),
    "hook on a container": _hooked("stem", "register_forward_hook", Contained),
    "identity of its own": OwnIdentity,
    "call of its own": OwnCall,
    "statistics computed": OtherChannels,
}


def _inputs(model: nn.Module) -> Tensor:
    own = {StraightLine: image(2, 4, 5), Unbatched: image(3, 4), OwnLinear: image(2, 5)}
    return own.get(type(model), image())


def _batches(model: nn.Module) -> list[Tensor]:
    x = _inputs(model)
    return [x] if isinstance(model, Unbatched) else [image(size, *x.shape[1:], seed=size) for size in (1, 2, 5)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", [*REFUSED, *ALIKE])
def test_what_is_refused_stays_right_at_every_batch_and_the_original_as_it_is(kind: str) -> None:
    make, reason = {**REFUSED, **ALIKE}[kind]
    model = make().eval()
    # After this call, the hooks have set their attributes.
    model(_inputs(model))
    before = tree_of(model)
    fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(_inputs(model),))
    check_same(before, tree_of(model), "the original is another")
    record = report_of(fast).passes[1]
    assert [place.where != "" for place in record.skips if reason in place.text] in ([True], [True, True])
    assert (record.status, record.changes) == ("unchanged", ())
    biases = report_of(fast).passes[0].changes
    assert not biases or kind == "statistics not tracked"
    for x in _batches(model):
        state = copy.deepcopy(model.state_dict())
        _answers_as(model, fast, x, exactly=not biases)
        model.load_state_dict(state)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_refuses_with_the_reason_and_stays_right(kind: str) -> None:
    make, reason = REFUSED[kind]
    model = make().eval()
    x = _inputs(model)
    tree, context = captured(model, x)
    done = FoldConvBn().run(tree, context)
    texts = [text for _, text in sentences_of(done)]
    assert done.changes == (), texts
    assert any(reason in text for text in texts), texts
    assert all("the convolution" in text for text in texts)
    assert not FoldConvBias().run(tree, context).changes
    _answers_as(model, tree.root, x, exactly=True)


@pytest.mark.parametrize("held", ["in a list", "as a child"])
def test_the_weight_of_a_function_isnt_for_who_holds_its_module(held: str) -> None:
    """A sibling of the convolution reads the weight in a branch that no run takes."""

    class Own(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return torch.conv2d(x, self.weight, self.bias)

    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            conv = self.held[0] if held == "in a list" else self.held
            if x.abs().sum() > 1e6:
                return x * conv.weight.mean()
            return x

    class Model(Pair):
        def more(self) -> None:
            self.conv, self.reader = Own(3, 4, 3), Reader()
            self.reader.held = [self.conv] if held == "in a list" else self.conv

        def forward(self, x: Tensor) -> Tensor:
            return self.reader(self.bn(self.conv(x)))

    model = enliven(Model()).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    (record,) = report_of(fast).passes
    assert record.status == "applied"
    _answers_as(model, fast, image(seed=3), exactly=False)
    with pytest.raises(UnseenCall, match="is used without the two"):
        fast(image() * 1e6 + 1e6)


@pytest.mark.parametrize("kind", UNTOUCHED)
def test_leaves_alone_what_is_no_pair(kind: str) -> None:
    model = UNTOUCHED[kind]().eval()
    tree, context = captured(model, image())
    assert FoldConvBn().run(tree, context).changes == ()
    _answers_as(model, tree.root, _inputs(model))


# Models that are folded, and that raise if an unseen branch reads a changed tensor.
GUARDED: dict[str, tuple[type[nn.Module], str]] = {
    "weight": (BranchReadsWeight, "conv was changed when conv was folded together with bn"),
    "statistic": (BranchReadsStatistic, "bn was changed when conv was folded together with bn"),
    "weight by a text": (BranchReadsByText, "conv was changed when conv was folded together with bn"),
    "all parameters": (BranchReadsAll, "conv was changed when conv was folded together with bn"),
}


@pytest.mark.parametrize("kind", GUARDED)
def test_a_branch_that_reads_a_tensor_that_was_changed_raises(kind: str) -> None:
    cls, reason = GUARDED[kind]
    model = cls().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    _answers_as(model, fast, image(seed=3), exactly=False)
    with pytest.raises(UnseenCall, match=reason):
        fast(image(), besides=True)


@pytest.mark.parametrize("cls", [TwoNames, NormTwoNames, ThroughIsland])
def test_two_names_and_a_branch_on_values_are_no_hindrance(cls: type[nn.Module]) -> None:
    model = cls().eval()
    fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(image(),))
    assert [record.status for record in report_of(fast).passes] == ["applied", "applied"]
    _answers_as(model, fast, image(5, 3, 8, 8, seed=3), exactly=False)
    if cls is ThroughIsland:
        fast.between.limit.fill_(2)
        with pytest.raises(UnseenCall, match="its output was used without it"):
            fast(image())


def test_who_asks_for_the_very_type_of_a_value_is_left_alone() -> None:
    fast = optimize(AsksForType().eval(), ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "rolled-back"
    _answers_as(AsksForType().eval(), fast, image(seed=3))


def _answers_as(model: nn.Module, fast: nn.Module, x: Tensor, *, exactly: bool = True) -> None:
    wanted, got = model(x), fast(x)
    for mine, theirs in zip(
        wanted if isinstance(wanted, tuple) else [wanted], got if isinstance(got, tuple) else [got], strict=True
    ):
        if exactly:
            assert torch.equal(mine, theirs)
        else:
            torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)


def test_the_bias_pass_refuses_too() -> None:
    tree, context = captured(Residual().eval(), image())
    done = FoldConvBias().run(tree, context)
    assert list(sentences_of(done)) == [("conv", "its output is also used by the root (add)")]


class _IslandAround(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) if x.sum() < 1e6 else x


class _Disagreeing(_IslandAround):
    """Its operations depend on the batch size, so the runs disagree."""

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        for row in x:
            y = y + row.mean()
        return y


class _DisagreeingAcross(_Disagreeing):
    """The convolution and the BatchNorm are in different modules."""

    def __init__(self) -> None:
        super().__init__()
        conv, norm = self.inner
        self.inner = nn.Sequential(nn.Sequential(conv), nn.Sequential(norm))


class _DisagreeingAroundIsland(_Disagreeing):
    """The forward that calls the pair can't be traced either."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = IslandRawOutput()


class _DisagreeingAroundFunctions(_Disagreeing):
    """The pair consists of two functions in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Functional()

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        for row in x:
            y = y + row.sum()
        return y


class _DisagreeingReader(_Disagreeing):
    """Also reads the weight of the convolution."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.inner[0].weight.sum()


class _DisagreeingCaller(_Disagreeing):
    """Calls the convolution without the BatchNorm, for inputs that no run has."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y + self.inner[0](x).sum() if x.sum() > 1e6 else y


def test_runs_that_disagree_about_what_is_around_a_pair() -> None:
    model = _Disagreeing().eval()
    tree, context = captured(model, image())
    assert [change.where for change in FoldConvBn().run(tree, context).changes] == ["inner.1"]
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    report = check_parity(model, fast, (image(),), batch_sizes=(1, 2, 5), draws=1)
    assert report.ok, report.reason


def test_runs_that_disagree_show_who_reads_a_weight() -> None:
    tree, context = captured(_DisagreeingReader().eval(), image())
    ((_, text),) = sentences_of(FoldConvBn().run(tree, context))
    assert "inner.0.weight is also read by" in text


@pytest.mark.parametrize("cls", [_DisagreeingAcross, _DisagreeingAroundIsland, _DisagreeingAroundFunctions])
def test_where_runs_disagree_the_pair_is_folded(cls: type[nn.Module]) -> None:
    model = cls().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    assert check_parity(model, fast, (image(),), batch_sizes=(1, 3), draws=1).ok


def test_where_runs_disagree_an_unseen_call_raises() -> None:
    model = _DisagreeingCaller().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    assert check_parity(model, fast, (image(),), batch_sizes=(1, 3), draws=1).ok
    with pytest.raises(UnseenCall, match="its output was used without it"):
        fast(image() + 1e6)


class _Loop(Pair):
    """Calls the pair once per image, so that runs at two batch sizes disagree."""

    def forward(self, x: Tensor) -> Any:
        return torch.stack([self.step(row[None]).mean() for row in x])

    def step(self, row: Tensor) -> Tensor:
        return self.bn(self.conv(row)).relu()


class _LoopRaw(_Loop):
    def step(self, row: Tensor) -> Tensor:
        y = self.conv(row)
        return y if row.sum() > 1e6 else self.bn(y)


class _LoopFromElsewhere(_Loop):
    def step(self, row: Tensor) -> Tensor:
        return self.bn(row[:, :1].expand(-1, 4, -1, -1) if row.sum() > 1e6 else self.conv(row))


class _LoopBesides(_Loop):
    def step(self, row: Tensor) -> Tensor:
        y = self.conv(row)
        return self.bn(y) + y


class _LoopReadsWeight(_Loop):
    def step(self, row: Tensor) -> Tensor:
        return super().step(row) * self.conv.weight.mean()


class _LoopReadsWeightInBranch(_Loop):
    def step(self, row: Tensor) -> Tensor:
        return row * self.conv.weight.mean() if row.sum() > 1e6 else super().step(row)


class _LoopUnderIsland(nn.Module):
    """The operations around the loop depend on the batch size too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Loop()

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        for row in x:
            y = y + row.mean()
        return y


@pytest.mark.parametrize("cls", [_Loop, _LoopUnderIsland])
def test_a_pair_that_is_called_as_often_as_there_are_images(cls: type[nn.Module]) -> None:
    model = cls().eval()
    fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(image(),))
    assert [record.status for record in report_of(fast).passes] == ["applied", "applied"]
    assert report_of(fast).coverage.reached == 2
    assert check_parity(model, fast, (image(),), batch_sizes=(1, 2, 5), draws=1).ok


@pytest.mark.parametrize("cls", [_LoopRaw, _LoopFromElsewhere])
def test_in_a_loop_an_unseen_call_raises(cls: type[nn.Module]) -> None:
    model = cls().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    assert check_parity(model, fast, (image(),), batch_sizes=(1, 3), draws=1).ok
    with pytest.raises(UnseenCall, match="call optimize\\(\\) with example inputs that take this branch"):
        fast(image() + 1e6)


def test_in_a_loop_the_other_reasons_hold() -> None:
    tree, context = captured(_LoopBesides().eval(), image())
    assert FoldConvBn().run(tree, context).changes == ()
    tree, context = captured(_LoopReadsWeight().eval(), image())
    ((_, text),) = sentences_of(FoldConvBn().run(tree, context))
    assert "conv.weight is also read by the root" in text


class _Listed(nn.Module):
    """Keeps modules in a plain list, which doesn't register them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = self.make()
        for layer in self.layers:
            enliven(layer).eval()

    def make(self) -> list[nn.Module]:
        return [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)]

    def forward(self, x: Tensor) -> Any:
        conv, norm = self.layers
        return norm(conv(x)).relu()


class _ListedBlocks(_Listed):
    """The modules in the list have submodules, and one has such a list itself."""

    def make(self) -> list[nn.Module]:
        return [Island(), _Listed()]

    def forward(self, x: Tensor) -> Any:
        island, listed = self.layers
        return island(x)[:, :3].contiguous() + listed(x).mean()


class _NormListed(_Listed):
    def __init__(self) -> None:
        super().__init__()
        self.conv = enliven(nn.Conv2d(3, 4, 3))

    def forward(self, x: Tensor) -> Any:
        return {"y": self.layers[1](self.conv(x)), "rest": self.layers[0](x)}


class _ListedLoop(_Listed):
    def forward(self, x: Tensor) -> Any:
        return torch.cat([super(_ListedLoop, self).forward(row[None]) for row in x])


class _ListedRaw(_Listed):
    def forward(self, x: Tensor) -> Any:
        conv, norm = self.layers
        y = conv(x)
        return y if x.sum() > 1e6 else norm(y)


class _ListedInTraining(_Listed):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].train()


class _ListedTied(_NormListed):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight = self.conv.weight


class _Uncopied(list[nn.Module]):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("this list stays where it is")


class _ListedUncopied(_Listed):
    def make(self) -> list[nn.Module]:
        return _Uncopied(super().make())


def _state_of(model: _Listed) -> dict[str, Any]:
    modules = {path: module for layer in model.layers for path, module in layer.named_modules(prefix=str(id(layer)))}
    return {
        f"{path}.{name}": value
        for path, module in modules.items()
        for name, value in (
            *module._parameters.items(),
            *module._buffers.items(),
            ("forward", module.__dict__.get("forward")),
        )
    }


def _is_as_before(model: _Listed, before: dict[str, Any]) -> bool:
    after = _state_of(model)
    return after.keys() == before.keys() and all(after[name] is before[name] for name in before)


@pytest.mark.parametrize(
    ("cls", "places"),
    [
        (_Listed, ["layers[1]"]),
        (_ListedBlocks, ["layers[0].bn", "layers[1].layers[1]"]),
        (_NormListed, ["layers[1]"]),
        (_ListedLoop, ["layers[1]"]),
    ],
)
def test_modules_in_plain_lists(cls: type[_Listed], places: list[str]) -> None:
    model = cls().eval()
    before = _state_of(model)
    fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(image(),))
    changes = [change.where for change in report_of(fast).passes[1].changes]
    assert sorted(changes) == places
    assert report_of(fast).coverage.share == 1
    for twin in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert check_parity(model, twin, (image(),), batch_sizes=(1, 2, 5), draws=1).ok
    assert fast.state_dict().keys() <= model.state_dict().keys()
    assert _is_as_before(model, before)


def test_modules_in_plain_lists_and_an_unseen_branch() -> None:
    model = _ListedRaw().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    with pytest.raises(UnseenCall, match=r"layers\[0\] was folded together with layers\[1\]"):
        fast(image() + 1e6)


@pytest.mark.parametrize("cls", [_LoopReadsWeightInBranch])
def test_a_weight_that_a_branch_reads_in_a_loop_or_a_list_is_guarded(cls: type[nn.Module]) -> None:
    model = cls().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    assert check_parity(model, fast, (image(),), batch_sizes=(1, 3), draws=1).ok
    with pytest.raises(UnseenCall, match="is used without the two"):
        fast(image() + 1e6)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (_ListedInTraining, "it uses the statistics of the batch"),
        (_ListedTied, "conv.weight is shared with another module"),
    ],
)
def test_modules_in_plain_lists_are_refused_for_the_same_reasons(cls: type[_Listed], reason: str) -> None:
    tree, context = captured(cls().eval(), image())
    done = FoldConvBn().run(tree, context)
    assert done.changes == ()
    ((_, text),) = sentences_of(done)
    assert reason in text


def test_modules_in_a_list_that_cannot_be_copied_are_refused() -> None:
    model = _ListedUncopied().eval()
    before = _state_of(model)
    with pytest.raises(LoadError, match="attribute 'layers' of _ListedUncopied can't be copied"):
        optimize(model, example_inputs=(image(),))
    assert _is_as_before(model, before)


class _ReturnsObject(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.bn(self.conv(x))
        return Output(y.relu(), {"pooled": y.mean((2, 3))})


class _ReturnsRawInObject(Pair):
    """Returns the convolution's output in an object, so that no recording shows its use."""

    kind: Callable[[Any], Any] = Output

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return type(self).kind(self.bn(y)), type(self).kind([type(self).kind(y)])


class _ReturnsRawInNamespace(_ReturnsRawInObject):
    kind = staticmethod(lambda value: types.SimpleNamespace(value=value))


class _PassesObjectOn(Pair):
    """A child returns its output in an object, and its parent uses it."""

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Any:
            return Output(self.conv(x))

    def more(self) -> None:
        self.conv = self.Stem()

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x).features
        return self.bn(y) + y


@pytest.mark.slow
def test_outputs_in_an_object_that_torch_knows_nothing_of() -> None:
    model = _ReturnsObject().eval()
    fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(image(),))
    assert [record.status for record in report_of(fast).passes] == ["applied", "applied"]
    assert report_of(fast).coverage.reached == 2
    assert type(fast(image())) is Output
    assert check_parity(model, fast, (image(),), batch_sizes=(1, 2, 5), draws=1).ok


@pytest.mark.slow
@pytest.mark.parametrize("cls", [_ReturnsRawInObject, _ReturnsRawInNamespace])
def test_a_value_in_an_object_that_is_returned_has_other_users(cls: type[nn.Module]) -> None:
    tree, context = captured(cls().eval(), image())
    done = FoldConvBn().run(tree, context)
    assert done.changes == ()
    ((_, text),) = sentences_of(done)
    assert "its output is kept somewhere outside the graph" in text


def test_a_value_in_an_object_between_modules_is_no_pair() -> None:
    tree, context = captured(_PassesObjectOn().eval(), image())
    assert FoldConvBn().run(tree, context).changes == ()


def _quantized(kind: str) -> nn.Module:
    quantization = torch.ao.quantization
    layers = [nn.Conv2d(3, 4, 3), quantization.DeQuantStub(), nn.BatchNorm2d(4)]
    model = enliven(nn.Sequential(quantization.QuantStub(), *layers)).eval()
    model.qconfig = quantization.get_default_qconfig("x86")
    if kind == "stubs":
        return model
    if kind == "fake":
        model[2] = quantization.FakeQuantize()
        model(image())
        model[2].disable_observer()
    elif kind == "aware of quantization":
        model[1].qconfig = quantization.get_default_qat_qconfig("x86")
        model[1] = torch.ao.nn.qat.Conv2d.from_float(model[1])
    elif kind == "fused and aware":
        fused = torch.ao.nn.intrinsic.ConvBn2d(model[1], model[3]).train()
        fused.qconfig = quantization.get_default_qat_qconfig("x86")
        return nn.Sequential(torch.ao.nn.intrinsic.qat.ConvBn2d.from_float(fused)).eval()
    else:
        model[3].qconfig = None
        prepared = quantization.prepare(model)
        prepared(image())
        model = prepared if kind == "observed" else quantization.convert(prepared)
    return model.eval()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("kind", "reasons"),
    [
        ("aware of quantization", ["the weight of 1 (conv2d) is computed or set by other code"]),
        ("fused and aware", []),
        ("fake", []),
        ("observed", ["its output is also used by 1.activation_post_process"]),
        ("quantized", []),
    ],
)
def test_refuses_what_is_quantized(kind: str, reasons: list[str]) -> None:
    model = _quantized(kind)
    fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(image(),))
    assert [record.status for record in report_of(fast).passes] == ["unchanged", "unchanged"]
    texts = [skip.text for skip in report_of(fast).passes[1].skips]
    assert len(texts) == len(reasons)
    assert all(reason in text for reason, text in zip(reasons, texts, strict=True))
    for size in (1, 2, 5):
        assert torch.equal(fast(image(size, 3, 8, 8)), copy.deepcopy(model)(image(size, 3, 8, 8)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_stubs_that_quantize_nothing_are_no_hindrance() -> None:
    model = _quantized("stubs")
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert [change.where for change in report_of(fast).passes[0].changes] == ["3"]
    assert check_parity(model, fast, (image(),), batch_sizes=(1, 2, 5), draws=1).ok


def test_refuses_inside_of_the_callers_autocast() -> None:
    model, x = Pair().eval(), image()
    with torch.autocast("cpu", torch.bfloat16):
        fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(x,))
        assert torch.equal(fast(x), model(x))
    for record in report_of(fast).passes:
        assert record.changes == ()
        assert "optimize() was called under autocast" in record.skips[0].text
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert report_of(optimize(model, ["fold-conv-bn"], example_inputs=(x,))).passes[0].status == "applied"


def test_autocast_that_is_off_or_elsewhere_is_no_hindrance() -> None:
    class Off(Pair):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", enabled=False):
                return self.bn(self.conv(x))

    class Beside(Pair):
        def more(self) -> None:
            self.other = Pair()

        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.other(x).float()
            return self.bn(self.conv(x)) + y

    for model in (Off().eval(), Beside().eval()):
        fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
        assert [change.where for change in report_of(fast).passes[0].changes] == ["bn"]
        assert check_parity(model, fast, (image(),), batch_sizes=(1, 2, 5), draws=1).ok


class Without(Pair):
    """Calls the pair in a context that switches gradients off."""

    context: Any = torch.no_grad

    def forward(self, x: Tensor) -> Any:
        with self.context():
            return self.bn(self.conv(x)).relu()


class WithoutAll(Without):
    context = torch.inference_mode


class Decorated(Pair):
    @torch.inference_mode()
    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)).relu()


@pytest.mark.parametrize("cls", [Without, WithoutAll, Decorated])
def test_gradients_are_off_where_the_forward_has_them_off(cls: type[nn.Module]) -> None:
    model = cls().eval()
    fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(image(),))
    assert [record.status for record in report_of(fast).passes] == ["applied", "applied"]
    for size in (1, 2, 5):
        wanted, got = model(image(size, 3, 8, 8)), fast(image(size, 3, 8, 8))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        assert (got.requires_grad, got.is_inference()) == (wanted.requires_grad, wanted.is_inference())


@pytest.mark.parametrize("cls", [Pair, Functional, AcrossModules, Island])
def test_gradients_of_the_inputs_are_those_of_the_original(cls: type[nn.Module]) -> None:
    model = cls().eval().double()
    fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(image().double(),))
    assert report_of(fast).passes[1].status == "applied"
    for size in (1, 2, 5):
        found = []
        for module in (model, fast):
            x = image(size, 3, 8, 8).double().requires_grad_()
            (gradient,) = torch.autograd.grad(module(x).square().sum(), x)
            found.append(gradient)
        torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)
        assert found[0].abs().max() > 1e-2


_TRAINABLE = ["conv.weight", "conv.bias", "bn.weight", "bn.bias"]


@pytest.mark.parametrize("trainable", [[], _TRAINABLE, *([name] for name in _TRAINABLE)])
def test_an_output_needs_a_gradient_where_the_original_has_it(trainable: list[str]) -> None:
    model = Pair().eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    assert fast(image()).requires_grad == model(image()).requires_grad == bool(trainable)
    assert {parameter.requires_grad for parameter in fast.parameters()} == {bool(trainable)}
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trainable


def test_a_norm_with_an_activation_and_a_residual_before_it() -> None:
    class Block(Pair):
        def more(self) -> None:
            self.bn = BatchNormAct(4)

        def forward(self, x: Tensor) -> Any:
            y = self.conv(x)
            return self.bn(y) + y.mean()

    tree, context = captured(Block().eval(), image())
    done = FoldConvBn().run(tree, context)
    assert done.changes == ()
    assert "is also used by the root (mean)" in next(text for _, text in sentences_of(done))


@pytest.mark.parametrize(
    "kind",
    [
        "register_module_forward_hook",
        "register_module_forward_pre_hook",
        "register_module_full_backward_hook",
        "register_module_full_backward_pre_hook",
    ],
)
def test_refuses_under_hooks_of_all_modules(kind: str) -> None:
    model = Pair().eval()
    tree, context = captured(model, image())
    handle = getattr(nn.modules.module, kind)(lambda *call: None)
    try:
        for each in (FoldConvBias(), FoldConvBn()):
            done = each.run(tree, context)
            assert done.changes == ()
            ((_, text),) = sentences_of(done)
            assert "hooks for all modules are registered" in text
    finally:
        handle.remove()
    assert len(FoldConvBn().run(tree, context).changes) == 1


@pytest.mark.parametrize("tensor", ["running_var", "weight", "bias"])
def test_refuses_what_would_not_be_finite(tensor: str) -> None:
    model = Pair().eval()
    model.bn.eps = 2**-10
    with torch.no_grad():
        getattr(model.bn, tensor)[0] = -model.bn.eps if tensor == "running_var" else float("inf")
    tree, context = captured(model, image())
    done = FoldConvBn().run(tree, context)
    assert done.changes == ()
    assert list(sentences_of(done)) == [("bn", "folded into conv would give weights that aren't finite")]
    if tensor == "running_var":
        assert FoldConvBias().run(tree, context).changes == ()
    torch.testing.assert_close(tree.root(image()), model(image()), equal_nan=True, rtol=0, atol=0)


def test_a_bias_that_takes_the_mean_out_of_range_stays() -> None:
    model = Pair().eval()
    with torch.no_grad():
        model.conv.bias[0], model.bn.running_mean[0] = -3e38, 3e38
    tree, context = captured(model, image())
    done = FoldConvBias().run(tree, context)
    assert done.changes == ()
    assert list(sentences_of(done)) == [("conv", "the mean or scale of bn wouldn't be finite")]


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([3e38, 3e38, -1.0], True),
        ([float("inf"), float("-inf")], False),
        ([1.0, float("nan")], False),
        ([float("inf"), 1.0], False),
        ([], True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_finite_is_each_number_and_not_the_sum(values: list[float], finite: bool, dtype: torch.dtype) -> None:
    assert are_finite(torch.ones(2), torch.tensor(values, dtype=dtype)) == finite


def test_asking_for_the_kind_of_parameters_is_no_reading() -> None:
    model = BranchAsksKind().eval()
    tree, context = captured(model, image())
    assert len(FoldConvBn().run(tree, context).changes) == 1
    torch.testing.assert_close(tree.root(image(), True), model(image(), True), rtol=1e-4, atol=1e-4)


class HalfFunctional(Functional):
    """Calls a convolution as a module and a BatchNorm as a function; `raw` leaves out the BatchNorm."""

    def more(self) -> None:
        self.conv_ = nn.Conv2d(3, 4, 3)
        super().more()

    def forward(self, x: Tensor, raw: bool = False) -> Any:
        y = self.conv_(x)
        return y if raw else F.batch_norm(y, self.mean, self.var, self.gain)


def test_a_branch_that_reads_the_value_between_the_two_is_refused() -> None:
    for each in (FoldConvBias(), FoldConvBn()):
        tree, context = captured(HalfFunctional().eval(), image())
        assert len(each.run(tree, context).changes) == 1
        with pytest.raises(UnseenCall):
            tree.root(image(), True)


class _Called(Pair):
    """Calls the convolution and the BatchNorm as functions."""

    def forward(self, x: Tensor) -> Any:
        y = nn.functional.conv2d(x, self.conv.weight, self.conv.bias)
        return nn.functional.batch_norm(y, self.bn.running_mean, self.bn.running_var, self.bn.weight, self.bn.bias) * 2


def test_hooks_of_a_module_around_functions_keep_nothing_from_being_folded() -> None:
    """The hooks see only the inputs and outputs of the module, which a fold inside doesn't change."""
    model = nn.Sequential(_Called()).eval()
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    tree, context = captured(model, image())
    assert len(FoldConvBn().run(tree, context).changes) == 1
    seen.clear()
    assert torch.equal(tree.root(image()), seen[0])


class _OfHalf(Pair):
    """Uses one of several outputs of a call."""

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(torch.cat([x, x], 1).chunk(2, 1)[0]))


def test_a_layer_may_take_one_of_several_values() -> None:
    tree, context = captured(_OfHalf().eval(), image())
    assert len(FoldConvBn().run(tree, context).changes) == 1
    check_fold(_OfHalf().eval(), image())
