"""Profiles: operations with their modules, memory by module, ONNX nodes, and no trace of them on the model."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tiny_models import Net as OfFunction
from torch import nn
from torch.nn.modules import module as hooks_of_torch
from torch.utils.checkpoint import checkpoint

from exporters.onnx_session import _node_runs
from optimize_export.errors import BundleError, LoadError, UsageError
from optimizer import Profile, export, optimize, profile
from optimizer.command import cli
from optimizer.command.tables import as_text
from optimizer.profiling import ModuleBytes, Operation
from optimizer.profiling.operations import Spent, one_path, operations_of


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.narrow = nn.Linear(8, width)
        self.wide = nn.Linear(width, 8)

    def forward(self, x):
        return x + self.wide(self.narrow(x).relu())


class Net(nn.Module):
    """Equal blocks, and one layer that takes most of the time."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(16) for _ in range(4)))
        self.slow = nn.Linear(8, 1024)
        self.head = nn.Linear(1024, 1024)

    def forward(self, x):
        return self.head(self.slow(self.blocks(x)))


def checkpointed(inner):
    return OfFunction(lambda self, x: checkpoint(self.inner, x, use_reentrant=False), inner=inner)


X = torch.randn(64, 8)
ROOT = Path(cli.__file__).parent.parent.parent


def place(found: Profile, name: str, where: str) -> Operation:
    (operation,) = [each for each in found.operations if (each.name, each.where) == (name, where)]
    return operation


def test_the_slow_layer_comes_first_and_equal_blocks_are_one_row():
    found = profile(Net(), example_inputs=(X,))
    first = found.operations[0]
    assert (first.name, first.where, first.calls) == ("aten::linear", "head", 1)
    narrow = place(found, "aten::linear", "blocks.{0..3}.narrow")
    assert narrow.modules == tuple(f"blocks.{number}.narrow" for number in range(4))
    assert narrow.calls == 4
    # Operations of a parent belong to it and not to the child that ran before.
    assert place(found, "aten::add", "blocks.{0..3}").calls == 4
    assert {each.name for each in found.operations} == {"aten::linear", "aten::relu", "aten::add"}
    assert [each.seconds for each in found.operations] == sorted(
        (each.seconds for each in found.operations), reverse=True
    )
    assert first.share < sum(each.share for each in found.operations) <= 1
    assert first.share == first.seconds / found.seconds
    assert found.peak_memory is None


def test_the_operations_inside_an_operation_belong_to_it():
    found = profile(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), example_inputs=(torch.randn(1, 3, 8, 8),))
    assert {(each.name, each.where) for each in found.operations} == {("aten::conv2d", "0"), ("aten::batch_norm", "1")}


def test_equal_operations_of_other_shapes_are_other_rows():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    found = profile(model, example_inputs=(X,))
    assert {each.where for each in found.operations} == {"{0,1}", "2"}


def test_operations_of_the_model_itself_and_of_the_backward_pass():
    root = OfFunction(lambda self, x: self.fc(x).sigmoid(), fc=nn.Linear(8, 8))
    found = profile(root, example_inputs=(X,), mode="training")
    assert place(found, "aten::sigmoid", "the model itself").modules == ("",)
    assert place(found, "SigmoidBackward0", "the model itself").calls == 1
    assert place(found, "AddmmBackward0", "fc").calls == 1
    # The loss isn't the model's.
    assert place(found, "aten::mean", "outside of the model").modules == ()
    assert found.mode == "training"


def test_recomputed_operations_belong_to_their_modules():
    found = profile(checkpointed(nn.Sequential(nn.Linear(8, 16), nn.Tanh())), example_inputs=(X,), mode="training")
    assert place(found, "aten::linear", "inner.0").calls == 2
    assert place(found, "TanhBackward0", "inner.1").calls == 1


