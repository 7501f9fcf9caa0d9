import copy
import enum
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
from tiny_models import enliven
from torch import nn
from torch.utils.checkpoint import checkpoint

from optimize_export.errors import DeviceError, LoadError, UsageError
from optimizer import optimize
from optimizer.model.inputs import Samples
from optimizer.parity import (
    Measurement,
    OutputNoise,
    ParityReport,
    Reference,
    RegionReference,
    check_change,
    check_parity,
    compare_golden,
    golden_entries,
    independent_rows,
    judge,
    measure_reference,
)
from optimizer.parity.differences import Pool, Slices, pieces_of, slice_noise
from optimizer.parity.noise import RoundingNoise
from optimizer.parity.verdict import SLICE_FACTOR
from passes import Precision


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(F.relu(self.bn(self.conv(x))).mean((2, 3)))


def net():
    torch.manual_seed(0)
    return enliven(ConvNet())


def folded(model):
    result = copy.deepcopy(model).eval()
    result.conv = nn.utils.fusion.fuse_conv_bn_eval(result.conv, result.bn)
    result.bn = nn.Identity()
    return result


class Scaled(nn.Module):
    """Columns of very different magnitudes: the first is scaled by a million, the last by 0.1."""

    def __init__(self, activation=None, bias=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 8)
        self.stem.bias.data += bias
        self.activation = activation or nn.Identity()
        self.head = nn.Linear(8, 8)
        self.sizes = 10.0 ** (6 - torch.arange(8.0))
        for parameter in self.head.parameters():
            parameter.data *= self.sizes.view(-1, *(1,) * (parameter.dim() - 1))

    def forward(self, x):
        return self.head(self.activation(self.stem(x)))


