"""The benchmark of locating faults: a small run."""

import pytest
from benchmark_runs import written


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return written(
        "locating", tmp_path_factory.mktemp("locating"), "--models=bert", "--faults=2", "--check", timeout=500
    )


def test_plants_each_kind_and_names_its_place(done):
    figures, *_ = done
    places = [each["in"] for each in figures["results"]]
    assert places == [*["ONNX file"] * 6, "pass", "pt2 file"]
    for each in figures["results"]:
        assert (each["planted"], each["right"], each["wrong"]) == (2, 2, 0)
        assert each["exact"] + each["merged"] == 2
        for trial in each["trials"]:
            assert trial["module"].startswith(("embeddings", "encoder.layer.", "pooler")), trial
            assert trial["module"] in trial["named"], trial
