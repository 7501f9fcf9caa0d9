"""`--layout triton`: a bundle's file in Triton's model repository, with its config.pbtxt."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optimize_export.errors import UsageError
from optimizer import export
from optimizer.bundle.triton import _artifact, _config
from optimizer.command.cli import main

BATCHED = [{"name": "x", "dtype": "float32", "shape": ["batch", 3, "width"]}]


def manifest(device: str = "cpu", **more: Any) -> dict[str, Any]:
    return {"parity": {"batch_sizes": [2, 1, 8]}, "device": {"type": device}, **more}


def artifact(format: str = "onnx", **more: Any) -> dict[str, Any]:
    outputs = [{"name": "y", "dtype": "int64", "shape": ["batch"]}]
    return {"format": format, "path": "model.onnx", "inputs": BATCHED, "outputs": outputs, **more}


def config(manifest: dict[str, Any], artifact: dict[str, Any]) -> list[str]:
    return "\n".join(_config("net", manifest, artifact)).split("\n")


def test_a_dynamic_batch_is_batched_by_triton() -> None:
    found = config(manifest(), artifact(measurement={"rows": {"alone": True}}))
    assert found == [
        'name: "net"',
        'backend: "onnxruntime"',
        'default_model_filename: "model.onnx"',
        "# the largest batch that was compared with the original",
        "max_batch_size: 8",
        "dynamic_batching { }",
        "input [ {",
        '  name: "x"  data_type: TYPE_FP32  dims: [3, -1]',
        "} ]",
        "output [ {",
        '  name: "y"  data_type: TYPE_INT64  dims: [1]',
        "  reshape { shape: [ ] }",
        "} ]",
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
    ]


@pytest.mark.parametrize("format", ["onnx", "torchscript"])
def test_the_configuration_fits_the_schema_of_triton(format: str) -> None:
    """Needs `pip install tritonclient[grpc]`, which asks for an older protobuf than onnx's."""
    schema = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="tritonclient isn't installed")
    from google.protobuf import text_format

    recommended = {"format": format, "runtime": "onnxruntime", "settings": {"threads": 2}}
    text = "\n".join(config(manifest(benchmark={"recommended": recommended}), artifact(format)))
    parsed = text_format.Parse(text, schema.ModelConfig())
    assert (parsed.name, parsed.max_batch_size, list(parsed.input[0].dims)) == ("net", 8, [3, -1])
    assert parsed.HasField("dynamic_batching")
    with pytest.raises(text_format.ParseError, match="max_batch"):
        text_format.Parse(text.replace("max_batch_size", "max_batch"), schema.ModelConfig())


@pytest.mark.parametrize(("shape", "dims"), [([2, 3], "[2, 3]"), (["time", 3], "[-1, 3]")])
def test_a_dim_that_is_not_the_batch_is_not_batched(shape: list[Any], dims: str) -> None:
    tensor = {"name": "x", "dtype": "float32", "shape": shape}
    found = config(manifest(example_sizes={"time": 5}), artifact(inputs=[tensor], outputs=[tensor]))
    assert "max_batch_size: 0" in found
    assert not any("dynamic_batching" in line for line in found)
    assert [line.partition("dims: ")[2] for line in found if "dims: " in line] == [dims, dims]
    assert "max_batch_size: 0" in config(manifest(), artifact(outputs=[{**tensor, "shape": [3]}]))
    assert any(line.startswith("# not checked") for line in config(manifest(), artifact()))


@pytest.mark.parametrize("format", ["onnx", "torchscript"])
def test_a_scalar_is_refused(format: str) -> None:
    scalar = {"name": "loss", "dtype": "float32", "shape": []}
    with pytest.raises(UsageError, match="its output loss is a scalar"):
        config(manifest(), artifact(format, outputs=[scalar]))


