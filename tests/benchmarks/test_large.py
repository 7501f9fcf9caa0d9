"""The benchmark of the memory of an export: a small run, and the goal for larger models."""

import json
from functools import partial

import pytest
from benchmark_runs import imported, run_benchmark

run = partial(run_benchmark, "large")


@pytest.fixture(scope="module")
def large():
    with imported("large") as module:
        yield module


def test_a_small_model_is_measured_every_way_and_misses_the_goal(tmp_path, large):
    paths = {"json": tmp_path / "large.json", "markdown": tmp_path / "large.md"}
    options = [f"--{name}={path}" for name, path in paths.items()]
    process = run("--mebibytes=32", "--formats=torchscript", "--check", *options)
    # Small weights are written through memory, which takes three times their size and misses the goal.
    assert process.returncode == 1, process.stderr
    figures = json.loads(paths["json"].read_text())
    assert not figures["met"]
    ways = ["export()", "exporter alone", "torch.jit.trace(…).save"]
    assert [(each["format"], each["way"]) for each in figures["results"]] == [
        ("-", large.REFERENCE),
        *(("torchscript", way) for way in ways),
    ]
    by_way = {each["way"]: each for each in figures["results"]}
    assert {each["weights_bytes"] for each in figures["results"]} == {33_127_488}
    assert by_way[large.REFERENCE]["written_bytes"] == 0
    assert all(by_way[way]["written_bytes"] > 33_000_000 for way in ways)
    assert all(each["ratio"] == each["peak_bytes"] / each["weights_bytes"] for each in figures["results"])
    markdown = paths["markdown"].read_text()
    assert "| torchscript | exporter alone |" in markdown
    assert "The goal is at most 1.3 of the weights, which is missed." in markdown


@pytest.mark.parametrize(("format", "mebibytes"), [("onnx", 672), ("torchscript", 224), ("pt2", 224)])
def test_an_export_that_isnt_small_takes_little_more_than_the_weights(format, mebibytes, large):
    found = large.measured(mebibytes, format, "exporter alone", 1)
    if not found["peak_exact"]:
        pytest.skip("the system can't set the high-water mark of memory back")
    assert found["weights_bytes"] > 2**20 * mebibytes
    # The proof loads the file, whose weights are then in memory in addition to the model's.
    assert 0.9 < found["ratio"] <= large.GOAL


def test_the_goal_is_for_this_program_alone(large):
    results = [{"format": format, "way": way} for format, way in large.WAYS]
    assert sum(map(large.is_ours, results)) == 7
    assert not any(large.is_ours({"way": way}) for way, _ in large.TORCH.values())
