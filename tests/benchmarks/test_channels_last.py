"""The benchmark of the memory format on two small models: its counts are exact."""

import json
from functools import partial

import pytest
from benchmark_runs import run_benchmark

run = partial(run_benchmark, "channels_last")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("channels_last")
    paths = {"json": folder / "channels_last.json", "markdown": folder / "channels_last.md"}
    options = [f"--{name}={path}" for name, path in paths.items()]
    size = ["--models=resnet18,volume_unet", "--batch=2", "--rounds=2", "--scale=0.3", "--threads=1"]
    process = run(*size, *options)
    assert process.returncode == 0, process.stderr
    return json.loads(paths["json"].read_text()), paths["markdown"].read_text(), process


def counts_of(figures, model):
    (result,) = [result for result in figures["results"] if result["model"] == model]
    return {contender["name"]: contender["counts"] for contender in result["contenders"]}


def test_every_contender_is_there_and_right(done):
    figures, _, _ = done
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


def test_counts_weights(done):
    figures, _, _ = done
    resnet, volumes = counts_of(figures, "resnet18"), counts_of(figures, "volume_unet")
    assert [resnet[name]["convolutions"] for name in resnet] == [20, 20, 20]
    assert resnet["fold"]["channels_last"] == volumes["fold"]["channels_last"] == 0
    # PyTorch's own conversion, `model.to(memory_format=…)`, has no exceptions.
    assert resnet["user"]["channels_last"] == 20
    assert volumes["user"]["channels_last"] == 13
    assert resnet["user"]["kept_contiguous"] == resnet["fold"]["kept_contiguous"] == 0
    ours = resnet["ours"]
    assert 0 < ours["channels_last"] < 20, "the later ones are large beside their maps"
    assert ours["channels_last"] + ours["kept_contiguous"] <= 20


def test_counts_what_is_moved(done):
    figures, _, _ = done
    resnet, volumes = counts_of(figures, "resnet18"), counts_of(figures, "volume_unet")
    assert resnet["fold"]["moved"] == resnet["user"]["moved"] == 0
    # The image is moved, and maps where the format changes.
    assert resnet["ours"]["moved"] > 2 * 3 * 64 * 64
    assert all(counts["lost"] == [] for counts in (*resnet.values(), *volumes.values()))


def test_the_table_has_every_row(done):
    figures, markdown, process = done
    for text in ("folded, channels-last", "folded, model.to(memory_format=…)"):
        assert f"| resnet18 | 2 | {text} |" in markdown
        assert f"| volume_unet | 2 | {text} |" in markdown
        assert text in process.stdout
    assert figures["environment"]["cpu"] in markdown
    assert "Traceback" not in process.stderr
