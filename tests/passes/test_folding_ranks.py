"""Forwards that read the rank of a value, for a branch or for text, are rewritten for the rank in the recorded runs."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_models import image
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import check_parity, optimize
from passes.errors import UnseenCall

X = image()
# Values for a second input. Only the forwards here read its rank; no rewrite does.
WIDE, NARROW = torch.full((2, 1, 1, 1), 2.0), torch.full((2, 1), 2.0)


class AssertingNorm(nn.BatchNorm2d):
    """Puts the rank into the message of an assertion, as timm's BatchNormAct2d does."""

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias).relu()


class RaisingNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4:
            raise ValueError(f"expected 4D input (got {x.dim()}D input)")
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class SearchingNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        if "4" in f"{x.ndim:>3} dims":
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
        return x * 3


class MeasuringNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        if len(x.shape) == 4 and not x.dim() - 1 < len(x.size()) - 1:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
        return x * 3


class Pair(nn.Module):
    def __init__(self, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), norm(4)
        enliven(self).eval()

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x))


NORMS = (AssertingNorm, RaisingNorm, SearchingNorm, MeasuringNorm)


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_that_asks_for_the_rank_is_folded(norm):
    model = Pair(norm)
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X,))
    (record,) = fast.report.passes
    assert [change.where for change in record.changes] == ["bn (batch_norm)"]
    assert fast.report.verified
    assert fast.bn._parameters["weight"] is None
    assert check_parity(model, fast, (X,), batch_sizes=(1, 2, 5)).ok


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("how", ["itself", "deepcopy", "pickle"])
def test_another_rank_than_that_of_the_runs_is_an_error(norm, how):
    fast = optimize(Pair(norm), ["fold-conv-bn"], example_inputs=(X,))
    if how == "deepcopy":
        fast = copy.deepcopy(fast)
    elif how == "pickle":
        buffer = io.BytesIO()
        torch.save(fast, buffer)
        fast = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    with pytest.raises(UnseenCall, match="4-D input"):
        fast(X[0])


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_by_itself_takes_its_other_way_as_the_original(norm):
    """For another rank, the forward of the class reads nothing that was folded."""
    model = Pair(norm)
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X,))
    try:
        wanted = model.bn(X[0])
    except (AssertionError, ValueError) as error:
        with pytest.raises(type(error), match="expected 4D"):
            fast.bn(X[0])
    else:
        assert torch.equal(fast.bn(X[0]), wanted)


@pytest.mark.parametrize("norm", NORMS)
def test_without_example_inputs_no_rank_is_known(norm):
    model = Pair(norm)
    fast = optimize(model, ["fold-conv-bn"])
    (record,) = fast.report.passes
    assert not record.changes
    assert torch.equal(fast(X), model(X))


class TrainedNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        flag = self.training
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, flag, 0.1, self.eps)


def test_a_bias_is_moved_in_training():
    model = Pair(TrainedNorm).train()
    fast = optimize(model, ["fold-conv-bias"], mode="training", example_inputs=(X,))
    (record,) = fast.report.passes
    assert [change.where for change in record.changes] == ["conv"]
    assert fast.report.verified
    for flag in (True, False):
        with pytest.raises(UnseenCall, match="4-D input"):
            fast.train(flag)(X[0])


class Scaled(Pair):
    """Has two branches; the rank of a second input decides between them."""

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        y = self.conv(x)
        if scale.ndim == 4:
            return self.bn(y) * scale
        return y


class ScaledFunctions(Scaled):
    def forward(self, x: Tensor, scale: Tensor) -> Any:
        y = F.conv2d(x, self.conv.weight, self.conv.bias)
        if scale.ndim == 4:
            bn = self.bn
            return F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias) * scale
        return y


class ScaledByText(Scaled):
    def forward(self, x: Tensor, scale: Tensor) -> Any:
        y = self.conv(x)
        ways = {"4D": self.bn, "2D": nn.Identity()}
        return ways[f"{scale.ndim}D"](y)


@pytest.mark.parametrize("cls", [Scaled, ScaledFunctions, ScaledByText])
def test_the_way_of_another_rank_is_no_wrong_number(cls):
    model = cls()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X, WIDE))
    (record,) = fast.report.passes
    assert len(record.changes) == 1
    assert check_parity(model, fast, (X, WIDE), batch_sizes=(1, 2, 5)).ok
    with pytest.raises(UnseenCall):
        fast(X, NARROW)


