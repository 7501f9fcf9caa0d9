"""A state dict that is loaded into a result counts there, and never reaches the caller's model."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from folding_models import Pair, image
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import optimize

X = image(2, 3, 8, 8)


class Net(nn.Module):
    """A folded pair, and a weight that is registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(self.pair(x).mean((2, 3))).relu())


def _built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return enliven(Net()).eval()


@pytest.fixture
def pair() -> tuple[Any, Any]:
    model = _built(0)
    return model, optimize(model, ["fold-conv-bn"], example_inputs=(X,))


def _addresses(module: nn.Module) -> set[int]:
    return {parameter.data_ptr() for parameter in module.parameters()}


def test_names_values_and_order_are_those_of_the_model(pair: Any) -> None:
    model, fast = pair
    mine, theirs = fast.state_dict(), model.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert _addresses(fast) == _addresses(model)
    assert not set(map(id, fast.parameters())) & set(map(id, model.parameters()))


def _by_copying(fast: nn.Module, state: dict[str, Tensor]) -> None:
    fast.load_state_dict(state)


def _by_assigning(fast: nn.Module, state: dict[str, Tensor]) -> None:
    fast.load_state_dict(state, assign=True)


def _by_parts(fast: Any, state: dict[str, Tensor]) -> None:
    for name, module in fast.named_children():
        own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
        module.load_state_dict(own)


@pytest.mark.parametrize("load", [_by_copying, _by_assigning, _by_parts])
def test_another_state_dict_counts_and_leaves_the_model(load: Callable[..., None], pair: Any) -> None:
    model, fast = pair
    before, other = copy.deepcopy(model.state_dict()), _built(1)
    with torch.no_grad():
        fast(X)
        load(fast, copy.deepcopy(other.state_dict()))
        torch.testing.assert_close(fast(X), other(X), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not _addresses(fast) & _addresses(model)
    if load is not _by_assigning:
        assert fast.one.weight is fast.other.weight


def test_copies_have_storage_of_their_own(pair: Any) -> None:
    model, fast = pair
    other = _built(1)
    for twin in (
        copy.deepcopy(fast),
        pickle.loads(pickle.dumps(fast)),
        optimize(fast, ["fold-conv-bn"], example_inputs=(X,)),
    ):
        before = copy.deepcopy(fast.state_dict())
        twin.load_state_dict(other.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(twin(X), other(X), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)
        assert all(torch.equal(value, before[name]) for name, value in fast.state_dict().items())


def test_a_failed_load_leaves_the_model(pair: Any) -> None:
    model, fast = pair
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        fast.load_state_dict({"one.bias": torch.ones(4)})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_result_for_inference_needs_no_gradients(pair: Any) -> None:
    model, fast = pair
    assert not any(parameter.requires_grad for parameter in fast.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    x = X.clone().requires_grad_()
    (mine,), (theirs,) = (torch.autograd.grad(one(x).square().sum(), x) for one in (fast, model))
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    fast.requires_grad_()
    found = [torch.autograd.grad(one(X).square().sum(), list(one.parameters())) for one in (fast, model)]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_writes_by_hand_into_weights_count_on_both_sides_and_those_into_buffers_on_one(pair: Any) -> None:
    """Weights are shared until something is loaded. Buffers are not, because a forward may write to them."""
    model, fast = pair
    with torch.no_grad():
        for one, other in ((model, fast), (fast, model)):
            next(one.parameters()).mul_(1.5)
            torch.testing.assert_close(next(other.parameters()), next(one.parameters()))
            torch.testing.assert_close(fast(X), model(X))
        for one, other in ((model, fast), (fast, model)):
            buffer = next(each for each in one.buffers() if each.is_floating_point())
            before = [each.clone() for each in other.buffers()]
            buffer.add_(0.5)
            assert all(map(torch.equal, before, other.buffers()))


def test_weights_over_one_memory_stay_over_one_memory() -> None:
    model = _built(0)
    flat = torch.randn(40)
    model.one.weight.data, model.one.bias.data = flat[:16].view(4, 4).t(), flat[12:16]
    fast = optimize(model, example_inputs=(X,))
    fast.load_state_dict(fast.state_dict())
    assert not _addresses(fast) & _addresses(model)
    with torch.no_grad():
        fast.one.bias.fill_(3)
    assert fast.one.weight[:, 3].tolist() == [3] * 4
    assert not (flat == 3).any()
