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


def _masked() -> dict[str, Any]:
    return {"attention_mask": _mask()}


def _real(
    name: str, args: Callable[[], tuple[Any, ...]], kwargs: Callable[[], dict[str, Any]] = dict, **config: Any
) -> Callable[[], Made]:
    """A class of transformers, which knows that of its configuration; its inputs, and the configuration."""

    def make() -> Made:
        import transformers

        model_class = getattr(transformers, name)
        return lively(model_class(model_class.config_class(**config))), args(), kwargs()

    return make


_SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
_TEXT = {"vocab_size": _VOCABULARY, **_SIZES}
_GPT2 = {"vocab_size": _VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
_LLAMA = {**_TEXT, "num_key_value_heads": 1, "max_position_embeddings": 16}
_T5 = {"vocab_size": _VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}
_MOBILENET = {"depth_multiplier": 0.25, "depth_divisible_by": 4, "min_depth": 4, "num_labels": 5}
REAL_MODELS: dict[str, Callable[[], Made]] = {
    "bert": _real("BertModel", lambda: (_ids(),), _masked, **_TEXT),
    "gpt2": _real(
        "GPT2LMHeadModel",
        tuple,
        lambda: {"input_ids": _ids(), **_masked()},
        **_GPT2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "llama": _real("LlamaForCausalLM", lambda: (_ids(),), **_LLAMA, use_cache=False),
    "t5_encoder": _real("T5EncoderModel", lambda: (_ids(),), _masked, **_T5),
    "vit": _real(
        "ViTForImageClassification", lambda: (_image(16),), image_size=16, patch_size=8, **_SIZES, num_labels=5
    ),
    "resnet": _real(
        "ResNetForImageClassification", lambda: (_image(),), embedding_size=8, layer_type="basic", **_STAGES
    ),
    "convnext": _real(
        "ConvNextForImageClassification", lambda: (_image(),), num_stages=2, layer_scale_init_value=0.5, **_STAGES
    ),
    "mobilenet_v2": _real("MobileNetV2ForImageClassification", lambda: (_image(),), **_MOBILENET),
    "regnet": _real(
        "RegNetForImageClassification",
        lambda: (_image(),),
        embedding_size=8,
        groups_width=4,
        layer_type="y",
        **_STAGES,
    ),
}


def at_batch(args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with `size` rows: the given rows in turn, with floats scaled row by row."""

    def resized(value: Any) -> Any:
        rows = value[torch.arange(size) % len(value)]
        if not rows.is_floating_point():
            return rows
        return rows * torch.linspace(1.0, 0.5, size).reshape(-1, *[1] * (rows.dim() - 1))

    return tuple(map(resized, args)), {name: resized(value) for name, value in kwargs.items()}
