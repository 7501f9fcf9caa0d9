"""The count of foldable pairs, which doesn't use the passes: pairs that it counts, and cases that it must not count."""

import pytest
import torch
import torch.nn.functional as F
from benchmark_runs import imported
from tiny_models import Net, enliven
from torch import nn


@pytest.fixture(scope="module")
def foldable():
    with imported("foldable") as module:
        yield module


def image():
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def rows():
    return torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))


def model_of(run):
    """Convolutions, a linear layer and BatchNorms; `run(self, x)` is the forward."""
    layers = {"conv": nn.Conv2d(3, 4, 3), "other": nn.Conv2d(4, 4, 1), "linear": nn.Linear(5, 4)}
    return enliven(Net(run, **layers, flat=nn.BatchNorm1d(4), bn=nn.BatchNorm2d(4))).eval()


def counted(foldable, run, x):
    model = model_of(run)
    return [(pair.layer, pair.norm, pair.way) for pair in foldable.foldable_pairs(model, (x,), {})]


def maps():
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))


def functional(self, x):
    bn = self.bn
    y = F.conv2d(x, self.conv.weight, self.conv.bias)
    return F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias)


def asked_for_its_shape(self, x):
    y = self.conv(x)
    assert y.shape[1] == y.size(1) == y.dim() == 4
    return self.bn(y) + torch.zeros_like(y)


def reflected(self, x):
    return F.conv2d(F.pad(self.bn(x), (1, 1, 1, 1), mode="reflect"), self.other.weight, self.other.bias)


@pytest.mark.parametrize(
    ("run", "x", "pair"),
    [
        (lambda self, x: self.bn(self.conv(x)).relu(), image(), ("conv", "bn", ())),
        (functional, image(), ("conv", "bn", ())),
        (asked_for_its_shape, image(), ("conv", "bn", ())),
        (lambda self, x: self.flat(self.linear(x[:, 0])), rows(), ("linear", "flat", ())),
        (
            lambda self, x: self.flat((y := self.linear(x)).flatten(0, 1)).reshape_as(y),
            rows(),
            ("linear", "flat", ("flatten",)),
        ),
        (lambda self, x: self.flat(self.linear(x).transpose(1, 2)), rows(), ("linear", "flat", ("transpose",))),
        (lambda self, x: self.flat(self.conv(x).flatten(2)), image(), ("conv", "flat", ("flatten",))),
        (lambda self, x: self.other(self.bn(x)), maps(), ("other", "bn", ())),
        (lambda self, x: self.other(self.bn(x).clone()), maps(), ("other", "bn", ("clone",))),
        (reflected, maps(), ("other", "bn", ("pad",))),
        # A BatchNorm that could be folded into either neighbor counts once.
        (lambda self, x: self.other(self.bn(self.conv(x))), image(), ("conv", "bn", ())),
    ],
)
def test_a_pair_is_counted(foldable, run, x, pair):
    assert counted(foldable, run, x) == [pair]


def standardised(self, x):
    weight = self.conv.weight
    mean = F.batch_norm(weight.reshape(1, 4, -1), None, None, training=True).reshape(weight.shape)
    return self.bn(F.conv2d(x, mean))


def batch_statistics(self, x):
    return F.batch_norm(self.conv(x), self.bn.running_mean, self.bn.running_var, training=True)


@pytest.mark.parametrize(
    ("run", "x"),
    [
        (lambda self, x: self.bn(y := self.conv(x)) + y, image()),
        (lambda self, x: self.bn(self.conv(x).add_(1)), image()),
        (lambda self, x: {"raw": [y := self.conv(x)], "normed": self.bn(y)}, image()),
        (lambda self, x: self.bn(self.other(self.other(self.conv(x)))), image()),
        (lambda self, x: self.bn(self.other(self.bn(self.conv(x)))), image()),
        (standardised, image()),
        (lambda self, x: self.bn(self.conv(x)) + self.conv.weight.sum(), image()),
        (batch_statistics, image()),
        (lambda self, x: self.bn(self.conv(x).relu()), image()),
        (lambda self, x: self.bn(F.max_pool2d(self.conv(x), 2)), image()),
        (lambda self, x: self.bn(2 * self.conv(x)), image()),
        # In these cases, dim 1 has the right size, 4, but doesn't hold the channels of a layer in their order.
        (lambda self, x: self.flat(self.linear(x[:, :4])), rows()),
        (lambda self, x: self.bn(self.conv(x).transpose(1, 2)), image()),
        (lambda self, x: self.bn(self.conv(x).reshape(2, 4, 4, 4).flip(1)), image()),
        (lambda self, x: self.bn(x[:, :1].expand(-1, 4, -1, -1)), image()),
        (lambda self, x: F.conv2d(self.bn(x), self.other.weight, self.other.bias, 1, (0, 1)), maps()),
        (lambda self, x: F.conv_transpose2d(self.bn(x), self.other.weight, self.other.bias), maps()),
        (lambda self, x: self.other(y := self.bn(x)) + y, maps()),
        (lambda self, x: (self.other(y := self.bn(x)), y), maps()),
        (lambda self, x: F.linear(self.flat(x.flatten(2)).transpose(1, 2), self.other.weight.flatten(1)), maps()),
        (lambda self, x: self.other(F.pad(self.bn(x), (1, 1, 1, 1))), maps()),
        (lambda self, x: self.other(self.bn(x).relu()), maps()),
        (lambda self, x: self.other(self.bn(x[:, :, :4, :4]).transpose(1, 2)), maps()),
    ],
)
def test_no_pair_is_counted(foldable, run, x):
    assert counted(foldable, run, x) == []


def test_a_convolution_that_two_names_hold_is_not_counted(foldable):
    model = model_of(lambda self, x: self.bn(self.other(self.conv(x))))
    assert len(foldable.foldable_pairs(model, (image(),), {})) == 1
    model.alias = model.other
    assert foldable.foldable_pairs(model, (image(),), {}) == []
