"""Gradients and buffers of a candidate in training; kinks of activations; dropout."""

import copy

import pytest
import torch
import torch.nn.functional as F
from parity_models import image, net
from tiny_models import enliven
from torch import nn
from torch.utils.checkpoint import checkpoint

from optimizer.parity import (
    check_parity,
)


def trained(model, candidate, **options):
    return check_parity(model, candidate, (image(4),), mode="training", **options)


def test_training_compares_outputs_gradients_and_buffers():
    model = net().train()
    report = trained(model, copy.deepcopy(model))
    assert report.ok, report
    assert {output.kind for output in report.outputs} == {"output", "gradient", "buffer"}
    names = {output.name for output in report.outputs}
    assert {"gradient of conv.weight", "buffer bn.running_mean", "buffer bn.num_batches_tracked"} <= names
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_wrong_gradient_or_buffer_fails():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 0.999

    model = net().train()
    wrong = copy.deepcopy(model)
    wrong.forward = lambda x: wrong.head(F.relu(wrong.bn(Scaled.apply(wrong.conv(x)))).mean((2, 3)))
    report = trained(model, wrong)
    assert report.verdict == "failed"
    assert "gradient of conv.weight" in report.reason
    slow = copy.deepcopy(model)
    slow.bn.momentum = 0.11
    assert "buffer bn.running" in trained(model, slow).reason


def test_a_missing_parameter_is_named_and_none_equals_zero():
    class Unused(nn.Module):
        def __init__(self, touch):
            super().__init__()
            self.used, self.idle, self.touch = nn.Linear(8, 3), nn.Linear(8, 3), touch

        def forward(self, x):
            return self.used(x.mean((1, 2))) + (self.idle(x.mean((1, 2))) * 0 if self.touch else 0)

    model = enliven(Unused(False))
    touched = enliven(Unused(True))
    touched.load_state_dict(model.state_dict())
    assert trained(model, touched).ok
    lacking = copy.deepcopy(model)
    del lacking.idle
    report = trained(model, lacking)
    assert report.ok
    assert any("gradient of idle.weight" in note for note in report.notes)


def test_gradients_of_inputs_are_compared():
    x = torch.randn(3, 4, requires_grad=True)
    report = check_parity(torch.sin, lambda x: torch.sin(x.detach()) + 0 * x, (x,), mode="training")
    assert report.verdict == "failed"
    assert "gradient of" in report.reason


@pytest.mark.parametrize(
    ("layers", "shape", "truth"),
    [
        (lambda: (nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)), (4, 8), "float64"),
        # The convolution returns channels_last; in float64 another kernel returns another layout, so another mask.
        (lambda: (nn.ConvTranspose3d(4, 4, 3), nn.Dropout(0.5), nn.BatchNorm3d(4)), (4, 4, 5, 5, 5), "own dtype"),
    ],
    ids=["linear", "feature maps"],
)
def test_dropout_in_training_draws_the_same_mask_in_float64(layers, shape, truth):
    model = enliven(nn.Sequential(*layers())).train()
    if len(shape) == 5:
        model.to(memory_format=torch.channels_last_3d)
    report = check_parity(model, copy.deepcopy(model), (torch.randn(shape),), mode="training")
    assert report.ok
    assert report.reference == truth
    without = copy.deepcopy(model)
    without[1] = nn.Identity()
    assert not check_parity(model, without, (torch.randn(shape),), mode="training").ok


def test_a_checkpointed_part_is_run_again_in_float64():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            return self.head(checkpoint(self.part, x, use_reentrant=False))

    model = enliven(Checkpointed()).train()
    plain = copy.deepcopy(model)
    plain.forward = lambda x: plain.head(plain.part(x))
    report = check_parity(model, plain, (torch.randn(2, 8),), mode="training")
    assert report.ok, report
    assert report.reference == "float64"


class Kinked(nn.Module):
    """Some inputs of its ReLU are next to the kink; the rounding of `lossy` loses on which side they are."""

    def __init__(self, *, lossy=False, slope=1.0, coarse=False):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))
        self.register_buffer("out", torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
        self.lossy, self.slope, self.coarse = lossy, slope, coarse

    def forward(self, x):
        x = x + (self.slope * self.bias - (self.slope - 1) * self.bias.detach())
        if self.coarse and x.requires_grad:
            x.register_hook(lambda gradient: gradient.bfloat16().float())
        return F.relu((x + 1) - 1 if self.lossy else x) @ self.out


def beside_kinks(count):
    """Inputs with `count` elements so close to zero that one plus such an element is one."""

    def inputs(batch_size, generator):
        x = torch.randn(batch_size, 64, generator=generator)
        x.view(-1)[:count] = 1e-9
        return (x,)

    return inputs


class Off(Kinked):
    def forward(self, x):
        return super().forward(x) * 1.001


def at_kinks(candidate, count=1):
    return check_parity(Kinked(), candidate, beside_kinks(count), mode="training", batch_sizes=(2000,))


def test_a_number_on_the_other_side_of_a_kink_is_no_error():
    report = at_kinks(Kinked(lossy=True))
    assert report.ok, report.reason
    assert any("rounding at a kink" in note and note.endswith("gradient of bias.") for note in report.notes)
    assert not any("kink" in note for note in at_kinks(Kinked(lossy=True), 0).notes)


@pytest.mark.parametrize(
    ("candidate", "count", "words"),
    [
        (Kinked(lossy=True, slope=1.001), 1, "gradient of bias"),  # wrong in float64 too
        (Kinked(lossy=True, coarse=True), 1, "gradient of bias"),  # a lower precision
        (Kinked(lossy=True), 20_000, "gradient of bias"),  # more than kinks explain
        (Off(lossy=True), 1, "output"),
    ],
)
def test_kinks_excuse_no_other_error(candidate, count, words):
    report = at_kinks(candidate, count)
    assert report.verdict == "failed"
    assert words in report.reason
