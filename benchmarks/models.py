"""Real architectures with weights and statistics that make comparisons meaningful; nothing is downloaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimizer.command.loading import load

_RESNET = Path(__file__).parents[1] / "examples" / "resnet.py"
_SUPPORT = Path(__file__).parents[1] / "tests" / "support"


@dataclass(frozen=True)
class Subject:
    """A model in eval, and its inputs at any batch size: positional tensors with the same first dim.

    Attributes:
        transformer: whether most of it is attention; otherwise most of it is convolutions.
    """

    name: str
    model: nn.Module
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    transformer: bool = False


class Plain(nn.Module):
    """Wraps a model to return a tuple of tensors, or one tensor, which tracers and exporters support without help."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, *inputs: torch.Tensor) -> Any:
        return flat(self.model(*inputs))


def flat(output: Any) -> Any:
    """The tensor, or the tuple of several, in the output of a model."""
    if isinstance(output, torch.Tensor):
        return output
    values = tuple(value for value in output.values() if isinstance(value, torch.Tensor))
    return values[0] if len(values) == 1 else values


def bring_to_life(model: nn.Module, *example: torch.Tensor) -> nn.Module:
    """Draw weights that keep the signal's size, set BatchNorm statistics, and return the model in eval.

    The statistics are those of the network's own activations. A freshly initialized network outputs almost nothing, and
    hides errors.
    """
    generator = torch.Generator().manual_seed(0)
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    scales = [module for module in model.modules() if isinstance(module, nn.LayerNorm)] + norms
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (1.4 / fan_in**0.5))
        for module in scales:
            module.weight.uniform_(0.5, 1.5, generator=generator)
            module.bias.uniform_(-0.3, 0.3, generator=generator)
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            # With None, the statistics are the plain mean over all batches.
            norm.momentum = None
        if norms:
            model.train()
            for _ in range(2):
                model(*example)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return model.eval()


def _images(size: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    def draw(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1)),)

    return draw


def resnet50(scale: float) -> Subject:
    """The model of examples/resnet.py."""
    return Subject("resnet50", load(str(_RESNET)).model, _images(_image_size(scale)))


def mobilenet_v2(scale: float) -> Subject:
    """Depthwise convolutions, each with a BatchNorm."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    model = MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=1000))
    images = _images(_image_size(scale))
    return Subject("mobilenet_v2", bring_to_life(model, *_images(96)(8)), images)


def convnext_tiny(scale: float) -> Subject:
    """No BatchNorm at all: the only possible gain is from the memory format."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(num_labels=1000, layer_scale_init_value=0.3)
    return Subject("convnext_tiny", bring_to_life(ConvNextForImageClassification(config)), _images(_image_size(scale)))


def bert_small(scale: float) -> Subject:
    """Six layers of width 384, a common size for sentence embeddings."""
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    length = max(8, round(128 * scale))

    def draw(batch: int) -> tuple[torch.Tensor, ...]:
        ids = torch.randint(0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        # The last row is padded.
        mask[-1, length * 3 // 4 :] = 0
        return ids, mask

    return Subject("bert_small", bring_to_life(BertModel(config)), draw, transformer=True)


def vit_small(scale: float) -> Subject:
    """Twelve layers of width 384 on patches of 16 × 16."""
    from transformers import ViTConfig, ViTForImageClassification

    size = _image_size(scale)
    sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=size, num_labels=1000))
    return Subject("vit_small", bring_to_life(model), _images(size), transformer=True)


def gpt2(scale: float) -> Subject:
    """GPT-2 small with its head, without a cache: one forward over a text."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False)
    length = max(8, round(128 * scale))

    def draw(batch: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        return (torch.randint(0, config.vocab_size, (batch, length), generator=generator),)

    return Subject("gpt2", bring_to_life(GPT2LMHeadModel(config)), draw, transformer=True)


class _PlainBlock(nn.Module):
    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class _PlainResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = (64, 64, 128, 128, 256, 256, 512, 512)
        before = (64, *widths[:-1])
        self.body = nn.Sequential(
            *(_PlainBlock(old, new, 2 if new != old else 1) for old, new in zip(before, widths, strict=True))
        )
        self.head = nn.Linear(512, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def resnet18(scale: float) -> Subject:
    """Written plainly, so that torch.fx can trace all of it; the other `SUBJECTS` can't be traced."""
    return Subject("resnet18", bring_to_life(_PlainResNet(), *_images(96)(8)), _images(_image_size(scale)))


