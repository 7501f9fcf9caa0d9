import pytest
import torch
from real_models import REAL_MODELS, at_batch

from exporters import Adapter, ExportRequest, exporter_named
from optimizer import export


@pytest.mark.zoo
@pytest.mark.parametrize("format", ["torchscript", "onnx", "pt2"])
@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models_export_by_the_first_route(name, format, tmp_path):
    model, args, kwargs = REAL_MODELS[name]()
    calls = tuple(at_batch(args, kwargs, size) for size in (2, 1, 5))
    artifact = exporter_named(format).export(ExportRequest(model, calls), tmp_path)
    assert artifact.route == {"torchscript": "trace", "onnx": "dynamo", "pt2": "export"}[format]
    assert {spec.shape[0] for spec in (*artifact.inputs, *artifact.outputs)} == {"batch"}
    adapter = Adapter(model, *calls[0])
    inputs = adapter.flatten_inputs(*at_batch(args, kwargs, 7))
    for expected, got in zip(adapter.run(inputs), artifact.load()(*inputs), strict=True):
        assert expected.std() > 0.05
        assert torch.allclose(expected.detach(), got, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["torchscript", "onnx", "pt2"])
def test_a_cache_among_the_outputs_is_taken_apart(format, tmp_path):
    model, args, kwargs = REAL_MODELS["gpt2"]()
    call = {"example_inputs": args or None, "example_kwargs": {**kwargs, "use_cache": True}}
    bundle = export(model, **call, output=tmp_path / "bundle", formats=[format])
    (artifact,) = bundle.artifacts
    names = ["logits", "past_key_values_layers_0_keys", "past_key_values_layers_0_values"]
    assert [spec.name for spec in artifact.outputs] == names
    assert [output["name"] for output in bundle.parity.artifacts[format]["outputs"]] == names
    assert bundle.parity.ok
