"""`dynamic`: accepted values, the inputs that are drawn for it, and bundles with several open dims."""

import re

import pytest
import torch
from located_models import LateNet
from tiny_models import enliven
from torch import nn

from exporters.errors import StructureError
from optimize_export.errors import ExportFailed, ParityError, UsageError
from optimizer import export, open_bundle, optimize, verify_bundle
from optimizer.command.cli import main
from optimizer.exporting.artifact_parity import FileProof
from optimizer.model.dynamic import OpenDims, open_dims
from optimizer.model.inputs import Samples, Taken, ladder
from optimizer.option_texts import parse_dynamic
from optimizer.parity import golden_entries, measure_reference

X, MASK, LENGTHS = torch.randn(2, 5, 4), torch.ones(2, 5, dtype=torch.long), torch.tensor([5, 3])
INPUTS = {"x": X, "mask": MASK, "lengths": LENGTHS}


def declared(dynamic, **options):
    return open_dims(dynamic, INPUTS, first=X, **options)


# ------------------------------------------------------------------------------------------------------ accepted values


@pytest.mark.parametrize(
    ("texts", "read"),
    [
        (["x:0,2"], {"x": {0: None, 2: None}}),
        (["x:0=batch,2=time"], {"x": {0: "batch", 2: "time"}}),
        (["x: 0 = batch , 2"], {"x": {0: "batch", 2: None}}),
        (["x:0", "mask:1=time"], {"x": {0: None}, "mask": {1: "time"}}),
        (["x:0", "x:1"], {"x": {0: None, 1: None}}),
        (["a:b:1"], {"a:b": {1: None}}),
    ],
)
def test_the_option_is_read(texts, read):
    assert parse_dynamic("--dynamic", texts) == read


def test_dims_without_a_name_get_one():
    assert declared({"x": (0, 1)}).of == {"x": {0: "batch", 1: "x_dim_1"}}
    assert declared({"x": [1], "lengths": (0,)}).of == {"x": {1: "x_dim_1"}, "lengths": {0: "batch"}}
    assert declared({"x": {1: None, 2: "width"}}).of == {"x": {1: "x_dim_1", 2: "width"}}
    assert declared(None) == OpenDims()


def test_equal_sizes_share_no_name_unless_they_are_given_one():
    apart = declared({"x": (0, 1), "mask": (0, 1)})
    assert apart.of == {"x": {0: "batch", 1: "x_dim_1"}, "mask": {0: "batch", 1: "mask_dim_1"}}
    assert apart.given == {"x_dim_1": 5, "mask_dim_1": 5}
    one = declared({"x": {0: "n", 1: "time"}, "mask": {0: "n", 1: "time"}})
    assert (one.batch, one.given) == ("n", {"time": 5})
    assert one.places("time") == "dim 1 of x, dim 1 of mask"


@pytest.mark.parametrize(
    ("dynamic", "part"),
    [
        ({}, "opens no dim: list the dims of an input"),
        ((0, 1), "must be a dict such as"),
        ({"y": (0,)}, "names y, but the inputs in the files are x, mask, lengths."),
        ({"x": ()}, "lists no dim of x: add one"),
        ({"x": 0}, "must map each input to a tuple of dims, or to a dict of dims and names, not 0."),
        ({"x": "01"}, "must map each input to a tuple of dims, or to a dict of dims and names, not '01'."),
        ({0: (0,)}, "must map each input to a tuple of dims, or to a dict of dims and names, not (0,)."),
        ({"x": (3,)}, "opens dim 3 of x, which is [2, 5, 4] in the example inputs: its dims are 0 to 2."),
        ({"x": (-1,)}, "lists -1 as a dim of x: dims must be whole numbers, counted from 0"),
        ({"x": (0, 0)}, "lists dim 0 of x twice."),
        ({"x": (True,)}, "lists True as a dim of x: dims must be whole numbers"),
        ({"x": {1: "two words"}}, "uses 'two words' as the name for the size of dim 1 of x: use a word"),
        ({"x": {1: "time"}, "lengths": {0: "time"}}, "gives dim 0 of lengths and dim 1 of x the same name, time, but"),
        ({"x": {0: "batch", 1: "batch"}}, "gives dim 1 of x and dim 0 of x the same name, batch, but their sizes"),
    ],
)
def test_what_makes_no_sense_is_told(dynamic, part):
    with pytest.raises(UsageError, match=re.escape(f"dynamic {part}")):
        declared(dynamic)


