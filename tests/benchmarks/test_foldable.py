"""The count of foldable pairs, which doesn't use the passes: pairs that it counts, and cases that it must not count."""

import pytest
import torch
import torch.nn.functional as F
from benchmark_runs import imported
from tiny_models import enliven
from torch import nn


@pytest.fixture(scope="module")
def foldable():
    with imported("foldable") as module:
        yield module


class Model(nn.Module):
    """Convolutions, a linear layer and BatchNorms; `run(self, x)` is the forward."""

    def __init__(self, run):
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        self.linear = nn.Linear(5, 4)
        self.flat, self.bn = nn.BatchNorm1d(4), nn.BatchNorm2d(4)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def image():
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def rows():
    return torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))


def counted(foldable, run, x):
    model = enliven(Model(run)).eval()
    return [(pair.layer, pair.norm, pair.way) for pair in foldable.foldable_pairs(model, (x,), {})]


def merged(self, x):
    hidden = self.linear(x)
    return self.flat(hidden.flatten(0, 1)).reshape_as(hidden)


def functional(self, x):
    bn = self.bn
    y = F.conv2d(x, self.conv.weight, self.conv.bias)
    return F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias)


def asked_for_its_shape(self, x):
    y = self.conv(x)
    assert y.shape[1] == y.size(1) == 4
    assert y.dim() == 4
    return self.bn(y) + torch.zeros_like(y)


@pytest.mark.parametrize(
    ("run", "x", "pair"),
    [
        (lambda self, x: self.bn(self.conv(x)).relu(), image(), ("conv", "bn", ())),
        (functional, image(), ("conv", "bn", ())),
        (asked_for_its_shape, image(), ("conv", "bn", ())),
        (lambda self, x: self.flat(self.linear(x[:, 0])), rows(), ("linear", "flat", ())),
        (merged, rows(), ("linear", "flat", ("flatten",))),
        (lambda self, x: self.flat(self.linear(x).transpose(1, 2)), rows(), ("linear", "flat", ("transpose",))),
        (lambda self, x: self.flat(self.conv(x).flatten(2)), image(), ("conv", "flat", ("flatten",))),
    ],
)
def test_a_pair_is_counted(foldable, run, x, pair):
    assert counted(foldable, run, x) == [pair]


def maps():
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))


def rows_of_four():
    return torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))


def reflected(self, x):
    return F.conv2d(F.pad(self.bn(x), (1, 1, 1, 1), mode="reflect"), self.other.weight, self.other.bias)


def turned(self, x):
    return F.linear(self.flat(x).transpose(1, 2), self.other.weight.flatten(1), self.other.bias)


@pytest.mark.parametrize(
    ("run", "x", "pair"),
    [
        (lambda self, x: self.other(self.bn(x)), maps(), ("other", "bn", ())),
        (lambda self, x: self.other(self.bn(x).clone()), maps(), ("other", "bn", ("clone",))),
        (reflected, maps(), ("other", "bn", ("pad",))),
        # A BatchNorm that could be folded into either neighbor counts once.
        (lambda self, x: self.other(self.bn(self.conv(x))), image(), ("conv", "bn", ())),
    ],
)
def test_a_pair_with_the_layer_behind_is_counted(foldable, run, x, pair):
    assert counted(foldable, run, x) == [pair]


def padded_behind(self, x):
    return F.conv2d(self.bn(x), self.other.weight, self.other.bias, 1, (0, 1))


def transposed_behind(self, x):
    return F.conv_transpose2d(self.bn(x), self.other.weight, self.other.bias)


def used_behind(self, x):
    y = self.bn(x)
    return self.other(y) + y


def returned_behind(self, x):
    y = self.bn(x)
    return self.other(y), y


def two_users(self, x):
    y = self.conv(x)
    return self.bn(y) + y


def changed_in_place(self, x):
    y = self.conv(x)
    y += 1
    return self.bn(y)


def returned_as_well(self, x):
    y = self.conv(x)
    return {"raw": [y], "normed": self.bn(y)}


def called_twice(self, x):
    y = self.conv(x)
    return self.bn(self.other(self.other(y)))


def norm_called_twice(self, x):
    return self.bn(self.other(self.bn(self.conv(x))))


def standardised(self, x):
    weight = self.conv.weight
    mean = F.batch_norm(weight.reshape(1, 4, -1), None, None, training=True).reshape(weight.shape)
    return self.bn(F.conv2d(x, mean))


def weight_read_elsewhere(self, x):
    return self.bn(self.conv(x)) + self.conv.weight.sum()


def batch_statistics(self, x):
    return F.batch_norm(self.conv(x), self.bn.running_mean, self.bn.running_var, training=True)


@pytest.mark.parametrize(
    ("run", "x"),
    [
        (two_users, image()),
        (changed_in_place, image()),
        (returned_as_well, image()),
        (called_twice, image()),
        (norm_called_twice, image()),
        (standardised, image()),
        (weight_read_elsewhere, image()),
        (batch_statistics, image()),
        (lambda self, x: self.bn(self.conv(x).relu()), image()),
        (lambda self, x: self.bn(F.max_pool2d(self.conv(x), 2)), image()),
        (lambda self, x: self.bn(2 * self.conv(x)), image()),
        # In these cases, dim 1 has the right size, 4, but doesn't hold the channels of a layer in their order.
        (lambda self, x: self.flat(self.linear(x[:, :4])), rows()),
        (lambda self, x: self.bn(self.conv(x).transpose(1, 2)), image()),
        (lambda self, x: self.bn(self.conv(x).reshape(2, 4, 4, 4).flip(1)), image()),
        (lambda self, x: self.bn(x[:, :1].expand(-1, 4, -1, -1)), image()),
        (padded_behind, maps()),
        (transposed_behind, maps()),
        (used_behind, maps()),
        (returned_behind, maps()),
        (turned, rows_of_four()),
        (lambda self, x: self.other(F.pad(self.bn(x), (1, 1, 1, 1))), maps()),
        (lambda self, x: self.other(self.bn(x).relu()), maps()),
        (lambda self, x: self.other(self.bn(x[:, :, :4, :4]).transpose(1, 2)), maps()),
    ],
)
def test_no_pair_is_counted(foldable, run, x):
    assert counted(foldable, run, x) == []


def test_a_convolution_that_two_names_hold_is_not_counted(foldable):
    model = enliven(Model(lambda self, x: self.bn(self.other(self.conv(x))))).eval()
    assert len(foldable.foldable_pairs(model, (image(),), {})) == 1
    model.alias = model.other
    assert foldable.foldable_pairs(model, (image(),), {}) == []
