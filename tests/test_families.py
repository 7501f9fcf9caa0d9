"""Take small modules with the shapes of well-known model families from the module to a verified bundle."""

import re

import pytest
from families import FAMILIES, family

from optimizer import export, optimize, verify_bundle


# torch warns about the batch_first that DETR's transformer doesn't use.
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.zoo
@pytest.mark.parametrize("name", FAMILIES)
def test_a_member_of_a_family_goes_the_whole_way(name, tmp_path):
    (model, args), expected = family(name), FAMILIES[name][1]
    fast = optimize(model, example_inputs=args)
    assert fast.report.verified
    assert not [record for record in fast.report.passes if record.status in ("rolled-back", "failed")]

    bundle = export(fast, example_inputs=args, output=tmp_path / "bundle", formats=tuple(expected))
    assert bundle.parity.ok
    routes = {artifact.format: artifact.route for artifact in bundle.artifacts}
    assert routes == {format: route for format, route in expected.items() if format not in bundle.missing}
    for format, reason in bundle.missing.items():
        assert re.search(expected[format], reason)
    for artifact in bundle.artifacts:
        assert {spec.shape[0] for spec in (*artifact.inputs, *artifact.outputs)} == {"batch"}
    assert verify_bundle(bundle.path).ok