def test_a_batch_is_open_or_fixed():
    with pytest.raises(
        UsageError, match="static_batch fixes the batch size, but dynamic opens dim 0 of mask: use only one"
    ):
        declared({"mask": (0, 1)}, static_batch=True)
    assert declared({"mask": (1,)}, static_batch=True).given == {"mask_dim_1": 5}


def test_a_scalar_and_an_empty_dim_have_no_size_to_change():
    with pytest.raises(UsageError, match=r"opens dim 0 of s, which is \[\] in the example inputs: it has no dims"):
        open_dims({"s": (0,)}, {"s": torch.tensor(1.0)}, first=None)
    with pytest.raises(UsageError, match=r"opens dim 1 of e, which is empty in the example inputs: \[2, 0\]"):
        open_dims({"e": (1,)}, {"e": torch.ones(2, 0)}, first=None)


def test_one_tensor_for_two_inputs_has_one_declaration():
    inputs = {"q": X, "k": X}
    with pytest.raises(
        UsageError, match="q and k are the same tensor in the example inputs, but dynamic opens different dims"
    ):
        open_dims({"q": (0, 1)}, inputs, first=X)
    dims = {0: "batch", 1: "time"}
    assert open_dims({"q": dims, "k": dims}, inputs, first=X).given == {"time": 5}


# --------------------------------------------------------------------------------------------------------------- samples


def opened(dynamic, args=(X, MASK), names=("x", "mask")):
    samples = Samples(args)
    inputs = dict(zip(names, samples.given.args, strict=True))
    return samples.opened(open_dims(dynamic, inputs, first=samples.first), inputs)


def shapes(call):
    return [tuple(tensor.shape) for tensor in call.args]


def test_every_dim_of_a_size_grows_with_it():
    samples = opened({"x": {0: "batch", 1: "time"}, "mask": {0: "batch", 1: "time"}})
    assert shapes(samples.at(2, sizes=(("time", 9),))) == [(2, 9, 4), (2, 9)]
    assert shapes(samples.at(3, sizes=(("time", 1),))) == [(3, 1, 4), (3, 1)]
    assert shapes(samples.at(3)) == [(3, 5, 4), (3, 5)]
    assert samples.at(2, sizes=(("time", 5),)).args[0] is samples.given.args[0]


def test_slices_that_belong_together_stay_together():
    ids = torch.arange(10).reshape(2, 5)
    samples = opened({"x": {1: "time"}, "mask": {1: "time"}}, (ids, ids * 10))
    for size in (1, 3, 5, 12):
        call = samples.at(2, sizes=(("time", size),))
        assert torch.equal(call.args[1], call.args[0] * 10)
        assert set(call.args[0][0].tolist()) <= set(ids[0].tolist())
    assert len(set(samples.at(2, sizes=(("time", 8),)).args[0][0].tolist())) == 5


def test_floats_are_drawn_in_the_new_shape():
    samples = opened({"x": {1: "time"}}, (X,), ("x",))
    drawn = samples.at(2, sizes=(("time", 200),)).args[0]
    assert drawn.unique().numel() > 0.9 * drawn.numel()
    assert abs(drawn.mean() - X.mean()) < 0.1
    assert torch.equal(drawn, samples.at(2, sizes=(("time", 200),)).args[0])


def test_a_dim_0_that_is_not_open_stays():
    samples = opened({"x": (1,)})
    assert samples.dynamic
    assert shapes(samples.at(7)) == [(2, 5, 4), (7, 5)]
    assert not torch.equal(samples.at(2, 1).args[0], X)
    assert not opened({"x": (1,), "mask": (1,)}).dynamic


