"""Fold pairs across modules, and pairs in which a convolution or a BatchNorm is called as a function."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_models import BatchNormAct, Scale, image
from pass_contract import captured, sentences_of
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import check_parity, export, optimize, report_of
from passes import FoldConvBias, FoldConvBn
from passes.errors import UnseenCall

BOTH = ["fold-conv-bias", "fold-conv-bn"]


class Conv(nn.Module):
    """Has a convolution as its child."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.conv(x)


class OwnConv(nn.Conv2d):
    """A convolution with its own forward, which pads the input."""

    def __init__(self) -> None:
        super().__init__(3, 4, 3)

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(F.pad(input, (1, 1, 1, 1)), self.weight, self.bias)


class PlainConv(OwnConv):
    """The same without padding."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight, self.bias)


class Norm(nn.Module):
    """Has a BatchNorm as its child."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x).relu()


def own_norm() -> nn.Module:
    """A BatchNorm with its own forward, which calls functions: the BatchNorm and an activation."""
    return BatchNormAct(4)


class Apart(nn.Module):
    """Calls two modules that have one half of the pair each; with `half`, only the first."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = first(), second()
        enliven(self)

    def forward(self, x: Tensor, *, half: bool = False) -> Any:
        y = self.first(x)
        return y if half else self.second(y)


class Branching(Apart):
    """Has a data-dependent branch, so that only recorded runs show its operations."""

    def forward(self, x: Tensor, *, half: bool = False) -> Any:
        y = self.first(x)
        return y if x.sum() > 1e3 else self.second(y)


class OwnLayer(nn.Module):
    """Calls a linear layer as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.transpose(1, 2), self.weight, self.bias)


def leading_norm() -> nn.Module:
    return nn.BatchNorm1d(4)


def leading_linear() -> nn.Module:
    return nn.Linear(4, 6)


class LeadingFunction(nn.Module):
    """Calls a BatchNorm as a function; the layer after it is in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.inner
        y = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
        return y.transpose(1, 2)


IMAGE, LINE = image(), image(2, 4, 7)
APART: dict[str, tuple[type[Apart], Any, Any, Tensor]] = {
    "conv, function": (Apart, Conv, own_norm, IMAGE),
    "function, norm": (Apart, OwnConv, Norm, IMAGE),
    "function, function": (Apart, OwnConv, own_norm, IMAGE),
    "conv, function, branch": (Branching, Conv, own_norm, IMAGE),
    "conv, norm, branch": (Branching, Conv, Norm, IMAGE),
    "function, function, branch": (Branching, OwnConv, own_norm, IMAGE),
    "leading norm, function": (Apart, leading_norm, OwnLayer, LINE),
    "leading function, linear": (Apart, LeadingFunction, leading_linear, LINE),
    "leading norm, function, branch": (Branching, leading_norm, OwnLayer, LINE),
}


def _model(kind: str) -> tuple[nn.Module, Tensor]:
    make, first, second, x = APART[kind]
    torch.manual_seed(0)
    return make(first, second).eval(), x


@pytest.mark.parametrize("kind", APART)
def test_folds_and_stays_right(kind: str) -> None:
    model, x = _model(kind)
    before = copy.deepcopy(model.state_dict())
    fast = optimize(model, BOTH, example_inputs=(x,))
    assert [len(record.changes) for record in report_of(fast).passes] == [0 if "leading" in kind else 1, 1]
    report = check_parity(model, fast, (x,), batch_sizes=(1, 2, 5))
    assert report.ok, report.reason
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("passes", [BOTH[:1], BOTH[1:], BOTH])
@pytest.mark.parametrize("kind", APART)
def test_another_way_raises(kind: str, passes: list[str]) -> None:
    model, x = _model(kind)
    fast = optimize(model, passes, example_inputs=(x,))
    if all(not record.changes for record in report_of(fast).passes):
        assert "leading" in kind
        return
    seen = fast.first(x)
    for use in (lambda: seen + 1, lambda: fast.second(model.first(x)), lambda: (fast(x + 1e3, half=True) + 1).sum()):
        with pytest.raises(UnseenCall):
            _called(use)
    torch.testing.assert_close(fast.second(seen), model(x), rtol=1e-4, atol=1e-4)


def _called(use: Any) -> Any:
    return use()


@pytest.mark.slow
@pytest.mark.parametrize("kind", APART)
def test_copied_pickled_and_optimized_again(kind: str) -> None:
    model, x = _model(kind)
    fast = optimize(model, BOTH[:1], example_inputs=(x,))
    fast = optimize(copy.deepcopy(fast), example_inputs=(x,))
    again = optimize(fast, example_inputs=(x,))
    stored = io.BytesIO()
    torch.save(again, stored)
    stored.seek(0)
    for each in (fast, again, copy.deepcopy(again), torch.load(stored, weights_only=False)):
        torch.testing.assert_close(each(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["conv, function", "function, function", "leading norm, function"])
def test_exported_and_compiled(kind: str, tmp_path: Any) -> None:
    model, x = _model(kind)
    fast = optimize(model, example_inputs=(x,))
    bundle = export(fast, example_inputs=(x,), output=tmp_path / "out", formats=("torchscript", "onnx"))
    assert bundle.parity.ok
    torch.testing.assert_close(torch.compile(fast, backend="eager")(x), model(x), rtol=1e-4, atol=1e-4)


class InOne(nn.Module):
    """Calls a convolution as a module and a BatchNorm as a function, in the same forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.more()
        enliven(self)
        self.register_buffer("mean", torch.linspace(-1, 1, 4))
        self.register_buffer("var", torch.linspace(0.5, 2, 4))

    def more(self) -> None:
        """Add modules in a subclass."""

    def norm(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class InRow(InOne):
    """A second BatchNorm after a folded one, in the same forward."""

    def more(self) -> None:
        self.second = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.conv(x)))