def test_torchscript_inputs_are_named_by_position_and_the_measured_threads_are_used() -> None:
    recommended = {"format": "torchscript", "runtime": "torch", "settings": {"threads": 2}}
    found = config(manifest("cuda", benchmark={"recommended": recommended}), artifact("torchscript"))
    assert 'platform: "pytorch_libtorch"' in found
    assert [line for line in found if "name: " in line][2:] == [
        '  name: "INPUT__0"  data_type: TYPE_FP32  dims: [3, -1]',
        '  name: "OUTPUT__0"  data_type: TYPE_INT64  dims: [1]',
    ]
    assert found[-2:] == [
        "instance_group [ { count: 1 kind: KIND_GPU } ]",
        'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "2" } }',
    ]
    assert config(manifest(benchmark={"recommended": recommended}), artifact())[-1].startswith("instance_group")
    in_openvino = {"format": "onnx", "runtime": "openvino", "settings": {"threads": 2}}
    assert config(manifest(benchmark={"recommended": in_openvino}), artifact())[-1].startswith("instance_group")


@pytest.mark.parametrize(
    ("runtime", "device", "is_taken"),
    [("onnxruntime", "cpu", True), ("openvino", "cpu", False), ("onnxruntime", "cuda", False)],
)
def test_the_measured_service_is_taken_where_triton_runs_what_was_measured(
    runtime: str, device: str, is_taken: bool
) -> None:
    recommended = {"format": "onnx", "runtime": runtime, "settings": {}}
    service = {"instances": 3, "threads": 2, "max_batch": 16, "max_wait": 0.0025}
    found = config(manifest(device, benchmark={"recommended": recommended}, service=service), artifact())
    taken = [
        "# the largest batch that was measured as best",
        "max_batch_size: 16",
        "dynamic_batching { max_queue_delay_microseconds: 2500 }",
        "instance_group [ { count: 3 kind: KIND_CPU } ]",
        'parameters { key: "intra_op_thread_count" value { string_value: "2" } }',
    ]
    assert [each for each in taken if each in found] == (taken if is_taken else [])


def test_the_recommended_file_is_taken_if_triton_serves_it() -> None:
    made = [artifact("torchscript"), artifact("onnx"), artifact("aoti"), artifact("onnx-int8-inputs")]
    for format, wanted in (("torchscript", "torchscript"), ("aoti", "onnx"), ("onnx-int8-inputs", "onnx")):
        found = _artifact(manifest(artifacts=made, benchmark={"recommended": {"format": format}}), None)
        assert found["format"] == wanted


@pytest.mark.parametrize(
    ("format", "message"),
    [("aoti", "Triton serves onnx and torchscript here, not aoti"), ("onnx", "The bundle has no 'onnx' artifact")],
)
def test_a_format_that_triton_cannot_serve_is_refused(format: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _artifact(manifest(artifacts=[artifact("aoti")]), format)


@pytest.mark.parametrize(("format", "dtype"), [("onnx", "complex64"), ("torchscript", "uint16")])
def test_a_dtype_that_the_backend_does_not_take_is_refused(format: str, dtype: str) -> None:
    with pytest.raises(UsageError, match=f"its input x is {dtype}"):
        config(manifest(), artifact(format, inputs=[{**BATCHED[0], "dtype": dtype}]))


@pytest.mark.slow
def test_a_repository_is_written_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    bundle = export(model, example_inputs=(torch.randn(2, 4),), output=tmp_path / "net", effort="quick")
    write = ["triton", str(bundle.path), "--output", str(tmp_path / "models"), "--json"]
    assert main(write) == 0
    folder = tmp_path / "models" / "net"
    assert json.loads(capsys.readouterr().out)["triton_model"] == str(folder)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert files.pop("config.pbtxt").decode().startswith('name: "net"\n')
    assert files == {"1/model.onnx": (bundle.path / "model.onnx").read_bytes()}

    assert main(write) == 8
    assert "is not replaced" in capsys.readouterr().err
    (bundle.path / "model.onnx").write_bytes(b"changed")
    assert main([*write[:-2], str(tmp_path / "others"), "--json"]) == 8
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "others").exists()
