"""The benchmark of the memory format on two small models: its counts are exact."""

import pytest
from benchmark_runs import written


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return written(
        "channels_last",
        tmp_path_factory.mktemp("channels_last"),
        "--models=resnet18,volume_unet",
        "--batch=2",
        "--rounds=2",
        "--scale=0.3",
        "--threads=1",
    )


def counts_of(figures, model):
    (result,) = [result for result in figures["results"] if result["model"] == model]
    return {contender["name"]: contender["counts"] for contender in result["contenders"]}


def test_every_contender_is_there_and_right(done):
    figures, markdown, process = done
    assert [(result["model"], result["batch"]) for result in figures["results"]] == [
        ("resnet18", 2),
        ("volume_unet", 2),
    ]
    for result in figures["results"]:
        assert [contender["name"] for contender in result["contenders"]] == ["fold", "ours", "user"]
        for contender in result["contenders"]:
            assert contender["unavailable"] is None, contender
            assert len(contender["seconds"]["values"]) == 2
            assert contender["speed_up"]["median"] > 0
            assert 0 < contender["error"] < 1e-4
        assert result["contenders"][0]["speed_up"]["median"] == 1
        for text in ("folded, channels-last", "folded, model.to(memory_format=…)"):
            assert f"| {result['model']} | 2 | {text} |" in markdown
            assert text in process.stdout
    assert figures["environment"]["cpu"] in markdown


def test_counts_weights_and_what_is_moved(done):
    resnet, volumes = counts_of(done[0], "resnet18"), counts_of(done[0], "volume_unet")
    assert [resnet[name]["convolutions"] for name in resnet] == [20, 20, 20]
    assert resnet["fold"]["channels_last"] == volumes["fold"]["channels_last"] == 0
    # PyTorch's own conversion, `model.to(memory_format=…)`, has no exceptions.
    assert (resnet["user"]["channels_last"], volumes["user"]["channels_last"]) == (20, 13)
    assert resnet["user"]["kept_contiguous"] == resnet["fold"]["kept_contiguous"] == 0
    ours = resnet["ours"]
    assert 0 < ours["channels_last"] < 20, "the later ones are large beside their maps"
    assert ours["channels_last"] + ours["kept_contiguous"] <= 20
    assert resnet["fold"]["moved"] == resnet["user"]["moved"] == 0
    # The image is moved, and maps where the format changes.
    assert ours["moved"] > 2 * 3 * 64 * 64
    assert all(counts["lost"] == [] for counts in (*resnet.values(), *volumes.values()))
