"""Move a convolution's bias into the following BatchNorm."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import folding_models as models
import pytest
import torch
import torch.nn.functional as F
from folding_models import CONVOLUTIONS, Pair, image, norm_behind, side_by_side
from operations import computed
from pass_contract import captured, check_pass, check_same, sentences_of, tree_of
from tiny_models import Net, enliven
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from optimizer import optimize, report_of
from passes import Context, FoldConvBias, GraphPass, GraphRewriter, Layers

BATCH = image(6, 3, 8, 8)


def same(fast: nn.Module, model: nn.Module, x: Tensor, tolerance: float = 1e-4) -> None:
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=tolerance, atol=tolerance)


# Inference ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kinds", "affine"), [(CONVOLUTIONS, True), (("conv2d", "linear"), False)])
def test_the_algebra_is_exact_in_float64(kinds: Iterable[str], affine: bool) -> None:
    layers, shapes = [CONVOLUTIONS[kind][0]() for kind in kinds], [CONVOLUTIONS[kind][1] for kind in kinds]
    norms = [norm_behind(*each, affine=affine) for each in zip(layers, shapes, strict=True)]
    model, xs = side_by_side(*map(nn.Sequential, layers, norms), shapes=shapes)
    tree, context = captured(model, xs)
    changes = [(change.where, change.what) for change in FoldConvBias().run(tree, context).changes]
    places = [f"blocks.{place}" for place in range(len(layers))]
    assert changes == [(f"{place}.0", f"bias moved into the running mean of {place}.1") for place in places]
    with torch.no_grad():
        torch.testing.assert_close(got := tree.root(*xs), model(*xs), rtol=1e-12, atol=1e-12)
        for layer in layers:
            layer.bias = None
        for before, after in zip(got, model(*xs), strict=True):
            assert not torch.allclose(before, after, rtol=1e-2, atol=1e-2), "this bias does nothing to be moved"


def test_the_layer_adds_no_bias() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval()
    fast = optimize(enliven(model), ["fold-conv-bias"], example_inputs=(image(3, 4),))
    assert computed("addmm", fast, image(3, 4)) == 0
    assert computed("addmm", model, image(3, 4)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cancels", [False, True])
def test_a_bias_that_half_precision_needs_where_it_is_stays(dtype: torch.dtype, cancels: bool) -> None:
    """Without its bias, the convolution's output is rounded to the dtype, and may be far larger than with it."""
    model, x = Pair().eval(), image()
    if cancels:
        x[:, 0] = 1
        with torch.no_grad():
            model.conv.padding = (0, 0)
            model.conv.weight[:, 0], model.conv.bias[:] = 512 / 9, -512
    model, x = model.to(dtype), x.to(dtype)
    with torch.no_grad():
        model.conv.bias[:] = model.conv.bias if not cancels else -9 * model.conv.weight[:, 0, 0, 0]
    fast = optimize(model, ["fold-conv-bias"], example_inputs=(x,))
    (record,) = report_of(fast).passes
    assert record.status == ("unchanged" if cancels else "applied")
    text = "undone (bias moved into the running mean of bn), because it loses too much to rounding: "
    assert [skip.text.startswith(text) for skip in record.skips] == [True] * cancels


@pytest.mark.parametrize("tracks", [True, False])
def test_batch_statistics_are_left_alone(tracks: bool) -> None:
    model = Pair().eval() if tracks else _without_running_statistics().eval()
    model.bn.train()
    tree, context = captured(model, image(), keep_flags=True)
    done = FoldConvBias().run(tree, context)
    assert done.changes == ()
    assert list(sentences_of(done)) == [("conv", "the BatchNorm bn uses the statistics of the batch")]


def _without_running_statistics() -> Any:
    model = Pair()
    model.bn = nn.BatchNorm2d(4, track_running_stats=False)
    return enliven(model)


def test_in_training_without_running_statistics_the_bias_is_dropped() -> None:
    done = check_pass(FoldConvBias(), _without_running_statistics(), (BATCH,), mode="training")
    (change,) = done.changes
    assert change.what == "bias dropped, because bn subtracts it again"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bias_that_is_not_finite_shows_in_training(value: float) -> None:
    """The batch mean doesn't cancel it: their difference is NaN."""
    model = _without_running_statistics().train()
    fast = folded(model)
    for one in (model, fast):
        with torch.no_grad():
            one.conv.bias[1] = value
    torch.testing.assert_close(fast(BATCH), model(BATCH), equal_nan=True, rtol=1e-4, atol=1e-4)
    assert fast(BATCH)[:, 1].isnan().all()


def test_a_bias_that_takes_the_mean_out_of_range_stays() -> None:
    model = Pair().eval()
    with torch.no_grad():
        model.conv.bias[0], model.bn.running_mean[0] = -3e38, 3e38
    tree, context = captured(model, image())
    done = FoldConvBias().run(tree, context)
    assert list(sentences_of(done)) == [("conv", "the new weights wouldn't be finite")]


