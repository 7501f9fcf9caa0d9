"""Quantized ONNX files: what is quantized, what isn't, and what the file keeps."""

import collections
import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import exporters.onnx
import exporters.onnx_sensitivity
from exporters.errors import NothingToQuantize, QuantizationError
from exporters.onnx_quantization import kinds, quantized
from exporters.onnx_sensitivity import sensitivities, within_budget
from optimize_export.onnx_runtime import ort

KINDS = ("int8-maps", "int8-static", "int8-inputs", "int8-dense", "int8-dynamic", "uint8-dynamic", "int4-weights")
RANDOM = np.random.default_rng(0)
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def same_draws():
    """Each test draws the same numbers, whichever tests ran before."""
    RANDOM.bit_generator.state = np.random.default_rng(0).bit_generator.state


def weight(*shape, dtype=np.float32):
    return (RANDOM.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(dtype)


def written(path, nodes, weights, inputs, outputs):
    """Write a file; inputs and outputs are {name: dims}, a str dim is open."""
    sides = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in side.items()]
        for side in (inputs, outputs)
    ]
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "graph", *sides, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9, producer_name="ours")
    model.metadata_props.add(key="license", value="MIT")
    onnx.save(model, path)
    return path


def node(op_type, inputs, output, **attributes):
    return helper.make_node(op_type, inputs, [output], name=f"{op_type}_{output}", **attributes)


@pytest.fixture
def mlp(tmp_path):
    """Two matrix products and a Gemm with a transposed weight; the weight of the second has outliers."""
    weights = {"a": weight(64, 64), "b": weight(64, 64), "c": weight(8, 64), "bias": weight(8)}
    weights["b"][:, 0] *= 0.01
    weights["b"][::32] *= 8
    nodes = [
        node("MatMul", ["x", "a"], "first"),
        node("Relu", ["first"], "positive"),
        node("MatMul", ["positive", "b"], "second"),
        node("Gemm", ["second", "c", "bias"], "y", transB=1),
    ]
    return written(tmp_path / "mlp.onnx", nodes, weights, {"x": ["batch", 64]}, {"y": ["batch", 8]})


def square(path, nodes, **weights):
    """Write a file whose input, output and weights, where none are given, have a width of 64."""
    return written(path, nodes, weights or {"a": weight(64, 64)}, {"x": ["batch", 64]}, {"y": ["batch", 64]})


def test_an_activation_that_is_not_finite_is_refused(tmp_path):
    path = square(tmp_path / "log.onnx", [node("Log", ["x"], "logs"), node("MatMul", ["logs", "a"], "y")])
    zeros = [{"x": np.zeros((2, 64), np.float32)}]
    with pytest.raises(QuantizationError, match=r"^`(logs|y)` is NaN or infinite in a calibration call"):
        quantized(path, tmp_path / "small.onnx", "int8-static", zeros)
    assert not (tmp_path / "small.onnx").exists()


@pytest.fixture
def network(tmp_path):
    """A convolution with a Relu, a depthwise convolution, one with an output of its own, and a product of two maps."""
    weights = {"a": weight(8, 3, 3, 3), "bias": weight(8), "b": weight(8, 1, 3, 3), "c": weight(4, 8, 1, 1)}
    nodes = [
        node("Conv", ["x", "a", "bias"], "first", pads=[1, 1, 1, 1]),
        node("Relu", ["first"], "positive"),
        node("Conv", ["positive", "b"], "deep", group=8, pads=[1, 1, 1, 1]),
        node("Conv", ["deep", "c"], "y"),
        node("MatMul", ["y", "y"], "z"),
    ]
    outputs = {"y": ["batch", 4, 8, 8], "z": ["batch", 4, 8, 8]}
    return written(tmp_path / "network.onnx", nodes, weights, {"x": ["batch", 3, 8, 8]}, outputs)


def rows(*shape, count=40):
    return [{"x": RANDOM.standard_normal((2, *shape)).astype(np.float32)} for _ in range(count)]


def run(path, row):
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, row)


def loss(kind):
    """The largest relative error of a quantized file."""
    return 0.3 if kind == "int4-weights" else 0.06


