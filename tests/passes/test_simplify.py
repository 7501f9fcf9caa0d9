"""Operations that needn't run are left out, and only if no result changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_contract import captured, check_pass
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import optimize, report_of
from passes import PassResult, Simplify
from passes.graph import captured as graphs


class Around(nn.Module):
    """Calls a function of itself and its input, after a dropout, so that the pass always has a change to make."""

    def __init__(self, function: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self.worth = nn.Dropout()
        self.linear = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("steps", torch.arange(6))
        for name, child in children.items():
            setattr(self, name, child)
        enliven(self)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.worth(x))


def simplified(function: Callable[..., Any], **children: Any) -> PassResult:
    """Run the pass on a module that computes this function, and check the contract of passes."""
    return check_pass(Simplify(), Around(function, **children).eval(), (torch.randn(4, 6),))


def changes(done: PassResult) -> list[tuple[str, str]]:
    return [(change.where, change.what) for change in done.changes if change.where != "worth"]


def skips(done: PassResult) -> list[tuple[str, str]]:
    return [(skip.where, skip.reason) for skip in done.skips]


# No-ops ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("child", "what"),
    [
        (nn.Dropout(0.5), "left out, because dropout does nothing in eval"),
        (nn.Dropout(0.5, inplace=True), "left out, because dropout does nothing in eval"),
        (nn.AlphaDropout(0.5), "left out, because dropout does nothing in eval"),
        (nn.Dropout1d(0.5), "left out, because dropout does nothing in eval"),
    ],
)
def test_a_child_that_does_nothing_is_left_out(child: nn.Module, what: str) -> None:
    done = simplified(lambda self, x: self.child(self.linear(x)).relu(), child=child)
    assert changes(done) == [("child", what)]


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
    ],
)
def test_an_operation_that_does_something_stays(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Around(function).eval()
    tree, context = captured(model, (torch.randn(4, 6),))
    assert changes(Simplify().run(tree, context)) == []


@pytest.mark.slow
def test_a_copy_that_is_written_to_stays_a_copy() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        y = F.softmax(self.linear(x), -1)
        z = y * 1
        z.add_(1)
        return y + z

    done = simplified(function)
    assert changes(done) == []
    reason = "the value of mul, or a value that it is computed from, may be written to"
    assert skips(done) == [("the root (mul)", reason)]


@pytest.mark.slow
def test_a_copy_that_is_given_out_stays_a_copy() -> None:
    def function(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.softmax(self.linear(x), -1)
        return y, y * 1

    model = Around(function).eval()
    fast = optimize(model, ["simplify"], example_inputs=(torch.randn(4, 6),))
    first, second = fast(torch.randn(4, 6))
    assert first.data_ptr() != second.data_ptr()
    reason = "the value of mul leaves the forward, and may be written to outside"
    assert [(skip.where, skip.text) for skip in report_of(fast).passes[0].skips] == [("the root (mul)", reason)]


@pytest.mark.slow
def test_a_view_of_what_is_turned_in_place_stays() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        back = y.transpose(0, 1).transpose(0, 1)
        y.t_()
        return back * 2

    done = simplified(function)
    assert changes(done) == []
    assert skips(done) == [("the root (transpose)", "the value that transpose returns unchanged may be written to")]


@pytest.mark.slow
def test_what_is_written_to_behind_a_dropout_is_written_to() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = self.child(y)
        z.add_(1)
        return y * z

    assert changes(simplified(function, child=nn.Dropout())) == [
        ("child", "left out, because dropout does nothing in eval")
    ]


@pytest.mark.slow
def test_a_dropout_in_training_stays() -> None:
    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 1e-9, True)

    done = simplified(lambda self, x: self.child(self.linear(x)).relu(), child=Always())
    assert changes(done) == []


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
def test_what_is_done_twice_is_computed_once() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        return self.linear(x).relu() + self.linear(x).relu() * x.size(0) + x.size(0)

    done = simplified(function)
    assert changes(done) == [
        ("linear, call 2", "linear computed once instead of twice"),
        ("the root (relu)", "relu computed once instead of twice"),
    ]


@pytest.mark.slow
def test_what_is_made_of_equal_sizes_and_views_is_computed_once() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        first = x.transpose(0, 1)[: x.size(1) - 1].exp()
        return first * x.transpose(0, 1)[: x.size(1) - 1].exp().sum() + self.linear(x).sum()

    assert changes(simplified(function)) == [
        ("the root (exp)", "exp computed once instead of twice"),
    ]


def test_sizes_that_are_asked_for_twice_or_for_nobody_are_no_reason_to_change_a_forward() -> None:
    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            _, width = x.shape
            return x.view(x.size(0), x.size(1)).exp().view(x.size(0), width)

    done = check_pass(Simplify(), Asking(), (torch.randn(4, 6),))
    assert changes(done) == skips(done) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        # The two draw different random numbers.
        lambda self, x: torch.rand_like(x) * 0 + torch.rand_like(x) * 0 + self.linear(x),
        lambda self, x: F.dropout(x, 0.5) * 0 + F.dropout(x, 0.5) * 0 + self.linear(x),
        # The arguments differ.
        lambda self, x: self.linear(x).sum(0) + self.linear(x + 1).sum(1).sum(),
        lambda self, x: x.clamp(0, 1) + x.clamp(0.0, 2),
        lambda self, x: torch.full((6,), 1.0) + torch.full((6,), True) + x,
    ],
)
def test_what_is_done_differently_is_done_twice(function: Callable[..., Any]) -> None:
    tree, context = captured(Around(function).eval(), (torch.randn(4, 6),))
    assert [change for change in Simplify().run(tree, context).changes if "instead of twice" in change.what] == []


@pytest.mark.slow
def test_two_values_of_which_one_is_written_to_stay_two() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        a, b = x.relu(), x.relu()
        a.add_(1)
        return a * b

    done = simplified(function)
    assert changes(done) == []
    assert skips(done) == [
        ("the root (relu)", "the value of relu, or a value that it is computed from, may be written to")
    ]


@pytest.mark.slow
def test_two_values_made_before_and_behind_a_write_stay_two() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        a = y.sin()
        y.add_(1)
        return a * y.sin()

    done = simplified(function)
    assert changes(done) == []
    reason = "sin occurs twice, and its input may be written to in between"
    assert skips(done) == [("the root (sin)", reason)]


@pytest.mark.slow
def test_two_values_that_are_given_out_stay_two() -> None:
    fast = optimize(
        Around(lambda self, x: (self.linear(x).sin(), self.linear(x).sin())).eval(),
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
    model = Around(function, **children).eval()
    return model, optimize(model, ["simplify"], example_inputs=(torch.randn(4, 6),))


@pytest.mark.slow
def test_a_weight_that_is_made_of_another_is_made_once() -> None:
    done = simplified(_standardized)
    assert changes(done) == [("the root (truediv)", "4 operations on constants computed once for all calls")]


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
def test_a_constant_that_may_be_written_to_stays() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        mask = (self.steps / 6).sin().exp()
        mask[0] = 1
        return x * mask

    done = simplified(function)
    assert changes(done) == []
    assert skips(done) == [
        ("the root (exp)", "the value of exp is the same at every call, but may be written to"),
    ]


@pytest.mark.slow
def test_a_constant_that_is_given_out_stays() -> None:
    model = Around(lambda self, x: (x + 1, (self.steps / 6).sin().exp())).eval()
    fast = optimize(model, ["simplify"], example_inputs=(torch.randn(4, 6),))
    fast(torch.ones(2, 6))[1].zero_()
    assert torch.equal(fast(torch.ones(2, 6))[1], model(torch.ones(2, 6))[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: x + torch.arange(6),
        lambda self, x: F.linear(x, self.weight.t()),
        lambda self, x: x + (torch.rand(6) * 0).sin().exp().log(),
    ],
)
def test_what_is_cheap_drawn_or_not_the_same_is_no_constant(function: Callable[..., Any]) -> None:
    tree, context = captured(Around(function).eval(), (torch.randn(4, 6),))
    assert changes(Simplify().run(tree, context)) == []


@pytest.mark.slow
def test_a_constant_that_would_take_much_memory_stays() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        return x + (self.steps / 6).repeat(2_000_000).exp()[x.size(0)]

    (skip,) = simplified(function).skips
    assert skip.reason == "the value of exp is the same at every call, but would take 45 MiB to keep"


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: (x.clone().add_(1), self.linear(x))[1],
        lambda self, x: (torch.rand(2), self.linear(x) + torch.rand(1))[1],
        lambda self, x: (torch._assert(x.size(1) == 6, "six"), self.linear(x))[1],
        lambda self, x: (F.dropout(x, 0.5), self.linear(x))[1],
        lambda self, x: (F.embedding(x.long().clamp(0, 5), self.weight, max_norm=1.0), self.linear(x))[1],
    ],
)
def test_what_has_an_effect_stays(function: Callable[..., Any]) -> None:
    tree, context = captured(Around(function).eval(), (torch.randn(4, 6),))
    assert changes(Simplify().run(tree, context)) == []


# Later changes and other calls ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hook_on_what_was_left_out_fires() -> None:
    _, fast = _fast(lambda self, x: self.child(self.linear(x)).relu(), child=nn.Dropout(0.5))
    seen: list[Tensor] = []
    handle = fast.child.register_forward_hook(lambda module, args, output: seen.append(output))
    fast(torch.randn(2, 6))
    handle.remove()
    fast(torch.randn(2, 6))
    assert len(seen) == 1


class Folded(nn.Module):
    """A functional convolution to fold and a dropout to leave out, in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, 3, 3))
        self.norm, self.drop = nn.BatchNorm2d(6), nn.Dropout()
        enliven(self)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.drop(self.norm(F.conv2d(x, self.weight)).relu())
        return y if mask is None else y * mask


def test_a_fold_behind_it_is_taken_back_alone() -> None:
    model, x = Folded().eval(), torch.randn(2, 3, 8, 8)
    tree, context = captured(model, (x,))
    first = Simplify().run(tree, context)
    from passes import FoldConvBn

    second = FoldConvBn().run(tree, context)
    assert second.changes
    second.rewriter.roll_back()
    assert torch.equal(tree.root(x, torch.ones(1)), model(x, torch.ones(1)))
    first.rewriter.roll_back()
    assert "forward" not in vars(tree.root)


@pytest.mark.slow
def test_what_a_transform_maps_is_left_as_it_is() -> None:
    done = simplified(lambda self, x: torch.vmap(lambda row: row.sin() + row.sin())(x) + (x.cos() + x.cos()))
    assert len(changes(done)) == 1