def test_nothing_remains_on_the_model():
    model = Net().train()
    model.blocks.register_forward_hook(lambda *_: None)
    before = [dict(vars(module)) for module in model.modules()]
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.head(model.slow(X)).sum().backward()
    gradients = {
        name: (each.grad, each.grad.clone()) for name, each in model.named_parameters() if each.grad is not None
    }
    random = torch.get_rng_state()
    for mode in ("inference", "training"):
        profile(model, example_inputs=(X,), mode=mode)
    assert [dict(vars(module)) for module in model.modules()] == before
    assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()] == hooks
    assert not hooks_of_torch._global_forward_hooks
    assert not hooks_of_torch._global_forward_pre_hooks
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        own, values = gradients.get(name, (None, None))
        assert parameter.grad is own
        assert own is None or torch.equal(own, values)
    assert torch.equal(torch.get_rng_state(), random)


def test_traces_and_data_are_json(tmp_path):
    folder = tmp_path / "new" / "profile"
    found = profile(Net(), example_inputs=(X,), directory=folder)
    assert sorted(path.name for path in folder.iterdir()) == ["model.trace.json", "profile.json"]
    assert json.loads((folder / "profile.json").read_text()) == found.to_json()
    trace = json.loads((folder / "model.trace.json").read_text())
    assert {"module blocks.0.narrow", "module head"} <= {event["name"] for event in trace["traceEvents"]}
    lines = str(found).splitlines()
    assert lines[0].startswith("profile: ")
    assert any("aten::linear" in line and "blocks.{0..3}.narrow" in line for line in lines)


def test_a_folder_that_exists_or_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(UsageError, match="already exists: choose a new folder for the profile"):
        profile(Net(), example_inputs=(X,), directory=tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match="couldn't be written"):
        profile(Net(), example_inputs=(X,), directory=tmp_path / "file" / "profile")
    (tmp_path / "file").unlink()
    # An export does so before it starts.
    with pytest.raises(UsageError, match="already exists: choose a new folder for the profile"):
        export(Net(), example_inputs=(X,), output=tmp_path / "net", profile_dir=tmp_path, progress=pytest.fail)
    with pytest.raises(UsageError, match="which has other files"):
        export(Net(), example_inputs=(X,), output=tmp_path / "net", profile_dir=tmp_path / "net" / "profile")
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_refused():
    with pytest.raises(UsageError, match="needs example_inputs"):
        profile(Net())
    with pytest.raises(UsageError, match="mode must be"):
        profile(Net(), example_inputs=(X,), mode="eval")
    with pytest.raises(UsageError, match="none of its outputs needs a gradient"):
        profile(nn.Flatten(), example_inputs=(X,), mode="training")


def test_another_profiler_goes_on():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as own:
        with pytest.raises(UsageError, match="Another profiler is running"):
            profile(Net(), example_inputs=(X,))
        torch.ones(3).sigmoid()
    assert "aten::sigmoid" in {event.name for event in own.events()}


@pytest.mark.parametrize("error", [ValueError("no such\nthing"), FileNotFoundError("no such file")])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_model_that_raises(mode, error, tmp_path):
    def fail(self, x):
        self.fc(x)
        raise error

    model = OfFunction(fail, fc=nn.Linear(8, 8))
    with pytest.raises(LoadError, match=r"^The model raises on the example inputs: \w+: no such( file)?\.$"):
        profile(model, example_inputs=(X,), mode=mode, directory=tmp_path / "profile")
    assert not (tmp_path / "profile").exists()
    assert "forward" not in vars(model.fc)
    assert not torch.autograd._profiler_enabled()


def test_a_thread_that_uses_the_model_is_neither_disturbed_nor_counted():
    model, stop, failed = Net().eval(), threading.Event(), []
    with torch.no_grad():
        expected = model(X)

    def use():
        while not stop.is_set():
            with torch.no_grad():
                if not torch.equal(model(X), expected):
                    failed.append("other values")

    thread = threading.Thread(target=use)
    thread.start()
    try:
        found = [profile(model, example_inputs=(X,)) for _ in range(3)]
    finally:
        stop.set()
        thread.join()
    assert failed == []
    assert all(place(each, "aten::linear", "head").calls == 1 for each in found)


