"""The models of `names`, small and with random weights, with one batch each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support.models.model_families import CLASSES, SEQUENCE, VOCABULARY, Batch, Family, hugging_face, image_batch, token_batch

_DROPS = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
_SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
_IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
_TEXT = dict(vocab_size=VOCABULARY, max_position_embeddings=64, **_SIZES)
_EYES = dict(image_size=16, patch_size=8, **_SIZES)
_SOUND = dict(
    conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=4,
    layerdrop=0.0, mask_time_prob=0.0, hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0,
    final_dropout=0.0, classifier_proj_size=16, num_feat_extract_layers=2,
)  # fmt: skip
_SERIES = dict(
    prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1, d_model=16, encoder_layers=1, decoder_layers=1,
    encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0, encoder_layerdrop=0.0,
    decoder_layerdrop=0.0, attention_dropout=0.0, activation_dropout=0.0,
)  # fmt: skip


def _images_with(size: int, **more: Callable[[int], Tensor]) -> Callable[[int], Batch]:
    return lambda batch: {"pixel_values": torch.randn(batch, 3, size, size), **{name: make(batch) for name, make in more.items()}}


def _tokens(length: int = 8) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(3, VOCABULARY - 4, (batch, length))


def _with_images(batch: int, image_token: int = VOCABULARY - 1, count: int = 4) -> Tensor:
    ids = torch.randint(3, VOCABULARY - 4, (batch, 12))
    ids[:, 1 : 1 + count] = image_token
    return ids


def _captions(size: int = 16, **more: Any) -> Callable[[int], Batch]:
    return lambda batch: {"input_ids": _tokens()(batch), "pixel_values": torch.randn(batch, 3, size, size), **more}


def _answers(batch: int) -> Batch:
    ids = _with_images(batch)
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 16, 16), "labels": ids.clone()}


def _classes(shape: Callable[[int], tuple[int, ...]], name: str) -> Callable[[int], Batch]:
    return lambda batch: {name: torch.randn(shape(batch)), "labels": torch.randint(0, CLASSES, (batch,))}


def _series(batch: int) -> Batch:
    past, future = 10, 4
    return {
        "past_values": torch.rand(batch, past) + 1, "past_time_features": torch.randn(batch, past, 1),
        "past_observed_mask": torch.ones(batch, past), "future_values": torch.rand(batch, future) + 1,
        "future_time_features": torch.randn(batch, future, 1),
    }  # fmt: skip


def _patches(batch: int) -> Batch:
    return {"past_values": torch.randn(batch, 16, 3), "future_values": torch.randn(batch, 4, 3)}


def _speech(batch: int) -> Batch:
    labels = torch.randint(4, 32, (batch, 5))
    labels[0, 3:] = -100
    return {"input_values": torch.randn(batch, 320), "labels": labels}


def _boxes(batch: int) -> Batch:
    each = {"class_labels": torch.tensor([1, 2]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.2, 0.2]])}
    return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": [dict(each) for _ in range(batch)]}


def _layout(batch: int) -> Batch:
    return {
        "input_ids": _tokens()(batch), "bbox": torch.tensor([1, 2, 10, 12]).expand(batch, 8, 4).clone(),
        "labels": torch.randint(0, CLASSES, (batch, 8)),
    }  # fmt: skip


def _videos(batch: int) -> Batch:
    return {"pixel_values": torch.randn(batch, 2, 3, 16, 16), "labels": torch.randint(0, CLASSES, (batch,))}


def _masked_videos(batch: int) -> Batch:
    mask = torch.zeros(batch, 4, dtype=torch.bool)
    mask[:, ::2] = True
    return {"pixel_values": torch.randn(batch, 2, 3, 16, 16), "bool_masked_pos": mask}


def unseen() -> dict[str, Family]:
    """Every model by the name of its class."""
    found = [*_vision_language(), *_sound(), *_time_series(), *_dense_vision(), *_image_classes(), *_texts()]
    return {family.model: family for family in found}


def reported() -> dict[str, Family]:
    """Those that an outside report said were refused for checks of their data."""
    llama = dict(model_type="llama", num_key_value_heads=2, **_TEXT, **_IDS)
    found = [
        hugging_face("LlavaForConditionalGeneration", _answers, text_config=llama, vision_config=dict(model_type="clip_vision_model", **_EYES),
                     image_token_id=VOCABULARY - 1, image_seq_length=4, vision_feature_layer=-1),
        hugging_face("PaliGemmaForConditionalGeneration", lambda b: {**_answers(b), "token_type_ids": torch.ones(b, 12, dtype=torch.long)},
                     text_config={**llama, "model_type": "gemma", "head_dim": 8}, image_token_id=VOCABULARY - 1, projection_dim=32,
                     vision_config=dict(model_type="siglip_vision_model", **_EYES)),
        hugging_face("Wav2Vec2ForCTC", _speech, vocab_size=32, ctc_loss_reduction="mean", **_SIZES, **_SOUND),
    ]  # fmt: skip
    return {family.model: family for family in found}


def _vision_language() -> list[Family]:
    blip_text = dict(encoder_hidden_size=32, projection_dim=16, bos_token_id=1, eos_token_id=2, sep_token_id=2, **_TEXT, **_DROPS)
    towers = dict(text_config=dict(**_TEXT), vision_config=dict(**_EYES))
    qwen = dict(model_type="qwen2", num_key_value_heads=2, **_TEXT, **_IDS)
    return [
        hugging_face("BlipForConditionalGeneration", lambda b: {**_captions()(b), "labels": _tokens()(b)}, "BlipConfig",
                     text_config=blip_text, vision_config=_EYES, projection_dim=16, image_text_hidden_size=16),
        hugging_face("SiglipModel", _captions(return_loss=True), **towers),
        hugging_face("ChineseCLIPModel", _captions(return_loss=True), "ChineseCLIPConfig", projection_dim=16,
                     text_config={**_TEXT, **_DROPS}, vision_config=dict(projection_dim=16, **_EYES)),
        hugging_face("CLIPSegForImageSegmentation", lambda b: {**_captions(16)(b), "labels": torch.rand(b, 16, 16).round()}, "CLIPSegConfig",
                     text_config=dict(bos_token_id=1, eos_token_id=VOCABULARY - 1, **_TEXT), vision_config=_EYES, projection_dim=16,
                     reduce_dim=16, extract_layers=[0, 1], decoder_num_attention_heads=2, decoder_intermediate_size=32),
        hugging_face("GitForCausalLM", lambda b: {**_captions()(b), "labels": _tokens()(b)}, "GitConfig", vision_config=_EYES,
                     **_IDS, **_TEXT, **_DROPS),
        hugging_face("ViltForQuestionAnswering", lambda b: {**_captions()(b), "labels": torch.rand(b, CLASSES)}, "ViltConfig",
                     num_labels=CLASSES, max_image_length=4, image_size=16, patch_size=8, **_TEXT, **_DROPS),
        hugging_face("InternVLForConditionalGeneration", _answers_of(1), "InternVLConfig", text_config=qwen, image_token_id=VOCABULARY - 1,
                     vision_config=dict(image_size=[16, 16], patch_size=[8, 8], **{k: v for k, v in _EYES.items() if "size" not in k
                                        or k in ("hidden_size", "intermediate_size")}), downsample_ratio=0.5, image_seq_length=1),
        hugging_face("Idefics3ForConditionalGeneration", _idefics, "Idefics3Config", text_config={**qwen, "model_type": "llama"},
                     vision_config=_EYES, image_token_id=VOCABULARY - 1, scale_factor=2, pad_token_id=0),
        hugging_face("VisionEncoderDecoderModel", lambda b: _images_with(16, labels=_tokens())(b), "VisionEncoderDecoderConfig",
                     encoder=dict(model_type="vit", **_EYES, **_DROPS), pad_token_id=0, decoder_start_token_id=1,
                     decoder=dict(model_type="bert", is_decoder=True, add_cross_attention=True, **_TEXT, **_DROPS)),
    ]  # fmt: skip


def _answers_of(count: int) -> Callable[[int], Batch]:
    def make(batch: int) -> Batch:
        ids = _with_images(batch, count=count)
        return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 16, 16), "labels": ids.clone()}

    return make


def _idefics(batch: int) -> Batch:
    ids = _with_images(batch, count=1)
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 1, 3, 16, 16), "labels": ids.clone()}


def _sound() -> list[Family]:
    speech = dict(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, dropout=0.0, input_feat_per_channel=8, conv_channels=16, vocab_size=VOCABULARY, use_cache=False,
        decoder_start_token_id=1, max_source_positions=64, max_target_positions=32, **_IDS,
    )  # fmt: skip
    return [
        hugging_face("HubertForCTC", _speech, vocab_size=32, ctc_loss_reduction="mean", **_SIZES, **_SOUND),
        hugging_face("ASTForAudioClassification", _classes(lambda b: (b, 32, 16), "input_values"), num_labels=CLASSES, max_length=32,
                     num_mel_bins=16, patch_size=8, frequency_stride=8, time_stride=8, **_SIZES, **_DROPS),
        hugging_face("Speech2TextForConditionalGeneration", lambda b: {"input_features": torch.randn(b, 16, 8), "labels": _tokens()(b)},
                     **speech),
        hugging_face("WavLMForSequenceClassification", _classes(lambda b: (b, 320), "input_values"), num_labels=CLASSES, **_SIZES,
                     **_SOUND),
        hugging_face("ClapModel", lambda b: {"input_ids": _tokens()(b), "input_features": torch.randn(b, 1, 64, 16), "return_loss": True},
                     "ClapConfig", projection_dim=16, text_config=dict(projection_dim=16, **_TEXT, **_DROPS),
                     audio_config=dict(window_size=2, num_mel_bins=16, spec_size=32, patch_size=4, patch_stride=[4, 4], hidden_size=16,
                                       projection_dim=16, depths=[1, 1], num_attention_heads=[2, 2], patch_embeds_hidden_size=8,
                                       drop_path_rate=0.0, **_DROPS)),
    ]  # fmt: skip


def _time_series() -> list[Family]:
    patches = dict(context_length=16, prediction_length=4, num_input_channels=3, patch_length=4, patch_stride=4, d_model=16)
    return [
        hugging_face("TimeSeriesTransformerForPrediction", _series, **_SERIES),
        hugging_face("PatchTSTForPrediction", _patches, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, ff_dropout=0.0,
                     attention_dropout=0.0, head_dropout=0.0, loss="mse", **patches),
        hugging_face("PatchTSMixerForPrediction", _patches, num_layers=2, dropout=0.0, head_dropout=0.0, loss="mse", **patches),
        hugging_face("AutoformerForPrediction", _series, label_length=2, moving_average=3, **_SERIES),
        hugging_face("InformerForPrediction", _series, **_SERIES),
    ]  # fmt: skip


def _dense_vision() -> list[Family]:
    resnet = dict(model_type="resnet", embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], layer_type="basic",
                  out_features=["stage1", "stage2", "stage3", "stage4"])  # fmt: skip
    maps = _images_with(32, labels=lambda b: torch.randint(0, CLASSES, (b, 32, 32)))
    return [
        hugging_face("DetrForObjectDetection", _boxes, use_timm_backbone=False, backbone=None, use_pretrained_backbone=False,
                     backbone_config=resnet | dict(out_features=["stage4"]), d_model=32, encoder_layers=1, decoder_layers=1,
                     encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=5,
                     dropout=0.0, num_labels=CLASSES),
        hugging_face("YolosForObjectDetection", _boxes, image_size=[32, 32], patch_size=16, num_detection_tokens=5, num_labels=CLASSES,
                     **_SIZES, **_DROPS),
        hugging_face("UperNetForSemanticSegmentation", maps, "UperNetConfig", backbone_config=resnet, hidden_size=16, pool_scales=[1, 2],
                     auxiliary_in_channels=16, auxiliary_channels=16, num_labels=CLASSES),
        _depths("DPTForDepthEstimation", image_size=16, patch_size=4, backbone_out_indices=[0, 1, 2, 3],
                     reassemble_factors=[4, 2, 1, 0.5], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16, hidden_size=32,
                     intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, **_DROPS),
        hugging_face("MobileViTForSemanticSegmentation", maps, image_size=32, hidden_sizes=[16, 24, 32], aspp_out_channels=16,
                     neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 48], num_attention_heads=2, atrous_rates=[1, 2, 3], num_labels=CLASSES,
                     aspp_dropout_prob=0.0, classifier_dropout_prob=0.0, **_DROPS),
    ]  # fmt: skip


class DepthLoss(nn.Module):
    """What trains a model of depths, which has no loss of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, depth: Tensor) -> Tensor:
        return nn.functional.l1_loss(self.model(pixel_values).predicted_depth, depth)


