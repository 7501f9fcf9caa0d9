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

        def load(point):
            if point.attr not in globals():
                raise ImportError(f"no {point.attr}")
            return globals()[point.attr]

        monkeypatch.setattr(EntryPoint, "load", load)

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


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        ([("onnx", "Weights")], "'onnx' is provided by optimize-export and by .*"),
        ([("weights-float16", "Weights")], "'weights-float16' is provided by optimize-export and by .*"),
        ([("weights", "Weights"), ("weights", "Path")], r"'weights' is provided by .* and by .*\("),
        ([("weights", "Path")], "isn't a subclass of exporters.Exporter"),
        ([("other", "Weights")], "calls itself 'weights'"),
        ([("weights", "Missing")], "can't be imported: no Missing"),
    ],
)
def test_an_entry_point_that_cannot_be_used_is_one_sentence(bring, points, sentence):
    bring(*points)
    with pytest.raises(ExporterError, match=sentence):
        exporter_named(points[0][0])
