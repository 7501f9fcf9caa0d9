import onnx
import onnxruntime as ort
import pytest
import torch
from crashing_runtimes import SessionCrashesAtThreeRows
from exportable_models import Mlp, Of, exportable, floats, mlp_calls
from onnxruntime.quantization import quant_pre_process, quantize_dynamic
from tiny_models import enliven
from torch import nn

import exporters.onnx
from exporters import ExportError, ExportRequest, OnnxExporter, ProviderFallback, UnknownOpset, onnx_session, silent
from exporters.onnx import opsets, refuse_opset
from exporters.onnx_session import added_for_shapes, judge_placement, shape_only_nodes


def export(model, calls, tmp_path, **options):
    return OnnxExporter().export(ExportRequest(model.eval(), calls, **options), tmp_path)


def written_dims(path):
    graph = onnx.load(path).graph
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    return export(enliven(Mlp()), mlp_calls(2, 3), tmp_path_factory.mktemp("mlp"))


def test_a_static_export_has_no_open_dim(tmp_path):
    artifact = export(Mlp(), mlp_calls(1), tmp_path, dynamic_batch=False)
    assert written_dims(artifact.path) == {"x": [1, 3], "output": [1, 4]}


def test_two_batches_have_two_names(tmp_path):
    class Cross(nn.Module):
        def forward(self, queries, keys):
            return queries @ keys.t()

    calls = tuple(((floats(size, 3), floats(other, 3)), {}) for size, other in ((2, 3), (4, 3), (5, 7)))
    dims = written_dims(export(Cross(), calls, tmp_path).path)
    assert dims == {"queries": ["batch", 3], "keys": ["keys_batch", 3], "output": ["batch", "keys_batch"]}


def test_rows_that_the_data_chooses_stay_open(tmp_path):
    x = floats(2, 3)
    positive = Of(lambda x: x.reshape(-1)[x.reshape(-1) > 0])
    artifact = export(positive, (((x,), {}), ((x.flip(0),), {})), tmp_path)
    assert isinstance(written_dims(artifact.path)["output"][0], str)


@pytest.mark.parametrize(
    ("model", "dtype", "where"),
    [
        (Of(torch.fft.fft), torch.float32, "output `output` is complex64"),
        (Of(torch.abs), torch.complex64, "input `x` is complex64"),
    ],
)
def test_complex_numbers_are_refused_in_silence(model, dtype, where, tmp_path, capfd):
    calls = tuple(((floats(size, 3).to(dtype),), {}) for size in (2, 3))
    with pytest.raises(ExportError, match="can't be exported to onnx") as caught:
        export(model, calls, tmp_path)
    assert where in str(caught.value)
    assert "as torch.view_as_real returns them" in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("failing", [("dynamo",), ("dynamo", "dynamo-unoptimized")])
def test_the_next_route_is_taken_and_is_as_good(failing, tmp_path, monkeypatch):
    real = torch.onnx.export
    outcomes = {"dynamo": (True, True), "dynamo-unoptimized": (True, False)}

    def broken(*args, **options):
        if (options["dynamo"], options.get("optimize")) in [outcomes[name] for name in failing]:
            raise RuntimeError("no such operator\nmore")
        return real(*args, **options)

    monkeypatch.setattr(torch.onnx, "export", broken)
    model, calls = exportable("rows")
    artifact = export(model, calls, tmp_path)
    assert artifact.refused == tuple((name, "no such operator") for name in failing)
    assert artifact.route == ("dynamo-unoptimized" if len(failing) == 1 else "torchscript")
    dims = written_dims(artifact.path)
    assert dims["x"] == ["batch", 3]
    assert [isinstance(size, str) for name in ("output_0", "output_2") for size in dims[name]] == [1, 0, 0, 1]
    assert dims["output_3"] == [4]


