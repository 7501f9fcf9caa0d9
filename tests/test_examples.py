"""Every example runs, as its first lines say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "COLUMNS": "200"}
    # Which kernels a CPU takes, and with them what is worth converting, goes by the number of threads.
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False
    )


def test_every_example_is_run_by_a_test():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"resnet.py", "python_api.py", "own_pass.py", "train.py"}


def test_python_api(tmp_path):
    done = run(str(EXAMPLES / "python_api.py"), str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fold-conv-bn: blocks.1.norm: folded into blocks.1.conv" in done.stdout
    assert "model.onnx by dynamo: {'image': ('batch', 3, 32, 32)" in done.stdout
    assert "verified on cpu" in done.stdout
    assert (tmp_path / "net" / "manifest.json").is_file()


def test_own_pass(tmp_path):
    done = run(str(EXAMPLES / "own_pass.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("drop-dropout  applied") and "2 changes" in line for line in lines), done.stdout
    assert "  drop-dropout: 3: taken out" in lines


def trained(done, name):
    """Of one model: the sentence of the plan, the lines of the two ways, and the largest difference of their losses."""
    assert done.returncode == 0, done.stderr
    assert "another way" not in done.stderr, "the plan wasn't kept to"
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


def test_training_in_half_of_the_memory(tmp_path):
    done = run(str(EXAMPLES / "train.py"), "--model", "resnet", "--steps", "2", "--batch", "4", cwd=tmp_path)
    assert_trains_alike(done, "resnet", 2)


def test_training_in_two_processes(tmp_path):
    launched = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLES / "train.py"))
    options = ("--model", "gpt2", "--precision", "fp16", "--steps", "2", "--batch", "4")
    done = run(*launched, *options, cwd=tmp_path)
    assert_trains_alike(done, "gpt2", 2)
    assert done.stdout.count("gpt2: ") == 1, "each process prints"


@pytest.mark.slow
def test_resnet_by_the_command(tmp_path):
    """The demo's command on smaller images, so that it takes seconds."""
    command = ["-m", "optimizer", str(EXAMPLES / "resnet.py"), "--output", "dist/resnet", "--json"]
    done = run(*command, "--input", "2x3x64x64", "--batch-sizes", "1,3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    changes = {record["name"]: len(record["changes"]) for record in document["passes"]}
    assert changes == {"fold-conv-bias": 0, "fold-conv-bn": 53, "channels-last": 24}
    assert document["parity"]["ok"]
    assert document["report"]["before"]["operations"] - document["report"]["after"]["operations"] == 53

    # Plain onnxruntime and plain torch, at other batch sizes, in a process that has nothing of this project.
    script = """
import sys, warnings, numpy, onnxruntime, torch
warnings.simplefilter("ignore")
session = onnxruntime.InferenceSession("dist/resnet/model.onnx", providers=["CPUExecutionProvider"])
model = torch.jit.load("dist/resnet/model.torchscript.pt")
for batch in (1, 7):
    images = torch.randn(batch, 3, 64, 64)
    logits, = session.run(None, {"pixel_values": images.numpy()})
    other = model(images)
    assert logits.shape == (batch, 1000) == tuple(other.shape)
    assert numpy.abs(logits - other.detach().numpy()).max() < 1e-3 * numpy.abs(logits).max()
assert not {"optimizer", "passes", "exporters"} & set(sys.modules)
"""
    plain = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert plain.returncode == 0, plain.stderr
