import pytest
from real_models import REAL_MODELS

from optimizer import export


@pytest.mark.slow
def test_a_cache_among_the_outputs_is_taken_apart(tmp_path):
    model, args, kwargs = REAL_MODELS["gpt2"]()
    call = {"example_inputs": args or None, "example_kwargs": {**kwargs, "use_cache": True}}
    bundle = export(model, **call, output=tmp_path / "bundle", formats=["torchscript", "onnx", "pt2"])
    names = ["logits", "past_key_values_layers_0_keys", "past_key_values_layers_0_values"]
    for artifact in bundle.artifacts:
        assert [spec.name for spec in artifact.outputs] == names
        assert [output["name"] for output in bundle.parity.artifacts[artifact.format]["outputs"]] == names
    assert bundle.parity.ok
