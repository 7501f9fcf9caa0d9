"""Move a convolution's bias into the following BatchNorm."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import folding_models as models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from folding_models import CONVOLUTIONS, FAR, image, norm_behind
from pass_contract import captured, check_pass, check_same, tree_of
from tiny_models import enliven
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from optimizer import optimize, report_of
from optimizer.model.working_copy import Mode
from passes import FoldConvBias
from passes.base import Context
from passes.errors import UnseenCall
from passes.program.tensor_pass import TensorPass
from passes.program.tensor_rewriting import TensorRewriter
from passes.program.weights import FoldedTensor, a_forward_runs, bare

# Models whose BatchNorm isn't always in eval mode, and whose convolution has torch's own forward.
TRAINED = [cls for cls in models.FOLDED if not issubclass(cls, models.Functional | models.Direct)]
WITH_BIAS = [cls for cls in models.FOLDED if cls not in (models.Functional, models.TorchFunctions)]


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("affine", [True, False])
def test_the_algebra_is_exact_in_float64(kind: str, affine: bool) -> None:
    make, shape = CONVOLUTIONS[kind]
    conv = make()
    model = enliven(nn.Sequential(conv, norm_behind(conv, shape, affine=affine))).double().eval()
    x = image(*shape).double()
    tree, context = captured(model, x)
    (change,) = FoldConvBias().run(tree, context).changes
    assert (change.where, change.what) == ("0", "bias moved into the running mean of 1")
    assert isinstance(tree.root[0].bias, FoldedTensor)
    assert tree.root[0]._parameters["bias"] is None
    assert torch.equal(bare(tree.root[1].running_mean), model[1].running_mean - model[0].bias)
    assert torch.allclose(tree.root(x), model(x), rtol=1e-12, atol=1e-12)
    model[0].bias = None
    assert not torch.allclose(tree.root(x), model(x), rtol=1e-2, atol=1e-2), "this bias does nothing to be moved"


@pytest.mark.parametrize("cls", WITH_BIAS)
def test_moves_the_bias_in_every_spelling(cls: type[nn.Module]) -> None:
    model = cls().eval()
    fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(image(),))
    first, second = report_of(fast).passes
    assert (first.status, second.status) == ("applied", "applied"), str(report_of(fast))
    assert torch.allclose(fast(image(seed=7)), model(image(seed=7)), atol=1e-5)
    twin = pickle.loads(pickle.dumps(fast))
    assert torch.equal(twin(image()), fast(image()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cancels", [False, True])
def test_a_bias_that_half_precision_needs_where_it_is_stays(dtype: torch.dtype, cancels: bool) -> None:
    """Without its bias, the convolution's output is rounded to the dtype, and may be far larger than with it."""
    model = models.Pair().eval()
    x = image()
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
    assert (fast.conv._parameters["bias"] is None) != cancels


@pytest.mark.parametrize("cls", [models.Functional, models.TorchFunctions])
def test_nothing_to_move_without_a_bias(cls: type[nn.Module]) -> None:
    done = check_pass(FoldConvBias(), cls().eval(), (image(),))
    assert (done.changes, done.skips) == ((), ())


def test_batch_statistics_are_left_alone() -> None:
    model = models.Pair().eval()
    model.bn.train()
    tree, context = captured(model, image(), keep_flags=True)
    done = FoldConvBias().run(tree, context)
    assert done.changes == ()
    assert done.skips[0].reason == "the BatchNorm bn uses the statistics of the batch"


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_without_running_statistics_the_bias_is_dropped(mode: Mode) -> None:
    model = models.Pair()
    model.bn = nn.BatchNorm2d(4, track_running_stats=False)
    enliven(model)
    done = check_pass(FoldConvBias(), model, (image(4, 3, 8, 8),), mode=mode)
    (change,) = done.changes
    assert change.what == "bias dropped, because bn subtracts it again"
    fast = optimize(model, ["fold-conv-bias"], example_inputs=(image(4, 3, 8, 8),), mode=mode)
    assert "conv.bias" not in dict(fast.named_parameters())
    assert ("conv.bias" in fast.state_dict()) == (mode == "training")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bias_that_is_not_finite_is_left_alone(value: float) -> None:
    """The batch mean wouldn't cancel it: their difference is NaN."""
    model = models.Pair()
    model.bn = nn.BatchNorm2d(4, track_running_stats=False)
    with torch.no_grad():
        model.conv.bias[1] = value
    tree, context = captured(model, image(4, 3, 8, 8), mode="training")
    (skip,) = FoldConvBias().run(tree, context).skips
    assert skip.reason == "its bias isn't finite"


