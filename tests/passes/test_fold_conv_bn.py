"""Fold BatchNorms, and products and sums by channel, into the layer before or after them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import folding_models as models
import pytest
import torch
import torch.nn.functional as F
from allocations import LargestResult
from folding_models import CONVOLUTIONS, FAR, Functional, Pair, image, norm_behind
from laid_out import laid_out
from operations import computed
from pass_contract import captured, check_pass, sentences_of
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import check_parity, export, optimize, report_of
from passes import FoldConvBn, fold_conv_bn
from passes.fold_conv_bn import FoldedBias, FoldedWeight, NormNumbers

BOTH = ["fold-conv-bias", "fold-conv-bn"]


def folded(model: nn.Module, x: Tensor, changes: int = 1, passes: list[str] | None = None) -> Any:
    """Fold the model, check the number of changes and the outputs, and that all tensors stay the model's; the result."""
    before = copy.deepcopy(model.state_dict())
    fast = optimize(model.eval(), passes or ["fold-conv-bn"], example_inputs=(x,))
    record = report_of(fast).passes[-1]
    assert len(record.changes) == changes, record.skips
    assert check_parity(model, fast, (x,), batch_sizes=(1, 2, 5)).ok
    for state in (model.state_dict(), fast.state_dict()):
        assert list(state) == list(before)
        assert all(torch.equal(state[name], value) for name, value in before.items())
    return fast


def refused(model: nn.Module, x: Tensor) -> list[str]:
    """Run the pass, check that it changes nothing, and return the reasons."""
    tree, context = captured(model.eval(), x, keep_flags=True)
    done = FoldConvBn().run(tree, context)
    assert done.changes == (), list(sentences_of(done))
    torch.testing.assert_close(tree.root(x), model(x), rtol=0, atol=0, equal_nan=True)
    return [text for _, text in sentences_of(done)]