def test_a_function_knows_the_batch_and_is_resized():
    samples = Samples(lambda batch, generator: (torch.randn(batch, 5, 4, generator=generator),))
    inputs = {"x": samples.given.args[0]}
    samples = samples.opened(open_dims({"x": (0, 1)}, inputs, first=samples.first), inputs)
    assert shapes(samples.at(3, sizes=(("x_dim_1", 8),))) == [(3, 8, 4)]
    moved = samples.to("cpu")
    assert torch.equal(moved.at(3, sizes=(("x_dim_1", 8),)).args[0], samples.at(3, sizes=(("x_dim_1", 8),)).args[0])


def test_a_function_whose_other_sizes_go_with_the_batch_is_told():
    samples = Samples(lambda batch, generator: (torch.ones(batch, batch + 3),))
    inputs = {"x": samples.given.args[0]}
    samples = samples.opened(open_dims({"x": (0, 1)}, inputs, first=samples.first), inputs)
    with pytest.raises(UsageError, match="returns x_dim_1 with size 6 at one batch size and 5 at another"):
        samples.at(3, sizes=(("x_dim_1", 9),))


# ----------------------------------------------------------------------------------------------------------------- sizes


def test_other_sizes_are_smaller_ones_and_larger_ones_and_one():
    assert ladder(12) == (13, 1, 24, 6, 18, 11, 36, 48)
    assert ladder(1) == (2, 3, 4)


def test_what_is_traced_has_no_size_of_one():
    taken = Taken(2, {"time": 1, "width": 6}, {"time": [2, 3, 4], "width": [7, 1, 12, 3]})
    assert taken.bases() == (("time", 2), ("width", 6))
    assert (taken.others("time"), taken.others("width")) == ([3, 4, 1], [3, 7, 1])
    assert taken.steps(2, (1, 2, 5)) == (3, {"time": 1, "width": 1})
    assert Taken(2, {"time": 8}, {"time": [4, 1]}).steps(2, (2,)) == (0, {"time": 0})