class ScaledConv(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        enliven(self)
        for parameter in self.bn.parameters():
            parameter.data *= 10.0 ** (6 - torch.arange(8.0))

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


def off_by(model, path, relative=0.01):
    """A copy of the model with one wrong weight: the one of median magnitude in a tensor."""
    result = copy.deepcopy(model)
    flat = result.get_parameter(path).data.view(-1)
    flat[flat.abs().argsort()[len(flat) // 2]] *= 1 + relative
    return result


def check_region(old, new, inputs):
    return RegionReference.measure(old, inputs).compare(new)


def image(batch=2):
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def verdict(reference, candidate, *inputs, **options):
    return check_parity(reference, candidate, inputs, **options).verdict


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


def test_nothing_deterministic_is_vacuous():
    count = iter(range(10**6))
    report = check_parity(lambda x: x + next(count), lambda x: x, (image(),))
    assert report.verdict == "vacuous"
    assert "deterministic" in report.reason


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


def test_state_is_restored_after_an_error_too():
    model = net().train()

    def fails(x):
        model.bn.running_mean.add_(1)
        raise ValueError("late")

    broken = net()
    broken.forward = fails
    mean = broken.bn.running_mean.clone()
    with pytest.raises(LoadError):
        check_parity(broken, broken, (image(),))
    assert torch.equal(broken.bn.running_mean, mean)
    assert broken.training


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


def test_without_float64_the_original_is_the_reference_for_a_reason():
    def single_only(x):
        if x.dtype is not torch.float32 or x.double().float().numpy().dtype != np.float32:
            raise TypeError("float32 only")
        return x.sin()

    report = check_parity(single_only, lambda x: x.sin(), (image(),))
    assert report.ok
    assert report.reference == "own dtype"
    assert any("float32 only" in note for note in report.notes)
    assert verdict(single_only, lambda x: x.sin() * 1.0001, image()) == "failed"


def test_a_float64_run_that_takes_another_way_is_not_believed():
    def by_numpy(x):
        # `np.float32` isn't raised to float64, so the float64 run takes the other branch.
        return x * (2 if x.numpy().dtype == np.float32 else 3)

    report = check_parity(by_numpy, lambda x: x * 2, (image(),))
    assert report.reference == "own dtype"
    assert report.ok
    assert verdict(by_numpy, lambda x: x * 3, image()) == "failed"


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


# ------------------------------------------------------------------------------------- training


def trained(model, candidate, **options):
    return check_parity(model, candidate, (image(4),), mode="training", **options)


def test_training_compares_outputs_gradients_and_buffers():
    model = net().train()
    report = trained(model, copy.deepcopy(model))
    assert report.ok, report
    assert {output.kind for output in report.outputs} == {"output", "gradient", "buffer"}
    names = {output.name for output in report.outputs}
    assert {"gradient of conv.weight", "buffer bn.running_mean", "buffer bn.num_batches_tracked"} <= names
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_wrong_gradient_or_buffer_fails():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 0.999

    model = net().train()
    wrong = copy.deepcopy(model)
    wrong.forward = lambda x: wrong.head(F.relu(wrong.bn(Scaled.apply(wrong.conv(x)))).mean((2, 3)))
    report = trained(model, wrong)
    assert report.verdict == "failed"
    assert "gradient of conv.weight" in report.reason
    slow = copy.deepcopy(model)
    slow.bn.momentum = 0.11
    assert "buffer bn.running" in trained(model, slow).reason


def test_a_missing_parameter_is_named_and_none_equals_zero():
    class Unused(nn.Module):
        def __init__(self, touch):
            super().__init__()
            self.used, self.idle, self.touch = nn.Linear(8, 3), nn.Linear(8, 3), touch

        def forward(self, x):
            return self.used(x.mean((1, 2))) + (self.idle(x.mean((1, 2))) * 0 if self.touch else 0)

    model = enliven(Unused(False))
    touched = enliven(Unused(True))
    touched.load_state_dict(model.state_dict())
    assert trained(model, touched).ok
    lacking = copy.deepcopy(model)
    del lacking.idle
    report = trained(model, lacking)
    assert report.ok
    assert any("gradient of idle.weight" in note for note in report.notes)


class Pooled(nn.Module):
    """The pooled values of a channel hardly differ between rows, and the second BatchNorm divides by their spread."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.linear, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.head(self.linear(self.norm(self.conv(x)).mean((2, 3))))


def without_bias(model):
    """The same function in training, because subtracting the batch mean cancels the bias."""
    result = copy.deepcopy(model)
    with torch.no_grad():
        result.linear.bias.zero_()
        result.head.running_mean.zero_()
        model.head.running_mean.zero_()
        model.head.momentum = result.head.momentum = 0.0
    return result


def pooled(seed):
    torch.manual_seed(seed)
    model = enliven(Pooled())
    rows, size = ((2, 5), (2, 10), (3, 5))[seed % 3]
    return model.train(), (torch.randn(rows, 4, size, size, generator=torch.Generator().manual_seed(seed)),)


def judged_by_few_samples(model, candidate, inputs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reference, "refine_noise", lambda self: None)
        return check_parity(model, candidate, inputs, mode="training")


@pytest.mark.zoo
def test_rounding_that_few_samples_dont_show_is_no_failure(monkeypatch):
    # If gradients were judged in float64, samples would not matter.
    monkeypatch.setattr("optimizer.parity.reference.judge_gradients_in_float64", lambda *args: None)
    for seed in (13, 93, 97, *range(100, 400)):
        model, inputs = pooled(seed)
        candidate = without_bias(model)
        if not judged_by_few_samples(model, candidate, inputs).ok:
            report = check_parity(model, candidate, inputs, mode="training")
            assert report.ok, (seed, report)
            return
    raise AssertionError("few samples were enough everywhere: nothing was tried")


class PaddedAttention(nn.Module):
    """Attention in which the rows of padded positions are fully masked: all their scores are equal."""

    def __init__(self, hidden):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.hidden = hidden

    def forward(self, x, mask):
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        if self.hidden is None:
            scores = scores + mask
        else:
            scores = scores.masked_fill(~(mask[:, :, None] & mask[:, None]), self.hidden)
        return scores.softmax(-1) @ self.value(x)


class Positions(nn.Module):
    """Adds waves of counted positions, which rounding must leave whole."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        places = torch.ones_like(x[0, :, 0]).cumsum(0)
        pairs = torch.div(torch.arange(8, dtype=torch.float32), 2, rounding_mode="floor")
        return self.linear(x + torch.sin(places[:, None] / 100 ** (pairs / 4)))


LENGTHS = torch.arange(6) < torch.tensor([[6], [4]])
LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (lambda: PaddedAttention(LOWEST), (LENGTHS,)),
        (lambda: PaddedAttention(-1e9), (LENGTHS,)),
        (lambda: PaddedAttention(None), (torch.zeros(2, 6, 6).masked_fill(~LENGTHS[:, None], LOWEST),)),
        (Positions, ()),
    ],
    ids=["masked by the lowest", "masked by -1e9", "masked by an input", "positions"],
)
def test_more_samples_excuse_no_error_that_rounding_cannot_explain(make, more):
    torch.manual_seed(0)
    model = enliven(make()).eval()
    reference = measure_reference(model, Samples((torch.randn(2, 6, 8), *more)))
    before = reference.noises["output"].noise
    report = judge(reference.compare(lambda *args: model(*args) + 20 * before))
    assert report.verdict == "failed"
    assert before < 1e-4
    assert reference.noises["output"].noise < 4 * before, "more samples were taken, and say the same"


def test_more_samples_for_one_candidate_excuse_no_larger_error_of_another(monkeypatch):
    torch.manual_seed(0)
    model = enliven(nn.Linear(4, 4)).eval()
    reference = measure_reference(model, Samples((torch.randn(2, 4),)))
    (name,) = reference.noises
    before = reference.noises[name].noise
    tail = Pool()
    tail.add(torch.full((8,), 100 * before, dtype=torch.float64), of=torch.ones(8))
    monkeypatch.setattr(RoundingNoise, "more_samples", lambda *args: {name: tail})

    def verdict(times):
        def candidate(x):
            return model(x) + times * before

        return judge(reference.compare(candidate)).verdict

    assert verdict(300) == "failed"
    assert reference.noises[name].noise == before, "so large an error is none of rounding, and nothing was sampled"
    assert verdict(20) == "ok"
    assert reference.noises[name].noise > before
    assert verdict(300) == "failed"
    assert verdict(20) == "ok"


class OwnDtype(nn.Module):
    def forward(self, x):
        assert x.dtype is torch.float32
        return x


class RoundingOften(nn.Module):
    """Rounding at its inner steps changes the output several times as much as an ulp of its inputs and weights does."""

    def __init__(self):
        super().__init__()
        self.turns = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(12))
        for turn in self.turns:
            nn.init.orthogonal_(turn.weight)
        self.shift = nn.Parameter(torch.zeros(32))
        self.coarse = 0.0

    def forward(self, x):
        for turn in self.turns:
            x = turn(x)
            for _ in range(8):
                x = x * 0.7 / 0.7
        if self.coarse:
            x = x + self.coarse - self.coarse
        return x + self.shift