def resnet18_small(scale: float) -> Subject:
    """The same on images of 32 × 32: the weights are large compared with the maps."""
    small = _images(max(16, round(32 * scale / 16) * 16))
    return Subject("resnet18_small", bring_to_life(_PlainResNet(), *_images(96)(8)), small)


def efficientnet_b0(scale: float) -> Subject:
    """Depthwise convolutions after separate padding, and squeeze-and-excitation: 1 × 1 maps that scale others."""
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, num_labels=1000)
    model = EfficientNetForImageClassification(config)
    return Subject("efficientnet_b0", bring_to_life(model, *_images(96)(8)), _images(_image_size(scale)))


def segformer_b0(scale: float) -> Subject:
    """Attention between convolutions: maps become tokens, and tokens become maps, several times."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    model = SegformerForSemanticSegmentation(SegformerConfig(num_labels=150))
    return Subject("segformer_b0", bring_to_life(model, *_images(64)(4)), _images(_image_size(scale)))


def swin_tiny(scale: float) -> Subject:
    """Attention in shifted windows: no inference pass changes anything."""
    from transformers import SwinConfig, SwinForImageClassification

    size = _image_size(scale)
    return Subject(
        "swin_tiny",
        bring_to_life(SwinForImageClassification(SwinConfig(image_size=size, num_labels=1000))),
        _images(size),
        transformer=True,
    )


def bert_base(scale: float) -> Subject:
    """BERT in its published size, without its trained weights."""
    from transformers import BertConfig, BertModel

    config, length = BertConfig(), max(8, round(128 * scale))

    def draw(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randint(0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1)),)

    return Subject("bert_base", bring_to_life(BertModel(config)), draw, transformer=True)


def whisper_encoder(scale: float) -> Subject:
    """The encoder of the smallest Whisper, on 30 seconds of audio: 1,500 positions."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    positions = max(8, round(1500 * scale))
    config = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, max_source_positions=positions)

    def draw(batch: int) -> tuple[torch.Tensor, ...]:
        sound = torch.Generator().manual_seed(1)
        return (torch.randn(batch, config.num_mel_bins, 2 * positions, generator=sound),)

    return Subject("whisper_encoder", bring_to_life(WhisperEncoder(config)), draw, transformer=True)


def deeplab(scale: float) -> Subject:
    """DeepLabV3 of torchvision on a ResNet-50; its output maps are as large as the image."""
    declare_torchvision()
    from torchvision.models.segmentation import deeplabv3_resnet50

    model = deeplabv3_resnet50(weights=None, weights_backbone=None)
    return Subject("deeplab", bring_to_life(model, *_images(96)(4)), _images(_image_size(scale)))


class _VolumeNet(nn.Module):
    """A small 3-D U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(_volume_block(before, after) for before, after in ((1, 16), (16, 32), (32, 64)))
        self.grow = nn.ModuleList(nn.ConvTranspose3d(old, new, 2, 2) for old, new in ((64, 32), (32, 16)))
        self.up = nn.ModuleList(_volume_block(before, after) for before, after in ((64, 32), (32, 16)))
        self.head = nn.Conv3d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = block(nn.functional.max_pool3d(x, 2) if level else x)
            kept.append(x)
        for grow, block, beside in zip(self.grow, self.up, kept[-2::-1], strict=True):
            x = block(torch.cat([grow(x), beside], 1))
        return self.head(x)


def _volume_block(before: int, after: int) -> nn.Module:
    pairs = ((before, after), (after, after))
    layers = ((nn.Conv3d(*pair, 3, padding=1, bias=False), nn.BatchNorm3d(after), nn.ReLU()) for pair in pairs)
    return nn.Sequential(*(layer for three in layers for layer in three))


def volume_unet(scale: float) -> Subject:
    """3-D convolutions, some of them transposed."""
    side = max(8, round(32 * scale / 8) * 8)

    def draw(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, 1, side, side, side, generator=torch.Generator().manual_seed(1)),)

    return Subject("volume_unet", bring_to_life(_VolumeNet(), torch.randn(2, 1, 16, 16, 16)), draw)


def _classifier(name: str) -> Callable[[float], Subject]:
    """A classifier of torchvision with random weights. torch.fx can trace all of these, so `fuse` supports them."""

    def make(scale: float) -> Subject:
        declare_torchvision()
        from torchvision.models import get_model

        model = get_model(name, weights=None)
        return Subject(f"torchvision:{name}", bring_to_life(model, *_images(96)(8)), _images(_image_size(scale)))

    return make


def mobilenetv3_large(scale: float) -> Subject:
    """timm's: depthwise convolutions, squeeze-and-excitation and hard activations. transformers has none."""
    declare_torchvision()
    import timm

    model = timm.create_model("mobilenetv3_large_100")
    return Subject("mobilenetv3_large", bring_to_life(model, *_images(96)(8)), _images(_image_size(scale)))


