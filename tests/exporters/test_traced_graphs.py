import pytest
import torch
from torch import nn

from exporters.isolation import torchscript_allowed
from exporters.tracing import follow_inputs, follow_settings


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


def kinds(module):
    return [node.kind() for node in module.inlined_graph.nodes()]


def test_a_trace_makes_tensors_on_the_device_of_its_inputs():
    x = torch.randn(2, 3)
    module = traced(Positions(), x)
    follow_inputs(module, torch.device("cpu"))
    assert torch.equal(module(x), Positions()(x))
    assert module(x.to("meta")).is_meta


def test_other_devices_in_a_trace_stay():
    module = traced(Positions(), torch.randn(2, 3))
    before = str(module.graph)
    follow_inputs(module, torch.device("cuda", 0))
    assert str(module.graph) == before


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
    names = [kind for kind in kinds(module) if "conv" in kind]
    assert names == ["aten::conv2d", "aten::conv_transpose2d", "aten::conv1d", "aten::conv_transpose1d"]
    assert torch.equal(module(x), model(x))


def test_a_trace_without_convolutions_stays():
    module = traced(Positions(), torch.randn(2, 3))
    before = str(module.graph)
    follow_settings(module)
    assert str(module.graph) == before
