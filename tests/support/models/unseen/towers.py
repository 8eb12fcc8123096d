"""Language models with a tower of images or of sound, and speech."""

from __future__ import annotations

from collections.abc import Callable

import torch

from support.models.model_families import VOCABULARY, Batch, Family, hugging_face
from support.models.unseen.batches import DROPS, EYES, IDS, TEXT, answers, answers_of, ids_with_images, token_ids

_IMAGE = VOCABULARY - 1
_QWEN_EYES = dict(depth=2, num_heads=4, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)
_LLAMA = dict(model_type="llama", num_key_value_heads=2, **TEXT, **IDS)
_QWEN = dict(model_type="qwen2", num_key_value_heads=2, **TEXT, **IDS)
_SIGLIP = dict(model_type="siglip_vision_model", **EYES)


def _labelled(batch: Batch) -> Batch:
    return {**batch, "labels": batch["input_ids"].clone()}


def _patches(batch: int) -> Batch:
    """Each example has one image of 4 x 4 patches, which are 4 tokens."""
    ids = ids_with_images(batch)
    return _labelled(
        {
            "input_ids": ids,
            "pixel_values": torch.randn(batch * 16, 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor([[1, 4, 4]]).expand(batch, 3).clone(),
            "mm_token_type_ids": (ids == _IMAGE).long(),
        }
    )


def _several_images(count: int) -> Callable[[int], Batch]:
    def make(batch: int) -> Batch:
        return _labelled({"input_ids": ids_with_images(batch, count=count), "pixel_values": torch.randn(batch, 1, 3, 16, 16)})

    return make


def _crossed(batch: int) -> Batch:
    return {
        **_labelled({"input_ids": token_ids()(batch), "pixel_values": torch.randn(batch, 1, 1, 3, 16, 16)}),
        "aspect_ratio_ids": torch.ones(batch, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(batch, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(batch, 8, 1, 1, dtype=torch.long),
    }


def _placed(batch: int) -> Batch:
    mask = torch.zeros(batch, 12, dtype=torch.long)
    mask[:, 1:5] = 1
    return _labelled({"input_ids": token_ids(12)(batch), "pixel_values": torch.randn(batch, 3, 16, 16)}) | {
        "image_embeds_position_mask": mask
    }


def _heard(batch: int) -> Batch:
    return _labelled(
        {
            "input_ids": ids_with_images(batch, count=4),
            "input_features": torch.randn(batch, 16, 16),
            "feature_attention_mask": torch.ones(batch, 16, dtype=torch.long),
            "attention_mask": torch.ones(batch, 12, dtype=torch.long),
        }
    )


def _transcribed(batch: int) -> Batch:
    return {"input_values": torch.randn(batch, 320), "labels": token_ids()(batch)}


def _spoken(batch: int) -> Batch:
    return {"input_ids": token_ids()(batch), "labels": torch.randn(batch, 8, 16)}


def _fuyu(batch: int) -> Batch:
    indices = torch.full((batch, 12), -1)
    indices[:, 1:5] = torch.arange(4)
    return _labelled({"input_ids": ids_with_images(batch), "image_patches": torch.randn(batch, 4, 4 * 4 * 3)}) | {
        "image_patches_indices": indices
    }


def towers() -> dict[str, Family]:
    """Language models with a tower, and speech, by the name of the class."""
    speech = dict(
        hidden_size=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        positional_dropout=0.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        mask_time_prob=0.0,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=4,
        num_feat_extract_layers=2,
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        speech_decoder_prenet_dropout=0.0,
        speech_decoder_prenet_units=16,
        speech_decoder_postnet_dropout=0.0,
        speech_decoder_postnet_units=16,
        use_guided_attention_loss=False,
        reduction_factor=2,
        speech_decoder_prenet_layers=1,
        speech_decoder_postnet_layers=2,
        use_cache=False,
    )
    rope = dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=10000.0)
    found = [
        hugging_face(
            "Qwen2VLForConditionalGeneration",
            _patches,
            "Qwen2VLConfig",
            text_config={**_QWEN, "model_type": "qwen2_vl_text", "rope_parameters": rope},
            vision_config=dict(embed_dim=32, hidden_size=32, mlp_ratio=2, in_channels=3, **_QWEN_EYES),
            image_token_id=_IMAGE,
            vision_start_token_id=_IMAGE - 1,
            video_token_id=_IMAGE - 2,
        ),
        hugging_face(
            "Qwen2_5_VLForConditionalGeneration",
            _patches,
            "Qwen2_5_VLConfig",
            text_config={**_QWEN, "model_type": "qwen2_5_vl_text", "rope_parameters": rope},
            vision_config=dict(
                hidden_size=32, out_hidden_size=32, intermediate_size=64, window_size=8, fullatt_block_indexes=[1], **_QWEN_EYES
            ),
            image_token_id=_IMAGE,
            vision_start_token_id=_IMAGE - 1,
            video_token_id=_IMAGE - 2,
        ),
        hugging_face(
            "SmolVLMForConditionalGeneration",
            _several_images(1),
            "SmolVLMConfig",
            text_config=_LLAMA,
            vision_config=EYES,
            image_token_id=_IMAGE,
            scale_factor=2,
            pad_token_id=0,
        ),
        hugging_face(
            "Idefics2ForConditionalGeneration",
            _several_images(2),
            "Idefics2Config",
            text_config={**_LLAMA, "model_type": "mistral"},
            vision_config=EYES,
            perceiver_config=dict(
                hidden_size=32,
                resampler_n_latents=2,
                resampler_depth=1,
                resampler_n_heads=4,
                resampler_head_dim=8,
                num_key_value_heads=2,
            ),
            image_token_id=_IMAGE,
        ),
        hugging_face(
            "Gemma3ForConditionalGeneration",
            lambda b: {**answers(b), "token_type_ids": (ids_with_images(b) == _IMAGE).long()},
            "Gemma3Config",
            text_config={**_LLAMA, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8},
            vision_config=_SIGLIP,
            mm_tokens_per_image=4,
            image_token_index=_IMAGE,
            image_token_id=_IMAGE,
        ),
        hugging_face(
            "Blip2ForConditionalGeneration",
            answers_of(4),
            "Blip2Config",
            text_config=dict(
                model_type="opt",
                vocab_size=VOCABULARY,
                hidden_size=32,
                ffn_dim=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=64,
                word_embed_proj_dim=32,
                dropout=0.0,
                **IDS,
            ),
            vision_config=EYES,
            qformer_config=dict(encoder_hidden_size=32, **TEXT, **DROPS),
            num_query_tokens=4,
            image_token_index=_IMAGE,
            image_token_id=_IMAGE,
        ),
        hugging_face(
            "MllamaForConditionalGeneration",
            _crossed,
            "MllamaConfig",
            text_config=dict(
                cross_attention_layers=[1],
                num_key_value_heads=2,
                **TEXT,
                **IDS,
                rope_parameters=dict(rope_type="default", rope_theta=10000.0),
            ),
            vision_config=dict(
                image_size=16,
                patch_size=8,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                attention_heads=4,
                num_global_layers=1,
                max_num_tiles=1,
                supported_aspect_ratios=[[1, 1]],
                intermediate_layers_indices=[0, 1],
                vision_output_dim=96,
            ),
            image_token_index=_IMAGE,
        ),
        hugging_face(
            "Kosmos2ForConditionalGeneration",
            _placed,
            "Kosmos2Config",
            text_config=dict(
                vocab_size=VOCABULARY,
                max_position_embeddings=64,
                embed_dim=32,
                layers=2,
                ffn_dim=64,
                attention_heads=4,
                dropout=0.0,
                attention_dropout=0.0,
                activation_dropout=0.0,
                layerdrop=0.0,
                **IDS,
            ),
            vision_config=EYES,
            latent_query_num=4,
        ),
        hugging_face(
            "AyaVisionForConditionalGeneration",
            answers_of(1),
            "AyaVisionConfig",
            text_config={**_LLAMA, "model_type": "cohere2", "sliding_window": 8},
            vision_config=_SIGLIP,
            downsample_factor=2,
            adapter_layer_norm_eps=1e-6,
            image_token_id=_IMAGE,
        ),
        hugging_face(
            "FuyuForCausalLM",
            _fuyu,
            "FuyuConfig",
            text_config=dict(model_type="persimmon", **TEXT, **IDS),
            patch_size=4,
            num_channels=3,
            image_token_id=_IMAGE,
            **TEXT,
            **IDS,
        ),
        hugging_face(
            "Qwen2AudioForConditionalGeneration",
            _heard,
            "Qwen2AudioConfig",
            text_config=_QWEN,
            audio_config=dict(
                num_mel_bins=16,
                encoder_layers=2,
                encoder_attention_heads=4,
                encoder_ffn_dim=64,
                d_model=32,
                max_source_positions=8,
                dropout=0.0,
                encoder_layerdrop=0.0,
            ),
            audio_token_index=_IMAGE,
            audio_token_id=_IMAGE,
        ),
        hugging_face("SpeechT5ForSpeechToText", _transcribed, "SpeechT5Config", **speech, **IDS, decoder_start_token_id=2),
        hugging_face("SpeechT5ForTextToSpeech", _spoken, "SpeechT5Config", **speech, **IDS, decoder_start_token_id=2),
    ]
    return {family.model: family for family in found}
