"""Training steps of the sizes in the goals of `insert-checkpoints`.

Some are of well-known models, of which nothing is downloaded. The others are of plain models whose blocks exchange more
than one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TrainingStep:
    """A model in training, and a batch.

    Attributes:
        kwargs: the arguments of one call of the model.
        rows: the paths of its rows of blocks, which run one after the other: what a user would checkpoint by hand.
        is_chain: whether the blocks of a row pass on one tensor, so that several can be checkpointed as one.
    """

    model: nn.Module
    kwargs: dict[str, Any]
    rows: tuple[str, ...]
    is_chain: bool = True


def resnet50(scale: float = 1.0) -> TrainingStep:
    from transformers import ResNetConfig, ResNetForImageClassification

    rows = tuple(f"resnet.encoder.stages.{number}.layers" for number in range(4))
    return TrainingStep(ResNetForImageClassification(ResNetConfig()), _images(4, 112, scale), rows)


def convnext_tiny(scale: float = 1.0) -> TrainingStep:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    rows = tuple(f"convnext.encoder.stages.{number}.layers" for number in range(4))
    return TrainingStep(ConvNextForImageClassification(ConvNextConfig()), _images(4, 112, scale), rows)


def vit_small(scale: float = 1.0, layers: int = 12) -> TrainingStep:
    from transformers import ViTConfig, ViTForImageClassification

    kwargs = _images(4, 224, scale)
    side = kwargs["pixel_values"].shape[-1]
    config = ViTConfig(
        hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_hidden_layers=layers, image_size=side
    )
    return TrainingStep(ViTForImageClassification(config), kwargs, ("vit.layers",))


def bert(scale: float = 1.0) -> TrainingStep:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048)
    kwargs = {"input_ids": _tokens(4, 256, 1000, scale), "labels": _classes(4)}
    return TrainingStep(BertForSequenceClassification(config), kwargs, ("bert.encoder.layer",))


def gpt2(scale: float = 1.0, layers: int = 12, words: int = 50257) -> TrainingStep:
    """Computes its own loss. One of its texts is shorter, and padded.

    Without padding, transformers makes no mask for real tensors, but makes one for fake tensors.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = _tokens(2, 512, 1000, scale)
    mask = torch.ones_like(tokens)
    mask[-1, -len(tokens[0]) // 4 :] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    kwargs = {"input_ids": tokens, "attention_mask": mask, "labels": labels, "use_cache": False}
    return TrainingStep(
        GPT2LMHeadModel(GPT2Config(n_layer=layers, vocab_size=words, bos_token_id=0, eos_token_id=0)),
        kwargs,
        ("transformer.h",),
    )


def t5(scale: float = 1.0) -> TrainingStep:
    """The first block makes the bias of the attention, and all other blocks use it."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=256, d_ff=1024, num_layers=2, vocab_size=4000, decoder_start_token_id=0)
    tokens = _tokens(2, 128, 1000, scale)
    rows = ("encoder.block", "decoder.block")
    kwargs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return TrainingStep(T5ForConditionalGeneration(config), kwargs, rows, is_chain=False)


def llama70b() -> TrainingStep:
    """A Llama of 70 billion parameters, without memory for them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16().train()
        tokens = torch.zeros(1, 4096, dtype=torch.long)
    return TrainingStep(model, {"input_ids": tokens, "labels": tokens, "use_cache": False}, ("model.layers",))


def unet(scale: float = 1.0) -> TrainingStep:
    return TrainingStep(UNet(), _map(4, 64, scale), ("down", "up"), is_chain=False)


def densenet(scale: float = 1.0) -> TrainingStep:
    return TrainingStep(DenseNet(), _map(4, 64, scale), ("rows.0", "rows.1", "rows.2"))


def hrnet(scale: float = 1.0) -> TrainingStep:
    return TrainingStep(HRNet(), _map(4, 64, scale), ("exchanges",), is_chain=False)


class UNet(nn.Module):
    """The decoder uses the outputs of the encoder again (skip connections)."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(_two(old, new) for old, new in ((3, widths[0]), *pairs))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(new, old, 2, 2) for old, new in reversed(pairs))
        self.up = nn.ModuleList(_two(2 * old, old) for old, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        beside = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            beside.append(x)
        for grow, block, old in zip(self.grow, self.up, beside[-2::-1], strict=True):
            x = block(torch.cat([grow(x), old], 1))
        return self.head(x)


class DenseNet(nn.Module):
    """Each layer takes the outputs of all earlier layers of its row."""

    def __init__(self, layers: int = 6, growth: int = 12, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.rows, self.between = nn.ModuleList(), nn.ModuleList()
        for _ in range(3):
            self.rows.append(nn.ModuleList(DenseLayer(width + number * growth, growth) for number in range(layers)))
            width += layers * growth
            self.between.append(nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1)))
            width //= 2
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for row, between in zip(self.rows, self.between, strict=True):
            for layer in row:
                x = layer(x)
            x = F.avg_pool2d(between(x), 2)
        return self.head(x.mean((2, 3)))


class DenseLayer(nn.Module):
    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.inner(x)], 1)


class HRNet(nn.Module):
    """Parallel branches of several resolutions, which exchange their maps several times."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), count: int = 3) -> None:
        super().__init__()
        self.stems = nn.ModuleList(
            nn.Conv2d(3, width, 3, 2**level, 1, bias=False) for level, width in enumerate(widths)
        )
        self.exchanges = nn.ModuleList(Exchange(widths) for _ in range(count))
        self.head = nn.Conv2d(sum(widths), 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = [stem(x) for stem in self.stems]
        for exchange in self.exchanges:
            maps = exchange(*maps)
        return self.head(torch.cat([_resized(each, maps[0].shape[-1]) for each in maps], 1))


class Exchange(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(Residual(width), Residual(width)) for width in widths)
        self.ways = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Conv2d(old, new, 1, bias=False), nn.BatchNorm2d(new)) for old in widths)
            for new in widths
        )

    def forward(self, *maps: Tensor) -> list[Tensor]:
        maps = tuple(branch(each) for branch, each in zip(self.branches, maps, strict=True))
        found = []
        for to, ways in enumerate(self.ways):
            sums = [_resized(way(each), maps[to].shape[-1]) for way, each in zip(ways, maps, strict=True)]
            found.append(F.relu(sum(sums[1:], sums[0])))
        return found


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*_two(width, width)[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + x)


