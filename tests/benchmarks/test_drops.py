"""The simulation of drops, with few searches: which ways ship a candidate beyond the budget."""

import numpy as np
import pytest
from benchmark_runs import imported, written


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return written("drops", tmp_path_factory.mktemp("drops"), "--searches=10", "--runs=4")


def test_no_way_is_left_out(done):
    figures, markdown, _ = done
    assert len(figures["searches"]) == 2 * 3 * 4
    assert len(figures["power"]) == 2 * 4 * 4
    for one in figures["searches"]:
        assert 0 <= one["wrong"] + one["right"] <= 1
        assert f"| {one['kind']} | {one['case']} | {one['way']} |" in markdown


def test_a_point_estimate_ships_what_the_test_does_not(done):
    figures, _, _ = done
    beyond = [one for one in figures["searches"] if one["case"] == "all at 1.001 times the budget"]
    assert all(one["wrong"] >= 0.9 for one in beyond if one["way"] == "point estimate")
    assert all(one["wrong"] <= 0.2 for one in beyond if one["way"] == "ours")


@pytest.mark.parametrize("kind", ["0/1", "real"])
@pytest.mark.parametrize("drop", [0.0, 0.005, 0.01])
def test_the_samples_have_the_drop_that_they_are_said_to_have(kind, drop):
    with imported("drops") as drops:
        original, candidate = drops.KINDS[kind](np.random.default_rng(0), 400_000, drop, 0.02)
        lost = original - candidate
        assert np.mean(lost) == pytest.approx(drop, abs=4 * lost.std() / 400_000**0.5)
        assert original.min() >= candidate.min() >= 0
        assert max(original.max(), candidate.max()) <= 1
