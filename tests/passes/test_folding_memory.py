"""Folding pairs whose tensors share memory with others: ties by `.data`, views of statistics, flat buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from folding_models import Pair, image
from pass_contract import captured, check_pass, sentences_of
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import optimize
from optimizer.model.inputs import Samples
from optimizer.model.working_copy import Mode
from optimizer.parity import measure_reference
from passes import FoldConvBias, FoldConvBn


class _Tied(Pair):
    """Two convolutions, each with its own parameters, over the same memory."""

    def more(self) -> None:
        self.other = nn.Conv2d(3, 4, 3, padding=1)
        self.other.weight.data, self.other.bias.data = self.conv.weight.data, self.conv.bias.data

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.other(x)


class _TiedWeight(_Tied):
    def more(self) -> None:
        self.other = nn.Conv2d(3, 4, 3, padding=1)
        self.other.weight.data = self.conv.weight.data


class _ViewOfMean(Pair):
    def more(self) -> None:
        self.center = self.bn.running_mean.view(1, 4, 1, 1)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.center.sum()


class _MeanAsAttribute(_ViewOfMean):
    def more(self) -> None:
        self.center = self.bn.running_mean


class _WritesIntoTheMean(_ViewOfMean):
    def forward(self, x: Tensor) -> Any:
        self.center.add_(0.5)
        return self.bn(self.conv(x))


class _WritesUnseen(_ViewOfMean):
    def forward(self, x: Tensor) -> Any:
        if x.sum() < 1e9:
            self.center.add_(0.5)
        return self.bn(self.conv(x))


class _SetsItem(_ViewOfMean):
    def forward(self, x: Tensor) -> Any:
        self.center[0] = 0.5
        return self.bn(self.conv(x))


class _WritesOut(_ViewOfMean):
    def forward(self, x: Tensor) -> Any:
        torch.add(self.center, 0.5, out=self.center)
        return self.bn(self.conv(x))


class _ScriptedTwin(Pair):
    """A scripted layer shares the bias of the convolution."""

    def more(self) -> None:
        other = nn.Conv2d(3, 4, 3, padding=1)
        other.bias = self.conv.bias
        self.other = torch.jit.script(other)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.other(x)


class _ListsBias(Pair):
    """Keeps its bias in a list, which the forward never reads."""

    def more(self) -> None:
        self.kept = [self.conv.bias]


class _KeepsCall(Pair):
    def more(self) -> None:
        self.kept = functools.partial(nn.functional.conv2d, weight=self.conv.weight, bias=self.conv.bias)


class _OneBuffer(nn.Module):
    """The statistics of two BatchNorms are rows of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Pair(), Pair()
        rows = torch.stack([row for pair in (self.first, self.second) for row in _statistics_of(pair)])
        for number, pair in enumerate((self.first, self.second)):
            pair.bn.running_mean, pair.bn.running_var = rows[2 * number], rows[2 * number + 1]
        self.more(rows)

    def more(self, rows: Tensor) -> None:
        """Use the rows in a subclass."""

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def _statistics_of(pair: Pair) -> tuple[Tensor, Tensor]:
    return pair.bn.running_mean, pair.bn.running_var


class _OneRegisteredBuffer(_OneBuffer):
    def more(self, rows: Tensor) -> None:
        self.register_buffer("rows", rows)


class _TwoNormsOverOne(_OneBuffer):
    def more(self, rows: Tensor) -> None:
        self.second.bn.running_mean = self.first.bn.running_mean[:]


def _flat() -> nn.Module:
    """A model whose parameters are views of one vector, which no module holds."""
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3)))
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return model


def _flat_parameter() -> nn.Module:
    """A model whose convolution has parameters that are views of another parameter, `flat`."""
    model = Pair()
    model.flat = nn.Parameter(torch.cat([model.conv.weight.detach().flatten(), model.conv.bias.detach()]))
    model.conv.weight.data = model.flat.data[:108].view(4, 3, 3, 3)
    model.conv.bias.data = model.flat.data[108:]
    return model


