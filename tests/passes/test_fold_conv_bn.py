"""Fold BatchNorms, and products and sums by channel, into the layer before or after them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import folding_models as models
import pytest
import torch
import torch.nn.functional as F
from allocations import LargestResult
from folding_models import CONVOLUTIONS, Pair, image, norm_behind, side_by_side
from laid_out import laid_out
from operations import computed
from pass_contract import captured, check_pass, sentences_of
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import export, optimize, report_of
from passes import Example, FoldConvBn, fold_conv_bn
from passes.fold_conv_bn import FoldedBias, FoldedWeight, NormNumbers

BOTH = ["fold-conv-bias", "fold-conv-bn"]


def folded(model: nn.Module, x: Tensor, changes: int = 1, passes: list[str] | None = None) -> Any:
    """Fold the model, check the number of changes and the outputs, and that all tensors stay the model's; the result.

    `test_hard_cases.py` also tries a batch of one.
    """
    before = copy.deepcopy(model.state_dict())
    fast = optimize(model.eval(), passes or ["fold-conv-bn"], example_inputs=(x,))
    record = report_of(fast).passes[-1]
    assert len(record.changes) == changes, record.skips
    same(fast, model, torch.cat([x, 1 - x, x[:1]]))
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


@pytest.mark.parametrize(
    ("kinds", "bias", "affine"),
    [
        (CONVOLUTIONS, True, True),
        *((("conv2d", "transposed2d grouped", "linear"), *more) for more in ((False, True), (True, False))),
    ],
)
def test_after_a_layer_the_algebra_is_exact(kinds: Iterable[str], bias: bool, affine: bool) -> None:
    layers, shapes = [CONVOLUTIONS[kind][0](bias=bias) for kind in kinds], [CONVOLUTIONS[kind][1] for kind in kinds]
    norms = [norm_behind(*each, affine=affine, eps=1e-2) for each in zip(layers, shapes, strict=True)]
    model, xs = side_by_side(*map(nn.Sequential, layers, norms), shapes=shapes)
    tree, context = captured(model, xs, keep_flags=True)
    changes = [(change.where, change.what) for change in FoldConvBn().run(tree, context).changes]
    assert changes == [(f"blocks.{place}.1", f"folded into blocks.{place}.0") for place in range(len(layers))]
    assert computed("batch_norm", tree.root, *xs) == 0
    with torch.no_grad():
        torch.testing.assert_close(tree.root(*xs), wanted := model(*xs), rtol=1e-12, atol=1e-12)
    for layer, x, output in zip(layers, xs, wanted, strict=True):
        assert not torch.allclose(layer(x), output, rtol=1e-2, atol=1e-2), "this BatchNorm does nothing to be folded"


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
    "linear": (lambda **k: nn.Linear(4, 6, **k), (2, 4)),
}
_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.mark.parametrize(("bias", "affine"), [(True, True), (False, False)])
def test_before_a_layer_the_algebra_is_exact(affine: bool, bias: bool) -> None:
    layers, shapes = zip(*((make(bias=bias), shape) for make, shape in LAYERS.values()), strict=True)
    blocks = [
        nn.Sequential(_NORMS[len(shape)](4, affine=affine), layer, nn.ReLU())
        for layer, shape in zip(layers, shapes, strict=True)
    ]
    model, xs = side_by_side(*blocks, shapes=shapes)
    tree, context = captured(model, xs)
    changes = [(change.where, change.what) for change in FoldConvBn().run(tree, context).changes]
    assert sorted(changes) == [(f"blocks.{place}.0", f"folded into blocks.{place}.1") for place in range(len(layers))]
    assert computed("batch_norm", tree.root, *xs) == 0
    with torch.no_grad():
        torch.testing.assert_close(tree.root(*xs), model(*xs), rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("cls", models.FOLDED)
def test_folds_every_spelling(cls: type[nn.Module]) -> None:
    twice = cls in (models.TwoNorms, models.TorchFunctions, models.SharedBlock)
    fast = folded(cls(), image(), 1 + twice, BOTH)
    assert (report_of(fast).passes[0].status == "applied") is (cls not in (models.Functional, models.TorchFunctions))
    assert computed("batch_norm", fast, image()) == 0
    if cls is models.SharedBlock:
        # Two calls are two places.
        places = [(change.where, change.text) for change in report_of(fast).passes[-1].changes]
        assert places == [("block.1", "folded into block.0"), ("block.1, call 2", "folded into block.0, call 2")]
    if cls in (Pair, models.Functional):
        for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            same(twin, fast, image(seed=7))


MAPS = {"layer": "nn.Conv2d(3, 4, 3)", "norm": "nn.BatchNorm2d(4)"}
FRONT = {"norm": "nn.BatchNorm2d(4)", "layer": "nn.Conv2d(4, 6, 3)"}
# A linear layer, whose features must be in dim 1, the channel dim of the BatchNorm.
ROWS = {"layer": "nn.Linear(5, 6)", "norm": "nn.BatchNorm1d(6)"}


def scaled(shape: str, layer: str = "nn.Conv2d(3, 4, 3)") -> dict[str, str]:
    return {"layer": layer, "gamma": f"nn.Parameter(torch.rand({shape}))"}


MAP = scaled("4, 1, 1")
# For a linear layer, the features are the last dim for a product, whatever the rank.
LINES = "nn.Linear(5, 6, bias=False)"

# Each with the number of its changes.
FOLDED: dict[str, tuple[Example, int]] = {
    "moved": (Example("norm(layer(x).transpose(1, 2)).relu()", (2, 7, 5), ROWS), 1),
    # As LeViT does.
    "flattened": (Example("norm((y := layer(x)).flatten(0, 1)).reshape_as(y)", (2, 7, 5), ROWS), 1),
    "viewed": (Example("norm((y := layer(x)).view(-1, 6)).view(y.shape)", (2, 7, 5), ROWS), 1),
    "permuted": (Example("norm(torch.permute(layer(x), (0, 2, 1)).contiguous())", (2, 7, 5), ROWS), 1),
    "by keywords": (
        Example(
            "F.batch_norm(torch.transpose(layer(x), dim1=1, dim0=2).unsqueeze(dim=-1).flatten(start_dim=2), "
            "norm.running_mean, norm.running_var)",
            (2, 7, 5),
            ROWS,
        ),
        1,
    ),
    "pixels": (
        Example("norm(flat(layer(x)))", (2, 3, 8, 8), MAPS | {"norm": "nn.BatchNorm1d(4)", "flat": "nn.Flatten(2)"}),
        1,
    ),
    "dropped": (
        Example(
            "norm(F.dropout(drop(layer(x)), 0.2, self.training))", (2, 3, 8, 8), MAPS | {"drop": "nn.Dropout2d(0.3)"}
        ),
        1,
    ),
    "padded by copies": (Example("norm(F.pad(layer(x), (1, 1, 1, 1), mode='reflect'))", (2, 3, 8, 8), MAPS), 1),
    "before, transposed": (
        Example("layer(norm(x).transpose(1, 2))", (2, 6, 7), ROWS | {"layer": "nn.Linear(6, 4)"}),
        1,
    ),
    "before, written": (
        Example("layer(norm(F.relu(x.clone(), inplace=True)))", (3, 6), ROWS | {"layer": "nn.Linear(6, 4)"}),
        1,
    ),
    "before, asked for its shape": (
        Example(
            "layer((y := norm(x)).unsqueeze(0)).reshape(y.shape[0], 4) + torch.zeros(4, 4)[:1].expand_as(layer(x))",
            (3, 6),
            ROWS | {"layer": "nn.Linear(6, 4)"},
        ),
        1,
    ),
    "both sides": (
        Example(
            "second(conv(first(x)))",
            (2, 6, 8, 8),
            {"first": "nn.BatchNorm2d(6)", "conv": "nn.Conv2d(6, 6, 3)", "second": "nn.BatchNorm2d(6)"},
        ),
        2,
    ),
    # A BatchNorm between two convolutions is folded into the first.
    "two on each side": (
        Example(
            "last(d(c(conv(b(a(x)))).transpose(2, 3).clone()))",
            (2, 6, 8, 8),
            {**dict.fromkeys("abcd", "nn.BatchNorm2d(6)"), "conv": "nn.Conv2d(6, 6, 3)", "last": "nn.Conv2d(6, 6, 1)"},
        ),
        4,
    ),
    "scaled": (Example("(layer(x) * gamma).relu()", (2, 3, 8, 8), MAP), 1),
    "scaled, batched": (Example("layer(x) * gamma", (2, 3, 8, 8), scaled("1, 4, 1, 1")), 1),
    "scaled, one for all": (Example("layer(x) * gamma", (2, 3, 8, 8), scaled("()")), 1),
    "lines": (Example("layer(x) * gamma", (2, 7, 5), scaled("6", LINES)), 1),
    "lines, transposed": (Example("layer(x).transpose(1, 2).div(gamma)", (2, 7, 5), scaled("6, 1", LINES)), 1),
    "several products and differences": (
        Example(
            "torch.add(norm((mean - gamma * layer(x)).sub(beta)), beta) / spread",
            (2, 3, 8, 8),
            MAP | MAPS | dict.fromkeys(("beta", "mean", "spread"), "nn.Parameter(torch.rand(4, 1, 1))"),
        ),
        6,
    ),
}


class FrozenNorm(nn.Module):
    """FrozenBatchNorm2d as torchvision, DETR and detectron2 (where gradients are needed) write it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        enliven(self)

    def forward(self, x: Tensor) -> Any:
        norm = self.norm
        tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        weight, bias, mean, var = (each.reshape(1, -1, 1, 1) for each in tensors)
        scale = weight * (var + 1e-5).rsqrt()
        return self.layer(x) * scale + (bias - mean * scale)