@pytest.mark.parametrize(
    ("cls", "passes"),
    [
        *((cls, ["fold-conv-bias"]) for cls in models.UNSEEN),
        (models.IslandRawOutput, ["fold-conv-bias", "fold-conv-bn"]),
        (models.IslandBesides, ["fold-conv-bias", "fold-conv-bn"]),
    ],
)
def test_a_moved_bias_needs_its_norm_in_every_branch(cls: type[nn.Module], passes: list[str]) -> None:
    """An unseen branch would use the convolution without its bias, so it raises."""
    model = cls().eval()
    fast = optimize(model, passes, example_inputs=(image(),))
    assert {record.status for record in report_of(fast).passes} == {"applied"}, str(report_of(fast))
    assert torch.allclose(fast(image(seed=4)), model(image(seed=4)), atol=1e-5)
    for twin in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        with pytest.raises(UnseenCall, match="folded together"):
            twin(FAR)


# ------------------------------------------------------------------------------------- training


class Nets(nn.Module):
    """A chain with every kind of convolution and every setting of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
            self.average = nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8, momentum=None), nn.ReLU())
            self.transposed = nn.Sequential(nn.ConvTranspose2d(8, 6, 3), nn.BatchNorm2d(6, affine=False), nn.ReLU())
            self.synced = nn.Sequential(nn.Conv2d(6, 6, 3), nn.SyncBatchNorm(6))
            self.volume = nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU())
            self.line = nn.Sequential(nn.Conv1d(9, 5, 3), nn.BatchNorm1d(5, momentum=0.4), nn.Tanh())
            self.rows = nn.Sequential(nn.Linear(70, 12), nn.BatchNorm1d(12), nn.ReLU())
            self.dropped = nn.Sequential(nn.Linear(12, 7), nn.BatchNorm1d(7, track_running_stats=False))
            self.head = nn.Linear(7, 3)
        enliven(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.synced(self.transposed(self.average(self.plain(x))))
        z = self.volume(y.reshape(len(y), 2, 3, 4, 4))
        return self.head(self.dropped(self.rows(self.line(z.reshape(len(z), 9, 16)).flatten(1))))


PAIRS = ["plain", "average", "transposed", "synced", "volume", "line", "rows", "dropped"]


def folded(model: nn.Module, x: torch.Tensor, passes: Sequence[Any] = ("fold-conv-bias",)) -> Any:
    """Optimize a copy of the model, so that the model and the result share nothing."""
    fast = optimize(copy.deepcopy(model), list(passes), mode="training", example_inputs=(x,))
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    return fast


def relative(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine - theirs).detach().abs().max() / theirs.detach().abs().max())


def as_checkpointed(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and statistics, with each bias subtracted from the running mean after it."""
    state = {key: value.detach().double() for key, value in model.state_dict().items()}
    for name in PAIRS:
        bias = state.pop(f"{name}.0.bias")
        if f"{name}.1.running_mean" in state:
            state[f"{name}.1.running_mean"] = state[f"{name}.1.running_mean"] - bias
    return state


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    outputs: torch.Tensor = model(x)
    F.mse_loss(outputs, y).backward()
    optimizer.step()
    return outputs


def train_together(
    dtype: torch.dtype, make: Callable[[Any], torch.optim.Optimizer]
) -> tuple[nn.Module, nn.Module, float]:
    """The model and its result after 20 steps on the same data, and the largest difference of their outputs."""
    model = Nets().to(dtype).train()
    fast = folded(model, image(6, 3, 8, 8).to(dtype))
    assert [change.where for change in report_of(fast).passes[0].changes] == [f"{name}.0" for name in PAIRS]
    optimizers = make(model.parameters()), make(fast.parameters())
    data = torch.Generator().manual_seed(4)
    worst = 0.0
    before = copy.deepcopy(model.state_dict())
    for _ in range(20):
        x, y = (torch.randn(*shape, generator=data).to(dtype) for shape in ((8, 3, 8, 8), (8, 3)))
        wanted, got = (train(one, by, x, y) for one, by in zip((model, fast), optimizers, strict=True))
        worst = max(worst, relative(got, wanted))
    assert relative(model.state_dict()["plain.0.weight"], before["plain.0.weight"]) > 1e-2, "nothing was learned"
    return model, fast, worst


def difference_in_eval(model: nn.Module, fast: nn.Module) -> float:
    x = image(5, 3, 8, 8, seed=9).to(next(model.parameters()).dtype)
    return relative(fast.eval()(x), model.eval()(x))


def differences(model: nn.Module, fast: nn.Module, *, means: bool) -> float:
    """The largest difference of all parameters and statistics, with or without the running means."""
    mine, theirs = as_checkpointed(fast), as_checkpointed(model)
    assert mine.keys() == theirs.keys()
    moved = {f"{name}.1.running_mean" for name in PAIRS}
    return max(relative(mine[key], theirs[key]) for key in mine if means or key not in moved)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)


