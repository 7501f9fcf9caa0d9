"""Real architectures from the module to a bundle that verifies, at every batch size."""

import pytest
import torch
from real_models import REAL_MODELS, at_batch

from optimizer import export, optimize, verify_bundle


@pytest.mark.parametrize("name", REAL_MODELS)
def test_a_real_model_goes_the_whole_way(name, tmp_path):
    model, args, kwargs = REAL_MODELS[name]()
    fast = optimize(model, example_inputs=args or None, example_kwargs=kwargs)
    assert fast.report.verified
    assert type(fast) is type(model)
    assert not [record for record in fast.report.passes if record.status in ("rolled-back", "failed")]

    bundle = export(fast, example_inputs=args or None, example_kwargs=kwargs, output=tmp_path / "bundle")
    assert bundle.parity.ok
    assert bundle.manifest["parity"]["batch_sizes"] == [2, 1, 3, 5, 8]
    for artifact in bundle.artifacts:
        assert {spec.shape[0] for spec in (*artifact.inputs, *artifact.outputs)} == {"batch"}
    assert verify_bundle(bundle.path).ok

    # By hand as well: the result itself at a batch size that nothing was checked at.
    more_args, more_kwargs = at_batch(args, kwargs, 4)
    with torch.no_grad():
        wanted, got = (run(*more_args, **more_kwargs) for run in (model, fast))
    for key, value in wanted.items():
        assert torch.allclose(got[key], value, rtol=1e-3, atol=1e-4 * float(value.abs().max())), key
