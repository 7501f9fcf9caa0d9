"""The debug folder, which reproduces a file's error."""

import runpy
import subprocess
import sys
import zipfile

import pytest
import torch
from spoiling import scale_onnx, scale_pt2, scale_torchscript, spoiling
from tiny_models import enliven
from torch import nn

from exporters import AotiExporter, OnnxExporter, Pt2Exporter, TorchScriptExporter
from optimize_export.errors import ParityError, UsageError
from optimizer import export


class Net(nn.Module):
    """Two of its outputs have infinity and NaN in fixed places; one of these doesn't depend on the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        logits = self.second(hidden)
        masked = torch.where(torch.arange(3) == 2, -torch.inf, logits)
        gaps = torch.tensor([-torch.inf, torch.nan, torch.inf])
        return {"logits": logits, "hidden": hidden, "masked": masked, "gaps": gaps + x[:, :3]}


def net() -> nn.Module:
    torch.manual_seed(0)
    return enliven(Net())


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def spoil_aoti(path):
    """Write another bias into the machine code."""
    bias = net().first.bias.detach()
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    (library,) = (name for name in records if name.endswith(".so"))
    assert records[library].count(bias.numpy().tobytes()) == 1
    records[library] = records[library].replace(bias.numpy().tobytes(), (bias * 2).numpy().tobytes())
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)


FORMATS = {
    "onnx": (OnnxExporter, lambda path: scale_onnx(path, "model.first.bias", 2)),
    "torchscript": (TorchScriptExporter, lambda path: scale_torchscript(path, ["model.model.first.bias"], 2)),
    "pt2": (Pt2Exporter, lambda path: scale_pt2(path, "model.first.bias", 2)),
    "aoti": (AotiExporter, spoil_aoti),
}
PLACES = {"torchscript": "couldn't be located", "aoti": "no values inside this aoti file can be compared"}


def reproduce(folder):
    program = [sys.executable, "-W", "ignore", str(folder / "reproduce.py")]
    return subprocess.run(program, capture_output=True, text=True, timeout=120, check=False, cwd=folder.parent)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated")
@pytest.mark.parametrize("name", ["onnx", "torchscript", "pt2", pytest.param("aoti", marks=pytest.mark.zoo)])
def test_the_folder_shows_by_itself_what_is_wrong_and_what_is_right(tmp_path, monkeypatch, name):
    right = tmp_path / "right"
    export(net(), example_inputs=X, output=right, formats=[name])
    spoiling(monkeypatch, *FORMATS[name])
    with pytest.raises(
        ParityError, match=rf"debug/{name} contains a self-contained reproduction: run reproduce\.py there\."
    ):
        export(net(), example_inputs=X, output=tmp_path / "net", formats=[name], debug_dir=tmp_path / "debug")
    assert {path.name for path in tmp_path.iterdir()} == {"right", "debug"}
    folder, file = tmp_path / "debug" / name, FORMATS[name][0].file_name
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "expected.pt", "inputs.pt", "reproduce.py", file,
    }  # fmt: skip
    place = PLACES.get(name, "It first differs at first (test_reproducing.py:")
    assert place in (folder / "README.md").read_text()
    done = reproduce(folder)
    assert done.returncode == 1, done.stderr
    verdicts = {line.split(":")[0]: line.split()[-1] for line in done.stdout.splitlines()}
    assert verdicts == {"logits": "wrong", "hidden": "wrong", "masked": "wrong", "gaps": "right"}
    (folder / file).write_bytes((right / file).read_bytes())
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(folder / "reproduce.py"), run_name="__main__")
    assert ended.value.code == 0


@pytest.mark.slow
def test_nothing_is_written_where_nothing_is_wrong(tmp_path):
    export(net(), example_inputs=X, output=tmp_path / "net", formats=["onnx"], debug_dir=tmp_path / "debug")
    assert not (tmp_path / "debug").exists()


@pytest.mark.slow
def test_a_folder_is_never_half_written_and_never_hides_the_failure(tmp_path, monkeypatch):
    spoiling(monkeypatch, *FORMATS["onnx"])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ParityError, match=r"is off by .* couldn't be written \(error 28\)\."):
        export(net(), example_inputs=X, output=tmp_path / "n", formats=["onnx"], debug_dir=tmp_path / "debug")
    assert list((tmp_path / "debug").iterdir()) == []


def test_a_folder_that_is_there_or_of_the_bundle_is_refused_before_any_work(tmp_path):
    (tmp_path / "debug").mkdir()
    for name, message in (
        ("debug", "already exists: choose a new folder for debugging"),
        ("x/../net", "which has other files: use another folder"),
    ):
        with pytest.raises(UsageError, match=message):
            export(net(), example_inputs=X, output=tmp_path / "net", formats=["onnx"], debug_dir=tmp_path / name)
