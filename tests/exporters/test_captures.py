"""One capture by torch.export serves all formats of an export."""

import pytest
import torch
from exportable_models import BatchLoop, floats, mlp_calls
from tiny_models import enliven
from torch import nn
from torch.export.passes import move_to_device_pass

from exporters import ExportRequest, RouteRefused
from exporters.aoti import missing_compiler
from exporters.evidence import gather
from exporters.exported_program import captured, shared_program, take_guards
from optimizer import export


class Sized(nn.Module):
    """Reads a size in Python, so a trace needs the guards of a capture, which say for which sizes it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 3)

    def forward(self, input):
        rows = input.shape[0]
        return self.linear(input.reshape(rows, -1)) / max(rows, 1)


class Branching(Sized):
    def forward(self, input):
        out = super().forward(input)
        return out if input.shape[0] < 100 else out.relu()


@pytest.fixture
def captures(monkeypatch):
    """The `strict` argument of each call of torch.export.export."""
    real, calls = torch.export.export, []

    def counted(*args, **options):
        calls.append(options["strict"])
        return real(*args, **options)

    monkeypatch.setattr(torch.export, "export", counted)
    return calls


# `test_aoti_compile.py` has the capture that a compiled file shares.
COMPILED = [pytest.mark.zoo, pytest.mark.skipif(missing_compiler() is not None, reason="needs a C++ compiler")]
ROUTES = {"onnx": "dynamo", "pt2": "export", "torchscript": "trace", "aoti": "aotinductor"}


@pytest.mark.parametrize(
    "formats",
    [
        ["onnx", "pt2", "torchscript"],
        pytest.param(["aoti", "onnx", "torchscript", "pt2"], marks=COMPILED),
        pytest.param(["torchscript", "onnx", "pt2", "aoti"], marks=COMPILED),
    ],
)
def test_an_export_to_several_formats_captures_once_whatever_their_order(formats, captures, tmp_path):
    bundle = export(enliven(Sized()), example_inputs=floats(4, 3, 4), output=tmp_path / "net", formats=formats)
    assert captures == [False]
    assert {artifact.format: artifact.route for artifact in bundle.artifacts} == {
        name: ROUTES[name] for name in formats
    }
    outputs = [artifact.load()(floats(7, 3, 4))[0] for artifact in bundle.artifacts]
    assert all(torch.allclose(outputs[0], other, atol=1e-5) for other in outputs)


def test_a_capture_that_was_refused_is_not_tried_again(captures):
    evidence = gather(ExportRequest(BatchLoop().eval(), mlp_calls(2, 3)))
    sentences = []
    for strict in (False, True, False, True):
        with pytest.raises(RouteRefused, match="the model fixes dim 0 of input `x` to 2") as caught:
            captured(evidence, strict=strict)
        assert caught.value.size == "batch"
        sentences.append(str(caught.value))
    assert sorted(captures) == [False, True]
    assert sentences[:2] == sentences[2:]


def test_what_an_exporter_does_to_its_program_stays_there():
    model = enliven(Branching()).eval()
    evidence = gather(ExportRequest(model, tuple(((floats(rows, 3, 4),), {}) for rows in (2, 3))))
    shared = shared_program(evidence)
    before = list(shared._guards_code), dict(shared.range_constraints), shared.graph_module.code
    own, _ = captured(evidence, strict=False)
    assert [node.name for node in own.graph.nodes] == [node.name for node in shared.graph.nodes]
    assert not any("stack_trace" in node.meta for node in own.graph.nodes)
    assert take_guards(own)
    next(node for node in own.graph.nodes if node.op == "call_function").target = torch.ops.aten.neg.default
    # A program for a GPU is moved like this before it is saved.
    move_to_device_pass(own, "meta")
    assert (shared._guards_code, shared.range_constraints, shared.graph_module.code) == before
    assert any("stack_trace" in node.meta for node in shared.graph.nodes)
    held = (*shared.state_dict.values(), *(each.meta["val"] for each in shared.graph.nodes if each.op == "placeholder"))
    assert {tensor.device.type for tensor in held} == {"cpu"}
    weights = {tensor.data_ptr() for tensor in model.parameters()}
    assert {tensor.data_ptr() for tensor in captured(evidence, strict=False)[0].state_dict.values()} == weights


class KeepingARow(nn.Module):
    """Writes a row of its input into a buffer, and reads it in the same call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("row", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.row.copy_(x[0])
        return self.linear(x + self.row)


@pytest.mark.parametrize("formats", [["torchscript", "pt2"], ["pt2", "torchscript"]])
def test_no_file_holds_what_a_proof_wrote_into_a_buffer(formats, tmp_path):
    export(enliven(KeepingARow()).eval(), example_inputs=floats(4, 4), output=tmp_path / "net", formats=formats)
    program = torch.export.load(tmp_path / "net" / "model.pt2")
    (held,) = (tensor for name, tensor in {**program.state_dict, **program.constants}.items() if name.endswith("row"))
    assert not held.any()


def test_a_strict_capture_keeps_no_addresses_of_memory():
    class Counting(Sized):
        def forward(self, input):
            return self.linear(input.flatten(1)) / len(input)

    calls = tuple(((floats(rows, 3, 4),), {}) for rows in (2, 3))
    evidence = gather(ExportRequest(enliven(Counting()).eval(), calls))
    program, _ = captured(evidence, strict=True)
    stacks = [node.meta["nn_module_stack"] for node in program.graph.nodes if "nn_module_stack" in node.meta]
    assert stacks
    assert not any(key.isdigit() for stack in stacks for key in stack)