def test_weights_above_the_limit_go_into_a_file_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(exporters.onnx, "EXTERNAL_DATA_FROM", 1000)
    model = nn.Linear(30, 30)
    artifact = export(model, tuple(((floats(size, 30),), {}) for size in (2, 3)), tmp_path)
    assert [path.name for path in artifact.files] == ["model.onnx", "model.onnx.data"]
    assert sorted(tmp_path.iterdir()) == sorted(artifact.files)
    assert artifact.files[1].stat().st_size >= 3600
    assert artifact.files[0].stat().st_size < 1500
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in artifact.files:
        path.rename(moved / path.name)
    x = floats(4, 30)
    assert torch.allclose(OnnxExporter.load(moved / "model.onnx", "cpu")(x)[0], model(x), atol=1e-5)


class MaskedClassifier(nn.Module):
    """Attention with a padding mask, and a linear layer on vectors, which becomes a Gemm with a transposed weight."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x, mask):
        mixed = nn.functional.scaled_dot_product_attention(x, x, x, mask[:, None])
        return self.head(mixed.mean(1))


@pytest.mark.slow
def test_shape_inference_and_quantization_of_onnxruntime_read_the_file(tmp_path):
    calls = tuple(((floats(size, 5, 8), torch.ones(size, 5, dtype=torch.bool)), {}) for size in (2, 3))
    path = export(MaskedClassifier(), calls, tmp_path).path
    model = onnx.load(path)
    (gemm,) = (node for node in model.graph.node if node.op_type == "Gemm")
    assert gemm.input[1] not in {value.name for value in model.graph.value_info}
    onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    quant_pre_process(path, tmp_path / "inferred.onnx")
    shapes = {value.name for value in onnx.load(tmp_path / "inferred.onnx").graph.value_info}
    assert gemm.input[0] in shapes
    with silent():
        # Seven bits: a processor with AVX2 alone adds two products in 16 bits, which products of eight bits overflow.
        quantize_dynamic(path, tmp_path / "quantized.onnx", reduce_range=True)
    feeds = {"x": floats(4, 5, 8).numpy(), "mask": torch.ones(4, 5, dtype=torch.bool).numpy()}
    exact, rounded = (ort.InferenceSession(name).run(None, feeds)[0] for name in (path, tmp_path / "quantized.onnx"))
    assert 0 < abs(exact - rounded).max() < 0.05


def test_a_loaded_file_checks_its_inputs_runs_views_and_empty_batches_and_counts_its_placement(mlp):
    loaded = mlp.load()
    with pytest.raises(ValueError, match=r"Input `x` of the file is float, but got torch\.float64"):
        loaded(floats(2, 3).double())
    with pytest.raises(ValueError, match="takes 1 tensors, not 2"):
        loaded(floats(2, 3), floats(2, 3))
    x = floats(3, 4).t()[:, :3]
    assert torch.equal(loaded(x)[0], loaded(x.contiguous())[0])
    assert loaded(floats(0, 3))[0].shape == (0, 4)
    assert loaded.device == "cpu"
    assert set(loaded.placement) == {CPU}
    assert loaded.placement[CPU] >= 2
    assert loaded.settings == {"onnxruntime_tf32": "off"}


CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class Session:
    """A fake onnxruntime session that reports its providers and their options."""

    def __init__(self, providers=(CUDA, CPU), options=None):
        self._providers, self._options = list(providers), {CUDA: {"use_tf32": "0"}} if options is None else options

    def get_providers(self):
        return self._providers

    def get_provider_options(self):
        return self._options


@pytest.mark.parametrize(
    ("session", "assigned", "sentence"),
    [
        (Session([CPU]), [(CPU, "mul", "MatMul")], "couldn't start its CUDA provider and would run on the CPU"),
        (Session(options={CUDA: {"use_tf32": "1"}}), [(CUDA, "mul", "MatMul")], "computes float32 in TF32"),
        (Session(), None, "can't report where its nodes run"),
        (Session(), [], "runs no node of the file on the GPU"),
        (Session(), [(CPU, "s", "Shape")], "runs no node of the file on the GPU"),
        (
            Session(),
            [(CUDA, "c", "Conv"), (CPU, "g", "Add")],
            r"onnxruntime runs `g` \(Add\) on the CPU, not on the GPU",
        ),
        (Session(), [(CPU, f"n{i}", "Add") for i in range(7)], r"`n4` \(Add\) and 2 more on the CPU"),
    ],
)
def test_a_session_that_isnt_on_cuda_as_a_whole_is_refused(mlp, session, assigned, sentence):
    with pytest.raises(ProviderFallback, match=sentence):
        onnx_session._require_cuda(session, assigned, mlp.path)
    onnx_session._require_cuda(Session(), [(CUDA, "mul", "MatMul"), (CPU, "m", "MemcpyToHost")], mlp.path)
    unknown = [Session(options={CUDA: {}}), Session(options={})]
    assert [onnx_session._tf32(each) for each in (Session([CPU], {}), Session(), *unknown)] == [
        "off",
        "off",
        "unknown",
        "unknown",
    ]


def test_shape_only_nodes_read_no_data():
    node = onnx.helper.make_node
    nodes = [
        node("Shape", ["x"], ["shape"], name="shape"),
        node("Gather", ["shape", "zero"], ["rows"], name="rows"),
        node("Concat", ["rows", "minus_one"], ["target"], name="target", axis=0),
        node("Reshape", ["x", "target"], ["flat"], name="reshape"),
        node("Gather", ["table", "ids"], ["words"], name="embedding"),
        node("Shape", ["words"], ["size"], name="size"),
    ]
    names = ("zero", "minus_one", "table")
    weights = [onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [1], [0]) for name in names]
    graph = onnx.helper.make_graph(nodes, "graph", [], [], weights)
    assert shape_only_nodes(graph) == {"shape", "rows", "target", "size"}
    # A Gather that onnxruntime adds permutes a shape.
    assigned = [(CPU, "rows", "Gather"), (CPU, "added", "Gather"), (CPU, "copy", "Add"), (CUDA, "conv", "Conv")]
    assert added_for_shapes(assigned, graph) == {"added"}
    with pytest.raises(ProviderFallback, match=r"`rows` \(Gather\), `copy` \(Add\) on the CPU"):
        judge_placement(assigned, added_for_shapes(assigned, graph))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_no_silent_fallback(mlp):
    for device, sentence in (("cuda", "CUDA provider"), ("mps", "not on 'mps'")):
        with pytest.raises(ProviderFallback, match=sentence):
            mlp.load(device)


@pytest.mark.gpu
def test_cuda_computes_on_cuda(tmp_path):
    model, calls = exportable("conv_net")
    loaded = export(model, calls, tmp_path).load("cuda")
    assert loaded.placement[CUDA] >= 2
    x = floats(7, 3, 6, 6)
    (y,) = loaded(x)
    assert y.is_cuda
    assert torch.allclose(y.cpu(), model(x).detach(), atol=1e-4)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 16, mode="mean")
        self.head = nn.Linear(16, 4)

    def forward(self, ids):
        return self.head(self.bag(ids))


def test_a_file_on_which_onnxruntime_crashes_is_refused_and_the_crash_is_named(tmp_path):
    # With ids of 2 dims, onnxruntime 1.31 dies of SIGSEGV when it loads the file of the second route. From torch 2.15 on,
    # that file is another one, which it refuses to run.
    calls = tuple(((torch.randint(50, (rows, 7)),), {}) for rows in (3, 2))
    artifact = export(enliven(Bag()).eval(), calls, tmp_path)
    assert artifact.route == "torchscript"
    crashes = [reason for _, reason in artifact.refused if "crashes" in reason]
    assert [clause.partition(" isn't used: ")[2] for clause in artifact.crashes] == crashes
    if ort.__version__.startswith("1.31.") and torch.__version__ < (2, 15):
        assert crashes == [f"onnxruntime {ort.__version__} crashes (SIGSEGV) while it loads the file"]


def test_a_crash_at_another_batch_size_than_the_first_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_session, "PlainSession", SessionCrashesAtThreeRows)
    model = enliven(Mlp()).eval()
    with pytest.raises(ExportError) as error:
        export(model, mlp_calls(4, 3), tmp_path)
    sizes = list(mlp_calls(3)[0][0][0].shape)
    sentence = f"onnxruntime {ort.__version__} crashes (SIGABRT) while it runs the file on inputs of {sizes}"
    assert error.value.reasons == f"dynamo, dynamo-unoptimized and torchscript: {sentence}"


class OwnWords(nn.Module):
    """Names its outputs as torch names the values of the graph; returns a value twice, an input, and a weight."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        chosen = torch.cond(y.sum() > 0, lambda rows: rows.relu().mean(1), lambda rows: rows.sum(1), (y,))
        outputs = {"relu": y.relu() * 2, "mean": chosen, "linear": y, "again": y, "same": x}
        return {**outputs, "model_linear_weight": self.linear.weight, "val_0": y.mean(1)}


