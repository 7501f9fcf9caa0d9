"""Files of models that graph passes rewrote: they hold the rewritten graph, or the manifest says why they don't."""

import copy
import pickle
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import onnx
import pytest
import torch
import torch.nn.functional as F
from real_models import REAL_MODELS, lively
from tiny_models import enliven
from torch import Tensor, nn

from exporters import ExportError
from optimizer import export, load, optimize, verify_bundle
from passes.base import Context
from passes.graph.graph_pass import GraphPass, GraphRewriter

FORMATS = ("torchscript", "onnx", "pt2")
# For each format, the passes whose changes its file lacks: none.
EVERYTHING: dict[str, list[Any]] = {format: [] for format in FORMATS}


@dataclass(frozen=True)
class MergeRows(GraphPass):
    """Compute linear layers on one input as one product: their weights become rows of one tensor."""

    name: ClassVar[str] = "merge-rows"

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        groups: dict[Any, list[Any]] = {}
        for node in graph.calls("linear"):
            if graph.is_parameter(node.args[1]) and graph.argument(node, 2, "bias") is not None:
                groups.setdefault(node.args[0], []).append(node)
        for nodes in (nodes for nodes in groups.values() if len(nodes) > 1):
            with graph.change(nodes[0], f"{len(nodes)} products as one"):
                first = nodes[0]
                weight, bias = (
                    graph.derived(first, joined, *(node.args[place] for node in nodes), what="rows") for place in (1, 2)
                )
                whole = graph.call(first, F.linear, (first.args[0], weight, bias))
                start = 0
                for node in nodes:
                    rows = graph.example(node.args[1]).shape[0]
                    graph.replace_call(node, torch.narrow, (whole, -1, start, rows))
                    start += rows


def joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


@dataclass(frozen=True)
class WrongAtFive(GraphPass):
    """Make relu wrong for five or more rows."""

    name: ClassVar[str] = "wrong-at-five"

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        for node in graph.calls("relu"):
            with graph.change(node, "relu as a function of the batch"):
                graph.replace_call(node, _wrong_at_five, node.args)


def _wrong_at_five(x: Tensor) -> Tensor:
    return x.relu() * (1 + (torch.arange(x.shape[0]) == 4).sum() * (x.shape[0] - 4))


class Net(nn.Module):
    """Query and key of one input, dropout, constant operations, tied weights, buffers and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = (nn.Linear(8, 8) for _ in range(3))
        self.tied, self.drop, self.spare = nn.Linear(8, 8, bias=False), nn.Dropout(), nn.Linear(3, 3)
        self.tied.weight = self.out.weight
        self.register_buffer("steps", torch.arange(8))
        self.register_buffer("shift", torch.full((8,), 0.5))

    def body(self, x: Tensor) -> Tensor:
        y = (self.q(x) * self.k(x)).relu() + (self.steps.to(x.dtype) / 8).sin().exp() + self.shift
        return self.tied(self.drop(self.out(y)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Nested(Net):
    """Reads tensors that aren't registered, and returns an input and a weight among its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.kept = torch.full((8,), 1.5), [nn.Parameter(torch.rand(8))]

    def forward(self, x: Tensor, *, mask: Tensor, scale: float = 2.0) -> Any:
        y = self.body(x) * mask.unsqueeze(-1) * scale * self.factor + self.kept[0]
        rows = y.reshape(x.size(0) * x.size(1), -1)
        return {"y": [y, (y.sum(-1), mask)], "rows": rows, "nothing": None, "weight": self.q.weight}


