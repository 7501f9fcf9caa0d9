"""Tests that every format must pass."""

import errno
import resource
import subprocess
import sys
from contextlib import contextmanager

import onnx
import pytest
import torch
from exportable_models import EXPORTABLE, Mlp, Of, Replacement, exportable, floats, mlp_calls
from local_paths import found_paths
from spoiling import only_the_old_onnx_exporter
from torch import nn

from exporters import Adapter, ExportRequest, StructureError, exporter_named
from exporters.isolation import torchscript_allowed

FORMATS = ("torchscript", "onnx", "pt2")


def close(left, right):
    return left.shape == right.shape and left.dtype == right.dtype and torch.allclose(left, right, rtol=1e-4, atol=1e-5)


@contextmanager
def file_size_limit(size):
    """In the block, writing more than `size` bytes to a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", EXPORTABLE)
def test_the_file_computes_what_the_model_computes(name, format, tmp_path, capfd):
    model, calls = exportable(name)
    artifact = exporter_named(format).export(ExportRequest(model, calls), tmp_path)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == [artifact.path]
    adapter = Adapter(model, *calls[0])
    assert tuple(spec.name for spec in artifact.inputs) == adapter.input_names
    assert tuple(spec.name for spec in artifact.outputs) == adapter.output_names
    loaded = artifact.load()
    for args, kwargs in (*calls, exportable(name, (7,))[1][0]):
        inputs = adapter.flatten_inputs(args, kwargs)
        outputs = loaded(*inputs)
        assert isinstance(outputs, tuple)
        assert all(close(a, b) for a, b in zip(adapter.run(inputs), outputs, strict=True))


@pytest.mark.parametrize("format", FORMATS)
def test_the_model_and_the_random_state_are_left_alone_and_the_file_holds_no_paths(format, tmp_path):
    model, calls = exportable("encoder")
    model.linear1.train()
    flags = [module.training for module in model.modules()]
    attributes = [dict(vars(module)) for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    artifact = exporter_named(format).export(ExportRequest(model, calls[:2]), tmp_path)
    assert not found_paths(artifact.path, tmp_path)
    if format == "onnx":
        nodes = onnx.load(artifact.path).graph.node
        assert len({node.name for node in nodes}) == len(nodes)
        assert not any(node.doc_string or node.metadata_props or not node.name for node in nodes)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == flags
    for module, before in zip(model.modules(), attributes, strict=True):
        assert list(vars(module)) == list(before)
        assert all(value is before[name] for name, value in vars(module).items())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def with_a_forward_on_the_instance(model):
    vars(model)["forward"] = Replacement(model)
    return model


def compiled(model):
    model.compiled_graphs = []

    def backend(graph, inputs):
        model.compiled_graphs.append(graph)
        return graph

    model.compile(backend=backend)
    return model


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("mlp", with_a_forward_on_the_instance),
        ("mlp", compiled),
        ("conv_net", lambda model: torch.fx.symbolic_trace(model).train()),
    ],
    ids=["forward", "compiled", "fx in training"],
)
def test_the_model_is_exported_as_it_computes_now(format, name, changed, tmp_path):
    model, calls = exportable(name)
    model = changed(model)
    calls, other = tuple(call for call in calls if len(call[0][0]) > 1), floats(4, *calls[0][0][0].shape[1:], seed=9)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    artifact = exporter_named(format).export(ExportRequest(model, calls), tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert artifact.inputs[0].name == {"mlp": "x", "conv_net": "image"}[name]
    assert not getattr(model, "compiled_graphs", [])
    assert close(artifact.load()(other)[0], model(other).detach())
    assert changed is not compiled or len(model.compiled_graphs) == 1
    if changed is with_a_forward_on_the_instance:
        assert not close(artifact.load()(other)[0], Mlp.forward(model, other).detach())


def test_files_of_the_old_onnx_exporter_hold_no_paths(tmp_path, monkeypatch):
    only_the_old_onnx_exporter(monkeypatch)
    model, calls = exportable("keywords")
    artifact = exporter_named("onnx").export(ExportRequest(model, calls[:2]), tmp_path)
    assert artifact.route == "torchscript"
    assert not found_paths(artifact.path, tmp_path)


# The classes of a TorchScript file have a number of the process in their names.
@pytest.mark.parametrize("format", ["pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_a_second_export_writes_the_same_bytes(format, tmp_path):
    model, calls = exportable("encoder")
    first, second = (
        exporter_named(format).export(ExportRequest(model, calls), tmp_path).path.read_bytes() for _ in "ab"
    )
    assert first == second


_PLAIN = """
import sys, torch
module = torch.export.load(sys.argv[1]).module() if sys.argv[1].endswith("pt2") else torch.jit.load(sys.argv[1])
for size in (1, 7):
    print(tuple(module(torch.ones(size, 3)).shape))
