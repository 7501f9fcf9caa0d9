"""Thirty architectures through optimize, both exporters and verify, and in bfloat16, all others that hold a BatchNorm through
optimize, and all of them in multiples of 8 channels; minutes long, so `make zoo` runs it."""

import pytest
import torch
from architectures import NORMED, ZOO, member

from exporters import ExportError
from optimizer import check_parity, export, optimize, verify_bundle
from passes import CastPrecision, PadChannels

REFUSED = {
    # Its trace holds the call of an autograd.Function, which TorchScript has no form for.
    ("bloom", "torchscript"),
    # It pads with zeros and takes the maximum. onnxruntime's Pad_Fusion makes that a padding of the MaxPool itself, which
    # is of minus infinity: whoever runs the file gets wrong numbers, so there is none.
    ("bit", "onnx"),
}


@pytest.mark.zoo
@pytest.mark.parametrize("name", ZOO)
def test_a_member_goes_the_whole_way(name, tmp_path):
    model, kwargs = member(name)
    fast = optimize(model, example_kwargs=kwargs)
    report = fast.report
    assert report.verified
    assert not [record for record in report.passes if record.status in ("rolled-back", "failed")]
    assert report.coverage.reached >= 0.9 * report.coverage.parameterised

    refused = set()
    for form in ("torchscript", "onnx"):
        target = tmp_path / form
        try:
            bundle = export(fast, example_kwargs=kwargs, output=target, formats=(form,))
        except ExportError:
            refused.add((name, form))
            assert not target.exists()
            continue
        assert bundle.parity.ok
        assert verify_bundle(bundle.path).ok
    assert refused == {pair for pair in REFUSED if pair[0] == name}


@pytest.mark.zoo
@pytest.mark.parametrize("name", NORMED)
def test_a_member_with_batch_norms_is_optimized(name):
    model, kwargs = member(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = optimize(model, example_kwargs=kwargs).report
    assert report.verified
    assert not [record for record in report.passes if record.status in ("rolled-back", "failed")]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.zoo
@pytest.mark.parametrize("name", [*ZOO, *NORMED])
def test_a_member_computes_in_multiples_of_channels(name):
    model, kwargs = member(name)
    fast = optimize(model, [PadChannels(force=True)], example_kwargs=kwargs)
    (record,) = fast.report.passes
    assert fast.report.verified
    assert record.status in ("applied", "unchanged")
    assert check_parity(model, fast, (), example_kwargs=kwargs, batch_sizes=(1, 2, 5), draws=1).ok


@pytest.mark.zoo
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("other", ["fold-conv-bias", "fold-conv-bn", "channels-last", "simplify"])
def test_a_member_computes_in_multiples_of_channels_beside_another_pass(name, other):
    for order in ([PadChannels(force=True), other], [other, PadChannels(force=True)]):
        model, kwargs = member(name)
        fast = optimize(model, order, example_kwargs=kwargs)
        assert {record.status for record in fast.report.passes} <= {"applied", "unchanged"}
        assert check_parity(model, fast, (), example_kwargs=kwargs, batch_sizes=(1, 2, 5), draws=1).ok


@pytest.mark.zoo
@pytest.mark.parametrize("how", ["autocast", "weights"])
@pytest.mark.parametrize("name", ZOO)
def test_a_member_computes_in_bfloat16(name, how):
    model, kwargs = member(name)
    report = optimize(model, [CastPrecision(how=how)], example_kwargs=kwargs).report
    assert [record.status for record in report.passes] == ["applied"], str(report)
    assert report.verified
    assert report.parity.precision == "bfloat16"
