"""The benchmark of the overhead at a tiny size: its counts are exact, and every step is timed."""

import pytest
from benchmark_runs import imported, written


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return written(
        "overhead",
        tmp_path_factory.mktemp("overhead"),
        "--nodes=60,120",
        "--repeat=1",
        "--pairs=10",
        "--memory-mb=4",
        "--memory-cases=optimize-with-inputs",
        timeout=400,
    )


@pytest.mark.parametrize("shape", ["flat", "nested"])
def test_the_passes_do_their_work_on_every_block(done, shape):
    figures, _, _ = done
    small, large = (graph for graph in figures["graphs"] if graph["shape"] == shape)
    nothing = {"simplify": 0, "merge-linears": 0}
    folded = {"fold-conv-bias": 8, "fold-conv-bn": 15, "channels-last": 15, "pad-channels": 15}
    # channels-last changes each convolution; jit-fusion changes each sum with its activation; cast-precision changes each
    # convolution and the model.
    assert small["changes"] == {**folded, **nothing, "jit-fusion": 15, "cast-precision": 16}
    folded = {"fold-conv-bias": 15, "fold-conv-bn": 30, "channels-last": 30, "pad-channels": 30}
    assert large["changes"] == {**folded, **nothing, "jit-fusion": 30, "cast-precision": 31}
    assert large["changes_of_optimize"] == {"fold-conv-bias": 15, "fold-conv-bn": 30, "channels-last": 30}


def test_times_every_step_in_every_round(done):
    figures, _, _ = done
    steps = {"symbolic_trace", "fuse", "working copy", "fold-conv-bias", "fold-conv-bn", "channels-last"}
    steps |= {"simplify", "merge-linears", "pad-channels", "jit-fusion", "cast-precision", "all passes", "optimize()"}
    for graph in figures["graphs"]:
        assert set(graph["seconds"]) == set(graph["to_symbolic_trace"]) == steps
        assert all(len(seconds["values"]) == 1 and seconds["median"] > 0 for seconds in graph["seconds"].values())
        assert graph["to_symbolic_trace"]["symbolic_trace"]["median"] == 1
        preset = graph["changes_of_optimize"]
        passes = sum(graph["seconds"][name]["median"] for name in preset)
        # The time of all passes includes that of each pass.
        assert graph["seconds"]["all passes"]["median"] >= passes * 0.999


def test_memory_counts_the_tensors_of_the_result_that_are_new(done):
    figures, _, _ = done
    (case,) = figures["memory"]
    layers, channels = 7, 128
    weight, per_channel = channels * channels * 9 * 4, channels * 4
    # The weight of the convolution; weight, bias, mean, variance and batch counter of the BatchNorm.
    assert case["model_bytes"] == layers * (weight + 4 * per_channel + 8)
    # The folded weight and its bias; the buffers of the BatchNorm are the result's own.
    assert (case["new_tensors"], case["new_bytes"]) == (5 * layers, layers * (weight + 3 * per_channel + 8))
    assert case["live_peak_bytes"] > layers * weight / 2


def test_every_pair_is_folded_whose_calls_are_timed(done):
    figures, markdown, _ = done
    assert figures["pairs"]["folded"] == figures["pairs"]["pairs"] == 10
    assert set(figures["pairs"]["seconds"]) == {"as written", "folded by optimize()", "folded by hand", "fuse"}
    assert "A call of a folded pair" in markdown


def test_a_pair_that_costs_too_much_is_told():
    with imported("overhead") as overhead:
        pairs = {"over_by_hand": {"median": 2.5e-6}}
        (missed,) = overhead.misses({}, (), pairs)
        assert missed == "a folded pair costs 2.5 µs per call over one that is folded by hand; the goal is 2 µs"


def test_passes_that_are_asked_for_by_name_have_to_be_linear_too():
    with imported("overhead") as overhead:
        grown = {name: {"per_operation": 1.0} for name in ("all passes", "optimize()", "pad-channels")}
        assert overhead.misses({"flat": grown}) == []
        grown["pad-channels"]["per_operation"] = 1.51
        assert overhead.misses({"flat": grown}) == [
            "flat: one operation of pad-channels gets 1.51 times as dear from the smallest graph to the largest; the goal is 1.5"
        ]
