"""Export models with custom autograd functions to TorchScript."""

import pytest
import torch
from torch import nn

from exporters import ExportError, ExportRequest, TorchScriptExporter
from exporters.tracing import traced_by_their_forwards


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


class Net(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def exported(function, folder):
    torch.manual_seed(0)
    model = Net(function).eval()
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