def same(fast: nn.Module, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Check that both answer alike."""
    with torch.no_grad():
        torch.testing.assert_close(fast(*args, **kwargs), model(*args, **kwargs), rtol=1e-4, atol=1e-4)


# The algebra ----------------------------------------------------------------------------------------------------------


def test_a_weight_that_is_standardised_at_every_call_is_folded_once() -> None:
    fast = folded(models.Standardised(), models.image())
    assert computed("batch_norm", fast, models.image()) == 0
    with torch.no_grad():
        fast.conv.weight.mul_(torch.linspace(1, 2, 27).view(3, 3, 3))
    plain = models.Standardised().eval()
    plain.load_state_dict(fast.state_dict())
    same(fast, plain, models.image())


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize(("bias", "affine"), [(True, True), (False, True), (True, False)])
def test_after_a_layer_the_algebra_is_exact(kind: str, bias: bool, affine: bool) -> None:
    make, shape = CONVOLUTIONS[kind]
    conv = make(bias=bias)
    model = enliven(nn.Sequential(conv, norm_behind(conv, shape, affine=affine, eps=1e-2))).double().eval()
    x = image(*shape).double()
    tree, context = captured(model, x, keep_flags=True)
    done = FoldConvBn().run(tree, context)
    assert [(change.where, change.what) for change in done.changes] == [("1", "folded into 0")]
    assert computed("batch_norm", tree.root, x) == 0
    with torch.no_grad():
        torch.testing.assert_close(tree.root(x), model(x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(conv(x), model(x), rtol=1e-2, atol=1e-2), "this BatchNorm does nothing to be folded"


# The layer after the BatchNorm, and the shape of an input.
LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda **k: nn.Conv1d(4, 6, 3, **k), (2, 4, 9)),
    "conv1d grouped": (lambda **k: nn.Conv1d(4, 6, 3, groups=2, **k), (2, 4, 9)),
    "conv2d grouped": (lambda **k: nn.Conv2d(4, 6, 3, groups=2, dilation=2, **k), (2, 4, 8, 8)),
    "conv2d depthwise": (lambda **k: nn.Conv2d(4, 8, 3, groups=4, **k), (2, 4, 8, 8)),
    "conv2d 1x1, same": (lambda **k: nn.Conv2d(4, 6, 1, padding="same", **k), (2, 4, 8, 8)),
    "conv2d reflect": (lambda **k: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", **k), (2, 4, 8, 8)),
    "conv2d circular": (lambda **k: nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular", **k), (2, 4, 8, 8)),
    "conv2d replicate": (lambda **k: nn.Conv2d(4, 6, 3, padding=2, padding_mode="replicate", **k), (2, 4, 8, 8)),
    "conv3d": (lambda **k: nn.Conv3d(4, 6, 3, padding="valid", **k), (2, 4, 5, 5, 5)),
    "linear": (lambda **k: nn.Linear(4, 6, **k), (3, 4)),
}
_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.mark.parametrize(("bias", "affine"), [(True, True), (False, False)])
@pytest.mark.parametrize("kind", LAYERS)
def test_before_a_layer_the_algebra_is_exact(kind: str, affine: bool, bias: bool) -> None:
    make, shape = LAYERS[kind]
    model = enliven(nn.Sequential(_NORMS[len(shape)](4, affine=affine), make(bias=bias), nn.ReLU())).double().eval()
    x = image(*shape).double()
    tree, context = captured(model, x)
    done = FoldConvBn().run(tree, context)
    assert [(change.where, change.what) for change in done.changes] == [("0", "folded into 1")]
    assert computed("batch_norm", tree.root, x) == 0
    with torch.no_grad():
        torch.testing.assert_close(tree.root(x), model(x), rtol=1e-12, atol=1e-12)


def _weight_of(model: Any) -> tuple[FoldedWeight, list[Tensor]]:
    conv, norm = model
    folded = FoldedWeight(
        NormNumbers(norm.eps, True, True), "Transpose" in type(conv).__name__, getattr(conv, "groups", 1), False
    )
    return folded, [conv.weight.detach(), norm.running_mean, norm.running_var, norm.weight.detach(), norm.bias.detach()]


def test_the_weight_is_rounded_once() -> None:
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).eval()
    weight, tensors = _weight_of(model)
    conv, norm = copy.deepcopy(model).double()
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    assert torch.equal(weight(*tensors), (conv.weight * scale.reshape(-1, 1, 1, 1)).float())
    bias = FoldedBias(weight, True)(tensors[0], model[0].bias.detach(), *tensors[1:])
    assert torch.equal(bias, ((conv.bias - norm.running_mean) * scale + norm.bias).float())


@pytest.mark.parametrize("kind", ["conv2d grouped", "transposed2d grouped", "linear"])
def test_a_weight_is_folded_in_slices_of_its_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one slice is converted to float64 at a time, and the result is bitwise the same, in the same layout."""
    make, shape = CONVOLUTIONS[kind]
    conv = make()
    weight, tensors = _weight_of(enliven(nn.Sequential(conv, norm_behind(conv, shape))))
    if conv.weight.dim() == 4:
        tensors[0] = tensors[0].to(memory_format=torch.channels_last)
    whole = weight(*tensors)
    row = conv.weight[0].numel()
    monkeypatch.setattr(fold_conv_bn, "_ELEMENTS", 2 * row)
    with LargestResult() as largest:
        sliced = weight(*tensors)
    assert largest.of[torch.float64] == max(2 * row, len(tensors[1]))
    assert torch.equal(sliced, whole)
    assert sliced.stride() == whole.stride() == tensors[0].stride()


# Spellings ------------------------------------------------------------------------------------------------------------


# In islands, a branch on values between the layer and its BatchNorm breaks the graph.
SPELLED = [cls for cls in models.FOLDED if not issubclass(cls, models.Island)]


@pytest.mark.parametrize("cls", SPELLED)
def test_folds_every_spelling(cls: type[nn.Module]) -> None:
    twice = cls in (models.TwoNorms, models.TorchFunctions, models.SharedBlock)
    fast = folded(cls(), image(), 1 + twice, BOTH)
    assert computed("batch_norm", fast, image()) == 0
    twin = pickle.loads(pickle.dumps(fast))
    same(twin, fast, image())


class Moved(nn.Module):
    """A linear layer whose features are moved to dim 1, the channel dim of the BatchNorm."""

    example = image(2, 7, 5)

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(5, 6)
        self.norm: Any = nn.BatchNorm1d(6)
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


class ByKeywords(Moved):
    def forward(self, x: Tensor) -> Any:
        y = torch.transpose(self.layer(x), dim1=1, dim0=2).unsqueeze(dim=-1)
        return F.batch_norm(y.flatten(start_dim=2), self.norm.running_mean, self.norm.running_var)


class Pixels(Moved):
    """A convolution whose output is flattened before the BatchNorm."""

    example = image(2, 3, 8, 8)

    def more(self) -> None:
        self.layer, self.flat = nn.Conv2d(3, 6, 3), nn.Flatten(2)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.flat(self.layer(x)))


