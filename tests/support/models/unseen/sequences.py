"""Models of sound, and of time series."""

from __future__ import annotations

import torch

from support.models.model_families import CLASSES, VOCABULARY, Family, hugging_face
from support.models.unseen.batches import (
    DROPS,
    IDS,
    SERIES,
    SIZES,
    SOUND,
    TEXT,
    labelled,
    patched_series,
    series,
    token_ids,
)


def sounds() -> list[Family]:
    speech = dict(
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        dropout=0.0,
        input_feat_per_channel=8,
        conv_channels=16,
        vocab_size=VOCABULARY,
        use_cache=False,
        decoder_start_token_id=1,
        max_source_positions=64,
        max_target_positions=32,
        **IDS,
    )
    return [
        hugging_face("HubertForCTC", speech, vocab_size=32, ctc_loss_reduction="mean", **SIZES, **SOUND),
        hugging_face(
            "ASTForAudioClassification",
            labelled(lambda b: (b, 32, 16), "input_values"),
            num_labels=CLASSES,
            max_length=32,
            num_mel_bins=16,
            patch_size=8,
            frequency_stride=8,
            time_stride=8,
            **SIZES,
            **DROPS,
        ),
        hugging_face(
            "Speech2TextForConditionalGeneration",
            lambda b: {"input_features": torch.randn(b, 16, 8), "labels": token_ids()(b)},
            **speech,
        ),
        hugging_face(
            "WavLMForSequenceClassification", labelled(lambda b: (b, 320), "input_values"), num_labels=CLASSES, **SIZES, **SOUND
        ),
        hugging_face(
            "ClapModel",
            lambda b: {"input_ids": token_ids()(b), "input_features": torch.randn(b, 1, 64, 16), "return_loss": True},
            "ClapConfig",
            projection_dim=16,
            text_config=dict(projection_dim=16, **TEXT, **DROPS),
            audio_config=dict(
                window_size=2,
                num_mel_bins=16,
                spec_size=32,
                patch_size=4,
                patch_stride=[4, 4],
                hidden_size=16,
                projection_dim=16,
                depths=[1, 1],
                num_attention_heads=[2, 2],
                patch_embeds_hidden_size=8,
                drop_path_rate=0.0,
                **DROPS,
            ),
        ),
    ]


def time_series() -> list[Family]:
    patches = dict(context_length=16, prediction_length=4, num_input_channels=3, patch_length=4, patch_stride=4, d_model=16)
    return [
        hugging_face("TimeSeriesTransformerForPrediction", series, **SERIES),
        hugging_face(
            "PatchTSTForPrediction",
            patched_series,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            ff_dropout=0.0,
            attention_dropout=0.0,
            head_dropout=0.0,
            loss="mse",
            **patches,
        ),
        hugging_face(
            "PatchTSMixerForPrediction", patched_series, num_layers=2, dropout=0.0, head_dropout=0.0, loss="mse", **patches
        ),
        hugging_face("AutoformerForPrediction", series, label_length=2, moving_average=3, **SERIES),
        hugging_face("InformerForPrediction", series, **SERIES),
    ]
