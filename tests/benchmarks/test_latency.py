"""The benchmark of the latency on one small model: every row is there, and the figures and goals are right."""

import json
from functools import partial

import pytest
from benchmark_runs import imported, run_benchmark

BY_NAME = ["ours", "ours-torchscript", "ours-onnx", "fuse"]
PEERS = ["jit", "onnx", "openvino", "quantized", "quantized-openvino"]
TUNED = ["ours-exact", "ours-budget"]
CONTENDERS = ["eager", *BY_NAME, *PEERS, *TUNED]
LOSSY = {"quantized", "quantized-openvino", "ours-budget"}


run = partial(run_benchmark, "latency")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latency")
    size = ["--models=resnet18", "--batch=2", "--rounds=2", "--scale=0.2", "--threads=1", "--tune-seconds=2"]
    process = run(
        *size,
        f"--contenders={','.join(CONTENDERS[1:])}",
        f"--json={folder / 'latency.json'}",
        f"--markdown={folder / 'latency.md'}",
        f"--picture={folder / 'pictures' / 'latency.svg'}",
    )
    assert process.returncode == 0, process.stderr
    written = [(folder / name).read_text() for name in ("latency.json", "latency.md", "pictures/latency.svg")]
    return json.loads(written[0]), written[1], process, written[2]


def test_measures_every_contender_in_every_round(done):
    figures, *_ = done
    (result,) = figures["results"]
    assert (result["model"], result["batch"], result["threads"]) == ("resnet18", 2, 1)
    assert result["parameters"] == 11_689_512
    assert [contender["name"] for contender in result["contenders"]] == CONTENDERS
    for contender in result["contenders"]:
        assert contender["unavailable"] is None, contender
        assert len(contender["seconds"]["values"]) == 2
        assert 0 < contender["seconds"]["low"] <= contender["seconds"]["median"] <= contender["seconds"]["high"]
        assert contender["speed_up"]["median"] > 0
        assert contender["over_onnx"]["median"] > 0
        assert contender["set_up_seconds"] > 0


def test_tells_the_error_and_the_size_of_every_contender(done):
    figures, *_ = done
    contenders = {contender["name"]: contender for contender in figures["results"][0]["contenders"]}
    exact = {name: each["error"] for name, each in contenders.items() if name not in LOSSY}
    # All are right on this model, and none is the reference itself, whose error would be zero.
    assert all(0 < error < 1e-4 for error in exact.values()), exact
    assert contenders["eager"]["error_to_eager"] == 1
    assert all(contenders[name]["cosine"] > 1 - 1e-8 for name in exact)
    assert all(0.9 < contenders[name]["cosine"] < 1 - 1e-8 for name in ("quantized", "quantized-openvino"))
    assert contenders["ours-budget"]["cosine"] >= 0.999
    sizes, weights = {name: each["bytes"] for name, each in contenders.items()}, 4 * 11_689_512
    # Files hold the BatchNorms folded into the weights.
    assert all(0.99 * weights < sizes[name] < 1.1 * weights for name in exact), sizes
    assert weights / 4 < sizes["quantized"] == sizes["quantized-openvino"] < weights / 3


def test_shows_what_it_writes_and_what_it_was_measured_on(done):
    figures, markdown, process, _ = done
    environment = figures["environment"]
    assert (environment["threads"], environment["device"]) == (1, "cpu")
    assert {"torch", "onnx"} <= set(environment["versions"])
    assert environment["cpu"] in markdown
    assert environment["date"] in markdown
    for label in ("torch.fx fuse", "optimize-export, TorchScript file"):
        assert f"| {label} |" in markdown
        assert label in process.stdout
    assert "Traceback" not in process.stderr


def test_an_interrupted_run_goes_on_with_the_same_options_only(tmp_path):
    path = tmp_path / "latency.json"
    options = ["--models=resnet18", "--rounds=1", "--scale=0.1", "--threads=1", "--contenders=onnx", f"--json={path}"]
    assert run(*options, "--batch=1").returncode == 0
    (first,) = json.loads(path.read_text())["results"]
    assert run(*options, "--batch=1,2", "--resume").returncode == 0
    kept, second = json.loads(path.read_text())["results"]
    assert (kept, second["batch"]) == (first, 2)
    process = run(*options, "--batch=1", "--resume", "--tune-seconds=7")
    assert process.returncode == 2
    assert f"{path} can't be resumed: tune_seconds differ" in process.stderr
    path.unlink()
    assert "--resume needs --json with the file of an earlier run" in run(*options, "--resume").stderr


