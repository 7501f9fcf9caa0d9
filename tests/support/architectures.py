"""More architectures from transformers than each test run has time for.

`member(name)` makes one: (model in eval mode, kwargs). The batch size is 2, and all sizes are tiny. Weights and
BatchNorm statistics make comparisons meaningful.
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
_STAGES = ["stage1", "stage2", "stage3", "stage4"]
_RESNET = {"model_type": "resnet", "embedding_size": 8, "layer_type": "basic", **_DEEP}
_VIT = {"image_size": 64, "patch_size": 16, **_SIZES, "num_hidden_layers": 4}
_HGNET = {
    "embedding_size": 8,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [16, 16, 16, 16],
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 16, 16, 16],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 16, 16, 16],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [2, 2, 2, 2],
}
_LCNET_V4 = {
    "block_configs": [
        [[3, 16, 16, 1, True]],
        [[3, 16, 16, 2, False]],
        [[3, 16, 24, 2, False], [3, 24, 24, 1, True]],
        [[3, 24, 32, 2, False]],
    ],
    "stem_channels": [3, 8, 16],
}
_HGNET_BACKBONE = {"model_type": "hgnet_v2", **_HGNET}
_RTDETR = {
    "encoder_hidden_dim": 16,
    "encoder_in_channels": [16, 16, 16],
    "d_model": 16,
    "encoder_ffn_dim": 37,
    "encoder_attention_heads": 2,
    "decoder_in_channels": [16, 16, 16],
    "decoder_ffn_dim": 37,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "num_queries": 5,
    "num_denoising": 0,
}
_WAVES = {
    **_SIZES,
    "vocab_size": 32,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 8),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_STRIPS = (("long", 7), ("mid", 5), ("short", 3))
# Kernels of the three strips of each direction: [size, stride, padding].
_INTRACLASS: dict[str, Any] = {
    "reduce_channel": [1, 1, 0],
    "return_channel": [1, 1, 0],
    **{f"vertical_long_to_small_conv_{name}ratio": [[size, 1], [1, 1], [size // 2, 0]] for name, size in _STRIPS},
    **{f"horizontal_small_to_long_conv_{name}ratio": [[1, size], [1, 1], [0, size // 2]] for name, size in _STRIPS},
    **{f"symmetric_conv_long_{name}ratio": [[size, size], [1, 1], [size // 2, size // 2]] for name, size in _STRIPS},
}


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


def _draw(name: str, *shape: int) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, generator=_generator())}


def _series() -> dict[str, torch.Tensor]:
    past, future = (
        {"past_values": (2, 14), "past_time_features": (2, 14, 1)},
        {"future_values": (2, 4), "future_time_features": (2, 4, 1)},
    )
    drawn = {name: torch.rand(shape, generator=_generator()) for name, shape in {**past, **future}.items()}
    return {**drawn, "past_observed_mask": torch.ones(2, 14)}


# Family -> (class of the model, class of its configuration, its arguments, inputs).
_Family = tuple[str, str, dict[str, Any], Callable[[], dict[str, torch.Tensor]]]

_FAMILIES: dict[str, _Family] = {
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
        _WAVES,
        _sound,
    ),
    "xlnet": (
        "XLNetModel",
        "XLNetConfig",
        {"vocab_size": _VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 37, "use_mems_eval": False},
        _text,
    ),
}

# The other architectures with a BatchNorm. Missing are those that need more than transformers (timm, detectron2), those
# whose forward isn't `forward` (Emu3's VQ-VAE), and those whose only BatchNorms are in a backbone that is listed here.
_NORMED: dict[str, _Family] = {
    "align": (
        "AlignVisionModel",
        "AlignVisionConfig",
        {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
        _image,
    ),
    "beit-segmentation": (
        "BeitForSemanticSegmentation",
        "BeitConfig",
        {**_VIT, "out_indices": [1, 2, 3, 4], "pool_scales": [1, 2], "auxiliary_channels": 16},
        _image,
    ),
    "clap": (
        "ClapAudioModel",
        "ClapAudioConfig",
        {
            "num_mel_bins": 16,
            "spec_size": 64,
            "window_size": 4,
            "patch_embeds_hidden_size": 16,
            "hidden_size": 32,
            "depths": [1, 1],
            "num_attention_heads": [2, 2],
        },
        lambda: _draw("input_features", 2, 1, 256, 16),
    ),
    "cvt": (
        "CvtModel",
        "CvtConfig",
        {"embed_dim": [8, 16, 24], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
        _image,
    ),
    "data2vec-segmentation": (
        "Data2VecVisionForSemanticSegmentation",
        "Data2VecVisionConfig",
        {**_VIT, "out_indices": [0, 1, 2, 3], "pool_scales": [1, 2], "auxiliary_channels": 16},
        _image,
    ),
    "d-fine": (
        "DFineModel",
        "DFineConfig",
        {
            "backbone_config": {**_HGNET_BACKBONE, "out_features": _STAGES[1:], "return_idx": [1, 2, 3]},
            **_RTDETR,
        },
        _image,
    ),
    "depth-pro": (
        "DepthProForDepthEstimation",
        "DepthProConfig",
        {
            "patch_size": 32,
            "fusion_hidden_size": 16,
            "intermediate_hook_ids": [1, 0],
            "intermediate_feature_dims": [8, 8],
            "scaled_images_ratios": [0.5, 1.0],
            "scaled_images_overlap_ratios": [0.0, 0.2],
            "scaled_images_feature_dims": [8, 8],
            "use_batch_norm_in_fusion_residual": True,
            **{
                f"{part}_model_config": {"model_type": "dinov2", "image_size": 32, "patch_size": 8, **_SIZES}
                for part in ("image", "patch", "fov")
            },
        },
        _image,
    ),
    "detr-resnet": (
        "DetrModel",
        "DetrConfig",
        {
            "backbone_config": {**_RESNET, "out_features": ["stage4"]},
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_ffn_dim": 37,
            "decoder_ffn_dim": 37,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "num_queries": 5,
        },
        _image,
    ),
    "dpt": (
        "DPTForSemanticSegmentation",
        "DPTConfig",
        {
            **_VIT,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
            "use_batch_norm_in_fusion_residual": True,
        },
        _image,
    ),
    "efficientloftr": (
        "EfficientLoFTRModel",
        "EfficientLoFTRConfig",
        {
            "stage_num_blocks": [1, 1, 2, 2],
            "out_features": [8, 8, 16, 32],
            "hidden_size": 32,
            "num_attention_layers": 1,
            "num_attention_heads": 8,
        },
        lambda: _draw("pixel_values", 2, 2, 3, 64, 64),
    ),
    "efficientnet": (
        "EfficientNetModel",
        "EfficientNetConfig",
        {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
        _image,
    ),
    "fastspeech2-conformer": (
        "FastSpeech2ConformerModel",
        "FastSpeech2ConformerConfig",
        {
            "hidden_size": 24,
            "num_mel_bins": 10,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_linear_units": 24,
            "decoder_linear_units": 24,
            "speech_decoder_postnet_layers": 2,
            "speech_decoder_postnet_units": 16,
            "duration_predictor_channels": 16,
            "energy_predictor_channels": 16,
            "pitch_predictor_channels": 16,
            "vocab_size": 99,
        },
        _ids,
    ),
    "glpn": (
        "GLPNForDepthEstimation",
        "GLPNConfig",
        {
            "hidden_sizes": [8, 16, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 2],
            "decoder_hidden_size": 16,
        },
        _image,
    ),
    "granite-speech": (
        "GraniteSpeechCTCEncoder",
        "GraniteSpeechEncoderConfig",
        {
            "input_dim": 16,
            "num_layers": 2,
            "hidden_dim": 32,
            "num_heads": 2,
            "dim_head": 16,
            "context_size": 10,
            "max_pos_emb": 16,
        },
        lambda: _draw("hidden_states", 2, 20, 16),
    ),
    "groupvit": (
        "GroupViTModel",
        "GroupViTConfig",
        {
            "text_config": {**_TEXT, "eos_token_id": 98},
            "vision_config": {
                "image_size": 32,
                "patch_size": 8,
                "hidden_size": 32,
                "intermediate_size": 37,
                "depths": [1, 1, 1],
                "num_group_tokens": [4, 2, 0],
                "num_output_groups": [4, 2, 2],
                "num_attention_heads": 4,
            },
            "projection_dim": 16,
            "projection_intermediate_dim": 24,
        },
        lambda: {**_text(), **_image(32)},
    ),
    "hgnet-v2": ("HGNetV2ForImageClassification", "HGNetV2Config", _HGNET, _image),
    "hubert": ("HubertModel", "HubertConfig", {**_WAVES, "conv_pos_batch_norm": True}, _sound),
    "informer": (
        "InformerModel",
        "InformerConfig",
        {
            "prediction_length": 4,
            "context_length": 12,
            "num_time_features": 1,
            "lags_sequence": [1, 2],
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 1,
        },
        _series,
    ),
    "lasr": (
        "LasrEncoder",
        "LasrEncoderConfig",
        {**_SIZES, "subsampling_conv_channels": 8, "num_mel_bins": 16, "conv_kernel_size": 5},
        lambda: _draw("input_features", 2, 40, 16),
    ),
    "lw-detr": (
        "LwDetrModel",
        "LwDetrConfig",
        {
            "backbone_config": {
                "model_type": "lw_detr_vit",
                "hidden_size": 32,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": 64,
                "pretrain_image_size": 64,
                "window_block_indices": [0, 2],
                "out_indices": [1, 3],
                "num_windows": 4,
            },
            "projector_scale_factors": [1.0],
            "d_model": 32,
            "decoder_ffn_dim": 37,
            "decoder_layers": 1,
            "decoder_self_attention_heads": 2,
            "decoder_cross_attention_heads": 4,
            "num_queries": 5,
            "group_detr": 1,
        },
        _image,
    ),
    "mobilevit-v2": (
        "MobileViTV2Model",
        "MobileViTV2Config",
        {"image_size": 64, "width_multiplier": 0.25, "n_attn_blocks": [1, 1, 1], "base_attn_unit_dims": [32, 32, 32]},
        _image,
    ),
    "mobilevit-segmentation": (
        "MobileViTForSemanticSegmentation",
        "MobileViTConfig",
        {
            "image_size": 64,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 32],
            "aspp_out_channels": 16,
        },
        _image,
    ),
    "parakeet": (
        "ParakeetEncoder",
        "ParakeetEncoderConfig",
        {**_SIZES, "subsampling_conv_channels": 8, "num_mel_bins": 16},
        lambda: _draw("input_features", 2, 40, 16),
    ),
    "patchtsmixer": (
        "PatchTSMixerModel",
        "PatchTSMixerConfig",
        {"norm_mlp": "BatchNorm", "num_layers": 2, "num_input_channels": 2},
        lambda: _draw("past_values", 2, 32, 2),
    ),
    "patchtst": (
        "PatchTSTModel",
        "PatchTSTConfig",
        {"d_model": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_input_channels": 2},
        lambda: _draw("past_values", 2, 32, 2),
    ),
    "perceiver": (
        "PerceiverForImageClassificationConvProcessing",
        "PerceiverConfig",
        {
            "num_latents": 8,
            "d_latents": 16,
            "num_self_attends_per_block": 1,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 1,
        },
        lambda: _draw("inputs", 2, 3, 224, 224),
    ),
    "pp-lcnet": ("PPLCNetForImageClassification", "PPLCNetConfig", {"scale": 0.25, "class_expand": 32}, _image),
    "pp-lcnet-v3": ("PPLCNetV3Backbone", "PPLCNetV3Config", {"scale": 0.25}, _image),
    "pp-lcnet-v4": ("PPLCNetV4Backbone", "PPLCNetV4Config", _LCNET_V4, _image),
    "pp-ocrv5-mobile-det": ("PPOCRV5MobileDetForObjectDetection", "PPOCRV5MobileDetConfig", {}, _image),
    "pp-ocrv5-mobile-rec": (
        "PPOCRV5MobileRecForTextRecognition",
        "PPOCRV5MobileRecConfig",
        {"hidden_size": 16, "num_attention_heads": 2, "head_out_channels": 19},
        lambda: _draw("pixel_values", 2, 3, 96, 192),
    ),
    "pp-ocrv5-server-det": (
        "PPOCRV5ServerDetForObjectDetection",
        "PPOCRV5ServerDetConfig",
        {
            "backbone_config": {**_HGNET_BACKBONE, "out_features": _STAGES},
            "neck_out_channels": 16,
            "intraclass_block_config": _INTRACLASS,
            "scale_factor_list": [1, 2, 4, 8],
            "kernel_list": [3, 2, 2],
        },
        _image,
    ),
    "pp-ocrv5-server-rec": (
        "PPOCRV5ServerRecForTextRecognition",
        "PPOCRV5ServerRecConfig",
        {
            "backbone_config": _HGNET_BACKBONE,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "head_out_channels": 19,
        },
        lambda: _draw("pixel_values", 2, 3, 96, 192),
    ),
    "pp-ocrv6-small-det": (
        "PPOCRV6SmallDetForObjectDetection",
        "PPOCRV6SmallDetConfig",
        {
            "backbone_config": {"model_type": "pp_lcnet_v4", **_LCNET_V4, "out_features": _STAGES},
            "layer_list_out_channels": [16, 16, 24, 32],
            "neck_out_channels": 16,
        },
        _image,
    ),
    "pp-ocrv6-medium-det": (
        "PPOCRV6MediumDetForObjectDetection",
        "PPOCRV6MediumDetConfig",
        {
            "backbone_config": {"model_type": "pp_lcnet_v4", **_LCNET_V4, "out_features": _STAGES},
            "neck_out_channels": 16,
            "intraclass_block_config": _INTRACLASS,
            "scale_factor_list": [1, 2, 4, 8],
            "kernel_list": [3, 2, 2],
        },
        _image,
    ),
    "pp-ocrv6-small-rec": (
        "PPOCRV6SmallRecForTextRecognition",
        "PPOCRV6SmallRecConfig",
        {"head_out_channels": 19},
        lambda: _draw("pixel_values", 2, 3, 48, 96),
    ),
    "pp-ocrv6-tiny-rec": (
        "PPOCRV6TinyRecForTextRecognition",
        "PPOCRV6TinyRecConfig",
        {"head_out_channels": 19},
        lambda: _draw("pixel_values", 2, 3, 48, 96),
    ),
    "rt-detr": (
        "RTDetrModel",
        "RTDetrConfig",
        {
            "backbone_config": {**_RESNET, "model_type": "rt_detr_resnet", "out_features": _STAGES[1:]},
            "freeze_backbone_batch_norms": False,
            **_RTDETR,
        },
        _image,
    ),
    "rt-detr-v2": (
        "RTDetrV2Model",
        "RTDetrV2Config",
        {
            "backbone_config": {**_RESNET, "model_type": "rt_detr_resnet", "out_features": _STAGES[1:]},
            "freeze_backbone_batch_norms": False,
            **_RTDETR,
        },
        _image,
    ),
    "seamless-m4t": (
        "SeamlessM4TForSpeechToText",
        "SeamlessM4TConfig",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_ffn_dim": 37,
            "decoder_ffn_dim": 37,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "speech_encoder_layers": 2,
            "speech_encoder_attention_heads": 2,
            "speech_encoder_intermediate_size": 37,
            "feature_projection_input_dim": 16,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
            "use_cache": False,
        },
        lambda: {**_draw("input_features", 2, 40, 16), "decoder_input_ids": _ids()["input_ids"]},
    ),
    "segformer-segmentation": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "hidden_sizes": [16, 32, 40, 48],
            "num_attention_heads": [1, 2, 2, 4],
            "depths": [1, 1, 1, 1],
            "decoder_hidden_size": 16,
        },
        _image,
    ),
    "slanet": ("SLANetForTableRecognition", "SLANetConfig", {"max_text_length": 4, "hidden_size": 16}, _image),
    "speecht5": (
        "SpeechT5ForTextToSpeech",
        "SpeechT5Config",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_ffn_dim": 37,
            "decoder_ffn_dim": 37,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "num_mel_bins": 10,
            "speech_decoder_prenet_units": 16,
            "speech_decoder_postnet_units": 16,
            "speaker_embedding_dim": 8,
            "use_cache": False,
        },
        lambda: {**_text(), **_draw("decoder_input_values", 2, 6, 10), **_draw("speaker_embeddings", 2, 8)},
    ),
    "superglue": (
        "SuperGlueForKeypointMatching",
        "SuperGlueConfig",
        {
            "hidden_size": 32,
            "keypoint_encoder_sizes": [8, 16],
            "gnn_layers_types": ["self", "cross"],
            "num_attention_heads": 2,
            "keypoint_detector_config": {
                "model_type": "superpoint",
                "encoder_hidden_sizes": [8, 8, 8, 8],
                "decoder_hidden_size": 8,
                "descriptor_decoder_dim": 32,
                "max_keypoints": 16,
            },
        },
        lambda: _draw("pixel_values", 2, 2, 3, 64, 64),
    ),
    "swiftformer": (
        "SwiftFormerModel",
        "SwiftFormerConfig",
        {"depths": [1, 1, 1, 1], "embed_dims": [8, 16, 16, 24]},
        _image,
    ),
    "textnet": ("TextNetModel", "TextNetConfig", {"stem_out_channels": 8, "hidden_sizes": [8, 8, 8, 16, 16]}, _image),
    "upernet": (
        "UperNetForSemanticSegmentation",
        "UperNetConfig",
        {
            "backbone_config": {**_RESNET, "out_features": _STAGES},
            "hidden_size": 16,
            "auxiliary_channels": 8,
            "auxiliary_in_channels": 16,
            "pool_scales": [1, 2],
        },
        _image,
    ),
    "uvdoc": (
        "UVDocModel",
        "UVDocConfig",
        {
            "backbone_config": {
                "model_type": "uvdoc_backbone",
                "resnet_head": [[3, 8], [8, 8]],
                "resnet_configs": [
                    [[8, 8, 1, False], [8, 8, 3, False]],
                    [[8, 16, 1, True], [16, 16, 3, False]],
                    [[16, 16, 1, True], [16, 16, 3, False]],
                ],
                "stage_configs": [[[16, 1]], [[16, 2]], [[16, 5]], [[16, 8], [16, 3]], [[16, 12]], [[16, 18], [16, 6]]],
                "out_features": [f"stage{number}" for number in range(1, 7)],
            },
            "bridge_connector": [16, 16],
            "out_point_positions2D": [[16, 8], [8, 2]],
        },
        _image,
    ),
    "vitmatte": (
        "VitMatteForImageMatting",
        "VitMatteConfig",
        {
            "backbone_config": {
                "model_type": "vitdet",
                "image_size": 64,
                "patch_size": 16,
                "num_channels": 4,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "out_features": ["stage2"],
            },
            "hidden_size": 32,
            "convstream_hidden_sizes": [8, 8, 16],
            "fusion_hidden_sizes": [16, 16, 8, 8],
        },
        lambda: _draw("pixel_values", 2, 4, 64, 64),
    ),
    "vitpose": (
        "VitPoseForPoseEstimation",
        "VitPoseConfig",
        {
            "backbone_config": {
                "model_type": "vitpose_backbone",
                "image_size": [64, 64],
                "patch_size": [16, 16],
                **_SIZES,
                "out_features": ["stage2"],
            },
            "use_simple_decoder": False,
            "num_labels": 5,
        },
        _image,
    ),
    "wav2vec2-conformer": (
        "Wav2Vec2ConformerModel",
        "Wav2Vec2ConformerConfig",
        {**_WAVES, "vocab_size": 32, "conv_depthwise_kernel_size": 5},
        _sound,
    ),
    "zoedepth": (
        "ZoeDepthForDepthEstimation",
        "ZoeDepthConfig",
        {
            "backbone_config": {"model_type": "beit", **_VIT, "out_features": _STAGES, "reshape_hidden_states": False},
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
            "bottleneck_features": 16,
            "use_batch_norm_in_fusion_residual": True,
            "num_attractors": [4, 2, 1, 1],
            "bin_embedding_dim": 16,
            "num_relative_features": 8,
        },
        _image,
    ),
    "deimv2": (
        "Deimv2Model",
        "Deimv2Config",
        {
            "backbone_config": {**_HGNET_BACKBONE, "out_features": _STAGES[1:], "return_idx": [1, 2, 3]},
            **_RTDETR,
        },
        _image,
    ),
    "pp-doclayout-v2": (
        "PPDocLayoutV2Model",
        "PPDocLayoutV2Config",
        {
            "backbone_config": {**_HGNET_BACKBONE, "out_features": _STAGES[1:]},
            "freeze_backbone_batch_norms": False,
            **_RTDETR,
        },
        _image,
    ),
    "pp-doclayout-v3": (
        "PPDocLayoutV3Model",
        "PPDocLayoutV3Config",
        {
            "backbone_config": {**_HGNET_BACKBONE, "out_features": _STAGES},
            "freeze_backbone_batch_norms": False,
            "mask_feature_channels": [8, 8],
            "x4_feat_dim": 16,
            "num_prototypes": 4,
            **_RTDETR,
        },
        _image,
    ),
    "pp-doclayout-v4": (
        "PPDocLayoutV4Model",
        "PPDocLayoutV4Config",
        {
            "backbone_config": {**_HGNET_BACKBONE, "out_features": _STAGES[1:]},
            "freeze_backbone_batch_norms": False,
            **{name: value for name, value in _RTDETR.items() if name != "d_model"},
            "hidden_size": 16,
        },
        _image,
    ),
    "granite-speech-5": (
        "GraniteSpeech5Encoder",
        "GraniteSpeech5EncoderConfig",
        {**_SIZES, "num_key_value_heads": 4, "head_dim": 8, "num_mel_bins": 16, "vocab_size": 99, "context_size": 16},
        lambda: _draw("input_features", 2, 40, 64),
    ),
    "granite-speech-plus": (
        "GraniteSpeechPlusCTCEncoder",
        "GraniteSpeechPlusEncoderConfig",
        {
            "input_dim": 16,
            "num_layers": 2,
            "hidden_dim": 32,
            "num_heads": 2,
            "dim_head": 16,
            "context_size": 10,
            "max_pos_emb": 16,
        },
        lambda: _draw("hidden_states", 2, 20, 16),
    ),
    "sam3-lite-text": (
        "Sam3LiteTextTextModel",
        "Sam3LiteTextTextConfig",
        {**_TEXT, "projection_dim": 16, "num_hidden_layers": 4, "max_position_embeddings": 16},
        _text,
    ),
    "maskformer": (
        "MaskFormerModel",
        "MaskFormerConfig",
        {
            "backbone_config": {**_RESNET, "out_features": _STAGES},
            "fpn_feature_size": 32,
            "mask_feature_size": 32,
            "decoder_config": {
                "model_type": "detr",
                "d_model": 32,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "encoder_ffn_dim": 37,
                "decoder_ffn_dim": 37,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "num_queries": 5,
            },
        },
        _image,
    ),
    "mask2former": (
        "Mask2FormerModel",
        "Mask2FormerConfig",
        {
            "backbone_config": {**_RESNET, "out_features": _STAGES},
            "feature_size": 32,
            "mask_feature_size": 32,
            "hidden_dim": 32,
            "encoder_feedforward_dim": 37,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "num_attention_heads": 2,
            "dim_feedforward": 37,
            "num_queries": 5,
        },
        _image,
    ),
    "rt-detr-frozen": (
        "RTDetrModel",
        "RTDetrConfig",
        {"backbone_config": {**_RESNET, "model_type": "rt_detr_resnet", "out_features": _STAGES[1:]}, **_RTDETR},
        _image,
    ),
}

# Tests also export those of ZOO to bundles; those of NORMED are only optimized, and exported by torch.export.
ZOO = tuple(_FAMILIES)
NORMED = tuple(_NORMED)


def member(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Make the model of a family, and the keyword arguments of one call."""
    import transformers

    model_class, config_class, arguments, inputs = {**_FAMILIES, **_NORMED}[name]
    config = getattr(transformers, config_class)(**arguments)
    return lively(getattr(transformers, model_class)(config)), inputs()
