"""A recorded run shows every torch call of a forward, in any coding style."""

import pytest
import torch
from tiny_models import Net
from torch import nn

from optimizer.diagnosis.evidence import LineRecorder, escapes
from passes.base import TensorRef
from passes.graph.recording import (
    Recorder,
    Recording,
    call_of,
    operation_name,
    shape_of,
    tensor_of,
    users_of,
)


def recorded(model, *calls, kind=Recorder):
    """Record one run for each tuple of arguments."""
    runs = []
    for call in calls:
        recorder = kind(model, model.modules)
        with torch.no_grad(), recorder:
            model(*call)
        runs.append(recorder.recording)
    return runs


def named(recording: Recording, name: str):
    return [node for node in recording.nodes() if node.op == "call_function" and operation_name(node) == name]


class Untraceable(nn.Module):
    """A forward with a branch on data, a loop, an f-string, keyword arguments and a decorator."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)

    @torch.no_grad()
    def forward(self, x, **options):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input) {x.shape}")
        for _ in range(options.get("times", 2)):
            y = self.conv(x) if x.sum() < 1e9 else x
        return self.bn(y).relu()


def test_every_call_shows_with_its_module_and_its_tensors():
    model = Untraceable().eval()
    (run,) = recorded(model, (torch.randn(2, 3, 8, 8),))
    convolutions = named(run, "conv2d")
    assert [call_of(node).module for node in convolutions] == [model.conv] * 2
    assert call_of(convolutions[0]) is not call_of(convolutions[1])
    assert call_of(convolutions[0]).around.module is model
    assert tensor_of(convolutions[0].args[1]) == TensorRef(model.conv, "weight")
    assert run.uses(TensorRef(model.conv, "weight")) == convolutions
    (norm,) = named(run, "batch_norm")
    assert users_of(convolutions[0]) == []
    assert users_of(convolutions[1]) == [norm]
    assert shape_of(norm).sizes == (2, 4, 6, 6)
    assert run.uses(TensorRef(model.bn, "running_mean")) == [norm]


def test_questions_about_shape_and_kind_use_no_values_and_looks_at_values_do():
    def asks(m, x):
        y = m.conv(x)
        kinds = (y.ndim, y.shape[0], y.size(1), y.dtype, y.device, y.is_cuda, len(y), y.is_floating_point())
        return kinds, x.reshape(2, 1, 3, 16).expand_as(x.new_zeros(2, 1, 3, 16)), x.reshape(2, 3, 4, 4).view_as(x)

    conv = nn.Conv2d(3, 4, 1)
    (run,) = recorded(Net(asks, conv=conv), (torch.randn(2, 3, 4, 4),))
    (call,) = named(run, "conv2d")
    assert users_of(call) == []
    assert len(call.users) >= 8

    def write(y):
        y[0] = 1

    looks = (
        lambda y: y.max().item(), lambda y: y.tolist(), lambda y: torch.equal(y, y), lambda y: bool(y.sum() > 0),
        lambda y: y.numpy(), lambda y: y.flatten()[0].item(), write, lambda y: torch.allclose(y, y), lambda y: y + 1,
    )  # fmt: skip
    for look in looks:
        (run,) = recorded(Net(lambda m, x, look=look: look(m.conv(x)), conv=conv), (torch.randn(2, 3, 4, 4),))
        assert users_of(named(run, "conv2d")[0])


def test_values_that_outlive_the_run_show():
    class Keeps(nn.Module):
        def __init__(self, keep):
            super().__init__()
            self.keep = keep
            self.kept = None

        def forward(self, x):
            y = x.exp()
            z = y.sin()
            if self.keep == "attribute":
                self.kept = [y]
            if self.keep == "cycle":
                held = [y]
                held.append(held)
            return {"z": z, "y": y} if self.keep == "output" else z

    for keep, wanted in (("nothing", False), ("attribute", True), ("output", True), ("cycle", False)):
        model = Keeps(keep)
        (run,) = recorded(model, (torch.randn(2),), kind=LineRecorder)
        assert escapes(named(run, "exp")[0]) is wanted, keep
        assert escapes(named(run, "sin")[0])


def test_a_value_that_is_written_in_place_is_another_one_from_then_on():
    model = Net(lambda m, x: (y := x.exp(), y.relu_(), y.sin())[2])
    (run,) = recorded(model, (torch.randn(2),))
    (exp,), (relu,), (sin,) = (named(run, name) for name in ("exp", "relu_", "sin"))
    assert users_of(exp) == [relu]
    assert users_of(relu) == [sin]


def test_a_run_that_raises_leaves_no_hooks():
    from torch.nn.modules import module as hooks

    model = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), Recorder(model, model.modules):
        model(torch.randn(2, 4))
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_a_scripted_module_uses_what_it_is_given():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), torch.jit.trace(nn.ReLU(), torch.randn(2))).eval()
    (run,) = recorded(model, (torch.randn(2, 3, 4, 4),))
    (user,) = users_of(named(run, "conv2d")[0])
    assert operation_name(user) == "call_script"
