"""Save and load checkpoints of a model whose bias was moved into a running mean."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from folding_models import image
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import optimize, report_of
from passes.program.moved_bias import LoadIntoMean, MovedBias, mean_without, moved_biases

State = dict[str, Tensor]


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[0](self.conv(x))


class Net(nn.Module):
    """Two pairs: one inside a child, with its two layers at different depths, and one in the root."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.stem = Stem()
            self.last = nn.Linear(4, 5)
            self.norm = nn.BatchNorm1d(5)
        enliven(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.last(self.stem(x).relu().mean((2, 3))))


class Between(nn.Module):
    """A convolution with its weight registered after its bias, and a functional BatchNorm on buffers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.conv.register_parameter("weight", self.conv._parameters.pop("weight"))
        self.gain = nn.Parameter(torch.tensor([0.5, 1.5, -1.0, 2.0]))
        self.register_buffer("mean", torch.tensor([0.1, -0.2, 0.3, 0.4]))
        self.register_buffer("var", torch.tensor([0.5, 1.5, 2.0, 0.7]))
        self.head = nn.Conv2d(4, 2, 1)
        enliven(self)

    def forward(self, x: Tensor) -> Any:
        y = nn.functional.batch_norm(self.conv(x), self.mean, self.var, self.gain, None, self.training)
        return self.head(y.relu())


X = image(4, 3, 8, 8)


def folded(model: nn.Module) -> nn.Module:
    fast = optimize(copy.deepcopy(model).train(), ["fold-conv-bias"], mode="training", example_inputs=(X,))
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    return fast


@functools.cache
def _template() -> nn.Module:
    return folded(Net())


def folded_net() -> Any:
    """A copy of a folded `Net`, which is folded only once for all tests."""
    return copy.deepcopy(_template())


def agree(model: nn.Module, fast: nn.Module) -> bool:
    """Whether both return close outputs in eval mode; the outputs must not be almost constant."""
    wanted, got = (copy.deepcopy(module).eval()(image(5, 3, 8, 8, seed=3)) for module in (model, fast))
    assert wanted.std() > 0.05
    return bool(torch.allclose(wanted, got, rtol=1e-4, atol=1e-5))


def pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved_and_loaded(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES: list[Callable[[nn.Module], nn.Module]] = [lambda module: module, copy.deepcopy, pickled, saved_and_loaded]


@pytest.mark.parametrize("make", [Net, Between])
def test_the_bias_is_saved_as_zero_where_it_stood(make: type[nn.Module]) -> None:
    model = make()
    fast = folded(model)
    state, wanted = fast.state_dict(), model.state_dict()
    assert list(state) == list(wanted)
    assert all(state[key].shape == wanted[key].shape and state[key].dtype == wanted[key].dtype for key in wanted)
    gone = [bias for bias, _ in moved_biases(fast)]
    assert set(gone) == ({"stem.conv.bias", "last.bias"} if make is Net else {"conv.bias"})
    assert all(not state[path].any() for path in gone)
    assert not set(gone) & {name for name, _ in fast.named_parameters()}


def test_the_bias_has_the_weights_dtype_and_device() -> None:
    fast = folded_net()
    assert fast.double().state_dict()["stem.conv.bias"].dtype is torch.float64
    assert fast.to(torch.bfloat16).state_dict()["last.bias"].dtype is torch.bfloat16
    assert fast.to("meta").state_dict()["last.bias"].is_meta
    assert fast.state_dict(keep_vars=True)["last.bias"].shape == (5,)


@pytest.mark.parametrize("twin_of", COPIES)
@pytest.mark.parametrize("make", [Net, Between])
@pytest.mark.parametrize("assign", [False, True])
def test_there_and_back(make: type[nn.Module], twin_of: Callable[[nn.Module], nn.Module], assign: bool) -> None:
    model = make()
    fast = twin_of(folded(model))
    assert agree(model, fast)
    other = enliven(make(), 5)
    assert not agree(other, fast)
    fast.load_state_dict(other.state_dict(), assign=assign)
    assert agree(other, fast)
    empty = enliven(make(), 7)
    empty.load_state_dict(fast.state_dict(), strict=True, assign=assign)
    assert agree(empty, fast)
    assert agree(other, empty)


def test_loading_writes_to_no_checkpoint() -> None:
    fast, state = folded_net(), Net(3).state_dict()
    before = {key: value.clone() for key, value in state.items()}
    fast.load_state_dict(state)
    assert state.keys() == before.keys()
    assert all(torch.equal(state[key], before[key]) for key in before)


def test_inside_of_a_parent_and_from_a_part() -> None:
    model, fast = Net(), folded_net()
    other = enliven(Net(), 9)
    parent = nn.ModuleDict({"inner": nn.ModuleList([nn.ReLU(), fast])})
    parent.load_state_dict({f"inner.1.{key}": value for key, value in other.state_dict().items()})
    assert agree(other, fast)
    assert list(parent.state_dict()) == [f"inner.1.{key}" for key in model.state_dict()]
    fast = folded(model)
    fast.stem.load_state_dict(other.stem.state_dict())
    model.stem.load_state_dict(other.stem.state_dict())
    assert agree(model, fast)


def test_without_either_nothing_is_moved() -> None:
    model, fast = Net(), folded_net()
    state = {key: value for key, value in model.state_dict().items() if not key.startswith(("stem", "norm", "last.b"))}
    lacking = fast.load_state_dict(state, strict=False)
    assert set(lacking.missing_keys) == set(model.load_state_dict(state, strict=False).missing_keys)
    assert lacking.unexpected_keys == []
    assert agree(model, fast)
    with pytest.raises(RuntimeError, match=r"Missing key.*last.bias"):
        fast.load_state_dict(state)


@pytest.mark.parametrize(("left_out", "told"), [("last.bias", "norm.running_mean"), ("norm.running_mean", "last.bias")])
@pytest.mark.parametrize("strict", [True, False])
def test_one_without_the_other_is_refused(left_out: str, told: str, strict: bool) -> None:
    """The bias that belongs to the loaded mean is unknown: it may be the current one, or zero."""
    fast = folded_net()
    state = {key: value for key, value in Net(2).state_dict().items() if key != left_out}
    with pytest.raises(
        RuntimeError, match=rf"{told} comes without {left_out}.*load both together, into the whole model"
    ):
        fast.load_state_dict(state, strict=strict)


def test_a_part_that_holds_one_of_both_is_refused() -> None:
    fast, other = folded_net(), Net(2)
    with pytest.raises(RuntimeError, match=r"bias comes without stem.norms.0.running_mean.*into stem, or"):
        fast.stem.conv.load_state_dict(other.stem.conv.state_dict())
    with pytest.raises(RuntimeError, match=r"running_mean comes without stem.conv.bias"):
        fast.stem.norms.load_state_dict(other.stem.norms.state_dict())
    # The mean computed during an earlier load isn't reused.
    fast.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match=r"running_mean comes without"):
        fast.norm.load_state_dict(other.norm.state_dict())


def test_what_doesn_t_fit_is_said() -> None:
    fast, state = folded_net(), Net(2).state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for last.bias"):
        fast.load_state_dict(state | {"last.bias": torch.zeros(7)})
    with pytest.raises(RuntimeError, match=r"size mismatch for norm.running_mean"):
        fast.load_state_dict(state | {"norm.running_mean": torch.zeros(7)})
    with pytest.raises(
        RuntimeError, match=r"size mismatch for last.bias: float in the checkpoint, \(5,\) in the model"
    ):
        fast.load_state_dict(state | {"last.bias": 0.5})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*last.scale"):
        fast.load_state_dict(state | {"last.scale": torch.zeros(7)})


def test_without_its_mean_a_bias_is_in_no_checkpoint() -> None:
    """Without running statistics, the BatchNorm uses those of the batch, so the bias has no effect any more."""
    fast = folded_net()
    fast.norm.running_mean = fast.norm.running_var = None
    assert [bias for bias, _ in moved_biases(fast)] == ["stem.conv.bias"]
    state = fast.state_dict()
    assert "last.bias" not in state
    assert fast.load_state_dict(state) == ([], [])


def test_a_bias_that_was_dropped_may_have_any_value() -> None:
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))).train()
    fast = folded(model)
    assert list(moved_biases(fast)) == [("0.bias", None)]
    state = model.state_dict()
    fast.load_state_dict(state | {"0.bias": torch.full((4,), 3.0)})
    assert agree(model, fast)
    fast[0].load_state_dict(model[0].state_dict())
    assert agree(model, fast)
    model.load_state_dict(fast.state_dict())
    assert agree(model, fast)
    with pytest.raises(RuntimeError, match=r'Missing key.*"0.bias"'):
        fast.load_state_dict({key: value for key, value in state.items() if key != "0.bias"})


def test_optimized_once_more_for_inference_its_checkpoints_are_those_of_inference() -> None:
    model, fast = Net(), folded_net()
    slim = optimize(fast, ["fold-conv-bn"], example_inputs=(X,))
    assert report_of(slim).passes[0].status == "applied"
    assert slim.state_dict()["stem.conv.bias"].any()
    assert agree(model, slim)
    twin = copy.deepcopy(slim)
    twin.load_state_dict(slim.state_dict())
    assert agree(model, twin)
    with pytest.raises(RuntimeError, match=r"was folded into another weight"):
        slim.load_state_dict(model.state_dict())
    # The model that `slim` was made from stays unchanged.
    fast.load_state_dict(model.state_dict())
    assert agree(model, fast)


def test_in_inference_loading_what_is_gone_stays_refused() -> None:
    model = Net().eval()
    fast = optimize(model, ["fold-conv-bias"], example_inputs=(X,))
    assert "last.bias" not in fast.state_dict()
    with pytest.raises(RuntimeError, match=r"last.bias was folded into another weight"):
        fast.load_state_dict(model.state_dict())


def test_the_nearest_module_that_holds_both_does_the_moving() -> None:
    fast = folded_net()
    holders = [
        path
        for path, module in fast.named_modules()
        for hook in module._load_state_dict_pre_hooks.values()
        if isinstance(hook, LoadIntoMean)
    ]
    assert sorted(holders) == ["", "stem"]


def test_paths_are_told_from_where_the_tree_is_looked_at() -> None:
    fast = folded_net()
    parent = nn.Sequential(fast)
    assert set(moved_biases(parent)) == {
        ("0.stem.conv.bias", "0.stem.norms.0.running_mean"),
        ("0.last.bias", "0.norm.running_mean"),
    }
    fast.last.bias = nn.Parameter(torch.zeros(5))
    assert [bias for bias, _ in moved_biases(fast)] == ["stem.conv.bias"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_mean_is_moved_in_float64_and_rounded_once(dtype: torch.dtype) -> None:
    mean, bias = (torch.randn(64, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    bias.requires_grad_()
    moved = mean_without(mean, bias)
    assert moved.dtype is dtype
    assert not moved.requires_grad
    assert torch.equal(moved, (mean.double() - bias.detach().double()).to(dtype))


def test_names_before_the_bias_are_known_by_their_owner() -> None:
    conv = nn.Conv2d(1, 2, 1)
    moved = MovedBias(
        ("a.conv", conv, "bias"), ("a.b.norm", nn.BatchNorm2d(2), "running_mean"), (conv, "weight"), torch.zeros(2)
    )
    assert (moved.bias_path, moved.mean_path, moved.holder_path) == ("a.conv.bias", "a.b.norm.running_mean", "a")
    assert moved.before == {"weight"}
    assert not moved.is_gone
