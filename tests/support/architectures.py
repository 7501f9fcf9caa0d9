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
_CODERS = {
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 37 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
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


# The class of the model, which knows that of its configuration; the inputs; the arguments of the configuration.
_Family = tuple[str, Callable[[], dict[str, torch.Tensor]], dict[str, Any]]


def _family(model: str, inputs: Callable[[], dict[str, torch.Tensor]], **arguments: Any) -> _Family:
    return model, inputs, arguments


_FAMILIES: dict[str, _Family] = {
    "albert": _family("AlbertModel", _text, **_TEXT, embedding_size=16),
    "bart": _family("BartModel", _text, vocab_size=_VOCABULARY, d_model=32, **_CODERS, use_cache=False),
    "beit": _family("BeitModel", lambda: _image(32), image_size=32, patch_size=8, **_SIZES),
    "bert-tokens": _family("BertForTokenClassification", _text, **_TEXT),
    "bit": _family("BitModel", _image, embedding_size=8, num_groups=1, **_DEEP),
    "bloom": _family(
        "BloomForCausalLM", _text, vocab_size=_VOCABULARY, hidden_size=32, n_layer=2, n_head=4, use_cache=False
    ),
    "clip-text": _family("CLIPTextModel", _text, **_TEXT, eos_token_id=_VOCABULARY - 1),
    "clip-vision": _family("CLIPVisionModel", lambda: _image(32), image_size=32, patch_size=8, **_SIZES),
    "deberta": _family("DebertaV2Model", _text, **_TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deit": _family("DeiTModel", lambda: _image(32), image_size=32, patch_size=8, **_SIZES),
    "dinov2": _family("Dinov2Model", lambda: _image(32), image_size=32, patch_size=8, **_SIZES),
    "distilbert": _family(
        "DistilBertModel", _text, vocab_size=_VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=37
    ),
    "electra": _family("ElectraModel", _text, **_TEXT, embedding_size=16),
    "fnet": _family(
        "FNetModel", _ids, vocab_size=_VOCABULARY, hidden_size=32, num_hidden_layers=2, intermediate_size=37
    ),
    "gpt-neox": _family("GPTNeoXForCausalLM", _text, **_TEXT, use_cache=False),
    "levit": _family(
        "LevitModel",
        _image,
        image_size=64,
        hidden_sizes=[16, 32, 48],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    "mamba": _family(
        "MambaForCausalLM", _ids, vocab_size=_VOCABULARY, hidden_size=32, num_hidden_layers=2, use_cache=False
    ),
    "mistral": _family("MistralForCausalLM", _text, **_TEXT, num_key_value_heads=2, use_cache=False),
    "mobilenet-v1": _family("MobileNetV1Model", _image, depth_multiplier=0.25),
    "mobilevit": _family(
        "MobileViTModel", _image, image_size=64, hidden_sizes=[16, 16, 16], neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 32]
    ),
    "mpnet": _family("MPNetModel", _text, **_TEXT),
    "opt": _family(
        "OPTForCausalLM",
        _text,
        vocab_size=_VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        ffn_dim=37,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        use_cache=False,
    ),
    "poolformer": _family("PoolFormerModel", _image, hidden_sizes=[16, 32, 40, 48], depths=[1, 1, 1, 1]),
    "qwen2": _family("Qwen2ForCausalLM", _text, **_TEXT, num_key_value_heads=2, use_cache=False),
    "regnet": _family("RegNetModel", _image, embedding_size=8, groups_width=4, **_DEEP),
    "roberta": _family("RobertaModel", _text, **_TEXT),
    "segformer": _family(
        "SegformerModel", _image, hidden_sizes=[16, 32, 40, 48], num_attention_heads=[1, 2, 2, 4], depths=[1, 1, 1, 1]
    ),
    "swin": _family(
        "SwinModel",
        lambda: _image(32),
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    "wav2vec2": _family("Wav2Vec2Model", _sound, **_WAVES),
    "xlnet": _family(
        "XLNetModel", _text, vocab_size=_VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=37, use_mems_eval=False
    ),
}

# The other architectures with a BatchNorm. Missing are those that need more than transformers (timm, detectron2), those
# whose forward isn't `forward` (Emu3's VQ-VAE), and those whose only BatchNorms are in a backbone that is listed here.
_NORMED: dict[str, _Family] = {
    "align": _family(
        "AlignVisionModel", _image, image_size=64, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320
    ),
    "beit-segmentation": _family(
        "BeitForSemanticSegmentation",
        _image,
        **_VIT,
        out_indices=[1, 2, 3, 4],
        pool_scales=[1, 2],
        auxiliary_channels=16,
    ),
    "clap": _family(
        "ClapAudioModel",
        lambda: _draw("input_features", 2, 1, 256, 16),
        num_mel_bins=16,
        spec_size=64,
        window_size=4,
        patch_embeds_hidden_size=16,
        hidden_size=32,
        depths=[1, 1],
        num_attention_heads=[2, 2],
    ),
    "cvt": _family("CvtModel", _image, embed_dim=[8, 16, 24], num_heads=[1, 2, 2], depth=[1, 2, 3]),
    "data2vec-segmentation": _family(
        "Data2VecVisionForSemanticSegmentation",
        _image,
        **_VIT,
        out_indices=[0, 1, 2, 3],
        pool_scales=[1, 2],
        auxiliary_channels=16,
    ),
    "d-fine": _family(
        "DFineModel",
        _image,
        backbone_config={**_HGNET_BACKBONE, "out_features": _STAGES[1:], "return_idx": [1, 2, 3]},
        **_RTDETR,
    ),
    "depth-pro": _family(
        "DepthProForDepthEstimation",
        _image,
        patch_size=32,
        fusion_hidden_size=16,
        intermediate_hook_ids=[1, 0],
        intermediate_feature_dims=[8, 8],
        scaled_images_ratios=[0.5, 1.0],
        scaled_images_overlap_ratios=[0.0, 0.2],
        scaled_images_feature_dims=[8, 8],
        use_batch_norm_in_fusion_residual=True,
        **{
            f"{part}_model_config": {"model_type": "dinov2", "image_size": 32, "patch_size": 8, **_SIZES}
            for part in ("image", "patch", "fov")
        },
    ),
    "detr-resnet": _family(
        "DetrModel",
        _image,
        backbone_config={**_RESNET, "out_features": ["stage4"]},
        d_model=32,
        **_CODERS,
        num_queries=5,
    ),
    "dpt": _family(
        "DPTForSemanticSegmentation",
        _image,
        **_VIT,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        use_batch_norm_in_fusion_residual=True,
    ),
    "efficientloftr": _family(
        "EfficientLoFTRModel",
        lambda: _draw("pixel_values", 2, 2, 3, 64, 64),
        stage_num_blocks=[1, 1, 2, 2],
        out_features=[8, 8, 16, 32],
        hidden_size=32,
        num_attention_layers=1,
        num_attention_heads=8,
    ),
    "efficientnet": _family(
        "EfficientNetModel", _image, image_size=64, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320
    ),
    "fastspeech2-conformer": _family(
        "FastSpeech2ConformerModel",
        _ids,
        hidden_size=24,
        num_mel_bins=10,
        encoder_layers=1,
        decoder_layers=1,
        encoder_linear_units=24,
        decoder_linear_units=24,
        speech_decoder_postnet_layers=2,
        speech_decoder_postnet_units=16,
        duration_predictor_channels=16,
        energy_predictor_channels=16,
        pitch_predictor_channels=16,
        vocab_size=99,
    ),
    "glpn": _family(
        "GLPNForDepthEstimation",
        _image,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 2],
        decoder_hidden_size=16,
    ),
    "granite-speech": _family(
        "GraniteSpeechCTCEncoder",
        lambda: _draw("hidden_states", 2, 20, 16),
        input_dim=16,
        num_layers=2,
        hidden_dim=32,
        num_heads=2,
        dim_head=16,
        context_size=10,
        max_pos_emb=16,
    ),
    "groupvit": _family(
        "GroupViTModel",
        lambda: {**_text(), **_image(32)},
        text_config={**_TEXT, "eos_token_id": 98},
        vision_config={
            "image_size": 32,
            "patch_size": 8,
            "hidden_size": 32,
            "intermediate_size": 37,
            "depths": [1, 1, 1],
            "num_group_tokens": [4, 2, 0],
            "num_output_groups": [4, 2, 2],
            "num_attention_heads": 4,
        },
        projection_dim=16,
        projection_intermediate_dim=24,
    ),
    "hgnet-v2": _family("HGNetV2ForImageClassification", _image, **_HGNET),
    "hubert": _family("HubertModel", _sound, **_WAVES, conv_pos_batch_norm=True),
    "informer": _family(
        "InformerModel",
        _series,
        prediction_length=4,
        context_length=12,
        num_time_features=1,
        lags_sequence=[1, 2],
        d_model=16,
        encoder_layers=2,
        decoder_layers=1,
    ),
    "lasr": _family(
        "LasrEncoder",
        lambda: _draw("input_features", 2, 40, 16),
        **_SIZES,
        subsampling_conv_channels=8,
        num_mel_bins=16,
        conv_kernel_size=5,
    ),
    "lw-detr": _family(
        "LwDetrModel",
        _image,
        backbone_config={
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
        projector_scale_factors=[1.0],
        d_model=32,
        decoder_ffn_dim=37,
        decoder_layers=1,
        decoder_self_attention_heads=2,
        decoder_cross_attention_heads=4,
        num_queries=5,
        group_detr=1,
    ),
    "mobilevit-v2": _family(
        "MobileViTV2Model",
        _image,
        image_size=64,
        width_multiplier=0.25,
        n_attn_blocks=[1, 1, 1],
        base_attn_unit_dims=[32, 32, 32],
    ),
    "mobilevit-segmentation": _family(
        "MobileViTForSemanticSegmentation",
        _image,
        image_size=64,
        hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 32],
        aspp_out_channels=16,
    ),
    "parakeet": _family(
        "ParakeetEncoder",
        lambda: _draw("input_features", 2, 40, 16),
        **_SIZES,
        subsampling_conv_channels=8,
        num_mel_bins=16,
    ),
    "patchtsmixer": _family(
        "PatchTSMixerModel",
        lambda: _draw("past_values", 2, 32, 2),
        norm_mlp="BatchNorm",
        num_layers=2,
        num_input_channels=2,
    ),
    "patchtst": _family(
        "PatchTSTModel",
        lambda: _draw("past_values", 2, 32, 2),
        d_model=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_input_channels=2,
    ),
    "perceiver": _family(
        "PerceiverForImageClassificationConvProcessing",
        lambda: _draw("inputs", 2, 3, 224, 224),
        num_latents=8,
        d_latents=16,
        num_self_attends_per_block=1,
        num_self_attention_heads=2,
        num_cross_attention_heads=1,
    ),
    "pp-lcnet": _family("PPLCNetForImageClassification", _image, scale=0.25, class_expand=32),
    "pp-lcnet-v3": _family("PPLCNetV3Backbone", _image, scale=0.25),
    "pp-lcnet-v4": _family("PPLCNetV4Backbone", _image, **_LCNET_V4),
    "pp-ocrv5-mobile-det": _family("PPOCRV5MobileDetForObjectDetection", _image),
    "pp-ocrv5-mobile-rec": _family(
        "PPOCRV5MobileRecForTextRecognition",
        lambda: _draw("pixel_values", 2, 3, 96, 192),
        hidden_size=16,
        num_attention_heads=2,
        head_out_channels=19,
    ),
    "pp-ocrv5-server-det": _family(
        "PPOCRV5ServerDetForObjectDetection",
        _image,
        backbone_config={**_HGNET_BACKBONE, "out_features": _STAGES},
        neck_out_channels=16,
        intraclass_block_config=_INTRACLASS,
        scale_factor_list=[1, 2, 4, 8],
        kernel_list=[3, 2, 2],
    ),
    "pp-ocrv5-server-rec": _family(
        "PPOCRV5ServerRecForTextRecognition",
        lambda: _draw("pixel_values", 2, 3, 96, 192),
        backbone_config=_HGNET_BACKBONE,
        hidden_size=16,
        num_attention_heads=2,
        head_out_channels=19,
    ),
    "pp-ocrv6-small-det": _family(
        "PPOCRV6SmallDetForObjectDetection",
        _image,
        backbone_config={"model_type": "pp_lcnet_v4", **_LCNET_V4, "out_features": _STAGES},
        layer_list_out_channels=[16, 16, 24, 32],
        neck_out_channels=16,
    ),
    "pp-ocrv6-medium-det": _family(
        "PPOCRV6MediumDetForObjectDetection",
        _image,
        backbone_config={"model_type": "pp_lcnet_v4", **_LCNET_V4, "out_features": _STAGES},
        neck_out_channels=16,
        intraclass_block_config=_INTRACLASS,
        scale_factor_list=[1, 2, 4, 8],
        kernel_list=[3, 2, 2],
    ),
    "pp-ocrv6-small-rec": _family(
        "PPOCRV6SmallRecForTextRecognition", lambda: _draw("pixel_values", 2, 3, 48, 96), head_out_channels=19
    ),
    "pp-ocrv6-tiny-rec": _family(
        "PPOCRV6TinyRecForTextRecognition", lambda: _draw("pixel_values", 2, 3, 48, 96), head_out_channels=19
    ),
    "rt-detr": _family(
        "RTDetrModel",
        _image,
        backbone_config={**_RESNET, "model_type": "rt_detr_resnet", "out_features": _STAGES[1:]},
        freeze_backbone_batch_norms=False,
        **_RTDETR,
    ),
    "rt-detr-v2": _family(
        "RTDetrV2Model",
        _image,
        backbone_config={**_RESNET, "model_type": "rt_detr_resnet", "out_features": _STAGES[1:]},
        freeze_backbone_batch_norms=False,
        **_RTDETR,
    ),
    "seamless-m4t": _family(
        "SeamlessM4TForSpeechToText",
        lambda: {**_draw("input_features", 2, 40, 16), "decoder_input_ids": _ids()["input_ids"]},
        vocab_size=99,
        hidden_size=32,
        **_CODERS,
        speech_encoder_layers=2,
        speech_encoder_attention_heads=2,
        speech_encoder_intermediate_size=37,
        feature_projection_input_dim=16,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        use_cache=False,
    ),
    "segformer-segmentation": _family(
        "SegformerForSemanticSegmentation",
        _image,
        hidden_sizes=[16, 32, 40, 48],
        num_attention_heads=[1, 2, 2, 4],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=16,
    ),
    "slanet": _family("SLANetForTableRecognition", _image, max_text_length=4, hidden_size=16),
    "speecht5": _family(
        "SpeechT5ForTextToSpeech",
        lambda: {**_text(), **_draw("decoder_input_values", 2, 6, 10), **_draw("speaker_embeddings", 2, 8)},
        vocab_size=99,
        hidden_size=32,
        **_CODERS,
        num_mel_bins=10,
        speech_decoder_prenet_units=16,
        speech_decoder_postnet_units=16,
        speaker_embedding_dim=8,
        use_cache=False,
    ),
    "superglue": _family(
        "SuperGlueForKeypointMatching",
        lambda: _draw("pixel_values", 2, 2, 3, 64, 64),
        hidden_size=32,
        keypoint_encoder_sizes=[8, 16],
        gnn_layers_types=["self", "cross"],
        num_attention_heads=2,
        keypoint_detector_config={
            "model_type": "superpoint",
            "encoder_hidden_sizes": [8, 8, 8, 8],
            "decoder_hidden_size": 8,
            "descriptor_decoder_dim": 32,
            "max_keypoints": 16,
        },
    ),
    "swiftformer": _family("SwiftFormerModel", _image, depths=[1, 1, 1, 1], embed_dims=[8, 16, 16, 24]),
    "textnet": _family("TextNetModel", _image, stem_out_channels=8, hidden_sizes=[8, 8, 8, 16, 16]),
    "upernet": _family(
        "UperNetForSemanticSegmentation",
        _image,
        backbone_config={**_RESNET, "out_features": _STAGES},
        hidden_size=16,
        auxiliary_channels=8,
        auxiliary_in_channels=16,
        pool_scales=[1, 2],
    ),
    "uvdoc": _family(
        "UVDocModel",
        _image,
        backbone_config={
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
        bridge_connector=[16, 16],
        out_point_positions2D=[[16, 8], [8, 2]],
    ),
    "vitmatte": _family(
        "VitMatteForImageMatting",
        lambda: _draw("pixel_values", 2, 4, 64, 64),
        backbone_config={
            "model_type": "vitdet",
            "image_size": 64,
            "patch_size": 16,
            "num_channels": 4,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "out_features": ["stage2"],
        },
        hidden_size=32,
        convstream_hidden_sizes=[8, 8, 16],
        fusion_hidden_sizes=[16, 16, 8, 8],
    ),
    "vitpose": _family(
        "VitPoseForPoseEstimation",
        _image,
        backbone_config={
            "model_type": "vitpose_backbone",
            "image_size": [64, 64],
            "patch_size": [16, 16],
            **_SIZES,
            "out_features": ["stage2"],
        },
        use_simple_decoder=False,
        num_labels=5,
    ),
    "wav2vec2-conformer": _family("Wav2Vec2ConformerModel", _sound, **_WAVES, conv_depthwise_kernel_size=5),
    "zoedepth": _family(
        "ZoeDepthForDepthEstimation",
        _image,
        backbone_config={"model_type": "beit", **_VIT, "out_features": _STAGES, "reshape_hidden_states": False},
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        bottleneck_features=16,
        use_batch_norm_in_fusion_residual=True,
        num_attractors=[4, 2, 1, 1],
        bin_embedding_dim=16,
        num_relative_features=8,
    ),
    "deimv2": _family(
        "Deimv2Model",
        _image,
        backbone_config={**_HGNET_BACKBONE, "out_features": _STAGES[1:], "return_idx": [1, 2, 3]},
        **_RTDETR,
    ),
    "pp-doclayout-v2": _family(
        "PPDocLayoutV2Model",
        _image,
        backbone_config={**_HGNET_BACKBONE, "out_features": _STAGES[1:]},
        freeze_backbone_batch_norms=False,
        **_RTDETR,
    ),
    "pp-doclayout-v3": _family(
        "PPDocLayoutV3Model",
        _image,
        backbone_config={**_HGNET_BACKBONE, "out_features": _STAGES},
        freeze_backbone_batch_norms=False,
        mask_feature_channels=[8, 8],
        x4_feat_dim=16,
        num_prototypes=4,
        **_RTDETR,
    ),
    "pp-doclayout-v4": _family(
        "PPDocLayoutV4Model",
        _image,
        backbone_config={**_HGNET_BACKBONE, "out_features": _STAGES[1:]},
        freeze_backbone_batch_norms=False,
        **{name: value for name, value in _RTDETR.items() if name != "d_model"},
        hidden_size=16,
    ),
    "granite-speech-5": _family(
        "GraniteSpeech5Encoder",
        lambda: _draw("input_features", 2, 40, 64),
        **_SIZES,
        num_key_value_heads=4,
        head_dim=8,
        num_mel_bins=16,
        vocab_size=99,
        context_size=16,
    ),
    "granite-speech-plus": _family(
        "GraniteSpeechPlusCTCEncoder",
        lambda: _draw("hidden_states", 2, 20, 16),
        input_dim=16,
        num_layers=2,
        hidden_dim=32,
        num_heads=2,
        dim_head=16,
        context_size=10,
        max_pos_emb=16,
    ),
    "sam3-lite-text": _family(
        "Sam3LiteTextTextModel",
        _text,
        **_TEXT | {"num_hidden_layers": 4},
        projection_dim=16,
        max_position_embeddings=16,
    ),
    "maskformer": _family(
        "MaskFormerModel",
        _image,
        backbone_config={**_RESNET, "out_features": _STAGES},
        fpn_feature_size=32,
        mask_feature_size=32,
        decoder_config={"model_type": "detr", "d_model": 32, **_CODERS, "num_queries": 5},
    ),
    "mask2former": _family(
        "Mask2FormerModel",
        _image,
        backbone_config={**_RESNET, "out_features": _STAGES},
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=37,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=37,
        num_queries=5,
    ),
    "rt-detr-frozen": _family(
        "RTDetrModel",
        _image,
        backbone_config={**_RESNET, "model_type": "rt_detr_resnet", "out_features": _STAGES[1:]},
        **_RTDETR,
    ),
}

# Tests also export those of ZOO to bundles; those of NORMED are only optimized, and exported by torch.export.
ZOO = tuple(_FAMILIES)
NORMED = tuple(_NORMED)


def member(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Make the model of a family, and the keyword arguments of one call."""
    import transformers

    name_of_class, inputs, arguments = {**_FAMILIES, **_NORMED}[name]
    model_class = getattr(transformers, name_of_class)
    return lively(model_class(model_class.config_class(**arguments))), inputs()
