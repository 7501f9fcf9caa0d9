"""Real architectures from transformers, shrunk to a layer or two: name -> () -> (model in eval mode, args, kwargs).

The batch size is 2. The weights are scaled and the BatchNorm statistics set so that comparisons of the outputs are
meaningful.
"""

from collections.abc import Callable
from typing import Any

import torch
from tiny_models import enliven
from torch import nn

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_VOCABULARY = 37


def lively(model: nn.Module, draw: int = 0) -> nn.Module:
    """Draw weights scaled to the width, biases and BatchNorm statistics, in place, and return the model in eval.

    transformers starts with a standard deviation of 0.02, which suits larger widths than those of these models. Another
    `draw` gives other weights and statistics, independent of the current ones.
    """
    generator = torch.Generator().manual_seed(1 + draw)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (1.5 / fan_in**0.5))
    return enliven(model, seed=draw).eval()


def _ids(length: int = 7) -> torch.Tensor:
    return torch.randint(0, _VOCABULARY, (2, length), generator=torch.Generator().manual_seed(2))


def _mask() -> torch.Tensor:
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    return mask


def _image(size: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(3))


def bert() -> Made:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=_VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    return lively(BertModel(config)), (_ids(),), {"attention_mask": _mask()}


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return lively(GPT2LMHeadModel(config)), (), {"input_ids": _ids(), "attention_mask": _mask()}


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        use_cache=False,
    )
    return lively(LlamaForCausalLM(config)), (_ids(),), {}


def t5_encoder() -> Made:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=_VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return lively(T5EncoderModel(config)), (_ids(),), {"attention_mask": _mask()}


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=5,
    )
    return lively(ViTForImageClassification(config)), (_image(16),), {}


def resnet() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5)
    return lively(ResNetForImageClassification(config)), (_image(),), {}


def convnext() -> Made:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5, layer_scale_init_value=0.5)
    return lively(ConvNextForImageClassification(config)), (_image(),), {}


def mobilenet_v2() -> Made:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(depth_multiplier=0.25, depth_divisible_by=4, min_depth=4, num_labels=5)
    return lively(MobileNetV2ForImageClassification(config)), (_image(),), {}


def regnet() -> Made:
    from transformers import RegNetConfig, RegNetForImageClassification

    config = RegNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4, layer_type="y", num_labels=5
    )
    return lively(RegNetForImageClassification(config)), (_image(),), {}


REAL_MODELS: dict[str, Callable[[], Made]] = {
    make.__name__: make for make in (bert, gpt2, llama, t5_encoder, vit, resnet, convnext, mobilenet_v2, regnet)
}


def at_batch(args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with `size` rows: the given rows in turn, with floats scaled row by row."""

    def resized(value: Any) -> Any:
        rows = value[torch.arange(size) % len(value)]
        if not rows.is_floating_point():
            return rows
        return rows * torch.linspace(1.0, 0.5, size).reshape(-1, *[1] * (rows.dim() - 1))

    return tuple(map(resized, args)), {name: resized(value) for name, value in kwargs.items()}
