"""A candidate is right, wrong, or its outputs prove nothing; nothing of the original is changed."""

import copy
import enum
import itertools
import json
import math
import random
import warnings
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from laid_out import NESTED, SPARSE, laid_out
from parity_models import folded, image, net, off_by, verdict
from tiny_models import enliven
from torch import nn

from optimize_export.errors import DeviceError, LoadError, UsageError
from optimizer.model.inputs import Samples
from optimizer.parity import (
    Measurement,
    OutputNoise,
    ParityReport,
    check_parity,
    compare_golden,
    golden_entries,
    independent_rows,
    judge,
    measure_reference,
)
from passes import Precision

# ------------------------------------------------------------------------------------- right and wrong candidates


@pytest.mark.parametrize(
    "rewrite",
    [
        copy.deepcopy,
        folded,
        lambda model: copy.deepcopy(model).to(memory_format=torch.channels_last),
        lambda model: lambda x: model(x.contiguous(memory_format=torch.channels_last)),
        lambda model: lambda x: copy.deepcopy(model).eval().double()(x.double()).float(),
        lambda model: lambda x: torch.cat([model(row) for row in x.split(1)]),
    ],
)
def test_a_correct_rewrite_passes(rewrite):
    model = net().eval()
    report = check_parity(model, rewrite(model), (image(),))
    assert report.ok, report
    assert report.ratio < 3
    assert report.reference == "float64"
    assert report.batch_sizes == (2, 1, 3, 5, 8)


@pytest.mark.parametrize("path", ["conv.weight", "bn.weight", "head.weight"])
def test_one_weight_off_by_a_hundredth_fails(path):
    report = check_parity(net(), off_by(net(), path), (image(),))
    assert report.verdict == "failed"
    assert "times its rounding noise" in report.reason


def test_a_small_error_everywhere_fails_by_the_root_mean_square():
    torch.manual_seed(0)
    linear = enliven(nn.Linear(400, 400))

    def shifted(x):
        return linear(x) + 1.1e-6

    report = check_parity(linear, shifted, (torch.randn(2, 400),))
    assert report.verdict == "failed"
    assert "RMS" in report.reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_judged_by_their_own_noise(dtype):
    model = net().to(dtype)
    x = image().to(dtype)
    assert verdict(model, folded(model), x) == "ok"
    assert verdict(model, off_by(model, "head.weight", 0.5), x) == "failed"
    assert check_parity(model, model, (x,)).outputs[0].noise > 0


LAYER = enliven(nn.Linear(8, 6))


def doubled(x):
    return x * 2


def label(x):
    return LAYER(x).argmax(-1)


def near(x):
    return x + 1e-3


@pytest.mark.parametrize(
    ("reference", "candidate", "options", "expected"),
    [
        # An exact operation may round once, but no more.
        (doubled, lambda x: (x.double() * 2).float(), {}, "ok"),
        (doubled, lambda x: torch.nextafter(x * 2, x * 3), {}, "ok"),
        (doubled, lambda x: x * 2 + 1e-5, {}, "failed"),
        # A batch size or a branch that is fixed in the candidate.
        (lambda x: x - x.mean(), lambda x: x - x.sum() / 384, {}, "failed"),
        (lambda x: x.abs() if x.sum() > 0 else x, torch.abs, {}, "failed"),
        # Integers must be equal.
        (label, lambda x: F.linear(x.double(), LAYER.weight.double(), LAYER.bias.double()).argmax(-1), {}, "ok"),
        (label, lambda x: (label(x) + 1) % 6, {}, "failed"),
        (label, lambda x: torch.where(x[..., 0] > 2, 0, label(x)), {}, "failed"),
        (lambda x: x * 0, lambda x: x * 0 + 1, {}, "failed"),
        # The user's tolerance replaces the noise, and allows no other structure, dtype or NaN.
        (torch.clone, near, {}, "failed"),
        (torch.clone, near, {"atol": 2e-3}, "ok"),
        (torch.clone, near, {"atol": 5e-4}, "failed"),
        (torch.clone, near, {"rtol": 2e-3}, "failed"),
        (torch.clone, lambda x: x * 1.001, {"rtol": 2e-3}, "ok"),
        (torch.clone, lambda x: x * 1.001, {"rtol": 5e-4}, "failed"),
        (lambda x: {"a": x, "b": x}, lambda x: {"a": near(x), "b": x}, {"atol": {"a": 2e-3}}, "ok"),
        (lambda x: {"a": x, "b": x}, lambda x: {"a": near(x), "b": x}, {"atol": {"b": 2e-3}}, "failed"),
        (torch.clone, lambda x: torch.where(x > 1, torch.nan, x), {"atol": 1e9}, "failed"),
        (lambda x: x > 0, lambda x: x > 0.1, {"atol": 1e9}, "failed"),
    ],
)
def test_verdicts(reference, candidate, options, expected):
    assert verdict(reference, candidate, image(), **options) == expected


