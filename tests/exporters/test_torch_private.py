"""The private names of torch that the exporters use exist, and work as expected."""

import os

import pytest
import torch
import torch._inductor
from exportable_models import Of
from torch import nn

from exporters import torch_private
from exporters.isolation import silent, torchscript_allowed


def test_a_trace_says_that_it_records():
    seen = []
    model = Of(lambda x: seen.append(torch_private.is_tracing()) or x + 1)
    model(torch.ones(2))
    with torchscript_allowed():
        torch.jit.trace(model, torch.ones(2), check_trace=False)
    assert seen == [False, True]


def test_the_log_is_off_inside_and_back_afterwards(monkeypatch):
    before = torch._C._jit_onnx_log
    with torch_private.without_onnx_log():
        assert torch._C._jit_onnx_log is not before
    assert torch._C._jit_onnx_log is before
    monkeypatch.delattr(torch._C, "_jit_onnx_log")
    with torch_private.without_onnx_log():
        assert not hasattr(torch._C, "_jit_onnx_log")


def test_the_translations_are_read_once_and_each_export_has_its_own():
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with torch_private.with_kept_onnx_registry():
        first, second = (ONNXRegistry().from_torchlib(opset_version=18) for _ in range(2))
        other = ONNXRegistry.from_torchlib(opset_version=20)
    assert (first.opset_version, other.opset_version) == (18, 20)
    assert first.functions == second.functions
    assert [meta.onnx_function for meta in first.functions["aten::relu"]]
    assert first.functions["aten::relu"][0] is second.functions["aten::relu"][0]
    first.register_op(torch.ops.aten.relu.default, lambda x: x)
    first.functions.pop("aten::exp")
    assert len(first.functions["aten::relu"]) == len(second.functions["aten::relu"]) + 1
    assert second.functions.keys() == ONNXRegistry.from_torchlib(opset_version=18).functions.keys()


def test_an_lstm_is_captured_for_any_number_of_steps(monkeypatch):
    steps = torch.export.Dim("steps", min=2, max=64)
    model, x = nn.LSTM(3, 4, batch_first=True).eval(), torch.ones(2, 5, 3)
    with silent(), torch.backends.mkldnn.flags(enabled=False), torch_private.lstm_in_one_piece():
        program = torch.export.export(model, (x,), dynamic_shapes=({1: steps},))
    assert program.module()(torch.ones(2, 7, 3))[0].shape == (2, 7, 4)
    monkeypatch.delattr(torch._decomp.decompositions, "select_one_layer_lstm_function")
    with torch_private.lstm_in_one_piece():
        assert not hasattr(torch._decomp.decompositions, "select_one_layer_lstm_function")


def test_options_that_this_torch_lacks_are_left_out(monkeypatch):
    seen = []
    monkeypatch.setattr(torch._inductor, "aot_compile", lambda *args, options: seen.append(options) or [])
    options = {"aot_inductor.package": True, "cpp.no_such_option": 1}
    assert torch_private.aot_compile(nn.Identity(), (), {}, options) == []
    assert seen == [{"aot_inductor.package": True}]


@pytest.mark.parametrize("before", [None, "0"])
def test_kernels_have_no_line_information_inside_and_what_the_user_wants_afterwards(monkeypatch, before):
    name = "TRITON_DISABLE_LINE_INFO"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with torch_private.without_line_info():
        assert os.environ[name] == "1"
    assert os.environ.get(name) == before
