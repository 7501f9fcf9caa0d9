import onnx
import pytest
import torch
from exportable_models import Mlp, floats, mlp_calls
from tiny_models import enliven
from torch import nn

import exporters.onnx
from exporters import ExportError, ExportRequest, OnnxExporter, UnknownOpset
from exporters.onnx import is_read, opsets, refuse_opset


class Normed(nn.Module):
    """Its LayerNorm is one operator from opset 17 on, which can't be converted to older opsets."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        return self.norm(x) * 2


def export(model, opset, folder):
    calls = tuple(((floats(size, 3, seed=size),), {}) for size in (2, 3))
    return OnnxExporter().export(ExportRequest(enliven(model).eval(), calls, opset=opset), folder)


def written(path):
    return {entry.domain: entry.version for entry in onnx.load(path).opset_import}[""]


@pytest.mark.slow
@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18, 20, 21, 23])
def test_the_file_has_the_opset_that_was_asked_for(opset, tmp_path):
    artifact = export(Mlp(), opset, tmp_path)
    assert written(artifact.path) == artifact.opset == opset


@pytest.mark.slow
@pytest.mark.parametrize(("opset", "ir_version"), [(13, 7), (17, 8)])
def test_the_file_is_as_old_as_its_opset_so_that_a_runtime_of_that_time_reads_it(opset, ir_version, tmp_path):
    assert onnx.load(export(Mlp(), opset, tmp_path).path).ir_version == ir_version
    newest = onnx.load(OnnxExporter().export(ExportRequest(Mlp().eval(), mlp_calls(2, 3)), tmp_path).path)
    assert newest.ir_version > ir_version


def test_the_default_is_told_as_well(tmp_path):
    artifact = OnnxExporter().export(ExportRequest(Mlp().eval(), mlp_calls(2, 3)), tmp_path)
    assert artifact.opset == written(artifact.path)


@pytest.mark.slow
def test_what_the_new_exporter_cannot_convert_down_goes_by_the_old_one(tmp_path):
    artifact = export(Normed(), 13, tmp_path)
    assert artifact.route == "torchscript"
    assert artifact.opset == written(artifact.path) == 13
    reason = "torch's exporter writes opset 18 instead of 13"
    assert artifact.refused == (("dynamo", reason), ("dynamo-unoptimized", reason))
    assert export(Normed(), 17, tmp_path).opset == 17


@pytest.mark.slow
def test_no_file_claims_another_opset_than_was_asked_for(tmp_path, monkeypatch):
    real = torch.onnx.export

    def stubborn(*args, **options):
        return real(*args, **{**options, "opset_version": 20})

    monkeypatch.setattr(torch.onnx, "export", stubborn)
    with pytest.raises(ExportError, match="torch's exporter writes opset 20 instead of 18"):
        export(Mlp(), 18, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_range_is_that_of_the_exporters_and_of_the_runtime():
    assert opsets()[0] == 9
    assert is_read(opsets()[-1])
    assert not is_read(999)
    for opset in (None, *opsets()):
        refuse_opset(opset, ["torchscript", "onnx"])


@pytest.mark.parametrize(
    ("opset", "formats", "sentence"),
    [
        (8, ["onnx"], r"^Opset 8 isn't available here: .* opsets 9 to \d+\.$"),
        (
            999,
            ["onnx"],
            r"^Opset 999 isn't available here: torch's exporters write, and onnxruntime \S+ reads, opsets 9 to",
        ),
        (-1, ["onnx"], "Opset -1 isn't available here"),
        ("17", ["onnx"], r"^The opset must be a whole number, not '17'\.$"),
        (True, ["onnx"], r"^The opset must be a whole number, not True\.$"),
        (
            17,
            ["torchscript", "pt2"],
            r"^opset applies to ONNX files only, but the formats are torchscript, pt2: add onnx, or leave out opset\.$",
        ),
    ],
)
def test_an_opset_that_no_file_can_have_is_one_sentence(opset, formats, sentence):
    with pytest.raises(UnknownOpset, match=sentence):
        refuse_opset(opset, formats)


def test_the_range_is_known_to_a_torch_without_its_own_limits(monkeypatch):
    monkeypatch.setattr(exporters.onnx, "limits", None)
    found = opsets.__wrapped__()
    assert found[0] == 9
    assert found[-1] >= opsets()[-1]
    assert is_read(found[-1])
    assert not is_read(found[-1] + 1)