class InRowApart(InOne):
    """A second BatchNorm after a folded one, in another module."""

    def more(self) -> None:
        self.second, self.third = nn.BatchNorm2d(4), BatchNormAct(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.conv(x)))


@pytest.mark.parametrize(("kind", "folded"), [(InOne, 1), (InRow, 2), (InRowApart, 2)])
def test_the_convolution_by_itself_raises(kind: type[InOne], folded: int) -> None:
    model = kind().eval()
    fast = optimize(model, BOTH, example_inputs=(IMAGE,))
    assert [len(record.changes) for record in report_of(fast).passes] == [1, folded]
    assert check_parity(model, fast, (IMAGE,), batch_sizes=(1, 2, 5)).ok
    with pytest.raises(UnseenCall):
        fast.conv(IMAGE) + 1


class CalledToo(InOne):
    """A function uses the weight of a layer that is also called."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.conv2d(x, self.conv.weight, self.conv.bias)) + self.conv(x.tanh())


class NormCalledToo(InOne):
    def more(self) -> None:
        self.inner = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.inner
        y = F.batch_norm(self.conv(x), norm.running_mean, norm.running_var, norm.weight, norm.bias)
        return y + norm(x.mean(1, keepdim=True).expand(-1, 4, -1, -1)).mean()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (CalledToo, "conv.weight is also used by another call of conv"),
        (NormCalledToo, "inner.weight is also used by another call of inner"),
    ],
)
def test_a_layer_that_is_called_too_keeps_its_tensors(kind: type[InOne], reason: str) -> None:
    model = kind().eval()
    tree, context = captured(model, IMAGE)
    for item in (FoldConvBn(), FoldConvBias()):
        done = item.run(tree, context)
        assert done.changes == ()
        assert any(reason in text for _, text in sentences_of(done)), list(sentences_of(done))
    assert torch.equal(tree.root(IMAGE), model(IMAGE))


@pytest.mark.parametrize("kind", ["function, norm", "function, function", "leading norm, function on maps"])
def test_a_convolution_that_is_a_function_can_still_be_brought_into_channels_last(kind: str) -> None:
    torch.manual_seed(0)
    model = Apart(lambda: nn.BatchNorm2d(3), PlainConv) if "leading" in kind else _model(kind)[0]
    fast = optimize(model.eval(), [*BOTH, "channels-last"], example_inputs=(IMAGE,))
    folded, converted = report_of(fast).passes[1:]
    assert len(folded.changes) == 1
    assert (converted.status, converted.reason) == ("applied", "")
    assert check_parity(model, fast, (IMAGE,), batch_sizes=(1, 2, 5)).ok


class ScaledBetween(nn.Module):
    """The product is right for any number of dims, but the BatchNorm after it isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale, self.norm = PlainConv(), Scale(), BatchNormAct(4)
        enliven(self)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.scale(self.conv(x)))


def test_behind_a_product_too_a_norm_takes_one_dim_for_the_channels() -> None:
    model = ScaledBetween().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert len(report_of(fast).passes[0].changes) == 2
    assert check_parity(model, fast, (image(),), batch_sizes=(1, 3)).ok
    # The input has no batch dim, so the function normalizes the rows, of which there are as many as channels.
    x = image(3, 6, 8)
    assert model(x).shape == (4, 4, 6)
    with pytest.raises(UnseenCall):
        fast(x)