@pytest.mark.slow
def test_a_wrong_weight_is_no_internal_rounding(monkeypatch):
    """Internal rounding doesn't excuse an error that is as large in float64."""
    torch.manual_seed(0)
    model = RoundingOften().eval()
    inputs = Samples((torch.randn(4, 32),), {}, seed=0)
    noise = measure_reference(model, inputs).noises["output"].noise_rms
    shifted, coarse = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        shifted.shift += 8 * noise
    coarse.coarse = 128.0

    def judged(candidate):
        return judge(measure_reference(model, inputs).compare(candidate))

    with monkeypatch.context() as patch:
        patch.setattr("optimizer.parity.reference.judge_again_in_float64", lambda *_: None)
        assert judged(shifted).ok, "it would prove nothing"
    report = judged(shifted)
    assert report.verdict == "failed"
    assert "(4 times is allowed)" in report.reason
    assert any(
        "float64 has the same error, so rounding inside the model can't explain it" in note for note in report.notes
    )
    assert not check_region(model, shifted, [inputs.given.args]).ok
    # A candidate that only rounds differently has as large an error, and passes.
    with monkeypatch.context() as patch:
        patch.setattr(Reference, "refine_noise", lambda self: None)
        assert not judged(coarse).ok
    assert judged(coarse).ok