def _depths(name: str, **sizes: Any) -> Family:
    plain = hugging_face(name, _images_with(16, depth=lambda b: torch.rand(b, 16, 16)), **sizes)
    return Family(name, lambda: DepthLoss(plain.build()), plain.batch)


def _image_classes() -> list[Family]:
    labelled, small = image_batch(32), image_batch(16)
    video = dict(image_size=16, patch_size=8, num_frames=2, **_SIZES, **_DROPS)
    decoder = dict(
        decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32
    )
    return [
        hugging_face("LevitForImageClassification", labelled, image_size=32, hidden_sizes=[16, 32, 32], num_attention_heads=[2, 2, 2],
                     depths=[1, 1, 1], key_dim=[8, 8, 8], drop_path_rate=0, mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2],
                     num_labels=CLASSES),
        hugging_face("PoolFormerForImageClassification", labelled, "PoolFormerConfig", depths=[1, 1], hidden_sizes=[8, 16], num_encoder_blocks=2,
                     patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], drop_path_rate=0.0, num_labels=CLASSES),
        hugging_face("FocalNetForImageClassification", labelled, image_size=32, embed_dim=8, hidden_sizes=[8, 16], depths=[1, 1],
                     focal_levels=[2, 2], focal_windows=[3, 3], drop_path_rate=0.0, num_labels=CLASSES),
        hugging_face("VideoMAEForPreTraining", _masked_videos, tubelet_size=2, norm_pix_loss=False, **decoder, **video),
        hugging_face("TimesformerForVideoClassification", _videos, drop_path_rate=0, num_labels=CLASSES, **video),
        hugging_face("ViTMAEForPreTraining", lambda b: _images_with(16, noise=lambda b: torch.rand(b, 16))(b), image_size=16, patch_size=4,
                     **decoder, **_SIZES, **_DROPS),
        hugging_face("PvtForImageClassification", small, image_size=16, num_encoder_blocks=2, depths=[1, 1],
                     sequence_reduction_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[4, 2], strides=[4, 2],
                     num_attention_heads=[1, 2], mlp_ratios=[2, 2], drop_path_rate=0.0, num_labels=CLASSES, **_DROPS),
    ]  # fmt: skip


