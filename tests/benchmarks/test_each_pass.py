"""The benchmark of the passes on one small model: every way is measured, and the figures are right."""

import json
from functools import partial
from pathlib import Path

import pytest
from benchmark_runs import run_benchmark

WAYS = ["merge-linears, forced", "cast-precision, weights", "all exact"]

run = partial(run_benchmark, "each_pass")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("each_pass")
    paths = [f"--json={folder / 'passes.json'}", f"--markdown={folder / 'passes.md'}"]
    size = ["--models=bert_small", "--batch=2", "--rounds=2", "--scale=0.1", "--threads=1"]
    options = [*size, f"--ways={';'.join(WAYS)}", *paths]
    process = run(*options)
    assert process.returncode == 0, process.stderr
    (result,) = json.loads((folder / "passes.json").read_text())["results"]
    ways = {way["name"]: way for way in result["ways"]}
    return ways, (folder / "passes.md").read_text(), options


def test_goes_on_where_it_was_interrupted(done):
    *_, options = done
    path = Path(next(option for option in options if option.startswith("--json=")).removeprefix("--json="))
    before = path.read_text()
    again = run(*options, "--resume")
    assert again.returncode == 0, again.stderr
    assert "bert_small" in again.stdout
    # Finished measurements are not repeated.
    assert path.read_text() == before
    other = run(*options, "--rounds=3", "--resume")
    assert other.returncode == 2
    assert "has the figures of a run with other options" in other.stderr
    figures = json.loads(before)
    figures["environment"]["cpu"] = "another one"
    path.write_text(json.dumps(figures))
    elsewhere = run(*options, "--resume")
    assert elsewhere.returncode == 2
    assert "were measured with another cpu: measure all of them anew" in elsewhere.stderr


def test_tells_what_became_of_the_passes(done):
    ways, markdown, _ = done
    assert ways["merge-linears, forced"]["statuses"] == ["applied"]
    # Without convolutions, three passes have nothing to do. On a CPU, merging layers doesn't pay.
    assert ways["all exact"]["statuses"] == ["unchanged"] * 3 + ["applied", "unchanged"]
    assert "| 1 of 5 applied |" in markdown


def test_counts_kernels_and_bytes_of_weights(done):
    ways, _, _ = done
    eager, merged, cast = (ways[name] for name in ("eager", "merge-linears, forced", "cast-precision, weights"))
    # In six layers, query, key and value become one product. And the captured graph doesn't read the mask's values.
    assert eager["kernels"] - merged["kernels"] == 12 + 1
    assert merged["weight_bytes"] == eager["weight_bytes"]
    assert 0.5 < cast["weight_bytes"] / eager["weight_bytes"] < 0.51