class Outer(nn.Module):
    """Uses the output of a child, whose other branch returns the convolution's output without the BatchNorm."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.eval()

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        return self.inner(x, scale) + 1


def test_nothing_can_be_computed_with_what_a_child_gives_under_a_seal():
    fast = optimize(Outer(Scaled()), ["fold-conv-bn"], example_inputs=(X, WIDE))
    with pytest.raises(UnseenCall, match="conv was folded together with"):
        fast(X, NARROW)
    raw = fast.inner(X, NARROW)
    with pytest.raises(UnseenCall, match="conv was folded together with"):
        raw + 1


class Activated(nn.Module):
    """Has operations to fuse in only one of its branches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.eval()

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        y = self.linear(x)
        if scale.ndim == 4:
            return y.sigmoid().mul(y).add(1).tanh().mul(2)
        return f"{scale.ndim} dims", y - 1


@pytest.mark.parametrize("passes", [["jit-fusion"], ["simplify"], ["merge-linears"], ["pad-channels"], None])
def test_the_forward_of_the_class_answers_where_no_tensor_was_changed(passes):
    model, x = Activated(), torch.randn(2, 8)
    fast = optimize(model, passes, example_inputs=(x, WIDE))
    text, rest = fast(x, NARROW)
    assert text == "2 dims"
    assert torch.equal(rest, model(x, NARROW)[1])
    assert check_parity(model, fast, (x, WIDE)).ok


class Naming(Pair):
    """Uses text of the rank to select a child, and as a key of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"4d": nn.Conv2d(4, 2, 1), "3d": nn.Conv2d(4, 3, 1)}).eval()

    def forward(self, x: Tensor) -> Any:
        y = self.heads[f"{x.ndim}d"](self.bn(self.conv(x)))
        return {f"out {x.dim()!r}": y}


def test_text_that_is_a_key_is_that_of_the_rank():
    model = Naming()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X,))
    assert len(fast.report.passes[0].changes) == 1
    assert check_parity(model, fast, (X,), batch_sizes=(1, 2, 5)).ok
    assert list(fast(X)) == ["out 4"]
    with pytest.raises(UnseenCall):
        fast(X[0])


class Noting(Pair):
    def forward(self, x: Tensor) -> Any:
        self.note = f"{x.ndim}D"
        return self.bn(self.conv(x))


class Listing(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def forward(self, x: Tensor) -> Any:
        self.notes.append(f"{x.ndim}D")
        return self.bn(self.conv(x))


def test_text_that_is_kept_is_kept_at_every_call():
    fast = optimize(Noting(), ["fold-conv-bn"], example_inputs=(X,))
    fast.note = ""
    fast(X)
    assert fast.note == "4D"

    model = Listing()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X,))
    assert model.notes == []
    before = len(fast.notes)
    fast(X)
    assert fast.notes[before:] == ["4D"]


class Sizing(Pair):
    """Returns text of the batch size."""

    def forward(self, x: Tensor) -> Any:
        return f"{x.shape[0]} of {len(x)}", self.bn(self.conv(x))


def test_text_of_a_size_is_that_of_each_call():
    fast = optimize(Sizing(), ["fold-conv-bn"], example_inputs=(X,))
    assert fast(torch.cat([X, X]))[0] == "4 of 4"
    assert fast(X)[0] == "2 of 2"


class Growing(nn.Module):
    """Changes the rank of its input in place before it reads the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Any:
        y = x * self.weight
        y = y.sin().cos().sin().cos()
        x.unsqueeze_(0)
        return y + 1 if x.ndim == 2 else y * 2


@pytest.mark.slow
def test_a_rank_that_is_written_to_is_not_taken_for_known():
    model = Growing().eval()
    fast = optimize(model, ["jit-fusion"], example_inputs=(torch.randn(2, 4),))
    x = torch.randn(3, 4)
    assert torch.equal(fast(x.clone()), model(x.clone()))


class Counting(Pair):
    """Writes to a buffer if its input has a rank that no recorded run has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            self.seen.add_(1)
        return self.conv(x)


def test_a_buffer_that_another_rank_writes_to_is_not_the_originals():
    model = Counting()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X,))
    fast(X[0])
    assert (model.seen.item(), fast.seen.item()) == (0, 1)


def test_a_forward_of_the_instance_that_asks_for_the_rank_is_kept():
    model = Pair()

    def forward(x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ValueError("not four")
        return model.bn(model.conv(x)) + 7 * (x.shape[0] == 3)

    model.forward = forward
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X,))
    for batch in (X, X.repeat(2, 1, 1, 1)[:3]):
        torch.testing.assert_close(fast(batch), model(batch), rtol=1e-4, atol=1e-4)


def test_a_forward_of_the_instance_that_branches_on_the_rank_goes_on_in_the_other_branch():
    model = Pair()
    model.forward = lambda x: model.bn(model.conv(x)) if x.ndim == 4 else x * 5
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X,))
    assert check_parity(model, fast, (X,)).ok
    assert torch.equal(fast(X[0]), X[0] * 5)
