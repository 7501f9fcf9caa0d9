"""Small networks with the building blocks of well-known ones, trained here in minutes, with many examples to judge them.

Random weights prove arithmetic, not accuracy: they lack the wide ranges and the outliers that training brings, and have
no top-1 to lose. Pictures are glyphs of three strokes, some classes apart by one stroke, under random affine and elastic
deformations, colors and noise. Texts are words from a distribution per class, some negated, so that order counts. Two
networks come trained, with their packages: see pitch.py and voices.py.

The weights are kept in build/trained/, and made again where they are missing:

    python benchmarks/trained.py [--models mobilenet_v3,…]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pitch
import torch
import torch.nn.functional as F
import voices
from models import declare_torchvision
from torch import nn

FOLDER = Path(__file__).parents[1] / "build" / "trained"
SIDE, LENGTH, WORDS, CLASSES = 40, 32, 2000, 32
EXAMPLES = 20_480
_CHUNK = 256
# The numbers of the first chunks, each of which is a seed; training has those from 0 on.
_TEST, _CALIBRATION, _VALIDATION = 10_000_000, 20_000_000, 30_000_000
_STYLES, _CANVAS = 48, 64

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """A network in eval, and its data: (inputs, labels) of one chunk of 256 examples, by number."""

    name: str
    model: nn.Module
    is_text: bool
    chunk: Callable[[int], Batch]

    def test(self, examples: int = EXAMPLES) -> Iterator[Batch]:
        """Examples that training hasn't seen, nor their styles of glyphs."""
        return (self.chunk(_TEST + number) for number in range(math.ceil(examples / _CHUNK)))

    def validation(self, examples: int = EXAMPLES) -> Iterator[Batch]:
        """As many others, for choices."""
        return (self.chunk(_VALIDATION + number) for number in range(math.ceil(examples / _CHUNK)))

    def calibration(self, examples: int = 512) -> Iterator[Batch]:
        return (self.chunk(_CALIBRATION + number) for number in range(math.ceil(examples / _CHUNK)))


