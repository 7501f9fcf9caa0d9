"""A profile describes a training step correctly, on real and on fake tensors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_models import Net
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils.checkpoint import checkpoint
from training_models import MODELS, STEPS, Scaled, built, rows, with_gradients

from passes.checkpointing import profile as profiles
from passes.checkpointing.choice import Choice
from passes.checkpointing.fake import faked, homes_of
from passes.checkpointing.live_bytes import LiveBytes
from passes.checkpointing.plan import Step
from passes.checkpointing.profile import NoProfile, loss_of, measure, profile, there_before


def calling(function):
    return Net(lambda m, *args: function(*args))


def profile_of(function, *args):
    return profile(calling(function), args, {})


def made(found, name, place=0):
    """The values made by a call of that name; `place` counts such calls from 0."""
    call = [call for call in found.calls if call.name == name][place]
    return [found.values[value] for value in call.makes]


def call_of(found, name):
    return next(call for call in found.calls if call.name == name)


def test_a_plan_knows_what_draws_random_numbers_whether_it_is_kept_or_not():
    found = profile_of(lambda x: F.dropout(x.exp(), 0.5).sin().sum(), rows())
    assert Choice.nothing(found).plan(found).steps == (None, Step(random=True), None, None)


# ------------------------------------------------------------------------------------- real and fake


@pytest.mark.parametrize("name", STEPS)
def test_real_and_fake_tensors_give_the_same_profile_and_the_peak_of_a_plain_step(name):
    model, args, kwargs = with_gradients(*STEPS[name]())
    with faked(model, args, kwargs) as (fake_args, fake_kwargs):
        fake = profile(model, fake_args, fake_kwargs)
    real = profile(model, args, kwargs)
    assert fake.calls == real.calls
    assert fake == real
    with LiveBytes(without=there_before(model, args, kwargs)) as live:
        outputs = model(*args, **kwargs)
        assert live.flops == real.flops
        loss = loss_of(outputs)
        del outputs
        loss.backward()
        del loss
    assert live.live == 0
    assert real.peak == live.peak


def test_each_call_knows_the_module_that_makes_it():
    model, args, kwargs = with_gradients(*STEPS["in place"]())
    found = profile(model, args, kwargs)
    paths = [(call.name, call.path) for call in found.calls]
    assert paths[0] == ("conv2d", "first")
    assert ("batch_norm", "norms.1") in paths
    assert [path for name, path in paths if name == "add_"] == ["norms.0", "norms.1", ""]


# ------------------------------------------------------------------------------------- replacement by fake tensors


class Odd(nn.Module):
    """Holds tensors in every way: parameters, a tied layer, tied buffers, and a plain attribute."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.twin = self.layer
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("other", self.scale, persistent=False)
        self.plain = torch.full((8,), 2.0)

    def forward(self, x):
        assert isinstance(self.layer.weight, FakeTensor)
        assert isinstance(self.plain, FakeTensor)
        assert self.scale is self.other
        self.scale.add_(1)
        return self.layer(x * self.plain) * self.scale


@pytest.mark.parametrize("raises", [False, True])
def test_a_module_is_as_it_was_after_it_was_faked(raises):
    model, (x,) = built(Odd, rows())
    model.layer.weight.grad = torch.ones(8, 8)

    def held():
        homes = [home for module in model.modules() for home in homes_of(module)]
        return [(home, name, value) for home in homes for name, value in home.items()]

    before = held()
    values = copy.deepcopy(model.state_dict())
    order = [list(home) for module in model.modules() for home in homes_of(module)]

    def run():
        with faked(model, (x,), {}) as (args, kwargs):
            assert isinstance(args[0], FakeTensor)
            assert args[0].requires_grad
            assert kwargs == {}
            model(*args).sum().backward()
            if raises:
                raise KeyError("in the body")

    if raises:
        with pytest.raises(KeyError, match="in the body"):
            run()
    else:
        run()
    after = held()
    assert len(before) == len(after)
    assert all(
        old[0] is new[0] and old[1] == new[1] and old[2] is new[2] for old, new in zip(before, after, strict=True)
    )
    assert order == [list(home) for module in model.modules() for home in homes_of(module)]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in values.items())
    assert torch.equal(model.layer.weight.grad, torch.ones(8, 8))
    assert model.layer.bias.grad is None
    assert x.grad is None


# ------------------------------------------------------------------------------------- values


def leaf(*shape):
    return torch.rand(*shape, requires_grad=True)


def test_a_write_to_what_isnt_counted_isnt_repeated():
    count = torch.zeros(4)
    found = profile_of(lambda x: (x.sin() * count.add_(1)).sum(), leaf(4))
    assert not call_of(found, "add_").repeatable
    # Another write to `count` would change the result of a recomputed mul, but there is none here.
    assert call_of(found, "mul").repeatable


