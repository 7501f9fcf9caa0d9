"""The benchmark of the reach on four small models: its counts are exact."""

import json
from functools import partial

import pytest
from benchmark_runs import run_benchmark

run = partial(run_benchmark, "reach")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reach")
    paths = {"json": folder / "new" / "reach.json", "markdown": folder / "reach.md"}
    options = [f"--{name}={path}" for name, path in paths.items()]
    process = run("--models=bert,resnet,hgnet-v2,hubert", "--check", *options)
    assert process.returncode == 0, process.stderr
    return json.loads(paths["json"].read_text()), paths["markdown"].read_text(), process.stdout


def test_counts_what_is_foldable_and_what_is_folded(done):
    figures, _, _ = done
    found = {model["model"]: (model["norms"], model["foldable"], model["folded"]) for model in figures["models"]}
    # BERT has no BatchNorm, so it isn't listed. Hubert's BatchNorm is before a convolution that pads zeros.
    assert found == {"resnet": (6, 6, 6), "hgnet-v2": (28, 28, 28), "hubert": (1, 0, 0)}
    assert figures["total"] == {"norms": 35, "foldable": 34, "folded": 34, "share": 1.0, "fuse": 0}
    assert all(model["verified"] and not model["missed"] and not model["beyond"] for model in figures["models"])


def test_says_why_fuse_folds_none(done):
    figures, _, _ = done
    reasons = [model["fuse"]["reason"] for model in figures["models"]]
    assert all(reason.startswith(("TraceError: ", "TypeError: ")) for reason in reasons)


def test_the_table_has_every_model_and_the_total(done):
    figures, markdown, shown = done
    for text in (
        "| resnet | 6 | 6 | 6 | 100 % | 0 |",
        "| hubert | 1 | 0 | 0 |",
        "| all | 35 | 34 | 34 | 100.0 % | 0 |",
    ):
        assert text in markdown
    assert "34 of 34 foldable pairs are folded; the goal is 99 %, which is met." in shown
    assert figures["goal"] == 0.99


def test_counts_a_batch_norm_of_timm_by_its_module(tmp_path):
    process = run("--models=lcnet_050", "--check", f"--json={tmp_path / 'reach.json'}")
    assert process.returncode == 0, process.stderr
    (model,) = json.loads((tmp_path / "reach.json").read_text())["models"]
    assert (model["norms"], model["foldable"], model["folded"], model["beyond"]) == (27, 27, 27, [])
