"""Limits: sizes beyond which a model takes another path, at inputs too large to compare, are declared and refused."""

import numpy
import pytest
import torch
from changed_bundles import edit_manifest
from tiny_models import enliven
from torch import nn

from exporters.errors import ExporterError
from optimize_export.errors import BundleError, UsageError
from optimize_export.relations import Relation, can_be_declared
from optimizer import export, load


class Large(nn.Module):
    """As diffusers does: copies a tensor that some kernels can't index."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        y = self.inner(x)
        if y.numel() * 2 > pow(2, 31):
            y = y.contiguous()
        return y


class Beyond(nn.Module):
    """Computes something else beyond a number of rows."""

    def __init__(self, rows):
        super().__init__()
        self.inner, self.rows = nn.Linear(64, 4), rows

    def forward(self, x):
        y = self.inner(x)
        return y if x.shape[0] <= self.rows else y * 2


def built(model, x, folder, formats=("onnx",), **options):
    return export(enliven(model).eval(), example_inputs=x, output=folder, formats=formats, bench=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "torchscript", "pt2", pytest.param("aoti", marks=pytest.mark.zoo)])
def test_every_format_declares_the_limit_and_load_checks_it(format, tmp_path):
    bundle = built(Large(), torch.randn(2, 64), tmp_path / "net", (format,))
    (entry,) = bundle.manifest["artifacts"]
    assert entry["limits"] == [{"condition": "128*batch <= 2147483648", "size": "batch", "largest": 16777216}]
    assert bundle.artifacts[0].limits[0].largest == 16777216
    model = load(bundle.path)
    for zeros in (numpy.zeros((1, 64), "float32"), torch.zeros(1, 64)):
        rows = (
            numpy.broadcast_to(zeros, (16777217, 64))
            if isinstance(zeros, numpy.ndarray)
            else zeros.expand(16777217, 64)
        )
        with pytest.raises(UsageError) as caught:
            model(rows)
        assert str(caught.value) == (
            "The file is right only where `128*batch <= 2147483648`, and batch is 16777217: pass smaller inputs."
        )
        assert model(zeros).shape == (1, 64)


def test_a_limit_of_several_sizes_holds_for_their_product(tmp_path):
    dynamic = {"x": {0: "batch", 1: "time"}}
    bundle = built(Large(), torch.randn(2, 8, 64), tmp_path / "net", dynamic=dynamic)
    limits = bundle.manifest["artifacts"][0]["limits"]
    assert [(each["size"], each["largest"]) for each in limits] == [("batch", 2097152), ("time", 8388608)]
    (condition,) = {each["condition"] for each in limits}
    (note,) = [note for note in bundle.manifest["notes"] if "is right where" in note]
    assert note.startswith(f"model.onnx is right where `{condition}` (up to batch 2097152, time 8388608, ")
    with pytest.raises(UsageError, match=r"batch is 5000, time is 5000|time is 5000, batch is 5000"):
        load(bundle.path)(numpy.broadcast_to(numpy.zeros((1, 1, 64), "float32"), (5000, 5000, 64)))


def test_a_size_that_can_be_tried_is_refused_as_before(tmp_path):
    with pytest.raises(ExporterError, match="at batch size 9 the model takes a different path"):
        built(Beyond(8), torch.randn(2, 64), tmp_path / "net")
    entry = built(Beyond(10**6), torch.randn(2, 64), tmp_path / "far").manifest["artifacts"][0]
    assert entry["limits"] == [{"condition": "batch <= 1000000", "size": "batch", "largest": 1000000}]
    assert "limits" not in built(nn.Linear(4, 4), torch.randn(2, 4), tmp_path / "none").manifest["artifacts"][0]


def test_load_refuses_a_limit_that_it_cannot_check(tmp_path):
    folder = built(Beyond(10**6), torch.randn(2, 64), tmp_path / "net").path
    limit = {"condition": "print(1) < 1", "size": "batch", "largest": 1}
    edit_manifest(folder, lambda manifest: manifest["artifacts"][0].update(limits=[limit]))
    with pytest.raises(BundleError, match=r"The manifest has a limit that can't be checked: 'print\(1\) < 1' isn't a"):
        load(folder)


@pytest.mark.parametrize(
    ("text", "largest"),
    [("batch < 100", 99), ("2*batch**2 <= 5000", 50), ("3*((batch - 1)//2) + 1 <= 31", 22), ("-batch >= -7", 7)],
)
def test_a_relation_holds_up_to_a_size(text, largest):
    relation = Relation(text)
    assert (relation.names, str(relation)) == (("batch",), f"`{text}`")
    assert can_be_declared(text)
    for size in (largest, largest + 1):
        assert relation.holds({"batch": size}) == eval(text, {"batch": size}) == (size == largest)
    assert relation.holds({"time": 10**9})


@pytest.mark.parametrize(
    "text",
    [
        *("", "batch", "f(batch) < 3", "batch.real < 3", "batch/2 < 3", "9**9**9 < batch", "batch**99 < 3"),
        *("batch//0 < 1", "batch % time < 1", "batch < 1.5", "'a' < 'b'", "batch <", "batch in batch", "True < batch"),
        *("(" * 500, "1<2" * 9999),
    ],
)
def test_anything_else_is_no_limit(text):
    assert not can_be_declared(text)
    with pytest.raises(ValueError, match="isn't a comparison of sizes"):
        Relation(text)
