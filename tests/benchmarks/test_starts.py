"""The benchmarks of the first answer and of the first calls in a new process."""

import json

import pytest
from benchmark_runs import run_benchmark


@pytest.mark.zoo
def test_a_compiled_model_starts_both_ways(tmp_path):
    path = tmp_path / "cold_start.json"
    size = ["--models=vit_small", "--scale=0.15", "--starts=1", "--rounds=1", "--threads=1"]
    process = run_benchmark("cold_start", *size, f"--json={path}", timeout=600)
    assert process.returncode == 0, process.stderr
    (result,) = json.loads(path.read_text())["results"]
    ways = {"torch-compile, by blocks", "torch.compile"}
    assert set(result["starts"]) == set(result["starts_on_a_new_machine"]) == ways
    assert result["cold_start"]["median"] > 0
    assert result["cold_start_on_a_new_machine"]["median"] > 0
    assert set(result["latencies"]) == {"torch-compile, by blocks", "torch.compile", "eager"}


@pytest.mark.zoo
def test_a_result_starts_each_way(tmp_path):
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