@pytest.mark.slow
def test_more_samples_show_that_a_gradient_is_only_rounding():
    """If the model can't run in float64, only the noise shows that a gradient should be zero."""
    found = 0
    for seed in (22, 44, 48, 59, *range(100, 400)):
        torch.manual_seed(seed)
        layers = OwnDtype(), nn.ConvTranspose3d(4, 4, 3, stride=2), nn.BatchNorm3d(4)
        model = enliven(nn.Sequential(*layers)).train()
        inputs = (torch.randn(6, 4, 5, 5, 5, generator=torch.Generator().manual_seed(seed)),)
        candidate = optimize(model, ["fold-conv-bias"], mode="training", example_inputs=inputs)
        if not judged_by_few_samples(model, candidate, inputs).ok:
            found += 1
            report = check_parity(model, candidate, inputs, mode="training")
            assert report.ok, (seed, report)
            assert report.reference == "own dtype"
        if found == 2:
            return
    raise AssertionError("few samples were enough everywhere: nothing was tried")


@pytest.mark.parametrize("off", [2e-6, 2e-5])
def test_an_error_near_the_noise_stays_a_failure(off):
    model = net().train()
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.head.weight.mul_(1 + off)
    measured = measure_reference(model, Samples((image(4),)), mode="training")
    before = measured.noises["output"].noise
    report = judge(measured.compare(wrong))
    assert report.verdict == "failed"
    assert report.ratio < 256
    assert before < measured.noises["output"].noise < 3 * before


def test_a_second_candidate_is_judged_by_the_same_noise():
    model, inputs = pooled(93)
    measured = measure_reference(model, Samples(inputs), mode="training")
    reports = [judge(measured.compare(without_bias(model))) for _ in range(2)]
    assert reports[0] == reports[1]


def test_gradients_of_inputs_are_compared():
    x = torch.randn(3, 4, requires_grad=True)
    report = check_parity(torch.sin, lambda x: torch.sin(x.detach()) + 0 * x, (x,), mode="training")
    assert report.verdict == "failed"
    assert "gradient of" in report.reason


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        (lambda: (nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)), (4, 8)),
        # The convolution returns channels_last; in float64 another kernel may return another layout.
        (lambda: (nn.ConvTranspose3d(4, 4, 3), nn.Dropout(0.5), nn.BatchNorm3d(4)), (4, 4, 5, 5, 5)),
    ],
    ids=["linear", "feature maps"],
)
def test_dropout_in_training_draws_the_same_mask_in_float64(layers, shape):
    model = enliven(nn.Sequential(*layers())).train()
    if len(shape) == 5:
        model.to(memory_format=torch.channels_last_3d)
    report = check_parity(model, copy.deepcopy(model), (torch.randn(shape),), mode="training")
    assert report.ok
    assert report.reference == "float64"
    without = copy.deepcopy(model)
    without[1] = nn.Identity()
    assert not check_parity(model, without, (torch.randn(shape),), mode="training").ok


# ------------------------------------------------------------------------------------- reference, golden, JSON


def test_one_reference_serves_many_candidates():
    calls = []
    model = net()

    def counted(x):
        calls.append(len(x))
        return model(x)

    model.eval()
    reference = measure_reference(counted, Samples((image(),)), batch_sizes=(1, 2), draws=2)
    ran = len(calls)
    assert judge(reference.compare(folded(model))).ok
    assert not judge(reference.compare(off_by(model, "conv.weight"))).ok
    assert len(calls) == ran


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
    entries = golden_entries(reference, 3)
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


# ------------------------------------------------------------------------------------- regions