class Dropped(Pixels):
    """Has dropout between the layer and the BatchNorm, which does nothing in eval."""

    def more(self) -> None:
        self.layer, self.norm, self.drop = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Dropout2d(0.3)

    def forward(self, x: Tensor) -> Any:
        return self.norm(F.dropout(self.drop(self.layer(x)), 0.2, self.training))


class PaddedByCopies(Dropped):
    def forward(self, x: Tensor) -> Any:
        return self.norm(F.pad(self.layer(x), (1, 1, 1, 1), mode="reflect"))


class BeforeTransposed(Moved):
    """A transpose turns the BatchNorm's channels into the features of the linear layer."""

    example = image(2, 6, 7)

    def more(self) -> None:
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.norm(x).transpose(1, 2))


class BeforeWritten(Moved):
    """Writes to the input of the BatchNorm, but before it runs."""

    example = image(3, 6)

    def more(self) -> None:
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.norm(F.relu(x.clone(), inplace=True)))


class BeforeAsked(BeforeWritten):
    """Reads the shape of the output of the BatchNorm."""

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        return self.layer(y.unsqueeze(0)).reshape(y.shape[0], 4) + torch.zeros(4, 4)[:1].expand_as(self.layer(x))


class BothSides(Moved):
    example = image(2, 6, 8, 8)

    def more(self) -> None:
        self.norm, self.layer, self.behind = nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Any:
        return self.behind(self.layer(self.norm(x)))


class Surrounded(BothSides):
    """Two BatchNorms on each side; a BatchNorm between two convolutions is folded into the first."""

    def more(self) -> None:
        super().more()
        self.first, self.second, self.third = nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Any:
        return self.third(self.second(super().forward(self.first(x)).transpose(2, 3).clone()))


class InPlaceAround(Pair):
    """As a ResNet: activations write to the input of the layer and to the output of the BatchNorm."""

    def more(self) -> None:
        self.act, self.stem = nn.ReLU(inplace=True), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.act(self.bn(self.conv(self.act(self.stem(x)))))


class Scaled(Moved):
    """A convolution and a product by channel; subclasses use the two in other ways."""

    example = image()
    shape: tuple[int, ...] = (4, 1, 1)

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.5 + torch.rand(self.shape, generator=torch.Generator().manual_seed(1)))

    def more(self) -> None:
        self.layer, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        return (self.layer(x) * self.gamma).relu()


class Batched(Scaled):
    shape = (1, 4, 1, 1)


class ForAll(Scaled):
    shape = ()


class Lines(Scaled):
    """A linear layer; its features are the last dim for a product, whatever the rank."""

    example = image(2, 7, 5)
    shape = (6,)

    def more(self) -> None:
        self.layer = nn.Linear(5, 6, bias=False)


class LinesTransposed(Lines):
    shape = (6, 1)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).transpose(1, 2).div(self.gamma)


class Shifted(Scaled):
    """Several kinds of products and differences in a row, around a BatchNorm."""

    def more(self) -> None:
        super().more()
        self.beta = nn.Parameter(image(4, 1, 1, seed=2))
        self.register_buffer("mean", image(1, 4, 1, 1, seed=3))
        self.register_buffer("spread", 0.5 + image(4, 1, 1, seed=4).abs())

    def forward(self, x: Tensor) -> Any:
        y = self.mean - self.gamma * self.layer(x)
        return torch.add(self.norm(y.sub(self.beta)), self.beta) / self.spread


