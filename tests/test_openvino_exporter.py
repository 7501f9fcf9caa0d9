"""The example of an exporter in a separate package, OpenVINO: it is found by its entry point like an installed one."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from exportable_models import exportable, floats
from tiny_models import enliven
from torch import nn

import exporters
from exporters import ExporterError, exporter_named, exporter_names
from optimize_export.errors import ParityError
from optimizer import export

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "openvino_exporter"
MODULE = "optimize_export_openvino"
SOURCE = EXAMPLE / f"{MODULE}.py"

needs_openvino = pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="needs OpenVINO: pip install openvino"
)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder on the path with the files of an installed package: the module, and pyproject.toml's entry points."""
    site = tmp_path / "site"
    about = site / f"{MODULE}-0.1.0.dist-info"
    about.mkdir(parents=True)
    (site / SOURCE.name).write_text(SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    points = [
        line
        for group, names in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in names.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join(points), encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    yield site
    sys.modules.pop(MODULE, None)


def test_it_needs_no_more_of_the_project_than_the_public_names_of_exporters():
    imports = [
        node for node in ast.walk(ast.parse(SOURCE.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
    ]
    plain = [node for node in ast.walk(ast.parse(SOURCE.read_text(encoding="utf-8"))) if isinstance(node, ast.Import)]
    homes = {alias.name for node in plain for alias in node.names} | {str(node.module) for node in imports}
    others = {home for home in homes if home.partition(".")[0] not in {*sys.stdlib_module_names, "torch", "openvino"}}
    assert others == {"exporters"}
    assert {alias.name for node in imports if node.module == "exporters" for alias in node.names} <= set(
        exporters.__all__
    )


def test_without_openvino_it_is_listed_and_tells_how_to_install_it(installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert "openvino" in exporter_names()
    with pytest.raises(ExporterError, match=r"^The format openvino needs .*: pip install openvino$"):
        exporter_named("openvino")


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(ids)))


def ids(rows: int) -> torch.Tensor:
    return torch.randint(0, 50, (rows, 7), generator=torch.Generator().manual_seed(rows))


CASES = {
    "conv_net": (lambda: exportable("conv_net")[0], lambda rows: floats(rows, 3, 6, 6, seed=rows)),
    "transformer": (lambda: enliven(Transformer()).eval(), ids),
}


@needs_openvino
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_its_files_are_proven_and_verified_as_those_of_any_format(name, installed, tmp_path):
    make, inputs = CASES[name]
    model = make()
    folder = tmp_path / "net"
    bundle = export(model, example_inputs=inputs(4), output=folder, formats=["openvino"], metadata={"author": "Jane"})
    (artifact,) = bundle.artifacts
    assert bundle.parity.ok
    assert [path.name for path in artifact.files] == ["model.xml", "model.bin"]
    assert artifact.inputs[0].shape == ("batch", *inputs(4).shape[1:])

    # In the files only the batch is dynamic, and they run in float32.
    import openvino

    loaded = openvino.Core().read_model(folder / "model.xml")
    assert [str(port.partial_shape) for port in loaded.inputs] == [f"[?,{','.join(map(str, inputs(4).shape[1:]))}]"]
    assert [port.any_name for port in (*loaded.inputs, *loaded.outputs)] == [artifact.inputs[0].name, "output"]
    entry = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["artifacts"][0]
    assert entry["metadata"]["author"] == "Jane"
    assert entry["parity"]["settings"]["openvino_precision"] == "f32"

    x = inputs(9)
    assert torch.allclose(exporter_named("openvino").load(folder / "model.xml", "cpu")(x)[0], model(x), atol=1e-5)

    # Another process finds the package by its entry point too.
    path = os.pathsep.join((str(installed), str(ROOT)))
    command = [sys.executable, "-m", "_optimize_export_start", "verify", str(folder)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_openvino
@pytest.mark.slow
@pytest.mark.parametrize(
    ("bit", "error", "sentence"),
    [
        # The highest exponent bit makes a weight huge; its sign changes the output by less than one thousandth.
        (0x40, ExporterError, r"can't be exported to openvino \(.*output `output` is wrong on inputs of"),
        (0x80, ParityError, "The openvino artifact isn't proven to compute the same as the original: output is off by"),
    ],
)
def test_a_file_with_a_wrong_weight_is_refused(bit, error, sentence, installed, tmp_path, monkeypatch):
    # Load the exporter first: it imports OpenVINO without its telemetry.
    exporter_named("openvino")
    import openvino

    save = openvino.save_model

    def spoil(model, path, **options):
        save(model, path, **options)
        weights = bytearray(path.with_suffix(".bin").read_bytes())
        weights[3] ^= bit
        path.with_suffix(".bin").write_bytes(weights)

    monkeypatch.setattr(openvino, "save_model", spoil)
    make, inputs = CASES["conv_net"]
    with pytest.raises(error, match=sentence):
        export(make(), example_inputs=inputs(4), output=tmp_path / "net", formats=["openvino"])
    assert not (tmp_path / "net").exists()
