"""`export(…, exporters=[Mine()])` takes an exporter that no package brings by an entry point."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import enliven
from torch import nn

import exporters.registry
from exporters import ExporterError, Pt2Exporter, UnknownFormat, exporter_named, exporter_names
from optimizer import export, load, verify_bundle

X = torch.randn(2, 3, 6, 6)


class Mine(Pt2Exporter):
    name = "mine"
    file_name = "model.mine"


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
        (Pt2Exporter(), "Pt2Exporter needs another name: there is a format 'pt2' already"),
    ],
)
def test_what_is_no_further_exporter_is_refused(net: nn.Module, tmp_path: Path, given: object, sentence: str) -> None:
    with pytest.raises(ExporterError, match=sentence):
        export(net, X, output=tmp_path / "net", exporters=[given])
    assert not (tmp_path / "net").exists()
