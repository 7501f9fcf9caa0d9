"""`export(…, exporters=[Mine()])` takes an exporter that no package brings by an entry point."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import enliven
from torch import Tensor, nn

import exporters.registry
from exporters import (
    Artifact,
    Exporter,
    ExporterError,
    ExportRequest,
    LoadedArtifact,
    TorchScriptExporter,
    UnknownFormat,
    exporter_named,
    exporter_names,
)
from optimize_export.errors import UsageError
from optimizer import export, load, verify_bundle

X = torch.randn(2, 3, 6, 6)


class Mine(TorchScriptExporter):
    name = "mine"
    file_name = "model.mine"


class Nameless(Exporter):
    def export(self, request: ExportRequest, directory: Path) -> Artifact:
        raise NotImplementedError

    def load(self, path: Path, device: str = "cpu") -> LoadedArtifact:
        raise NotImplementedError


class ATensorFile:
    """Returns the only output by itself, as `torch.jit.load(path)` does."""

    def __init__(self, loaded: LoadedArtifact) -> None:
        self._loaded = loaded
        self.device, self.placement, self.settings = loaded.device, loaded.placement, loaded.settings

    def __call__(self, *tensors: Tensor) -> Any:
        return self._loaded(*tensors)[0]


class ATensor(Mine):
    """Its proof is that of `Mine`; only what `load` returns is wrong."""

    name = "a-tensor"

    def load(self, path: Path, device: str = "cpu") -> LoadedArtifact:
        return ATensorFile(super().load(path, device))


class OverTorchScript(Mine):
    file_name = TorchScriptExporter.file_name


class DataOverTorchScript(Mine):
    """Its second file has the name of another format's file."""

    def export(self, request: ExportRequest, directory: Path) -> Artifact:
        made = super().export(request, directory)
        data = directory / TorchScriptExporter.file_name
        data.write_bytes(b"data")
        return replace(made, files=(*made.files, data))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    exporters.registry._GIVEN.clear()


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return enliven(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())).eval()


def test_its_files_are_proven_loaded_and_verified_like_all_others(net: nn.Module, tmp_path: Path) -> None:
    bundle = export(net, X, output=tmp_path / "net", formats=["torchscript"], exporters=[Mine()])
    assert [entry["format"] for entry in bundle.manifest["artifacts"]] == ["torchscript", "mine"]
    torch.testing.assert_close(bundle.load("mine")(X)[0], net(X).detach())
    torch.testing.assert_close(load(tmp_path / "net", format="mine")(X), net(X).detach())
    assert verify_bundle(tmp_path / "net").ok
    assert exporter_names()[-1] == "mine"


def test_it_may_be_the_only_one_and_stand_alone(net: nn.Module, tmp_path: Path) -> None:
    bundle = export(net, X, output=tmp_path / "net", formats=(), exporters=Mine())
    assert [entry["format"] for entry in bundle.manifest["artifacts"]] == ["mine"]


def test_a_later_one_of_the_same_name_replaces_it() -> None:
    """A notebook defines the class again when its cell is run again."""
    first, second = Mine(), Mine()
    assert [exporters.registry.register(each) for each in (first, second)] == ["mine", "mine"]
    assert exporter_named("mine") is second


def test_another_process_does_not_know_it() -> None:
    with pytest.raises(UnknownFormat, match="There is no format 'mine'; the formats are: torchscript, onnx, pt2, aoti"):
        exporter_named("mine")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (Mine, r"isn't an exporter: pass an instance of a subclass of exporters.Exporter, such as Mine\(\)"),
        (TorchScriptExporter(), "TorchScriptExporter needs another name: there is a format 'torchscript' already"),
        (Nameless(), "Nameless needs `name` and `file_name`"),
    ],
)
def test_what_is_no_further_exporter_is_refused(net: nn.Module, tmp_path: Path, given: object, sentence: str) -> None:
    with pytest.raises(ExporterError, match=sentence):
        export(net, X, output=tmp_path / "net", exporters=[given])
    assert not (tmp_path / "net").exists()


def test_a_file_that_returns_a_tensor_alone_is_refused(net: nn.Module, tmp_path: Path) -> None:
    """Its exporter is the only one, and isn't in a list."""
    sentence = "ATensorFile returns a Tensor: what `load` of an exporter returns must return a tuple of tensors"
    with pytest.raises(ExporterError, match=sentence):
        export(net, X, output=tmp_path / "net", formats=(), exporters=ATensor())
    assert not (tmp_path / "net").exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            OverTorchScript(),
            "The formats 'torchscript' and 'mine' both write model.torchscript.pt: export them to two folders",
        ),
        (
            DataOverTorchScript(),
            "The format 'mine' writes model.torchscript.pt over the file of another format: export them to two folders",
        ),
    ],
)
def test_a_file_over_that_of_another_format_is_refused(
    net: nn.Module, tmp_path: Path, given: Exporter, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        export(net, X, output=tmp_path / "net", formats=["torchscript"], exporters=[given])
    assert not (tmp_path / "net").exists()
