"""The benchmark of the cold start of compiled models."""

import json

import pytest
from benchmark_runs import run_benchmark


@pytest.mark.zoo
def test_starts_both_ways_in_processes_of_their_own(tmp_path):
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


def test_refuses_a_model_that_there_is_none_of():
    process = run_benchmark("cold_start", "--models=vit_large")
    assert process.returncode == 2
    assert "there is no model 'vit_large'" in process.stderr
    assert "Traceback" not in process.stderr
