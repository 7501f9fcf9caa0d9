"""Fold a BatchNorm into the following layer."""

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

from optimizer import check_parity, export, optimize, report_of
from passes import FoldConvBias, FoldConvBn
from passes.errors import UnseenCall

# The layer after the BatchNorm, and the shape of an input.
LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda **k: nn.Conv1d(4, 6, 3, **k), (2, 4, 9)),
    "conv1d grouped": (lambda **k: nn.Conv1d(4, 6, 3, groups=2, **k), (2, 4, 9)),
    "conv2d": (lambda **k: nn.Conv2d(4, 6, 3, stride=2, **k), (2, 4, 8, 8)),
    "conv2d grouped": (lambda **k: nn.Conv2d(4, 6, 3, groups=2, dilation=2, **k), (2, 4, 8, 8)),
    "conv2d depthwise": (lambda **k: nn.Conv2d(4, 8, 3, groups=4, **k), (2, 4, 8, 8)),
    "conv2d 1x1, same": (lambda **k: nn.Conv2d(4, 6, 1, padding="same", **k), (2, 4, 8, 8)),
    "conv2d reflect": (lambda **k: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", **k), (2, 4, 8, 8)),
    "conv2d circular": (lambda **k: nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular", **k), (2, 4, 8, 8)),
    "conv2d replicate": (lambda **k: nn.Conv2d(4, 6, 3, padding=2, padding_mode="replicate", **k), (2, 4, 8, 8)),
    "conv3d": (lambda **k: nn.Conv3d(4, 6, 3, padding="valid", **k), (2, 4, 5, 5, 5)),
    "linear": (lambda **k: nn.Linear(4, 6, **k), (3, 4)),
}
_NORMS: dict[int, Callable[..., nn.Module]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_algebra_is_exact_in_float64(kind: str, affine: bool, bias: bool) -> None:
    make, shape = LAYERS[kind]
    model = enliven(nn.Sequential(_NORMS[len(shape)](4, affine=affine), make(bias=bias), nn.ReLU())).double().eval()
    x = image(*shape).double()
    wanted = model(x)
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(x,))
    assert report_of(fast).passes[0].status == "applied"
    assert not fast[0]._parameters["weight"] if affine else True
    torch.testing.assert_close(fast(x), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(model(x), wanted)


class Front(nn.Module):
    """A BatchNorm and the layer after it; subclasses use the two in other ways."""

    example = image(2, 4, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm2d(4)
        self.layer: nn.Module = nn.Conv2d(4, 6, 3)
        self.more()
        enliven(self)

    def more(self) -> None:
        """Add or replace modules in a subclass."""

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.norm(x)).relu()


class BothSides(Front):
    def more(self) -> None:
        self.behind = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Any:
        return self.behind(self.layer(self.norm(x)))


class InRow(Front):
    """Two BatchNorms; the second is between two convolutions."""

    def more(self) -> None:
        self.first, self.second = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.second(self.first(self.norm(x))))


class Twice(Front):
    """Two BatchNorms before one convolution."""

    def more(self) -> None:
        self.other = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.norm(self.other(x)))


class Function(Front):
    def forward(self, x: Tensor) -> Any:
        norm, layer = self.norm, self.layer
        y = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
        return F.conv2d(y, layer.weight, padding=0)


class Island(Front):
    def forward(self, x: Tensor) -> Any:
        if x.sum() > 1e6:
            return x
        return self.layer(self.norm(x))


class Transposed(Front):
    """A transpose turns the BatchNorm's channels into the features of the linear layer."""

    example = image(2, 4, 7)

    def more(self) -> None:
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.norm(x).transpose(1, 2))


class SharedInput(Front):
    """The input of the BatchNorm has another user, which a fold doesn't affect."""

    def more(self) -> None:
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.norm(x)) + x


class Unsqueezed(Front):
    """The operation between the two adds a dim."""

    example = image(6, 4)

    def more(self) -> None:
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.norm(x).unsqueeze(1))