class FrozenNorm(Scaled):
    """FrozenBatchNorm2d as torchvision, DETR and detectron2 (where gradients are needed) write it."""

    def forward(self, x: Tensor) -> Any:
        norm = self.norm
        tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        weight, bias, mean, var = (each.reshape(1, -1, 1, 1) for each in tensors)
        scale = weight * (var + 1e-5).rsqrt()
        return self.layer(x) * scale + (bias - mean * scale)


FOLDED: dict[Any, int] = {
    Moved: 1, Flattened: 1, Viewed: 1, Permuted: 1, ByKeywords: 1, Pixels: 1, Dropped: 1,
    PaddedByCopies: 1, BeforeTransposed: 1, BeforeWritten: 1, BeforeAsked: 1, BothSides: 2, Surrounded: 4, InPlaceAround: 1,
    Scaled: 1, Batched: 1, ForAll: 1, Lines: 1, LinesTransposed: 1, Shifted: 6, FrozenNorm: 2,
}  # fmt: skip


@pytest.mark.parametrize("make", FOLDED)
def test_folds_and_stays_right(make: Any) -> None:
    model = make()
    x = getattr(make, "example", image())
    fast = folded(model, x, FOLDED[make])
    assert computed("batch_norm", fast, x) == 0


def test_two_calls_of_a_block_are_two_places() -> None:
    fast = folded(models.SharedBlock(), image(), 2)
    places = [(change.where, change.text) for change in report_of(fast).passes[0].changes]
    assert places == [("block.1", "folded into block.0"), ("block.1, call 2", "folded into block.0, call 2")]


# Refusals -------------------------------------------------------------------------------------------------------------


class Residual(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.bn(y) + y


class Returned(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.bn(y), y


class NamedAsAQuestion(Pair):
    """The module that uses the output is named `size`, like a method that only reads the shape."""

    def more(self) -> None:
        self.size = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.bn(y) + self.size(y)


class ViewMutated(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        y[:, 0].add_(1)
        return self.bn(y)


class OutputKept(Pair):
    """Stores the output in an attribute."""

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        self.last = y
        return self.bn(y)


class InAutocast(Pair):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.bn(self.conv(x)).float()
        return y.relu() + x.mean()


class Straight(Moved):
    """A linear layer on 3-D input: BatchNorm's channels are the positions, not the features."""

    example = image(2, 6, 5)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.layer(x))


class Unbatched(Moved):
    """A 1-D convolution on unbatched input; BatchNorm1d treats its output as a batch of vectors."""

    example = image(5, 6)

    def more(self) -> None:
        self.layer = nn.Conv1d(5, 6, 1)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.layer(x))


class OtherDim(Straight):
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


class DropsStill(Dropped):
    """Its dropout draws random numbers in eval too."""

    def forward(self, x: Tensor) -> Any:
        torch.manual_seed(0)
        return self.norm(F.dropout(self.layer(x), 0.2, training=True))


class PaddedByZeros(Dropped):
    def forward(self, x: Tensor) -> Any:
        return self.norm(F.pad(self.layer(x), (1, 1, 1, 1)))


class Front(Moved):
    """A BatchNorm and the layer after it."""

    example = image(2, 4, 8, 8)

    def more(self) -> None:
        self.norm, self.layer = nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.norm(x))


class FrontSame(Front):
    def more(self) -> None:
        self.norm, self.layer = nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding="same")


class FrontTransposed(Front):
    def more(self) -> None:
        self.norm, self.layer = nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 3)


class FrontUsed(Front):
    def more(self) -> None:
        self.norm, self.layer = nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        return self.layer(y.transpose(2, 3)) + y.shape[1] + y.transpose(2, 3)[:, :1, :6, :6]


class FrontWritten(FrontUsed):
    """The input of the BatchNorm is written to before the layer runs."""

    def forward(self, x: Tensor) -> Any:
        x = x.clone()
        y = self.norm(x)
        x.zero_()
        return self.layer(y) + x.sum()


