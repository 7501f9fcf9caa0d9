"""Tensors that can't be folded, and folds in forwards that are written in unusual ways."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_models import FAR, Island, Pair, image
from laid_out import laid_out
from torch import Tensor, nn

from optimizer import optimize, report_of
from passes.errors import UnseenCall


class Logarithmic(Tensor):
    """A tensor class with its own arithmetic, as in quantization libraries."""


def _of_another_class() -> nn.Module:
    model = Pair()
    model.conv.weight = nn.Parameter(model.conv.weight.detach().as_subclass(Logarithmic))
    return model


def _laid_out(layout: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[0].weight = nn.Parameter(laid_out(layout, model[0].weight.detach()))
        return model

    return make


class _Complex(nn.Module):
    """A convolution and a product with complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, dtype=torch.complex64)
        self.gamma = nn.Parameter(torch.tensor([1j, 2.0, -1j, 0.5]).view(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x.to(torch.complex64)) * self.gamma).real


class _Integer(nn.Module):
    """A linear function and a product with integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.arange(12).view(3, 4))
        self.register_buffer("gamma", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + (F.linear(x.long(), self.weight) * self.gamma).sum(1, keepdim=True)


REASONS: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "of another class": (
        _of_another_class,
        image(),
        "conv.weight is a Logarithmic, which has its own arithmetic",
    ),
    "sparse": (_laid_out("csr"), image(3, 4), "0.weight is sparse: a fold needs dense tensors"),
    "in blocks": (_laid_out("bsr"), image(3, 4), "0.weight is sparse: a fold needs dense tensors"),
    "complex": (_Complex, image(), "conv.weight has dtype complex64"),
    "of whole numbers": (_Integer, image(3, 4), "weight has dtype int64"),
}


@pytest.mark.parametrize("kind", REASONS)
def test_says_what_keeps_a_tensor_from_being_folded(kind: str) -> None:
    make, x, reason = REASONS[kind]
    model = make().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(x,))
    (record,) = report_of(fast).passes
    assert record.changes == ()
    assert [skip.text.endswith(reason) for skip in record.skips] == [True], record.skips
    assert torch.equal(fast(x), model(x))


class _GivenForward(Island):
    """Its forward is an attribute of the instance, and has a data-dependent branch."""

    def more(self) -> None:
        self.forward = types.MethodType(Island.forward, self)


class _OwnIdentity(nn.Identity):
    """Returns its input unchanged, but has its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return input


class _ThroughOwnIdentity(Pair):
    def more(self) -> None:
        self.between = _OwnIdentity()

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.between(self.conv(x))).relu()


class _Often(nn.Module):
    """Calls a module that it keeps in a list, once for each image."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.held = [conv]

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.held[0](x) for _ in range(len(x)))


class _CalledAsOftenAsThereAreImages(Pair):
    def more(self) -> None:
        self.often = _Often(self.conv)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.often(x)


class _IslandCallsConvolution(Island):
    def forward(self, x: Tensor) -> Any:
        y = F.conv2d(x, self.conv.weight, self.conv.bias, padding=1)
        return self.otherwise(x, y) if x.sum() > 1e6 else self.bn(y).relu()


class _IslandCallsNorm(Island):
    def forward(self, x: Tensor) -> Any:
        y, norm = self.conv(x), self.bn
        if x.sum() > 1e6:
            return self.otherwise(x, y)
        return F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias).relu()


@pytest.mark.parametrize("cls", [_GivenForward, _ThroughOwnIdentity, _IslandCallsConvolution, _IslandCallsNorm])
@pytest.mark.parametrize("name", ["fold-conv-bn", "fold-conv-bias"])
def test_the_way_of_the_runs_is_folded_however_it_is_written(cls: type[nn.Module], name: str) -> None:
    model = cls().eval()
    fast = optimize(model, [name], example_inputs=(image(),))
    assert len(report_of(fast).passes[0].changes) == 1
    for x in (image(), image(3, 3, 8, 8)):
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    if issubclass(cls, Island):
        with pytest.raises(UnseenCall):
            fast(FAR)


@pytest.mark.parametrize("name", ["fold-conv-bn", "fold-conv-bias"])
def test_a_layer_that_another_module_calls_too_stays(name: str) -> None:
    model = _CalledAsOftenAsThereAreImages().eval()
    fast = optimize(model, [name], example_inputs=(image(),))
    (record,) = report_of(fast).passes
    assert record.changes == ()
    assert [skip.text.endswith("conv.weight is also used by another call of conv") for skip in record.skips] == [True]
    assert torch.equal(fast(FAR), model(FAR))
