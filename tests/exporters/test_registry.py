from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import exporters.registry
from exporters import (
    AotiExporter,
    Exporter,
    ExporterError,
    OnnxExporter,
    Pt2Exporter,
    TorchScriptExporter,
    UnknownFormat,
    exporter_named,
    exporter_names,
    load_artifact,
)


class Weights(Exporter):
    name = "weights"
    file_name = "weights.bin"

    def export(self, request, directory):
        raise AssertionError

    @staticmethod
    def load(path, device):
        return f"{path} on {device}"


@pytest.fixture
def bring(monkeypatch):
    def install(*points):
        group = "optimize_export.exporters"
        found = [EntryPoint(name, f"{__name__}:{value}", group) for name, value in points]
        monkeypatch.setattr(exporters.registry, "entry_points", lambda group: found)
        monkeypatch.setattr(EntryPoint, "load", lambda point: globals()[point.attr])

    return install


def test_our_own_formats():
    assert exporter_names()[:4] == ("torchscript", "onnx", "pt2", "aoti")
    kinds = (TorchScriptExporter, OnnxExporter, Pt2Exporter, AotiExporter)
    assert tuple(type(exporter_named(name)) for name in exporter_names()[:4]) == kinds
    with pytest.raises(UnknownFormat, match=r"^There is no format 'onxx'; the formats are: torchscript, onnx, pt2, a"):
        exporter_named("onxx")


def test_another_package_brings_a_format(bring):
    bring(("weights", "Weights"))
    assert exporter_names() == ("torchscript", "onnx", "pt2", "aoti", "weights")
    assert isinstance(exporter_named("weights"), Weights)
    assert load_artifact("weights", Path("w"), "cuda") == "w on cuda"


@pytest.mark.parametrize("name", ["onnx", "weights"])
def test_a_name_that_two_bring_names_both(bring, name):
    bring((name, "Weights"), (name, "Path"))
    with pytest.raises(ExporterError, match=rf"'{name}' is provided by .* and by .*\("):
        exporter_named("torchscript")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [("weights", "Path", "isn't a subclass of exporters.Exporter"), ("other", "Weights", "calls itself 'weights'")],
)
def test_an_entry_point_that_is_no_exporter_is_refused(bring, name, value, sentence):
    bring((name, value))
    with pytest.raises(ExporterError, match=sentence):
        exporter_named(name)


def test_an_entry_point_that_cannot_be_imported_is_one_sentence(bring, monkeypatch):
    def fail(point):
        raise ImportError("No module named 'x'")

    bring(("weights", "Weights"))
    monkeypatch.setattr(EntryPoint, "load", fail)
    assert "weights" in exporter_names()
    with pytest.raises(ExporterError, match="can't be imported: No module named 'x'"):
        exporter_named("weights")