def relative_error(source, target, row):
    pairs = zip(run(source, row), run(target, row), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in pairs)


def op_types(path):
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_has_the_same_interface_and_nearly_the_same_values(kind, mlp, tmp_path, capfd):
    before = mlp.read_bytes()
    target = tmp_path / "small.onnx"
    record = quantized(mlp, target, kind, rows(64))
    assert (record.files, record.kind, record.kept) == ((target,), kind, ())
    assert record.quantized == ("MatMul_first", "MatMul_second", "Gemm_y")
    assert sorted(tmp_path.iterdir()) == [mlp, target]
    assert mlp.read_bytes() == before
    onnx.checker.check_model(str(target), full_check=True)
    old, new = onnx.load(mlp), onnx.load(target)
    assert (list(new.graph.input), list(new.graph.output)) == (list(old.graph.input), list(old.graph.output))
    assert list(new.metadata_props) == list(old.metadata_props)
    if kind == "int8-static":
        values = [numpy_helper.to_array(tensor) for tensor in new.graph.initializer]
        largest = [int(abs(value.astype(int)).max()) for value in values if value.dtype == np.int8 and value.ndim == 2]
        # The weights use 7 bits.
        assert len(largest) == 3
        assert max(largest) <= 64
    assert target.stat().st_size < mlp.stat().st_size * (0.35 if kind == "int4-weights" else 0.5)
    for batch in (1, 3):
        row = {"x": RANDOM.standard_normal((batch, 64)).astype(np.float32)}
        assert 1e-4 < relative_error(mlp, target, row) < loss(kind)
    assert capfd.readouterr() == ("", "")


def test_convolutions_are_quantized_and_what_costs_more_than_it_gains_is_not(network, tmp_path):
    record = quantized(network, tmp_path / "small.onnx", "int8-static", rows(3, 8, 8))
    assert record.quantized == ("Conv_first", "Conv_y")
    graph = onnx.load(record.files[0]).graph
    assert "Relu" not in [node.op_type for node in graph.node]
    weights = {tensor.name: tensor.data_type for tensor in graph.initializer}
    assert weights["b"] == TensorProto.FLOAT
    assert "a" not in weights
    (product,) = (node for node in graph.node if node.op_type == "MatMul")
    assert product.output == ["z"]
    assert 1e-4 < relative_error(network, record.files[0], rows(3, 8, 8)[0]) < 0.08


@pytest.fixture
def mobile(tmp_path):
    """A depthwise convolution with hard-swish, squeeze-and-excitation and a sum; the scaling before is of no map."""
    weights = {"a": weight(8, 3, 3, 3), "b": weight(8, 1, 3, 3), "c": weight(8, 8, 1, 1), "d": weight(8, 8, 1, 1)}
    weights |= {"std": np.float32([[[2.0]]]), "axes": np.array([2, 3])}
    nodes = [
        node("Mul", ["x", "std"], "scaled"),
        node("Conv", ["scaled", "a"], "first", pads=[1, 1, 1, 1]),
        node("HardSwish", ["first"], "active"),
        node("Conv", ["active", "b"], "deep", group=8, pads=[1, 1, 1, 1]),
        node("Sigmoid", ["deep"], "soft"),
        node("Mul", ["deep", "soft"], "silu"),
        node("ReduceMean", ["silu", "axes"], "mean", keepdims=1),
        node("Conv", ["mean", "c"], "squeezed"),
        node("HardSigmoid", ["squeezed"], "gate", alpha=1 / 6, beta=0.5),
        node("Mul", ["silu", "gate"], "excited"),
        node("Conv", ["excited", "d"], "projected"),
        node("Add", ["projected", "active"], "y"),
    ]
    path = written(tmp_path / "mobile.onnx", nodes, weights, {"x": ["batch", 3, 8, 8]}, {"y": ["batch", 8, 8, 8]})
    # As exporters do, the file has the shapes of its values.
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(path)), path)
    return path