def made(example: Example) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return example.module(), torch.randn(example.shape)


@pytest.mark.parametrize("name", [*FOLDED, "frozen"])
def test_folds_and_stays_right(name: str) -> None:
    (model, x), count = ((FrozenNorm(), image()), 2) if name == "frozen" else (made(FOLDED[name][0]), FOLDED[name][1])
    fast = folded(model, x, count)
    assert computed("batch_norm", fast, x) == 0


# Refusals -------------------------------------------------------------------------------------------------------------


class InAutocast(Pair):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.bn(self.conv(x)).float()
        return y.relu() + x.mean()


class WritesView(Pair):
    """Writes to a statistic through a view that a plain attribute holds."""

    def more(self) -> None:
        self.center = self.bn.running_mean.view(1, 4, 1, 1)

    def forward(self, x: Tensor) -> Any:
        self.center.add_(0.5)
        return self.bn(self.conv(x))


IMAGES = (2, 3, 8, 8)
# More stand on the pass.
REFUSED = [
    # The module that uses the output is named `size`, like a method that only reads the shape.
    Example("norm(y := layer(x)) + size(y)", IMAGES, MAPS | {"size": "nn.Conv2d(4, 4, 1)"}, "also used by size"),
    Example("(norm(y := layer(x)), y)", IMAGES, MAPS, "its output leaves the graph"),
    Example("(setattr(self, 'last', y := layer(x)), norm(y))[1]", IMAGES, MAPS, "its output leaves the graph"),
    Example("(y := layer(x), y[:, 0].add_(1), norm(y))[2]", IMAGES, MAPS, "also used by the root (getitem)"),
    Example("norm(layer(x))", (2, 6, 5), ROWS, "its input is 3-D, where the BatchNorm's channels are not the outputs"),
    # BatchNorm1d treats the output of a convolution without a batch as a batch of vectors.
    Example(
        "norm(layer(x))", (5, 6), ROWS | {"layer": "nn.Conv1d(5, 6, 1)"}, "its input is 2-D, where the BatchNorm's"
    ),
    Example(
        "norm(layer(x).clone())", (2, 6, 5), ROWS, "(clone), after which its channels are not those of the BatchNorm"
    ),
    Example(
        "norm(layer(x).flatten(1))",
        (2, 7, 5),
        {"layer": "nn.Linear(5, 2)", "norm": "nn.BatchNorm1d(14)"},
        "its output passes through the root (flatten), after which its channels aren't known",
    ),
    Example("norm(F.pad(layer(x), (1, 1, 1, 1)))", IMAGES, MAPS, "(pad), after which its channels aren't known"),
    Example("norm(y := layer(x).transpose(1, 2)) + y", (2, 7, 5), ROWS, "also used by the root (add)"),
    Example("(y := layer(x), z := y.transpose(1, 2), y.mul_(2), norm(z))[3]", (2, 7, 5), ROWS, "the root (mul_)"),
    # It uses the value itself in `reshape_as`, not only its shape.
    Example(
        "norm((y := layer(x)).transpose(1, 2)).transpose(1, 2) + y.reshape_as(x[..., :1].expand(-1, -1, 6))",
        (2, 7, 5),
        ROWS,
        "also used by the root (reshape_as)",
    ),
    Example(
        "layer(norm(x))",
        (2, 4, 8, 8),
        FRONT | {"layer": "nn.ConvTranspose2d(4, 6, 3)"},
        "the outputs of a transposed convolution near the border are sums of fewer products",
    ),
    Example(
        "(x := x.clone(), y := norm(x), x.zero_(), layer(y) + x.sum())[3]",
        (2, 4, 8, 8),
        FRONT,
        "the input of the BatchNorm may be written to before the layer runs",
    ),
    # The linear layer computes on the positions, of which there are as many as channels.
    Example(
        "layer(norm(x))",
        (2, 4, 4),
        {"norm": "nn.BatchNorm1d(4)", "layer": "nn.Linear(4, 6)"},
        "the input of layer is 3-D, where the BatchNorm's channels are not the inputs of the linear layer",
    ),
    Example(
        "layer(norm(x).clone())",
        (2, 4, 4),
        {"norm": "nn.BatchNorm1d(4)", "layer": "nn.Linear(4, 6)"},
        "(clone), after which its channels are not those of layer",
    ),
    Example("(norm.running_mean.add_(0.5), norm(layer(x)))[1]", IMAGES, MAPS, "may write to norm.running_mean"),
    Example(
        "(s := gamma.clone(), s.mul_(2), layer(x) * s)[2]",
        IMAGES,
        MAP,
        "may write to the other operand of the root (mul)",
    ),
    Example("(y := layer(x)) * gamma + y", IMAGES, MAP, "also used by the root (add)"),
    Example("layer(x) * gamma.double()", IMAGES, MAP, "the root (mul) converts its float32 input to float64"),
    Example("layer(x) / (gamma * 0)", IMAGES, MAP, "the new weights wouldn't be finite"),
    Example("norm(F.conv2d(x, layer.weight * x.mean()))", IMAGES, MAPS, "(conv2d) is computed at every call"),
    Example(
        "F.batch_norm(layer(x), norm.running_mean, norm.running_var, norm.weight * x.mean())",
        IMAGES,
        MAPS,
        "its weight is computed at every call, and not from parameters and buffers alone",
    ),
]


