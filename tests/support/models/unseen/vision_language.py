"""Models of images with text."""

from __future__ import annotations

import torch

from support.models.model_families import CLASSES, VOCABULARY, Family, hugging_face
from support.models.unseen.batches import (
    DROPS,
    EYES,
    IDS,
    SIZES,
    SOUND,
    TEXT,
    answers,
    answers_of,
    captions,
    idefics,
    images_with,
    speech,
    token_ids,
)


def reported() -> dict[str, Family]:
    """Those that an outside report said were refused for checks of their data."""
    llama = dict(model_type="llama", num_key_value_heads=2, **TEXT, **IDS)
    found = [
        hugging_face(
            "LlavaForConditionalGeneration",
            answers,
            text_config=llama,
            vision_config=dict(model_type="clip_vision_model", **EYES),
            image_token_id=VOCABULARY - 1,
            image_seq_length=4,
            vision_feature_layer=-1,
        ),
        hugging_face(
            "PaliGemmaForConditionalGeneration",
            lambda b: {**answers(b), "token_type_ids": torch.ones(b, 12, dtype=torch.long)},
            text_config={**llama, "model_type": "gemma", "head_dim": 8},
            image_token_id=VOCABULARY - 1,
            projection_dim=32,
            vision_config=dict(model_type="siglip_vision_model", **EYES),
        ),
        hugging_face("Wav2Vec2ForCTC", speech, vocab_size=32, ctc_loss_reduction="mean", **SIZES, **SOUND),
    ]
    return {family.model: family for family in found}


def vision_language() -> list[Family]:
    blip_text = dict(encoder_hidden_size=32, projection_dim=16, bos_token_id=1, eos_token_id=2, sep_token_id=2, **TEXT, **DROPS)
    towers = dict(text_config=dict(**TEXT), vision_config=dict(**EYES))
    qwen = dict(model_type="qwen2", num_key_value_heads=2, **TEXT, **IDS)
    return [
        hugging_face(
            "BlipForConditionalGeneration",
            lambda b: {**captions()(b), "labels": token_ids()(b)},
            "BlipConfig",
            text_config=blip_text,
            vision_config=EYES,
            projection_dim=16,
            image_text_hidden_size=16,
        ),
        hugging_face("SiglipModel", captions(return_loss=True), **towers),
        hugging_face(
            "ChineseCLIPModel",
            captions(return_loss=True),
            "ChineseCLIPConfig",
            projection_dim=16,
            text_config={**TEXT, **DROPS},
            vision_config=dict(projection_dim=16, **EYES),
        ),
        hugging_face(
            "CLIPSegForImageSegmentation",
            lambda b: {**captions(16)(b), "labels": torch.rand(b, 16, 16).round()},
            "CLIPSegConfig",
            text_config=dict(bos_token_id=1, eos_token_id=VOCABULARY - 1, **TEXT),
            vision_config=EYES,
            projection_dim=16,
            reduce_dim=16,
            extract_layers=[0, 1],
            decoder_num_attention_heads=2,
            decoder_intermediate_size=32,
        ),
        hugging_face(
            "GitForCausalLM",
            lambda b: {**captions()(b), "labels": token_ids()(b)},
            "GitConfig",
            vision_config=EYES,
            **IDS,
            **TEXT,
            **DROPS,
        ),
        hugging_face(
            "ViltForQuestionAnswering",
            lambda b: {**captions()(b), "labels": torch.rand(b, CLASSES)},
            "ViltConfig",
            num_labels=CLASSES,
            max_image_length=4,
            image_size=16,
            patch_size=8,
            **TEXT,
            **DROPS,
        ),
        hugging_face(
            "InternVLForConditionalGeneration",
            answers_of(1),
            "InternVLConfig",
            text_config=qwen,
            image_token_id=VOCABULARY - 1,
            vision_config=dict(
                image_size=[16, 16],
                patch_size=[8, 8],
                **{k: v for k, v in EYES.items() if "size" not in k or k in ("hidden_size", "intermediate_size")},
            ),
            downsample_ratio=0.5,
            image_seq_length=1,
        ),
        hugging_face(
            "Idefics3ForConditionalGeneration",
            idefics,
            "Idefics3Config",
            text_config={**qwen, "model_type": "llama"},
            vision_config=EYES,
            image_token_id=VOCABULARY - 1,
            scale_factor=2,
            pad_token_id=0,
        ),
        hugging_face(
            "VisionEncoderDecoderModel",
            lambda b: images_with(16, labels=token_ids())(b),
            "VisionEncoderDecoderConfig",
            encoder=dict(model_type="vit", **EYES, **DROPS),
            pad_token_id=0,
            decoder_start_token_id=1,
            decoder=dict(model_type="bert", is_decoder=True, add_cross_attention=True, **TEXT, **DROPS),
        ),
    ]
