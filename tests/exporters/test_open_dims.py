"""Files with several open dims are right at sizes that no call has, or are refused with the source line."""

import itertools
import re

import onnx
import pytest
import torch
from exportable_models import floats
from tiny_models import enliven
from torch import nn

import exporters.evidence
from exporters import Adapter, ExportError, ExportRequest, exporter_named
from exporters.aoti import missing_compiler
from exporters.evidence import TOGETHER, TooLarge, gather

FORMATS = ("torchscript", "onnx", "pt2")


class Text(nn.Module):
    """Attention over tokens, with a mask and a table of positions that is longer than any call."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(13, 8), nn.Embedding(200, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids, mask):
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        hidden = hidden + self.attention(hidden, hidden, hidden, key_padding_mask=mask == 0, need_weights=False)[0]
        return self.head(hidden), hidden[:, 0]


class Convolutional(nn.Module):
    """The output has the height and width of the input, which the forward reads."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        small = self.up(torch.relu(self.down(x)))
        return nn.functional.interpolate(small, size=x.shape[2:], mode="nearest")


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells, self.head = kind(3, 4, batch_first=True, bidirectional=True), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.cells(x)[0])


class Cross(nn.Module):
    """Two independent lengths."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, memory):
        scores = self.queries(x) @ self.keys(memory).transpose(1, 2)
        return scores.softmax(2) @ memory


class Whole(nn.Module):
    def forward(self, x, y):
        return (x * 2 + y).cumsum(1), x.sum(1)


class OnLength(nn.Module):
    """Takes another branch for more than 16 steps."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        if x.shape[1] > 16:
            x = x * 2
        return self.head(x)


def ids(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % 11


def over_time(n, t, _):
    return (floats(n, t, 3, seed=t),)


def both(*inputs, first="batch", second="time"):
    return {name: {0: first, 1: second} for name in inputs}


# name -> (model, function from the batch size and two other sizes to the inputs, open dims)
MODELS = {
    "text": (Text, lambda n, t, _: (ids(n, t), (ids(n, t) != 4).long()), both("ids", "mask")),
    "convolutional": (
        Convolutional,
        lambda n, h, w: (floats(n, 2, h, w, seed=h),),
        {"x": {0: "batch", 2: "height", 3: "width"}},
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), over_time, both("x")),
    "gru": (lambda: Recurrent(nn.GRU), over_time, both("x")),
    "cross": (
        Cross,
        lambda n, q, k: (floats(n, q, 4, seed=q), floats(n, k, 4, seed=k)),
        {**both("x", second="queries"), **both("memory", second="keys")},
    ),
    "whole": (Whole, lambda n, t, _: (ids(n, t), ids(n, t) * 3), both("x", "y")),
    "on_length": (OnLength, over_time, {"x": {1: "time"}}),
}


def request(name, **options):
    """An export request whose calls vary each size alone, then all together; and the function that makes inputs."""
    make, call, dims = MODELS[name]
    torch.manual_seed(0)
    model = enliven(make()).eval()
    opens_batch = any(0 in each for each in dims.values())
    sizes = [(2, 8, 6)]
    sizes += [(3, 8, 6), (5, 8, 6), (1, 8, 6)] if opens_batch else []
    sizes += [(2, 12, 6), (2, 4, 6)]
    sizes += [(2, 8, 7), (2, 8, 3), (2, 8, 1)] if name in ("convolutional", "cross") else []
    sizes += [(3, 12, 7), (4, 16, 8)] if opens_batch else []
    calls = tuple((call(*size), {}) for size in sizes)
    return ExportRequest(model, calls, open_dims=dims, **options), call


def exported(name, format, folder):
    asked, call = request(name)
    return exporter_named(format).export(asked, folder), asked.model, call


def refused(name, format, folder):
    asked, _ = request(name)
    with pytest.raises(ExportError) as caught:
        exporter_named(format).export(asked, folder)
    assert not list(folder.iterdir())
    return str(caught.value)


def assert_right(artifact, model, inputs):
    expected = Adapter(model, inputs).run(inputs)
    got = artifact.load()(*inputs)
    for ours, theirs in zip(expected, got, strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), inputs[0].shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format"),
    [
        *itertools.product(["text", "convolutional", "cross", "whole", "lstm"], FORMATS),
        ("gru", "torchscript"),
        pytest.param(
            *("cross", "aoti"),
            marks=[pytest.mark.zoo, pytest.mark.skipif(bool(missing_compiler()), reason="needs a compiler")],
        ),
    ],
)
def test_a_file_is_right_at_sizes_that_no_call_has(name, format, tmp_path):
    artifact, model, call = exported(name, format, tmp_path)
    for spec in artifact.inputs:
        assert {dim: size for dim, size in enumerate(spec.shape) if isinstance(size, str)} == MODELS[name][2][spec.name]
    for sizes in [(1, 1, 1), (2, 17, 5), (7, 3, 11), (3, 33, 2)]:
        assert_right(artifact, model, call(*sizes))
    if format == "onnx" and name == "convolutional":
        (image,) = onnx.load(artifact.path).graph.input
        dims = [dim.dim_param or dim.dim_value for dim in image.type.tensor_type.shape.dim]
        assert dims == ["batch", 2, "height", "width"]