assert not {"exporters", "optimize_export", "optimizer", "passes"} & set(sys.modules)
"""


@pytest.mark.parametrize("format", ["torchscript", pytest.param("pt2", marks=pytest.mark.slow)])
def test_a_process_that_knows_nothing_of_this_project_loads_it(format, tmp_path):
    artifact = exporter_named(format).export(ExportRequest(Mlp().eval(), mlp_calls(2, 3)), tmp_path)
    command = [sys.executable, "-I", "-c", _PLAIN, str(artifact.path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "(1, 4)\n(7, 4)\n"


def test_the_search_for_paths_finds_them(tmp_path):
    model, calls = exportable("mlp")
    with torchscript_allowed():
        torch.jit.save(torch.jit.trace(model, calls[0][0]), str(tmp_path / "raw.pt"))
    assert found_paths(tmp_path / "raw.pt", tmp_path)


@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_is_no_refusal_and_leaves_nothing(format, tmp_path):
    model = nn.Linear(300, 300)
    calls = tuple(((floats(size, 300),), {}) for size in (2, 3))
    # The first export imports modules, which may write files too, so it runs without the limit.
    exporter_named(format).export(ExportRequest(Mlp().eval(), mlp_calls(2, 3)), tmp_path)
    with pytest.raises(FileNotFoundError):
        exporter_named(format).export(ExportRequest(Mlp().eval(), mlp_calls(2, 3)), tmp_path / "missing")
    (written,) = tmp_path.iterdir()
    before = written.read_bytes()
    with file_size_limit(20_000), pytest.raises(OSError, match=r"\[Errno") as caught:
        exporter_named(format).export(ExportRequest(model, calls), tmp_path)
    assert caught.value.errno in (errno.EFBIG, errno.EIO)
    assert list(tmp_path.iterdir()) == [written]
    assert written.read_bytes() == before


@pytest.mark.parametrize("format", FORMATS)
def test_an_interrupt_passes_and_leaves_nothing(format, tmp_path):
    class Interrupted(Mlp):
        left = 5

        def forward(self, x):
            Interrupted.left -= 1
            if Interrupted.left == 0:  # after the runs for the expected outputs, while the graph is recorded
                raise KeyboardInterrupt
            return super().forward(x)

    with pytest.raises(KeyboardInterrupt):
        exporter_named(format).export(ExportRequest(Interrupted().eval(), mlp_calls(2, 3)), tmp_path)
    assert Interrupted.left == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", FORMATS)
def test_what_no_file_can_hold_is_said_before_any_route(format, tmp_path):
    with pytest.raises(StructureError, match="output `1` was 2 when exported, but is 3 here"):
        exporter_named(format).export(ExportRequest(Of(lambda x: (x * 2, len(x))), mlp_calls(2, 3)), tmp_path)


@pytest.mark.parametrize("format", ["torchscript", "pt2"])
def test_the_length_of_a_tensor_is_a_size(format, tmp_path):
    class Lengths(nn.Module):
        def forward(self, x):
            places = torch.arange(len(x)).unsqueeze(1) / len(x)
            return x.reshape(len(x), -1) + places, torch.zeros(len(x), len(x))

    artifact = exporter_named(format).export(ExportRequest(Lengths().eval(), mlp_calls(2, 3, 5)), tmp_path)
    for rows in (1, 2, 7):
        x = floats(rows, 3)
        assert all(close(a, b) for a, b in zip(Lengths()(x), artifact.load()(x), strict=True))
    assert type(len(x)) is int


@pytest.mark.parametrize("format", FORMATS)
def test_other_precisions(format, tmp_path):
    dtypes = (torch.float64, torch.float16, torch.bfloat16)

    class Scale(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.weight = nn.Parameter(floats(3).to(dtype))

        def forward(self, x):
            return x.float() * self.weight.float(), (x > 0), x

    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.each = nn.ModuleList(map(Scale, dtypes))

        def forward(self, *inputs):
            return [output for scale, x in zip(self.each, inputs, strict=True) for output in scale(x)]

    def inputs(size):
        return tuple(floats(size, 3).to(dtype) for dtype in dtypes)

    model = Scales().eval()
    artifact = exporter_named(format).export(
        ExportRequest(model, tuple((inputs(size), {}) for size in (2, 3))), tmp_path
    )
    outputs = artifact.load()(*inputs(5))
    assert [output.dtype for output in outputs] == [
        kind for each in dtypes for kind in (torch.float32, torch.bool, each)
    ]
    assert all(close(a, b) for a, b in zip(model(*inputs(5)), outputs, strict=True))
