"""Tensors that no fold can take, and forwards that leave no place for one."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_models import FAR, Functional, Island, Pair, image
from laid_out import laid_out
from pass_contract import captured, sentences_of
from torch import Tensor, nn

from passes import FoldConvBias, FoldConvBn


class Logarithmic(Tensor):
    """A tensor with an arithmetic of its own, as libraries for quantization have them."""


def _without_weight() -> nn.Module:
    model = Pair()
    model.conv.weight = None
    return model


def _of_another_class() -> nn.Module:
    model = Pair()
    model.conv.weight = nn.Parameter(model.conv.weight.detach().as_subclass(Logarithmic))
    return model


def _complex() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, dtype=torch.complex64), nn.BatchNorm2d(4))


def _laid_out(layout: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[0].weight = nn.Parameter(laid_out(layout, model[0].weight.detach()))
        return model

    return make


def _lazy_function() -> nn.Module:
    model = Functional()
    model.w = nn.UninitializedParameter()
    return model


REASONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "missing": (_without_weight, "conv.weight is missing"),
    "of another class": (_of_another_class, "conv.weight is a Logarithmic, which has an arithmetic of its own"),
    "sparse": (_laid_out("csr"), "0.weight is sparse: a fold computes with dense numbers"),
    "in blocks": (_laid_out("bsr"), "0.weight is sparse: a fold computes with dense numbers"),
    "mkldnn": (_laid_out("mkldnn"), "0.weight is in mkldnn's own layout: a fold computes with dense numbers"),
    "complex": (_complex, "0.weight is of dtype complex64"),
    "other channels behind": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(5)),
        "its 4 channels are not those of the BatchNorm",
    ),
    "other channels in front": (
        lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(4, 5, 3)),
        "its channels are not the 4 that 1 takes",
    ),
    "not initialised": (_lazy_function, "w is not initialised yet: run the model once first"),
}


@pytest.mark.parametrize("kind", REASONS)
def test_says_what_keeps_a_tensor_from_being_folded(kind: str) -> None:
    make, reason = REASONS[kind]
    ((_, text),) = sentences_of(FoldConvBn().run(*captured(make().eval())))
    assert text.endswith(reason)


class _GivenForward(Island):
    """Its forward stands in the instance, and branches on data."""

    def more(self) -> None:
        self.forward = types.MethodType(Island.forward, self)


@pytest.mark.parametrize("item", [FoldConvBn(), FoldConvBias()])
def test_a_forward_of_an_instance_that_branches_has_no_place_for_a_check(item: Any) -> None:
    model = _GivenForward().eval()
    program, context = captured(model, image())
    done = item.run(program, context)
    assert done.changes == ()
    assert any(
        "the root has a forward of its instance, which can't be traced" in text for _, text in sentences_of(done)
    )
    for x in (image(), FAR):
        assert torch.equal(program.root(x), model(x))


class _OwnIdentity(nn.Identity):
    """Gives its input as it is, today."""

    def forward(self, input: Tensor) -> Tensor:
        return input


class _ThroughOwnIdentity(Pair):
    def more(self) -> None:
        self.between = _OwnIdentity()

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.between(self.conv(x))).relu()


class _Often(nn.Module):
    """Calls what it holds as often as there are images."""

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


@pytest.mark.parametrize(
    ("cls", "reason", "count"),
    [
        (_ThroughOwnIdentity, "its output passes between, which is no plain Identity", 0),
        (_CalledAsOftenAsThereAreImages, "the convolution conv is also held by often, which may call it", 0),
        (_IslandCallsConvolution, "the forward of the root calls conv2d as a function and can't be traced", 0),
        (_IslandCallsNorm, "the forward of the root calls batch_norm as a function and can't be traced", 0),
    ],
)
def test_says_what_keeps_two_layers_apart(cls: type[nn.Module], reason: str, count: int) -> None:
    model = cls().eval()
    program, context = captured(model, image())
    done = FoldConvBn().run(program, context)
    assert len(done.changes) == count
    assert any(text.endswith(reason) for _, text in sentences_of(done)), list(sentences_of(done))
    assert torch.allclose(program.root(image()), model(image()), atol=1e-5)
    if count == 0:
        assert torch.equal(program.root(FAR), model(FAR))
