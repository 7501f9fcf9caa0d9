"""A planned forward keeps everything under active hooks and modes, and logs the reason."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from training_models import built, rows

from passes.checkpointing.forward import CheckpointedForward
from passes.checkpointing.plan import Plan, Step


class Doubling(TorchFunctionMode):
    """Doubles the result of `gelu`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is F.gelu else result


def planned():
    model, inputs = built(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh()), rows())
    names = ("linear", "gelu", "linear", "tanh")
    plan = Plan(names, tuple(Step(recomputed=True) for _ in names))
    result = nn.Sequential(*model)
    result.__dict__["forward"] = CheckpointedForward(result, plan, None)
    return model, result, inputs


def gradients(model, inputs, around):
    with around():
        loss = model(*inputs).square().sum()
    return torch.autograd.grad(loss, list(model.parameters()))


def half():
    return saved_tensors_hooks(lambda tensor: tensor.half(), lambda tensor: tensor.float())


AROUND = {
    "hooks on saved tensors are active": half,
    "hooks on saved tensors are active ": save_on_cpu,
    "hooks on saved tensors are disabled": lambda: disable_saved_tensors_hooks("not here"),
    "the function mode Doubling is active": Doubling,
}


@pytest.mark.parametrize("reason", AROUND)
def test_what_is_around_the_forward_alone_is_left_alone(reason, caplog):
    model, result, inputs = planned()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            expected, got = (gradients(one, inputs, AROUND[reason]) for one in (model, result))
            assert all(torch.equal(*pair) for pair in zip(expected, got, strict=True))
    # The reason is logged once, not at each step.
    assert caplog.text.count(f"despite the plan: {reason.strip()} around the forward") == 1


# torch's own forward-mode formulas use `torch.jit.script`.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_in_forward_mode_everything_is_kept(caplog):
    def tangents(model, x):
        with forward_ad.dual_level():
            loss = model(forward_ad.make_dual(x, torch.ones_like(x))).square().sum()
            found = torch.autograd.grad(loss, list(model.parameters()))
            return [forward_ad.unpack_dual(gradient).tangent for gradient in found]

    model, result, (x,) = planned()
    expected, got = tangents(model, x), tangents(result, x)
    assert all(torch.equal(*pair) for pair in zip(expected, got, strict=True))
    assert "gradients are requested in forward mode" in caplog.text


def test_a_device_of_all_tensors_is_no_reason(caplog):
    _, result, inputs = planned()
    with torch.device("cpu"), half():
        result(*inputs)
    assert "function mode" not in caplog.text
    assert "hooks on saved tensors are active" in caplog.text
