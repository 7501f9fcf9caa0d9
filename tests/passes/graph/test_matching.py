"""Find the calls of a recorded run that form a foldable pair; more spellings: `test_fold_conv_bn.py`."""

import folding_models as models
import pytest
import torch
import torch.nn.functional as F
from folding_models import image
from pass_contract import recorded
from torch import nn

from passes.base import TensorRef
from passes.graph.layers import RecordedLayers
from passes.graph.recording import tensor_of


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


def test_a_number_that_a_tensor_holds_is_no_eps():
    class Norm(nn.BatchNorm2d):
        def forward(self, x):
            return F.batch_norm(x, self.running_mean, self.running_var, eps=self.epsilon)

    norm = Norm(4)
    norm.register_buffer("epsilon", torch.tensor(1e-3))
    assert not pairs_in(recorded(nn.Sequential(nn.Conv2d(3, 4, 1), norm).eval(), image()))