def vit_small_patch16(scale: float) -> Subject:
    """timm's ViT-S/16; that of transformers, with the same layers, if timm isn't installed."""
    try:
        declare_torchvision()
        import timm
    except ImportError:
        return vit_small(scale)
    size = _image_size(scale)
    model = timm.create_model("vit_small_patch16_224", img_size=size)
    return Subject("vit_small_patch16", bring_to_life(model), _images(size), transformer=True)


def declare_torchvision() -> None:
    """Make torchvision and timm importable, as the tests do."""
    sys.path.insert(0, str(_SUPPORT))
    try:
        import torchvision_operators
    finally:
        sys.path.remove(str(_SUPPORT))
    torchvision_operators.declare()


def _image_size(scale: float) -> int:
    # A multiple of 32, because all of these models downsample an image by 32.
    return max(32, round(224 * scale / 32) * 32)


SUBJECTS: dict[str, Callable[[float], Subject]] = {
    make.__name__: make for make in (resnet50, mobilenet_v2, convnext_tiny, bert_small, resnet18)
}

# The models of benchmarks/latency.py: three CNNs with BatchNorms, one without, and three transformers.
LATENCY_SUBJECTS: dict[str, Callable[[float], Subject]] = {
    make.__name__: make
    for make in (
        resnet50, efficientnet_b0, mobilenetv3_large, convnext_tiny, vit_small_patch16, bert_small, gpt2,
    )
}  # fmt: skip

# The models that benchmarks/latency.py compares with folding by hand.
CLASSIFIERS: dict[str, Callable[[float], Subject]] = {
    f"torchvision:{name}": _classifier(name)
    for name in (
        "resnet50", "mobilenet_v3_large", "efficientnet_b0", "shufflenet_v2_x1_0", "densenet121", "convnext_tiny",
    )
}  # fmt: skip

# The models of benchmarks/channels_last.py: all that convolve maps.
MAP_SUBJECTS: dict[str, Callable[[float], Subject]] = {
    make.__name__: make
    for make in (
        resnet50, mobilenet_v2, convnext_tiny, resnet18, resnet18_small, efficientnet_b0, segformer_b0, volume_unet,
    )
}  # fmt: skip

# The models of benchmarks/each_pass.py and benchmarks/cold_start.py.
PASS_SUBJECTS: dict[str, Callable[[float], Subject]] = {
    make.__name__: make for make in (resnet50, mobilenet_v2, convnext_tiny, vit_small, bert_small, gpt2)
}

# The models of benchmarks/proof_cost.py.
PROOF_SUBJECTS: dict[str, Callable[[float], Subject]] = {
    make.__name__: make
    for make in (resnet50, efficientnet_b0, vit_small, swin_tiny, bert_base, whisper_encoder, deeplab)
}


ALL_SUBJECTS = {**SUBJECTS, **LATENCY_SUBJECTS, **CLASSIFIERS, **MAP_SUBJECTS, **PASS_SUBJECTS, **PROOF_SUBJECTS}


def subject(name: str, scale: float = 1.0) -> Subject:
    """Make the model of that name, the same at every call; `scale` shrinks its inputs.

    Raises:
        KeyError: there is no such model.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ALL_SUBJECTS[name](scale)
