"""Run every example as its first lines say."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import passes
from optimizer import TrainingTuning, optimize
from optimizer.training import Candidate, Setup
from optimizer.tuning import Latency

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(*command: str, cwd: Path, warnings: str = "ignore") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": warnings, "COLUMNS": "200"}
    # The number of threads decides which kernels the CPU uses, and so which conversions pay.
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False
    )


def test_every_example_is_run_by_a_test():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "fold_layer_norm.py",
        "gelu_by_tanh.py",
        "own_metric.py",
        "python_api.py",
        "resnet.py",
        "train.py",
        "train_fsdp2.py",
        "train_tuned.py",
        "tune_training.py",
    }


@pytest.mark.slow
def test_python_api(tmp_path):
    done = run(str(EXAMPLES / "python_api.py"), str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fold-conv-bn: blocks.1.norm: folded into blocks.1.conv" in done.stdout
    assert "model.onnx by dynamo: {'image': ('batch', 3, 32, 32)" in done.stdout
    assert "verified on cpu" in done.stdout
    assert (tmp_path / "net" / "manifest.json").is_file()


@pytest.mark.zoo
def test_a_tuned_training_step(tmp_path):
    done = run(str(EXAMPLES / "tune_training.py"), str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "recommended: " in done.stdout
    assert "optimizer.zero_grad()" in done.stdout
    assert re.search(r"loss after one epoch: \d\.\d{4}$", done.stdout.rstrip())
    assert {each.name for each in (tmp_path / "tuned").iterdir()} == {"report.html", "training.json", "training.toml"}


@pytest.mark.parametrize("name", ["fold_layer_norm.py", "gelu_by_tanh.py"])
def test_passes_of_ones_own_import_public_names_alone(name):
    tree = ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    homes = {
        node.module
        for node in imports
        if node.module.split(".")[0] in ("passes", "optimizer", "exporters", "optimize_export")
    }
    assert homes == {"passes", "optimize_export"}
    names = {alias.name for node in imports if node.module == "passes" for alias in node.names}
    assert names <= set(passes.__all__)


@pytest.mark.slow
def test_a_pass_that_approximates(tmp_path):
    done = run(str(EXAMPLES / "gelu_by_tanh.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gelu-by-tanh  applied" in done.stdout
    assert re.search(r"gelu-by-tanh: largest error [\d.]+e-0[45] of 2e-03 that are declared", done.stdout), done.stdout
    assert "  3: GELU by tanh" in done.stdout.splitlines()


@pytest.mark.slow
def test_a_pass_with_new_parameters(tmp_path):
    done = run(str(EXAMPLES / "fold_layer_norm.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fold-layer-norm  applied" in done.stdout
    assert "  norm: folded into fc1" in done.stdout.splitlines()
    differences = [float(text) for text in re.findall(r"differ by ([\d.e+-]+)", done.stdout)]
    assert len(differences) == 2
    assert max(differences) < 1e-5


@pytest.mark.slow
def test_an_export_within_a_drop_of_ones_own_metric(tmp_path):
    example = str(EXAMPLES / "own_metric.py")
    command = [
        "-m",
        "optimizer",
        example,
        "--formats",
        "onnx",
        "--accuracy",
        "drop<=1%",
        "--tune-seconds",
        "12",
        "--json",
    ]
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["benchmark"]["figures"]
    metrics = [each["accuracy"]["metric"] for each in figures if each["accuracy"]]
    assert "within" in {metric["verdict"] for metric in metrics}
    assert all(0.9 < metric["score"] < 1 for metric in metrics)


def _example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_a_mistake_in_a_pass_that_approximates_is_found():
    """The pass is wrong by 1 %, and declares at most 0.2 %."""
    example = _example("gelu_by_tanh")

    class Wrong(example.GeluByTanh):
        def rewrite(self, graph, context):
            for node in graph.calls("gelu"):
                with graph.change(node, "GELU by tanh"):
                    new = graph.call(node, torch.nn.functional.gelu, (node.args[0],), {"approximate": "tanh"})
                    graph.replace_call(node, torch.mul, (new, 1.01))

    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).eval()
    (record,) = optimize(model, [Wrong()], example_inputs=(torch.randn(8, 16),)).report.passes
    assert record.status == "rolled-back"


def test_a_mistake_in_a_pass_with_new_parameters_is_found(monkeypatch):
    example = _example("fold_layer_norm")
    right = example.scaled_weight
    monkeypatch.setattr(example, "scaled_weight", lambda weight, scale: right(weight, scale) * 1.01)
    (record,) = optimize(
        example.Block().eval(), [example.FoldLayerNorm()], example_inputs=(torch.randn(2, 5, 32),)
    ).report.passes
    assert record.status == "rolled-back"


def trained(done, name):
    """For one model: its plan, the peaks (MiB) and the losses of the two runs, and the largest difference of losses."""
    assert done.returncode == 0, done.stderr
    assert "a different path" not in done.stderr, "the plan wasn't kept to"
    lines = done.stdout.splitlines()
    (first,) = [number for number, line in enumerate(lines) if line.startswith(f"{name}: ")]
    sentence, *ways, last = lines[first : first + 4]
    peaks = [float(re.search(r"peak ([\d.]+) MiB", way)[1]) for way in ways]
    losses = [way.partition("losses ")[2].split() for way in ways]
    return sentence, peaks, losses, float(last.partition("loss: ")[2])


def assert_trains_alike(done, name, steps):
    sentence, peaks, losses, difference = trained(done, name)
    assert "trains in" in sentence
    assert peaks[1] <= 0.5 * peaks[0] + 0.1
    assert difference == 0
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == steps


@pytest.mark.zoo
def test_training_in_half_of_the_memory(tmp_path):
    done = run(str(EXAMPLES / "train.py"), "--model", "resnet", "--steps", "2", "--batch", "4", cwd=tmp_path)
    assert_trains_alike(done, "resnet", 2)


@pytest.mark.zoo
def test_training_in_two_processes(tmp_path):
    launched = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLES / "train.py"))
    options = ("--model", "gpt2", "--precision", "fp16", "--steps", "2", "--batch", "4")
    done = run(*launched, *options, cwd=tmp_path)
    assert_trains_alike(done, "gpt2", 2)
    assert done.stdout.count("gpt2: ") == 1, "each process prints"


@pytest.mark.zoo
def test_sharded_training_in_half_of_the_memory(tmp_path):
    launched = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLES / "train_fsdp2.py"))
    done = run(*launched, "--steps=2", "--batch=4", "--checkpoint=gpt2.pt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan, *losses = done.stdout.splitlines()
    share = float(re.search(r"trains in [\d.]+ MiB of [\d.]+ MiB \(([\d.]+) %", plan)[1])
    assert share <= 50
    before, after = (re.findall(r"\d\.\d+", line) for line in losses)
    assert before == after
    assert len(set(before)) == 2
    assert torch.load(tmp_path / "gpt2.pt")["transformer.h.3.mlp.c_fc.weight"].shape == (128, 512)


def trained_as_tuned(cwd, *options, ranks):
    """The losses of all rows, which are equal on all ranks, and the norms of the trained weights and the peaks."""
    launched = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
    done = run(*launched, str(EXAMPLES / "train_tuned.py"), "--steps=3", *options, cwd=cwd, warnings="default")
    assert done.returncode == 0, done.stderr
    assert "Grad strides do not match" not in done.stderr
    found = re.findall(r"^rank \d: losses (.*)  norm of the weights (.*)\n .*  peak ([\d.]+) MiB", done.stdout, re.M)
    assert len(found) == ranks, done.stdout
    assert len(set(found)) == 1, "the ranks trained differently"
    assert done.stdout.count("strides of gradients: those of the parameters") == ranks
    assert "\nall ranks: " in done.stdout
    losses, norm, peak = found[0]
    return [float(loss) for loss in losses.split()], float(norm), float(peak)


@pytest.mark.zoo
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])
def test_two_ranks_train_as_one_does_with_what_rank_0_tuned(device, tmp_path, monkeypatch):
    """The run of one process reads what rank 0 wrote, and has the rows of both ranks."""
    if device == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    losses, norm, _ = trained_as_tuned(tmp_path, "--tune-seconds=3", ranks=2)
    assert {each.name for each in (tmp_path / "tuned").iterdir()} == {"report.html", "training.json", "training.toml"}
    tuned = TrainingTuning.from_json(json.loads((tmp_path / "tuned" / "training.json").read_text()))
    assert tuned.batch == 16
    whole, whole_norm, _ = trained_as_tuned(tmp_path, ranks=1)
    # On a GPU, convolutions are in TF32 by default.
    error = 1e-6 if tuned.recommended.precision == "as-is" and device == "cpu" else 1e-3
    assert losses == pytest.approx(whole, rel=error)
    assert norm == pytest.approx(whole_norm, rel=error)
    assert abs(whole[0] - whole[-1]) > 1e-2, "other numbers of ranks would train alike by chance"


@pytest.mark.zoo
def test_choices_of_a_tuned_step_under_ddp_and_fsdp2(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    latency = Latency(0.1, 0.1, (0.1,))
    setup = Setup(channels_last=True, passes=("insert-checkpoints:memory_budget=0.5",), optimizer="fused")
    rows = (
        Candidate("as it is", latency=latency, standing="original"),
        Candidate("recommended", setup, latency, standing="within rounding", taken=True),
    )
    TrainingTuning("Net", "cpu", 16, 1, 1, 1.0, rows, setup).save(tmp_path / "tuned")
    losses, norm, peak = trained_as_tuned(tmp_path, ranks=2)
    sharded, sharded_norm, sharded_peak = trained_as_tuned(tmp_path, "--fsdp2", ranks=2)
    assert losses == pytest.approx(sharded, rel=1e-6)
    assert norm == pytest.approx(sharded_norm, rel=1e-6)
    # Both plans halve the 15.0 MiB of the step as it is.
    assert max(peak, sharded_peak) <= 7.5


FEW_LAYERS = """
import functools, sys
sys.path.insert(0, {folder!r})
import resnet
resnet.ResNetConfig = functools.partial(resnet.ResNetConfig, depths=[1, 1, 1, 1])
get_model, get_example_inputs = resnet.get_model, resnet.get_example_inputs
"""


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "folds"), [("few", 17), pytest.param("all", 53, marks=pytest.mark.zoo)])
def test_resnet_by_the_command(tmp_path, layers, folds):
    """The demo's command on smaller images, and on the example's model with fewer layers, so that it takes seconds."""
    model = EXAMPLES / "resnet.py"
    if layers == "few":
        model = tmp_path / "few.py"
        model.write_text(FEW_LAYERS.format(folder=str(EXAMPLES)), encoding="utf-8")
    command = ["-m", "optimizer", str(model), "--output", "dist/resnet", "--json"]
    done = run(*command, "--input", "2x3x32x32", "--batch-sizes", "1,3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    changes = {record["name"]: len(record["changes"]) for record in document["passes"]}
    assert changes == {"fold-conv-bias": 0, "fold-conv-bn": folds, "channels-last": folds}
    assert document["parity"]["ok"]
    # The parameters of a result are the original's.
    assert document["report"]["before"]["parameters"] == document["report"]["after"]["parameters"]

    # Run the files at other batch sizes with onnxruntime and torch, in a process without any package of this project.
    script = """
import sys, warnings, numpy, onnxruntime, torch
warnings.simplefilter("ignore")
session = onnxruntime.InferenceSession("dist/resnet/model.onnx", providers=["CPUExecutionProvider"])
model = torch.jit.load("dist/resnet/model.torchscript.pt")
for batch in (1, 7):
    images = torch.randn(batch, 3, 32, 32)
    logits, = session.run(None, {"pixel_values": images.numpy()})
    other = model(images)
    assert logits.shape == (batch, 1000) == tuple(other.shape)
    assert numpy.abs(logits - other.detach().numpy()).max() < 1e-3 * numpy.abs(logits).max()
assert not {"optimize_export", "optimizer", "passes", "exporters"} & set(sys.modules)
"""
    plain = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert plain.returncode == 0, plain.stderr
