import importlib.util
import sys
import zipfile

import pytest
import torch
from exportable_models import floats

from exporters import ExportRequest
from exporters.isolation import torchscript_allowed
from exporters.registry import exporter_named

SOURCE = """
from typing import NamedTuple

import torch
from torch import nn

class Sortié(NamedTuple):
    logîts: torch.Tensor
    autre: torch.Tensor

class Blöck(nn.Module):
    def __init__(self):
        super().__init__()
        self.lïn = nn.Linear(4, 4)
        self.register_buffer("bûffer", torch.randn(4))
        self.paramètre = nn.Parameter(torch.randn(4))

    def forward(self, entrée):
        return self.lïn(entrée) * self.bûffer + self.paramètre

def añadir(x: torch.Tensor, name: str) -> torch.Tensor:
    return x + 1 if name == "日本\\n" else x

class Nétz(nn.Module):
    def __init__(self):
        super().__init__()
        self.блоки = nn.ModuleList([Blöck(), Blöck()])

    def forward(self, entrée):
        for блок in self.блоки:
            entrée = блок(entrée)
        return {"日本": entrée, "é": entrée.sin(), "e": entrée.cos()}

class Ветвь(Nétz):
    def forward(self, entrée):
        for блок in self.блоки:
            entrée = блок(entrée)
        if entrée.sum() > 0:
            entrée = añadir(-entrée, "日本\\n")
        return Sortié(entrée, entrée.tanh())
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    path = tmp_path / "modèle.py"
    path.write_text(SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("modèle", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "modèle", module)
    spec.loader.exec_module(module)
    return module


def export(model, name, tmp_path):
    folder = tmp_path / "dossier 日本"
    folder.mkdir()
    calls = tuple(((floats(size, 4),), {}) for size in (2, 3))
    return exporter_named(name).export(ExportRequest(model.eval(), calls, metadata={"clé": "日本"}), folder)


@pytest.mark.parametrize("name", ["torchscript", "onnx", "pt2"])
def test_names_may_have_any_letters(name, models, tmp_path):
    model = models.Nétz()
    artifact = export(model, name, tmp_path)
    assert exporter_named(name).read_metadata(artifact.path)["clé"] == "日本"
    x = floats(7, 4)
    for expected, got in zip(model(x).values(), artifact.load()(x), strict=True):
        assert torch.allclose(got, expected, atol=1e-6)
    if name == "torchscript":
        with torchscript_allowed():
            state = torch.jit.load(artifact.path).state_dict()
        assert {key.removeprefix("model.model."): value.tolist() for key, value in state.items()} == {
            key: value.tolist() for key, value in model.state_dict().items()
        }
        with zipfile.ZipFile(artifact.path) as archive:
            assert all(name.isascii() for name in archive.namelist())


def test_a_scripted_file_has_branches_functions_and_texts(models, tmp_path):
    model = models.Ветвь()
    artifact = export(model, "torchscript", tmp_path)
    assert artifact.route == "script"
    for sign in (1, -1):
        x = sign * floats(5, 4)
        for expected, got in zip(model(x), artifact.load()(x), strict=True):
            assert torch.allclose(got, expected, atol=1e-6)