def test_a_region_is_checked_at_its_own_outputs():
    model = net().eval()
    old = nn.Sequential(model.conv, model.bn)
    new = nn.utils.fusion.fuse_conv_bn_eval(model.conv, model.bn)
    inputs = [(image(2),), (image(3),)]
    right = check_region(old, new, inputs)
    assert right.ok
    assert 0 < right.error <= 4 * right.noise
    wrong = copy.deepcopy(new)
    flat = wrong.weight.data.view(-1)
    flat[flat.abs().argsort()[len(flat) // 2]] *= 1.01
    report = check_region(old, wrong, inputs)
    assert not report.ok
    assert report.ratio > 4
    assert "recorded input" in report.reason


def test_a_region_may_answer_zero_but_not_raise_or_change_shape():
    assert check_region(lambda x: x * 0, lambda x: x * 0, [(image(),)]).ok
    assert not check_region(lambda x: x * 0, lambda x: x * 0 + 1, [(image(),)]).ok
    assert not check_region(lambda x: x, lambda x: x[0], [(image(),)]).ok
    assert "ZeroDivisionError" in check_region(lambda x: x, lambda x: 1 / 0, [(image(),)]).reason
    assert not check_region(lambda x: 1 / 0, lambda x: x, [(image(),)]).ok
    with pytest.raises(UsageError):
        check_region(lambda x: x, lambda x: x, [])


def test_a_region_in_half_precision_is_judged_by_its_own_error():
    """The effect of one ulp of an input isn't the region's own error: if numbers cancel, it is far larger."""
    weight = torch.tensor([1.0, 2.0, -3.0], dtype=torch.bfloat16)
    rounded = (weight.double() * 1.1).bfloat16()
    x = (torch.randn(64, 1, generator=torch.Generator().manual_seed(0)) + 1000).expand(64, 3).bfloat16()
    x = x + torch.randn(64, 3, generator=torch.Generator().manual_seed(1)).bfloat16() * 8

    def old(x):
        return (x @ weight) * 1.1

    def new(x):
        return x @ rounded

    reference = RegionReference.measure(old, [(x,)])
    assert reference.in_float64
    assert reference.compare(new).ok
    wrong = reference.compare(new, by_own_error=True)
    assert not wrong.ok
    assert wrong.ratio > 8
    assert reference.compare(old, by_own_error=True).ok
    assert reference.compare(new, by_own_error=True, factor=1000).ok


def test_an_exact_region_in_half_precision_may_differ_in_the_last_place():
    x = torch.linspace(1, 2, 64, dtype=torch.bfloat16)
    reference = RegionReference.measure(lambda x: x * 2, [(x,)])
    assert reference.compare(lambda x: x * 2 + 2**-5, by_own_error=True).ok
    assert not reference.compare(lambda x: x * 2 + 2**-3, by_own_error=True).ok


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


def test_a_checkpointed_part_is_run_again_in_float64():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            return self.head(checkpoint(self.part, x, use_reentrant=False))

    model = enliven(Checkpointed()).train()
    plain = copy.deepcopy(model)
    plain.forward = lambda x: plain.head(plain.part(x))
    report = check_parity(model, plain, (torch.randn(2, 8),), mode="training")
    assert report.ok, report
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


@pytest.mark.parametrize(
    ("activation", "shape", "off", "where"),
    [
        (nn.GELU(), (2, 6), ("weight", 6, 1.001), "index 6 of dim 1"),
        (nn.GELU(), (2, 6), ("weight", 6, 1.1), "index 6 of dim 1"),
        (None, (2, 5, 6), ("bias", 7, 1.5), "index 7 of dim 2"),
    ],
)
def test_an_error_in_a_column_a_million_times_smaller_is_found(activation, shape, off, where):
    model, x = Scaled(activation), torch.randn(shape)
    wrong, (name, column, factor) = copy.deepcopy(model), off
    wrong.head.get_parameter(name).data[column] *= factor
    report = check_parity(model, wrong, (x,))
    (output,) = report.outputs
    assert output.max_error < output.tolerance
    assert (report.verdict, output.slice) == ("failed", where)
    assert output.slice_ratio > 256
    assert where in report.reason
    assert check_parity(model, wrong, (x,), atol=10.0).ok, "the user's tolerance replaces the noise of slices too"


def test_a_column_gets_more_samples_before_it_is_wrong(monkeypatch):
    """As in a column of PP-OCR's feature maps, whose first sample happens to have almost no rounding error."""
    model, x = Scaled(nn.GELU()), torch.randn(2, 6)
    other = copy.deepcopy(model)
    other.head.weight.data[6] *= 1.001
    reference = measure_reference(model, Samples((x,)))
    (name,) = reference.noises
    report = judge(reference.compare(other))
    assert (report.verdict, report.outputs[0].slice) == ("failed", "index 6 of dim 1")

    def more(*_):
        pool = Pool(slices=Slices())
        own = reference.original.calls[0].own.values[name]
        pool.add(own.double().abs() * 1e-3, of=own)
        return {name: pool}

    reference = measure_reference(model, Samples((x,)))
    before = dict(reference.slices[name].noise)
    monkeypatch.setattr(RoundingNoise, "more_samples", more)
    assert judge(reference.compare(other)).ok
    assert bool((reference.slices[name].noise[1] >= before[1]).all())


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (1, 40), (5, 1, 3), (2, 7, 3), (3, 4, 2, 5)], ids=str)
@pytest.mark.parametrize("spoilt", [False, True], ids=["finite", "with NaN"])
def test_pieces_pool_to_the_same_as_a_whole(shape, spoilt, monkeypatch):
    def pooled():
        pool = Pool(slices=Slices())
        for a, b in calls:
            pool.add_distance(a, b)
        return pool

    generator = torch.Generator().manual_seed(0)
    calls = [[torch.randn(shape, generator=generator) * 300 for _ in "ab"] for _ in range(2)]
    if spoilt and shape:
        calls[0][0].view(-1)[::3] = math.nan
    whole = pooled()
    for size in (1, 2, 3, 6, 10):
        monkeypatch.setattr("optimizer.parity.differences.PIECE", size)
        covered = torch.zeros(shape)
        for at in pieces_of(covered):
            covered[at] += 1
            assert covered[at].numel() <= max(size, math.prod(shape[2:]))
        assert bool((covered == 1).all())
        pieces = pooled()
        assert (pieces.largest, pieces.count) == (whole.largest, whole.count)
        assert pieces.squares == pytest.approx(whole.squares)
        for found, wanted in (
            (pieces.slices.largest, whole.slices.largest),
            (pieces.slices.samples, whole.slices.samples),
        ):
            assert found.keys() == wanted.keys()
            for key, values in wanted.items():
                torch.testing.assert_close(found[key], values, rtol=0, atol=0, equal_nan=True)