class FrontStraight(Front):
    """The linear layer computes on the positions, of which there are as many as channels."""

    example = image(2, 4, 4)

    def more(self) -> None:
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 6)


class FrontCloned(FrontStraight):
    def forward(self, x: Tensor) -> Any:
        return self.layer(self.norm(x).clone())


class BatchStatistics(Functional):
    def forward(self, x: Tensor) -> Any:
        return F.batch_norm(F.conv2d(x, self.w), None, None, self.gain, training=True)


class WritesMean(Pair):
    def forward(self, x: Tensor) -> Any:
        self.bn.running_mean.add_(0.5)
        return self.bn(self.conv(x))


class WritesView(Pair):
    """Writes to a statistic through a view that a plain attribute holds."""

    def more(self) -> None:
        self.center = self.bn.running_mean.view(1, 4, 1, 1)

    def forward(self, x: Tensor) -> Any:
        self.center.add_(0.5)
        return self.bn(self.conv(x))


class WritesScale(Scaled):
    def forward(self, x: Tensor) -> Any:
        scale = self.gamma.clone()
        scale.mul_(2)
        return self.layer(x) * scale


class TakesBoth(Scaled):
    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return y * self.gamma + y


class OtherDtype(Scaled):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * self.gamma.double()


class ByZero(Scaled):
    def more(self) -> None:
        super().more()
        self.register_buffer("zeros", torch.zeros(4, 1, 1))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) / self.zeros


REFUSED: dict[Any, str] = {
    Residual: "conv is unchanged: its output is also used by the root (add)",
    NamedAsAQuestion: "its output is also used by size",
    Returned: "its output leaves the graph",
    OutputKept: "its output leaves the graph",
    ViewMutated: "its output is also used by the root (getitem)",
    InAutocast: "it runs under autocast to bfloat16, where a fold changes the dtypes of",
    Straight: "its input is 3-D, where the BatchNorm's channels are not the outputs of the linear layer",
    Unbatched: "its input is 2-D, where the BatchNorm's channels are not the outputs of the convolution",
    OtherDim: "its output passes through the root (clone), after which its channels are not those of the BatchNorm",
    Merged: "its output passes through the root (flatten), after which its channels aren't known",
    PaddedByZeros: "its output passes through the root (pad), after which its channels aren't known",
    MoveUsed: "its output is also used by the root (add)",
    BaseWritten: "its output is also used by the root (mul_)",
    Reshaped: "its output is also used by the root (reshape_as)",
    Front: "it isn't folded into layer after it: the zero padding between them would have to be shifted too",
    FrontSame: "the zero padding between them would have to be shifted too",
    FrontTransposed: "the outputs of a transposed convolution near the border are sums of fewer products",
    FrontWritten: "the input of the BatchNorm may be written to before the layer runs",
    FrontStraight: "the input of layer is 3-D, where the BatchNorm's channels are not the inputs of the linear layer",
    FrontCloned: "its output passes through the root (clone), after which its channels are not those of layer",
    BatchStatistics: "it uses the statistics of the batch",
    WritesMean: "the forward may write to bn.running_mean",
    WritesView: "the forward may write to bn.running_mean",
    WritesScale: "the forward may write to the other operand of the root (mul)",
    TakesBoth: "its output is also used by the root (add)",
    OtherDtype: "the root (mul) converts its float32 input to float64",
    ByZero: "the new weights wouldn't be finite",
}


@pytest.mark.parametrize("make", REFUSED)
def test_refuses_with_the_reason_and_stays_right(make: Any) -> None:
    texts = refused(make(), getattr(make, "example", image()))
    assert any(REFUSED[make] in text for text in texts), texts


class ComputedWeight(Pair):
    """The weight depends on the input."""

    def forward(self, x: Tensor) -> Any:
        return self.bn(F.conv2d(x, self.conv.weight * x.mean()))


class ComputedScale(Pair):
    def forward(self, x: Tensor) -> Any:
        norm = self.bn
        return F.batch_norm(self.conv(x), norm.running_mean, norm.running_var, norm.weight * x.mean())