def _two(before: int, after: int) -> nn.Sequential:
    pairs = ((before, after), (after, after))
    layers = ((nn.Conv2d(*pair, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()) for pair in pairs)
    return nn.Sequential(*(layer for three in layers for layer in three))


def _resized(x: Tensor, side: int) -> Tensor:
    if x.shape[-1] > side:
        return F.avg_pool2d(x, x.shape[-1] // side)
    return x if x.shape[-1] == side else F.interpolate(x, size=(side, side), mode="bilinear")


def _images(batch: int, side: int, scale: float) -> dict[str, Tensor]:
    return {"pixel_values": _map(batch, side, scale)["x"], "labels": _classes(batch)}


def _map(batch: int, side: int, scale: float) -> dict[str, Tensor]:
    # A multiple of 16, because some of these models downsample a map by 16.
    side = max(32, round(side * scale / 16) * 16)
    return {"x": torch.randn(batch, 3, side, side)}


def _tokens(batch: int, length: int, words: int, scale: float) -> Tensor:
    return torch.randint(0, words, (batch, max(16, round(length * scale))))


def _classes(batch: int) -> Tensor:
    return torch.arange(batch) % 2


# The models over which the goals take the mean.
GOALS: dict[str, Callable[..., TrainingStep]] = {
    make.__name__: make for make in (resnet50, convnext_tiny, vit_small, bert, gpt2)
}
# Models whose blocks exchange more than one tensor nearly everywhere.
TANGLED: dict[str, Callable[..., TrainingStep]] = {make.__name__: make for make in (t5, unet, densenet, hrnet)}
STEPS = {**GOALS, **TANGLED}


def step_of(name: str, scale: float = 1.0, **sizes: int) -> TrainingStep:
    """Make the step of that name, the same at every call; `scale` shrinks images and texts, `sizes` the model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        step = STEPS[name](scale, **sizes)
    step.model.train()
    return step