FOLDED: dict[type[Front], int] = {
    Front: 1, BothSides: 2, InRow: 2, Twice: 2, Function: 1, Island: 1, Transposed: 1, SharedInput: 1, Unsqueezed: 1,
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDED)
def test_folds_and_stays_right(kind: type[Front]) -> None:
    fast = check_fold(kind().eval(), kind.example)
    assert len(report_of(fast).passes[1].changes) == FOLDED[kind]


@pytest.mark.parametrize("kind", [Front, BothSides, Island])
def test_what_is_folded_can_be_copied_and_optimized_again(kind: type[Front]) -> None:
    check_fold_of_copy(kind().eval(), kind.example)


def test_a_norm_behind_is_folded_when_one_in_front_is_already() -> None:
    model = BothSides().eval()
    model.behind.train()
    fast = optimize(model.norm, example_inputs=(model.example,))
    assert torch.equal(fast(model.example), model.norm(model.example))
    first = optimize(nn.Sequential(model.norm, model.layer), example_inputs=(model.example,))
    both = nn.Sequential(first, model.behind).eval()
    again = optimize(both, example_inputs=(model.example,))
    assert len(report_of(again).passes[1].changes) == 1
    assert check_parity(model.eval(), again, (model.example,), batch_sizes=(1, 3)).ok


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BothSides, Transposed])
def test_what_is_folded_can_be_exported_and_compiled(kind: type[Front], tmp_path: Any) -> None:
    model = kind().eval()
    fast = optimize(model, example_inputs=(model.example,))
    bundle = export(fast, example_inputs=(model.example,), output=tmp_path / "out", formats=("torchscript", "onnx"))
    assert bundle.parity.ok
    check_compiles(model, fast, model.example)


class PaddedLater(Front):
    padding = 0

    def forward(self, x: Tensor) -> Any:
        return F.conv2d(self.norm(x), self.layer.weight, padding=self.padding)


def test_a_function_that_comes_to_pad_raises() -> None:
    fast = optimize(PaddedLater().eval(), ["fold-conv-bn"], example_inputs=(PaddedLater.example,))
    fast.padding = 1
    with pytest.raises(UnseenCall, match="padding"):
        fast(PaddedLater.example)


class Padded(Front):
    def more(self) -> None:
        self.layer = nn.Conv2d(4, 6, 3, padding=1)


class PaddedSame(Front):
    def more(self) -> None:
        self.layer = nn.Conv2d(4, 6, 3, padding="same")


class PaddedFunction(Function):
    def forward(self, x: Tensor) -> Any:
        return F.conv2d(self.norm(x), self.layer.weight, None, 1, (0, 1))


class PaddedBetween(Front):
    def forward(self, x: Tensor) -> Any:
        return self.layer(F.pad(self.norm(x), (1, 1, 1, 1)))


class TransposedConv(Front):
    def more(self) -> None:
        self.layer = nn.ConvTranspose2d(4, 6, 3)


class UsedBesides(Front):
    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        return self.layer(y) + y.mean()


class Returned(Front):
    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        return self.layer(y), y


class TwoLayers(Front):
    def more(self) -> None:
        self.other = nn.Conv2d(4, 6, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        return self.layer(y) + self.other(y)


class LayerTwice(Front):
    def forward(self, x: Tensor) -> Any:
        return self.layer(self.norm(x)) + self.layer(x)


class Straight(Front):
    """The linear layer computes on the positions, of which there are as many as channels."""

    example = image(2, 4, 4)

    def more(self) -> None:
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 6)


class Cloned(Straight):
    def forward(self, x: Tensor) -> Any:
        return self.layer(self.norm(x).clone())


class OtherFeatures(Straight):
    example = image(2, 4, 5)

    def more(self) -> None:
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(5, 6)


class Grid(Front):
    """A linear layer computes on the last dim of an image."""

    def more(self) -> None:
        self.layer = nn.Linear(8, 6)


class BatchStatistics(Front):
    def more(self) -> None:
        self.norm = nn.BatchNorm2d(4, track_running_stats=False)


class WeightRead(Front):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.layer.weight.mean()


