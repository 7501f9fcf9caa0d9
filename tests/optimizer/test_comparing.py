"""`compare` names what differs between two bundles, runs both on the same inputs, and says plainly when nothing differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_bundles import seal
from torch import nn

from optimize_export.errors import BundleError
from optimizer import Bundle, export, open_bundle, optimize
from optimizer.command.cli import main
from optimizer.comparing import bundles, compare_bundles
from optimizer.comparing.contents import contents_of, operations_between, weights_between


def net(shift: float = 0.0, width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(width * 36, 2)
    )
    model[4].bias.data[1] += shift
    return model.eval()


def made(target: Path, model: nn.Module, size: int = 8, **settings: Any) -> Bundle:
    torch.manual_seed(1)
    return export(model, example_inputs=(torch.randn(2, 3, size, size),), output=target, effort="quick", **settings)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return made(tmp_path_factory.mktemp("bundles") / "first", net())


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return made(tmp_path_factory.mktemp("bundles") / "shifted", net(0.5))


def test_equal_bundles_are_the_same(first: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = shutil.copytree(first.path, tmp_path / "again")
    found = compare_bundles(first.path, again)
    assert (found["same"], found["facts"], found["latency"], found["notes"]) == (True, {}, None, [])
    assert [file["same"] for file in found["files"]] == [True, True]
    assert main(["compare", str(first.path), str(again)]) == 0
    told = capsys.readouterr().out
    assert told.splitlines() == [f"{first.path} and {again} are the same: files, versions, passes and recommendation"]


def test_another_weight_shows_in_the_files_and_in_the_outputs(
    first: Bundle, shifted: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compare_bundles(first.path, shifted.path)
    assert list(found["facts"]) == ["weights of the model"]
    noise = first.manifest["golden"]["outputs"][0]["noise"]
    for file in found["files"]:
        (weight,) = file["weights"]["changed"]
        assert weight["name"].endswith("4.bias")
        assert weight["max_difference"] == pytest.approx(0.5)
        assert file["weights"]["removed"] == file["weights"]["added"] == file["weights"]["renamed"] == []
        assert file["operations"] == {"pairs": {}, "removed": [], "added": []}
        (output,) = file["outputs"]
        assert output["max_difference"] == pytest.approx(0.5, rel=1e-4)
        assert output["in_noise"] == pytest.approx(0.5 / noise, rel=1e-4)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert main(["compare", str(first.path), str(shifted.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("model.onnx: 1 of ") and "weights changed, " in line for line in lines)
    assert any(" changed the most, by " in line for line in lines)
    assert "model.onnx: the same operations, with their attributes" in lines
    assert "model.torchscript.pt: the same operations, without their arguments" in lines
    assert any(line.startswith("model.onnx: output output differs by at most 0.5, ") for line in lines)


def test_other_passes_show_in_the_operations(first: Bundle, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    folded = made(tmp_path / "folded", optimize(net(), passes=["fold-conv-bn"], example_inputs=(x,)), opset=19)
    found = compare_bundles(first.path, folded.path)
    assert found["facts"]["passes"] == ["none", "fold-conv-bn"]
    onnx = next(file for file in found["files"] if file["format"] == "onnx")
    scripted = next(file for file in found["files"] if file["format"] == "torchscript")
    assert onnx["operations"]["pairs"]["operator sets"][1] == "ai.onnx 19"
    assert scripted["operations"]["pairs"]["aten::batch_norm"] == [1, 0]
    assert scripted["operations"]["removed"] == ["aten::batch_norm"]
    for file in found["files"]:
        # The same function: within rounding.
        assert file["outputs"][0]["in_noise"] < 4


def test_other_inputs_are_said_and_the_rest_is_compared(
    first: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(net()[:3], nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Linear(144, 2)).eval()
    wider = made(tmp_path / "wider", model, 9, formats=("onnx",))
    found = compare_bundles(first.path, wider.path)
    assert found["notes"] == ["outputs and latency aren't compared, because the inputs differ"]
    assert found["facts"]["inputs"][1].endswith("float32[batch,3,9,9]")
    sizes = {file["path"]: file["bytes"] for file in found["files"]}
    assert sizes["model.torchscript.pt"][1] is None
    assert all(isinstance(size, int) for size in sizes["model.onnx"])
    assert main(["compare", str(first.path), str(wider.path)]) == 0
    assert "note: outputs and latency aren't compared, because the inputs differ" in capsys.readouterr().out


class Outputs(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: {"twice": x * 2, "sum": x.sum((1, 2, 3)), "less": x - 1}[name] for name in self.names}


def test_outputs_are_compared_by_their_names_and_others_are_said(tmp_path: Path) -> None:
    names = [("twice", "sum"), ("sum", "twice"), ("less",)]
    paths = [
        made(tmp_path / str(place), Outputs(*each).eval(), formats=("onnx",)).path for place, each in enumerate(names)
    ]
    found = compare_bundles(paths[0], paths[1])
    told = [(each["name"], each["max_difference"], each["problem"]) for each in found["files"][0]["outputs"]]
    assert told == [("twice", 0.0, None), ("sum", 0.0, None)]
    found = compare_bundles(paths[0], paths[2])
    assert found["files"][0]["outputs"] is None
    assert found["notes"] == ["the outputs of model.onnx aren't compared: there are 2 in one and 1 in the other"]


def test_the_latency_is_that_of_both_in_turn(
    first: Bundle, shifted: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPTIMIZE_EXPORT_NO_BENCH")
    monkeypatch.setattr(bundles, "_outputs", lambda format, both: None)
    assert main(["compare", str(first.path), str(shifted.path), "--seconds", "0.3", "--json"]) == 0
    latency = json.loads(capsys.readouterr().out)["comparison"]["latency"]
    assert latency["routes"] == ["onnx in onnxruntime"] * 2
    assert latency["ratio"]["rounds"] >= 3
    assert latency["ratio"]["low"] <= latency["ratio"]["median"] <= latency["ratio"]["high"]


def test_a_file_that_cannot_run_is_a_note(first: Bundle, shifted: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(bundles, "RunningFile", refusing)
    found = compare_bundles(first.path, shifted.path)
    assert found["notes"][0] == "the outputs of model.torchscript.pt aren't compared: RuntimeError: no kernel"
    assert found["files"][0]["weights"]["changed"]


def test_a_file_that_cannot_be_read_is_a_note(
    first: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(first.path, tmp_path / "broken")
    for name in ("model.onnx", "model.torchscript.pt"):
        (broken / name).write_bytes(b"garbage")
    seal(broken)
    found = compare_bundles(first.path, broken)
    starts = [note.partition(": ")[0] for note in found["notes"][:2]]
    names = ("model.torchscript.pt", "model.onnx")
    assert starts == [f"the weights and operations of {name} aren't compared" for name in names]
    assert [(file["same"], file["weights"]) for file in found["files"]] == [(False, None)] * 2
    assert main(["compare", str(first.path), str(broken)]) == 0
    assert "note: the weights and operations of model.onnx aren't compared: DecodeError" in capsys.readouterr().out


def test_equal_bundles_need_no_note_about_what_is_not_run(first: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "not_in_numpy", lambda manifest: "`x` is bfloat16, which numpy lacks")
    assert compare_bundles(first.path, first.path)["notes"] == []


def test_a_damaged_bundle_is_not_compared(
    first: Bundle, shifted: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = shutil.copytree(first.path, tmp_path / "damaged")
    (damaged / "model.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match=r"damaged, and no file is run: model\.onnx"):
        compare_bundles(shifted.path, damaged)
    assert main(["compare", str(damaged), str(first.path)]) == 8
    assert main(["compare", str(first.path)]) == 2
    assert "compare has no second bundle: name one" in capsys.readouterr().err


def test_pt2_files_are_read_and_files_of_other_packages_are_not(first: Bundle, tmp_path: Path) -> None:
    bundle = open_bundle(made(tmp_path / "pt2", net(), formats=("pt2",)).path)
    found = contents_of("pt2", bundle.path / "model.pt2")
    assert found is not None
    assert {tuple(values.shape) for _, values in found.weights.values()} >= {(4, 3, 3, 3), (2, 144)}
    assert any("conv" in name for name in found.counts())
    assert contents_of("another", bundle.path / "model.pt2") is None


def test_a_weight_under_another_name_is_renamed(first: Bundle) -> None:
    found = contents_of("onnx", first.path / "model.onnx")
    assert found is not None
    names = list(found.weights)
    other = type(found)({f"{name}_1": value for name, value in found.weights.items()}, found.operations, found.about)
    told = weights_between(found, other)
    assert told["renamed"] == [[name, f"{name}_1"] for name in names]
    assert told["removed"] == told["added"] == told["changed"] == []
    assert operations_between(found, other) == {"pairs": {}, "removed": [], "added": []}
