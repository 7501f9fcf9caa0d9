"""Count the bytes alive in a step, on real and on fake tensors."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from passes.checkpointing.live_bytes import LiveBytes
from passes.checkpointing.plan import Plan, Step
from passes.checkpointing.tape import Tape

KIB = 1024


def tensor(kibibytes):
    return torch.ones(kibibytes * KIB // 4)


def test_what_is_made_counts_until_it_is_gone():
    with LiveBytes() as bytes_:
        a = tensor(4)
        b = a + 1
        assert (bytes_.live, bytes_.peak) == (8 * KIB, 8 * KIB)
        del a
        assert (bytes_.live, bytes_.peak) == (4 * KIB, 8 * KIB)
        bytes_.restart()
        assert bytes_.peak == 4 * KIB
        del b
        assert bytes_.live == 0


def test_a_view_keeps_the_whole_and_adds_nothing():
    with LiveBytes() as bytes_:
        a = tensor(4)
        part = a.view(2, -1)[0]
        assert bytes_.live == 4 * KIB
        del a
        assert bytes_.live == 4 * KIB
        del part
        assert bytes_.live == 0


def test_a_write_in_place_adds_nothing():
    with LiveBytes() as bytes_:
        a = tensor(4)
        a.add_(1).relu_()
        assert bytes_.peak == 4 * KIB


def test_what_is_left_out_isnt_counted():
    weight = tensor(4)
    with LiveBytes(without=[weight]) as bytes_:
        shifted = weight[1:].view(-1)
        assert bytes_.live == 0
        product = shifted * 2
        assert bytes_.live == product.numel() * 4


def test_products_random_and_foreign_operators_are_known():
    with LiveBytes() as bytes_:
        torch.ones(3, 4) @ torch.ones(4, 5)
        assert bytes_.flops == 2 * 3 * 4 * 5
        assert not bytes_.is_random
        torch.dropout(torch.ones(4), 0.5, True)
        assert bytes_.is_random
        assert not bytes_.is_foreign


def test_attention_on_a_cpu_has_flops():
    q = torch.ones(2, 3, 8, 4)
    with LiveBytes() as bytes_:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert bytes_.flops == 2 * (2 * 2 * 3 * 8 * 8 * 4)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(512, 4)
    )


def peak_of_a_step(model, x, plan=None):
    """(peak bytes, FLOPs) of a forward and backward pass, without parameters, gradients, buffers and the input."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    with LiveBytes(without=[x, *model.parameters(), *model.buffers(), *gradients]) as bytes_:
        if plan is None:
            result = model(x)
        else:
            with Tape(plan):
                result = model(x)
        result.sum().backward()
        del result
        assert bytes_.live == 0
    return bytes_.peak, bytes_.flops


# BatchNorm is recomputed together with ReLU. Otherwise its result would be kept in place of ReLU's.
ACTIVATIONS_AGAIN = Plan(
    ("conv2d", "add_", "batch_norm", "relu", "conv2d", "gelu", "flatten", "linear"),
    (None, None, Step(recomputed=True), Step(recomputed=True), Step(), Step(recomputed=True), None, Step()),
)


@pytest.mark.parametrize("plan", [None, ACTIVATIONS_AGAIN])
def test_fake_tensors_count_as_real_ones(plan):
    expected = peak_of_a_step(net(), torch.randn(5, 3, 12, 12), plan)
    with FakeTensorMode():
        assert peak_of_a_step(net(), torch.randn(5, 3, 12, 12), plan) == expected