def test_outputs_may_have_any_name(tmp_path):
    torch.manual_seed(0)
    model = enliven(OwnWords()).eval()
    artifact = export(model, mlp_calls(2, 3), tmp_path)
    assert (artifact.route, artifact.refused) == ("dynamo", ())
    x = floats(5, 3)
    for given in (x, -x):
        expected = model(given)
        assert [spec.name for spec in artifact.outputs] == list(expected)
        assert all(map(torch.allclose, artifact.load()(given), expected.values()))
    # A value of the program is found under its name in the file.
    assert artifact.program.places["relu"].operation == "mul"


# --------------------------------------------------------------------------------------------------------------- opsets


class Normed(nn.Module):
    """Its LayerNorm is one operator from opset 17 on, which can't be converted to older opsets."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        return self.norm(x) * 2


def written_opset(path):
    return {entry.domain: entry.version for entry in onnx.load(path).opset_import}[""]


@pytest.mark.slow
@pytest.mark.parametrize(("opset", "ir_version"), [(9, None), (13, 7), (17, 8), (18, None), (23, None)])
def test_the_file_has_the_opset_and_is_as_old_as_that(opset, ir_version, mlp, tmp_path):
    artifact = export(enliven(Mlp()), mlp_calls(2, 3), tmp_path, opset=opset)
    assert written_opset(artifact.path) == artifact.opset == opset
    assert ir_version in (None, onnx.load(artifact.path).ir_version)
    assert mlp.opset == written_opset(mlp.path)
    assert ir_version is None or onnx.load(mlp.path).ir_version > ir_version


@pytest.mark.slow
def test_what_the_new_exporter_cannot_convert_down_goes_by_the_old_one(tmp_path):
    artifact = export(enliven(Normed()), mlp_calls(2, 3), tmp_path, opset=13)
    assert artifact.route == "torchscript"
    assert artifact.opset == written_opset(artifact.path) == 13
    reason = "torch's exporter writes opset 18 instead of 13"
    assert artifact.refused == (("dynamo", reason), ("dynamo-unoptimized", reason))


@pytest.mark.slow
def test_no_file_claims_another_opset_than_was_asked_for(tmp_path, monkeypatch):
    real = torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **options: real(*args, **{**options, "opset_version": 20}))
    with pytest.raises(ExportError, match="torch's exporter writes opset 20 instead of 18"):
        export(Mlp(), mlp_calls(2, 3), tmp_path, opset=18)
    assert not list(tmp_path.iterdir())


def test_opsets_that_torch_writes_are_taken():
    for opset in (None, *opsets()):
        refuse_opset(opset, ["torchscript", "onnx"])


@pytest.mark.parametrize(
    ("opset", "formats", "reason"),
    [
        (8, ["onnx"], r"^Opset 8 isn't available here: .* opsets 9 to \d+\.$"),
        (999, ["onnx"], "Opset 999 isn't available here"),
        (-1, ["onnx"], "Opset -1 isn't available here"),
        ("17", ["onnx"], r"must be a whole number, not '17'\.$"),
        (True, ["onnx"], r"must be a whole number, not True\.$"),
        (17, ["torchscript", "pt2"], "applies to ONNX files only, but the formats are torchscript, pt2: add onnx"),
    ],
)
def test_an_opset_that_no_file_can_have_is_one_sentence(opset, formats, reason):
    with pytest.raises(UnknownOpset, match=reason):
        refuse_opset(opset, formats)
