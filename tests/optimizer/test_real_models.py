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


def check(fast, model, args, kwargs, folds):
    """Check the result at batch sizes of which some were never compared, and the number of folds."""
    assert type(fast) is type(model)
    assert fast.config.to_dict() == model.config.to_dict()
    assert not [record for record in fast.report.passes if record.status in ("rolled-back", "failed")]
    assert {record.name: len(record.changes) for record in fast.report.passes}["fold-conv-bn"] == folds
    for size in (1, 2, 4):
        call_args, call_kwargs = at_batch(args, kwargs, size)
        with torch.no_grad():
            wanted, got = model(*call_args, **call_kwargs), fast(*call_args, **call_kwargs)
        assert type(got) is type(wanted)
        for mine, theirs in zip(tensors(got), tensors(wanted), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            assert theirs.abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.zoo if name == "mobilenet_v2" else ()) for name in REAL_MODELS],
)
def test_a_real_model_goes_the_whole_way(name, tmp_path):
    model, args, kwargs = REAL_MODELS[name]()
    inputs = {"example_inputs": args or None, "example_kwargs": kwargs}
    before = [(tensor._version, tensor.data_ptr()) for tensor in model.state_dict().values()]
    fast = optimize(model, **inputs)
    assert [(tensor._version, tensor.data_ptr()) for tensor in model.state_dict().values()] == before
    assert fast.report.verified
    share, folds = EXPECTED[name]
    assert fast.report.coverage.share >= share
    check(fast, model, args, kwargs, folds)

    bundle = export(fast, **inputs, output=tmp_path / "bundle")
    assert bundle.parity.ok
    assert bundle.manifest["parity"]["batch_sizes"] == [2, 1, 3, 5, 8]
    routes = {artifact.format: artifact.route for artifact in bundle.artifacts}
    assert routes == {"torchscript": "trace", "onnx": "dynamo"}
    for artifact in bundle.artifacts:
        assert {spec.shape[0] for spec in (*artifact.inputs, *artifact.outputs)} == {"batch"}
    assert verify_bundle(bundle.path).ok


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL_MODELS)
def test_a_real_model_without_inputs_stays_as_it_is(name):
    model, args, kwargs = REAL_MODELS[name]()
    fast = optimize(model)
    assert not fast.report.verified
    check(fast, model, args, kwargs, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format"),
    [
        *(("bert", format) for format in ("torchscript", "onnx", "pt2")),
        pytest.param("resnet", "torchscript", marks=pytest.mark.zoo),
    ],
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
