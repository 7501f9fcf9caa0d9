"""Tests that every format must pass."""

import errno
import resource
from contextlib import contextmanager

import pytest
import torch
from exportable_models import EXPORTABLE, BatchLoop, Mlp, Replacement, exportable, floats, mlp_calls
from local_paths import found_paths
from spoiling import only_the_old_onnx_exporter
from tiny_models import enliven
from torch import nn

from exporters import Adapter, ExportError, ExportRequest, StructureError, exporter_named
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
def test_the_model_and_the_random_state_are_left_alone(format, tmp_path):
    model, calls = exportable("encoder")
    model.linear1.train()
    flags = [module.training for module in model.modules()]
    attributes = [dict(vars(module)) for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    exporter_named(format).export(ExportRequest(model, calls[:2]), tmp_path)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == flags
    for module, before in zip(model.modules(), attributes, strict=True):
        assert list(vars(module)) == list(before)
        assert all(value is before[name] for name, value in vars(module).items())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("format", FORMATS)
def test_a_loop_over_the_batch_is_refused_with_a_dynamic_batch(format, tmp_path, capfd):
    model = BatchLoop().eval()
    # A loop can be scripted, but a `forward` set on the instance can only be traced.
    vars(model)["forward"] = BatchLoop.forward.__get__(model)
    with pytest.raises(ExportError) as caught:
        exporter_named(format).export(ExportRequest(model, mlp_calls(2, 3)), tmp_path)
    sentence = str(caught.value)
    assert sentence.startswith(f"The model can't be exported to {format} (")
    # A capture reports the dim that it fixes, a trace reports the line where Python reads its size.
    assert "the model reads a size in Python at `" in sentence or "the model fixes dim 0 of input `x` to 2" in sentence
    assert "\n" not in sentence
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("format", FORMATS)
def test_a_loop_over_the_batch_goes_with_a_static_one(format, tmp_path):
    model = BatchLoop().eval()
    calls = (*mlp_calls(3), ((floats(3, 3, seed=9),), {}))
    artifact = exporter_named(format).export(ExportRequest(model, calls, dynamic_batch=False), tmp_path)
    assert artifact.inputs[0].shape == (3, 3)
    assert artifact.outputs[0].shape == (3, 4)
    assert close(artifact.load()(calls[1][0][0])[0], model(*calls[1][0]).detach())


@pytest.mark.parametrize("format", FORMATS)
def test_a_forward_on_the_instance_is_what_is_exported(format, tmp_path):
    model = enliven(Mlp()).eval()
    vars(model)["forward"] = Replacement(model)
    artifact = exporter_named(format).export(ExportRequest(model, mlp_calls(2, 3)), tmp_path)
    x = floats(4, 3)
    assert artifact.inputs[0].name == "x"
    assert close(artifact.load()(x)[0], model(x).detach())
    assert not close(artifact.load()(x)[0], Mlp.forward(model, x).detach())


@pytest.mark.parametrize("format", FORMATS)
def test_a_compiled_model_is_exported_as_it_was_before(format, tmp_path):
    model = enliven(Mlp()).eval()
    calls = 0

    def backend(graph, inputs):
        nonlocal calls
        calls += 1
        return graph

    model.compile(backend=backend)
    artifact = exporter_named(format).export(ExportRequest(model, mlp_calls(2, 3)), tmp_path)
    assert calls == 0
    x = floats(4, 3)
    assert close(artifact.load()(x)[0], model(x).detach())
    assert calls == 1


@pytest.mark.parametrize("format", FORMATS)
def test_an_fx_graph_module_is_exported(format, tmp_path):
    model, calls = exportable("conv_net")
    traced = torch.fx.symbolic_trace(model)
    artifact = exporter_named(format).export(ExportRequest(traced, calls[:2]), tmp_path)
    assert artifact.inputs[0].name == "image"
    x = floats(7, 3, 6, 6)
    assert close(artifact.load()(x)[0], model(x).detach())


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_in_training_mode_is_exported_in_it(format, tmp_path):
    model = exportable("conv_net")[0].train()
    calls = tuple(((floats(size, 3, 6, 6, seed=size),), {}) for size in (2, 3))
    before = model.bn.running_mean.clone()
    artifact = exporter_named(format).export(ExportRequest(model, calls), tmp_path)
    assert torch.equal(model.bn.running_mean, before)
    x = floats(4, 3, 6, 6)
    assert close(artifact.load()(x)[0], model(x).detach())


@pytest.mark.parametrize("format", FORMATS)
def test_files_hold_no_paths_of_this_machine(format, tmp_path):
    model, calls = exportable("keywords")
    artifact = exporter_named(format).export(ExportRequest(model, calls[:2]), tmp_path)
    assert not found_paths(artifact.path, tmp_path)


def test_the_old_exporter_leaves_no_paths_either(tmp_path, monkeypatch):
    only_the_old_onnx_exporter(monkeypatch)
    model, calls = exportable("keywords")
    artifact = exporter_named("onnx").export(ExportRequest(model, calls[:2]), tmp_path)
    assert artifact.route == "torchscript"
    assert not found_paths(artifact.path, tmp_path)


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
    (written,) = tmp_path.iterdir()
    before = written.read_bytes()
    with file_size_limit(20_000), pytest.raises(OSError, match=r"\[Errno") as caught:
        exporter_named(format).export(ExportRequest(model, calls), tmp_path)
    assert caught.value.errno in (errno.EFBIG, errno.EIO)
    assert list(tmp_path.iterdir()) == [written]
    assert written.read_bytes() == before


@pytest.mark.parametrize("format", FORMATS)
def test_a_folder_that_is_missing_is_an_os_error(format, tmp_path):
    with pytest.raises(FileNotFoundError):
        exporter_named(format).export(ExportRequest(Mlp().eval(), mlp_calls(2, 3)), tmp_path / "missing")


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
    class Counting(nn.Module):
        def forward(self, x):
            return x * 2, len(x)

    with pytest.raises(StructureError, match="output `1` was 2 when exported, but is 3 here"):
        exporter_named(format).export(ExportRequest(Counting(), mlp_calls(2, 3)), tmp_path)


@pytest.mark.parametrize("format", FORMATS)
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
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_precisions(format, dtype, tmp_path):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(floats(3))

        def forward(self, x):
            return x.float() * self.weight.float(), (x > 0), x

    model = Scale().to(dtype).eval()
    calls = tuple(((floats(size, 3).to(dtype),), {}) for size in (2, 3))
    artifact = exporter_named(format).export(ExportRequest(model, calls), tmp_path)
    x = floats(5, 3).to(dtype)
    outputs = artifact.load()(x)
    assert [output.dtype for output in outputs] == [torch.float32, torch.bool, dtype]
    assert all(close(a, b) for a, b in zip(model(x), outputs, strict=True))