class Table(nn.Module):
    """Has eight positions; longer inputs raise."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.places = nn.Embedding(8, 4)

    def forward(self, x):
        return self.inner(x) + self.places(torch.arange(x.shape[1]))


class Baked(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = Five()

    def forward(self, x):
        return self.head(x) + 1


class Five(nn.Module):
    def forward(self, x):
        return x.reshape(x.shape[0], 5, 4).sum(2)


def measured(model, dynamic, args=(X,)):
    return measure_reference(
        enliven(model).eval(), opened(dynamic, args, ("x", "mask")[: len(args)]), batch_sizes=(2, 3)
    )


def test_the_original_is_run_at_several_sizes_of_each_and_at_some_of_all():
    reference = measured(nn.Linear(4, 3), {"x": {0: "batch", 1: "time"}})
    assert reference.batch_sizes == (2, 3)
    assert reference.taken.alone == {"time": [6, 1, 10, 2]}
    assert reference.taken.together == [(3, (("time", 6),)), (4, (("time", 7),))]
    where = [where for where, _ in reference.calls()]
    assert "batch size 2, time 10, draw 0" in where
    assert "batch size 4, time 7, draw 0" in where
    golden = [(entry.batch_size, dict(entry.sizes)) for entry in golden_entries(reference)]
    assert golden == [(2, {}), (3, {}), (2, {"time": 6}), (2, {"time": 1})]


def test_sizes_that_the_original_does_not_take_are_left_out_and_told():
    reference = measured(Table(), {"x": {0: "batch", 1: "time"}})
    assert reference.taken.alone == {"time": [6, 1, 2, 7]}
    notes = reference.compare(reference.target).notes
    assert "time was checked at the sizes 1, 2, 5, 6, 7." in notes
    (raised,) = [
        note for note in notes if note.startswith("Left out, as the model itself doesn't take them: time 10 (")
    ]
    assert "`return self.inner(x) + self.places(torch.arange(x.shape[1]))` in the model's forward" in raised


# --------------------------------------------------------------------------------------------------------------- bundles


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x, mask):
        return self.inner(x).masked_fill(mask.unsqueeze(2) == 0, 0.0)


def scores():
    torch.manual_seed(0)
    return enliven(Scores()).eval()


TIME = {"x": {0: "batch", 1: "time"}, "mask": {0: "batch", 1: "time"}}


def test_a_bundle_is_compared_and_verified_at_other_sizes(tmp_path):
    bundle = export(scores(), example_inputs=(X, MASK), output=tmp_path / "net", formats=("torchscript",), dynamic=TIME)
    (artifact,) = bundle.artifacts
    assert [spec.shape for spec in artifact.inputs] == [("batch", "time", 4), ("batch", "time")]
    assert artifact.outputs[0].shape == ("batch", "time", 3)
    calls = bundle.manifest["artifacts"][0]["parity"]["outputs"][0]["calls"]
    assert {call["sizes"]["time"] for call in calls if "sizes" in call} == {1, 2, 6, 7, 10}
    assert [call.get("sizes") for call in bundle.manifest["golden"]["calls"]][-2:] == [{"time": 6}, {"time": 1}]
    assert bundle.manifest["example_sizes"] == {"time": 5}
    assert "x = torch.zeros((2, 5, 4), dtype=torch.float32)" in (bundle.path / "README.md").read_text()
    report = verify_bundle(open_bundle(tmp_path / "net").path)
    assert report.ok
    assert report.artifacts[0].calls == 5


def test_a_file_that_is_wrong_at_one_length_alone_is_not_published(tmp_path, monkeypatch):
    from exporters.torchscript import TorchScriptExporter

    right = TorchScriptExporter.load

    def load(path, device):
        loaded = right(path, device)
        if ".export-" in str(path):
            return loaded

        class Spoilt:
            placement, settings = None, {}
            device = loaded.device

            def __call__(self, *tensors):
                outputs = loaded(*tensors)
                return tuple(output + (tensors[0].shape[1] == 10) for output in outputs)

        return Spoilt()

    monkeypatch.setattr(TorchScriptExporter, "load", staticmethod(load))
    monkeypatch.setattr(FileProof, "__call__", lambda *_: False)
    with pytest.raises(ParityError, match=r"at batch size 2, time 10, draw 0"):
        export(scores(), example_inputs=(X, MASK), output=tmp_path / "net", formats=("torchscript",), dynamic=TIME)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("format", ["torchscript", "onnx", "pt2"])
def test_what_shows_at_one_length_alone_is_found_where_it_is(format, tmp_path):
    fast = optimize(LateNet(dim=1, start=8).eval(), [], example_inputs=X)
    fast.late.extra = nn.Parameter(torch.ones(4))
    where = r"at batch size 2, time 10, draw 0.* It first differs at late \(located_models\.py:"
    with pytest.raises(ParityError, match=where):
        export(
            fast, example_inputs=X, output=tmp_path / "net", formats=[format], dynamic={"x": {0: "batch", 1: "time"}}
        )


def test_a_fixed_batch_with_an_open_length(tmp_path):
    dims = {"x": {1: "time"}, "mask": {1: "time"}}
    bundle = export(
        scores(),
        example_inputs=(X, MASK),
        output=tmp_path / "net",
        formats=("torchscript",),
        dynamic=dims,
        static_batch=True,
    )
    assert [spec.shape for spec in bundle.artifacts[0].inputs] == [(2, "time", 4), (2, "time")]
    assert bundle.manifest["parity"]["batch_sizes"] == [2]
    loaded = bundle.artifacts[0].load()
    assert loaded(torch.randn(2, 9, 4), torch.ones(2, 9, dtype=torch.long))[0].shape == (2, 9, 3)
    with pytest.raises(Exception, match=r"Input x of this file is \[2, time, 4\]"):
        loaded(torch.randn(3, 9, 4), torch.ones(3, 9, dtype=torch.long))


def test_inputs_that_nothing_is_said_of_keep_an_open_batch(tmp_path):
    def by_sum(size):
        return torch.randn(size, 7, 4), torch.ones(size, 5, dtype=torch.long)

    class Sums(Scores):
        def forward(self, x, mask):
            return self.inner(x).sum(1) + mask.sum(1, keepdim=True)

    bundle = export(
        enliven(Sums()).eval(),
        example_inputs=(X, MASK),
        output=tmp_path / "net",
        formats=("torchscript",),
        dynamic={"x": {0: "rows", 1: "time"}},
    )
    assert [spec.shape for spec in bundle.artifacts[0].inputs] == [("rows", "time", 4), ("rows", 5)]
    assert bundle.artifacts[0].load()(*by_sum(3))[0].shape == (3, 3)


def test_sizes_that_only_a_format_goes_by_are_no_hindrance(tmp_path):
    image = torch.randn(2, 3, 12, 10)
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1))).eval()
    fast = optimize(model, ["channels-last", "pad-channels:force=true"], example_inputs=(image,))
    assert [record.status for record in fast.report.passes] == ["applied", "applied"]
    bundle = export(
        fast, example_inputs=(image,), output=tmp_path / "net", formats=("torchscript",), dynamic={"input": (0, 2)}
    )
    assert bundle.artifacts[0].route == "trace"
    assert bundle.artifacts[0].inputs[0].shape == ("batch", 3, "input_dim_2", 10)


def test_a_length_that_the_model_fixes_is_told_with_module_and_line(tmp_path):
    with pytest.raises(ExportFailed) as caught:
        export(Baked().eval(), example_inputs=(X,), output=tmp_path / "net", formats=("onnx",), dynamic={"x": (0, 1)})
    sentence = str(caught.value)
    assert sentence.startswith("dynamic opens dim 1 of x, but the model raises at every other size that was tried")
    assert "`return x.reshape(x.shape[0], 5, 4).sum(2)` in module `head` (test_dynamic.py:" in sentence
    assert sentence.endswith(": leave dim 1 of x out, or change that line.")
    assert not list(tmp_path.iterdir())


class TwoRows(nn.Module):
    def forward(self, x):
        return x.reshape(2, -1).sum(1) + x.reshape(2, 5, 4)[:, 0, 0]


def test_a_batch_that_the_model_fixes_is_refused_where_it_is_asked_for_and_told_elsewhere(tmp_path):
    with pytest.raises(ExportFailed, match=r"dynamic opens dim 0 of x, .* in the model's forward \(test_dynamic"):
        export(TwoRows(), example_inputs=(X,), output=tmp_path / "net", formats=("torchscript",), dynamic={"x": (0,)})
    for options in ({}, {"static_batch": True}):
        bundle = export(
            TwoRows(), example_inputs=(X,), output=tmp_path / "net", formats=("torchscript",), force=True, **options
        )
        assert bundle.artifacts[0].inputs[0].shape == (2, 5, 4)
        told = [
            note
            for note in bundle.manifest["notes"]
            if note.startswith("the batch size is fixed, as with static_batch")
        ]
        assert len(told) == (not options)
        assert all("x.reshape(2, 5, 4)[:, 0, 0]` in the model's forward (test_dynamic.py:" in note for note in told)


class Together(nn.Module):
    """Takes two inputs of the same length; more than `limit` rows raise."""

    def __init__(self, limit: int = 100) -> None:
        super().__init__()
        self.limit = limit
        self.head = nn.Linear(1, 3)

    def forward(self, ids, mask):
        if len(ids) > self.limit:
            raise ValueError("too many rows")
        return self.head(ids.unsqueeze(2).float()) * mask.unsqueeze(2)


def test_sizes_that_the_original_does_not_take_are_told_once_and_where_the_result_is_read(tmp_path):
    options = {"formats": ("torchscript", "pt2"), "dynamic": {"ids": (0, 1)}, "bench": False}
    inputs = (torch.randint(0, 9, (2, 5)), torch.rand(2, 5))
    bundle = export(Together(limit=3).eval(), inputs, output=tmp_path / "net", **options)
    (told,) = [note for note in bundle.manifest["notes"] if "as the model itself doesn't take them: " in note]
    assert "batch size 5, batch size 8, ids_dim_1 6" in told
    assert f"\n- {told}\n" in (bundle.path / "README.md").read_text()


def test_sizes_that_were_left_out_are_told_where_a_file_fails_too(tmp_path):
    model = enliven(Together(limit=3)).eval()
    inputs = (torch.randint(0, 9, (2, 5)), torch.rand(2, 5))
    fast = optimize(model, [], example_inputs=inputs)
    with torch.no_grad():
        fast.head.weight.data = fast.head.weight * 2
    with pytest.raises(ParityError) as caught:
        export(fast, example_inputs=inputs, output=tmp_path / "net", formats=("torchscript",))
    (told,) = caught.value.figures["notes"]
    assert told.startswith("Left out, as the model itself doesn't take them: batch size 5, batch size 8 (")


def test_a_batch_that_is_fixed_as_no_other_size_is_compared_is_told(tmp_path):
    bundle = export(
        enliven(Together()).eval(),
        example_inputs=(torch.randint(0, 9, (2, 5)), torch.rand(2, 5)),
        output=tmp_path / "net",
        formats=("torchscript",),
        batch_sizes=(2,),
    )
    assert bundle.artifacts[0].inputs[0].shape == (2, 5)
    assert bundle.manifest["notes"] == [
        "the artifacts are compared with the exported module itself",
        "the batch size is fixed, as with static_batch: batch_sizes has only the size of the example inputs",
    ]


def test_a_batch_of_which_no_other_size_is_asked_for_is_told(tmp_path):
    options = {"formats": ("onnx",), "batch_sizes": (2,), "dynamic": TIME}
    with pytest.raises(UsageError, match="but batch_sizes has only the size of the"):
        export(scores(), example_inputs=(X, MASK), output=tmp_path / "net", **options)


def test_nothing_is_run_for_what_makes_no_sense(tmp_path):
    class Never(Scores):
        def forward(self, x, mask):
            raise AssertionError("it ran")

    with pytest.raises(UsageError, match="dynamic names y, but the inputs in the files are x, mask"):
        export(Never(), example_inputs=(X, MASK), output=tmp_path / "net", dynamic={"y": (0,)})
    with pytest.raises(UsageError, match="dynamic names x, but the inputs in the files are a, b"):
        export(Never(), example_inputs=(X, MASK), output=tmp_path / "net", input_names=("a", "b"), dynamic={"x": (0,)})


MODEL = """
import torch
from torch import nn

