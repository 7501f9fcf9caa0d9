"""More architectures from transformers than each test run has time for: name -> () -> (model in eval mode, kwargs).

The batch is 2, the sizes are tiny, weights and BatchNorm statistics are worth comparing.
"""

from collections.abc import Callable
from typing import Any

import torch
from real_models import lively
from torch import nn

_VOCABULARY = 99
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
_TEXT = {"vocab_size": _VOCABULARY, **_SIZES}
_DEEP = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 16]}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def _image(size: int = 64) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size, generator=_generator())}


def _ids(length: int = 10) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(1, _VOCABULARY - 1, (2, length), generator=_generator())}


def _text(length: int = 10) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, 7:] = 0
    return {**_ids(length), "attention_mask": mask}


def _sound() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 800, generator=_generator())}


# Family -> (class of the model, class of its configuration, its arguments, inputs).
_FAMILIES: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "albert": ("AlbertModel", "AlbertConfig", {**_TEXT, "embedding_size": 16}, _text),
    "bart": (
        "BartModel",
        "BartConfig",
        {
            "vocab_size": _VOCABULARY,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 37,
            "decoder_ffn_dim": 37,
            "use_cache": False,
        },
        _text,
    ),
    "beit": ("BeitModel", "BeitConfig", {"image_size": 32, "patch_size": 8, **_SIZES}, lambda: _image(32)),
    "bert-tokens": ("BertForTokenClassification", "BertConfig", _TEXT, _text),
    "bit": ("BitModel", "BitConfig", {"embedding_size": 8, "num_groups": 1, **_DEEP}, _image),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": _VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False},
        _text,
    ),
    "clip-text": ("CLIPTextModel", "CLIPTextConfig", {**_TEXT, "eos_token_id": _VOCABULARY - 1}, _text),
    "clip-vision": (
        "CLIPVisionModel",
        "CLIPVisionConfig",
        {"image_size": 32, "patch_size": 8, **_SIZES},
        lambda: _image(32),
    ),
    "deberta": (
        "DebertaV2Model",
        "DebertaV2Config",
        {**_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        _text,
    ),
    "deit": ("DeiTModel", "DeiTConfig", {"image_size": 32, "patch_size": 8, **_SIZES}, lambda: _image(32)),
    "dinov2": ("Dinov2Model", "Dinov2Config", {"image_size": 32, "patch_size": 8, **_SIZES}, lambda: _image(32)),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": _VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 37},
        _text,
    ),
    "electra": ("ElectraModel", "ElectraConfig", {**_TEXT, "embedding_size": 16}, _text),
    "fnet": (
        "FNetModel",
        "FNetConfig",
        {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 37},
        _ids,
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_TEXT, "use_cache": False}, _text),
    "levit": (
        "LevitModel",
        "LevitConfig",
        {
            "image_size": 64,
            "hidden_sizes": [16, 32, 48],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
        _image,
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "use_cache": False},
        _ids,
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_TEXT, "num_key_value_heads": 2, "use_cache": False}, _text),
    "mobilenet-v1": ("MobileNetV1Model", "MobileNetV1Config", {"depth_multiplier": 0.25}, _image),
    "mobilevit": (
        "MobileViTModel",
        "MobileViTConfig",
        {"image_size": 64, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 32]},
        _image,
    ),
    "mpnet": ("MPNetModel", "MPNetConfig", _TEXT, _text),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": _VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "ffn_dim": 37,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "use_cache": False,
        },
        _text,
    ),
    "poolformer": (
        "PoolFormerModel",
        "PoolFormerConfig",
        {"hidden_sizes": [16, 32, 40, 48], "depths": [1, 1, 1, 1]},
        _image,
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_TEXT, "num_key_value_heads": 2, "use_cache": False}, _text),
    "regnet": ("RegNetModel", "RegNetConfig", {"embedding_size": 8, "groups_width": 4, **_DEEP}, _image),
    "roberta": ("RobertaModel", "RobertaConfig", _TEXT, _text),
    "segformer": (
        "SegformerModel",
        "SegformerConfig",
        {"hidden_sizes": [16, 32, 40, 48], "num_attention_heads": [1, 2, 2, 4], "depths": [1, 1, 1, 1]},
        _image,
    ),
    "swin": (
        "SwinModel",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        lambda: _image(32),
    ),
    "wav2vec2": (
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        {
            **_SIZES,
            "vocab_size": 32,
            "conv_dim": (16, 16),
            "conv_kernel": (8, 8),
            "conv_stride": (4, 4),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
        },
        _sound,
    ),
    "xlnet": (
        "XLNetModel",
        "XLNetConfig",
        {"vocab_size": _VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 37, "use_mems_eval": False},
        _text,
    ),
}

ZOO = tuple(_FAMILIES)


def member(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model of a family, and the keyword arguments of one call."""
    import transformers

    model_class, config_class, arguments, inputs = _FAMILIES[name]
    config = getattr(transformers, config_class)(**arguments)
    return lively(getattr(transformers, model_class)(config)), inputs()