def test_the_exact_bytes_at_the_peak_of_a_training_step():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    rows = 1024
    memory = profile(model, example_inputs=(torch.randn(rows, 8),), mode="training").peak_memory
    # The peak is in the backward pass of the ReLU, which reads its result, the same storage that the last layer saved too.
    # Next to it are the gradients of its result and of its input, the gradients of the last layer's parameters, the
    # loss, and the gradient that the backward pass starts from. The last layer has released what it saved.
    hidden = 4 * rows * 16
    assert memory.modules == (ModuleBytes("1", hidden),)
    assert memory.outside == 2 * hidden + 4 * (16 * 4 + 4) + 2 * 4
    assert memory.bytes == hidden + memory.outside


def test_bytes_belong_to_the_innermost_module_that_made_them_and_inputs_and_parameters_to_none():
    def run(self, x):
        # `exp` is the forward's own, and its result is saved and then kept by the attribute.
        self.kept = self.act(self.first(x)).exp()
        return [self.kept.sum()]

    outer, rows = OfFunction(run, first=nn.Linear(8, 8, bias=False), act=nn.Sigmoid()), 1024
    memory = profile(outer, example_inputs=(torch.randn(rows, 8),), mode="training").peak_memory
    held = {each.module: each.bytes for each in memory.modules}
    assert held == {"act": 4 * 8 * rows, "": 4 * 8 * rows}
    assert memory.bytes == sum(held.values()) + memory.outside


def test_checkpoints_lower_the_peak():
    x = torch.randn(1024, 8)
    inner = nn.Sequential(*(nn.Sequential(*(nn.Sigmoid() for _ in range(4))) for _ in range(4)))
    plain = profile(nn.Sequential(nn.Linear(8, 8), inner), example_inputs=(x,), mode="training").peak_memory
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*map(checkpointed, inner)))
    parts = profile(model, example_inputs=(x,), mode="training").peak_memory
    # Both peaks are in the backward pass of the loss: 16 results there, here the inputs of four parts and the output.
    assert plain.bytes - parts.bytes == 11 * x.nbytes
    assert [each.module for each in parts.modules] == ["0", *(f"1.{part}.inner.3" for part in range(4))]


def test_functional_gradients_are_profiled():
    def gradients(self, x):
        return torch.func.vmap(torch.func.grad(lambda row: self.fc(row).sum()))(x) * self.fc.bias

    assert (
        profile(OfFunction(gradients, fc=nn.Linear(8, 1)), example_inputs=(X,), mode="training").peak_memory.bytes > 0
    )


def test_a_result_with_folded_layers_is_profiled():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(x,))
    names = {each.name for each in profile(fast, example_inputs=(x,)).operations}
    assert "aten::conv2d" in names
    assert "aten::batch_norm" not in names


@pytest.mark.parametrize("wrapped", [False, True])
def test_compiled_code_runs_compiled(wrapped):
    inner, graphs = Block(16), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    if wrapped:
        inner = torch.compile(inner, backend=backend)
    else:
        inner.compile(backend=backend)
    model = nn.Sequential(inner, nn.Linear(8, 4)).eval()
    found = profile(model, example_inputs=(X,))
    # It isn't compiled again because of the profile.
    assert len(graphs) == 1
    # No call of the layers can be seen, so their operations belong to the module around them.
    assert place(found, "aten::relu", "the model itself").calls == 1
    assert place(found, "aten::linear", "1").calls == 1
    assert "Torch-Compiled Region" not in str(found)


