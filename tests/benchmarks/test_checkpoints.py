"""The benchmark of training in less memory, on a small model: its counts are exact."""

import pytest
from benchmark_runs import imported, written

OURS = ["ours-0.5", "ours-0.33", "ours-min", "ours-uniform"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return written(
        "checkpoints",
        tmp_path_factory.mktemp("checkpoints"),
        "--models=unet",
        "--scale=0.5",
        "--rounds=2",
        "--threads=1",
        "--check",
    )


@pytest.fixture(scope="module")
def benchmark():
    with imported("checkpoints") as module:
        yield module


def ways_of(done):
    (result,) = done[0]["results"]
    return {way["name"]: way for way in result["ways"]}


def test_every_way_is_there_or_says_why_not(done):
    ways = ways_of(done)
    assert list(ways) == ["eager", "blocks", "segments", *OURS]
    assert {name for name, way in ways.items() if way["unavailable"]} == {"segments", "ours-0.33"}
    assert "more than one tensor" in ways["segments"]["unavailable"]
    assert "can't meet memory_budget=0.33" in ways["ours-0.33"]["unavailable"]


def test_budgets_are_kept_and_what_is_computed_again_is_counted(done):
    ways = ways_of(done)
    assert (ways["eager"]["peak_share"], ways["eager"]["recomputed_share"]) == (1, 0)
    assert ways["ours-min"]["peak_share"] < ways["ours-0.5"]["peak_share"] <= 0.5
    assert ways["ours-uniform"]["peak_share"] <= 0.5
    shares = [ways[name]["recomputed_share"] for name in ("ours-0.5", "ours-min", "ours-uniform", "blocks")]
    assert 0 < shares[0] < shares[1] < shares[2] < shares[3] < 1
    assert 0.5 < ways["blocks"]["peak_share"] < 1
    assert all(ways[name]["differences"] == [] for name in ("eager", "ours-0.5", "ours-min", "ours-uniform"))
    # torch.utils.checkpoint updates the running statistics of a BatchNorm twice.
    assert ways["blocks"]["differences"] == ["buffers"]
    measured = [way for way in ways.values() if way["unavailable"] is None]
    # The difference is temporary memory of kernels, on maps of 32 × 32.
    assert all(0 <= way["allocated_bytes"] - way["peak_bytes"] < 2**20 for way in measured)
    assert all(len(way["seconds"]["values"]) == 2 for way in measured)
    assert ways["eager"]["to_eager"]["median"] == 1


def test_the_table_has_every_row(done):
    figures, markdown, process = done
    for text in ("eager", "checkpoint, each block", "insert-checkpoints, 0.5", "insert-checkpoints, 0.5, uniform"):
        assert f"| unet | {text} |" in markdown
        assert text in process.stdout
    assert "unet, insert-checkpoints, 0.33: RequirementNotMet: " in markdown
    assert figures["environment"]["cpu"] in markdown
    assert "Traceback" not in process.stderr
    # There is no mean, because only one of the five models was measured.
    assert figures["goals"]["means"] == {}


def results_of(benchmark, shares, peak=0.5):
    ways = [{"name": "ours-0.5", "unavailable": None, "recomputed_share": 0, "peak_share": peak}]
    return [
        {"model": name, "ways": [{**ways[0], "recomputed_share": share}]}
        for name, share in zip(benchmark.GOALS, shares, strict=True)
    ]


def test_a_goal_is_the_mean_over_five_models(benchmark):
    met = results_of(benchmark, (0.3, 0.0, 0.1, 0.05, 0.0))
    assert benchmark.means(met) == {"ours-0.5": pytest.approx(0.09)}
    assert benchmark.misses(met) == []
    # Models other than the five are ignored, and if one of the five is missing, there is no mean.
    assert benchmark.means([*met, {**met[0], "model": "unet"}]) == benchmark.means(met)
    assert benchmark.means(met[1:]) == {}
    (sentence,) = benchmark.misses(results_of(benchmark, (0.3, 0.1, 0.1, 0.05, 0.0)))
    assert "11.0 % of the forward are computed again; the goal is 10 %" in sentence