IN_TRAINING: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "tied by data": (_Tied, ["conv.bias shares its memory with other.bias"]),
    "a flat parameter": (_flat_parameter, ["conv.bias shares its memory with flat"]),
    "a view of the mean": (_ViewOfMean, ["bn.running_mean shares its memory with center"]),
    "the mean itself": (_MeanAsAttribute, ["bn.running_mean is also read by the root (sum)"]),
    "a list of parameters": (_ListsBias, ["conv.bias shares its memory with kept[0]"]),
    "a partial": (_KeepsCall, ["conv.bias shares its memory with kept"]),
    "a scripted layer": (_ScriptedTwin, ["conv.bias shares its memory with other.bias"]),
    "a registered buffer": (
        _OneRegisteredBuffer,
        ["first.bn.running_mean shares its memory with rows", "second.bn.running_mean shares its memory with rows"],
    ),
    "two BatchNorms over one": (
        _TwoNormsOverOne,
        [
            "first.bn.running_mean shares its memory with second.bn.running_mean",
            "second.bn.running_mean shares its memory with first.bn.running_mean",
        ],
    ),
}


def _after_two_runs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        for seed in (1, 2):
            model.train()(image(seed=seed))
        return model.eval()(image())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.parametrize("kind", IN_TRAINING)
def test_in_training_a_bias_stays_that_lies_in_the_memory_of_another_tensor(kind: str) -> None:
    make, reasons = IN_TRAINING[kind]
    fast = optimize(make().train(), passes=["fold-conv-bias"], mode="training", example_inputs=(image(4, 3, 8, 8),))
    (done,) = fast.report.passes
    assert [skip.text for skip in done.skips] == reasons
    assert torch.equal(_after_two_runs(fast), _after_two_runs(make()))
    other = make()
    other.load_state_dict(fast.state_dict())
    assert torch.equal(other.eval()(image()), fast(image()))


@pytest.mark.parametrize("kind", ["a view of the mean", "a registered buffer", "two BatchNorms over one"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_statistics_that_share_memory_are_measured_as_such(kind: str, mode: Mode) -> None:
    make, _ = IN_TRAINING[kind]
    model = make().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fast = optimize(model, mode=mode, example_inputs=(image(),))
    assert fast.report.parity.verdict == "ok"
    assert measure_reference(model, Samples((image(),)), mode=mode).truth_in_float64
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    run = _after_two_runs if mode == "training" else (lambda module: module.eval()(image()))
    assert torch.allclose(run(fast), run(make()), atol=1e-5)


@pytest.mark.parametrize("make", [_flat, _OneBuffer, _TiedWeight])
def test_in_training_a_bias_goes_that_shares_a_storage_and_no_bytes(make: Callable[[], nn.Module]) -> None:
    done = check_pass(FoldConvBias(), make().train(), image(4, 3, 8, 8), mode="training")
    assert done.changes
    assert not done.skips


@pytest.mark.parametrize(
    "make",
    [_Tied, _TiedWeight, _ViewOfMean, _ListsBias, _OneBuffer, _OneRegisteredBuffer, _flat, _flat_parameter],
)
@pytest.mark.parametrize("item", [FoldConvBias(), FoldConvBn()])
def test_in_inference_others_keep_the_values_that_the_pair_had(make: Callable[[], nn.Module], item: Any) -> None:
    done = check_pass(item, make().eval(), image())
    assert done.changes


@pytest.mark.slow
@pytest.mark.parametrize("cls", [_WritesIntoTheMean, _WritesUnseen, _SetsItem, _WritesOut])
@pytest.mark.parametrize("item", [FoldConvBias(), FoldConvBn()])
def test_in_inference_a_pair_stays_that_a_forward_writes_to(cls: type[nn.Module], item: Any) -> None:
    tree, context = captured(cls().eval(), image())
    done = item.run(tree, context)
    assert not done.changes
    assert any(text.endswith("bn.running_mean shares its memory with center") for _, text in sentences_of(done))