def test_a_contender_that_cannot_be_had_is_a_sentence(tmp_path):
    path = tmp_path / "latency.json"
    options = ["--models=convnext_tiny", "--batch=1", "--rounds=1", "--scale=0.1", "--threads=1", "--contenders=fuse"]
    process = run(*options, f"--json={path}")
    assert process.returncode == 0, process.stderr
    eager, fuse = json.loads(path.read_text())["results"][0]["contenders"]
    assert eager["unavailable"] is None
    assert fuse["unavailable"].startswith("TraceError: ")
    assert "seconds" not in fuse
    assert "convnext_tiny, batch 1, threads 1, torch.fx fuse: TraceError: " in " ".join(process.stdout.split())


def test_a_process_that_ends_is_a_sentence(monkeypatch, tmp_path):
    with imported("latency") as latency:
        monkeypatch.setattr(latency.sys, "executable", "false")
        arguments = latency.argparse.Namespace(rounds=1, device="cpu", scale=1.0, tune_seconds=1)
        result = latency._measured("resnet18", 1, 1, ["eager", "onnx"], arguments, tmp_path)
        assert [each["unavailable"] for each in result["contenders"]] == [
            "the process of this configuration ended with 1"
        ] * 2
        table = latency.table_of([result]).markdown()
    assert "resnet18, batch 1, threads 1, eager: the process of this configuration ended with 1" in table


def result_of(model="m", **contenders):
    """A result with the seconds of each contender in three rounds, or a pair of these and the cosine."""
    pairs = {name: given if isinstance(given, tuple) else (given, 1.0) for name, given in contenders.items()}
    rows = [
        {
            "name": name.replace("_", "-"),
            "unavailable": None,
            "cosine": cosine,
            "seconds": {"values": seconds, "median": sorted(seconds)[1]},
        }
        for name, (seconds, cosine) in pairs.items()
    ]
    return {"model": model, "batch": 1, "threads": 1, "contenders": rows}


def met(*results):
    with imported("goals") as goals:
        return [goal["met"] for goal in goals.goals_of(results)]


FAST, EQUAL, SLOW, PLAIN = [1.0, 1.0, 1.0], [1.1, 0.9, 1.0], [1.2, 1.2, 1.2], [2.5, 2.5, 2.5]


GOOD = {"ours_exact": FAST, "ours_budget": FAST}
BEHIND = {"ours_exact": SLOW, "ours_budget": SLOW}


@pytest.mark.parametrize(
    ("results", "wanted"),
    [
        ([], [False] * 4),
        ([result_of(eager=PLAIN, onnx=PLAIN, **GOOD)], [True] * 4),
        # Only a peer that is accurate enough counts within the budget.
        ([result_of(onnx=PLAIN, quantized=(FAST, 0.9985), **BEHIND)], [True] * 4),
        ([result_of(onnx=PLAIN, quantized=(FAST, 0.9995), **BEHIND)], [True, True, True, False]),
        # A missing choice is behind.
        ([result_of(onnx=PLAIN, **GOOD), result_of("without", onnx=PLAIN)], [False, True, True, False]),
    ],
)
def test_goals(results, wanted):
    assert met(*results) == wanted


def test_a_peer_within_the_noise_is_not_ahead_on_a_model_but_is_overall():
    equal = result_of(onnx=PLAIN, openvino=EQUAL, **GOOD)
    assert met(equal) == [True, False, True, True]
    # The gain on another model makes up for it overall, but no gain makes up for a model where a peer is faster.
    other = result_of("other", onnx=PLAIN, openvino=SLOW, **GOOD)
    far = result_of("far", onnx=PLAIN, openvino=PLAIN, **GOOD)
    behind = result_of("behind", onnx=PLAIN, openvino=FAST, **BEHIND)
    assert met(equal, other, far) == [True] * 4
    assert met(equal, far, far, behind) == [False, True, True, False]
