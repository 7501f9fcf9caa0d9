"""Show the result of a plan as a table and as a plot."""

import json

import pytest

from passes.checkpointing.regions import RegionRecord
from passes.checkpointing.report import CheckpointReport, Point

MIB = 2**20


@pytest.fixture
def report():
    return CheckpointReport(
        chosen=Point("this plan", 50 * MIB, 10),
        eager=Point("eager", 100 * MIB, 0),
        uniform=Point("uniform, √n runs", 40 * MIB, 80),
        curve=(Point("", 70 * MIB, 5), Point("", 30 * MIB, 60)),
        forward=100,
        regions=(RegionRecord("stem", ("relu", "conv2d", "relu"), 3 * MIB, 10), RegionRecord("", ("gelu",), MIB, 0)),
    )


def test_the_table_has_the_ways_and_the_regions(report):
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    assert "eager 100.0 MiB 100.0 % 0.0 % of the forward" in lines
    assert "this plan 50.0 MiB 50.0 % 10.0 % of the forward" in lines
    assert "uniform, √n runs 40.0 MiB 40.0 % 80.0 % of the forward" in lines
    assert "stem 2 relu, conv2d 3.0 MiB 10.0 %" in lines
    assert "the root gelu 1.0 MiB 0.0 %" in lines


def test_the_picture_has_each_point_where_it_belongs(report):
    lines = report.picture().splitlines()
    assert "\x1b" not in report.picture()

    def place(marker):
        # The legend names each marker twice in a row.
        return next((y, line.index(marker)) for y, line in enumerate(lines) if line.count(marker) == 1)

    (eager_y, eager_x), (plan_y, plan_x), (uniform_y, uniform_x) = map(place, "EXU")
    assert uniform_y < plan_y <= eager_y
    assert uniform_x < plan_x < eager_x


def test_plain_data(report):
    data = json.loads(json.dumps(report.to_json()))
    assert data["peak_bytes"] == 50 * MIB
    assert data["eager_peak_bytes"] == 100 * MIB
    assert data["recomputed_flops"] == 10
    assert data["curve"][1] == {"peak_bytes": 30 * MIB, "recomputed_flops": 60}
    assert data["regions"][0] == {
        "where": "stem", "calls": ["relu", "conv2d", "relu"], "dropped_bytes": 3 * MIB, "flops": 10,
    }  # fmt: skip


def test_a_forward_without_products_is_shown_too(report):
    shown = CheckpointReport(report.chosen, report.eager, report.uniform, (), 0, ())
    assert "0.0 % of the forward" in str(shown)