def test_maps_stay_in_integers_from_the_first_convolution_to_the_last(mobile, mlp, tmp_path):
    assert kinds("onnx-int8", mobile) == ("int8-maps", "int8-static")
    assert kinds("onnx-int8", mlp) == ("int8-static",)
    for kind in ("int8-inputs", "int8-dense"):
        assert (kinds(f"onnx-{kind}", mobile), kinds(f"onnx-{kind}", mlp)) == ((kind,), ())
    record = quantized(mobile, tmp_path / "small.onnx", "int8-maps", rows(3, 8, 8))
    assert record.quantized == ("Conv_first", "Conv_deep", "Conv_squeezed", "Conv_projected")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    ort.InferenceSession(str(record.files[0]), options, providers=["CPUExecutionProvider"])
    # Not one of the network's nodes runs in float but for the scaling of its input.
    found = [name for name in op_types(tmp_path / "fused.onnx") if name not in ("QuantizeLinear", "DequantizeLinear")]
    assert [name for name in found if not name.startswith(("QLinear", "Transpose"))] == ["Mul"]
    assert 1e-4 < relative_error(mobile, record.files[0], rows(3, 8, 8)[0]) < 0.06
    (target,) = quantized(mobile, tmp_path / "kept.onnx", "int8-maps", rows(3, 8, 8), keep=["Conv_deep"]).files
    (kept,) = (tensor for tensor in onnx.load(target).graph.initializer if tensor.name == "b")
    assert kept.data_type == TensorProto.FLOAT
    assert 1e-4 < relative_error(mobile, target, rows(3, 8, 8)[0]) < 0.06


def test_for_openvino_only_the_inputs_of_convolutions_are_rounded(mobile, tmp_path):
    record = quantized(mobile, tmp_path / "small.onnx", "int8-inputs", rows(3, 8, 8))
    assert record.quantized == ("Conv_first", "Conv_deep", "Conv_squeezed", "Conv_projected")
    graph = onnx.load(record.files[0]).graph
    readers = {name: node.op_type for node in graph.node for name in node.input}
    rounded = [readers[node.output[0]] for node in graph.node if node.op_type == "DequantizeLinear"]
    # Each by its last reader: four inputs and four weights. The sum reads an activation that was rounded for a convolution.
    assert collections.Counter(rounded) == {"Conv": 7, "Add": 1}
    produced = {name: node.op_type for node in graph.node for name in node.output}
    sources = [produced[node.input[0]] for node in graph.node if node.op_type == "QuantizeLinear"]
    assert sorted(sources) == ["HardSwish", "Mul", "Mul", "ReduceMean"]
    assert 1e-4 < relative_error(mobile, record.files[0], rows(3, 8, 8)[0]) < 0.06
    assert {name for name, _ in sensitivities(mobile, record, rows(3, 8, 8))} == set(record.quantized)
    (target,) = quantized(mobile, tmp_path / "kept.onnx", "int8-inputs", rows(3, 8, 8), keep=["Conv_deep"]).files
    assert 1e-4 < relative_error(mobile, target, rows(3, 8, 8)[0]) < 0.06


def test_a_dense_file_has_its_depthwise_convolutions_in_float(mobile, tmp_path):
    record = quantized(mobile, tmp_path / "small.onnx", "int8-dense", rows(3, 8, 8))
    assert (record.quantized, record.kept) == (("Conv_first", "Conv_squeezed", "Conv_projected"), ())
    graph = onnx.load(record.files[0]).graph
    (deep,) = (node for node in graph.node if node.name == "Conv_deep")
    produced = {name: node.op_type for node in graph.node for name in node.output}
    assert not any("Linear" in produced.get(name, "") for name in deep.input)
    assert 1e-4 < relative_error(mobile, record.files[0], rows(3, 8, 8)[0]) < 0.06


def test_only_means_of_maps_and_hard_activations_of_the_usual_slope_are_rewritten(tmp_path):
    weights = {"a": weight(8, 3, 1, 1), "b": weight(8, 1, 1, 1), "axes": np.array([1, 2])}
    nodes = [
        node("Conv", ["x", "a"], "first"),
        node("HardSigmoid", ["first"], "gate", alpha=0.2, beta=0.5),
        node("Conv", ["gate", "b"], "deep", group=8),
        node("ReduceMean", ["deep", "axes"], "y"),
    ]
    path = written(tmp_path / "m.onnx", nodes, weights, {"x": ["batch", 3, 8, 8]}, {"y": ["batch", 1, 1, 8]})
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(path)), path)
    record = quantized(path, tmp_path / "small.onnx", "int8-maps", rows(3, 8, 8))
    assert {"HardSigmoid", "ReduceMean"} <= set(op_types(record.files[0]))
    assert 1e-4 < relative_error(path, record.files[0], rows(3, 8, 8)[0]) < 0.06