# ------------------------------------------------------------------------------------- never tolerated


Pair = namedtuple("Pair", "a b")


Other = namedtuple("Other", "a b")


@dataclass
class Answer:
    logits: torch.Tensor
    state: list


@pytest.mark.parametrize(
    ("reference", "candidate", "words"),
    [
        (lambda x: x, lambda x: x.flatten(1), "shape"),
        (lambda x: x, lambda x: x.double(), "dtype is float64"),
        (lambda x: x > 0, lambda x: (x > 0).int(), "dtype"),
        (lambda x: (x, x), lambda x: [x, x], "structure"),
        (lambda x: (x, x), lambda x: (x,), "structure"),
        (lambda x: Pair(x, x), lambda x: Other(x, x), "structure"),
        (lambda x: {"a": x, "b": x}, lambda x: {"a": x, "c": x}, "structure"),
        (lambda x: Answer(x, [x]), lambda x: Answer(x, [x, x]), "state"),
        (lambda x: (x, None), lambda x: (x, x), "structure"),
        (lambda x: (x, 3), lambda x: (x, 4), "structure"),
        (lambda x: x, lambda x: torch.where(x > 1, torch.nan, x), "NaN"),
        (lambda x: torch.where(x > 1, torch.nan, x), lambda x: x, "NaN"),
        (lambda x: torch.where(x > 1, torch.inf, x), lambda x: torch.where(x > 1, -torch.inf, x), "inf"),
        (lambda x: (x, (x > 0).long()), lambda x: (x, (x > 0.1).long()), "elements differ"),
        (lambda x: (x, x.sum().item()), lambda x: (x, x.sum().item() + 1), "output_1"),
        (lambda x: (x, x.numpy()), lambda x: (x, x.numpy() + 1), "output_1"),
        (lambda x: torch.complex(x, x), lambda x: torch.complex(x, x * 1.001), "off by"),
    ],
)
def test_other_answers_fail(reference, candidate, words):
    assert verdict(reference, reference, image()) == "ok"
    report = check_parity(reference, candidate, (image(),))
    assert report.verdict == "failed"
    assert words in report.reason


def test_equal_nan_and_inf_pass_and_nan_is_noted():
    def odd(x):
        return torch.where(x > 1, torch.nan, torch.where(x < -1, -torch.inf, x))

    report = check_parity(odd, lambda x: odd(x), (image(),))
    assert report.ok
    assert any("NaN" in note for note in report.notes)


def test_a_candidate_that_raises_at_one_batch_size_is_named():
    def baked(x):
        return x.view(2, -1).view(x.shape) if len(x) != 3 else x.view(-1, 7)

    report = check_parity(lambda x: x, baked, (image(),))
    assert report.verdict == "failed"
    assert "batch size 3" in report.reason
    assert "RuntimeError" in report.reason


# ------------------------------------------------------------------------------------- integers and ties


def test_ties_that_the_original_breaks_either_way_are_counted_not_compared():
    def tied(x):
        flat = x.flatten(1)
        even = flat.sum(1, keepdim=True)
        # Two sums of the same numbers, equal except for rounding.
        return torch.cat([even, flat.flip(1).cumsum(1)[:, -1:], -even.abs()], 1).argmax(1), flat[:, :1] > 0

    report = check_parity(tied, tied, (image(),))
    assert report.outputs[0].tied > 0
    assert any("rounding alone changes them" in note for note in report.notes)
    wrong = check_parity(tied, lambda x: (tied(x)[0] * 0 + 2, tied(x)[1]), (image(),))
    assert wrong.verdict == "failed"


