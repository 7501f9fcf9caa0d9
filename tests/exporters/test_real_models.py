import pytest
import torch
from real_models import REAL_MODELS, at_batch

from exporters import Adapter, ExportRequest, exporter_named


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


def test_a_cache_among_the_outputs_is_named_with_the_way_out():
    model, args, kwargs = REAL_MODELS["gpt2"]()
    with pytest.raises(Exception, match=r"output `past_key_values` is a DynamicCache.*use_cache=False"):
        Adapter(model, args, {**kwargs, "use_cache": True})