@pytest.mark.parametrize("kind", KINDS)
def test_kept_nodes_compute_in_float(kind, mlp, tmp_path):
    record = quantized(mlp, tmp_path / "small.onnx", kind, rows(64), keep=["MatMul_second", "Relu_positive"])
    assert (record.kept, record.quantized) == (("MatMul_second",), ("MatMul_first", "Gemm_y"))
    graph = onnx.load(record.files[0]).graph
    (kept,) = (tensor for tensor in graph.initializer if tensor.name == "b")
    assert kept.data_type == TensorProto.FLOAT
    assert any(node.op_type == "MatMul" and node.input[1] == "b" for node in graph.node)
    assert "a" not in {tensor.name for tensor in graph.initializer}
    with pytest.raises(QuantizationError, match="has no node `MatMul_third` to leave in float"):
        quantized(mlp, tmp_path / "other.onnx", kind, rows(64), keep=["MatMul_third"])
    with pytest.raises(NothingToQuantize, match="are to be left in float"):
        quantized(mlp, tmp_path / "other.onnx", kind, rows(64), keep=["MatMul_first", "MatMul_second", "Gemm_y"])
    assert sorted(tmp_path.iterdir()) == [mlp, tmp_path / "small.onnx"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_gemms_with_one_weight_stay_right(kind, tmp_path):
    nodes = [
        node("Gemm", ["x", "w"], "first", transB=1),
        node("Gemm", ["first", "w"], "y", transB=1),
        node("MatMul", ["first", "w"], "z"),
    ]
    outputs = {"y": ["batch", 32], "z": ["batch", 32]}
    path = written(tmp_path / "tied.onnx", nodes, {"w": weight(32, 32)}, {"x": ["batch", 32]}, outputs)
    for keep in ((), ("Gemm_y",)):
        (target,) = quantized(path, tmp_path / "small.onnx", kind, rows(32), keep=keep).files
        assert relative_error(path, target, rows(32)[0]) < (0.3 if kind == "int4-weights" else 0.04)


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_of_an_embedding_is_quantized_where_it_is_a_transposed_factor(kind, tmp_path):
    nodes = [
        node("Gather", ["w", "tokens"], "h"),
        node("MatMul", ["h", "a"], "deep"),
        node("Transpose", ["w"], "turned", perm=[1, 0]),
        node("MatMul", ["deep", "turned"], "y"),
    ]
    weights = {"w": weight(100, 32), "a": weight(32, 32), "tokens": np.arange(10)}
    path = written(tmp_path / "tied.onnx", nodes, weights, {"x": ["batch", 32]}, {"y": [10, 100]})
    inputs = rows(32)
    record = quantized(path, tmp_path / "small.onnx", kind, inputs)
    assert record.quantized == ("MatMul_deep", "MatMul_y")
    assert "Transpose" not in op_types(record.files[0])
    assert 1e-4 < relative_error(path, record.files[0], inputs[0]) < loss(kind)
    assert {name for name, _ in sensitivities(path, record, inputs)} == set(record.quantized)
    (target,) = quantized(path, tmp_path / "small.onnx", kind, inputs, keep=["MatMul_y"]).files
    assert 1e-4 < relative_error(path, target, inputs[0]) < loss(kind)


@pytest.mark.parametrize("kind", ["int8-static", "int8-dynamic", "int4-weights"])
def test_large_weights_go_into_a_file_of_their_own(kind, mlp, tmp_path, monkeypatch):
    target = tmp_path / "small.onnx"
    small = quantized(mlp, target, kind, rows(64)).files
    monkeypatch.setattr(exporters.onnx, "EXTERNAL_DATA_FROM", 1000)
    large = quantized(mlp, target, kind, rows(64)).files
    assert [path.name for path in large] == ["small.onnx", "small.onnx.data"]
    assert relative_error(mlp, target, rows(64)[0]) < 0.2
    monkeypatch.undo()
    assert quantized(mlp, target, kind, rows(64)).files == small
    assert sorted(tmp_path.iterdir()) == [mlp, target]


def test_the_source_may_have_external_data_and_nodes_without_names(tmp_path):
    nodes = [helper.make_node("MatMul", ["x", "a"], ["h"]), helper.make_node("MatMul", ["h", "a"], ["y"])]
    path = square(tmp_path / "m.onnx", nodes)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    record = quantized(path, tmp_path / "small.onnx", "int8-dynamic", keep=["node_1"])
    assert record.quantized == ("node",)
    assert [name for name, _ in sensitivities(path, record, rows(64))] == ["node"]


def test_quantization_leaves_the_path_of_modules_as_it_was():
    script = (
        "import sys; before = list(sys.path); from optimize_export.onnx_runtime import quantization; quantization()"
    )
    subprocess.run([sys.executable, "-c", f"{script}; assert sys.path == before"], check=True, cwd=ROOT)


_SCRIPT = """
import sys, numpy as np
from pathlib import Path
from exporters.onnx_quantization import quantized
rows = [{"x": np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)}]
for kind in ("int8-maps", "int8-static", "int8-inputs", "int8-dense", "int8-dynamic", "uint8-dynamic", "int4-weights"):
    quantized(Path(sys.argv[1]), Path(sys.argv[2]) / kind, kind, rows)
"""


@pytest.mark.slow
def test_the_bytes_depend_on_the_arguments_alone(mlp, tmp_path):
    digests = []
    for seed in ("0", "1"):
        folder = tmp_path / f"folder{seed}"
        folder.mkdir()
        root = str(Path(__file__).parents[1])
        command = [sys.executable, "-c", _SCRIPT, str(mlp), str(folder)]
        subprocess.run(command, check=True, cwd=root, env={"PYTHONHASHSEED": seed, "PYTHONPATH": root})
        files = sorted(folder.iterdir())
        assert [path.name for path in files] == sorted(KINDS)
        assert not any(str(tmp_path).encode() in path.read_bytes() for path in files)
        digests.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])
    assert digests[0] == digests[1]