def test_what_is_computed_from_a_buffer_before_it_is_written_to_isnt_repeated():
    def forward(x, count):
        y = x.sin() * count
        count.add_(1)
        return y.tanh().sum()

    found = profile_of(forward, leaf(4), torch.zeros(4))
    assert not call_of(found, "mul").repeatable
    assert call_of(found, "tanh").repeatable


def test_randomness_is_known():
    found = profile_of(lambda x: F.dropout(x.sin(), 0.5).tanh(), leaf(8))
    assert [call.name for call in found.calls if call.random] == ["dropout"]
    assert call_of(found, "dropout").repeatable


def test_a_call_with_a_generator_of_the_users_isnt_repeated():
    generator = torch.Generator()
    found = profile_of(lambda x: x * torch.rand(8, generator=generator), leaf(8))
    assert not call_of(found, "rand").repeatable
    assert call_of(found, "mul").repeatable


def test_what_goes_through_a_users_checkpoint_isnt_repeated():
    def forward(x):
        return checkpoint(lambda t: t.sin().tanh(), x.exp(), use_reentrant=False).cos()

    found = profile_of(forward, leaf(8))
    # The checkpoint recomputes from the result of exp. In torch 2.11 it also makes an empty tensor.
    names = [call.name for call in found.calls if not call.repeatable and call.name != "empty"]
    assert names == ["exp", "sin", "tanh"]


def test_what_a_users_function_saves_stays_as_it_is():
    found = profile_of(lambda x: Scaled.apply(x.exp().sin(), 2).tanh(), leaf(8))
    (sin,) = made(found, "sin")
    assert sin.savers
    assert not call_of(found, "sin").repeatable
    assert call_of(found, "exp").repeatable


# ------------------------------------------------------------------------------------- losses and refusals


@pytest.fixture
def several_processes(monkeypatch):
    monkeypatch.setattr(profiles, "_is_in_several_processes", lambda module: True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.usefixtures("several_processes")
def test_a_norm_that_synchronises_isnt_repeated_and_what_it_saves_stays(training):
    def of(cls):
        torch.manual_seed(0)
        norm = cls(8).train(training)
        return profile(nn.Sequential(nn.Linear(8, 8), norm, nn.GELU()), (rows().requires_grad_(),), {})

    plain, synced = of(nn.BatchNorm1d), of(nn.SyncBatchNorm)
    assert [call.name for call in synced.calls] == [call.name for call in plain.calls]
    assert [call.repeatable for call in plain.calls if call.name in ("linear", "batch_norm")] == [True, True]
    # In eval mode, it doesn't communicate.
    repeatable = [call.repeatable for call in synced.calls if call.name in ("linear", "batch_norm")]
    assert repeatable == ([False, False] if training else [True, True])
    assert call_of(synced, "gelu").repeatable
    assert [call.synchronised for call in synced.calls] == [
        training and call.name == "batch_norm" for call in synced.calls
    ]
    assert not any(call.synchronised for call in plain.calls)
    plan = Choice.nothing(synced).plan(synced)
    assert [plan.names[number] for number in plan.synchronised] == ["batch_norm"] * training


def test_the_loss_is_what_the_model_computes():
    loss, logits = torch.tensor(3.0, requires_grad=True), torch.ones(4, requires_grad=True)
    assert loss_of({"loss": loss, "logits": logits}) == 3.0
    assert loss_of((loss, loss * 2)) == 9.0


def test_without_a_loss_it_is_half_the_mean_square():
    a, b = torch.full((4,), 2.0, requires_grad=True), torch.full((2, 3), 3.0, requires_grad=True)
    assert loss_of([a, {"b": b}, torch.ones(3), "text"]) == 2.0 + 4.5


def test_a_forward_that_makes_other_calls_each_time_has_no_profile():
    count = [0]

    def forward(x):
        count[0] += 1
        return x.sin() if count[0] % 2 else x.cos()

    with pytest.raises(NoProfile, match="doesn't make the same calls in every run"):
        profile_of(forward, leaf(4))


def test_a_forward_that_takes_gradients_by_torch_func_has_no_profile():
    model, args = MODELS["maps"]()
    with pytest.raises(NoProfile, match=r"gradients with torch.func"):
        profile(model, args, {})


def test_a_forward_that_leaves_its_plan_isnt_measured():
    found = profile_of(lambda x: x.sin().cos(), leaf(4))
    with pytest.raises(NoProfile, match="doesn't make the same calls in every"):
        measure(calling(lambda x: x.sin()), (leaf(4),), {}, Choice.nothing(found).plan(found))
