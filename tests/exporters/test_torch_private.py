"""The private names of torch that the exporters use exist, and work as expected."""

import os

import pytest
import torch
import torch._inductor
from torch import nn

from exporters import torch_private


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