def _texts() -> list[Family]:
    masked, sizes = {**_TEXT, **_DROPS}, dict(vocab_size=VOCABULARY)
    funnel = dict(block_sizes=[1, 1], num_decoder_layers=1, d_model=32, n_head=4, d_head=8, d_inner=64, hidden_dropout=0.0,
                  attention_dropout=0.0, activation_dropout=0.0, **sizes)  # fmt: skip
    switch = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, num_experts=4, dropout_rate=0.0, router_jitter_noise=0.0,
                  num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0, use_cache=False, **sizes)  # fmt: skip
    jamba = dict(num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1,
                 expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, mamba_d_conv=2, mamba_dt_rank=4,
                 use_mamba_kernels=False, use_cache=False)  # fmt: skip
    return [
        hugging_face("FNetForMaskedLM", token_batch, hidden_dropout_prob=0.0, tpu_short_seq_length=SEQUENCE, max_position_embeddings=64,
                     hidden_size=32, num_hidden_layers=2, intermediate_size=64, **sizes),
        hugging_face("LongformerForMaskedLM", token_batch, attention_window=8, **{**masked, "max_position_embeddings": 68}, **_IDS),
        hugging_face("FunnelForMaskedLM", token_batch, **funnel),
        hugging_face("XLNetLMHeadModel", token_batch, "XLNetConfig", d_model=32, n_layer=2, n_head=4, d_inner=64, dropout=0.0, **sizes),
        hugging_face("LayoutLMForTokenClassification", _layout, num_labels=CLASSES, max_2d_position_embeddings=64, **masked),
        hugging_face("RwkvForCausalLM", token_batch, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, intermediate_size=64,
                     context_length=64, use_cache=False, **sizes),
        hugging_face("JambaForCausalLM", token_batch, **jamba, **_TEXT, **_IDS),
        hugging_face("SwitchTransformersForConditionalGeneration",
                     lambda b: {"input_ids": _tokens()(b), "labels": token_batch(b)["labels"]}, **switch),
        hugging_face("CanineForSequenceClassification",
                     lambda b: {"input_ids": torch.randint(3, 200, (b, 32)), "labels": torch.randint(0, CLASSES, (b,))}, num_labels=CLASSES,
                     downsampling_rate=4, upsampling_kernel_size=2, num_hash_buckets=64, local_transformer_stride=16,
                     max_position_embeddings=64, **_SIZES, **_DROPS),
    ]  # fmt: skip


def doubled(batch: Any) -> Any:
    """A batch in float64."""
    if isinstance(batch, dict):
        return {name: doubled(value) for name, value in batch.items()}
    if isinstance(batch, list):
        return [doubled(value) for value in batch]
    return batch.double() if isinstance(batch, Tensor) and batch.is_floating_point() else batch


def specimen(name: str) -> tuple[nn.Module, Batch]:
    """The model in float64, and one batch of 4 examples."""
    torch.manual_seed(0)
    family = (unseen() | reported())[name]
    return family.build().double(), doubled(family.batch(4))