@pytest.mark.slow
def test_a_recurrent_net_that_torch_unrolls_is_refused_with_the_line(tmp_path):
    sentence = refused("gru", "pt2", tmp_path)
    assert "the model fixes dim 1 of input `x` to 8, but it must be open" in sentence
    assert "`return self.head(self.cells(x)[0])` in the model's forward (test_open_dims.py:" in sentence
    assert sentence.endswith(" Leaving dim 1 of `x` out of `dynamic=…` may help: that wasn't tried.")


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_a_branch_on_the_length_is_refused_where_it_turns(format, tmp_path):
    sentence = refused("on_length", format, tmp_path)
    assert "at time = 17 the model takes a different path than the captured one, because of " in sentence
    assert "output `output` is wrong on inputs of [2, 17, 3]" in sentence
    assert sentence.endswith(" Leaving dim 1 of `x` out of `dynamic=…` may help: that wasn't tried.")


def test_a_branch_on_the_length_is_kept_by_a_script(tmp_path):
    artifact, model, call = exported("on_length", "torchscript", tmp_path)
    assert artifact.route == "script"
    assert "at time = 17 the model takes a different path" in dict(artifact.refused)["trace"]
    for sizes in [(2, 16, 0), (2, 17, 0), (2, 40, 0)]:
        assert_right(artifact, model, call(*sizes))


def test_sizes_that_only_turn_when_they_grow_together_are_found(tmp_path):
    class Square(nn.Module):
        def forward(self, x, y):
            return x * 2 if min(x.shape[1], y.shape[1]) > 30 else x

    sizes = [(8, 8), (12, 8), (4, 8), (8, 12), (8, 4), (9, 9), (10, 10)]
    calls = tuple(((floats(2, one, seed=one), floats(2, other)), {}) for one, other in sizes)
    open_dims = {"x": {1: "first"}, "y": {1: "second"}}
    with pytest.raises(ExportError) as caught:
        exporter_named("pt2").export(ExportRequest(Square().eval(), calls, False, open_dims), tmp_path)
    assert "at first = 31 and second = 31 the model takes a different path" in str(caught.value)


def wide_and_long(rows, height, width):
    wide = "wide" if rows > 20 else "narrow"
    return wide == "wide" and bool(height > 30)


def decided_before(rows, height, width):
    wide, long = ("wide" if rows > 20 else ""), ("long" if height > 30 else "")
    return bool(wide and long)


class OnSizes(nn.Module):
    """Computes something else where a decision on its three sizes is true."""

    def __init__(self, decides, factor=2.0):
        super().__init__()
        self.head, self.decides, self.factor = nn.Linear(3, 3), decides, factor

    def forward(self, x):
        y = self.head(x)
        return y * self.factor if self.decides(*x.shape[:3]) else y


def on_sizes(decides, **options):
    sizes = [(2, 8, 6), (3, 8, 6), (5, 8, 6), (2, 12, 6), (2, 4, 6), (2, 8, 7), (2, 8, 3), (3, 12, 7), (4, 16, 8)]
    calls = tuple(((floats(*each, 3, seed=sum(each)),), {}) for each in sizes)
    model = enliven(OnSizes(decides, **options)).eval()
    return ExportRequest(model, calls, open_dims={"x": {0: "batch", 1: "height", 2: "width"}})


@pytest.mark.parametrize(
    ("decides", "place"),
    [
        (lambda n, h, w: n > 20 and h > 30, "at batch = 21 and height = 31 "),
        (lambda n, h, w: n == 1 and h > 30, "at batch = 1 and height = 31 "),
        (lambda n, h, w: h > 30 and w > 20 and n > 6, "at height = 31, width = 21 and batch = 7 "),
        (wide_and_long, "at batch = 21 and height = 31 "),
        (decided_before, "at batch = 42 and height = 62 "),
    ],
)
def test_a_decision_that_several_sizes_make_together_is_refused(decides, place, tmp_path):
    # All formats that use torch.export share the capture and its conditions.
    with pytest.raises(ExportError) as caught:
        exporter_named("pt2").export(on_sizes(decides), tmp_path)
    assert f"{place}the model takes a different path than the captured one" in str(caught.value)


HARMLESS = (lambda n, h, w: n > 20 and h > 30, 1.0, [])
LARGE = (lambda n, h, w: n > 2000 and h > 30000, 2.0, [("height <= 30000", 30000)])


