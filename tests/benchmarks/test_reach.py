"""The benchmark of the reach on four small models: its counts are exact."""

import pytest
from benchmark_runs import written


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return written("reach", tmp_path_factory.mktemp("reach"), "--models=bert,resnet,hgnet-v2,hubert", "--check")


def test_counts_what_is_foldable_and_what_is_folded(done):
    figures, _, _ = done
    found = {model["model"]: (model["norms"], model["foldable"], model["folded"]) for model in figures["models"]}
    # BERT has no BatchNorm, so it isn't listed. Hubert's BatchNorm is before a convolution that pads zeros.
    assert found == {"resnet": (6, 6, 6), "hgnet-v2": (28, 28, 28), "hubert": (1, 0, 0)}
    assert figures["total"] == {"norms": 35, "foldable": 34, "folded": 34, "share": 1.0, "fuse": 0}
    assert all(model["verified"] and not model["missed"] and not model["beyond"] for model in figures["models"])


def test_counts_a_batch_norm_of_timm_by_its_module(tmp_path):
    figures, *_ = written("reach", tmp_path, "--models=lcnet_050", "--check")
    (model,) = figures["models"]
    assert (model["norms"], model["foldable"], model["folded"], model["beyond"]) == (27, 27, 27, [])
