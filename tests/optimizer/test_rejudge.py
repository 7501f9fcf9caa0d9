"""Judge stored measurements again, without the model or its files, and without changing the bundle."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_bundles import edit_manifest
from tiny_models import enliven
from torch import nn

from optimize_export.errors import BundleError, UsageError
from optimizer import Bundle, export, open_bundle, optimize, rejudge_bundle, verify_bundle
from optimizer.command import cli


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 5)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        features = torch.relu(self.conv(image)).mean((2, 3))
        return {"logits": self.head(features), "features": features}


ATOL = {"scores": 0.1}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose first output has an error far above rounding, which a tolerance allowed; its second doesn't."""
    torch.manual_seed(0)
    fast = optimize(enliven(Net()).eval(), [], example_inputs=(torch.randn(2, 3, 8, 8),))
    fast.head.weight = nn.Parameter(fast.head.weight.detach() * 1.001)
    return export(
        fast,
        example_inputs=(torch.randn(2, 3, 8, 8),),
        output=tmp_path_factory.mktemp("rejudge") / "net",
        formats=("torchscript",),
        output_names=("scores", "vector"),
        atol=ATOL,
    ).path


@pytest.fixture
def bundle(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A copy without the artifact and the golden data, so any use of them fails."""
    copy = tmp_path / "copy"
    shutil.copytree(written, copy)
    (copy / "model.torchscript.pt").unlink()
    (copy / "golden.safetensors").unlink()
    monkeypatch.setattr("optimizer.bundle.bundle.load_artifact", None)
    monkeypatch.setattr("optimizer.bundle.verify.load_for_proof", None)
    return open_bundle(copy)


def test_without_options_it_is_the_judgement_of_the_export(bundle: Bundle) -> None:
    before = {path.name: path.read_bytes() for path in bundle.path.iterdir()}
    report = rejudge_bundle(bundle.path)
    assert report.ok
    (artifact,) = report.artifacts
    assert artifact.parity is not None
    assert json.loads(json.dumps(artifact.parity.to_json())) == bundle.manifest["artifacts"][0]["parity"]
    assert artifact.calls == 5
    assert str(report).startswith(f"{bundle.path}: correct by its stored measurements on cpu")
    assert "nothing was run" in report.notes[0]
    assert {path.name: path.read_bytes() for path in bundle.path.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"atol": 0.1}, None),
        ({"atol": {"logits": 0.1}, "factor": 4.0}, None),
        ({"rtol": {"scores": 1e6}}, None),
        ({"factor": 1e6}, None),
        # If any option is given, the tolerances of the export are ignored.
        ({"factor": 4.0}, "scores is off by"),
        ({"atol": {"vector": 0.1}}, "scores is off by"),
        ({"atol": 1e-9}, "scores differs from the original by"),
        ({"atol": ATOL, "factor": 1e-6}, "vector is off by"),
        ({"atol": 0.0}, "atol 0 and rtol 0 allow"),
    ],
)
def test_other_tolerances_are_judged_by(bundle: Bundle, options: dict[str, Any], wrong: str | None) -> None:
    report = rejudge_bundle(bundle.path, **options)
    assert report.ok is (wrong is None), report
    assert report.intact
    if wrong is not None:
        assert wrong in report.problems[0]


def test_a_bundle_whose_original_ran_on_another_device_is_judged_by_that_factor(bundle: Bundle) -> None:
    def factor(**options: Any) -> float:
        parity = rejudge_bundle(bundle.path, **options).artifacts[0].parity
        assert parity is not None
        return parity.factor

    assert factor() == 4.0
    edit_manifest(bundle.path, lambda manifest: manifest["device"].update(type="cuda"))
    assert factor() == factor(atol=1.0) == 16.0
    assert factor(factor=3.0) == 3.0


def test_a_tolerance_decides_at_the_largest_difference(bundle: Bundle) -> None:
    parity = rejudge_bundle(bundle.path, atol=0.0).artifacts[0].parity
    assert parity is not None
    largest = max(point[0] for point in bundle.manifest["artifacts"][0]["measurement"]["outputs"][0]["frontier"])
    assert rejudge_bundle(bundle.path, atol=largest).ok
    assert not rejudge_bundle(bundle.path, atol=largest * 0.999).ok
    judged = rejudge_bundle(bundle.path, atol=largest).artifacts[0].parity.outputs[0]
    assert judged.by_user
    assert judged.max_difference == judged.tolerance == largest
    assert not parity.outputs[0].ok


def test_what_makes_no_sense_is_one_sentence(bundle: Bundle) -> None:
    with pytest.raises(UsageError, match=r"'boxes'; the outputs are: scores \(logits in the model\), vector \("):
        rejudge_bundle(bundle.path, atol={"boxes": 1.0})
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="factor must be a number above 0"):
            rejudge_bundle(bundle.path, factor=factor)
    for value in (-1, float("nan"), float("inf"), True):
        with pytest.raises(UsageError, match=f"atol must be a number of 0 or more, not {value}"):
            rejudge_bundle(bundle.path, atol=value)
        with pytest.raises(UsageError, match=f"rtol must be a number of 0 or more, not {value}"):
            rejudge_bundle(bundle.path, rtol={"scores": value})


@pytest.mark.parametrize("drop", [lambda entry: entry.pop("measurement"), lambda entry: entry.update(measurement=None)])
def test_a_bundle_from_before_measurements_were_kept(bundle: Bundle, drop: Callable[[dict[str, Any]], object]) -> None:
    edit_manifest(bundle.path, lambda manifest: drop(manifest["artifacts"][0]))
    with pytest.raises(BundleError, match=r"no measurement of model\.torchscript\.pt, .*: export the model again, or"):
        rejudge_bundle(bundle.path)


def test_a_manifest_that_was_changed_is_not_judged(bundle: Bundle) -> None:
    path = bundle.path / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"mismatches": 0', '"mismatches": 1'), encoding="utf-8")
    report = rejudge_bundle(bundle.path)
    assert (report.ok, report.intact, report.artifacts) == (False, False, ())
    assert report.problems == ("manifest.json or SHA256SUMS was changed: they don't agree.",)


@pytest.mark.parametrize(
    ("keys", "value", "sentence"),
    [
        (("outputs",), [], r"`artifacts\[0\]\.measurement\.outputs` must be a list of at least 1"),
        (("outputs", 0, "max_error"), None, r"measurement\.outputs\[0\]\.max_error` must be a number"),
        (("outputs", 0, "noise", "noise"), "much", r"outputs\[0\]\.noise\.noise` must be a number"),
        (("outputs", 0, "frontier"), [[1.0]], r"outputs\[0\]\.frontier\[0\]` must be two numbers"),
        (("outputs", 0, "calls", 0, "draw"), 0.5, r"outputs\[0\]\.calls\[0\]\.draw` must be a whole number"),
        (("settings",), None, r"measurement\.settings` must be an object"),
    ],
)
def test_a_broken_measurement_names_the_field(bundle: Bundle, keys: tuple[Any, ...], value: Any, sentence: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        place = manifest["artifacts"][0]["measurement"]
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    edit_manifest(bundle.path, change)
    with pytest.raises(BundleError, match=sentence):
        rejudge_bundle(bundle.path)


def test_a_measurement_of_other_outputs_contradicts_the_manifest(bundle: Bundle) -> None:
    edit_manifest(bundle.path, lambda manifest: manifest["artifacts"][0]["measurement"]["outputs"].pop())
    with pytest.raises(BundleError, match="measurement of the artifact torchscript doesn't have the artifact's"):
        rejudge_bundle(bundle.path)


@pytest.mark.parametrize("figure", ["Infinity", "NaN"])
def test_an_error_that_is_no_number_is_read_and_fails(bundle: Bundle, figure: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        output = manifest["artifacts"][0]["measurement"]["outputs"][1]
        output["max_error"] = output["calls"][0]["max_error"] = figure
        output["frontier"].append([figure, 1.0])

    edit_manifest(bundle.path, change)
    assert not rejudge_bundle(bundle.path, factor=1e12).ok
    assert not rejudge_bundle(bundle.path, atol=1e12).ok


@pytest.mark.parametrize("figure", ["noise", "noise_rms"])
def test_an_infinite_noise_proves_nothing(bundle: Bundle, figure: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["artifacts"][0]["measurement"]["outputs"][1]["noise"][figure] = "Infinity"

    edit_manifest(bundle.path, change)
    report = rejudge_bundle(bundle.path)
    assert report.intact
    (problem,) = report.problems
    assert problem.startswith("model.torchscript.pt: nothing is proven. The noise of vector is infinite, so any error")
    # The user's tolerance replaces it.
    assert rejudge_bundle(bundle.path, atol=0.1).ok


def test_the_command_judges_as_it_verifies(
    written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimizer.command.user_code.import_own_packages", lambda: None)
    verified = verify_bundle(written)
    assert verified.ok
    for options, code in (("", 0), ("--atol scores=0.1", 0), ("--factor 4", 6), ("--atol scores=1e-9", 6)):
        assert cli.main(["rejudge", str(written), "--json", *options.split()]) == code
        document = json.loads(capsys.readouterr().out)
        assert document["exit_code"] == code
        assert document.keys() >= {"bundle", *verified.to_json()}
    assert cli.main(["rejudge", str(written), "--details"]) == 0
    shown = capsys.readouterr().out
    assert "scores" in shown
    assert ["parity", "of", "output", "batch", "draw", "error"] in [line.split()[:6] for line in shown.splitlines()]
    assert cli.main(["rejudge", str(written), "--atol", "boxes=1"]) == 2
    assert "atol names the output 'boxes'; the outputs are: scores (logits in the model)" in capsys.readouterr().err