@pytest.mark.slow
def test_trains_as_the_original_with_sgd() -> None:
    """In float32, rounding errors grow over eight BatchNorms and twenty steps: 5e-5 was measured."""
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 5e-4)):
        model, fast, worst = train_together(dtype, sgd)
        assert worst < bound
        assert differences(model, fast, means=True) < bound
        assert difference_in_eval(model, fast) < bound


@pytest.mark.slow
def test_trains_as_the_original_with_adamw_in_float64() -> None:
    """Outputs, weights and variances agree up to rounding; running means differ by the drift of the original's biases.

    The gradients of these biases are about 1e-17, and AdamW divides them by at least 1e-8. So it moves the biases a
    little even in float64.
    """
    model, fast, worst = train_together(torch.float64, adamw)
    assert worst < 1e-12
    assert differences(model, fast, means=False) < 1e-12
    first, mine, theirs = Nets().state_dict(), as_checkpointed(fast), as_checkpointed(model)
    drift = max(float((model.state_dict()[f"{n}.0.bias"] - first[f"{n}.0.bias"]).abs().max()) for n in PAIRS)
    assert drift < 1e-9
    for name in PAIRS[:-1]:
        assert (mine[f"{name}.1.running_mean"] - theirs[f"{name}.1.running_mean"]).abs().max() < 2 * drift + 1e-12
    assert difference_in_eval(model, fast) < 1e-8


@pytest.mark.slow
def test_under_adamw_in_float32_the_original_drifts_and_the_result_does_not() -> None:
    """As documented: AdamW turns the rounding errors in the gradients of the original's biases into full steps."""
    model, fast, worst = train_together(torch.float32, adamw)
    assert worst < 5e-4
    exact, _, _ = train_together(torch.float64, adamw)
    x = image(5, 3, 8, 8, seed=9)
    truth = exact.eval()(x.double())
    ours, drifted = (relative(one.eval()(x).double(), truth) for one in (fast, model))
    assert drifted > 1e-3
    assert ours < drifted / 10


def test_gradients_of_one_step_and_what_optimizers_see() -> None:
    """An optimizer made before optimize() holds the caller's parameters, which the result shares."""
    model = Nets().train()
    x, y = image(6, 3, 8, 8), image(6, 3, seed=2)
    before = copy.deepcopy(model.state_dict())
    optimizer = sgd(model.parameters())
    fast = optimize(model, mode="training", example_inputs=(x,))
    assert [record.name for record in report_of(fast).passes] == ["fold-conv-bias"]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "the caller's model moved"
    own, kept = dict(model.named_parameters()), dict(fast.named_parameters())
    assert own.keys() - kept.keys() == {f"{name}.0.bias" for name in PAIRS}
    assert all(kept[name] is own[name] for name in kept)
    F.mse_loss(copy.deepcopy(model)(x), y)
    train(fast, optimizer, x, y)
    assert all(own[f"{name}.0.bias"].grad is None for name in PAIRS)
    assert all(parameter.grad is not None for parameter in fast.parameters())
    assert all(torch.equal(own[f"{name}.0.bias"], before[f"{name}.0.bias"]) for name in PAIRS)


def test_the_caller_s_running_means_stay_and_the_report_says_so() -> None:
    model = models.Pair().train()
    x = image(6, 3, 8, 8)
    fast = optimize(model, ["fold-conv-bias"], mode="training", example_inputs=(x,))
    assert fast.bn.running_var is model.bn.running_var
    assert fast.bn.running_mean is not model.bn.running_mean
    (note,) = [note for note in report_of(fast).notes if "not the model's" in note]
    assert note.startswith("training the result updates its own")
    mean = model.bn.running_mean.clone()
    train(fast, sgd(fast.parameters()), x, image(6, 4, 8, 8, seed=3))
    assert torch.equal(model.bn.running_mean, mean)
    model.load_state_dict(fast.state_dict())
    assert relative(model.eval()(x), fast.eval()(x)) < 1e-5


def test_train_and_eval_any_number_of_times() -> None:
    model = Nets().train()
    x = image(6, 3, 8, 8)
    fast = folded(model, x)
    optimizers = sgd(model.parameters()), sgd(fast.parameters())
    for round_ in range(3):
        x, y = image(6, 3, 8, 8, seed=round_), image(6, 3, seed=round_)
        got, wanted = (train(one.train(), by, x, y) for one, by in zip((fast, model), optimizers, strict=True))
        assert relative(got, wanted) < 5e-4
        with torch.no_grad():
            assert relative(fast.eval()(x), model.eval()(x)) < 5e-4


# ---------------------------------------------------------------- frozen norms, and code that depends on the bias