class Residual(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.bn(y) + y


@pytest.mark.parametrize(
    ("model", "texts"),
    [
        (Residual(), ["its output is also used by the root (add)"]),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), []),
    ],
)
def test_refuses_with_the_reason_in_training_too(model: nn.Module, texts: list[str]) -> None:
    tree, context = captured(model, BATCH, mode="training")
    done = FoldConvBias().run(tree, context)
    assert done.changes == ()
    assert [text for _, text in sentences_of(done)] == texts


@pytest.mark.parametrize("drop", [nn.Dropout2d(0.3), Net(lambda m, x: F.dropout(x, 0.2, m.training))])
def test_in_training_dropout_is_no_move(drop: nn.Module) -> None:
    """Dropout sets random values to zero, bias included, so the BatchNorm doesn't cancel the bias."""
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), drop, nn.BatchNorm2d(4)))
    for mode, count in (("training", 0), ("inference", 1)):
        tree, context = captured(model.train(mode == "training"), BATCH, mode=mode)  # type: ignore[arg-type]
        assert len(FoldConvBias().run(tree, context).changes) == count


# Training -------------------------------------------------------------------------------------------------------------


class Nets(nn.Module):
    """A chain with every kind of convolution and every setting of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
            self.grouped = nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8, momentum=0.0), nn.ReLU())
            self.transposed = nn.Sequential(nn.ConvTranspose2d(8, 6, 3), nn.BatchNorm2d(6, affine=False), nn.ReLU())
            self.synced = nn.Sequential(nn.Conv2d(6, 6, 3), nn.SyncBatchNorm(6))
            self.volume = nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU())
            self.line = nn.Sequential(nn.Conv1d(9, 5, 3), nn.BatchNorm1d(5, momentum=0.4), nn.Tanh())
            self.rows = nn.Sequential(nn.Linear(70, 12), nn.BatchNorm1d(12), nn.ReLU())
            self.dropped = nn.Sequential(nn.Linear(12, 7), nn.BatchNorm1d(7, track_running_stats=False))
            self.head = nn.Linear(7, 3)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.synced(self.transposed(self.grouped(self.plain(x))))
        z = self.volume(y.reshape(len(y), 2, 3, 4, 4))
        return self.head(self.dropped(self.rows(self.line(z.reshape(len(z), 9, 16)).flatten(1))))


PAIRS = ["plain", "grouped", "transposed", "synced", "volume", "line", "rows", "dropped"]
BIASES = {f"{name}.0.bias" for name in PAIRS}


def folded(model: nn.Module, x: Tensor = BATCH, passes: Any = ("fold-conv-bias",)) -> Any:
    """Optimize a copy of the model for training, so that the model and the result share nothing."""
    fast = optimize(copy.deepcopy(model), list(passes), mode="training", example_inputs=(x,))
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    return fast


@pytest.fixture(scope="module")
def made() -> tuple[nn.Module, Any]:
    model = Nets().train()
    before = tree_of(model)
    fast = optimize(model, mode="training", example_inputs=(BATCH,))
    check_same(before, tree_of(model), "the original is another")
    assert [record.name for record in report_of(fast).passes] == ["fold-conv-bias"]
    assert list(fast.state_dict()) == list(model.state_dict())
    assert all(torch.equal(fast.state_dict()[name], value) for name, value in model.state_dict().items())
    return model, fast


@pytest.fixture
def nets(made: Any) -> tuple[nn.Module, Any]:
    """`Nets` and its result."""
    return copy.deepcopy(made[0]), copy.deepcopy(made[1])


@pytest.fixture(scope="module")
def made_pair() -> tuple[Any, Any]:
    model = Pair().train()
    return model, folded(model)


@pytest.fixture
def pair(made_pair: Any) -> tuple[Any, Any]:
    """A `Pair` and its result."""
    return copy.deepcopy(made_pair[0]), copy.deepcopy(made_pair[1])


def relative(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).detach().abs().max() / theirs.detach().abs().max())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    outputs: Tensor = model(x)
    F.mse_loss(outputs, y).backward()
    optimizer.step()
    return outputs


def train_together(dtype: torch.dtype, make: Any) -> tuple[nn.Module, nn.Module]:
    """The model and its result after 20 steps on the same data, whose outputs agree."""
    model = Nets().to(dtype).train()
    fast = folded(model, BATCH.to(dtype))
    assert [change.where for change in report_of(fast).passes[0].changes] == [f"{name}.0" for name in PAIRS]
    optimizers = make(model), make(fast)
    data = torch.Generator().manual_seed(4)
    before = copy.deepcopy(model.state_dict())
    for _ in range(20):
        x, y = (torch.randn(*shape, generator=data).to(dtype) for shape in ((8, 3, 8, 8), (8, 3)))
        wanted, got = (train(one, by, x, y) for one, by in zip((model, fast), optimizers, strict=True))
        assert relative(got, wanted) < (1e-12 if dtype is torch.float64 else 5e-4)
    assert relative(model.state_dict()["plain.0.weight"], before["plain.0.weight"]) > 1e-2, "nothing was learned"
    return model, fast


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "make", "bound"), [(torch.float32, sgd, 5e-4), (torch.float64, adamw, 1e-7)])
def test_trains_as_the_original(dtype: torch.dtype, make: Any, bound: float) -> None:
    """With weight decay. In float32, rounding errors grow over eight BatchNorms and twenty steps: 5e-5 was measured.

    AdamW divides the original's gradients of biases, about 1e-17, by at least 1e-8, so its biases drift a little.
    """
    model, fast = train_together(dtype, make)
    state = fast.state_dict()
    assert list(state) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert relative(state[name].double(), value.double()) < bound, name
    learnt = copy.deepcopy(model)
    learnt.load_state_dict(state)
    same(fast.eval(), learnt.eval(), BATCH.to(dtype), 1e-5)


def test_one_step_gives_each_bias_a_zero_gradient(nets: Any) -> None:
    (model, fast), y = nets, image(6, 3, seed=2)
    for one in (model, fast):
        F.mse_loss(one(BATCH), y).backward()
    gradients = dict(model.named_parameters())
    for name, parameter in fast.named_parameters():
        if name in BIASES:
            assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name
        else:
            assert relative(parameter.grad, gradients[name].grad) < 1e-3, name
    for name, value in model.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)


class AuxiliaryHead(Pair):
    """Has a head that runs only in training."""

    def more(self) -> None:
        self.aux, self.aux_bn = nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Any:
        y = self.bn(self.conv(x))
        return (y, self.aux_bn(self.aux(x))) if self.training else y


class OtherwiseInEval(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.bn(y) if self.training else y


class ByFunctions(models.Functional):
    def more(self) -> None:
        super().more()
        self.b = nn.Parameter(torch.tensor([0.9, -0.7, 0.6, 0.8]))

    def forward(self, x: Tensor) -> Any:
        y = F.conv2d(x, self.w, self.b)
        return F.batch_norm(y, self.mean, self.var, self.gain, None, self.training).relu()


class NormTwice(Pair):
    """One BatchNorm after two convolutions: it updates its statistics twice."""

    def more(self) -> None:
        self.second = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) * self.bn(self.second(x))


class Transposed(Pair):
    """The output of a linear layer is moved on its way to the BatchNorm, and its shape is read."""

    def more(self) -> None:
        self.conv, self.bn = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.bn(y.flatten(0, 2)).reshape_as(y)


class ReadsBias(Pair):
    """Uses the bias once more, which then has a gradient."""

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) + self.conv.bias.sum()


@pytest.mark.parametrize(
    "cls",
    [
        *(AuxiliaryHead, OtherwiseInEval, ByFunctions, NormTwice, Transposed, ReadsBias),
        *(models.SharedBlock, models.TwoNorms),
    ],
)
def test_folds_in_every_spelling_and_answers_in_both_modes(cls: type[nn.Module]) -> None:
    model = cls().train()
    fast = folded(model)
    x = image(4, 3, 8, 8, seed=5)
    optimizers = sgd(model), sgd(fast)
    for flag in (True, False, True):
        wanted, got = (pytree.tree_leaves(one.train(flag)(x)) for one in (model, fast))
        assert all(relative(mine, theirs) < 1e-4 for mine, theirs in zip(got, wanted, strict=True))
        if flag:
            for leaves, by in zip((wanted, got), optimizers, strict=True):
                by.zero_grad()
                sum(leaf.square().mean() for leaf in leaves).backward()
                by.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_norm_in_eval_is_left_alone_where_the_bias_is_trained() -> None:
    model = Pair().train()
    model.bn.eval()
    done = check_pass(FoldConvBias(), model, (BATCH,), mode="training")
    reason = (
        "the BatchNorm bn uses running statistics, so the bias is trained: put bn in training before optimize(), or "
        "freeze the bias"
    )
    assert (done.changes, list(sentences_of(done))) == ((), [("conv", reason)])


@pytest.mark.parametrize("in_eval", [True, False])
def test_a_frozen_bias_needs_no_gradient(in_eval: bool) -> None:
    model = Pair().train()
    model.conv.bias.requires_grad_(False)
    model.bn.train(not in_eval)
    y = image(6, 4, 8, 8, seed=3)
    fast = folded(model)
    optimizers = sgd(model), sgd(fast)
    for _ in range(3):
        wanted, got = (train(one, by, BATCH, y) for one, by in zip((model, fast), optimizers, strict=True))
        assert relative(got, wanted) < 1e-5
    assert fast.conv.bias.grad is None
    same(fast.train(), model.train(), BATCH, 1e-5)
    same(fast.eval(), model.eval(), BATCH, 1e-5)


def test_a_norm_that_is_put_in_eval_later_trains_the_bias(pair: Any) -> None:
    for one in pair:
        one.bn.eval()
        one(BATCH).square().sum().backward()
    assert relative(*(one.conv.bias.grad for one in pair)) < 1e-4


def test_hooks_of_the_bias_see_its_zero_gradient(pair: Any) -> None:
    (_, fast), seen = pair, list[Tensor]()
    fast.conv.bias.register_hook(seen.append)
    fast(BATCH).square().sum().backward()
    assert [gradient.abs().max().item() for gradient in seen] == [0]


def test_under_autocast_it_is_no_further_from_the_truth(nets: Any) -> None:
    """On average over several batches: the errors of a single one differ by a factor of two either way."""
    model, errors = copy.deepcopy(nets[0]), torch.zeros(2)
    for seed in range(12):
        x = image(6, 3, 8, 8, seed=seed)
        truth = copy.deepcopy(model).double()(x.double())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = [one(x).double() for one in nets]
        errors += torch.tensor([relative(output, truth) for output in outputs])
    assert errors[1] < 1.3 * errors[0]


@pytest.mark.slow
def test_compiled_it_trains_alike() -> None:
    model, y = Pair().train(), image(6, 4, 8, 8, seed=3)
    fast = folded(model, passes=["fold-conv-bias", "torch-compile:backend=aot_eager"])
    assert [record.status for record in report_of(fast).passes] == ["applied", "applied"]
    optimizers = sgd(model), sgd(fast)
    for _ in range(3):
        wanted, got = (train(one, by, BATCH, y) for one, by in zip((model, fast), optimizers, strict=True))
        assert relative(got, wanted) < 1e-4
    torch.testing.assert_close(fast.state_dict()["bn.running_mean"], model.bn.running_mean, rtol=1e-4, atol=1e-5)


def test_what_was_trained_is_folded_for_inference() -> None:
    trained = folded(models.AcrossModules().train()).eval()
    deployed = optimize(trained, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(BATCH,))
    assert report_of(deployed).passes[1].status == "applied"
    assert computed("batch_norm", deployed, BATCH) == 0
    same(deployed, trained, BATCH)


def _reset(model: Any) -> None:
    model.bn.reset_running_stats()


def _load(model: Any) -> None:
    model.load_state_dict(enliven(Pair(), seed=5).state_dict())


def _average(model: Any) -> None:
    model.bn.momentum = None


def _quick(model: Any) -> None:
    model.bn.momentum = 0.7


def _synced(model: Any) -> None:
    model.bn = nn.SyncBatchNorm.convert_sync_batchnorm(model.bn)


@pytest.mark.parametrize("change", [_reset, _load, _average, _quick, _synced, lambda model: model.double()])
def test_a_later_change_counts_at_the_next_call(change: Callable[[Any], None], pair: Any) -> None:
    model, fast = pair
    for one in pair:
        change(one)
        for _ in range(3):
            one(BATCH.to(one.bn.running_mean.dtype))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_functional_call_takes_the_tensors_of_the_original(pair: Any) -> None:
    tensors = {name: tensor.detach().clone() for name, tensor in enliven(Pair(), seed=3).state_dict().items()}
    wanted, got = (functional_call(one, copy.deepcopy(tensors), (BATCH,)) for one in pair)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_keeps_the_contract_in_training() -> None:
    done = check_pass(FoldConvBias(), models.AcrossModules().train(), (image(4, 3, 8, 8),), mode="training")
    assert len(done.changes) == 1


# Wrong passes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForgetsTheMean(GraphPass):
    """Leaves out the bias, but doesn't add it to the running mean."""

    name: ClassVar[str] = "forgets-the-mean"

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        layers = Layers(graph)
        for norm in filter(None, map(layers.batch_norm_at, graph.calls("batch_norm"))):
            pair = layers.pair_before(norm)
            assert pair is not None
            assert layers.why_not(pair) is None
            with graph.change(pair.layer.node, "bias left out"):
                value = layers.without_affine(pair, bias=None)
                graph.replace(norm.node, layers.call_with(norm, norm.node, input=value))


@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_a_mean_that_is_forgotten_is_found(momentum: float) -> None:
    """In training, no output shows the error."""
    model = Pair().train()
    model.bn.momentum = momentum
    fast = optimize(model, [ForgetsTheMean()], mode="training", example_inputs=(BATCH,))
    (record,) = report_of(fast).passes
    assert record.status == "rolled-back"
    assert record.reason.startswith("conv (bias left out): ")
    same(fast, copy.deepcopy(model), BATCH, 0)