class Breaks(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        print(end="")
        return y + 1


class Gelu(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y * 0.5 * (1 + torch.erf(y / 1.41421))


class BySize(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * (2 if x.shape[0] > 6 else 1)


class ByOne(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * (2 if x.shape[0] == 1 else 1)


def clip() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    from transformers import CLIPConfig, CLIPModel

    shared = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 37, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = CLIPConfig(
        text_config={**shared, **text}, vision_config={**shared, "image_size": 16, "patch_size": 8}, projection_dim=8
    )
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 37, (4, 6), generator=generator)
    # There are as many patches as texts: sizes that are equal by chance must stay independent.
    return lively(CLIPModel(config)), (ids, torch.randn(2, 3, 16, 16, generator=generator)), {}


def scripted(bundle: Any) -> Any:
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.load"):
        return torch.jit.load(str(bundle.path / "model.torchscript.pt"))


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return enliven(kind()).eval()


def data(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operators(bundle: Any, format: str) -> Counter[str]:
    """The number of nodes of each operator in a file."""
    path = bundle.path / next(artifact.path for artifact in bundle.artifacts if artifact.format == format)
    if format == "onnx":
        return Counter(node.op_type for node in onnx.load(path).graph.node)
    if format == "pt2":
        graph = torch.export.load(str(path)).graph
        return Counter(str(node.target).split(".")[1] for node in graph.nodes if node.op == "call_function")
    return Counter(node.kind().split("::")[1] for node in scripted(bundle).inlined_graph.nodes())


def entries(bundle: Any) -> dict[str, list[dict[str, str]]]:
    return {entry["format"]: entry["without_passes"] for entry in bundle.manifest["artifacts"]}


def exported(model: nn.Module, passes: list[Any], folder: Any, *args: Any, **options: Any) -> Any:
    given = {"example_inputs": args, "example_kwargs": options.pop("kwargs", None)}
    fast = optimize(model, passes, **given)
    assert {record.status for record in fast.report.passes} == {"applied"}, fast.report
    return export(fast, **given, output=folder / "bundle", **{"formats": FORMATS, **options})


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    return exported(made(Net), ["simplify", MergeRows()], tmp_path_factory.mktemp("net"), data(4, 5, 8))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_files_hold_what_graph_passes_did(format, merged):
    assert entries(merged) == EVERYTHING
    assert merged.manifest["notes"] == []
    found = operators(merged, format)
    products = {"torchscript": ["linear"], "onnx": ["Gemm", "MatMul"], "pt2": ["linear"]}[format]
    assert sum(found[name] for name in products) == 3
    assert not {"sin", "Sin", "exp", "Exp", "dropout", "arange"} & set(found)


@pytest.mark.parametrize("format", FORMATS)
def test_such_files_are_right_at_all_batches(format, merged):
    model = made(Net)
    run = merged.load(format)
    for size in (1, 2, 5):
        x = data(size, 5, 8, seed=size)
        with torch.no_grad():
            torch.testing.assert_close(run(x)[0], model(x), rtol=1e-4, atol=1e-4)


def test_names_in_files_are_the_models_own(merged):
    own = {f"model.{name}" for name in made(Net).state_dict()}
    program = torch.export.load(str(merged.path / "model.pt2"))
    held = {*program.state_dict, *program.constants}
    assert {"model.q.rows", "model.q.rows_1", "model.exp"} == held - own
    assert {"model.out.weight", "model.tied.weight", "model.out.bias", "model.shift"} <= held
    # The tensors from which the derived ones were computed aren't in the file.
    assert not {"model.q.weight", "model.k.weight", "model.q.bias", "model.steps"} & held
    initializers = {each.name for each in onnx.load(merged.path / "model.onnx").graph.initializer}
    assert {"model.out.bias", "model.shift"} <= initializers
    assert {name for name in initializers if name.startswith("model.")} <= own | held
    weights = {name.removeprefix("model.") for name, _ in scripted(merged).named_parameters()}
    assert "model.out.bias" in weights
    assert "model.q.weight" not in weights


def test_files_of_copies_and_pickles_hold_it_too(tmp_path):
    given = {"example_inputs": (data(4, 5, 8),)}
    fast = optimize(made(Net), ["simplify"], **given)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        bundle = export(twin, **given, output=tmp_path / "bundle", formats=("pt2",), force=True)
        assert entries(bundle) == {"pt2": []}
        assert not {"sin", "exp"} & set(operators(bundle, "pt2"))


@pytest.mark.slow
def test_keywords_and_nested_outputs(tmp_path):
    kwargs = {"mask": data(4, 5, seed=2).sigmoid()}
    bundle = exported(made(Nested), ["simplify", MergeRows()], tmp_path, data(4, 5, 8), kwargs=kwargs)
    assert entries(bundle) == EVERYTHING
    for artifact in bundle.artifacts:
        assert [spec.name for spec in artifact.inputs] == ["x", "mask"]
        assert [spec.name for spec in artifact.outputs] == ["y_0", "y_1_0", "y_1_1", "rows", "weight"]


@pytest.mark.zoo
@pytest.mark.parametrize(("name", "passes"), [("bert", ["simplify", MergeRows()]), ("llama", ["simplify"])])
def test_transformers(name, passes, tmp_path):
    model, args, kwargs = REAL_MODELS[name]()
    bundle = exported(model, passes, tmp_path, *args, kwargs=kwargs)
    assert entries(bundle) == EVERYTHING
    plain = export(model, example_inputs=args, example_kwargs=kwargs, output=tmp_path / "plain", formats=("pt2",))
    assert operators(bundle, "pt2").total() < operators(plain, "pt2").total()


@pytest.mark.slow
def test_two_batches_of_their_own(tmp_path):
    model, args, _ = clip()
    dynamic = {"input_ids": {0: "texts"}, "pixel_values": {0: "images"}}
    bundle = exported(model, [MergeRows()], tmp_path, *args, dynamic=dynamic, formats=("onnx", "pt2"))
    assert entries(bundle) == {"onnx": [], "pt2": []}
    assert bundle.artifacts[0].outputs[0].shape == ("images", "texts")
    run = bundle.load("pt2")
    for texts, images in ((1, 5), (5, 1), (2, 2)):
        given = args[0][:1].repeat(texts, 1), data(images, 3, 16, 16, seed=texts)
        with torch.no_grad():
            torch.testing.assert_close(run(*given)[0], model(*given).logits_per_image, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_autocasts_are_in_files(tmp_path):
    model, args, kwargs = REAL_MODELS["bert"]()
    passes = ["simplify", "cast-precision:how=autocast"]
    bundle = exported(model, passes, tmp_path, *args, kwargs=kwargs, formats=("torchscript", "pt2"))
    assert entries(bundle) == {"torchscript": [], "pt2": []}


@pytest.mark.slow
def test_a_forward_that_only_torch_export_traces_as_one_graph_is_rewritten_in_files(tmp_path):
    bundle = exported(made(Breaks), ["simplify"], tmp_path, data(4, 5, 8))
    assert bundle.manifest["notes"] == []
    assert entries(bundle) == EVERYTHING
    assert "sin" not in operators(bundle, "pt2")
    assert verify_bundle(bundle.path).ok


class Tagged(nn.Module):
    """Breaks the graph, and has a plain tensor, a size in its result and a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)) for _ in range(2))
        self.scale = torch.full((3, 1, 1), 0.5)

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        y = self.first(inputs["image"])
        print(end="")
        y = self.second(y) * self.scale
        return {"map": y, "rest": (y.mean((2, 3)) * y.shape[0], inputs["image"])}


def test_folds_of_a_broken_graph_are_in_files(tmp_path):
    model, x = enliven(Tagged()).eval(), torch.randn(4, 3, 8, 8)
    bundle = exported(model, ["fold-conv-bn"], tmp_path, {"image": x})
    assert entries(bundle) == EVERYTHING
    for format in FORMATS:
        assert not [name for name in operators(bundle, format) if "batch" in name.lower() and "norm" in name.lower()]
        run = load(bundle.path, format=format)
        for given in (x, torch.cat([x, x])):
            got, wanted = run({"image": given}), model({"image": given})
            torch.testing.assert_close(torch.as_tensor(got["rest"][0]), wanted["rest"][0], rtol=1e-4, atol=1e-4)


class Sized(nn.Module):
    """Breaks the graph, and gives sizes to operators: of the state of an LSTM, in views, slices and factories."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.lstm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.LSTM(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        print(end="")
        rows = y.shape[0]
        y, _ = self.lstm(y.permute(2, 0, 1, 3).reshape(8, rows, 32))
        y = y.reshape(8 * rows, 5).view(8, rows, 5)[:, : rows - 1] + y[:, 1:rows] + y.new_zeros(8, rows - 1, 5)
        y = torch.cat([y, torch.full((8, 1, 5), 2.0), torch.ones(1, 1, 5).expand(8, rows, 5)], 1)
        y = y[:, :rows] * torch.arange(rows).view(1, rows, 1) + y.split([rows, rows], 1)[1]
        y = torch.where(y > 0, y, rows) + rows ** y.clamp(0, 1) + rows % (y.abs() + 1)
        return F.interpolate(F.pad(y.permute(1, 2, 0), (0, 1)), scale_factor=2.0)


class Sliced(nn.Module):
    """Breaks the graph, and merges layers and repeats an operation around slices of an open size."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        print(end="")
        rows = x.shape[0]
        y = (self.q(x)[: rows - 1] * self.k(x)[: rows - 1]).relu()
        return y[: rows - 1].sin() + y[: rows - 1].sin()


@pytest.mark.parametrize(
    ("kind", "passes", "shape", "formats"),
    [
        (Sized, ["fold-conv-bn"], (4, 3, 8, 8), ("torchscript", "onnx")),
        (Sliced, ["merge-linears:force=true", "simplify"], (4, 8), ("torchscript", "pt2")),
    ],
)
def test_sizes_stay_open_in_the_files_of_a_broken_graph(kind, passes, shape, formats, tmp_path):
    model, x = enliven(kind()).eval(), torch.randn(shape)
    bundle = exported(model, passes, tmp_path, x, formats=formats)
    assert entries(bundle) == {format: [] for format in formats}
    for artifact in bundle.artifacts:
        run = load(bundle.path, format=artifact.format)
        for given in (x, torch.cat([x, x, x]), x[:2]):
            torch.testing.assert_close(run(given), model(given), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_graph_break_is_named_and_the_files_are_right(tmp_path):
    class Addresses(Net):
        """Reads an address, which a tensor has only in a real run."""

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x)
            y.data_ptr()
            print(end="")
            return y + 1

    bundle = exported(made(Addresses), ["simplify"], tmp_path, data(4, 5, 8), formats=("torchscript",))
    (note,) = bundle.manifest["notes"]
    wanted = r"the files don't contain the changes of simplify: the graph breaks at test_graph_files\.py:\d+ \(`"
    assert re.match(wanted, note), note
    reason = note.partition(": ")[2]
    assert entries(bundle) == {"torchscript": [{"name": "simplify", "reason": reason}]}
    assert verify_bundle(bundle.path).ok


@pytest.mark.slow
def test_a_file_that_isnt_right_gives_way_to_that_of_the_plain_forward(tmp_path):
    bundle = exported(made(Net), [WrongAtFive()], tmp_path, data(4, 5, 8), formats=("pt2",))
    ((name, reason),) = (each.values() for each in entries(bundle)["pt2"])
    assert name == "wrong-at-five"
    assert reason.startswith("the file made from the rewritten graph was rejected (output is off by ")
    assert bundle.manifest["notes"] == [f"the pt2 file doesn't contain the changes of wrong-at-five: {reason}"]
    assert sorted(path.name for path in bundle.path.glob("*.pt2")) == ["model.pt2"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sizes"), [(BySize, (2, 3)), (ByOne, (2, 3))])
def test_a_branch_on_a_size_is_in_no_file(kind, sizes, tmp_path):
    with pytest.raises(ExportError, match=r"at batch size [17] the model takes a different path"):
        exported(made(kind), ["simplify"], tmp_path, data(4, 5, 8), batch_sizes=sizes)
    bundle = exported(made(kind), ["simplify"], tmp_path, data(4, 5, 8), static_batch=True)
    assert entries(bundle) == EVERYTHING


@pytest.mark.slow
def test_kernels_and_compiled_calls_are_in_no_file(tmp_path):
    passes = ["simplify", "jit-fusion", "torch-compile:backend=eager"]
    bundle = exported(made(Gelu), passes, tmp_path, data(4, 5, 8), formats=("onnx",))
    kernels, calls = entries(bundle)["onnx"]
    assert (kernels["name"], calls["name"]) == ("jit-fusion", "torch-compile")
    assert "fused kernels" in kernels["reason"]
    assert "compiled calls" in calls["reason"]
    assert bundle.manifest["notes"] == []
    assert "Sin" not in operators(bundle, "onnx")
