"""Sizes of outputs that depend on input values: files are compared at values that change them."""

import pytest
import torch
from tiny_models import enliven
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from optimize_export.errors import ParityError
from optimizer import export
from optimizer.model.inputs import Samples
from optimizer.parity import measure_reference


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(4, 6, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.inner(packed)[0], batch_first=True)[0]


class Cropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x, mask):
        return self.inner(x)[:, : int(mask.sum(1).max())]


class Repeated(Cropped):
    def forward(self, x, counts):
        return self.inner(x).repeat_interleave(counts, 0)


class Summed(Cropped):
    def forward(self, x, mask):
        return self.inner(x) * mask[..., None]


X = torch.randn(3, 7, 4)
MASK = torch.arange(7) < torch.tensor([7, 4, 5])[:, None]


@pytest.mark.parametrize(
    ("model", "values", "where", "shape"),
    [
        (Packed, torch.tensor([7, 4, 5]), "batch size 3, smaller lengths", (3, 4, 6)),
        (Packed, torch.tensor([7, 7, 7]), "batch size 3, smaller lengths", (3, 6, 6)),
        (Cropped, MASK, "batch size 3, shorter masks", (3, 3, 3)),
        (Cropped, MASK.long(), "batch size 3, shorter masks", (3, 3, 3)),
        (Repeated, torch.tensor([2, 1, 3]), "batch size 3, smaller lengths", (3, 7, 3)),
        (Summed, MASK, None, None),
    ],
)
def test_values_that_change_a_size_are_among_the_calls(model, values, where, shape):
    reference = measure_reference(enliven(model()).eval(), Samples((X, values)), batch_sizes=(3,), other_values=True)
    found = {
        call: one.own.values["output"].shape for one in reference.original.calls if "draw" not in (call := one.where)
    }
    assert found == ({where: shape} if where else {})


def test_a_file_that_fixes_the_largest_length_is_refused_with_a_fixed_batch_too(tmp_path):
    model, inputs = enliven(Packed()).eval(), (X, torch.tensor([7, 4, 5]))
    with pytest.raises(
        ParityError, match=r"the shape is \(3, 7, 6\), but should be \(3, 4, 6\) at batch size 3, smaller"
    ):
        export(model, example_inputs=inputs, output=tmp_path / "net", formats=("onnx",), static_batch=True, bench=False)
    options = {"static_batch": True, "bench": False, "formats": ("torchscript",)}
    assert export(model, example_inputs=inputs, output=tmp_path / "net", **options).parity.ok


class Chosen(Cropped):
    def forward(self, x, mask):
        return self.inner(x), self.inner(x)[mask]


@pytest.mark.parametrize(("model", "shapes"), [(Chosen, [[3, 7, 3], [str, 3]]), (Summed, [[3, 7, 3]])])
def test_a_size_that_depends_on_values_is_declared_by_a_name(model, shapes, tmp_path):
    formats = ("torchscript", "pt2", "onnx") if model is Chosen else ("torchscript",)
    options = {"output": tmp_path / "net", "formats": formats, "static_batch": True, "bench": False}
    for entry in export(enliven(model()).eval(), example_inputs=(X, MASK), **options).manifest["artifacts"]:
        assert [[str if isinstance(dim, str) else dim for dim in each["shape"]] for each in entry["outputs"]] == shapes