# What is no pair has no reason.
UNTOUCHED = [
    # One number for each position, of which there are as many as features; one for each image; one for each element.
    Example("layer(x) * gamma", (2, 6, 5), scaled("6, 1", LINES)),
    Example("layer(x) * gamma", (4, 3, 8, 8), scaled("4, 1, 1, 1")),
    Example("layer(x) * gamma", IMAGES, scaled("4, 6, 6")),
    # The scale adds a dim to the product.
    Example("layer(x) * gamma", (2, 7, 5), scaled("1, 1, 1, 6", LINES)),
    Example("layer(x).mul_(gamma)", IMAGES, MAP),
    Example("gamma / layer(x)", IMAGES, MAP),
    Example("torch.add(layer(x), gamma, alpha=2)", IMAGES, MAP),
    Example("torch.div(layer(x), gamma, rounding_mode='floor')", IMAGES, MAP),
    # The product of two parameters, or of one and a number, has no layer before it.
    Example("layer(x).tanh() + gamma * gamma + 2 * gamma", IMAGES, MAP),
    # Its dropout draws random numbers in eval too.
    Example("(torch.manual_seed(0), norm(F.dropout(layer(x), 0.2, training=True)))[1]", IMAGES, MAPS),
    Example("layer((y := norm(x)).transpose(2, 3)) + y.transpose(2, 3)[:, :1, :6, :6]", (2, 4, 8, 8), FRONT),
]