# ------------------------------------------------------------------------------------- no signal


COUNT = itertools.count()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda x: x * 0, "all zero"),
        (lambda x: x * 0 + torch.arange(8.0), "same for every input"),
        (lambda x: x * torch.nan, "NaN"),
        (lambda x: x * 3e-8 + 1, "rounding"),
        (lambda x: (x * 5e-3 + 1e5) - 1e5, "rounding noise"),
        (lambda x: x[:, :0], "empty"),
        (lambda x: None, "no tensors"),
        (lambda x: {"answer": 42}, "no tensors"),
        (lambda x: torch.zeros(3, dtype=torch.int64), "all zero"),
        (lambda x: x + next(COUNT), "deterministic"),
    ],
)
def test_outputs_without_signal_are_vacuous(model, words):
    report = check_parity(model, model, (image(),))
    assert report.verdict == "vacuous"
    assert not report.ok
    assert words in report.reason


def test_one_output_without_signal_among_others_is_a_note():
    report = check_parity(lambda x: (x, x * 0), lambda x: (x, x * 0), (image(),))
    assert report.ok
    assert any("output_1 is all zero" in note for note in report.notes)


# ------------------------------------------------------------------------------------- randomness and determinism


def test_random_models_run_under_one_seed():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train()

    def noisy(x):
        return F.dropout(model[0](x), 0.5, training=True) + torch.rand_like(x)

    assert verdict(noisy, lambda x: noisy(x), image()) == "ok"
    assert verdict(noisy, lambda x: noisy(x + 0 * torch.rand(1)), image()) == "failed"
    assert check_parity(noisy, noisy, (image(),)).reference == "float64"


def test_an_original_that_differs_from_itself_is_named_and_judged_on_the_rest():
    count = iter(range(10**6))

    def moody(x):
        return x * 2, x + next(count)

    report = check_parity(moody, lambda x: (x * 2, x), (image(),))
    assert report.ok
    assert not report.outputs[1].judged
    assert any("output_1 is not deterministic" in note for note in report.notes)
    assert verdict(moody, lambda x: (x * 3, x), image()) == "failed"


# ------------------------------------------------------------------------------------- batch sizes


def test_a_batch_size_at_which_the_original_raises_is_left_out_and_named():
    def pairs_only(x):
        if len(x) % 2:
            raise ValueError("even batches only\nand more")
        return x

    report = check_parity(pairs_only, pairs_only, (image(),))
    assert report.ok
    assert report.batch_sizes == (2, 8)
    assert any("batch size 1" in note and "even batches only" in note for note in report.notes)


def test_an_original_that_always_raises_is_an_error():
    def broken(x):
        raise ValueError("no way")

    with pytest.raises(LoadError, match="no way"):
        check_parity(broken, broken, (image(),))


def test_inputs_without_a_batch_run_as_they_are():
    report = check_parity(torch.sin, torch.sin, (torch.tensor(0.5),), batch_sizes=(1, 2))
    assert report.ok
    assert report.batch_sizes == ()
    assert any("can't be changed" in note for note in report.notes)


# ------------------------------------------------------------------------------------- inputs changed in place


def test_inputs_changed_in_place_count_as_answers():
    def doubles(x):
        x *= 2
        return x.sum(1)

    x = image()
    before = x.clone()
    assert verdict(doubles, lambda x: x.mul_(2).sum(1), x) == "ok"
    only = check_parity(doubles, lambda x: (x * 2).sum(1), (x,))
    assert only.verdict == "failed"
    assert "x is changed in place by the original only" in only.reason
    assert "candidate only" in check_parity(lambda x: (x * 2).sum(1), doubles, (x,)).reason
    assert "off by" in check_parity(doubles, lambda x: x.mul_(2).sum(1) + 0 * x.add_(1).sum(1), (x,)).reason
    assert torch.equal(x, before)


