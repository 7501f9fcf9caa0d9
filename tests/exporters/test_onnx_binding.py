"""Sessions of onnxruntime that run on torch tensors by their addresses."""

from pathlib import Path

import onnx
import pytest
import torch

from optimize_export.onnx_runtime import ort
from optimize_export.runtime import Route, open_route
from optimize_export.runtime.onnx_binding import BoundSession

CPU = torch.device("cpu")


def written(path: Path, op_type: str, kind: int) -> Path:
    """A file with one operator of inputs `a` and `b` (or `a` alone) and the output `y`, with the shape (rows, 4)."""
    names = ["a"] if op_type == "Identity" else ["a", "b"]
    values = [onnx.helper.make_tensor_value_info(name, kind, ["rows", 4]) for name in (*names, "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node(op_type, names, ["y"])], "g", values[:-1], values[-1:])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def bound(path: Path) -> BoundSession:
    return BoundSession(ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]), CPU)


def test_a_dtype_that_numpy_lacks_runs_on_the_cpu(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", "Identity", onnx.TensorProto.BFLOAT16)
    x = torch.randn(3, 4).bfloat16()
    (y,) = open_route(path, Route("onnx", "onnxruntime"))(x)
    assert torch.equal(y, x)


def test_inputs_that_differ_from_those_of_the_file_are_refused(tmp_path: Path) -> None:
    run = bound(written(tmp_path / "m.onnx", "Add", onnx.TensorProto.FLOAT))
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="takes 2 tensors, not 1"):
        run(x)
    with pytest.raises(ValueError, match=r"Input `b` of the file is float, but got torch\.float64"):
        run(x, x.double())


def test_values_that_the_memory_does_not_hold_are_computed_first(tmp_path: Path) -> None:
    run = bound(written(tmp_path / "m.onnx", "Add", onnx.TensorProto.FLOAT))
    x = torch.randn(3, 4)
    (y,) = run(x, torch._neg_view(x))
    assert torch.equal(y, torch.zeros(3, 4))


def test_a_recorded_run_reads_and_writes_the_same_tensors(tmp_path: Path) -> None:
    run = bound(written(tmp_path / "m.onnx", "Add", onnx.TensorProto.FLOAT))
    x = torch.randn(3, 4)
    replay, (a, b), (y,) = run.recorded([x, x])
    assert torch.equal(y, x + x)
    a.fill_(1)
    b.fill_(2)
    replay()
    assert torch.equal(y, torch.full((3, 4), 3.0))
    assert not torch.equal(x, a), "the caller's tensors aren't written to"