def test_an_error_in_a_channel_a_million_times_smaller_is_found():
    model, x = ScaledConv().eval(), torch.randn(2, 3, 7, 7)
    right, wrong = folded(model), folded(model)
    wrong.conv.weight.data[6] *= 1.01
    assert check_parity(model, right, (x,)).ok
    report = check_parity(model, wrong, (x,))
    assert report.outputs[0].max_error < report.outputs[0].tolerance
    assert report.verdict == "failed"
    assert report.outputs[0].slice == "index 6 of dim 1"
    region = check_region(model, wrong, [(x,)])
    assert not region.ok
    assert "index 6 of dim 1" in region.reason
    assert check_region(model, right, [(x,)]).ok


class Masked(nn.Module):
    """Every column of its scores is masked in some row."""

    def __init__(self, fill):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.fill = nn.Linear(6, 32), fill

    def forward(self, x, mask):
        scores = self.head(x)
        return scores.masked_fill(mask, torch.finfo(scores.dtype).min if self.fill is None else self.fill)


@pytest.mark.parametrize("fill", [-1e9, -1e30, None])
def test_an_error_next_to_a_mask_of_huge_numbers_is_found(fill):
    model, inputs = Masked(fill), (torch.randn(16, 6), torch.rand(16, 32) > 0.5)
    assert inputs[1].any(0).all()
    right, wrong = copy.deepcopy(model), copy.deepcopy(model)
    right.head.forward = lambda x: (x.unsqueeze(-2) * model.head.weight).sum(-1) + model.head.bias
    wrong.head.weight.data *= 1.001
    assert check_parity(model, right, inputs).ok
    report = check_parity(model, wrong, inputs)
    assert report.reference == "float64"
    assert not report.ok
    assert report.outputs[0].slice == "a number below 256"
    assert "at a number below 256" in report.reason


