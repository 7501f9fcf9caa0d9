import copy
import math
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from laid_out import LAYOUTS, laid_out, numbers_in
from tiny_models import enliven
from torch import nn
from torch._higher_order_ops import while_loop

from optimizer.model import eager_only
from optimizer.parity.float64 import Float64Mode
from optimizer.parity.rounding import PerturbedMode, RoundedMode


def double_copy(model):
    return copy.deepcopy(model).double()


class Conversions(nn.Module):
    """Contains casts and new tensors, which `.double()` on a copy doesn't convert."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(0.1))

    def forward(self, x):
        x = self.linear(x).float() * self.scale
        x = x.to(torch.float16).to(self.linear.weight.dtype) + torch.zeros(4, dtype=torch.float32)
        x = x + torch.arange(4, dtype=torch.float32) / 3
        mask = torch.full((4,), torch.finfo(x.dtype).min)
        mask = torch.triu(mask.expand(4, 4), 1)[-1]
        return torch.softmax((x + mask).type(torch.float32), -1) * torch.tensor(0.5)


def test_conversions_factories_and_dtype_questions_are_raised():
    model = enliven(Conversions())
    x = torch.randn(3, 4)
    with Float64Mode() as mode:
        truth = model(x.double())
    weight, bias = model.linear.weight.double(), model.linear.bias.double()
    expected = (
        torch.softmax((x.double() @ weight.T + bias) * model.scale.double() + torch.arange(4).double() / 3, -1) / 2
    )
    assert truth.dtype is torch.float64
    assert (truth - expected).abs().max() < 1e-15
    assert not mode.lowered
    assert mode.coarsest == torch.finfo(torch.float16).eps


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids):
        x = self.table(ids) + self.table.weight[3]
        return self.attention(x, x, x, key_padding_mask=ids == 0)[0]


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU()), torch.randn(2, 3, 6, 6)),
        (nn.LSTM(4, 5, num_layers=2, batch_first=True), torch.randn(2, 3, 4)),
        (nn.GRU(4, 5, bidirectional=True), torch.randn(3, 2, 4)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)),
        (nn.Sequential(nn.ConvTranspose1d(4, 4, 2), nn.InstanceNorm1d(4)), torch.randn(2, 4, 6)),
        (Attend(), torch.tensor([[1, 2, 3], [4, 5, 0]])),
    ],
)
def test_equals_a_double_copy_where_that_works(model, x):
    enliven(model).eval()
    with torch.no_grad(), Float64Mode() as mode:
        truth = model(x.double() if x.is_floating_point() else x)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            expected = double_copy(model)(x.double() if x.is_floating_point() else x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    if isinstance(truth, tuple):
        truth, expected = truth[0], expected[0]
    assert (truth - expected).abs().max() < 1e-13
    assert not mode.lowered


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.total += x.sum(0)
        self.total[0].mul_(2)
        self.total.data.add_(1)
        torch.add(self.total, 1, out=self.total)
        return self.total * x


def test_writes_go_to_the_shadow_and_are_read_from_there():
    model = Counting()
    x = torch.rand(2, 3)
    buffer, version = model.total, model.total._version
    with Float64Mode() as mode:
        truth = model(x.double())
    total = x.double().sum(0)
    total[0] *= 2
    assert (truth - (total + 2) * x.double()).abs().max() < 1e-15
    assert (mode.shadow(model.total) - (total + 2)).abs().max() < 1e-15
    assert model.total._version == version
    assert model.total is buffer
    assert not model.total.any()


def test_batch_norm_statistics_of_the_model_stay():
    model = enliven(nn.BatchNorm1d(3)).train()
    before = model.running_mean.clone()
    x = torch.randn(4, 3)
    with Float64Mode() as mode:
        model(x.double())
    assert torch.equal(model.running_mean, before)
    expected = 0.9 * before.double() + 0.1 * x.double().mean(0)
    assert (mode.shadow(model.running_mean) - expected).abs().max() < 1e-15


RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout module": nn.Dropout(0.3),
    "dropout in place": lambda x: F.dropout(x * 1, 0.4, True, True),
    "torch dropout": lambda x: torch.dropout(x, 0.5, True),
    "dropout2d": lambda x: F.dropout2d(x.unsqueeze(-1), 0.5),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True),
    "rand": lambda x: x + torch.rand(x.shape),
    "randn": lambda x: x + torch.randn(x.shape, dtype=torch.float32),
    "rand_like": lambda x: x * torch.rand_like(x),
    "normal": lambda x: torch.normal(x, 0.1),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) * x,
    "fill": lambda x: x + torch.empty(x.shape).uniform_(-1, 1),
    "new": lambda x: x.new_empty(x.shape).normal_() + x,
    "gumbel": lambda x: F.gumbel_softmax(x),
    "multinomial": lambda x: x + torch.multinomial(x.softmax(1).flatten(1), 2).sum(),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "randperm": lambda x: x[:, torch.randperm(x.shape[1])],
    "rrelu": lambda x: F.rrelu(x, training=True),
    # The dropout of a GPU.
    "native dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "other dtype": lambda x: x + torch.randn(x.shape, dtype=torch.float16),
    "recurrent": lambda x: nn.LSTM(20, 20, 2, dropout=0.5)(x)[0],
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_come_from_the_same_stream(name):
    x = torch.randn(2, 30, 20)

    def forward(x):
        first = RANDOM[name](x) if name != "multinomial" else RANDOM[name](x[..., 0])
        return first, torch.randn(3), torch.rand(20)

    torch.manual_seed(3)
    own = forward(x)
    torch.manual_seed(3)
    with Float64Mode():
        truth = forward(x.double())
    torch.manual_seed(4)
    other = forward(x)
    assert not torch.equal(own[0], other[0])
    for a, b in zip(own, truth, strict=True):
        assert b.dtype is torch.float64
        assert (a - b).abs().max() < 1e-5


def test_dropout_of_zero_and_in_eval_stays_exact():
    x = torch.randn(5)
    with Float64Mode() as mode:
        assert torch.equal(F.dropout(x.double(), 0.5, training=False), x.double())
        assert torch.equal(F.dropout(x.double(), 0.0), x.double())
        assert not F.dropout(x.double(), 1.0).any()
    assert not mode.lowered


def test_autocast_has_no_effect():
    linear = enliven(nn.Linear(8, 8))
    x = torch.randn(2, 8)
    with torch.no_grad(), Float64Mode() as mode, torch.autocast("cpu", torch.bfloat16):
        truth = torch.cat([linear(x.double()), x.double()])
    expected = x.double() @ linear.weight.double().T + linear.bias.double()
    assert (truth[:2] - expected).abs().max() < 1e-14
    assert mode.coarsest == torch.finfo(torch.bfloat16).eps


INTS = torch.tensor([[1, 2, 7], [3, 5, 9]])
MASK = INTS > 2
TAKES_THE_DEFAULT = {
    "zeros": lambda: torch.zeros(3),
    "ones of a tensor's size": lambda: torch.ones(INTS[0, 1], 2),
    "full of complex": lambda: torch.full((2,), 0.1j),
    "linspace from a tensor": lambda: torch.linspace(INTS[0, 0], INTS[0, 2], 7),
    "arange": lambda: torch.arange(0, 1, 0.1),
    "literal": lambda: torch.tensor(0.1),
    "literals": lambda: torch.tensor([0.1, 1]),
    "complex literal": lambda: torch.tensor(0.1 + 0.3j),
    "window": lambda: torch.hann_window(7),
    "explicit dtype": lambda: torch.full((2,), 0.1, dtype=torch.get_default_dtype()),
    "division": lambda: INTS / 3,
    "divided number": lambda: 1.3 / INTS,
    "power": lambda: 0.3**INTS,
    "root": lambda: torch.sqrt(INTS),
    "logarithm of booleans": lambda: torch.log1p(MASK),
    "booleans": lambda: MASK * 0.1,
    "mean": lambda: INTS.mean(dtype=torch.get_default_dtype()) / 3,
    "softmax": lambda: torch.softmax(INTS, 1, dtype=torch.get_default_dtype()),
    "fourier": lambda: torch.fft.fft(INTS),
    "low level": lambda: torch.ops.aten.div.Tensor(INTS, INTS.flip(1)),
}


@pytest.mark.parametrize("name", TAKES_THE_DEFAULT)
def test_results_of_the_default_dtype_are_float64(name):
    own = TAKES_THE_DEFAULT[name]()
    with Float64Mode() as mode:
        truth = TAKES_THE_DEFAULT[name]()
    torch.set_default_dtype(torch.float64)
    try:
        expected = TAKES_THE_DEFAULT[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    assert own.dtype in (torch.float32, torch.complex64)
    assert truth.dtype is (torch.complex128 if own.is_complex() else torch.float64)
    assert (truth - expected).abs().max() <= 1e-15 * truth.abs().max()
    assert not mode.lowered


def test_a_promoted_dtype_is_float64():
    with Float64Mode():
        assert torch.promote_types(torch.int64, torch.float32) is torch.float64
        assert torch.result_type(INTS, 0.5) is torch.float64
        assert torch.result_type(INTS, 2) is torch.int64


def test_numbers_that_only_float64_holds():
    least = torch.finfo(torch.float64).min
    with Float64Mode():
        assert torch.full((2,), least).min() == least
        assert torch.tensor(least) == least
        assert (~MASK * least).min() == least
        with pytest.raises(RuntimeError, match="without overflow"):
            INTS.masked_fill(MASK, least)


def test_another_thread_makes_float32_tensors_meanwhile():
    made = []

    def make():
        made.extend([torch.zeros(2), torch.tensor(0.5), torch.arange(3) / 2, torch.Tensor(2), nn.Linear(2, 2).weight])

    with Float64Mode():
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        assert torch.get_default_dtype() is torch.float32
        assert torch.zeros(1).dtype is torch.float64
    assert torch.zeros(1).dtype is torch.float32
    assert [tensor.dtype for tensor in made] == [torch.float32] * 5


def test_integers_stay():
    with Float64Mode():
        x = torch.ones(2, 2)
        assert torch.arange(3).dtype is torch.int64
        assert x.argmax(1).dtype is torch.int64
        assert x.to(torch.int32).dtype is torch.int32


def test_script_modules_are_not_seen_into():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, but users' modules may still contain it
        script = torch.jit.trace(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(RuntimeError), Float64Mode(draws=False):
        script(torch.randn(2, 3))


def test_gradients_are_float64_with_leaves():
    model = enliven(nn.Linear(3, 1))
    x = torch.randn(5, 3)
    with Float64Mode(leaf_parameters=True) as mode:
        model(x.double()).square().sum().backward()
    weight, bias = model.weight.detach().double().requires_grad_(), model.bias.detach().double()
    (x.double() @ weight.T + bias).square().sum().backward()
    gradient = mode.shadow(model.weight).grad
    assert gradient.dtype is torch.float64
    assert (gradient - weight.grad).abs().max() < 1e-13
    assert model.weight.grad is None


def test_perturbed_weights_change_by_about_one_unit_and_the_same_each_time():
    model = enliven(nn.Linear(50, 40, bias=False))
    eye = torch.eye(50)
    version = model.weight._version
    with torch.no_grad():
        with PerturbedMode(0):
            first, second = model(eye).T, model(eye).T
        with PerturbedMode(1):
            other = model(eye).T
    relative = ((first - model.weight) / model.weight).abs()
    eps = torch.finfo(torch.float32).eps
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert relative.max() < 2.1 * eps
    assert (first != model.weight).float().mean() > 0.9
    assert model.weight._version == version
    assert (first > model.weight).float().mean().sub(0.5).abs() < 0.3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_with_a_weight_in_another_layout_runs_perturbed(layout):
    held = laid_out(layout, torch.eye(4) * 2 + torch.eye(4).roll(1, 0))
    model = enliven(nn.Linear(4, 4))
    model.held = nn.Parameter(held, requires_grad=False)
    x = torch.randn(3, 4)
    with torch.no_grad(), PerturbedMode(0):
        products = model.held @ model(x).T if held.layout is torch.sparse_coo else numbers_in(model.held)
        perturbed = model(x)
    assert products.isfinite().all()
    assert not torch.equal(perturbed, model(x))


def test_the_result_of_each_operator_is_rounded():
    x = torch.linspace(0.5, 2.0, 64, dtype=torch.float64).reshape(4, 16)
    assert x[0, 0] == 0.5
    assert x[-1, -1] == 2.0
    before = x.clone()
    with RoundedMode(0) as mode:
        summed, moved = x + 0.0, x.t()
        written = torch.zeros_like(x).copy_(x)
    assert mode.rounded_results == 2  # zeros are whole numbers, which stay
    for value in (summed, written):
        up = (value > x).float().mean()
        assert 0.25 < up < 0.75
        # One of them is 0.5: below a power of two, numbers are twice as dense. Whole numbers, such as 2, stay.
        neighbor = torch.nextafter(x, torch.where(value > x, math.inf, -math.inf))
        assert torch.equal(value, torch.where(x == x.round(), x, neighbor))
    assert moved.data_ptr() == x.data_ptr()
    assert torch.equal(x, before)


def test_the_results_of_an_operator_that_calls_others_are_rounded_in_a_copy():
    x = torch.linspace(0.3, 0.9, 16)
    before = x.clone()
    with eager_only(), RoundedMode(0) as mode:
        sines = torch.cond(x.max() > 0, torch.sin, torch.cos, (x,))
        same = while_loop(lambda i, _: i < 0, lambda i, rows: (i + 1, rows.sin()), (torch.tensor(0), x))[1]
    assert mode.rounded_results == 3  # the maximum, too
    for value, exact in ((sines, x.sin()), (same, x)):
        assert 0 < (value - exact).abs().max() < 1e-6
    assert torch.equal(x, before)


def test_rounding_changes_no_nan_no_infinity_and_no_draw():
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    torch.manual_seed(0)
    with RoundedMode(0):
        same, drawn = x.clone(), torch.rand(5)
        indices, kept = torch.arange(3), (x > 0).to_sparse()
    torch.manual_seed(0)
    torch.testing.assert_close(same, x, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(drawn, torch.rand(5), rtol=1e-6, atol=0)
    assert indices.tolist() == [0, 1, 2]
    assert kept.to_dense().tolist() == [True, False, False, False]


def test_rounding_changes_no_mask_and_no_filled_number():
    numbers, hidden = torch.linspace(-1.0, 1.0, 16), torch.arange(16) % 2 == 0
    lowest = torch.full((16,), torch.finfo(torch.float32).min)
    with RoundedMode(0):
        # A fully masked row of attention scores.
        added, times = numbers + lowest, lowest * 1
        filled = lowest.masked_fill(hidden, -1e9)
        chosen = torch.where(hidden, -1e9, lowest)
        full = torch.full((16,), -1e9)
        # 1e30 doesn't represent infinity, so these numbers are rounded.
        large = numbers + 1e30
    for value in (added, times):
        assert torch.equal(value, lowest)
    for value in (filled, chosen):
        assert value.unique().tolist() == [lowest[0].item(), -1e9]
    assert full.unique().tolist() == [-1e9]
    assert len(large.unique()) > 1


def test_rounding_changes_no_whole_number():
    positions = torch.arange(8)
    with RoundedMode(0) as mode:
        places = positions.to(torch.float32)
        pairs = torch.div(places, 2, rounding_mode="floor")
        counts = torch.ones(8).cumsum(0)
        assert mode.rounded_results == 0
        thirds = places / 3
        # ZoeDepth computes log(n - k + 1e-7) of such numbers: a rounded k would give NaN.
        shifted = places + 1e-7
    assert (places[-1] - shifted[-1]).item() == 0.0
    assert shifted[0] != 1e-7
    assert pairs.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert counts.tolist() == list(range(1, 9))
    assert mode.rounded_results == 2
    assert (thirds != places / 3).any()


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.LayerNorm(3), nn.GroupNorm(1, 3)])
def test_a_norm_is_rounded_inside(layer):
    """The rounding error of a mean shifts all rows alike, and is large next to their small differences."""
    x = 1e6 + torch.linspace(-1.0, 1.0, 15, dtype=torch.float64).reshape(5, 3).sin().requires_grad_()
    layer = enliven(layer).double().train()
    plain = layer(x)
    (gradient,) = torch.autograd.grad(plain.square().sum(), x)
    with RoundedMode(0):
        out = layer(x)
        (rounded,) = torch.autograd.grad(out.square().sum(), x)
    eps = torch.finfo(torch.float64).eps
    assert 1e4 * eps < (out - plain).abs().max() < 1e9 * eps
    assert 1e2 * eps < (rounded - gradient).abs().max() < 1e10 * eps


def test_the_backward_pass_is_rounded():
    weight = torch.linspace(0.5, 2.0, 20, dtype=torch.float64).requires_grad_()
    with RoundedMode(0):
        (gradient,) = torch.autograd.grad((0.3 * weight).sum(), weight)
    assert 0 < (gradient - 0.3).abs().max() < 1e-14