@pytest.mark.parametrize(
    ("decides", "factor", "limits", "format"),
    [(*HARMLESS, "torchscript"), (*HARMLESS, "pt2"), (*LARGE, "torchscript"), (*LARGE, "onnx")],
    ids=["harmless-torchscript", "harmless-pt2", "large-torchscript", "large-onnx"],
)
def test_a_decision_that_makes_no_difference_is_proven_and_one_on_large_sizes_is_a_limit(
    decides, factor, limits, format, tmp_path
):
    asked = on_sizes(decides, factor=factor)
    artifact = exporter_named(format).export(asked, tmp_path)
    assert artifact.refused == ()
    assert [(limit.condition, limit.largest) for limit in artifact.limits] == limits
    for sizes in [(21, 8), (2, 31), (21, 31), (1, 1)]:
        assert_right(artifact, asked.model, (floats(*sizes, 5, 3),))


def test_each_size_is_looked_at_by_itself_and_all_together():
    asked, _ = request("convolutional")
    evidence = gather(asked)
    assert {size.name: size.values for size in evidence.sizes} == {
        "batch": (2, 3, 5, 1),
        "height": (8, 12, 4),
        "width": (6, 7, 3, 1),
        TOGETHER: (1, 2, 3),
    }
    for sizes, shape, text in [
        ({"batch": 5}, (5, 2, 8, 6), "batch size 5"),
        ({"height": 20}, (2, 2, 20, 6), "height = 20"),
        ({"width": 5, "batch": 7}, (7, 2, 8, 5), "width = 5 and batch = 7"),
        ({TOGETHER: 5}, (6, 2, 24, 10), "batch = 6, height = 24 and width = 10"),
        ({"height": 3, TOGETHER: 5}, (6, 2, 3, 10), "height = 3, batch = 6 and width = 10"),
    ]:
        assert evidence.shapes_at(sizes) == (shape,)
        assert evidence.at(sizes) == text
        assert [tuple(tensor.shape) for tensor in evidence.inputs_at(sizes)] == [shape]


def test_only_inputs_larger_than_those_of_the_calls_are_too_large(monkeypatch):
    monkeypatch.setattr(exporters.evidence, "_LARGEST_INPUT", 0)
    evidence = gather(request("convolutional")[0])
    assert evidence.inputs_at({"batch": 1, "height": 1})[0].shape == (1, 2, 1, 6)
    with pytest.raises(TooLarge):
        evidence.inputs_at({"batch": 3})


# --------------------------------------------------------------------------------------- models with a fixed batch size


class Stacked(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.inner = rows

    def forward(self, x):
        return self.inner(x) + 1


class OverRows(nn.Module):
    def forward(self, x):
        return torch.stack([row * (index + 1) for index, row in enumerate(x)])


class InPython(nn.Module):
    def forward(self, x):
        return x.reshape(int(x.shape[0]), 3, -1).sum(2)


class InTheShape(nn.Module):
    """Returns (2, batch). The constant 2 is also the batch size of the first call."""

    def forward(self, x):
        return x.reshape(2, -1, 3)[:, : x.shape[0]].sum(2)


def batches(*sizes):
    return tuple(((floats(size, 6, seed=size),), {}) for size in sizes)


def baked(rows):
    model = Stacked(rows()).eval()
    # A loop can be scripted, but a `forward` set on the instance can only be traced.
    vars(model.inner)["forward"] = rows.forward.__get__(model.inner)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "format"), [*((OverRows, format) for format in FORMATS), (InPython, "torchscript"), (InTheShape, "pt2")]
)
def test_a_batch_that_is_baked_in_is_told_with_the_way_out(rows, format, tmp_path):
    model, exporter = baked(rows), exporter_named(format)
    with pytest.raises(ExportError) as caught:
        exporter.export(ExportRequest(model, batches(2, 4, 6)), tmp_path)
    assert re.search(r" at `return .*` in module `inner` \(test_open_dims\.py:\d+\)", str(caught.value))
    assert str(caught.value).endswith(" Fixing the batch size with `static_batch=True` may help: that wasn't tried.")
    for size in (1, 2, 3, 5, 8):
        fixed = exporter.export(ExportRequest(model, batches(size), dynamic_batch=False), tmp_path)
        assert_right(fixed, model, batches(size)[0][0])


@pytest.mark.parametrize(("rows", "format"), [(InPython, "pt2"), (InTheShape, "torchscript"), (InTheShape, "onnx")])
def test_a_batch_that_only_looks_baked_in_is_open(rows, format, tmp_path):
    model = baked(rows)
    artifact = exporter_named(format).export(ExportRequest(model, batches(2, 4, 6)), tmp_path)
    assert artifact.inputs[0].shape == ("batch", 6)
    for size in (2, 4, 6, 8) if rows is InTheShape else (1, 2, 3, 5, 8):
        assert_right(artifact, model, batches(size)[0][0])
