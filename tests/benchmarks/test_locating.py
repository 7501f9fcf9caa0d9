"""The benchmark of locating faults: a small run."""

import json
from functools import partial

import pytest
from benchmark_runs import run_benchmark

run = partial(run_benchmark, "locating")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("locating")
    paths = {"json": folder / "locating.json", "markdown": folder / "locating.md"}
    options = [f"--{name}={path}" for name, path in paths.items()]
    process = run("--models=bert", "--faults=2", "--check", *options, timeout=500)
    assert process.returncode == 0, process.stderr
    return json.loads(paths["json"].read_text()), paths["markdown"].read_text()


def test_plants_each_kind_and_names_its_place(done):
    figures, _ = done
    places = [each["in"] for each in figures["results"]]
    assert places == [*["ONNX file"] * 6, "pass", "TorchScript file", "pt2 file", "ONNX file, old exporter"]
    for each in figures["results"]:
        assert (each["planted"], each["right"], each["wrong"]) == (2, 2, 0)
        assert each["exact"] + each["merged"] == 2
        for trial in each["trials"]:
            assert trial["module"].startswith(("embeddings", "encoder.layer.", "pooler")), trial
            assert trial["module"] in trial["named"], trial


def test_the_table_says_whether_the_goal_is_met(done):
    figures, markdown = done
    assert "| bert | ONNX file | baked batch | 2 | 2 |" in markdown
    assert figures["met"]
    assert "38 of 40 of each kind in each model, which is met" in markdown
