"""Operations that needn't run are left out, and only if no result changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_contract import captured, check_pass, skips
from tiny_models import Net, enliven
from torch import Tensor, nn

from optimizer import optimize, report_of
from passes import FoldConvBn, PassResult, Simplify
from passes.graph import captured as graphs


def around(function: Callable[..., Any], **children: Any) -> nn.Module:
    """A function of the module and its input, after a dropout, so that the pass always has a change to make."""
    held = {"worth": nn.Dropout(), "linear": nn.Linear(6, 6), "weight": nn.Parameter(torch.randn(6, 6))}
    steps = nn.Buffer(torch.arange(6))
    return enliven(Net(lambda m, x: function(m, m.worth(x)), **held, steps=steps, **children)).eval()


def simplified(function: Callable[..., Any], **children: Any) -> PassResult:
    """Run the pass on a module that computes this function, and check the contract of passes."""
    return check_pass(Simplify(), around(function, **children), (torch.randn(4, 6),))


def changes(done: PassResult) -> list[tuple[str, str]]:
    return [(change.where, change.what) for change in done.changes if change.where != "worth"]


# No-ops ---------------------------------------------------------------------------------------------------------------


OFF = "left out, because dropout does nothing in eval"


@pytest.mark.slow
@pytest.mark.parametrize("child", [nn.Dropout(), nn.Dropout(inplace=True), nn.AlphaDropout(), nn.Dropout1d()], ids=str)
def test_a_child_that_does_nothing_is_left_out(child: nn.Module) -> None:
    assert changes(simplified(lambda self, x: self.child(self.linear(x)).relu(), child=child)) == [("child", OFF)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "where"),
    [
        (lambda self, x: F.dropout(self.linear(x), 0.3, self.training).relu(), "dropout"),
        (lambda self, x: torch.dropout(self.linear(x), 0.3, False).relu(), "dropout"),
        (lambda self, x: F.dropout(self.linear(x), 0.0).relu(), "dropout"),
        (lambda self, x: F.alpha_dropout(self.linear(x), 0.3).relu(), "alpha_dropout"),
        (lambda self, x: F.dropout(self.linear(x), p=0.3, training=False, inplace=True).relu(), "dropout"),
        (lambda self, x: self.linear(x)[:].relu(), "getitem"),
        (lambda self, x: self.linear(x)[:, :].relu(), "getitem"),
        (lambda self, x: self.linear(x)[..., :].relu(), "getitem"),
        (lambda self, x: (F.softmax(self.linear(x), -1) * 1).relu(), "mul"),
        (lambda self, x: (F.linear(x, self.weight) / 1).relu(), "truediv"),
        (lambda self, x: (F.linear(x, self.weight) - 0).relu(), "sub"),
        (lambda self, x: F.linear(x, self.weight).mul(1.0).relu(), "mul"),
        (lambda self, x: (x * 1).relu(), "mul"),
        (lambda self, x: F.pad(self.linear(x), (0, 0)).relu(), "pad"),
        (lambda self, x: self.linear(x).float().float().relu(), "float"),
        (lambda self, x: self.linear(x).t().contiguous().contiguous().relu(), "contiguous"),
        (lambda self, x: self.linear(x).relu().relu() + 1, "relu"),
        (lambda self, x: self.linear(x).transpose(0, 1).transpose(1, 0).relu(), "transpose"),
        (lambda self, x: self.linear(x).unsqueeze(-1).squeeze(-1).relu(), "squeeze"),
    ],
)
def test_an_operation_that_does_nothing_is_left_out(function: Callable[..., Any], where: str) -> None:
    done = simplified(function)
    assert (f"the root ({where})", f"{where} left out, because it returns its input") in changes(done)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        # They do something.
        lambda self, x: F.dropout(self.linear(x), 0.3).relu(),
        lambda self, x: F.dropout(self.linear(x), 0.3, True).relu(),
        lambda self, x: self.linear(x)[:-1].relu(),
        lambda self, x: self.linear(x)[None].relu(),
        lambda self, x: self.linear(x)[:, 0].relu(),
        # -0.0 + 0 is 0.0. Products with 1 are left out only for floating-point values.
        lambda self, x: (self.linear(x) + 0).relu(),
        lambda self, x: (self.steps * 1).relu() + x,
        lambda self, x: (F.linear(x, self.weight) * True).relu(),
        lambda self, x: (F.linear(x, self.weight) * 2).relu(),
        lambda self, x: (1 / F.linear(x, self.weight)).relu(),
        lambda self, x: F.pad(self.linear(x), (0, 1)).relu(),
        lambda self, x: F.pad(self.linear(x), (1, 1), mode="reflect").relu(),
        lambda self, x: self.linear(x).double().float().relu(),
        lambda self, x: self.linear(x).transpose(0, 1).relu(),
        lambda self, x: self.linear(x)[None].transpose(0, 1).transpose(1, 2).relu(),
        lambda self, x: self.linear(x).unsqueeze(0).squeeze(1).relu(),
        lambda self, x: self.linear(x).unsqueeze(0).squeeze().relu(),
        lambda self, x: self.linear(x).relu().abs(),
        # They are done twice, with other arguments or random numbers.
        lambda self, x: torch.rand_like(x) * 0 + torch.rand_like(x) * 0 + self.linear(x),
        lambda self, x: F.dropout(x, 0.5) * 0 + F.dropout(x, 0.5) * 0 + self.linear(x),
        lambda self, x: self.linear(x).sum(0) + self.linear(x + 1).sum(1).sum(),
        lambda self, x: x.clamp(0, 1) + x.clamp(0.0, 2),
        lambda self, x: x.clamp(max=1.0) + x.clamp(max=True),
        # They are cheap, drawn, or not the same in each call.
        lambda self, x: x + torch.arange(6),
        lambda self, x: F.linear(x, self.weight.t()),
        lambda self, x: x + (torch.rand(6) * 0).sin().exp().log(),
        # They have an effect, but no user.
        lambda self, x: (x.clone().add_(1), self.linear(x))[1],
        lambda self, x: (torch.rand(2), self.linear(x) + torch.rand(1))[1],
        lambda self, x: (torch._assert(x.size(1) == 6, "six"), self.linear(x))[1],
        lambda self, x: (F.dropout(x, 0.5), self.linear(x))[1],
        lambda self, x: (F.embedding(x.long().clamp(0, 5), self.weight, max_norm=1.0), self.linear(x))[1],
    ],
)
def test_what_is_needed_stays(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    tree, context = captured(around(function), (torch.randn(4, 6),))
    assert changes(Simplify().run(tree, context)) == []


MAY_BE = "or a value that it is computed from, may be written to"
CONSTANT = "the value of exp is the same at every call, but"


def _written_constant(m: Any, x: Tensor) -> Tensor:
    mask = (m.steps / 6).sin().exp()
    mask[0] = 1
    return x * mask


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "where", "reason"),
    [
        (lambda m, x: (y := m.linear(x).tanh(), z := y * 1, z.add_(1), y + z)[3], "mul", MAY_BE),
        (
            lambda m, x: (y := m.linear(x), back := y.transpose(0, 1).transpose(0, 1), y.t_(), back * 2)[3],
            "transpose",
            "the value that transpose returns unchanged may be written to",
        ),
        (lambda m, x: (a := x.relu(), b := x.relu(), a.add_(1), a * b)[3], "relu", MAY_BE),
        (
            lambda m, x: (y := m.linear(x), a := y.sin(), y.add_(1), a * y.sin())[3],
            "sin",
            "sin occurs twice, and its input may be written to in between",
        ),
        (_written_constant, "exp", f"{CONSTANT} may be written to"),
        (
            lambda m, x: x + (m.steps / 6).repeat(2_000_000).exp()[x.size(0)],
            "exp",
            f"{CONSTANT} would take 45 MiB to keep",
        ),
    ],
)
def test_what_may_be_written_to_or_is_large_stays(function: Callable[..., Any], where: str, reason: str) -> None:
    done = simplified(function)
    assert changes(done) == []
    ((place, said),) = skips(done)
    assert place == f"the root ({where})"
    assert reason in said


@pytest.mark.slow
def test_a_copy_that_is_given_out_stays_a_copy() -> None:
    def function(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.softmax(self.linear(x), -1)
        return y, y * 1

    model = around(function)
    fast = optimize(model, ["simplify"], example_inputs=(torch.randn(4, 6),))
    first, second = fast(torch.randn(4, 6))
    assert first.data_ptr() != second.data_ptr()
    reason = "the value of mul leaves the forward, and may be written to outside"
    assert [(skip.where, skip.text) for skip in report_of(fast).passes[0].skips] == [("the root (mul)", reason)]


@pytest.mark.slow
def test_what_is_written_to_behind_a_dropout_is_written_to() -> None:
    done = simplified(lambda m, x: (y := m.linear(x), z := m.child(y), z.add_(1), y * z)[3], child=nn.Dropout())
    assert changes(done) == [("child", OFF)]


@pytest.mark.slow
def test_a_forward_that_asks_a_clock_asks_it_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    def function(self: Any, x: Tensor) -> Tensor:
        return self.child(self.linear(x)) * (1 if time.time() > 0 else 2)

    model, fast = _fast(function, child=nn.Dropout())
    x = torch.randn(3, 6)
    assert torch.equal(fast(x), model(x))
    monkeypatch.setattr(time, "time", lambda: -1.0)
    assert torch.equal(fast(x), model(x))
    assert torch.equal(fast(x), model.linear(x) * 2)


# Duplicates -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (
            lambda m, x: m.linear(x).relu() + m.linear(x).relu() * x.size(0) + x.size(0),
            ["linear computed once instead of twice", "relu computed once instead of twice"],
        ),
        # Equal sizes and views.
        (
            lambda m, x: x.t()[: x.size(1) - 1].exp() * x.t()[: x.size(1) - 1].exp().sum() + m.linear(x).sum(),
            ["exp computed once instead of twice"],
        ),
    ],
)
def test_what_is_done_twice_is_computed_once(function: Callable[..., Any], wanted: list[str]) -> None:
    assert [what for _, what in changes(simplified(function))] == wanted


def test_sizes_that_are_asked_for_twice_or_for_nobody_are_no_reason_to_change_a_forward() -> None:
    def asking(m: Any, x: Tensor) -> Tensor:
        _, width = x.shape
        return x.view(x.size(0), x.size(1)).exp().view(x.size(0), width)

    done = check_pass(Simplify(), Net(asking).eval(), (torch.randn(4, 6),))
    assert changes(done) == skips(done) == []


@pytest.mark.slow
def test_two_values_that_are_given_out_stay_two() -> None:
    fast = optimize(
        around(lambda self, x: (self.linear(x).sin(), self.linear(x).sin())),
        ["simplify"],
        example_inputs=(torch.randn(4, 6),),
    )
    first, second = fast(torch.randn(3, 6))
    first.add_(1)
    assert not torch.equal(first, second)
    assert [change.where for change in report_of(fast).passes[0].changes] == ["worth", "linear, call 2"]


@pytest.mark.slow
def test_a_module_of_the_user_that_does_more_is_called_twice() -> None:
    calls: list[int] = []

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() < 1e9:
                calls.append(1)
            return x.relu()

    done = simplified(lambda self, x: self.child(x) + self.child(x), child=Counting())
    assert changes(done) == []


# Constants ------------------------------------------------------------------------------------------------------------


def _standardized(self: Any, x: Tensor) -> Tensor:
    mean, std = self.weight.mean(1, keepdim=True), self.weight.std(1, keepdim=True)
    return F.linear(x, (self.weight - mean) / std)


def _fast(function: Callable[..., Any], **children: Any) -> tuple[nn.Module, nn.Module]:
    model = around(function, **children)
    return model, optimize(model, ["simplify"], example_inputs=(torch.randn(4, 6),))


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: x + (torch.arange(6) / 6).sin().exp(),
        lambda self, x: x + (self.steps / 6).sin().exp(),
        lambda self, x: x + (torch.arange(6, device=x.device) / 6).sin().exp(),
        lambda self, x: x + self.weight.mean(1).sin().exp() + (self.weight.mean(1).sin() + 1).exp(),
    ],
)
def test_constants_of_any_kind_are_made_once(function: Callable[..., Any]) -> None:
    assert any("on constants computed once for all calls" in what for _, what in changes(simplified(function)))


@pytest.mark.slow
def test_a_constant_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert changes(simplified(_standardized)) == [
        ("the root (truediv)", "4 operations on constants computed once for all calls")
    ]
    _, fast = _fast(_standardized)
    x = torch.randn(3, 6)
    calls: list[int] = []
    compute = graphs.Derived.__call__
    monkeypatch.setattr(graphs.Derived, "__call__", lambda *args: calls.append(1) or compute(*args))
    with torch.no_grad():
        fast(x), fast(x), fast(x)
        assert len(calls) <= 1
        fast.weight.add_(1)
        fast(x), fast(x)
    assert len(calls) <= 2
    assert calls


@pytest.mark.slow
def test_a_constant_that_is_given_out_stays() -> None:
    model = around(lambda self, x: (x + 1, (self.steps / 6).sin().exp()))
    fast = optimize(model, ["simplify"], example_inputs=(torch.randn(4, 6),))
    fast(torch.ones(2, 6))[1].zero_()
    assert torch.equal(fast(torch.ones(2, 6))[1], model(torch.ones(2, 6))[1])


# Unused results -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_nobody_uses_is_left_out() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.sin().exp() @ self.weight
        self.other(y)
        return y.relu()

    done = simplified(function, other=nn.Sequential(nn.Linear(6, 3), nn.ReLU()))
    assert changes(done) == [("", "5 operations left out, because the result is unused")]


# With others -----------------------------------------------------------------------------------------------------------


def test_a_fold_behind_it_is_taken_back_alone() -> None:
    layers = {"weight": nn.Parameter(torch.randn(6, 3, 3, 3)), "norm": nn.BatchNorm2d(6), "drop": nn.Dropout()}
    model = enliven(Net(lambda m, x: m.drop(m.norm(F.conv2d(x, m.weight)).relu()), **layers)).eval()
    x = torch.randn(2, 3, 8, 8)
    tree, context = captured(model, (x,))
    first = Simplify().run(tree, context)
    second = FoldConvBn().run(tree, context)
    assert second.changes
    second.rewriter.roll_back()
    assert torch.equal(tree.root(x), model(x))
    first.rewriter.roll_back()
    assert "forward" not in vars(tree.root)


@pytest.mark.slow
def test_what_a_transform_maps_is_left_as_it_is() -> None:
    done = simplified(lambda self, x: torch.vmap(lambda row: row.sin() + row.sin())(x) + (x.cos() + x.cos()))
    assert len(changes(done)) == 1
