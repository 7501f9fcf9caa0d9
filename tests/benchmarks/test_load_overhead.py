"""The benchmark of what a call of a loaded bundle costs."""

import pytest
from benchmark_runs import imported, written


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return written("load_overhead", tmp_path_factory.mktemp("load_overhead"), "--rounds=2")


def test_times_each_way_with_each_kind_of_inputs(done):
    figures, markdown, _ = done
    seen = [(result["model"], result["way"], result["inputs"]) for result in figures["results"]]
    ways = ("onnxruntime", "openvino", "torchscript", "pt2")
    assert seen == [(name, way, kind) for name in ("plain", "nested") for way in ways for kind in ("numpy", "torch")]
    for result in figures["results"]:
        assert result["raw"]["median"] > 0
        over = [ours - raw for ours, raw in zip(result["load"]["values"], result["raw"]["values"], strict=True)]
        assert result["over"]["values"] == over
        assert f"| {result['model']} | {result['way']} | {result['inputs']} |" in markdown


def test_a_call_that_costs_too_much_is_told():
    with imported("load_overhead") as load_overhead:
        result = {"model": "plain", "way": "pt2", "inputs": "torch"}
        assert load_overhead.misses([{**result, "over": {"median": 49e-6}}]) == []
        assert load_overhead.misses([{**result, "over": {"median": 51e-6}}]) == [
            "plain, pt2, torch: a call costs 51 µs over the runtime's own; the goal is 50 µs"
        ]