class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x, mask):
        return self.inner(x) * mask.unsqueeze(2)

model = Scores()
example_inputs = (torch.randn(2, 5, 4), torch.ones(2, 5))
"""


def run(tmp_path, *arguments):
    (tmp_path / "net.py").write_text(MODEL)
    return main([str(tmp_path / "net.py"), "--formats", "torchscript", "--output", str(tmp_path / "net"), *arguments])


def test_the_command_opens_the_dims_that_it_is_told(tmp_path, capsys):
    dims = ("--dynamic", "x:0=batch,1=time", "--dynamic", "mask:0=batch,1=time")
    assert run(tmp_path, *dims) == 0
    assert main(["verify", str(tmp_path / "net")]) == 0
    assert run(tmp_path, *dims, "--details", "--force") == 0
    shown = capsys.readouterr().out
    assert "x[batch,time,4]" in shown
    assert "mask[batch,time]" in shown
    assert "2, time 10" in shown


def test_the_command_tells_before_any_work(tmp_path, capsys):
    assert run(tmp_path, "--dynamic", "ids:1") == 2
    said = capsys.readouterr().err
    assert said.endswith("optimize-export: error: dynamic names ids, but the inputs in the files are x, mask.\n")
    assert "optimize-export: optimize" not in said


# --------------------------------------------------------------------------------------------- dims with the same name


class Graph(nn.Module):
    """A graph convolution: the adjacency matrix has the number of nodes in both dims."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x, adj):
        return adj @ self.inner(x)


