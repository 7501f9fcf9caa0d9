"""Run many architectures; this takes more than an hour, so only `make zoo` runs it.

Thirty architectures go through optimize, export to TorchScript and ONNX, verify, pairs of passes and bfloat16. All
others with a BatchNorm, and thirty of timm, go through optimize. All but those of timm go through torch.export and
pad-channels.
"""

import functools

import pytest
import torch
from architectures import NORMED, ZOO, member
from timm_models import TIMM, timm_member

from exporters import ExportError, ExportRequest, StructureError, exporter_named
from optimizer import check_parity, export, optimize, verify_bundle
from optimizer.model.inputs import Samples
from optimizer.parity import judge, measure_reference
from passes import (
    CastPrecision,
    ChannelsLast,
    FoldConvBias,
    FoldConvBn,
    JitFusion,
    MergeLinears,
    PadChannels,
    Simplify,
    TorchCompile,
)


@pytest.mark.zoo
@pytest.mark.parametrize("name", ZOO)
def test_a_member_goes_the_whole_way(name, tmp_path):
    model, kwargs = member(name)
    fast = optimize(model, example_kwargs=kwargs)
    report = fast.report
    assert report.verified
    assert not [record for record in report.passes if record.status in ("rolled-back", "failed")]
    assert report.coverage.reached >= 0.9 * report.coverage.parameterised

    for form in ("torchscript", "onnx"):
        bundle = export(fast, example_kwargs=kwargs, output=tmp_path / form, formats=(form,))
        assert bundle.parity.ok
        assert verify_bundle(bundle.path).ok


def front_end(test):
    """Ignore the warnings that torch.compile's front end gives for the code of transformers in any model."""
    for text in (
        ".*should not be instantiated:DeprecationWarning",
        "Dynamo detected a call to a `functools.lru_cache`",
    ):
        test = pytest.mark.filterwarnings(f"ignore:{text}")(test)
    return test


# A program can't contain their data-dependent shapes and control flow. Informer makes a mask only under torch.export,
# and raises on it.
NO_PROGRAM = {"fastspeech2-conformer", "informer", "slanet", "superglue"}


@pytest.mark.zoo
@front_end
@pytest.mark.parametrize("name", [*ZOO, *NORMED])
def test_a_member_is_a_program_of_torch_export(name, tmp_path):
    model, kwargs = member(name)
    samples = Samples((), kwargs)
    calls = tuple((call.args, call.kwargs) for call in map(samples.at, (2, 3, 5, 1, 8)))
    exported = exporter_named("pt2")
    if name in NO_PROGRAM:
        with pytest.raises((ExportError, StructureError)):
            exported.export(ExportRequest(model, calls), tmp_path)
        assert not list(tmp_path.iterdir())
        return
    artifact = exported.export(ExportRequest(model, calls), tmp_path)
    assert "batch" in {size for spec in artifact.inputs for size in spec.shape}


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
@pytest.mark.parametrize("name", TIMM)
def test_a_member_of_timm_is_optimized(name):
    model, kwargs = timm_member(name)
    fast = optimize(model, example_kwargs=kwargs)
    assert fast.report.verified
    assert not [record for record in fast.report.passes if record.status in ("rolled-back", "failed")]
    assert check_parity(model, fast, (), example_kwargs=kwargs, batch_sizes=(1, 2, 5), draws=1).ok


@pytest.mark.zoo
@pytest.mark.parametrize("name", [*ZOO, *NORMED])
def test_a_member_computes_in_multiples_of_channels(name):
    model, kwargs = member(name)
    fast = optimize(model, [PadChannels(force=True)], example_kwargs=kwargs)
    (record,) = fast.report.passes
    assert fast.report.verified
    assert record.status in ("applied", "unchanged")
    assert check_parity(model, fast, (), example_kwargs=kwargs, batch_sizes=(1, 2, 5), draws=1).ok


# All inference passes except torch-compile. The tests run every pair of them, in both orders.
GRAPH_PASSES = {
    "fold-conv-bias": FoldConvBias(),
    "fold-conv-bn": FoldConvBn(),
    "channels-last": ChannelsLast(),
    "simplify": Simplify(),
    "merge-linears": MergeLinears(force=True),
    "pad-channels": PadChannels(force=True),
    "jit-fusion": JitFusion(),
    "cast-precision": CastPrecision(),
}
COMPILED = TorchCompile(backend="eager")


@pytest.fixture(scope="module")
def reference_of():
    """Return a function from a name to (model, kwargs, reference at batch sizes 1, 2 and 5); it caches the last one."""

    @functools.lru_cache(maxsize=1)
    def measured(name):
        model, kwargs = member(name)
        return model, kwargs, measure_reference(model, Samples((), kwargs), batch_sizes=(1, 2, 5), draws=1)

    return measured


def rows(value, size):
    return torch.cat([value] * size)[:size] if isinstance(value, torch.Tensor) else value


def _check_together(model, kwargs, reference, passes):
    report = (fast := optimize(model, passes, example_kwargs=kwargs)).report
    names = [item.name for item in passes]
    assert {record.status for record in report.passes} <= {"applied", "unchanged"}, (names, str(report))
    assert report.verified, (names, str(report))
    if report.parity.precision is None:
        judged = judge(reference.compare(fast))
        assert judged.ok, (names, judged.reason)
    with torch.no_grad():
        for size in (1, 2, 5):
            # In half precision the numbers differ, so this only checks that each batch size runs.
            fast(**{key: rows(value, size) for key, value in kwargs.items()})


@pytest.mark.zoo
@pytest.mark.parametrize("first", GRAPH_PASSES)
@pytest.mark.parametrize("name", ZOO)
def test_a_member_takes_a_pass_beside_every_other_one(name, first, reference_of):
    model, kwargs, reference = reference_of(name)
    for second, item in GRAPH_PASSES.items():
        if second != first:
            _check_together(model, kwargs, reference, [GRAPH_PASSES[first], item])


@pytest.mark.zoo
@front_end
@pytest.mark.parametrize("name", ZOO)
def test_a_member_takes_every_pass_in_front_of_torch_compile(name, reference_of):
    model, kwargs, reference = reference_of(name)
    for item in GRAPH_PASSES.values():
        torch._dynamo.reset()
        _check_together(model, kwargs, reference, [item, COMPILED])


@pytest.mark.zoo
@front_end
@pytest.mark.parametrize("name", ZOO)
def test_a_member_takes_all_passes_together(name, reference_of):
    model, kwargs, reference = reference_of(name)
    exact = [item for item in GRAPH_PASSES.values() if item.name != "cast-precision"]
    for passes in (exact, exact[::-1], [*GRAPH_PASSES.values(), COMPILED]):
        torch._dynamo.reset()
        _check_together(model, kwargs, reference, passes)


@pytest.mark.zoo
@pytest.mark.parametrize("how", ["autocast", "weights"])
@pytest.mark.parametrize("name", ZOO)
def test_a_member_computes_in_bfloat16(name, how):
    model, kwargs = member(name)
    report = optimize(model, [CastPrecision(how=how)], example_kwargs=kwargs).report
    assert [record.status for record in report.passes] == ["applied"], str(report)
    assert report.verified
    assert report.parity.precision == "bfloat16"