def test_missing_calibration_calls_are_refused(mlp, tmp_path):
    with pytest.raises(QuantizationError, match="needs calibration calls"):
        quantized(mlp, tmp_path / "small.onnx", "int8-static")
    assert list(tmp_path.iterdir()) == [mlp]
    record = quantized(mlp, tmp_path / "small.onnx", "int8-dynamic")
    with pytest.raises(QuantizationError, match="needs calibration calls"):
        sensitivities(mlp, record, [])


def test_a_file_without_anything_to_quantize_is_refused(network, tmp_path):
    for kind in ("int8-dynamic", "uint8-dynamic", "int4-weights"):
        with pytest.raises(NothingToQuantize, match="no MatMul or Gemm with a constant float32 weight"):
            quantized(network, tmp_path / "small.onnx", kind)
    weights = {"a": weight(8, 8, dtype=np.float64)}
    path = written(tmp_path / "m.onnx", [node("MatMul", ["x", "a"], "y")], weights, {"x": [2, 8]}, {"y": [2, 8]})
    with pytest.raises(NothingToQuantize, match="no Conv or MatMul or Gemm"):
        quantized(path, tmp_path / "small.onnx", "int8-static", rows(8))
    weights = {"a": weight(40, 3, 3, 3), "b": weight(40, 4)}
    nodes = [
        node("Conv", ["x", "a"], "map"),
        node("GlobalAveragePool", ["map"], "mean"),
        node("Flatten", ["mean"], "flat"),
        node("Gemm", ["flat", "b"], "y"),
    ]
    path = written(tmp_path / "m.onnx", nodes, weights, {"x": ["batch", 3, 8, 8]}, {"y": ["batch", 4]})
    with pytest.raises(NothingToQuantize, match="Only 13% of the file's weights are in matrix products"):
        quantized(path, tmp_path / "small.onnx", "int8-dynamic")


