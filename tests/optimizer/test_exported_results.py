"""Results of passes, exported to the formats that use torch.export."""

import pytest
from real_models import REAL_MODELS

from optimizer import export, optimize, verify_bundle

PASSES = {
    "resnet": [
        ["fold-conv-bias", "fold-conv-bn", "channels-last", "pad-channels:force=true", "jit-fusion"],
        ["cast-precision:how=weights:dtype=float16", "torch-compile:backend=eager"],
    ],
    "bert": [
        ["simplify", "merge-linears:force=true", "pad-channels:force=true", "jit-fusion"],
        ["cast-precision:how=autocast"],
        ["cast-precision:how=weights"],
    ],
}


def check(name, passes, format, tmp_path):
    model, args, kwargs = REAL_MODELS[name]()
    given = {"example_inputs": args or None, "example_kwargs": kwargs}
    fast = optimize(model, passes, **given)
    assert fast.report.verified
    assert "applied" in {record.status for record in fast.report.passes}
    bundle = export(fast, **given, output=tmp_path / "bundle", formats=(format,))
    assert bundle.parity.ok
    (artifact,) = bundle.artifacts
    assert {tensor.dtype for tensor in artifact.outputs} == {"float32"}
    assert {tensor.shape[0] for tensor in (*artifact.inputs, *artifact.outputs)} == {"batch"}
    assert bundle.manifest["golden"]["precision"] == (fast.report.parity.precision or "")
    moved = (tmp_path / "bundle").rename(tmp_path / "moved")
    assert verify_bundle(moved).ok


@pytest.mark.slow
@pytest.mark.parametrize(("name", "passes"), [(name, passes) for name in PASSES for passes in PASSES[name]])
def test_results_of_passes_are_programs_of_torch_export(name, passes, tmp_path):
    check(name, passes, "pt2", tmp_path)


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("name", "passes"),
    [("resnet", PASSES["resnet"][0]), ("bert", PASSES["bert"][1])],
)
def test_results_of_passes_are_compiled_ahead_of_time(name, passes, tmp_path):
    check(name, passes, "aoti", tmp_path)
