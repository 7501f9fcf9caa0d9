"""Folding across operations between a layer and its BatchNorm that only move values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_models import image
from pass_contract import captured, check_compiles, check_fold, check_fold_of_copy, check_unseen, sentences_of
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import export, optimize, report_of
from passes import FoldConvBias, FoldConvBn
from passes.errors import UnseenCall
from passes.program.seals import SealedOutput


class Moved(nn.Module):
    """A linear layer whose features are moved to dim 1, the channel dim of the BatchNorm."""

    example = image(2, 7, 5)

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Linear(5, 6)
        self.norm: nn.Module = nn.BatchNorm1d(6)
        self.more()
        enliven(self)

    def more(self) -> None:
        """Add or replace modules in a subclass."""

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.layer(x).transpose(1, 2)).relu()


class Flattened(Moved):
    """Flattens all positions into one dim, and restores the shape after the BatchNorm, as LeViT does."""

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return self.norm(y.flatten(0, 1)).reshape_as(y)


class Viewed(Moved):
    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return self.norm(y.view(-1, 6)).view(y.shape)


class Permuted(Moved):
    def forward(self, x: Tensor) -> Any:
        return self.norm(torch.permute(self.layer(x), (0, 2, 1)).contiguous())


class Island(Moved):
    """Has a data-dependent branch, so that only recorded runs show what the forward does."""

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        if x.sum() > 1e6:
            return y
        return self.norm(y.transpose(1, 2)).transpose(1, 2)


class Pixels(Moved):
    """A convolution whose output is flattened before the BatchNorm."""

    example = image(2, 3, 8, 8)

    def more(self) -> None:
        self.layer = nn.Conv2d(3, 6, 3)
        self.flat = nn.Flatten(2)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.flat(self.layer(x)))


class Dropped(Pixels):
    """Has dropout between the layer and the BatchNorm, which does nothing in eval."""

    def more(self) -> None:
        self.layer, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.drop = nn.Dropout2d(0.3)

    def forward(self, x: Tensor) -> Any:
        return self.norm(F.dropout(self.drop(self.layer(x)), 0.2, self.training))


class Across(Moved):
    """The layer and the move are in one child, the BatchNorm is in another."""

    class Front(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 6)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x).transpose(1, 2)

    class Back(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Any:
            return self.norm(x.clone())

    def more(self) -> None:
        self.layer, self.norm = self.Front(), self.Back()

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.layer(x))


class Function(Moved):
    """The BatchNorm is called as a function, not as a module."""

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x).transpose(1, 2)
        return F.batch_norm(y, self.norm.running_mean, self.norm.running_var, self.norm.weight, self.norm.bias)


FOLDED = [Moved, Flattened, Viewed, Permuted, Island, Pixels, Dropped, Across, Function]


@pytest.mark.parametrize("kind", FOLDED)
def test_folds_and_stays_right(kind: type[Moved]) -> None:
    fast = check_fold(kind().eval(), kind.example)
    assert [(record.status, len(record.changes)) for record in report_of(fast).passes] == [("applied", 1)] * 2


@pytest.mark.parametrize("kind", [Flattened, Pixels, Island])
def test_what_is_folded_can_be_copied_and_optimized_again(kind: type[Moved]) -> None:
    check_fold_of_copy(kind().eval(), kind.example)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Flattened, Dropped])
def test_what_is_folded_can_be_exported(kind: type[Moved], tmp_path: Any) -> None:
    model = kind().eval()
    fast = optimize(model, example_inputs=(model.example,))
    bundle = export(fast, example_inputs=(model.example,), output=tmp_path / "out", formats=("torchscript", "onnx"))
    assert bundle.parity.ok


@pytest.mark.parametrize("kind", [Moved, Flattened, Dropped])
def test_what_is_folded_can_be_compiled(kind: type[Moved]) -> None:
    model = kind().eval()
    fast = optimize(model, example_inputs=(model.example,))
    check_compiles(model, fast, model.example)


class OtherDim(Moved):
    """Has as many positions as features: the BatchNorm takes the positions as channels."""

    example = image(2, 6, 5)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.layer(x).clone())


class Merged(Moved):
    """Flattens positions and features into one dim."""

    def more(self) -> None:
        self.layer, self.norm = nn.Linear(5, 2), nn.BatchNorm1d(14)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.layer(x).flatten(1))


class MoveUsed(Moved):
    def forward(self, x: Tensor) -> Any:
        y = self.layer(x).transpose(1, 2)
        return self.norm(y) + y


class ViewWritten(Moved):
    def forward(self, x: Tensor) -> Any:
        y = self.layer(x).transpose(1, 2)
        y[0].zero_()
        return self.norm(y)


class BaseWritten(Moved):
    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        z = y.transpose(1, 2)
        y.mul_(2)
        return self.norm(z)


class Reshaped(Moved):
    """Uses the value itself in `reshape_as`, not only its shape."""

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return self.norm(y.transpose(1, 2)).transpose(1, 2) + y.reshape_as(x[..., :1].expand(-1, -1, 6))


class HookedMove(Pixels):
    def more(self) -> None:
        super().more()
        self.flat.register_forward_hook(lambda module, args, output: None)


class DropsStill(Dropped):
    """Its dropout draws random numbers in eval too."""

    def forward(self, x: Tensor) -> Any:
        torch.manual_seed(0)
        return self.norm(F.dropout(self.layer(x), 0.2, training=True))


REFUSED: dict[type[Moved], str] = {
    OtherDim: "its output passes through the root (clone), after which its channels are not those of the BatchNorm",
    Merged: "its output passes through the root (flatten), after which its channels aren't known",
    MoveUsed: "its output is also used by the root (add)",
    ViewWritten: "its output is also used by the root (getitem)",
    BaseWritten: "its output is also used by the root (mul_)",
    Reshaped: "its output is also used by the root (reshape_as)",
    HookedMove: "its output passes through the hooks of flat",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refuses_with_the_reason(kind: type[Moved]) -> None:
    model = kind().eval()
    tree, context = captured(model, model.example)
    for each in (FoldConvBn(), FoldConvBias()):
        done = each.run(tree, context)
        assert done.changes == ()
        assert any(REFUSED[kind] in text for _, text in sentences_of(done)), list(sentences_of(done))
    assert torch.equal(tree.root(model.example), model(model.example))


def test_what_comes_under_its_name_is_not_moved() -> None:
    class Named(Moved):
        def forward(self, x: Tensor) -> Any:
            return self.norm(torch.clone(input=self.layer(x)).transpose(1, 2))

    model = Named().eval()
    tree, context = captured(model, model.example)
    for each in (FoldConvBn(), FoldConvBias()):
        assert each.run(tree, context).changes == ()


def test_dropout_that_draws_is_no_move() -> None:
    model = DropsStill().eval()
    tree, context = captured(model, model.example)
    assert FoldConvBn().run(tree, context).changes == ()


class DroppedByModule(Dropped):
    def forward(self, x: Tensor) -> Any:
        return self.norm(self.drop(self.layer(x)))


class DroppedByFunction(Dropped):
    def forward(self, x: Tensor) -> Any:
        return self.norm(F.dropout(self.layer(x), 0.2, self.training))


@pytest.mark.parametrize("kind", [DroppedByModule, DroppedByFunction])
def test_in_training_dropout_is_no_move(kind: type[Moved]) -> None:
    """Dropout sets random values to zero, bias included, so the BatchNorm doesn't cancel the bias."""
    model = kind().train()
    fast = optimize(model, ["fold-conv-bias"], mode="training", example_inputs=(image(4, 3, 8, 8),))
    (record,) = report_of(fast).passes
    assert record.status == "unchanged"
    (skip,) = record.skips
    assert (skip.where, "its output passes" in skip.text) == ("layer", True)
    # In eval, the same dropout is a move.
    tree, context = captured(model.eval(), image(4, 3, 8, 8))
    assert len(FoldConvBias().run(tree, context).changes) == 1


