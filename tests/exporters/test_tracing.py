"""Traces: custom autograd functions, and the device and settings of the moment, which a file must not keep."""

import pytest
import torch
from torch import nn

from exporters import ExportError, ExportRequest, TorchScriptExporter
from exporters.isolation import torchscript_allowed
from exporters.tracing import follow_inputs, follow_settings, traced_by_their_forwards


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable()
        ctx.set_materialize_grads(False)
        return 2 * x.tanh() * len(ctx.needs_input_grad)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class SetUpApart(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
        return factor * x.sigmoid()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient, None


# A bound `apply` isn't replaced during an export.
bound = Doubled.apply


class WithFunction(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def exported(function, folder):
    torch.manual_seed(0)
    model = WithFunction(function).eval()
    calls = tuple(((torch.randn(size, 4),), {}) for size in (2, 3, 1))
    artifact = TorchScriptExporter().export(ExportRequest(model, calls), folder)
    x = torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(artifact.load()(x)[0], model(x))
    return artifact


@pytest.mark.parametrize("function", [Doubled, SetUpApart], ids=lambda function: function.__name__)
def test_the_file_holds_what_the_forward_does(function, tmp_path):
    own = vars(torch.autograd.Function)["apply"]
    assert exported(lambda x: function.apply(x), tmp_path).route == "trace"
    assert vars(torch.autograd.Function)["apply"] is own


def test_a_function_that_was_bound_before_is_refused(tmp_path):
    with pytest.raises(ExportError, match="trace: the module can't be saved"):
        exported(bound, tmp_path)
    assert not list(tmp_path.iterdir())


def test_outside_of_a_trace_and_with_gradients_it_is_the_function_itself():
    x = torch.randn(2, 4, requires_grad=True)
    with traced_by_their_forwards():
        output = Doubled.apply(x)
        with torch.no_grad():
            assert torch.equal(Doubled.apply(x), output)
    assert "Doubled" in type(output.grad_fn).__name__
    output.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4))


class Positions(nn.Module):
    def forward(self, x):
        return x + torch.arange(x.shape[1], device=x.device)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(4, 6, 3, stride=(1, 2), padding=(1, 0), dilation=(2, 1), groups=2)
        self.second = nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1, groups=2)
        self.third = nn.Conv1d(4, 3, 3, bias=False)
        self.fourth = nn.ConvTranspose1d(3, 5, 3, dilation=2)

    def forward(self, x):
        return self.fourth(self.third(self.second(self.first(x)).flatten(2)))


def traced(model, x):
    with torchscript_allowed(), torch.no_grad():
        return torch.jit.trace(model.eval(), x, check_trace=False)


def test_a_trace_makes_tensors_on_the_device_of_its_inputs():
    x = torch.randn(2, 3)
    module = traced(Positions(), x)
    before = str(module.graph)
    # Constants with another device stay, and there are no convolutions.
    follow_inputs(module, torch.device("cuda", 0))
    follow_settings(module)
    assert str(module.graph) == before
    follow_inputs(module, torch.device("cpu"))
    assert torch.equal(module(x), Positions()(x))
    assert module(x.to("meta")).is_meta


@pytest.mark.parametrize("allowed", [True, False])
def test_convolutions_of_a_trace_read_the_settings_when_they_run(allowed):
    x, before = torch.randn(2, 4, 9, 9), torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        model = Convolutions()
        module = traced(model, x)
    finally:
        torch.backends.cudnn.allow_tf32 = before
    follow_settings(module)
    names = [node.kind() for node in module.inlined_graph.nodes() if "conv" in node.kind()]
    assert names == ["aten::conv2d", "aten::conv_transpose2d", "aten::conv1d", "aten::conv_transpose1d"]
    assert torch.equal(module(x), model(x))