@pytest.mark.parametrize("kind", KINDS)
def test_the_most_sensitive_node_is_the_one_that_harms_the_outputs_most_by_itself(kind, mlp, tmp_path):
    target, calibration = tmp_path / "small.onnx", rows(64)
    record = quantized(mlp, target, kind, calibration)
    found = sensitivities(mlp, record, calibration)
    # If a single node is quantized, its error is that of the file.
    alone = {}
    for name in record.quantized:
        others = [other for other in record.quantized if other != name]
        assert quantized(mlp, target, kind, calibration, keep=others).quantized == (name,)
        alone[name] = sum(relative_error(mlp, target, {"x": row["x"][:1]}) ** 2 for row in calibration[:2])
    assert [name for name, _ in found] == sorted(alone, key=lambda name: -alone[name])
    for name, error in found:
        assert error == pytest.approx(alone[name], rel=0.02)
    assert sorted(tmp_path.iterdir()) == [mlp, target]


def test_a_convolution_is_measured_with_its_relu_and_its_rounding(network, tmp_path):
    row = rows(3, 8, 8, count=1)
    only = quantized(network, tmp_path / "small.onnx", "int8-static", row, keep=["Conv_first"])
    ((name, error),) = sensitivities(network, only, row)
    assert name == "Conv_y"
    # One row is enough, where the batch is open.
    first = {"x": row[0]["x"][:1]}
    pairs = zip(run(network, first), run(only.files[0], first), strict=True)
    assert error == pytest.approx(sum(np.sum((y - q) ** 2) / np.sum(y**2) for y, q in pairs), rel=1e-2)
    both = quantized(network, tmp_path / "small.onnx", "int8-static", row)
    assert {name for name, _ in sensitivities(network, both, row)} == {"Conv_first", "Conv_y"}


@pytest.mark.parametrize("kind", ["int8-static", "int8-dynamic", "int4-weights"])
def test_the_worst_nodes_stay_in_float_until_the_file_is_accepted(kind, mlp, tmp_path):
    target, row = tmp_path / "small.onnx", rows(64)[0]
    errors = []

    def accept(path):
        errors.append(relative_error(mlp, path, row))
        return len(errors) > 1

    calibration = rows(64)
    worst, _ = sensitivities(mlp, quantized(mlp, target, kind, calibration), calibration)[0]
    search = within_budget(mlp, target, kind, calibration, accept)
    assert search.accepted is search.last
    assert (search.accepted.kept, search.tried) == ((worst,), 2)
    assert errors[1] < errors[0]
    assert sorted(tmp_path.iterdir()) == [mlp, target]
    search = within_budget(mlp, target, kind, (), lambda path: True) if kind != "int8-static" else search
    assert search.last.kept == (() if kind != "int8-static" else (worst,))


def test_the_search_ends_with_a_part_of_the_nodes_in_float(mlp, tmp_path, monkeypatch):
    monkeypatch.setattr(exporters.onnx_sensitivity, "_MOST_KEPT", 2 / 3)
    seen = []
    search = within_budget(
        mlp, tmp_path / "small.onnx", "int8-dynamic", rows(64), lambda path: seen.append(op_types(path).count("MatMul"))
    )
    assert search.accepted is None
    assert (seen, search.tried, len(search.last.kept)) == ([0, 1, 2], 3, 2)


def test_calibration_runs_once_in_a_search_and_an_interrupt_leaves_no_temporary_files(mlp, tmp_path, monkeypatch):
    from onnxruntime.quantization.calibrate import MinMaxCalibrater

    runs = []
    collect = MinMaxCalibrater.collect_data
    monkeypatch.setattr(MinMaxCalibrater, "collect_data", lambda *given: runs.append(1) or collect(*given))
    within_budget(mlp, tmp_path / "small.onnx", "int8-static", rows(64), lambda path: False)
    assert len(runs) == 40

    def interrupt(path):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        within_budget(mlp, tmp_path / "small.onnx", "int8-static", rows(64), interrupt)
    assert sorted(tmp_path.iterdir()) == [mlp, tmp_path / "small.onnx"]