def test_a_norm_in_eval_is_left_alone_where_the_bias_is_trained() -> None:
    model = models.Pair().train()
    model.bn.eval()
    done = check_pass(FoldConvBias(), model, (image(),), mode="training")
    assert done.changes == ()
    assert done.skips[0].reason == (
        "the BatchNorm bn uses running statistics, so the bias is trained: put bn in training before optimize(), "
        "or freeze the bias"
    )
    whole = optimize(models.Pair().eval(), mode="training", example_inputs=(image(),))
    assert report_of(whole).passes[0].status == "unchanged"
    assert "put bn in training" in report_of(whole).passes[0].skips[0].text


@pytest.mark.parametrize("in_eval", [True, False])
def test_a_frozen_norm_behind_a_frozen_bias_only_has_its_mean_moved(in_eval: bool) -> None:
    model = models.Pair().train()
    model.conv.bias.requires_grad_(False)
    model.bn.train(not in_eval)
    x, y = image(6, 3, 8, 8), image(6, 4, 8, 8, seed=3)
    fast = folded(model, x)
    assert torch.allclose(fast.bn.running_mean, model.bn.running_mean - model.conv.bias)
    optimizers = [sgd([p for p in one.parameters() if p.requires_grad]) for one in (model, fast)]
    for _ in range(5):
        wanted, got = (train(one, by, x, y) for one, by in zip((model, fast), optimizers, strict=True))
        assert relative(got, wanted) < 1e-5
    model.train(), fast.train()
    wanted, got = (train(one, by, x, y) for one, by in zip((model, fast), optimizers, strict=True))
    assert relative(got, wanted) < 1e-5
    assert relative(fast.eval()(x), model.eval()(x)) < 1e-5


@pytest.mark.parametrize("cls", [models.Pair, models.WithAct])
def test_who_trains_on_in_eval_is_told_that_the_bias_is_lost(cls: type[nn.Module]) -> None:
    model = cls().train()
    fast = folded(model, image(4, 3, 8, 8))
    fast.bn.eval()
    assert relative(fast(image()), copy.deepcopy(model).eval()(image())) < 1e-5
    fast.bn.train()
    fast(image(4, 3, 8, 8)).sum().backward()
    fast.bn.eval()
    with torch.no_grad():
        fast(image())
    with pytest.warns(UserWarning, match="through bn.* in eval mode, where it would train the bias of conv"):
        pickle.loads(pickle.dumps(fast))(image()).sum().backward()
    with pytest.warns(
        UserWarning, match=r"isn't trained\. To train with this BatchNorm in eval mode, put it in eval mode before"
    ):
        fast(image()).sum().backward()
    # It warns only once.
    fast(image()).sum().backward()


