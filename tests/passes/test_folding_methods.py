"""Folded layers that a model can run past their folded forward: by a stored method, or as a function of the class."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_models import Pair, image
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import optimize, report_of
from passes.errors import UnseenCall

# How a model stores a way to run one of its layers, and how it runs the layer then.
KEPT: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Tensor], Any]]] = {
    "method": (lambda m: m.conv.forward, lambda m, x: m.kept(x)),
    "in a list": (lambda m: [m.conv.forward], lambda m, x: m.kept[0](x)),
    "in a dict": (lambda m: {"a": (m.conv.forward,)}, lambda m, x: m.kept["a"][0](x)),
    "in an object": (lambda m: types.SimpleNamespace(run=m.conv.forward), lambda m, x: m.kept.run(x)),
    "partial": (lambda m: functools.partial(m.conv.forward), lambda m, x: m.kept(x)),
    "partial of the class": (lambda m: functools.partial(nn.Conv2d.forward, m.conv), lambda m, x: m.kept(x)),
    "method of the class": (lambda m: types.MethodType(nn.Conv2d.forward, m.conv), lambda m, x: m.kept(x)),
    "inner method": (lambda m: m.conv._conv_forward, lambda m, x: m.kept(x, m.conv.weight, None)),
    "norm": (lambda m: m.bn.forward, lambda m, x: m.kept(torch.cat([x, x[:, :1]], 1))),
    "on the layer itself": (lambda m: setattr(m.conv, "old", m.conv.forward), lambda m, x: m.conv.old(x)),
    "in the code": (lambda m: None, lambda m, x: nn.Conv2d.forward(m.conv, x)),
    "in the code, by the name of the class": (lambda m: None, lambda m, x: Conv2d.forward(m.conv, x)),
    "in a kept function": (lambda m: lambda conv, x: nn.Conv2d.forward(conv, x), lambda m, x: m.kept(m.conv, x)),
}
Conv2d = nn.Conv2d


class Branch(Pair):
    """Runs a layer in another way in a branch that no example input takes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        keep, self.run = KEPT[kind]
        self.kept = keep(self)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) if x.shape[0] != 5 else self.run(self, x)


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("name", ["fold-conv-bn", "fold-conv-bias"])
def test_a_layer_that_is_run_past_its_forward_raises(kind: str, name: str) -> None:
    model = enliven(Branch(kind)).eval()
    fast = optimize(model, [name], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    for size in (1, 2):
        torch.testing.assert_close(fast(image(size, 3, 8, 8)), model(image(size, 3, 8, 8)), rtol=1e-4, atol=1e-5)
    with pytest.raises(UnseenCall, match="folded together"):
        fast(image(5, 3, 8, 8))


@pytest.mark.parametrize("name", ["fold-conv-bn", "fold-conv-bias"])
def test_a_kept_function_goes_on_with_the_originals_layer(name: str) -> None:
    class Keeping(Branch):
        def __init__(self) -> None:
            super().__init__("method")
            run = self.conv.forward
            self.kept = lambda x: run(x)

    model = enliven(Keeping()).eval()
    fast = optimize(model, [name], example_inputs=(image(),))
    for size in (1, 2):
        torch.testing.assert_close(fast(image(size, 3, 8, 8)), model(image(size, 3, 8, 8)), rtol=1e-4, atol=1e-5)
    assert torch.equal(fast(image(5, 3, 8, 8)), model(image(5, 3, 8, 8)))


class Shown(Pair):
    def __init__(self, keep: Callable[[Any], Any]) -> None:
        super().__init__()
        self.kept = keep(self)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) if x.shape[0] != 5 else self.kept(x)


@pytest.mark.parametrize(
    "keep", [lambda m: m.conv.__call__, lambda m: functools.partial(m.conv.__call__), lambda m: m.conv._call_impl]
)
def test_a_kept_call_is_guarded_as_any_call(keep: Callable[[Any], Any]) -> None:
    model = enliven(Shown(keep)).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    assert torch.allclose(fast(image()), model(image()), atol=1e-5)
    with pytest.raises(UnseenCall):
        fast(image(5, 3, 8, 8)) + 1


def _own_hook(m: Any) -> None:
    m.conv.register_load_state_dict_post_hook(m.conv.forward)


def _of_another(m: Any) -> None:
    m.other = nn.Conv2d(3, 4, 1)
    m.kept = m.other.forward


def _of_the_model(m: Any) -> None:
    m.kept = [m.forward, m.parameters]


def _own_kind(m: Any) -> None:
    class Own(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return nn.Conv2d.forward(self, x)

    m.other = Own(3, 4, 1)


@pytest.mark.parametrize("change", [_own_hook, _of_another, _of_the_model, _own_kind])
def test_what_runs_other_modules_takes_no_fold_away(change: Callable[[Any], None]) -> None:
    model = Pair()
    change(model)
    enliven(model).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    assert torch.allclose(fast(image()), model(image()), atol=1e-5)


class ByFunctions(Pair):
    def forward(self, x: Tensor) -> Any:
        y = F.conv2d(x, self.conv.weight, self.conv.bias)
        return F.batch_norm(y, self.bn.running_mean, self.bn.running_var, self.bn.weight, self.bn.bias)  # type: ignore[arg-type]


class Around(nn.Module):
    def __init__(self, keep: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner = ByFunctions()
        self.kept = keep(self.inner)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) if x.shape[0] != 5 else self.kept(x)


def test_a_kept_forward_that_calls_the_functions_is_folded_too() -> None:
    model = enliven(Around(lambda inner: inner.forward)).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    for size in (1, 5):
        torch.testing.assert_close(fast(image(size, 3, 8, 8)), model(image(size, 3, 8, 8)), rtol=1e-4, atol=1e-5)
