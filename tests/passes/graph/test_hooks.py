"""Hooks that modules of a result get later run, as in the model itself."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import optimize

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.hidden = [nn.Tanh()]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.hidden[0](self.body(x))
        return y


@pytest.fixture(scope="module")
def made() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = enliven(Net()).eval()
    return model, optimize(model, ["fold-conv-bn"], example_inputs=X)


@pytest.fixture
def pair(made: Any) -> tuple[Any, Any]:
    return copy.deepcopy(made)


def doubled(*args: Any) -> Any:
    return args[-1] * 2


def test_a_hook_sees_the_value_of_its_own_layer(pair: Any) -> None:
    model, fast = pair
    with torch.no_grad():
        fast(X)
        seen: list[Tensor] = []
        handle = fast.body[0].register_forward_hook(lambda module, args, output: seen.append(output))
        torch.testing.assert_close(fast(X), model(X))
        torch.testing.assert_close(seen[0], model.body[0](X))
        handle.remove()
        torch.testing.assert_close(fast(X), model(X))
        assert len(seen) == 1


REGISTER: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(doubled),
    "forward with kwargs": lambda module: module.register_forward_hook(doubled, with_kwargs=True),
    "forward pre": lambda module: module.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "full backward": lambda module: module.register_full_backward_hook(lambda *_: None),
    "by hand": lambda module: module._forward_hooks.update({-1: doubled}),
}


@pytest.mark.parametrize(
    ("path", "kind"),
    [*(("body.0", kind) for kind in REGISTER), *((path, "forward") for path in ("body.2", "body", "hidden"))],
)
def test_every_kind_of_hook_runs_on_every_module(pair: Any, path: str, kind: str) -> None:
    """Also on one in a plain list, which is no part of the tree."""
    model, fast = pair
    with torch.no_grad():
        fast(X)
        for one in (model, fast):
            REGISTER[kind](one.hidden[0] if path == "hidden" else one.get_submodule(path))
        torch.testing.assert_close(fast(X), model(X))


@pytest.mark.parametrize("before", [False, True])
def test_a_hook_of_a_module_that_replaces_another_runs(pair: Any, before: bool) -> None:
    model, fast = pair
    new = nn.ReLU()
    new.register_forward_hook(doubled)
    with torch.no_grad():
        if before:
            fast(X)
        for one in (model, fast):
            one.body[2] = new
        torch.testing.assert_close(fast(X), model(X))
        torch.testing.assert_close(fast(X), model(X))


def test_hooks_that_the_model_had_are_part_of_the_graphs() -> None:
    torch.manual_seed(0)
    model = enliven(Net()).eval()
    model.body[2].register_forward_hook(doubled)
    fast = optimize(model, ["fold-conv-bn"], example_inputs=X)
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
        fast.body[2]._forward_hooks.clear()
        model.body[2]._forward_hooks.clear()
        torch.testing.assert_close(fast(X), model(X))
