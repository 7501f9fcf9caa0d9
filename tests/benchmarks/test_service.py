"""The benchmark of how many calls a second a bundle answers."""

import pytest
from benchmark_runs import imported, written


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    return written("service", folder, "--models=resnet18_small", "--scale=0.2", "--seconds=8")


def test_both_ways_are_measured(done):
    figures, markdown, _ = done
    (result,) = figures["results"]
    assert result["alone"]["rate"] > 0 < result["chosen"]["rate"]
    assert result["service"]["figures"][0]["setting"]["one_by_one"]
    assert f"| resnet18_small | {result['setting']} |" in markdown


def test_a_gain_that_is_too_small_is_told():
    with imported("service") as service:
        result = {"model": "net", "alone": {"rate": 10.0}, "chosen": {"rate": 15.0}}
        assert service.misses([result]) == []
        assert service.misses([{**result, "chosen": {"rate": 12.0}}]) == [
            "net: 1.20 times the calls of one by one; the goal is 1.5"
        ]
