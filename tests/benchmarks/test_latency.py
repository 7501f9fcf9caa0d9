"""The benchmark of the latency on one small model: every row is there, and the figures are right."""

import json
from functools import partial

import pytest
from benchmark_runs import run_benchmark

CONTENDERS = ["eager", "ours", "ours-torchscript", "ours-onnx", "fuse", "jit", "onnx"]


run = partial(run_benchmark, "latency")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latency")
    size = ["--models=resnet18", "--batch=2", "--rounds=2", "--scale=0.2", "--threads=1"]
    process = run(
        *size,
        f"--contenders={','.join(CONTENDERS[1:])}",
        f"--json={folder / 'latency.json'}",
        f"--markdown={folder / 'latency.md'}",
    )
    assert process.returncode == 0, process.stderr
    return json.loads((folder / "latency.json").read_text()), (folder / "latency.md").read_text(), process


def test_measures_every_contender_in_every_round(done):
    figures, _, _ = done
    (result,) = figures["results"]
    assert (result["model"], result["batch"], result["parameters"]) == ("resnet18", 2, 11_689_512)
    assert [contender["name"] for contender in result["contenders"]] == CONTENDERS
    for contender in result["contenders"]:
        assert contender["unavailable"] is None, contender
        assert len(contender["seconds"]["values"]) == 2
        assert 0 < contender["seconds"]["low"] <= contender["seconds"]["median"] <= contender["seconds"]["high"]
        assert contender["speed_up"]["median"] > 0


def test_tells_the_error_of_every_contender(done):
    figures, _, _ = done
    errors = {contender["name"]: contender["error"] for contender in figures["results"][0]["contenders"]}
    # All are right on this model, and none is the reference itself, whose error would be zero.
    assert all(0 < error < 1e-4 for error in errors.values()), errors
    assert figures["results"][0]["contenders"][0]["error_to_eager"] == 1


def test_says_what_it_was_measured_on(done):
    figures, markdown, _ = done
    environment = figures["environment"]
    assert environment["threads"] == 1
    assert environment["device"] == "cpu"
    assert {"torch", "onnx"} <= set(environment["versions"])
    assert environment["cpu"] in markdown
    assert environment["date"] in markdown


def test_shows_what_it_writes(done):
    _, markdown, process = done
    for label in ("torch.fx fuse", "optimize-export, TorchScript file"):
        assert f"| {label} |" in markdown
        assert label in process.stdout
    assert "Traceback" not in process.stderr


def test_a_contender_that_cannot_be_had_is_a_sentence(tmp_path):
    path = tmp_path / "latency.json"
    options = ["--models=convnext_tiny", "--batch=1", "--rounds=1", "--scale=0.1", "--threads=1", "--contenders=fuse"]
    process = run(*options, f"--json={path}")
    assert process.returncode == 0, process.stderr
    eager, fuse = json.loads(path.read_text())["results"][0]["contenders"]
    assert eager["unavailable"] is None
    assert fuse["unavailable"].startswith("TraceError: ")
    assert "seconds" not in fuse
    assert "convnext_tiny, batch 1, torch.fx fuse: TraceError: " in " ".join(process.stdout.split())


def test_refuses_a_model_that_there_is_none_of():
    process = run("--models=resnet51")
    assert process.returncode == 2
    assert "there is no model 'resnet51'" in process.stderr
    assert "Traceback" not in process.stderr
