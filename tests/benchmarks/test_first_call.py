"""The benchmark of the first calls of a result in a new process."""

import json

import pytest
from benchmark_runs import run_benchmark


@pytest.mark.zoo
def test_starts_each_way_in_processes_of_their_own(tmp_path):
    path = tmp_path / "first_call.json"
    size = ["--models=resnet50", "--scale=0.15", "--starts=1", "--threads=1"]
    process = run_benchmark("first_call", *size, f"--json={path}", timeout=600)
    assert process.returncode == 0, process.stderr
    (result,) = json.loads(path.read_text())["results"]
    calls = {"several rows", "one row", "inference_mode"}
    assert {way: set(found) for way, found in result["calls"].items()} == {
        "eager": calls,
        "optimize": calls,
        "optimize, after warm_up": {*calls, "warm_up"},
    }


def test_refuses_a_model_that_there_is_none_of():
    process = run_benchmark("first_call", "--models=vit_large")
    assert process.returncode == 2
    assert "there is no model 'vit_large'" in process.stderr
    assert "Traceback" not in process.stderr
