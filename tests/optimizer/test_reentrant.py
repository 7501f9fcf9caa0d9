"""Gradients of models that hold a reentrant checkpoint."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from folding_models import Pair, image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optimize_export.errors import LoadError
from optimizer import check_parity, optimize, report_of
from optimizer.model.inputs import Call
from optimizer.parity.float64 import Float64Mode
from optimizer.parity.observe import Observation, observe

# A reentrant checkpoint warns in each run without gradients, and comparisons include such runs.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x)).tanh()


class Checkpointed(nn.Module):
    """`how` is the checkpoint around the part: "plain" (none), "other" (not reentrant) or "reentrant"."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.stem, self.part, self.head, self.idle = nn.Linear(8, 8), Part(), nn.Linear(8, 2), nn.Linear(2, 2)
            # A module whose parameters aren't in `parameters()`.
            self.listed = [Part()]

    def inner(self, x: Tensor) -> Tensor:
        return self.listed[0](self.part(x)).sin()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.how == "plain":
            return self.head(self.inner(x))
        return self.head(checkpoint(self.inner, x, use_reentrant=self.how != "other"))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def seen(target: Callable[..., Any], x: Tensor = X, **options: Any) -> Observation:
    return observe(target, Call((x,), {}), seed=1, training=True, **options)


def marked(model: Checkpointed) -> list[tuple[Tensor, Tensor | None]]:
    """Set a gradient for each parameter except the first; return all parameters with their gradients."""
    parameters = [*model.parameters(), *model.listed[0].parameters()]
    for parameter in parameters[1:]:
        parameter.grad = torch.full_like(parameter, 3.0)
    return [(parameter, parameter.grad) for parameter in parameters]


def untouched(before: list[tuple[Tensor, Tensor | None]]) -> bool:
    return all(
        parameter.grad is gradient and (gradient is None or bool((gradient == 3).all()))
        for parameter, gradient in before
    )


def test_gradients_are_those_of_the_other_checkpoint() -> None:
    x = X.clone().requires_grad_()
    got, wanted = seen(Checkpointed("reentrant").train(), x), seen(Checkpointed("other").train(), x)
    assert got.values.keys() == wanted.values.keys()
    assert {"gradient of x", "gradient of part.linear.weight", "gradient of idle.bias"} <= got.values.keys()
    for name, value in wanted.values.items():
        torch.testing.assert_close(got.values[name], value, rtol=1e-6, atol=1e-7)
        assert (value != 0).any() == ("idle" not in name)


def test_what_is_computed_anew_is_in_float64() -> None:
    got = seen(Checkpointed("reentrant").train(), mode=Float64Mode(leaf_parameters=True))
    wanted = seen(Checkpointed("plain").train(), mode=Float64Mode(leaf_parameters=True))
    for name, value in wanted.values.items():
        assert got.values[name].dtype is torch.float64
        torch.testing.assert_close(got.values[name], value, rtol=1e-12, atol=1e-13)


def test_both_kinds_are_compared_in_training() -> None:
    model, other = Checkpointed("reentrant").train(), Checkpointed("plain").train()
    before = marked(model)
    for reference, candidate in ((model, other), (other, model)):
        report = check_parity(reference, candidate, (X,), mode="training")
        assert report.ok, report
        assert report.reference == "float64"
        assert report.notes == ()
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.part.linear.weight[0] *= 1.01
    assert check_parity(model, wrong, (X,), mode="training").verdict == "failed"
    assert untouched(before)


def test_a_function_that_holds_one_is_refused() -> None:
    """For a function it is unknown which parameters would get gradients from the backward pass."""
    model = Checkpointed("reentrant").train()
    before = marked(model)
    with pytest.raises(LoadError, match="pass the module itself"):
        seen(lambda x: model(x), X.clone().requires_grad_())
    assert untouched(before)


def test_every_gradient_is_put_back_after_an_error() -> None:
    model = Checkpointed("reentrant").train()
    before = marked(model)
    # The hook raises when backward recomputes the checkpoint; by then `head` has its gradient.
    model.listed[0].register_forward_hook(lambda *_: 1 / 0 if torch.is_grad_enabled() else None)
    with pytest.raises(ZeroDivisionError):
        seen(model)
    assert untouched(before)


class Product(torch.autograd.Function):
    """As in compiled code, no torch function mode sees the use of its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch._C.DisableTorchFunction():
            return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


def test_what_no_mode_sees_has_its_gradient_too() -> None:
    class Products(Checkpointed):
        def inner(self, x: Tensor) -> Tensor:
            return Product.apply(Product.apply(x, self.part.linear.bias), self.listed[0].linear.bias)

    model = Products("reentrant").train()
    before = marked(model)
    got, wanted = seen(model), seen(Products("other").train())
    assert untouched(before)
    for name, value in wanted.values.items():
        torch.testing.assert_close(got.values[name], value, rtol=1e-6, atol=1e-7)
    for name in ("part.linear.bias", "stem.weight"):
        assert wanted.values[f"gradient of {name}"].any()


@pytest.mark.parametrize("of", ["head.weight", "listed"])
def test_a_hook_that_would_step_is_not_run(of: str) -> None:
    model = Checkpointed("reentrant").train()
    ran: list[Tensor] = []
    parameter = model.listed[0].linear.weight if of == "listed" else model.get_parameter(of)
    parameter.register_post_accumulate_grad_hook(ran.append)
    before = marked(model)
    assert report_of(optimize(model, ["fold-conv-bias"], mode="training", example_inputs=(X,))).verified
    assert not ran
    assert untouched(before)
    with pytest.raises(LoadError, match="and a hook that runs when a gradient is computed"):
        seen(model)
    assert not ran
    assert untouched(before)


class Pairs(Pair):
    """One pair outside the checkpoint, one inside it."""

    def more(self) -> None:
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.bn(self.conv(x)), use_reentrant=True)


def test_a_model_with_a_reentrant_checkpoint_is_optimized_and_trains_the_same() -> None:
    model = Pairs().train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    twin = copy.deepcopy(model)
    fast = optimize(model, ["fold-conv-bias"], mode="training", example_inputs=(image(4, 3, 8, 8),))
    # torch.compile's front end captures a step with a reentrant checkpoint that raises in the backward pass.
    (record,) = report_of(fast).passes
    assert record.status in ("applied", "rolled-back")
    assert report_of(fast).verified
    assert all(parameter.grad is old for parameter, old in zip(model.parameters(), gradients, strict=True))
    assert all(bool((old == 1).all()) for old in gradients)
    losses = []
    for trained in (twin, fast):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            loss = trained(image(4, 3, 8, 8, seed=step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    torch.testing.assert_close(losses[:3], losses[3:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(twin.eval()(image()), fast.eval()(image()), rtol=1e-4, atol=1e-5)
