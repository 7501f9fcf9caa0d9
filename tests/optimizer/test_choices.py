"""Bundles with a tuned, lossy choice: what verifies and loads them, and exports that repeat the choice."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_bundles import edit_manifest
from fake_tuning import Wrong, fake_clock, fake_quantization, opening
from tiny_models import enliven
from torch import nn

from exporters.errors import ExportError
from exporters.torchscript import TorchScriptExporter
from optimize_export.errors import BundleError, DeviceError, ExportFailed, ParityError, UsageError
from optimize_export.manifest import MANIFEST
from optimizer import Bundle, export, load, open_bundle, rejudge_bundle, verify_bundle
from optimizer.bundle import write_triton_model

LEVELS = {"int8-static": 100}
Manifest = dict[str, Any]


def net() -> nn.Module:
    torch.manual_seed(0)
    return enliven(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))).eval()


def rows(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(count))


def made(folder: Path, **options: Any) -> Bundle:
    return export(net(), example_inputs=(rows(),), output=folder / "net", effort="quick", **options)


@pytest.fixture(scope="module")
def lossy(tmp_path_factory):
    """A bundle whose recommended file is quantized."""
    folder = tmp_path_factory.mktemp("lossy")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("optimizer.tuning.candidates.missing_compiler", lambda device: "none here")
        fake_clock(monkeypatch).seconds = {"eager": 1.0, "int8.onnx in onnxruntime": 0.1, "": 0.5}
        fake_quantization(monkeypatch).levels = LEVELS
        return made(folder, formats=("onnx",), tune=True, tune_seconds=600, accuracy="0.999")


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A bundle whose recommended route is exact, and isn't the default one."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_clock(monkeypatch).seconds = {"eager": 1.0, "freeze": 0.3, "": 0.5}
        return made(tmp_path_factory.mktemp("exact"), formats=("torchscript",), bench=True)


@pytest.fixture
def no_clock(monkeypatch):
    return fake_clock(monkeypatch)


@pytest.fixture
def rounding(monkeypatch):
    rounding = fake_quantization(monkeypatch)
    rounding.levels = dict(LEVELS)
    return rounding


def edited(bundle: Bundle, folder: Path, change: Callable[[Manifest], Any]) -> Path:
    """A copy of a bundle with a changed manifest, and hashes that fit."""
    copy = folder / "edited"
    shutil.copytree(bundle.path, copy)
    edit_manifest(copy, change)
    return copy


# The bundle -------------------------------------------------------------------------------------------------------


def test_a_lossy_bundle_is_verified_by_its_budget(lossy):
    report = verify_bundle(lossy)
    assert report.ok, report
    exact, rounded = report.artifacts
    assert (exact.accuracy, rounded.parity) == (None, None)
    assert rounded.accuracy is not None
    assert 0.999 < rounded.accuracy.cosine < 1
    again = rejudge_bundle(lossy)
    assert again.ok
    assert [artifact.format for artifact in again.artifacts] == ["onnx", "onnx-int8"]


WITHIN = re.compile(r"[Ww]ithin (the accuracy )?budget")


def test_a_lossy_bundle_is_never_called_proven(lossy, tmp_path):
    parity = lossy.manifest["parity"]
    assert (parity["ok"], parity["verdict"]) == (True, "within budget")
    assert parity["reason"].startswith(
        "model.int8.onnx differs from the original within the accuracy budget: cosine 0.99"
    )
    assert "(budget: cosine 0.999). In the exact files, all outputs agree" in parity["reason"]
    assert "within budget: cosine 0.99" in lossy.manifest["benchmark"]["reason"]
    config = write_triton_model(lossy.path, tmp_path) / "config.pbtxt"
    texts = {
        "page": (lossy.path / "report.html").read_text(encoding="utf-8"),
        "notebook": lossy._repr_html_(),
        "README": (lossy.path / "README.md").read_text(encoding="utf-8"),
        "bundle": repr(lossy),
        "loaded": repr(load(lossy)),
        "verified": str(verify_bundle(lossy)),
        "judged": str(rejudge_bundle(lossy)),
        "triton": config.read_text(encoding="utf-8"),
    }
    for name, text in texts.items():
        assert WITHIN.search(text), name
        assert "proven" not in text, name
    for name in ("page", "notebook"):
        assert '<b class="warn">within budget</b>' in texts[name]
    assert "## model.int8.onnx (onnx-int8)" in texts["README"]
    assert 'onnxruntime.InferenceSession("model.int8.onnx"' in texts["README"]


def test_a_lossy_file_has_the_figures_of_each_output_at_each_call(lossy):
    entry = lossy.manifest["artifacts"][1]
    (output,) = entry["parity"]["outputs"]
    assert output["name"] == entry["outputs"][0]["name"]
    calls = output["calls"]
    assert {call.get("held_out", False) for call in calls} == {True, False}
    assert all(0 < call["max_error"] <= output["max_error"] and call["cosine"] >= output["cosine"] for call in calls)
    assert 0.999 < output["cosine"] < 1
    (verified,) = verify_bundle(lossy).to_json()["artifacts"][1]["outputs"]
    assert len(verified["calls"]) == len(lossy.manifest["golden"]["calls"])
    assert str(load(lossy).accuracy).startswith("within budget: cosine 0.99")
    assert load(lossy, format="onnx").accuracy == ""


def test_a_file_below_its_budget_fails_with_one_sentence(lossy, tmp_path):
    def ask_for_more(manifest: Manifest) -> None:
        manifest["artifacts"][1]["accuracy"]["budget"]["cosine"] = 0.9999999999

    path = edited(lossy, tmp_path, ask_for_more)
    (problem,) = verify_bundle(path).problems
    assert problem.startswith("model.int8.onnx: cosine 0.99")
    assert problem.endswith("is below 0.9999999999")
    (again,) = rejudge_bundle(path).problems
    assert again.startswith("model.int8.onnx: cosine 0.99")


def test_load_runs_the_recommended_file(lossy, exact):
    run = load(lossy)
    assert str(run.route) == "onnx-int8 in onnxruntime"
    difference = (run(rows(5)) - net()(rows(5)).detach()).abs().max()
    assert 1e-4 < difference < 0.2, "it runs, and it is the rounded one"
    assert str(load(exact).route) == "torchscript in torch, freeze"


# Choices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", MANIFEST])
def test_an_exact_choice_is_repeated_without_a_clock(exact, tmp_path, no_clock, name):
    bundle = made(tmp_path, formats=("torchscript",), choices=exact.path / name)
    assert no_clock.timed == []
    benchmark = bundle.manifest["benchmark"]
    assert benchmark["recommended"] == {"format": "torchscript", "runtime": "torch", "settings": {"freeze": True}}
    assert (benchmark["figures"], benchmark["rounds"]) == ([], 0)
    assert benchmark["reason"] == "ship torchscript in torch, freeze, as chosen earlier"


@pytest.mark.slow
def test_a_lossy_choice_is_made_again_with_the_same_nodes(lossy, tmp_path, no_clock, rounding):
    def keep(manifest: Manifest) -> None:
        manifest["artifacts"][1]["quantization"]["kept"] = ["head"]

    bundle = made(tmp_path, formats=("onnx",), choices=edited(lossy, tmp_path, keep), accuracy="0.999")
    assert no_clock.timed == []
    entry = bundle.manifest["artifacts"][1]
    assert entry["quantization"] == {"kind": "int8-static", "kept": ["head"]}
    assert entry["accuracy"]["cosine"] > lossy.manifest["artifacts"][1]["accuracy"]["cosine"]
    assert bundle.manifest["benchmark"]["recommended"] == lossy.manifest["benchmark"]["recommended"]
    assert "int8 was calibrated with random inputs" in bundle.manifest["benchmark"]["notes"][0]
    assert verify_bundle(bundle).ok


@pytest.mark.slow
def test_a_lossy_choice_outside_the_budget_is_refused(lossy, tmp_path, no_clock, rounding):
    rounding.levels["int8-static"] = 2
    with pytest.raises(
        ParityError, match=r"onnx-int8 .* can't be used: outside the budget: the best has cosine 0"
    ) as caught:
        made(tmp_path, formats=("onnx",), choices=lossy, accuracy="0.999")
    assert caught.value.exit_code == 6
    assert not (tmp_path / "net").exists()


def test_a_choice_of_float16_is_made_again_within_its_budget(tmp_path, no_clock):
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()]
    model = enliven(nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 200))).eval()
    choices = tmp_path / MANIFEST
    route = {"format": "onnx-float16", "runtime": "onnxruntime", "settings": {}}
    artifact = {"format": "onnx-float16", "quantization": {"kind": "float16", "kept": []}}
    choices.write_text(json.dumps({"benchmark": {"recommended": route}, "artifacts": [artifact]}), encoding="utf-8")

    def exported(budget: str) -> Bundle:
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        options = {"formats": ("onnx",), "effort": "quick", "choices": choices, "accuracy": budget}
        return export(model, example_inputs=(x,), output=tmp_path / "net", **options)

    with pytest.raises(ParityError, match=r"onnx-float16 .* it is off by 0\.02.* % .*, and may be by 0\.00014 %"):
        exported("0.999999999999")
    bundle = exported("0.999")
    exact, half = bundle.manifest["artifacts"]
    assert (half["path"], half["quantization"]) == ("model.float16.onnx", {"kind": "float16", "kept": []})
    assert 0.999 < half["accuracy"]["cosine"] < 1
    assert half["bytes"] == pytest.approx(exact["bytes"] / 2, rel=0.05)
    assert (half["inputs"], half["outputs"]) == (exact["inputs"], exact["outputs"])
    assert bundle.manifest["benchmark"]["recommended"] == route
    assert verify_bundle(bundle).ok
    output = load(bundle)(torch.ones(5, 3, 8, 8))
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, model(torch.ones(5, 3, 8, 8)), rtol=1e-2, atol=1e-2)


def test_a_choice_that_is_wrong_now_is_refused(exact, tmp_path, no_clock, monkeypatch):
    opening(monkeypatch, lambda runner, route: Wrong(runner))
    with pytest.raises(ParityError, match=r"freeze, which .* chooses, can't be used: it isn't proven: "):
        made(tmp_path, formats=("torchscript",), choices=exact)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "can't be read: No such file or directory"),
        ("{", "can't be read: Expecting property name"),
        ("\udc80", "can't be read: 'utf-8' codec"),
        ("[]", "recommends no file: pass a bundle that was tuned"),
        ('{"benchmark": {"recommended": null}}', "recommends no file"),
        ('{"benchmark": {"recommended": {"format": "onnx"}}}', "recommends a route that can't be used: A route has a"),
        (
            '{"benchmark": {"recommended": {"format": "onnx", "runtime": "tensorrt", "settings": {}}}}',
            "recommends a route that can't be used: The runtime 'tensorrt' is unknown",
        ),
        (
            '{"benchmark": {"recommended": {"format": "torchscript", "runtime": "torch", '
            '"settings": {"threads": 1000000}}}}',
            "recommends a route that can't be used: threads=1000000 is not a number from 1 to 4096",
        ),
        pytest.param("[" * 100_000, "can't be read: it is nested too deeply", id="deep"),
        (
            '{"benchmark": {"recommended": {"format": "onnx", "runtime": "onnxruntime", "settings": {}}}}',
            "chooses onnx in onnxruntime, which needs the format onnx: add it to the formats",
        ),
        (
            '{"benchmark": {"recommended": {"format": "torchscript", "runtime": "torch", "settings": {"tf32": true}}}}',
            "chooses torchscript in torch, tf32, which is lossy: add a budget, such as `accuracy=0.999`",
        ),
    ],
)
def test_choices_that_say_nothing_are_refused_before_anything_runs(tmp_path, content, sentence):
    path = tmp_path / "choices.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    model = nn.Module()  # it has no forward
    with pytest.raises(UsageError, match=sentence):
        export(model, example_inputs=(rows(),), output=tmp_path / "net", formats=("torchscript",), choices=path)


@pytest.mark.timeout(60)
@pytest.mark.skipif(os.name != "posix", reason="files of POSIX")
def test_choices_that_are_no_file_are_refused(tmp_path):
    os.mkfifo(tmp_path / "choices.json")
    (tmp_path / "link.json").symlink_to("/dev/zero")
    for name in ("choices.json", "link.json"):
        with pytest.raises(UsageError, match="can't be read: it is not a regular file"):
            made(tmp_path, formats=("torchscript",), choices=tmp_path / name)


def test_choices_of_a_damaged_bundle_are_refused(exact, tmp_path):
    copy = shutil.copytree(exact.path, tmp_path / "copy")
    text = (copy / MANIFEST).read_text(encoding="utf-8")
    (copy / MANIFEST).write_text(text.replace('"freeze": true', '"freeze": false'), encoding="utf-8")
    with pytest.raises(BundleError, match="or SHA256SUMS was changed"):
        made(tmp_path, formats=("torchscript",), choices=copy)


def test_a_lossy_choice_needs_a_budget_and_its_nodes(lossy, tmp_path):
    with pytest.raises(UsageError, match="chooses onnx-int8 in onnxruntime, which is lossy: add a budget"):
        made(tmp_path, formats=("onnx",), choices=lossy)
    with pytest.raises(UsageError, match="which needs the format onnx: add it to the formats"):
        made(tmp_path, formats=("torchscript",), choices=lossy, accuracy="0.9")
    changes = [lambda entry: entry.pop("quantization"), lambda entry: entry["quantization"].update(kind="int3")]
    for number, change in enumerate(changes):
        folder = tmp_path / str(number)
        path = edited(lossy, folder, lambda manifest, change=change: change(manifest["artifacts"][1]))
        with pytest.raises(UsageError, match="doesn't say how its onnx-int8 file was made"):
            made(tmp_path, formats=("onnx",), choices=path, accuracy="0.9")


def test_a_chosen_format_that_could_not_be_exported_is_an_error(exact, tmp_path, no_clock, monkeypatch):
    def fail(*_: Any) -> None:
        raise ExportError("it can't be scripted")

    monkeypatch.setattr(TorchScriptExporter, "export", fail)
    with pytest.raises(ExportFailed, match="and its file couldn't be exported: it can't be scripted"):
        made(tmp_path, formats=("torchscript", "pt2"), choices=exact)


def test_a_runtime_that_is_missing_is_named(exact, tmp_path, no_clock, monkeypatch):
    def recommend(manifest: Manifest) -> None:
        manifest["benchmark"]["recommended"] |= {"runtime": "openvino", "settings": {}}

    monkeypatch.setattr("optimize_export.runtime.route.is_installed", lambda runtime: False)
    with pytest.raises(DeviceError, match="openvino isn't installed here: pip install"):
        made(tmp_path, formats=("torchscript",), choices=edited(exact, tmp_path, recommend))


# Reproducible bundles ---------------------------------------------------------------------------------------------


# An ONNX file, because TorchScript numbers the classes of one process.
@pytest.mark.slow
def test_a_reproducible_bundle_has_no_times(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    speeds, sums = fake_clock(monkeypatch), []
    for number, seconds in enumerate((0.5, 0.7)):
        speeds.seconds = {"eager": 1.0, "": seconds}
        bundle = made(tmp_path / str(number), formats=("onnx",), bench=True)
        assert bundle.benchmark is not None
        assert bundle.benchmark["figures"][1]["seconds"] == seconds
        assert "benchmark" not in bundle.manifest
        sums.append(bundle.sha256sums)
    assert sums[0] == sums[1]


def test_a_reproducible_bundle_does_not_say_why_nothing_was_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setattr("optimizer.tuning.candidates.available_memory", lambda: 1000)
    bundle = made(tmp_path, formats=("onnx",), bench=True)
    assert "1000" not in json.dumps(bundle.manifest)
    assert "benchmark" not in bundle.manifest


@pytest.mark.slow
def test_a_reproducible_bundle_keeps_a_choice(tmp_path, no_clock, monkeypatch):
    route = {"format": "onnx", "runtime": "onnxruntime", "settings": {"threads": 1}}
    choices = tmp_path / "choices.json"
    choices.write_text(json.dumps({"benchmark": {"recommended": route}}))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    first, second = (made(tmp_path / name, formats=("onnx",), choices=choices) for name in "ab")
    assert first.sha256sums == second.sha256sums
    assert open_bundle(first).manifest["benchmark"]["recommended"] == route
