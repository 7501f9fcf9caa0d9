"""`tune-training`: what it reads from the model's file, what it prints and writes, and its errors."""

import json

import pytest
import torch

from optimizer.command import cli, engine
from optimizer.training import Candidate, Setup, TrainingTuning
from optimizer.tuning import Latency, Ratio

MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
example_inputs = (torch.randn(4, 8),)

def training_step(model, batch):
    return model(batch).square().mean()
"""
MORE = """
def make_optimizer(parameters):
    return torch.optim.SGD(parameters, 0.1)

def make_loader():
    return torch.utils.data.DataLoader(torch.randn(64, 8), 16)
"""
TUNED = TrainingTuning(
    model="Sequential",
    device="cpu",
    batch=4,
    threads=1,
    rounds=7,
    seconds=1.0,
    candidates=(
        Candidate("as it is", Setup(), Latency(0.02, 0.02, (0.02,) * 7), standing="original", peak=2048, samples=200.0),
        Candidate("whole compiled", note="There is too little time."),
        Candidate(
            "fused optimizer",
            Setup(optimizer="fused"),
            Latency(0.01, 0.01, (0.01,) * 7),
            Ratio(2.0, 1.9, 2.1, 7),
            400.0,
            2048,
            "bit-identical",
            taken=True,
        ),
    ),
    recommended=Setup(optimizer="fused"),
    notes=("The optimizer is AdamW with its defaults.",),
)


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Tunes the step of a file with the given source; the result is the exit code and both streams."""

    def run(source, *arguments):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "net.py").write_text(source, encoding="utf-8")
        code = cli.main(["tune-training", "net.py", *arguments])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def asked(monkeypatch):
    """The arguments of each call of `tune_training`, which measures nothing here."""
    calls = []

    def tuned(model, step, batch=None, **given):
        calls.append({"model": model, "step": step, "batch": batch, **given})
        return TUNED

    monkeypatch.setattr(engine, "tune_training", tuned)
    return calls


def test_the_table_comes_first_and_the_code_last(run, asked):
    code, out, err = run(MODEL)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("training step      a step  rows/s  times as fast")
    assert lines[3].startswith("fused optimizer *  10 ms   400     2.00 (1.90 to 2.10)  2.0 KiB  bit-identical")
    assert lines[5].startswith("recommended: fused optimizer: 2.00 (1.90 to 2.10) times as fast as the step as it is")
    assert lines[6] == "note: The optimizer is AdamW with its defaults."
    assert out.endswith(TUNED.code)
    assert "load net.py:model" in err


def test_what_the_file_has_is_tuned_with_the_options(run, asked):
    options = ("--memory", "16GiB", "--batch-size", "64", "--tune-seconds", "5", "--steps", "20", "--device", "cpu")
    assert run(MODEL + MORE, *options)[0] == 0
    (call,) = asked
    assert (call["memory"], call["batch_size"], call["tune_seconds"], call["steps"]) == (16 * 2**30, 64, 5.0, 20)
    assert (call["batch"], call["device"]) == (None, "cpu")
    assert isinstance(call["loader"], torch.utils.data.DataLoader)
    assert call["optimizer"].param_groups[0]["params"] == [*call["model"].parameters()]


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        (MODEL, (4, 8)),
        (MODEL + "training_batch = torch.randn(6, 8)\n", (6, 8)),
    ],
)
def test_without_a_loader_the_batch_is_the_files_or_the_example_inputs(run, asked, source, shape):
    assert run(source)[0] == 0
    assert asked[0]["batch"].shape == shape
    assert asked[0]["optimizer"] is None


def test_the_result_is_written_and_the_document_has_all(run, asked, tmp_path):
    code, out, _ = run(MODEL, "--output", "tuned", "--json")
    document = json.loads(out)
    assert (code, document["exit_code"], document["output"]) == (0, 0, "tuned")
    assert TrainingTuning.from_json(document["training"]) == TUNED
    assert document["code"] == TUNED.code
    assert {each.name for each in (tmp_path / "tuned").iterdir()} == {"report.html", "training.toml", "training.json"}
    code, _, err = run(MODEL, "--output", "tuned")
    assert (code, len(asked)) == (2, 1)
    assert "tuned already exists: choose a new folder for the result, or delete it." in err


def test_an_output_that_cant_be_written_is_refused_before_the_tuning(run, asked):
    code, _, err = run(MODEL, "--output", "net.py/tuned")
    assert (code != 0, asked) == (True, [])
    assert "is not a folder: choose another path" in err


@pytest.mark.parametrize(
    ("source", "arguments", "code", "part"),
    [
        (
            MODEL.replace("training_step", "step"),
            (),
            3,
            "net.py has no training_step: add `def training_step(model, batch)`",
        ),
        (MODEL.replace("(model, batch)", "()"), (), 3, "so it draws its own batch and changes the weights itself"),
        (
            MODEL.replace("(model, batch)", "(batch)"),
            (),
            3,
            "training_step needs batch; it takes the model and a batch",
        ),
        (MODEL, ("--memory", "much"), 2, "--memory: 'much' is not a size; use for example 16GiB"),
        (MODEL, ("--steps", "-1"), 2, "--steps: '-1' is not a whole number"),
        (MODEL, ("--format", "onnx"), 2, "There is no option --format"),
        (MODEL, ("--tune",), 2, "it goes with optimize-export MODEL"),
    ],
)
def test_what_can_not_be_tuned_is_one_sentence(run, asked, source, arguments, code, part):
    found, out, err = run(source, *arguments)
    assert (found, out, asked) == (code, "", [])
    assert part in err
    assert err.count("error:") == 1