# ------------------------------------------------------------------------------------- nothing is touched


class Stateful(nn.Module):
    """Counts, caches, and binds new tensors to its attributes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3))
        self.bn = nn.BatchNorm1d(3)
        self.seen = []
        self.plain = torch.zeros(3)

    def forward(self, x):
        self.total += x.sum(0)
        self.last = x[0]
        self.plain.add_(1)
        self.seen.append(x)
        self.new = x
        return self.bn(x) + self.total + self.plain + len(self.seen)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_modules_and_random_state_are_as_before(mode):
    model = enliven(Stateful()).train()
    model.bn.eval()
    candidate, x = copy.deepcopy(model), torch.randn(4, 3)
    model.bn.weight.grad = torch.ones(3)
    state = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    keys = set(vars(model))
    random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    default = torch.get_default_dtype()
    report = check_parity(model, candidate, (x,), mode=mode)
    assert report.ok, report
    for module in (model, candidate):
        assert module.training
        assert not module.bn.training
        assert set(vars(module)) == keys
        assert module.seen == []
        assert not module.plain.any()
    for name, (value, before) in state.items():
        assert model.state_dict(keep_vars=True)[name] is value
        assert torch.equal(value, before)
    assert torch.equal(model.bn.weight.grad, torch.ones(3))
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]
    assert (np.random.get_state()[1] == random_states[2]).all()
    assert torch.get_default_dtype() is default


def test_buffers_that_nothing_wrote_to_keep_their_version():
    model = net()
    versions = {name: buffer._version for name, buffer in model.named_buffers()}
    check_parity(model, folded(model), (image(),))
    assert {name: buffer._version for name, buffer in model.named_buffers()} == versions


def test_settings_are_pinned_and_come_back():
    seen = []
    before = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        report = check_parity(
            lambda x: x, lambda x: (seen.append(torch.get_float32_matmul_precision()), x)[1], (image(),)
        )
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.set_float32_matmul_precision(before[1])
    assert set(seen) == {"highest"}
    assert report.settings["float32_precision"] == "ieee"
    assert report.settings["torch_tf32"] == "off"
    assert torch.backends.cuda.matmul.allow_tf32 == before[0]


# ------------------------------------------------------------------------------------- fall-back reference


def single_only(x):
    if x.dtype is not torch.float32 or x.double().float().numpy().dtype != np.float32:
        raise TypeError("float32 only")
    return x.sin()


def by_numpy(x):
    # `np.float32` isn't raised to float64, so the float64 run takes the other branch.
    return x * (2 if x.numpy().dtype == np.float32 else 3)


@pytest.mark.parametrize(
    ("original", "right", "wrong", "reason"),
    [
        (single_only, torch.sin, lambda x: x.sin() * 1.0001, "float32 only"),
        (by_numpy, lambda x: x * 2, lambda x: x * 3, "something different"),
    ],
)
def test_without_float64_the_original_is_the_reference_for_a_reason(original, right, wrong, reason):
    report = check_parity(original, right, (image(),))
    assert report.ok
    assert report.reference == "own dtype"
    assert any(reason in note for note in report.notes)
    assert verdict(original, wrong, image()) == "failed"


# ------------------------------------------------------------------------------------- the user's tolerances


@pytest.mark.parametrize("value", [-1.0, math.nan, "1e-3", None])
def test_a_tolerance_must_be_a_number_of_0_or_more(value):
    for tolerance in ({"atol": {"output": value}}, {"rtol": {"output": value}}):
        with pytest.raises(UsageError, match="0 or more"):
            check_parity(torch.clone, torch.clone, (image(),), **tolerance)


def test_a_tolerance_names_outputs_of_the_reference_also_where_the_candidate_raises():
    def raises(x):
        raise ValueError("no")

    report = check_parity(torch.clone, raises, (image(),), atol={"output": 1.0})
    assert (report.verdict, "raises" in report.reason) == ("failed", True)
    with pytest.raises(UsageError, match="'other'; the outputs are: output"):
        check_parity(torch.clone, raises, (image(),), atol={"other": 1.0})


# ------------------------------------------------------------------------------------- reference, golden, JSON


def test_flat_candidates_are_matched_by_order():
    def model(x, scale):
        return {"a": x * scale["s"], "b": (x > 0, x + 1)}

    reference = measure_reference(model, Samples((image(),), {"scale": {"s": torch.tensor(3.0)}}))

    def flatten(args, kwargs):
        return (args[0], kwargs["scale"]["s"])

    right = reference.compare(lambda x, s: (x * s, x > 0, x + 1), flatten=flatten)
    assert judge(right).ok
    swapped = reference.compare(lambda x, s: (x + 1, x > 0, x * s), flatten=flatten)
    assert judge(swapped).verdict == "failed"
    fewer = reference.compare(lambda x, s: (x * s, x > 0), flatten=flatten)
    assert "2 tensors" in judge(fewer).reason


def test_json_both_ways_and_judged_again():
    model = net().eval()
    reference = measure_reference(model, Samples((image(),)))
    rows = independent_rows(reference, atol={}, rtol={})
    for measurement in (
        reference.compare(folded(model)),
        reference.compare(off_by(model, "conv.weight"), rows=rows),
        reference.at_precision(Precision(torch.bfloat16)).compare(model),
    ):
        again = Measurement.from_json(json.loads(json.dumps(measurement.to_json(), allow_nan=False)))
        assert again == measurement
        report = judge(again, factor=2.0)
        assert report == judge(measurement, factor=2.0)
        assert ParityReport.from_json(json.loads(json.dumps(report.to_json(), allow_nan=False))) == report


def test_data_of_older_versions_lacks_fields():
    data = measure_reference(net(), Samples((image(),))).compare(net()).to_json()
    del data["precision"], data["rows"]
    for output in data["outputs"]:
        for name in ("slice", "slice_error", "slice_noise", "calls"):
            del output[name]
    report = judge(Measurement.from_json(data))
    assert (report.precision, report.rows, report.outputs[0].slice, report.outputs[0].calls) == ("", None, "", ())
    older = report.to_json()
    for output in older["outputs"]:
        for name in ("slice", "slice_ratio", "calls", "mean_error", "p999_error", "cosine", "agreement", "undecided"):
            del output[name]
    assert ParityReport.from_json(older) == report


def test_golden_entries_judge_without_the_original():
    model = net()
    reference = measure_reference(model, Samples((image(),)))
    entries = golden_entries(reference)
    assert [entry.batch_size for entry in entries] == [2, 1, 3]
    assert entries[0].outputs["output"].dtype is torch.float32
    noises = {
        name: OutputNoise.from_json(json.loads(json.dumps(noise.to_json()))) for name, noise in reference.noises.items()
    }

    def answers(candidate):
        with torch.no_grad():
            return [(entry, (candidate(*entry.call.args),)) for entry in entries]

    assert compare_golden(noises, answers(folded(model))).ok
    assert not compare_golden(noises, answers(off_by(folded(model), "conv.weight"))).ok
    assert not compare_golden(noises, [(entries[0], (torch.zeros(2, 4),))]).ok
    assert not compare_golden(noises, [(entries[0], ())]).ok


# ------------------------------------------------------------------------------------- options


def test_options_that_make_no_sense_are_refused():
    numbers = ({"draws": 1.5}, {"batch_sizes": [1.5]}, {"batch_sizes": 2}, {"batch_sizes": ["2"]}, {"seed": 0.5})
    for options in ({"mode": "serve"}, {"draws": 0}, {"batch_sizes": ()}, *numbers):
        with pytest.raises(UsageError):
            check_parity(torch.sin, torch.sin, (image(),), **options)
    with pytest.raises(UsageError, match="tuple"):
        check_parity(torch.sin, torch.sin, [image()])


def test_a_module_with_a_compiled_part_is_measured_eagerly():
    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.compile(nn.Linear(4, 4), backend="eager")

        def forward(self, x):
            return self.inner(x).sin()

    model = Compiled()
    enliven(model)
    report = check_parity(model, copy.deepcopy(model), (torch.randn(2, 4),))
    assert report.ok
    assert report.reference == "float64"


def test_a_script_module_is_measured_in_its_own_dtype():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, but users' modules contain it
        script = torch.jit.freeze(torch.jit.trace(net().eval(), image()))
    report = check_parity(script, net().eval(), (image(),))
    assert report.ok
    assert report.reference == "own dtype"
    assert check_parity(net(), script, (image(),)).ok
    assert not check_parity(script, off_by(net(), "conv.weight"), (image(),)).ok


def test_numbers_that_cancel_are_rounding_and_not_another_computation():
    def cancels(x):
        return (x * 0.1 + 1e4) - 1e4

    report = check_parity(cancels, lambda x: ((x * 0.1).double() + 1e4 - 1e4).float(), (image(),))
    assert report.reference == "float64"
    assert report.ok
    assert verdict(cancels, lambda x: cancels(x) * 1.2, image()) == "failed"


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_inputs_are_run_at_every_batch_size(layout):
    model = enliven(nn.Linear(6, 4))
    rows = torch.randn(4, 6).relu().to_sparse(layout=layout)

    def by_sparse(x):
        return torch.sparse.mm(x, model.weight.t())

    report = check_parity(by_sparse, lambda x: x.to_dense() @ model.weight.t(), (rows,))
    assert report.ok, report.reason
    assert sorted(report.batch_sizes) == [1, 2, 3, 4, 5, 8]
    assert not check_parity(by_sparse, lambda x: x.to_dense() @ model.weight.t() * 1.001, (rows,)).ok


class GivesLaidOut(nn.Module):
    """Returns a tensor in another layout, and has a buffer in the same layout."""

    def __init__(self, layout, factor=1.0):
        super().__init__()
        self.layout, self.factor, self.linear = layout, factor, nn.Linear(4, 4)
        self.register_buffer("held", laid_out(layout, torch.eye(4)))

    def forward(self, x):
        y = self.linear(torch.cat([x, x])) * self.factor
        return laid_out(self.layout, y)


@pytest.mark.parametrize("layout", [*SPARSE, *NESTED])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_outputs_in_other_layouts_are_compared(layout, mode):
    model, wrong = enliven(GivesLaidOut(layout)), enliven(GivesLaidOut(layout, 1.001))
    report = check_parity(model, copy.copy(model), (torch.randn(4, 4),), mode=mode)
    assert report.ok, report.reason
    assert not check_parity(model, wrong, (torch.randn(4, 4),), mode=mode).ok


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda: nn.LazyLinear(3), "run the model once"), (lambda: nn.Linear(6, 3, device="meta"), "meta")],
)
def test_a_module_without_weights_is_refused_and_left_as_it_was(side, make, words):
    modules = [enliven(nn.Linear(6, 3)), enliven(nn.Linear(6, 3))]
    modules[side] = make()
    kind = type(modules[side])
    with pytest.raises(LoadError, match=words):
        check_parity(*modules, (torch.randn(2, 6),))
    assert type(modules[side]) is kind


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@pytest.mark.parametrize(
    ("kept", "other"),
    [(1 + 2j, 1 - 2j), (b"a", b"b"), (Color.RED, Color.BLUE), (torch.int8, torch.int16), ({"a", 1}, {"b", 1})],
)
def test_values_other_than_tensors_are_compared(kept, other):
    x = torch.randn(4, 3)
    assert check_parity(lambda x: {"y": x.sin(), "kept": kept}, lambda x: {"y": x.sin(), "kept": kept}, (x,)).ok
    assert not check_parity(lambda x: {"y": x.sin(), "kept": kept}, lambda x: {"y": x.sin(), "kept": other}, (x,)).ok


@pytest.mark.skipif(torch.cuda.is_available(), reason="There is a GPU here.")
def test_a_device_that_is_missing_is_refused_as_by_optimize():
    model = nn.Linear(4, 3)
    with pytest.raises(DeviceError, match="A GPU is required, but torch finds none here"):
        check_parity(model, model, (torch.randn(2, 4),), device="cuda")
    with pytest.raises(UsageError, match="There is no device 'tpu'"):
        check_parity(model, model, (torch.randn(2, 4),), device="tpu")