class WithState(nn.Module):
    """A recurrent layer whose state has the batch in dim 1."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.inner = nn.LSTM(4, 6, batch_first=batch_first)

    def forward(self, x, state, cell):
        return self.inner(x, (state, cell))[0]


class Messages(nn.Module):
    """Adds rows of `x` that `edges` names by their numbers, so `x` can't be smaller."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x, edges):
        sent = self.inner(x)[edges[0]]
        return torch.zeros(x.shape[0], 3).index_add(0, edges[1], sent)


class TimeMajor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(4, 6)

    def forward(self, x, scale):
        return self.inner(x)[0] * scale[:, None]


def graph():
    return enliven(Graph()).eval(), (torch.randn(9, 4), torch.rand(9, 9))


def state():
    return enliven(WithState()).eval(), (torch.randn(3, 5, 4), torch.randn(1, 3, 6), torch.randn(1, 3, 6))


def messages():
    edges = torch.tensor([[0, 8, 3, 5, 7, 8], [1, 2, 8, 4, 6, 0]])
    return enliven(Messages()).eval(), (torch.randn(9, 4), edges)


def time_major():
    return enliven(TimeMajor()).eval(), (torch.randn(5, 3, 4), torch.rand(3) + 1)


class Fours(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 3)

    def forward(self, x):
        return self.inner(x.reshape(-1, 16))