COMPUTED: dict[Any, str] = {
    ComputedWeight: "the weight of the root (conv2d) is computed at every call, and not from parameters and buffers",
    ComputedScale: "its weight is computed at every call, and not from parameters and buffers alone",
}


@pytest.mark.parametrize("make", COMPUTED)
def test_says_what_is_computed(make: Any) -> None:
    assert any(COMPUTED[make] in text for text in refused(make(), image()))


class ByPosition(Lines):
    """The scale has one number for each position, of which there are as many as features."""

    example = image(2, 6, 5)
    shape = (6, 1)


class Spread(Scaled):
    """The scale has one number for each image, and there are as many images as channels."""

    example = image(4, 3, 8, 8)
    shape = (4, 1, 1, 1)


class Whole(Scaled):
    shape = (4, 6, 6)


class Wider(Lines):
    """The scale adds a dim to the product."""

    shape = (1, 1, 1, 6)


class InPlaceScaled(Scaled):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x).mul_(self.gamma)


class DividedBy(Scaled):
    def forward(self, x: Tensor) -> Any:
        return self.gamma / self.layer(x)


class WithAlpha(Scaled):
    def forward(self, x: Tensor) -> Any:
        return torch.add(self.layer(x), self.gamma, alpha=2)


class Rounded(Scaled):
    def forward(self, x: Tensor) -> Any:
        return torch.div(self.layer(x), self.gamma, rounding_mode="floor")


class OfTwo(Scaled):
    """The product of two parameters, or of one and a number, has no layer before it."""

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).tanh() + self.gamma * self.gamma + 2 * self.gamma


class OwnForward(Pair):
    class Conv(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    def more(self) -> None:
        self.conv = self.Conv(3, 4, 3)


def _hooked() -> nn.Module:
    model = Pair()
    model.conv.register_forward_hook(lambda module, args, output: output * 2)
    return model


UNTOUCHED = [
    ByPosition, Spread, Whole, Wider, InPlaceScaled, DividedBy, WithAlpha, Rounded, OfTwo, OwnForward, DropsStill,
    FrontUsed, _hooked,
]  # fmt: skip


@pytest.mark.parametrize("make", UNTOUCHED)
def test_leaves_alone_what_is_no_pair(make: Any) -> None:
    assert refused(make(), getattr(make, "example", image())) == []


def test_an_operator_of_another_library_is_no_layer() -> None:
    """Its name is that of a layer."""

    @torch.library.custom_op("fold_conv_bn_test::linear", mutates_args=())
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight.T).abs()

    @linear.register_fake
    def _(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    class Own(Moved):
        def forward(self, x: Tensor) -> Any:
            return self.norm(torch.ops.fold_conv_bn_test.linear(x, self.layer.weight))

    assert refused(Own(), image(4, 5)) == []


def test_a_norm_that_is_in_training_is_left_alone() -> None:
    model = Pair().eval()
    model.bn.train()
    tree, context = captured(model, image(), keep_flags=True)
    ((where, reason),) = sentences_of(FoldConvBn().run(tree, context))
    assert (where, reason) == ("bn", "it uses the statistics of the batch")


class Logarithmic(Tensor):
    """A tensor class with its own arithmetic, as in quantization libraries."""


class Sparse(Lines):
    """The product with a sparse tensor is sparse."""

    def more(self) -> None:
        super().more()
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0, 0.0, 3.0, 0.0]).to_sparse())

    def forward(self, x: Tensor) -> Any:
        return (self.layer(x[0]) * self.mask).to_dense()


class WholeNumbers(Scaled):
    """A linear function and a product with integers."""

    example = image(3, 4)

    def more(self) -> None:
        self.register_buffer("weight", torch.arange(12).view(3, 4))
        self.register_buffer("other", torch.arange(3))

    def forward(self, x: Tensor) -> Any:
        return x + (F.linear(x.long(), self.weight) * self.other).sum(1, keepdim=True)


def _of_another_class() -> nn.Module:
    model = Pair()
    model.conv.weight = nn.Parameter(model.conv.weight.detach().as_subclass(Logarithmic))
    return model


def _in_blocks() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight = nn.Parameter(laid_out("csr", model[0].weight.detach()))
    return model


