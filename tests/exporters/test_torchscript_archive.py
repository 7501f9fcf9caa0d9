import importlib.util
import sys

import pytest
import torch
from exportable_models import floats

from exporters import ExportError, ExportRequest
from exporters.registry import exporter_named

SOURCE = """
import torch
from torch import nn

class Blöck(nn.Module):
    def __init__(self):
        super().__init__()
        self.lïn = nn.Linear(4, 4)

    def forward(self, entrée):
        return {"日本": self.lïn(entrée)}

class Attribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.lïn = nn.Linear(4, 4)

    def forward(self, x):
        return self.lïn(x)
"""


def export(model, name, tmp_path):
    folder = tmp_path / "dossier 日本"
    folder.mkdir()
    calls = tuple(((floats(size, 4),), {}) for size in (2, 3))
    return exporter_named(name).export(ExportRequest(model.eval(), calls, metadata={"clé": "日本"}), folder)


@pytest.fixture(params=["modèle", "plain_letters"])
def models(request, tmp_path, monkeypatch):
    path = tmp_path / f"{request.param}.py"
    path.write_text(SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(request.param, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, request.param, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["onnx", "pt2"])
def test_names_may_have_any_letters(name, models, tmp_path):
    model = models.Blöck()
    artifact = export(model, name, tmp_path)
    assert exporter_named(name).read_metadata(artifact.path)["clé"] == "日本"
    x = floats(7, 4)
    assert torch.allclose(artifact.load()(x)[0], model(x)["日本"], atol=1e-6)


@pytest.mark.parametrize("kind", ["Blöck", "Attribute"])
def test_letters_that_torch_cannot_read_in_torchscript_are_refused_with_the_way_out(kind, models, tmp_path):
    with pytest.raises(ExportError, match=r"letters beyond ASCII .*: rename them, or export to onnx or pt2"):
        export(getattr(models, kind)(), "torchscript", tmp_path)
