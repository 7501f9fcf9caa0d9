"""Take small modules with the shapes of well-known model families from the module to a verified bundle."""

import pytest
from families import FAMILIES, family

from optimizer import export, optimize, verify_bundle

# The routes of the files that each must reach, where they aren't the usual ones.
USUAL = {"torchscript": "trace", "onnx": "dynamo"}
ROUTES = {"pointnet2": {"torchscript": "trace", "onnx": "torchscript"}}


# torch warns about the batch_first that DETR's transformer doesn't use.
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.zoo
@pytest.mark.parametrize("name", FAMILIES)
def test_a_member_of_a_family_goes_the_whole_way(name, tmp_path):
    model, args = family(name)
    fast = optimize(model, example_inputs=args)
    assert fast.report.verified
    assert not [record for record in fast.report.passes if record.status in ("rolled-back", "failed")]

    bundle = export(fast, example_inputs=args, output=tmp_path / "bundle", formats=("torchscript", "onnx"))
    assert bundle.parity.ok
    assert {artifact.format: artifact.route for artifact in bundle.artifacts} == ROUTES.get(name, USUAL)
    for artifact in bundle.artifacts:
        assert {spec.shape[0] for spec in (*artifact.inputs, *artifact.outputs)} == {"batch"}
    assert verify_bundle(bundle.path).ok