def _strokes(generator: torch.Generator) -> torch.Tensor:
    """The control points of each class, as (class, stroke, 3, xy). Four classes each share two of their three strokes."""
    families = torch.rand(CLASSES // 4, 1, 2, 3, 2, generator=generator).expand(-1, 4, -1, -1, -1)
    own = torch.rand(CLASSES // 4, 4, 1, 3, 2, generator=generator)
    return torch.cat([families, own], 2).reshape(CLASSES, 3, 3, 2) * 1.4 - 0.7


def _glyphs(seed: int) -> torch.Tensor:
    """Bitmaps of each class, drawn with several styles: (class, style, canvas, canvas) in 0 to 1."""
    draw = torch.Generator().manual_seed(seed)
    points = _strokes(torch.Generator().manual_seed(0))
    points = points[:, None] + 0.05 * torch.randn(CLASSES, _STYLES, 3, 3, 2, generator=draw)
    width = 0.07 + 0.06 * torch.rand(CLASSES, _STYLES, 1, 1, generator=draw)
    t = torch.linspace(0, 1, 24)[:, None]
    # Quadratic Bézier curves as dots: (class, style, dots, xy).
    a, b, c = (points[..., None, index, :] for index in range(3))
    dots = ((1 - t) ** 2 * a + 2 * t * (1 - t) * b + t**2 * c).flatten(2, 3)
    line = torch.linspace(-1, 1, _CANVAS)
    found = []
    for each, wide in zip(dots, width, strict=True):
        across = (line[None, :, None] - each[:, None, :, 0]) ** 2
        down = (line[None, :, None] - each[:, None, :, 1]) ** 2
        near = (down[:, :, None] + across[:, None]).amin(-1).sqrt()
        found.append(torch.sigmoid((wide - near) * 40))
    return torch.stack(found)


class _Pictures:
    """Draws chunks of pictures, (256, 3, 40, 40) with values of about -2 to 2."""

    def __init__(self) -> None:
        self._glyphs: dict[bool, torch.Tensor] = {}

    def __call__(self, number: int) -> Batch:
        draw = torch.Generator().manual_seed(number)
        is_training = number < _TEST
        if is_training not in self._glyphs:
            self._glyphs[is_training] = _glyphs(1 if is_training else 2)

        def spread(*shape: int) -> torch.Tensor:
            return torch.rand(_CHUNK, *shape, generator=draw) * 2 - 1

        labels = torch.randint(CLASSES, (_CHUNK,), generator=draw)
        styles = torch.randint(_STYLES, (_CHUNK,), generator=draw)
        angle, zoom, shear, shift = spread() * 0.3, 0.95 + 0.2 * spread(), spread() * 0.2, spread(2) * 0.15
        turn = torch.stack([angle.cos(), shear - angle.sin(), angle.sin(), angle.cos()], -1).reshape(-1, 2, 2)
        theta = torch.cat([turn * zoom[:, None, None], shift[:, :, None]], 2)
        grid = F.affine_grid(theta, [_CHUNK, 1, SIDE, SIDE], align_corners=False)
        bend = F.interpolate(spread(2, 5, 5) * 0.1, (SIDE, SIDE), mode="bilinear", align_corners=True)
        glyph = self._glyphs[is_training][labels, styles][:, None]
        ink = F.grid_sample(glyph, grid + bend.permute(0, 2, 3, 1), align_corners=False)
        # The ground has soft stains; ink and ground differ by a random color.
        ground = spread(3, 1, 1) + 0.5 * F.interpolate(spread(3, 4, 4), (SIDE, SIDE), mode="bilinear")
        color = F.normalize(torch.randn(_CHUNK, 3, 1, 1, generator=draw), dim=1) * (1.9 + 0.4 * spread(1, 1, 1))
        noise = torch.randn(_CHUNK, 3, SIDE, SIDE, generator=draw) * (0.2 + 0.12 * spread(1, 1, 1))
        return ground + ink * color + noise, labels


def _texts(number: int) -> Batch:
    """(256, 32) word numbers. A word of a class after word 1, the negation, speaks for the next class instead."""
    fixed, draw = torch.Generator().manual_seed(0), torch.Generator().manual_seed(number)
    own = torch.randint(200, WORDS, (CLASSES, 60), generator=fixed)
    labels = torch.randint(CLASSES, (_CHUNK,), generator=draw)
    words = (2 + 198 * torch.rand(_CHUNK, LENGTH, generator=draw) ** 2).long()
    rare = torch.randint(200, WORDS, words.shape, generator=draw)
    words = torch.where(torch.rand(words.shape, generator=draw) < 0.35, rare, words)
    speaks = torch.rand(words.shape, generator=draw) < 0.2
    negated = (torch.rand(words.shape, generator=draw) < 0.4) & speaks
    negated[:, 0] = False
    # The word before a negated one is the negation, and says nothing itself.
    before = torch.roll(negated, -1, 1)
    speaks, negated = speaks & ~before, negated & ~before
    of = torch.where(negated, (labels[:, None] - 1) % CLASSES, labels[:, None])
    spoken = own[of, torch.randint(60, words.shape, generator=draw)]
    words = torch.where(speaks, spoken, words)
    return torch.where(torch.roll(negated, -1, 1), 1, words), labels


def mobilenet_v3() -> nn.Module:
    """Depthwise convolutions, squeeze-and-excitation, hard-swish."""
    from torchvision.models.mobilenetv3 import InvertedResidualConfig as Block
    from torchvision.models.mobilenetv3 import MobileNetV3

    blocks = [
        Block(16, 3, 32, 16, False, "RE", 1, 1, 1.0),
        Block(16, 3, 64, 24, False, "RE", 2, 1, 1.0),
        Block(24, 5, 88, 40, True, "HS", 2, 1, 1.0),
        Block(40, 5, 160, 40, True, "HS", 1, 1, 1.0),
        Block(40, 3, 200, 80, True, "HS", 2, 1, 1.0),
        Block(80, 5, 320, 80, True, "HS", 1, 1, 1.0),
    ]
    return MobileNetV3(blocks, 640, num_classes=CLASSES, dropout=0.1)


def efficientnet() -> nn.Module:
    """Expansion, depthwise convolution, squeeze-and-excitation, projection, with SiLU."""
    from torchvision.models.efficientnet import EfficientNet
    from torchvision.models.efficientnet import MBConvConfig as Block

    blocks = [
        Block(1, 3, 1, 16, 16, 1, 1.0, 1.0),
        Block(6, 3, 2, 16, 24, 1, 1.0, 1.0),
        Block(6, 5, 2, 24, 40, 2, 1.0, 1.0),
        Block(6, 3, 2, 40, 80, 2, 1.0, 1.0),
    ]
    return EfficientNet(blocks, 0.1, stochastic_depth_prob=0.05, num_classes=CLASSES, last_channel=480)


def resnet() -> nn.Module:
    """Basic blocks of two dense convolutions."""
    from torchvision.models.resnet import BasicBlock, ResNet

    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)
    # Without the first pooling, as is common for small pictures, and with half the width.
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.MaxPool2d(3, 2, 1)
    return model


class _Hybrid(nn.Module):
    """A vision transformer on maps of a ResNet, as in the R50+ViT of the first paper: 25 patches, 3 blocks of width 128.

    On its own it doesn't learn in minutes, so it begins with the first stages of the ResNet here, as trained.
    """

    def __init__(self, stages: nn.Module) -> None:
        super().__init__()
        names = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2")
        self.stem = nn.Sequential(*(getattr(stages, name) for name in names))
        self.places = nn.Parameter(0.02 * torch.randn(25, 128))
        block = nn.TransformerEncoderLayer(128, 4, 512, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 3, nn.LayerNorm(128), enable_nested_tensor=False)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.stem(images).flatten(2).transpose(1, 2)
        return self.head(self.blocks(patches + self.places).mean(1))


class _Bert(nn.Module):
    """BERT with the mean over its words as the sentence's vector, as embeddings of sentences are made."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(
            vocab_size=WORDS, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512,
            max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.bert = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.bert(words).last_hidden_state.mean(1))


@dataclass(frozen=True)
class _Recipe:
    build: Callable[[], nn.Module]
    steps: int
    rate: float
    is_text: bool = False


RECIPES = {
    "mobilenet_v3": _Recipe(mobilenet_v3, 480, 4e-3),
    "efficientnet": _Recipe(efficientnet, 400, 4e-3),
    "resnet": _Recipe(resnet, 320, 2e-3),
    "vit": _Recipe(lambda: _Hybrid(trained("resnet").model), 640, 1e-3),
    "text": _Recipe(_Bert, 600, 1e-3, is_text=True),
}
SHIPPED = {"pitch": (pitch.network, pitch.tones), "voices": (voices.network, voices.utterances)}
NETWORKS = (*RECIPES, *SHIPPED)
_pictures = _Pictures()


def trained(name: str) -> Trained:
    """The network of this name, trained now if its weights aren't kept."""
    if name in SHIPPED:
        build, chunk = SHIPPED[name]
        return Trained(name, build(), False, chunk)
    recipe = RECIPES[name]
    declare_torchvision()
    torch.manual_seed(0)
    model = recipe.build()
    chunk = _texts if recipe.is_text else _pictures
    path = FOLDER / f"{name}.pt"
    if not path.exists():
        _train(model, recipe, chunk)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, weights_only=True))
    return Trained(name, model.eval(), recipe.is_text, chunk)


def _train(model: nn.Module, recipe: _Recipe, chunk: Callable[[int], Batch]) -> None:
    model.train()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0}])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, recipe.steps, pct_start=0.2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    for step in range(recipe.steps):
        if step % 4 == 0:
            whole = chunk(step // 4)
        inputs, labels = (tensor[step % 4 :: 4] for tensor in whole)
        loss = F.cross_entropy(model(inputs), labels, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"  step {step} of {recipe.steps}: loss {loss.item():.3f}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NETWORKS), help="names, by commas (default: %(default)s)")
    torch.set_num_threads(1)
    for name in parser.parse_args().models.split(","):
        started = time.process_time()
        network = trained(name)
        spent = time.process_time() - started
        with torch.no_grad():
            right = [network.model(x).argmax(1) == y for x, y in network.test()]
        top1 = torch.cat(right).double().mean()
        size = sum(parameter.numel() for parameter in network.model.parameters())
        print(f"{name}: {size:,} parameters, top-1 {top1:.2%}, {spent:.0f} s of one processor")


if __name__ == "__main__":
    main()