@pytest.mark.parametrize("owner", ["conv", "bn"])
def test_a_weight_that_is_computed_at_every_access_isnt_asked_for(owner: str) -> None:
    """In training, each access to a weight with spectral_norm or a counter changes the caller's buffers."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return weight * 2

    model = models.Pair().train()
    module = model.get_submodule(owner)
    if owner == "conv":
        nn.utils.parametrizations.spectral_norm(module)
    else:
        nn.utils.parametrize.register_parametrization(module, "weight", Counted())
    before = tree_of(model)
    fast = optimize(model, ["fold-conv-bias"], mode="training", example_inputs=(image(4, 3, 8, 8),))
    check_same(before, tree_of(model), "the original is another")
    (record,) = report_of(fast).passes
    assert record.status == "unchanged"


def test_a_bias_with_hooks_is_left_alone() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = models.Pair().train()
        getattr(model.conv.bias, register)(lambda tensor: None)
        tree, context = captured(model, image(4, 3, 8, 8), mode="training")
        (skip,) = FoldConvBias().run(tree, context).skips
        assert skip.reason == "its bias has hooks, which see its gradient"


class AuxiliaryHead(models.Pair):
    """Has a head that runs only in training."""

    def more(self) -> None:
        self.aux, self.aux_bn = nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.bn(self.conv(x))
        return (y, self.aux_bn(self.aux(x))) if self.training else y


class OtherwiseInEval(models.Pair):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.conv(x)
        return self.bn(y) if self.training else y


class AlsoInEval(models.Pair):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.conv(x)
        z = self.bn(y)
        return z if self.training else z + y


class ByFunctions(models.Functional):
    def more(self) -> None:
        super().more()
        self.b = nn.Parameter(torch.tensor([0.9, -0.7, 0.6, 0.8]))

    def forward(self, x: torch.Tensor) -> Any:
        y = F.conv2d(x, self.w, self.b)
        return F.batch_norm(y, self.mean, self.var, self.gain, None, self.training).relu()


@pytest.mark.parametrize("cls", [AuxiliaryHead, *TRAINED])
def test_folds_in_every_spelling_and_answers_in_both_modes(cls: type[nn.Module]) -> None:
    model = cls().train()
    fast = folded(model, image(4, 3, 8, 8))
    x = image(4, 3, 8, 8, seed=5)
    optimizers = sgd(model.parameters()), sgd(fast.parameters())
    for flag in (True, False, True, True, False):
        wanted, got = (pytree.tree_leaves(one.train(flag)(x)) for one in (model, fast))
        assert len(wanted) == len(got)
        assert all(relative(mine, theirs) < 1e-4 for mine, theirs in zip(got, wanted, strict=True))
        if flag:
            for leaves, by in ((wanted, optimizers[0]), (got, optimizers[1])):
                by.zero_grad()
                sum(leaf.square().mean() for leaf in leaves).backward()
                by.step()


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (OtherwiseInEval, "in eval its output doesn't go to bn"),
        (AlsoInEval, "in eval, its output is also used by the root (add)"),
        (
            ByFunctions,
            "it is called as a function, and its weight belongs to the caller in training: nothing can guard its "
            "output",
        ),
    ],
)
def test_what_differs_between_the_modes_is_refused(cls: type[nn.Module], reason: str) -> None:
    model = cls().train()
    fast = optimize(model, ["fold-conv-bias"], mode="training", example_inputs=(image(4, 3, 8, 8),))
    record = report_of(fast).passes[0]
    assert (record.status, [skip.text for skip in record.skips]) == ("unchanged", [reason])
    x = image(4, 3, 8, 8, seed=5)
    assert torch.equal(fast.eval()(x), copy.deepcopy(model).eval()(x))


class AloneInEval(AuxiliaryHead):
    """In eval mode, a data-dependent branch calls a convolution without its BatchNorm."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.bn(self.conv(x))
        if self.training:
            return y, self.aux_bn(self.aux(x))
        return (y, self.aux(x)) if x.sum() < 1e6 else y


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (OtherwiseInEval, "in eval its output doesn't go to bn"),
        (AlsoInEval, "in eval, its output is also used by the root (add)"),
        (AloneInEval, "in eval its output doesn't go to aux_bn"),
    ],
)
def test_what_differs_between_the_modes_is_refused_by_structure(cls: type[nn.Module], reason: str) -> None:
    model = cls().train()
    fast = optimize(model, ["fold-conv-bias"], mode="training", example_inputs=(image(4, 3, 8, 8),))
    assert reason in [skip.text for skip in report_of(fast).passes[0].skips]
    x = image(4, 3, 8, 8, seed=5)
    wanted, got = (pytree.tree_leaves(one.eval()(x)) for one in (copy.deepcopy(model), fast))
    assert all(torch.allclose(mine, theirs, atol=1e-5) for mine, theirs in zip(got, wanted, strict=True))