class MovedConstant(Moved):
    """The input of the BatchNorm is a permuted constant, which no recorded call computed."""

    def more(self) -> None:
        self.grid = [image(7, 6, 2)]

    def forward(self, x: Tensor) -> Any:
        y = self.norm(torch.permute(self.grid[0], (2, 1, 0)))
        return y if x.sum() > 1e6 else y + self.layer(x).transpose(1, 2)


def test_what_is_moved_may_come_from_nowhere() -> None:
    model = MovedConstant().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(model.example,))
    (record,) = report_of(fast).passes
    assert (record.status, record.changes) == ("unchanged", ())
    assert torch.equal(fast(model.example), model(model.example))


class Turning(Moved):
    """A data-dependent branch decides which dim holds the channels."""

    example = image(2, 6, 5)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return self.norm(y if x.sum() > 1e3 else y.transpose(1, 2))


class Doubling(Moved):
    def forward(self, x: Tensor) -> Any:
        y = self.layer(x).transpose(1, 2)
        return self.norm(y * 2 if x.sum() > 1e3 else y)


@pytest.mark.parametrize(("kind", "reason"), [(Turning, "they are in dim 2"), (Doubling, "used without it")])
def test_an_unseen_branch_raises(kind: type[Moved], reason: str) -> None:
    check_unseen(kind().eval(), kind.example, reason)


def test_other_ranks_raise() -> None:
    model = Function().eval()
    for each in (Moved().eval(), model):
        fast = optimize(each, ["fold-conv-bn"], example_inputs=(each.example,))
        with pytest.raises(UnseenCall):
            fast(image(2, 2, 7, 5))


def test_a_seal_gives_out_nothing_but_itself_and_its_shape() -> None:
    model = Moved().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(model.example,))
    sealed = fast.layer(model.example)
    other = torch.zeros(2, 6, 7)
    assert isinstance(sealed.transpose(1, 2), SealedOutput)
    assert isinstance(torch.flatten(sealed, 0, 1), SealedOutput)
    assert isinstance(F.dropout(sealed, training=False), SealedOutput)
    assert other.reshape_as(sealed).shape == (2, 7, 6)
    for use in (
        lambda: sealed.transpose(1, 2).sum(),
        lambda: sealed.flatten(1),
        lambda: sealed.view(6, -1),
        lambda: F.dropout(sealed),
        lambda: torch.squeeze(sealed),
        lambda: torch.flatten(sealed),
        lambda: sealed.reshape_as(other),
        lambda: torch.cat([other, sealed]),
        lambda: other + sealed.contiguous(),
    ):
        with pytest.raises(UnseenCall):
            _called(use)


def _called(use: Callable[[], Any]) -> Any:
    return use()
