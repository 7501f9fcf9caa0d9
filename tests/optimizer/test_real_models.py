import pytest
import torch
from real_models import REAL_MODELS, at_batch
from torch.utils import _pytree as pytree

from exporters.base import named_inputs
from optimizer import export, optimize, verify_bundle

# The minimum share of modules with parameters that passes reach, and the number of folds, with example inputs.
EXPECTED = {
    "bert": (1.0, 0),
    "gpt2": (1.0, 0),
    "llama": (1.0, 0),
    "t5_encoder": (0.9, 0),
    "vit": (1.0, 0),
    "resnet": (1.0, 6),
    # The folds are layer scales.
    "convnext": (1.0, 2),
    "mobilenet_v2": (1.0, 52),
    "regnet": (1.0, 9),
}


def tensors(outputs):
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


@pytest.mark.slow
@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models(name, verified):
    model, args, kwargs = REAL_MODELS[name]()
    inputs = {"example_inputs": args, "example_kwargs": kwargs} if verified else {}
    before = [(tensor._version, tensor.data_ptr()) for tensor in model.state_dict().values()]
    fast = optimize(model, **inputs)
    assert [(tensor._version, tensor.data_ptr()) for tensor in model.state_dict().values()] == before
    assert type(fast) is type(model)
    assert fast.config.to_dict() == model.config.to_dict()
    share, known = EXPECTED[name]
    folds = {record.name: len(record.changes) for record in fast.report.passes}["fold-conv-bn"]
    assert folds == (known if verified else 0)
    assert fast.report.verified == verified
    if verified:
        assert fast.report.coverage.share >= share
    for size in (1, 2, 5):
        call_args, call_kwargs = at_batch(args, kwargs, size)
        with torch.no_grad():
            wanted, got = model(*call_args, **call_kwargs), fast(*call_args, **call_kwargs)
        assert type(got) is type(wanted)
        for mine, theirs in zip(tensors(got), tensors(wanted), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            assert theirs.abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format"), [("bert", "torchscript"), ("bert", "onnx"), ("bert", "pt2"), ("resnet", "torchscript")]
)
def test_real_models_are_open_in_other_dims_than_the_batch(name, format, tmp_path):
    model, args, kwargs = REAL_MODELS[name]()
    fast = optimize(model, example_inputs=args, example_kwargs=kwargs)
    dims = {0: "batch", 1: "time"} if name == "bert" else {0: "batch", 2: "height", 3: "width"}
    dynamic = dict.fromkeys(named_inputs(model, args, kwargs), dims)
    bundle = export(
        fast, example_inputs=args, example_kwargs=kwargs, output=tmp_path / "net", formats=(format,), dynamic=dynamic
    )
    (artifact,) = bundle.artifacts
    assert not artifact.refused
    assert all(
        [size for size in spec.shape if isinstance(size, str)] == list(dims.values()) for spec in artifact.inputs
    )
    assert verify_bundle(bundle.path).ok