NODES = {"x": {0: "nodes"}, "adj": {0: "nodes", 1: "nodes"}}
STATE = {"x": {0: "batch"}, "state": {1: "batch"}, "cell": {1: "batch"}}
TIME_MAJOR = {"x": {0: "time", 1: "batch"}, "scale": {0: "batch"}}


@pytest.mark.parametrize(
    ("made", "dynamic", "shapes"),
    [
        (graph, NODES, [("nodes", 4), ("nodes", "nodes"), ("nodes", 3)]),
        (state, STATE, [("batch", 5, 4), (1, "batch", 6), (1, "batch", 6), ("batch", 5, 6)]),
        (messages, {"x": {0: "nodes"}, "edges": {1: "edges"}}, [("nodes", 4), (2, "edges"), ("nodes", 3)]),
        (messages, None, [("batch", 4), (2, 6), ("batch", 3)]),
        (time_major, TIME_MAJOR, [("time", "batch", 4), ("batch",), ("time", "batch", 6)]),
        # An input that isn't named keeps its batch, which is dim 1 of `x` here.
        (time_major, {"x": {1: "batch"}}, [(5, "batch", 4), ("batch",), (5, "batch", 6)]),
    ],
)
def test_dims_of_one_name_are_drawn_with_equal_sizes(made, dynamic, shapes, tmp_path):
    model, inputs = made()
    bundle = export(
        model, example_inputs=inputs, output=tmp_path / "net", formats=("torchscript",), dynamic=dynamic, bench=False
    )
    (artifact,) = bundle.artifacts
    assert [spec.shape for spec in (*artifact.inputs, *artifact.outputs)] == shapes
    assert len(bundle.manifest["parity"]["batch_sizes"]) > 1


@pytest.mark.parametrize(
    ("made", "sizes"),
    [
        (messages, (9, 10)),
        # Takes multiples of 4 only.
        (lambda: (enliven(Fours()).eval(), (torch.randn(4, 4),)), (4, 8)),
    ],
)
def test_optimize_runs_a_larger_size_where_the_model_takes_no_smaller_one(made, sizes, tmp_path):
    model, inputs = made()
    fast = optimize(model, ["channels-last"], example_inputs=inputs)
    assert fast.report.parity.batch_sizes == sizes
    (note,) = {note for note in fast.report.notes if "batch size" in note}
    assert note.startswith("Left out, as the model itself doesn't take them: batch size 2")
    bundle = export(fast, example_inputs=inputs, output=tmp_path / "net", formats=("torchscript",), bench=False)
    assert bundle.manifest["parity"]["batch_sizes"][:2] == list(sizes)


def test_the_batch_is_the_dim_with_that_name():
    x, scale = time_major()[1]
    inputs = {"x": x, "scale": scale}
    dims = open_dims({"x": {0: "time", 1: "batch"}}, inputs, first=x)
    assert (dims.batch, dims.rows, dims.given) == ("batch", 3, {"time": 5})
    samples = Samples((x, scale)).opened(dims, inputs)
    assert shapes(samples.at(8)) == [(5, 8, 4), (8,)]
    assert shapes(samples.at(8, sizes=(("time", 2),))) == [(2, 8, 4), (8,)]
    assert shapes(samples.to("cpu").at(2)) == [(5, 2, 4), (2,)]