@pytest.mark.parametrize(
    ("make", "x"),
    [(_of_another_class, image()), (_in_blocks, image(3, 4)), (Sparse, Lines.example), (WholeNumbers, image(3, 4))],
)
def test_tensors_that_cant_be_folded_stay(make: Any, x: Tensor) -> None:
    model = make().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(x,))
    assert report_of(fast).passes[0].changes == ()
    assert torch.equal(fast(x), model(x))


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_keep_theirs(dtype: torch.dtype) -> None:
    model, x = Pair(bias=False).to(dtype).eval(), image().to(dtype)
    fast = folded(model, x)
    assert fast(x).dtype is dtype
    assert computed("batch_norm", fast, x) == 0


class CancellingFunctions(nn.Module):
    """Two pairs of functions in one forward; only their order distinguishes them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.usual, self.cancelling = (nn.Parameter(torch.randn(4, 3, 3, 3, generator=generator)) for _ in range(2))
        models.let_cancel(self.cancelling)
        for name in ("first", "second"):
            self.register_buffer(f"{name}_mean", torch.rand(4, generator=generator))
            self.register_buffer(f"{name}_var", torch.rand(4, generator=generator) + 0.5)

    def forward(self, x: Tensor) -> Any:
        usual = F.batch_norm(F.conv2d(x, self.usual), self.first_mean, self.first_var)
        return usual, F.batch_norm(F.conv2d(x + 1000, self.cancelling), self.second_mean, self.second_var)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_two_pairs_of_functions_only_the_one_that_loses_too_much_is_left_alone(dtype: torch.dtype) -> None:
    model, x = CancellingFunctions().to(dtype).eval(), image().to(dtype)
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(x,))
    (record,) = report_of(fast).passes
    assert (len(record.changes), len(record.skips)) == (1, 1)
    assert "it loses too much to rounding" in record.skips[0].text
    assert computed("batch_norm", fast, x) == 1
    with torch.no_grad():
        assert torch.equal(fast(x)[1], model(x)[1])


@pytest.mark.parametrize("tensor", ["running_var", "weight", "bias"])
def test_refuses_what_would_not_be_finite(tensor: str) -> None:
    model = Pair()
    model.bn.eps = 2**-10
    with torch.no_grad():
        getattr(model.bn, tensor)[0] = -model.bn.eps if tensor == "running_var" else float("inf")
    assert refused(model, image()) == ["the new weights wouldn't be finite"]


# Afterwards -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fast_pair() -> Any:
    return folded(Pair(), image())


@pytest.mark.parametrize("cls", models.UNSEEN)
def test_a_branch_that_was_not_seen_answers_as_the_model(cls: type[nn.Module]) -> None:
    model = cls().eval()
    fast = optimize(model, BOTH, example_inputs=(image(),))
    for twin in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        for x in (image(seed=4), FAR, image(seed=4)):
            _same_parts(twin, model, x)


def _same_parts(fast: nn.Module, model: nn.Module, x: Tensor) -> None:
    def parts(value: Any) -> Any:
        return [value.features, value.rest[0].features] if isinstance(value, models.Output) else value

    with torch.no_grad():
        wanted, got = (parts(one(x)) for one in (model, fast))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-2 if x is FAR else 1e-4)


def test_an_error_of_the_model_stays_its_own() -> None:
    fast = optimize(models.IslandRaises().eval(), ["fold-conv-bn"], example_inputs=(image(),))
    before = fast(image(seed=4))
    with pytest.raises(ValueError, match="too large"):
        fast(FAR)
    assert torch.equal(fast(image(seed=4)), before)


def _other_state(model: nn.Module) -> dict[str, Tensor]:
    return enliven(copy.deepcopy(model), seed=9).state_dict()


def _replace_layer(model: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model.conv = nn.Conv2d(3, 4, 3, padding=1)


def _set_data(model: Any) -> None:
    model.bn.weight.data = torch.full((4,), 0.25)


def _write(model: Any) -> None:
    with torch.no_grad():
        model.bn.running_var.mul_(4)
        model.conv.weight[0] = 1


def _hook(model: Any) -> None:
    model.conv.register_forward_hook(lambda module, args, output: output * 2)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another state dict": lambda model: model.load_state_dict(_other_state(model)),
    "assigned": lambda model: model.load_state_dict(_other_state(model), assign=True),
    "a layer replaced": _replace_layer,
    "data set": _set_data,
    "written in place": _write,
    "statistics of the batch": lambda model: model.bn.train(),
    "eps": lambda model: setattr(model.bn, "eps", 1.0),
    "a hook": _hook,
    "no norm": lambda model: setattr(model, "bn", nn.Identity()),
    "other padding": lambda model: setattr(model.conv, "padding", (0, 2)),
    "dtype": lambda model: model.double(),
    "a frozen bias": lambda model: model.conv.bias.requires_grad_(False),
    "not finite": lambda model: model.bn.running_var.fill_(-1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_later_change_counts_at_the_next_call(change: str, fast_pair: Any) -> None:
    model, fast = Pair().eval(), copy.deepcopy(fast_pair)
    same(fast, model, image())
    for one in (model, fast):
        CHANGES[change](one)
    x = image(seed=3).to(model.bn.running_mean.dtype if change == "dtype" else torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4, equal_nan=True)
    same(copy.deepcopy(fast_pair), Pair().eval(), image())


def test_trainable_parameters_get_their_gradients(fast_pair: Any) -> None:
    model, fast, x = Pair().eval(), copy.deepcopy(fast_pair).requires_grad_(), image()
    for one in (model, fast):
        one(x).square().sum().backward()
    gradients = dict(model.named_parameters())
    for name, parameter in fast.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("cls", [Pair, Functional, models.AcrossModules, models.Island])
def test_gradients_of_the_inputs_are_those_of_the_original(cls: type[nn.Module]) -> None:
    model = cls().eval().double()
    fast = optimize(model, BOTH, example_inputs=(image().double(),))
    found = []
    for module in (model, fast.requires_grad_(False)):
        x = image(3, 3, 8, 8).double().requires_grad_()
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x)
        found.append(gradient)
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


def test_under_the_callers_autocast_the_result_runs_as_written(fast_pair: Any) -> None:
    model = Pair().eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(fast_pair(image()), model(image()))
    same(fast_pair, model, image())


def test_autocast_that_is_off_or_elsewhere_is_no_hindrance() -> None:
    class Off(Pair):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", enabled=False):
                return self.bn(self.conv(x))

    class Beside(Pair):
        def more(self) -> None:
            self.other = Pair()

        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.other(x).float()
            return self.bn(self.conv(x)) + y

    for model in (Off(), Beside()):
        fast = optimize(model.eval(), ["fold-conv-bn"], example_inputs=(image(),))
        assert [change.where for change in report_of(fast).passes[0].changes] == ["bn"]
        assert check_parity(model, fast, (image(),), batch_sizes=(1, 2, 5), draws=1).ok


@pytest.mark.parametrize("order", [["fold-conv-bn", "cast-precision"], ["cast-precision", "fold-conv-bn"]])
def test_folds_inside_of_the_autocast_that_a_pass_sets_around_the_model(order: list[str]) -> None:
    model, x = Pair().eval(), image()
    fast = optimize(model, order, example_inputs=(x,))
    assert [record.status for record in report_of(fast).passes] == ["applied", "applied"]
    assert computed("batch_norm", fast, x) == 0
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=0.05, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Pair, Flattened, BothSides, Shifted, FrozenNorm])
def test_files_hold_the_fold(make: Any, tmp_path: Any) -> None:
    model, x = make().eval(), getattr(make, "example", image())
    fast = optimize(model, example_inputs=(x,))
    bundle = export(fast, example_inputs=(x,), output=tmp_path / "out", formats=("torchscript", "onnx", "pt2"))
    assert bundle.parity.ok


@pytest.mark.parametrize("cls", [Pair, models.AcrossModules])
def test_keeps_the_contract(cls: type[nn.Module]) -> None:
    assert len(check_pass(FoldConvBn(), cls().eval(), (image(),)).changes) == 1
