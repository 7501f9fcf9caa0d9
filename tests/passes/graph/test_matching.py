"""Find the calls of a recorded run that form a foldable pair."""

import sys
from pathlib import Path

import folding_models as models
import pytest
import torch
import torch.nn.functional as F
from folding_models import image
from tiny_models import Net
from torch import nn

from passes.base import TensorRef
from passes.graph.layers import ChannelScale, RecordedLayers
from passes.graph.recording import Recorder, tensor_of

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))


def recorded(model, *args, **kwargs):
    recorder = Recorder(model, model.modules)
    with torch.no_grad(), recorder:
        model(*args, **kwargs)
    return recorder.recording


def pairs_in(recording):
    layers = RecordedLayers(recording.graph)
    return [*filter(None, map(layers.pair_before, filter(None, map(layers.affine_at, recording.nodes()))))]


@pytest.mark.parametrize("cls", models.FOLDED)
def test_every_spelling_is_found(cls):
    model = cls().eval()
    found = pairs_in(recorded(model, image()))
    assert len(found) >= 1


@pytest.mark.parametrize("kind", models.CONVOLUTIONS)
def test_layers_are_taken_with_their_numbers(kind):
    make, shape = models.CONVOLUTIONS[kind]
    conv = make()
    norm = models.norm_behind(conv, shape)
    (pair,) = pairs_in(recorded(nn.Sequential(conv, norm).eval(), image(*shape)))
    assert tensor_of(pair.layer.weight) == TensorRef(conv, "weight")
    assert pair.layer.dims == len(shape) - 2
    assert pair.layer.transposed is isinstance(conv, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    assert pair.layer.channels == norm.num_features
    assert pair.layer.input_channels == shape[1]
    assert pair.layer.groups == getattr(conv, "groups", 1)
    assert tensor_of(pair.affine.mean) == TensorRef(norm, "running_mean")
    assert (pair.channels.dim, pair.channels.count) == (1, norm.num_features)


@pytest.mark.parametrize(
    ("move", "dim"),
    [
        (lambda y: y.flatten(0, 1), 1),
        (lambda y: y.transpose(1, 2), 1),
        (lambda y: torch.transpose(y, -1, -2).contiguous(), 1),
        (lambda y: y.permute(0, 2, 1), 1),
        (lambda y: F.dropout(y.reshape(-1, 4), 0.5, False), 1),
        (lambda y: y.view(-1, 4), 1),
        (lambda y: y.expand(y.shape), None),
        (lambda y: y.relu().flatten(0, 1), None),
        (lambda y: F.dropout(y.flatten(0, 1), 0.5, True), None),
        (lambda y: y[:, 0], None),
    ],
)
def test_moves_between_the_two(move, dim):
    model = Net(lambda m, x: m.bn(move(m.linear(x))), linear=nn.Linear(3, 4), bn=nn.BatchNorm1d(4)).eval()
    found = [pair.channels for pair in pairs_in(recorded(model, image(2, 4, 3)))]
    assert [channels.dim for channels in found if channels] == ([] if dim is None else [dim])


def scaled(compute, shape):
    held = {"conv": nn.Conv2d(3, 4, 1), "scale": nn.Parameter(torch.ones(shape))}
    return Net(lambda m, x: compute(m.conv(x), m.scale), **held)


@pytest.mark.parametrize(
    ("compute", "operation"),
    [
        (lambda y, s: y * s, "mul"), (lambda y, s: s * y, "mul"), (lambda y, s: y.mul(s), "mul"),
        (lambda y, s: y + s, "add"), (lambda y, s: s - y, "rsub"), (lambda y, s: y - s, "sub"),
        (lambda y, s: y / s, "div"), (lambda y, s: torch.add(y, s), "add"), (torch.div, "div"),
        (lambda y, s: s / y, None), (lambda y, s: torch.add(y, s, alpha=2), None), (lambda y, s: y**s, None),
        (torch.maximum, None),
    ],
)  # fmt: skip
def test_products_and_sums(compute, operation):
    found = pairs_in(recorded(scaled(compute, (1, 4, 1, 1)), image()))
    assert [pair.affine.operation for pair in found] == ([] if operation is None else [operation])


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((4, 1, 1), 1),
        ((1,), 1),
        ((), 1),
        ((1, 4, 1, 1), 1),
        ((8,), 0),
        ((4, 1, 1, 1), 0),
        ((1, 1, 4, 1, 1), 0),
        ((1, 4, 1, 1, 1), 0),
    ],
)
def test_only_what_has_one_number_for_each_channel_scales_them(shape, count):
    found = pairs_in(recorded(scaled(lambda y, s: y * s, shape), image(4, 3, 8, 8)))
    assert len(found) == count
    assert all(isinstance(pair.affine, ChannelScale) for pair in found)


def test_a_number_that_a_tensor_holds_is_no_eps():
    class Norm(nn.BatchNorm2d):
        def forward(self, x):
            return F.batch_norm(x, self.running_mean, self.running_var, eps=self.epsilon)

    norm = Norm(4)
    norm.register_buffer("epsilon", torch.tensor(1e-3))
    assert not pairs_in(recorded(nn.Sequential(nn.Conv2d(3, 4, 1), norm).eval(), image()))


def test_layers_of_a_class_of_its_own_are_taken_by_what_they_call():
    class Doubled(nn.Conv2d):
        def forward(self, input):
            return super().forward(input) * 2

    model = nn.Sequential(Doubled(3, 4, 1), nn.BatchNorm2d(4)).eval()
    assert not pairs_in(recorded(model, image()))