def test_a_function_and_further_inputs_have_equal_sizes_too():
    def made(size, generator):
        return torch.randn(size, 4, generator=generator), torch.rand(size, 9, generator=generator)

    samples = Samples(made)
    inputs = dict(zip(("x", "adj"), samples.given.args, strict=True))
    unequal = open_dims({"x": {0: "nodes"}, "adj": {0: "nodes"}}, inputs, first=samples.first)
    assert shapes(samples.opened(unequal, inputs).at(6)) == [(6, 4), (6, 9)]
    x, adj = graph()[1]
    larger = ((torch.randn(11, 4), torch.rand(11, 11)), {})
    further = Samples((x, adj), further_inputs=[larger])
    inputs = {"x": x, "adj": adj}
    opened = further.opened(open_dims(NODES, inputs, first=x), inputs)
    assert opened.further == ((11, 0),)
    assert opened.at(11).args[1] is larger[0][1]
    with pytest.raises(UsageError, match="differ from the example inputs in more than the number of rows"):
        _ = further.further


@pytest.mark.parametrize(("made", "dim"), [(graph, "nodes"), (state, "rows")])
def test_a_model_that_takes_no_unequal_sizes_is_refused_or_fixed(made, dim, tmp_path):
    model, inputs = made()
    options = {"example_inputs": inputs, "output": tmp_path / "net", "formats": ("torchscript",), "bench": False}
    with pytest.raises(ExportFailed, match=r"raises at every other size that was tried \(.*\): leave dim 0 of x out"):
        export(model, dynamic={"x": {0: dim}}, **options)
    notes = export(model, **options).manifest["notes"]
    assert any(
        "the batch size is fixed, as with static_batch: the model raises at every other" in note for note in notes
    )


def notes_on_batch(model, inputs, folder, **options):
    bundle = export(model, example_inputs=inputs, output=folder, formats=("torchscript",), bench=False, **options)
    return [note for note in bundle.manifest["notes"] if "isn't the batch" in note]


def test_a_batch_that_is_not_dim_0_is_found_with_its_option(tmp_path):
    (note,) = notes_on_batch(*time_major(), tmp_path / "net")
    assert note == (
        "dim 0 of x isn't the batch: its slices influence each other, and those of dim 1 don't; "
        "`--dynamic x:0=time,1=batch` makes dim 1 the batch (dynamic= in Python); "
        "also name the dims of other inputs that have either size"
    )
    assert notes_on_batch(*time_major(), tmp_path / "open", dynamic=TIME_MAJOR) == []


class Turned(nn.Module):
    """Time-major inside, with the batch in dim 0 outside."""

    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(4, 6)

    def forward(self, x):
        return self.inner(x.transpose(0, 1))[0].transpose(0, 1)


def test_a_batch_in_dim_0_gets_no_note(tmp_path):
    assert notes_on_batch(enliven(Turned()).eval(), (torch.randn(3, 5, 4),), tmp_path / "net") == []
    assert notes_on_batch(*state(), tmp_path / "state") == []


class Rows(nn.Module):
    """Returns as many outputs as the input has rows, or a number that follows them."""

    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(8, 8), form

    def forward(self, x):
        return self.form(self.layer(x))


BY_TIME = {"x": {0: "batch", 1: "time"}}


@pytest.mark.parametrize(
    ("form", "dynamic", "remedy", "fixed"),
    [
        (lambda y: [{"s": row} for row in y], None, "`static_batch=True`", {"static_batch": True}),
        (lambda y: (y, y.shape[0]), None, "`static_batch=True`", {"static_batch": True}),
        (lambda y: y.unbind(1), BY_TIME, "leaving dim 1 of `x` out of `dynamic=…`", {}),
        (
            lambda y: y.unbind(0),
            BY_TIME,
            "leaving dim 0 of `x` out of `dynamic=…` and `static_batch=True`",
            {"dynamic": {"x": {1: "time"}}, "static_batch": True},
        ),
    ],
)
def test_outputs_whose_number_follows_a_size_need_that_size_fixed(form, dynamic, remedy, fixed, tmp_path):
    model, x = Rows(form).eval(), torch.randn(2, 4, 8)
    told = (
        f"The structure of the output follows the sizes of the inputs: .* that it follows, by {re.escape(remedy)}, or"
    )
    with pytest.raises(StructureError, match=told):
        export(model, example_inputs=(x,), output=tmp_path / "bundle", formats=("torchscript",), dynamic=dynamic)
    assert export(model, example_inputs=(x,), output=tmp_path / "bundle", formats=("torchscript",), **fixed).parity.ok