REFUSED: dict[type[Front], str | None] = {
    Padded: "it isn't folded into layer after it: the zero padding between them would have to be shifted too",
    PaddedSame: "the zero padding between",
    PaddedFunction: "the zero padding between",
    PaddedBetween: None,
    TransposedConv: "the outputs of a transposed convolution near the border are sums of fewer products",
    UsedBesides: "its output is also used by the root (mean)",
    Returned: "its output is also used by the caller of the root, which returns it",
    TwoLayers: "its output is also used by other",
    LayerTwice: "layer.weight is also used by another call of layer",
    Straight: "the input of layer is 3-D, where the BatchNorm's channels are not the inputs of the linear layer",
    Cloned: "its output passes through the root (clone), after which its channels are not those of layer",
    OtherFeatures: "the input of layer is 3-D",
    Grid: "the input of layer is 4-D",
    BatchStatistics: "it uses the statistics of the batch",
    WeightRead: "layer.weight is also read by the root",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refuses_with_the_reason(kind: type[Front]) -> None:
    model = kind().eval()
    tree, context = captured(model, model.example)
    done = FoldConvBn().run(tree, context)
    assert done.changes == ()
    reason, texts = REFUSED[kind], [text for _, text in sentences_of(done)]
    assert any(reason in text for text in texts) if reason else not texts, texts
    wanted, got = model(model.example), tree.root(model.example)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_bias_in_front_of_a_norm_that_leads_stays_right() -> None:
    """One pass moves a bias into the BatchNorm between two convolutions, and then another pass folds the BatchNorm."""
    model = InRow().eval()
    fast = optimize(model, ["fold-conv-bias"], example_inputs=(model.example,))
    again = optimize(fast, ["fold-conv-bn"], example_inputs=(model.example,))
    assert check_parity(model, again, (model.example,), batch_sizes=(1, 3)).ok


def test_a_norm_that_took_a_bias_in_stays_behind_its_convolution() -> None:
    """It is right only after this convolution: folded into the next one, it would no longer open this one's seal."""
    model = InRow().eval()
    with torch.no_grad():
        # Weights that would overflow float32 if the BatchNorm were folded into the preceding convolution.
        model.norm = nn.Identity()
        model.first.weight *= 1e37
        model.second.weight *= 1e3
    x = model.example * 1e-37
    fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(x,))
    bias, norm = report_of(fast).passes
    assert [change.where for change in bias.changes] == ["first"]
    assert [skip.text for skip in norm.skips] == [
        "folded into first would give weights that aren't finite",
        "it isn't folded into layer after it: it was already folded with the convolution before it",
    ]
    report = check_parity(model, fast, (x,), batch_sizes=(1, 3))
    assert report.ok, report.reason


class NormAlone(Front):
    def forward(self, x: Tensor) -> Any:
        return self.norm(x) if x.sum() > 1e3 else self.layer(self.norm(x))


class LayerAlone(Front):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) if x.sum() > 1e3 else self.layer(self.norm(x))


class Swapped(Front):
    """The dim of the features depends on a value."""

    example = image(2, 4, 4)

    def more(self) -> None:
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        return self.layer(y if x.sum() > 1e3 else y.transpose(1, 2))


UNSEEN = {
    NormAlone: "norm was folded together with layer, but its output was used without it",
    LayerAlone: "layer was folded together with norm, but its input doesn't come from it",
    Swapped: "norm was folded together with layer, which takes dim 2 as the channels, but they are in dim 1",
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_an_unseen_branch_raises(kind: type[Front]) -> None:
    check_unseen(kind().eval(), kind.example, UNSEEN[kind])


def test_weights_of_before_and_another_eps_raise() -> None:
    model = Front().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(model.example,))
    with pytest.raises(RuntimeError, match=r"norm\.weight was folded into another weight"):
        fast.load_state_dict(model.state_dict())
    parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with pytest.raises((UnseenCall, KeyError, RuntimeError)):
        torch.func.functional_call(fast, parameters, (model.example,))
    fast.norm.eps = 1.0
    with pytest.raises(UnseenCall, match="a different eps"):
        fast(model.example)


def test_the_bias_pass_leaves_it_alone() -> None:
    tree, context = captured(Front().eval(), Front.example)
    assert FoldConvBias().run(tree, context).changes == ()