@pytest.mark.parametrize("example", [*REFUSED, *UNTOUCHED], ids=lambda example: f"{example.forward}, {example.layers}")
def test_refuses_with_the_reason_and_stays_right(example: Example) -> None:
    texts = refused(*made(example))
    assert any(example.reason in text for text in texts) if example.reason else not texts, texts


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (InAutocast, "it runs under autocast to bfloat16, where a fold changes the dtypes of"),
        (WritesView, "the forward may write to bn.running_mean"),
    ],
)
def test_refuses_what_a_module_does(make: Any, reason: str) -> None:
    assert any(reason in text for text in refused(make(), image()))


def test_an_operator_of_another_library_is_no_layer() -> None:
    """Its name is that of a layer."""

    @torch.library.custom_op("fold_conv_bn_test::linear", mutates_args=())
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight.T).abs()

    @linear.register_fake
    def _(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    example = Example("norm(torch.ops.fold_conv_bn_test.linear(x, layer.weight))", (4, 5), ROWS)
    assert refused(*made(example)) == []


class Logarithmic(Tensor):
    """A tensor class with its own arithmetic, as in quantization libraries."""


class Sparse(nn.Module):
    """The product with a sparse tensor is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 6)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0, 0.0, 3.0, 0.0]).to_sparse())

    def forward(self, x: Tensor) -> Any:
        return (self.layer(x) * self.mask).to_dense()


# A linear function and a product with integers.
WHOLE_NUMBERS = Example(
    "x + (F.linear(x.long(), weight) * other).sum(1, keepdim=True)",
    (3, 4),
    {"weight": "nn.Buffer(torch.arange(12).view(3, 4))", "other": "nn.Buffer(torch.arange(3))"},
)


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
    [
        (_of_another_class, image()),
        (_in_blocks, image(3, 4)),
        (Sparse, image(7, 5)),
        (WHOLE_NUMBERS.module, image(3, 4)),
    ],
)
def test_tensors_that_cant_be_folded_stay(make: Any, x: Tensor) -> None:
    model = make().eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(x,))
    assert report_of(fast).passes[0].changes == ()
    assert torch.equal(fast(x), model(x))


# Numbers --------------------------------------------------------------------------------------------------------------


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


# What else may change counts too: see `test_after_graph_passes.py`.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "statistics of the batch": lambda model: model.bn.train(),
    "eps": lambda model: setattr(model.bn, "eps", 1.0),
    "other padding": lambda model: setattr(model.conv, "padding", (0, 2)),
    "not finite": lambda model: model.bn.running_var.fill_(-1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_later_change_counts_at_the_next_call(change: str, fast_pair: Any) -> None:
    model, fast = Pair().eval(), copy.deepcopy(fast_pair)
    same(fast, model, image())
    for one in (model, fast):
        CHANGES[change](one)
    with torch.no_grad():
        torch.testing.assert_close(fast(image()), model(image()), rtol=1e-4, atol=1e-4, equal_nan=True)
    same(copy.deepcopy(fast_pair), Pair().eval(), image())


def test_under_the_callers_autocast_the_result_runs_as_written(fast_pair: Any) -> None:
    model = Pair().eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(fast_pair(image()), model(image()))
    same(fast_pair, model, image())


@pytest.mark.parametrize("order", [["fold-conv-bn", "cast-precision"], ["cast-precision", "fold-conv-bn"]])
def test_folds_inside_of_the_autocast_that_a_pass_sets_around_the_model(order: list[str]) -> None:
    model, x = Pair().eval(), image()
    fast = optimize(model, order, example_inputs=(x,))
    assert [record.status for record in report_of(fast).passes] == ["applied", "applied"]
    assert computed("batch_norm", fast, x) == 0
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=0.05, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flattened", "both sides", "several products and differences", "frozen"])
def test_files_hold_the_fold(name: str, tmp_path: Any) -> None:
    model, x = (FrozenNorm().eval(), image()) if name == "frozen" else made(FOLDED[name][0])
    fast = optimize(model, example_inputs=(x,))
    bundle = export(fast, example_inputs=(x,), output=tmp_path / "out", formats=("torchscript", "onnx", "pt2"))
    assert bundle.parity.ok


def test_keeps_the_contract() -> None:
    assert len(check_pass(FoldConvBn(), models.AcrossModules().eval(), (image(),)).changes) == 1