def test_bands_of_magnitude_without_numbers_in_every_measurement_are_not_judged():
    sizes = torch.tensor([1.0, 300.0, 1e9]).repeat_interleave(20)
    size, once, errors = Slices(), Slices(), Slices()
    size.add(sizes, sizes)
    once.add(sizes[:40] * 1e-9, sizes[:40])
    errors.add(sizes.square(), sizes)
    worst = slice_noise(size, [once], torch.float32, least_samples=16).worst(errors)
    assert worst.where == "a number from 256 to 65536"
    assert worst.error == 90000


class ByScale(nn.Module):
    """Activations as accurate as a kernel must be: to an ulp of the result's scale, not of each number."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        gate = 0.5 * (1 + torch.tanh(x / 2))
        return {
            "sigmoid": lambda: gate,
            "silu": lambda: x * gate,
            "softplus": lambda: torch.log(1 + torch.exp(x)),
            "elu": lambda: torch.where(x > 0, x, torch.exp(x) - 1),
            "gelu": lambda: x - x * 0.5 * (1 - torch.erf(x * 0.5**0.5)),
            "softmax": lambda: (x.softmax(-1) + 1) - 1,
        }[self.name]()


@pytest.mark.parametrize("head", ["head", "none"])
@pytest.mark.parametrize("bias", ["low", "spread"])
@pytest.mark.parametrize(
    "activation",
    [nn.Sigmoid(), nn.SiLU(), nn.SiLU(inplace=True), nn.Softplus(), nn.ELU(), nn.GELU(), nn.Softmax(-1)],
    ids=lambda activation: f"{type(activation).__name__}{'-inplace' if getattr(activation, 'inplace', False) else ''}",
)
def test_kernels_that_keep_to_the_scale_of_their_result_are_right(activation, bias, head):
    model = Scaled(activation, torch.tensor(-25.0) if bias == "low" else -torch.linspace(0, 60, 8))
    candidate = copy.deepcopy(model)
    candidate.activation = ByScale(type(activation).__name__.lower())
    if head == "none":
        model.head = candidate.head = nn.Identity()
    x = torch.randn(2, 6)
    report = check_parity(model, candidate, (x,))
    (output,) = report.outputs
    assert output.slice_ratio < SLICE_FACTOR / 10


def test_sums_in_another_order_are_right():
    class Reordered(Scaled):
        def forward(self, x):
            order = torch.arange(5, -1, -1)
            x = F.linear(x[:, order], self.stem.weight[:, order], self.stem.bias)
            first, second = x.chunk(2, 1), self.head.weight.chunk(2, 1)
            return self.head.bias + first[1] @ second[1].T + first[0] @ second[0].T

    report = check_parity(Scaled(), Reordered(), (torch.randn(2, 6),))
    assert report.ok
    assert 0 < report.outputs[0].slice_ratio < 10


def test_columns_that_cancel_are_judged_by_the_cancelled_numbers():
    class Cancelling(nn.Module):
        def __init__(self, plain):
            super().__init__()
            self.plain = plain

        def forward(self, x):
            big = 10.0 ** torch.arange(8)
            return (x if self.plain else (x + big) - big) * 10.0 ** -torch.arange(8)

    report = check_parity(Cancelling(False), Cancelling(True), (torch.randn(2, 8),))
    assert report.ok
    assert report.outputs[0].slice_ratio < 10


def test_slices_of_few_numbers_or_none_but_zeros_are_not_judged():
    model, x = Scaled(), torch.randn(2, 6)
    wrong = copy.deepcopy(model)
    wrong.head.weight.data[7] *= 1.5
    few = check_parity(model, wrong, (x,), batch_sizes=[2], draws=2)
    assert few.ok
    assert not few.outputs[0].slice.startswith("index")
    for parameter in model.head.parameters():
        parameter.data[7] = 0
    wrong = copy.deepcopy(model)
    wrong.head.bias.data[7] = 1e-3
    zeros = check_parity(model, wrong, (x,))
    assert zeros.ok
    assert zeros.outputs[0].slice != "index 7 of dim 1"


def test_slices_are_not_judged_in_torchscript():
    model, x = Scaled(nn.Sigmoid(), -torch.linspace(0, 60, 8)), torch.randn(2, 6)
    model.head = nn.Identity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, but users' modules contain it
        model.activation = torch.jit.script(nn.Sigmoid())
    candidate = Scaled(ByScale("sigmoid"), -torch.linspace(0, 60, 8))
    candidate.head = nn.Identity()
    report = check_parity(model, candidate, (x,))
    assert report.outputs[0].slice == ""


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


# Kinks ----------------------------------------------------------------------------------------------------------------


class Kinked(nn.Module):
    """Some inputs of its ReLU are next to the kink; the rounding of `lossy` loses on which side they are."""

    def __init__(self, *, lossy=False, slope=1.0, coarse=False):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))
        self.register_buffer("out", torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
        self.lossy, self.slope, self.coarse = lossy, slope, coarse

    def forward(self, x):
        x = x + (self.slope * self.bias - (self.slope - 1) * self.bias.detach())
        if self.coarse and x.requires_grad:
            x.register_hook(lambda gradient: gradient.bfloat16().float())
        return F.relu((x + 1) - 1 if self.lossy else x) @ self.out


def beside_kinks(count):
    """Inputs with `count` elements so close to zero that one plus such an element is one."""

    def inputs(batch_size, generator):
        x = torch.randn(batch_size, 64, generator=generator)
        x.view(-1)[:count] = 1e-9
        return (x,)

    return inputs


class Off(Kinked):
    def forward(self, x):
        return super().forward(x) * 1.001


def at_kinks(candidate, count=1):
    return check_parity(Kinked(), candidate, beside_kinks(count), mode="training", batch_sizes=(2000,))


def test_a_number_on_the_other_side_of_a_kink_is_no_error():
    report = at_kinks(Kinked(lossy=True))
    assert report.ok, report.reason
    assert any("rounding at a kink" in note and note.endswith("gradient of bias.") for note in report.notes)
    assert not any("kink" in note for note in at_kinks(Kinked(lossy=True), 0).notes)


@pytest.mark.parametrize(
    ("candidate", "count", "words"),
    [
        (Kinked(lossy=True, slope=1.001), 1, "gradient of bias"),  # wrong in float64 too
        (Kinked(lossy=True, coarse=True), 1, "gradient of bias"),  # a lower precision
        (Kinked(lossy=True), 20_000, "gradient of bias"),  # more than kinks explain
        (Off(lossy=True), 1, "output"),
    ],
)
def test_kinks_excuse_no_other_error(candidate, count, words):
    report = at_kinks(candidate, count)
    assert report.verdict == "failed"
    assert words in report.reason


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


def test_a_change_runs_each_region_once_where_the_least_noise_is_enough():
    torch.manual_seed(0)
    weight, x, runs = torch.randn(4, 8), torch.randn(16, 8), []

    def region(name, weight):
        def run(x):
            runs.append(name)
            return nn.functional.linear(x, weight)

        return run

    ((algebra, rounding),) = check_change(region("old", weight), region("new", weight * (1 + 2**-23)), (x,))
    assert algebra.ok
    assert rounding is None
    assert algebra.reference == "own dtype"
    assert runs == ["old", "new"]
    ((algebra, _),) = check_change(region("old", weight), region("new", weight * 1.001), (x,))
    assert not algebra.ok
    assert algebra.reference == "float64"


def test_a_small_channel_of_a_region_is_judged_by_itself():
    torch.manual_seed(0)
    weight, x = torch.randn(4, 8), torch.randn(16, 8)
    weight[0] *= 1e6
    wrong = weight.clone()
    wrong[2] = 0
    ((algebra, _),) = check_change(
        lambda x: nn.functional.linear(x, weight), lambda x: nn.functional.linear(x, wrong), (x,)
    )
    assert not algebra.ok
    assert "index 2 of dim 1" in algebra.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="There is a GPU here.")
def test_a_device_that_is_missing_is_refused_as_by_optimize():
    model = nn.Linear(4, 3)
    with pytest.raises(DeviceError, match="A GPU is required, but torch finds none here"):
        check_parity(model, model, (torch.randn(2, 4),), device="cuda")
    with pytest.raises(UsageError, match="There is no device 'tpu'"):
        check_parity(model, model, (torch.randn(2, 4),), device="tpu")
