"""Folding products and sums with a parameter or buffer into the layer before them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from folding_models import Scale, image
from laid_out import laid_out
from pass_contract import captured, sentences_of
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import check_parity, export, optimize, report_of
from passes import CastPrecision, FoldConvBias, FoldConvBn
from passes.errors import UnseenCall

IMAGE, LINE = image(), image(2, 7, 5)


class Scaled(nn.Module):
    """A convolution and a product by channel; subclasses use the two in other ways."""

    example = IMAGE
    shape: tuple[int, ...] = (4, 1, 1)

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Conv2d(3, 4, 3)
        self.more()
        enliven(self)
        self.gamma = nn.Parameter(0.5 + torch.rand(self.shape, generator=torch.Generator().manual_seed(1)))

    def more(self) -> None:
        """Add or replace modules in a subclass."""

    def forward(self, x: Tensor) -> Any:
        return (self.layer(x) * self.gamma).relu()


class Batched(Scaled):
    shape = (1, 4, 1, 1)


class ForAll(Scaled):
    shape = ()


class Linear(Scaled):
    example = LINE
    shape = (6,)

    def more(self) -> None:
        self.layer = nn.Linear(5, 6)


class Transposed(Linear):
    shape = (6, 1)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).transpose(1, 2).div(self.gamma)


class WithoutBias(Linear):
    def more(self) -> None:
        self.layer = nn.Linear(5, 6, bias=False)

    def forward(self, x: Tensor) -> Any:
        return torch.add(self.layer(x), self.gamma)


class Shifted(Scaled):
    """Several kinds of products and differences in a row, around a BatchNorm."""

    def more(self) -> None:
        self.norm = nn.BatchNorm2d(4)
        self.beta = nn.Parameter(image(4, 1, 1, seed=2))
        self.register_buffer("mean", image(1, 4, 1, 1, seed=3))
        self.register_buffer("spread", 0.5 + image(4, 1, 1, seed=4).abs())

    def forward(self, x: Tensor) -> Any:
        y = self.mean - self.gamma * self.layer(x)
        return self.norm(y.sub(self.beta)) / self.spread


class Island(Scaled):
    """The product is in a separate module, and a data-dependent branch decides whether it runs."""

    def more(self) -> None:
        self.scale = Scale()

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return y if x.sum() > 1e3 else self.scale(y)


class BehindNorm(Scaled):
    """The BatchNorm is inside a block, and the product comes after the block."""

    def more(self) -> None:
        self.layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


FOLDED: dict[type[Scaled], int] = {
    Scaled: 1, Batched: 1, ForAll: 1, Linear: 1, Transposed: 1, WithoutBias: 1, Shifted: 5, Island: 1, BehindNorm: 2,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", FOLDED)
def test_folds_and_stays_right(kind: type[Scaled], dtype: torch.dtype) -> None:
    model, x = kind().to(dtype).eval(), kind.example.to(dtype)
    before = copy.deepcopy(model.state_dict())
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(x,))
    assert len(report_of(fast).passes[0].changes) == FOLDED[kind], report_of(fast).passes[0].skips
    if dtype is torch.float64:
        torch.testing.assert_close(fast(x), model(x), rtol=1e-11, atol=1e-11)
    report = check_parity(model, fast, (x,), batch_sizes=(1, 2, 5))
    assert report.ok, report.reason
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    again = optimize(copy.deepcopy(fast), example_inputs=(x,))
    assert check_parity(model, again, (x,), batch_sizes=(2, 3)).ok


def test_a_product_is_right_on_any_rank() -> None:
    model = Linear().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(LINE,))
    for x in (image(4, 5), image(5), image(2, 3, 4, 5)):
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_scale_that_adds_dims_to_other_ranks_raises_there() -> None:
    model = Batched().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(IMAGE,))
    assert model(IMAGE[0]).shape == (1, 4, 6, 6)
    with pytest.raises(UnseenCall, match="4-D input"):
        fast(IMAGE[0])


@pytest.mark.slow
def test_what_is_folded_can_be_exported_and_compiled(tmp_path: Any) -> None:
    model = Shifted().eval()
    fast = optimize(model, example_inputs=(IMAGE,))
    bundle = export(fast, example_inputs=(IMAGE,), output=tmp_path / "out", formats=("torchscript", "onnx"))
    assert bundle.parity.ok
    torch.testing.assert_close(torch.compile(fast, backend="eager")(IMAGE), model(IMAGE), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Scaled, Linear, Island, BehindNorm])
def test_another_way_raises(kind: type[Scaled]) -> None:
    model = kind().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(model.example,))
    for use in (
        lambda y: y + 1,
        lambda y: y * 2,
        lambda y: y + model.gamma,
        lambda y: y - fast.gamma,
        lambda y: fast.gamma - y,
    ):
        with pytest.raises(UnseenCall, match="its output was used without it"):
            use(fast.layer(model.example))
    if kind is Island:
        with pytest.raises(UnseenCall):
            fast(model.example + 1e3)


def test_a_factor_that_is_given_again_raises() -> None:
    fast = optimize(Scaled().eval(), ["fold-conv-bn"], example_inputs=(IMAGE,))
    fast.gamma = nn.Parameter(torch.ones(4, 1, 1))
    with pytest.raises(UnseenCall, match="has parameters again"):
        fast(IMAGE)


class ByPosition(Linear):
    """The scale has one number for each position, not for each feature."""

    shape = (7, 1)


class Square(Linear):
    """Like `ByPosition`, with as many positions as features."""

    example = image(2, 6, 5)
    shape = (6, 1)


class Spread(Scaled):
    """The scale has one number for each image, and there are as many images as channels."""

    example = image(4, 3, 8, 8)
    shape = (4, 1, 1, 1)


class Whole(Scaled):
    shape = (4, 6, 6)


class Wider(Linear):
    """The scale adds a dim to the product."""

    shape = (1, 1, 1, 6)


class OtherDtype(Scaled):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * self.gamma64

    def more(self) -> None:
        self.gamma64 = nn.Parameter(torch.rand(4, 1, 1, dtype=torch.float64))


class Shared(Scaled):
    def more(self) -> None:
        self.other = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * self.gamma + self.other(x) * self.gamma


class Computed(Scaled):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * self.gamma.exp()


class TakesBoth(Scaled):
    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return y * self.gamma + y


class InPlace(Scaled):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x).mul_(self.gamma)


class DividedBy(Scaled):
    def forward(self, x: Tensor) -> Any:
        return self.gamma / self.layer(x)


class WithAlpha(Scaled):
    def forward(self, x: Tensor) -> Any:
        return torch.add(self.layer(x), self.gamma, alpha=2)


class WithAlphaByPosition(Scaled):
    """Calls the deprecated overload that takes `alpha` by position."""

    def forward(self, x: Tensor) -> Any:
        return torch.sub(self.layer(x), 2, self.gamma)


class OfTwo(Scaled):
    """The product of two parameters, or of one and a number, has no layer before it."""

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).tanh() + self.gamma * self.other + 2 * self.gamma

    def more(self) -> None:
        self.other = nn.Parameter(torch.rand(4, 1, 1))


class Rounded(Scaled):
    def forward(self, x: Tensor) -> Any:
        return torch.div(self.layer(x), self.gamma, rounding_mode="floor")


class ByZero(Scaled):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) / self.zeros

    def more(self) -> None:
        self.register_buffer("zeros", torch.zeros(4, 1, 1))


REFUSED: dict[type[Scaled], str | None] = {
    ByPosition: None, Square: None, Spread: None, Whole: None, Wider: None, Computed: "by numbers that each call computes from gamma", InPlace: None, DividedBy: None,
    WithAlpha: None, WithAlphaByPosition: None, OfTwo: None, Rounded: None,
    OtherDtype: "gamma64 has a different dtype than its weight",
    Shared: "gamma is also used by another call of the root (mul)",
    TakesBoth: "its output is also used by the root (add)",
    ByZero: "would give weights that aren't finite",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:This overload of sub is deprecated:UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_refuses(kind: type[Scaled]) -> None:
    model = kind().eval()
    tree, context = captured(model, model.example)
    done = FoldConvBn().run(tree, context)
    reason, texts = REFUSED[kind], [text for _, text in sentences_of(done)]
    assert done.changes == ()
    assert any(reason in text for text in texts) if reason else not texts, texts
    torch.testing.assert_close(tree.root(model.example), model(model.example), rtol=0, atol=0, equal_nan=True)


class Masked(Scaled):
    """Takes an optional mask, and a size that it computes with."""

    def forward(self, x: Tensor, mask: Tensor | None = None, size: int = 1) -> Any:
        y = self.layer(x) * self.gamma / (size // 2 + 1)
        return y if mask is None else y * mask


class MaskedFunction(Masked):
    """Calls the layer as a function; the product is in a separate module."""

    def more(self) -> None:
        self.scale = Scale()

    def forward(self, x: Tensor, mask: Tensor | None = None, size: int = 1) -> Any:
        y = self.scale(nn.functional.conv2d(x, self.layer.weight, self.layer.bias))
        return y if mask is None else y * mask


class Around(nn.Module):
    """Calls a block with the arguments from its own constructor, and with a size of the input."""

    def __init__(self, block: nn.Module, *given: Any) -> None:
        super().__init__()
        self.block, self.given = block, given

    def forward(self, x: Tensor) -> Any:
        return self.block(x, *self.given, size=x.shape[2])


@pytest.mark.parametrize("kind", [Masked, MaskedFunction])
def test_a_product_in_what_is_called_with_none_is_right_with_a_mask_too(kind: type[Scaled]) -> None:
    model, mask = Around(kind(), None).eval(), image(2, 4, 6, 6, seed=7)
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(IMAGE,))
    assert len(report_of(fast).passes[0].changes) == 1
    torch.testing.assert_close(fast(IMAGE), model(IMAGE), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast.block(IMAGE, mask), model.block(IMAGE, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Masked, MaskedFunction])
def test_a_product_is_folded_where_none_is_the_default_or_the_users(kind: type[Scaled]) -> None:
    left_out, root = Around(kind()).eval(), kind().eval()
    for model, kwargs in ((left_out, {"x": IMAGE}), (root, {"x": IMAGE, "mask": None})):
        fast = optimize(model, ["fold-conv-bn"], example_kwargs=kwargs)
        assert len(report_of(fast).passes[0].changes) == 1
        torch.testing.assert_close(fast(**kwargs), model(**kwargs), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_fold_in_what_is_given_a_size_is_exported(tmp_path: Any) -> None:
    """In a trace, a size is a tensor."""
    model = Around(Masked()).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(IMAGE,))
    assert len(report_of(fast).passes[0].changes) == 1
    bundle = export(fast, example_inputs=(IMAGE,), output=tmp_path / "out", formats=("torchscript", "onnx"))
    assert bundle.parity.ok
    size = torch.tensor(8)
    torch.testing.assert_close(fast.block(IMAGE, size=size), model.block(IMAGE, size=size), rtol=1e-5, atol=1e-5)


class Sparse(Linear):
    """The product with a sparse tensor is sparse."""

    def more(self) -> None:
        super().more()
        self.register_buffer("mask", self.laid_out(torch.tensor([1.0, 0.0, 2.0, 0.0, 3.0, 0.0])))

    def laid_out(self, mask: Tensor) -> Tensor:
        return mask.to_sparse()

    def forward(self, x: Tensor) -> Any:
        return (self.layer(x[0]) * self.mask).to_dense()


class SparseRow(Sparse):
    """The same with a CSR matrix."""

    def laid_out(self, mask: Tensor) -> Tensor:
        return laid_out("csr", mask[None])

    def forward(self, x: Tensor) -> Any:
        return (self.layer(x[0, :1]) * self.mask).to_dense()


@pytest.mark.parametrize("kind", [Sparse, SparseRow])
def test_a_sparse_scale_is_refused(kind: type[Linear]) -> None:
    model = kind().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(model.example,))
    (record,) = report_of(fast).passes
    assert record.changes == ()
    assert ["mask is sparse: a fold needs dense tensors" in skip.text for skip in record.skips] == [True]
    torch.testing.assert_close(fast(model.example), model(model.example), rtol=0, atol=0)


def test_the_bias_pass_leaves_them_alone() -> None:
    tree, context = captured(Shifted().eval(), IMAGE)
    assert FoldConvBias().run(tree, context).changes == ()


def test_a_scale_whose_product_is_float32_under_autocast_is_left_alone() -> None:
    fast = optimize(Linear().eval(), [CastPrecision(), FoldConvBn()], example_inputs=(LINE,))
    _, record = fast.report.passes
    assert record.status == "unchanged"
    assert "converts its bfloat16 input to float32" in record.skips[0].text
    assert fast(LINE).dtype == torch.float32


class Frozen(nn.Module):
    """FrozenBatchNorm2d as torchvision, DETR and detectron2 (where gradients are needed) write it."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, getattr(norm, name).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, mean, var = (each.reshape(1, -1, 1, 1) for each in self.buffers())
        scale = weight * (var + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


class Viewed(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight[:, None, None] * x


class Grouped(Frozen):
    """The numbers aren't those of channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight * 2).reshape(1, 1, -1, 1) + x.mean((2, 3), keepdim=True) * (x * 0 + 1)


@pytest.mark.parametrize(("kind", "names"), [(Frozen, "1.running_var, 1.weight"), (Viewed, "1.weight"), (Grouped, "")])
def test_a_scale_that_each_call_computes_is_named(kind: type[Frozen], names: str) -> None:
    norm = enliven(nn.BatchNorm2d(4)).eval()
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    frozen = nn.Sequential(layer, kind(norm)).eval()
    (record,) = optimize(frozen, [FoldConvBn()], example_inputs=(x,)).report.passes
    found = [
        f"it scales or shifts the output of 0 by numbers that each call computes from {names}" in each.text
        for each in record.skips
    ]
    assert found == ([True] if names else [])
    if kind is Frozen:
        # The skip advises an nn.BatchNorm.
        replaced = nn.Sequential(layer, norm).eval()
        torch.testing.assert_close(replaced(x), frozen(x))
        fast = optimize(replaced, [FoldConvBn()], example_inputs=(x,))
        assert [each.status for each in fast.report.passes] == ["applied"]
