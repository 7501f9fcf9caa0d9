"""`diagnose`: exit codes, the JSON document, the training step of the file, and what can't be diagnosed."""

import json

import pytest

from optimizer.command import cli

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 8)]

    def forward(self, x):
        return self.layers[0](x)

model = Net().eval()
example_inputs = (torch.randn(2, 8),)
"""
GOOD = MODEL.replace("[nn.Linear(8, 8)]", "nn.ModuleList([nn.Linear(8, 8)])")
STEP = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def training_step():
    model(*example_inputs).sum().backward()
    optimizer.zero_grad(set_to_none=False)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Diagnoses a file with the given source; the result is the exit code and both streams."""

    def run(source, *arguments):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "net.py").write_text(source, encoding="utf-8")
        code = cli.main(["diagnose", "net.py", *arguments])
        return code, *capfd.readouterr()

    return run


def test_findings_are_told_and_no_failure_by_default(run, tmp_path):
    code, out, err = run(MODEL)
    assert code == 0
    assert out.startswith("error    unregistered  net.py:11, in layers[0]\n")
    assert "put them into an nn.ModuleList" in out
    assert "error:" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["net.py"]


def test_fail_on_a_level_is_an_exit_code(run):
    code, out, err = run(MODEL, "--fail-on", "warning", "--json")
    document = json.loads(out)
    assert (code, document["exit_code"], document["error"]["kind"]) == (10, 10, "FindingsFound")
    (finding,) = document["diagnosis"]["findings"]
    assert (finding["rule"], finding["line"], finding["module"]) == ("unregistered", 11, "layers[0]")
    assert "The diagnosis has 1 finding of level warning or higher" in err


def test_a_clean_model_has_no_findings_and_passes(run):
    assert run(GOOD, "--fail-on", "note")[:2] == (0, "No findings.\n")


def test_the_training_step_of_the_file_runs(run):
    code, out, _ = run(GOOD + STEP, "--fail-on", "warning")
    assert code == 10
    assert out.startswith("warning  gradients-zeroed  net.py:20")


BATCHED = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.randn(64, 13, 8), batch_size=None)

def training_step(model, batch):
    assert batch.shape == (13, 8) and model.layers[0].weight.grad is None
    return {"loss": torch.utils.checkpoint.checkpoint(model, batch.requires_grad_(), use_reentrant=True).sum()}
"""


def test_a_training_step_that_takes_a_batch_runs_with_that_of_the_loader(run):
    code, out, err = run(GOOD.replace("import torch\n", "import torch, torch.utils.checkpoint\n") + BATCHED)
    assert (code, "reentrant-checkpoint  net.py:21" in out) == (0, True), out + err


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (BATCHED.replace("DataLoader(torch.randn(64, 13, 8), batch_size=None)", "Dataset"), "loader of net.py is"),
        (
            BATCHED.replace("torch.optim.SGD(model.parameters(), 0.1)", "0.1"),
            "is a float, not a torch.optim.Optimizer",
        ),
        (
            BATCHED.replace("model.parameters()", "nn.Linear(8, 8).parameters()"),
            "2 of the 2 parameters of the optimizer",
        ),
        (BATCHED.replace("DataLoader(torch.randn(64, 13, 8), batch_size=None)", "ConcatDataset"), "loader of net.py"),
        (BATCHED.replace("torch.randn(64, 13, 8)", "[]"), "The loader has no batches"),
        (
            "def training_step(model, batch):\n    return model(batch)",
            "returns a loss of shape (2, 8): return a scalar",
        ),
    ],
)
def test_what_a_training_step_can_not_run_with_is_one_sentence(run, source, part):
    code, out, err = run(GOOD + source)
    assert code in (2, 3)
    assert out == ""
    assert part in err


def test_a_training_step_with_other_arguments_is_left_out_with_a_note(run):
    code, out, _ = run(GOOD + STEP.replace("training_step()", "training_step(batch, rate=1)"), "--fail-on", "note")
    assert code == 0
    told = "training_step needs batch; it takes the model and a batch, or no arguments."
    assert f"note: The training step was left out: {told}" in out


@pytest.mark.parametrize(
    ("source", "arguments", "part"),
    [
        ("x = 1", (), "net.py has no model"),
        (GOOD.replace("example_inputs", "inputs"), (), "net.py has no example_inputs and no get_example_inputs()"),
        (GOOD, ("--input", "2x9"), "failed on its inputs (float32[2, 9])"),
        (GOOD.replace("nn.ModuleList", "iter"), (), "failed on its inputs"),
    ],
)
def test_what_can_not_be_diagnosed_is_one_sentence(run, source, arguments, part):
    code, out, err = run(source, *arguments)
    assert code == 3
    assert out == ""
    assert part in err