def test_paths_that_differ_in_numbers():
    assert one_path(["layer1.0.conv2"]) == "layer1.0.conv2"
    assert one_path(["layer1.0.conv2", "layer1.1.conv2", "layer1.2.conv2", "layer1.10.conv2"]) == (
        "layer1.{0..2,10}.conv2"
    )
    assert one_path([f"a.{number}.b" for number in range(0, 20, 2)]) == "a.*.b"
    assert one_path([""]) == "the model itself"


def test_modules_of_other_names_and_operations_outside_are_other_rows():
    spent = {
        ("f", "a.0"): Spent(2, 2.0),
        ("f", "a.1"): Spent(2, 4.0),
        ("f", "b.0"): Spent(2, 1.0),
        ("f", None): Spent(2, 0.5),
        ("f", ""): Spent(2, 0.25),
    }
    found = operations_of(spent, seconds=4.0, runs=2)
    assert [(each.where, each.calls, each.seconds, each.share) for each in found] == [
        ("a.{0,1}", 2, 3.0, 0.75),
        ("b.0", 1, 0.5, 0.125),
        ("outside of the model", 1, 0.25, 0.0625),
        ("the model itself", 1, 0.125, 0.03125),
    ]


@pytest.mark.parametrize("where", ["there", "dist/net/profile", "dist/net", "debug/profile"])
def test_the_command_refuses_a_folder_that_has_other_files(where, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "model.py").touch()
    code = cli.main(["model.py", "--output", "dist/net", "--debug-dir", "debug", "--profile-dir", where])
    told = capsys.readouterr()
    assert code == 2
    assert told.out == ""
    (line,) = [line for line in told.err.splitlines() if "error" in line]
    assert line.startswith(f"optimize-export: error: {where} ")


@pytest.mark.slow
def test_the_command_profiles_during_the_export(tmp_path):
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\nnorm = nn.BatchNorm2d(4)\n"
        "model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()\n"
        "example_inputs = (torch.randn(2, 3, 8, 8),)\n"
    )
    arguments = ["profile", "model.py", "--formats", "onnx", "--device", "cpu", "--json"]
    told = subprocess.run(
        [sys.executable, "-m", "optimizer", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    document = json.loads(told.stdout, parse_constant=pytest.fail)
    found, folder = document["profile"], tmp_path / "profile" / "model"
    assert list(found) == ["original", "optimized", "onnx"]
    assert {path.name for path in folder.iterdir()} == {"profile.json", *(f"{name}.trace.json" for name in found)}
    assert json.loads((folder / "profile.json").read_text()) == found
    assert all(json.loads((folder / f"{name}.trace.json").read_text()) for name in found)
    original, optimized, nodes = ({each["name"]: each for each in part["operations"]} for part in found.values())
    assert "aten::batch_norm" in original.keys() - optimized.keys()
    assert (nodes["Gemm"]["calls"], nodes["Gemm"]["modules"]) == (1, ["node_linear"])
    assert sum(each["seconds"] for each in nodes.values()) <= found["onnx"]["seconds"]
    shown = as_text({"profile": found}, terminal=False)
    assert all(part in shown for part in ("of the original: ", "of the optimized model: ", "node_linear"))
    assert "profile" in {each["stage"] for each in document["stages"]}
    report = json.loads((tmp_path / "dist" / "model" / "report.json").read_text())
    assert report["profile"] == document["profile"]
    # Only the program's own lines, and none of the profiler's.
    assert all(line.startswith("optimize-export: ") for line in told.stderr.splitlines())
    assert document["ok"]


def test_a_node_with_a_subgraph_has_its_time_without_the_nodes_inside():
    def event(name, start, duration):
        return {"name": f"{name}_kernel_time", "ts": start, "dur": duration, "args": {"op_name": "Op"}}

    events = [event("inner", 12, 3), event("other", 15, 4), event("loop", 10, 10), event("next", 20, 5)]
    runs = {run.name: run.seconds for run in _node_runs(events)}
    assert runs == {"inner": 3e-6, "other": 4e-6, "loop": 3e-6, "next": 5e-6}