def test_the_original_s_parameters_are_refused_by_functional_call() -> None:
    model = models.Pair().train()
    fast = folded(model, image(4, 3, 8, 8))
    with pytest.raises(UnseenCall, match="conv has a different weight or bias"):
        functional_call(fast, dict(model.named_parameters()), (image(),))
    own = {name: tensor.detach().clone() for name, tensor in (*fast.named_parameters(), *fast.named_buffers())}
    assert torch.equal(functional_call(fast, own, (image(),)), fast(image()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_of_a_checkpoint(reentrant: bool) -> None:
    model = Nets().train()
    x, y = image(6, 3, 8, 8).requires_grad_(), image(6, 3, seed=2)
    fast = folded(model, x.detach())
    for one in (model, fast):
        F.mse_loss(checkpoint(one, x, use_reentrant=reentrant), y).backward()
    theirs = dict(model.named_parameters())
    for name, parameter in fast.named_parameters():
        assert relative(parameter.grad, theirs[name].grad) < 1e-4, name


def test_hooks_on_modules_around_see_what_they_saw() -> None:
    model = Nets().train()
    fast = folded(model, image(6, 3, 8, 8))
    seen: list[tuple[str, torch.Tensor]] = []
    for one in (model, fast):
        one.plain.register_forward_hook(lambda module, args, output: seen.append(("forward", output.detach())))
        one.line.register_full_backward_hook(lambda module, wrt_input, wrt: seen.append(("backward", wrt_input[0])))
        one(image(6, 3, 8, 8)).square().mean().backward()
    kinds, tensors = zip(*seen, strict=True)
    assert kinds == ("forward", "backward") * 2
    assert relative(tensors[2], tensors[0]) < 1e-4
    assert relative(tensors[3], tensors[1]) < 1e-4


def test_under_autocast_it_is_no_further_from_the_truth() -> None:
    model = models.Pair().train()
    x = image(6, 3, 8, 8)
    fast = folded(model, x)
    truth = copy.deepcopy(model).double()(x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs, ours = (one(x).double() for one in (copy.deepcopy(model), fast))
    assert relative(ours, truth) < 2 * relative(theirs, truth)


def test_in_bfloat16() -> None:
    model = models.Pair().to(torch.bfloat16).train()
    x = image(6, 3, 8, 8).to(torch.bfloat16)
    fast = folded(model, x)
    assert fast.state_dict()["conv.bias"].dtype is torch.bfloat16
    assert relative(fast.eval()(x), copy.deepcopy(model).eval()(x)) < 2e-2


def test_a_child_that_is_compiled_gives_its_bias_away() -> None:
    """`torch.compile` calls a stored method, and adds `_orig_mod` to the paths of parameters and buffers."""
    model = nn.Sequential(torch.compile(models.Pair(), backend="eager"), nn.ReLU()).train()
    x, y = image(6, 3, 8, 8), image(6, 4, 8, 8, seed=3)
    fast = folded(model, x)
    (change,) = report_of(fast).passes[0].changes
    assert change.where == "0._orig_mod.conv"
    assert type(fast[0]) is type(model[0])
    optimizers = sgd(model.parameters()), sgd(fast.parameters())
    for _ in range(3):
        wanted, got = (train(one, by, x, y) for one, by in zip((model, fast), optimizers, strict=True))
        assert relative(got, wanted) < 1e-4


@pytest.mark.slow
def test_compiled_it_trains_alike() -> None:
    model = models.Pair().train()
    x, y = image(6, 3, 8, 8), image(6, 4, 8, 8, seed=3)
    fast = folded(model, x, ["fold-conv-bias", "torch-compile:backend=aot_eager"])
    assert [record.status for record in report_of(fast).passes] == ["applied", "applied"]
    optimizers = sgd(model.parameters()), sgd(fast.parameters())
    for _ in range(3):
        wanted, got = (train(one, by, x, y) for one, by in zip((model, fast), optimizers, strict=True))
        assert relative(got, wanted) < 1e-4


def test_copies_train_on() -> None:
    model = models.Nested().train()
    x, y = image(6, 3, 8, 8), image(6, 4, 6, 6, seed=3)
    fast = folded(model, x)
    file = io.BytesIO()
    torch.save(fast, file)
    twins = [
        copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    ]  # fmt: skip
    by = sgd(model.parameters())
    wanted = [train(model, by, x, y) for _ in range(3)]
    model.eval()
    for twin in twins:
        by = sgd(twin.parameters())
        assert all(relative(train(twin, by, x, y), one) < 1e-4 for one in wanted)
        assert relative(twin.eval()(x), model(x)) < 1e-4
        fresh = models.Nested()
        fresh.load_state_dict(twin.state_dict())
        assert relative(fresh.eval()(x), twin(x)) < 1e-5


def test_a_result_has_nothing_more_to_be_moved() -> None:
    model = Nets().train()
    x = image(6, 3, 8, 8)
    once = folded(model, x)
    twice = optimize(once, ["fold-conv-bias"], mode="training", example_inputs=(x,))
    assert report_of(twice).passes[0].status == "unchanged"
    assert list(twice.state_dict()) == list(model.state_dict())
    again = copy.deepcopy(model)
    again.load_state_dict(twice.state_dict())
    assert relative(again.eval()(x), copy.deepcopy(model).eval()(x)) < 1e-4


def test_without_example_inputs_nothing_is_known_of_a_model() -> None:
    model = models.Pair().train()
    fast = optimize(model, ["fold-conv-bias"], mode="training")
    (record,) = report_of(fast).passes
    assert record.status == "unchanged"
    assert [skip.text for skip in record.skips] == ["it needs a run: add example inputs"]
    x = image(4, 3, 8, 8)
    assert torch.equal(fast(x), model(x))


@pytest.mark.parametrize("cls", TRAINED)
def test_what_was_trained_is_folded_for_inference(cls: type[nn.Module]) -> None:
    x = image(4, 3, 8, 8)
    trained = optimize(cls().train(), ["fold-conv-bias"], mode="training", example_inputs=(x,)).eval()
    deployed = optimize(trained, ["fold-conv-bn"], example_inputs=(x,))
    assert report_of(deployed).passes[0].status == "applied"
    for mine, theirs in zip(_flat(trained(x)), _flat(deployed(x)), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)


def test_what_was_trained_is_folded_over_moves_of_functions() -> None:
    class Moved(models.Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 1e9:
                return x
            return self.bn(torch.swapaxes(torch.swapaxes(self.conv(x), 2, 3), 2, 3))

    x = image(4, 3, 8, 8)
    trained = optimize(Moved().train(), ["fold-conv-bias"], mode="training", example_inputs=(x,)).eval()
    deployed = optimize(trained, ["fold-conv-bn"], example_inputs=(x,))
    assert [len(report_of(result).passes[0].changes) for result in (trained, deployed)] == [1, 1]
    torch.testing.assert_close(deployed(x), trained(x), rtol=1e-4, atol=1e-5)


def test_where_checkpoints_hold_a_mean_twice_its_bias_stays() -> None:
    class Norm(nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, 1e-5
            )

    model = models.Pair().train()
    model.bn = model.alias = Norm(4)
    fast = optimize(model, ["fold-conv-bias"], mode="training", example_inputs=(image(4, 3, 8, 8),))
    (record,) = report_of(fast).passes
    assert [skip.text for skip in record.skips] == ["checkpoints hold its tensors under two names, bn and alias"]
    fast.load_state_dict(model.state_dict())


def test_where_checkpoints_dont_reach_a_bias_stays() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [models.Pair()]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layers[0](x)
            return y

    x = image(4, 3, 8, 8)
    model = Listed().train()
    fast = optimize(model, ["fold-conv-bias"], mode="training", example_inputs=(x,))
    (record,) = report_of(fast).passes
    assert record.status == "unchanged"
    assert [skip.text for skip in record.skips] == [
        "layers[0].conv is in a plain container, where checkpoints don't find it: put it into an nn.ModuleList"
    ]


def _flat(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def test_conversion_to_synced_norms_comes_before() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(models.Pair().train())
    x = image(4, 3, 8, 8)
    fast = folded(model, x)
    assert type(fast.bn) is nn.SyncBatchNorm
    assert relative(fast(x), model(x)) < 1e-4
    assert relative(fast.eval()(x), model.eval()(x)) < 1e-4
    with pytest.raises(UnseenCall, match="its output was used without it"):
        nn.SyncBatchNorm.convert_sync_batchnorm(folded(models.Pair().train(), x))(x)


def test_keeps_the_contract_in_training() -> None:
    for cls in (models.Pair, models.AcrossModules, models.Island):
        done = check_pass(FoldConvBias(), cls().train(), (image(4, 3, 8, 8),), mode="training")
        assert len(done.changes) == 1, cls


@pytest.mark.parametrize("cls", [models.IslandRawOutput, models.IslandBesides, models.IslandFedFromElsewhere])
def test_in_training_too_it_needs_its_norm_in_every_branch(cls: type[nn.Module]) -> None:
    fast = folded(cls().train(), image(4, 3, 8, 8))
    for flag in (True, False):
        with pytest.raises(UnseenCall, match="folded together"):
            fast.train(flag)(FAR)


def reset(model: Any) -> None:
    model.bn.reset_running_stats()


def reset_all(model: Any) -> None:
    model.bn.reset_parameters()


def load_and_reset(model: Any) -> None:
    """Load a checkpoint with another bias, and reset the statistics, which keeps this bias."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        state = enliven(models.Pair()).state_dict()
    state["conv.bias"] = state["conv.bias"] + 3
    model.load_state_dict(state)
    model.bn.reset_running_stats()


@pytest.mark.parametrize("change", [reset, reset_all, load_and_reset])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_reset_of_the_statistics_does_not_forget_the_bias(change: Callable[[Any], None], steps: int) -> None:
    model = models.Pair().train()
    x = image(6, 3, 8, 8)
    fast = folded(model, x)
    for twin in (pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast).double(), copy.deepcopy(fast), fast):
        wanted, got = copy.deepcopy(model).to(twin.bn.weight.dtype), twin
        for one in (wanted, got):
            change(one)
            for _ in range(steps):
                one.train()(x.to(one.bn.weight.dtype))
        inputs = image(seed=7).to(twin.bn.weight.dtype)
        assert relative(got.eval()(inputs), wanted.eval()(inputs)) < 1e-5
        assert got.bn.num_batches_tracked == wanted.bn.num_batches_tracked == steps
    wanted.conv.bias = None
    assert relative(wanted(inputs), got(inputs)) > 1e-2, "this bias does nothing to be forgotten"


class AsksForTheBias(models.Pair):
    """Uses the convolution's bias directly, in branches that no run takes."""

    def forward(self, x: torch.Tensor, branch: str = "") -> torch.Tensor:
        if branch == "convolves":
            return F.conv2d(x, self.conv.weight, self.conv.bias)
        y = self.bn(self.conv(x))
        if branch == "sums":
            return y + self.conv.bias.sum()
        if branch == "detaches":
            return F.conv2d(x, self.conv.weight.detach(), self.conv.bias.detach())
        return y * 2 if branch == "asks" and self.conv.bias is None else y


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_the_bias_is_guarded_in_every_branch(mode: Mode) -> None:
    model = AsksForTheBias().train(mode == "training")
    x = image(4, 3, 8, 8)
    fast = optimize(model, ["fold-conv-bias"], mode=mode, example_inputs=(x,))
    assert len(report_of(fast).passes[0].changes) == 1
    assert "conv.bias" not in dict(fast.named_parameters())
    model.eval()
    for twin in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        twin.eval()
        assert torch.allclose(twin(x, "asks"), model(x, "asks"), atol=1e-5)
        for branch in ("convolves", "sums", "detaches"):
            with pytest.raises(UnseenCall, match="conv was changed"):
                twin(x, branch)
        with pytest.raises(UnseenCall, match="conv was changed"):
            nn.init.zeros_(twin.conv.bias)
        with pytest.raises(UnseenCall, match="conv was changed"):
            copy.deepcopy(twin).conv.reset_parameters()


def test_in_inference_the_moved_mean_is_neither_written_nor_read() -> None:
    fast = optimize(models.Pair().eval(), ["fold-conv-bias"], example_inputs=(image(),))
    for use in (reset, reset_all, lambda one: one.bn.running_mean.zero_()):
        with pytest.raises(UnseenCall, match="bn was changed"):
            use(copy.deepcopy(fast))
    with pytest.raises(UnseenCall, match="bn was changed"), a_forward_runs():
        np.asarray(fast.bn.running_mean)


def test_a_later_fold_gives_the_layer_a_bias_again() -> None:
    model = models.Pair().eval()
    fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(image(),))
    assert fast.conv.bias is dict(fast.named_parameters())["conv.bias"]
    assert torch.allclose(fast(image(seed=7)), model(image(seed=7)), atol=1e-5)


class Transposed(nn.Module):
    """Calls a transposed convolution with an output size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(3, 4, 3, stride=2)
        self.bn = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        enliven(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn(self.conv(x, output_size=(18, 18)))
        return self.norm(self.linear(y.mean((2, 3))))


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_captured_layers_compute_without_the_placeholder(mode: Mode) -> None:
    model = Transposed().train(mode == "training")
    x = image(4, 3, 8, 8)
    fast = optimize(model, ["fold-conv-bias"], mode=mode, example_inputs=(x,)).eval()
    assert len(report_of(fast).passes[0].changes) == 2
    wanted = copy.deepcopy(model).eval()(x)
    for run in (fast, torch.compile(fast, backend="eager", fullgraph=True)):
        assert torch.allclose(run(x), wanted, atol=1e-5)
    exported = torch.export.export(fast, (x,))
    assert torch.allclose(exported.module()(x), wanted, atol=1e-5)


# ------------------------------------------------------------------------------------- wrong passes


@dataclass(frozen=True)
class MovesTheMean(TensorPass):
    """Moves the mean by the bias times a factor."""

    name: ClassVar[str] = "moves-the-mean"
    factor: float = 1.0

    def rewrite(self, model: TensorRewriter, context: Context) -> None:
        for pair in model.pairs():
            moved = pair.affine.mean.value - self.factor * pair.conv.bias_value.detach()
            with model.change(pair.conv, "bias moved by a factor", pair):
                model.move_bias(pair, moved, trained=False)


@pytest.mark.parametrize(("factor", "momentum"), [(0.0, 0.1), (0.99, 0.1), (1.0, 0.1), (2.0, 1.0)])
def test_a_mean_that_is_moved_wrongly_is_found(factor: float, momentum: float) -> None:
    """In training, no output shows the error; with momentum 1, the statistics after a step don't either."""
    model = models.Pair().train()
    model.bn.momentum = momentum
    fast = optimize(model, [MovesTheMean(factor)], mode="training", example_inputs=(image(4, 3, 8, 8),))
    (record,) = report_of(fast).passes
    assert record.status == ("applied" if factor == 1.0 else "rolled-back"), record.reason
    if record.status == "rolled-back":
        assert "bias moved by a factor" in record.reason
        assert fast.conv.bias is model.conv.bias
        assert fast.bn.running_mean is model.bn.running_mean


def test_a_bias_that_has_a_gradient_is_missed() -> None:
    model = models.Pair().train()
    model.bn.eval()
    fast = optimize(model, [MovesTheMean()], mode="training", example_inputs=(image(4, 3, 8, 8),))
    (record,) = report_of(fast).passes
    assert (record.status, record.reason) == (
        "rolled-back",
        "The candidate no longer has the parameter conv.bias, whose gradient in the original isn't zero.",
    )


def test_the_real_pass_with_a_mistake_in_its_algebra_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("passes.fold_conv_bias.mean_without", lambda mean, bias: mean - 2 * bias.detach())
    model = models.Pair().train()
    fast = optimize(model, ["fold-conv-bias"], mode="training", example_inputs=(image(4, 3, 8, 8),))
    record = report_of(fast).passes[0]
    assert record.status == "rolled-back"
    assert record.reason.startswith("conv (bias moved into the running mean of bn): ")
