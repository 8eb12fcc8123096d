"""Sizes and batches of the models of `names`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from support.models.model_families import CLASSES, VOCABULARY, Batch

DROPS = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
TEXT = dict(vocab_size=VOCABULARY, max_position_embeddings=64, **SIZES)
EYES = dict(image_size=16, patch_size=8, **SIZES)
SOUND = dict(
    conv_dim=(16, 16),
    conv_stride=(5, 2),
    conv_kernel=(10, 3),
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=4,
    layerdrop=0.0,
    mask_time_prob=0.0,
    hidden_dropout=0.0,
    activation_dropout=0.0,
    attention_dropout=0.0,
    feat_proj_dropout=0.0,
    final_dropout=0.0,
    classifier_proj_size=16,
    num_feat_extract_layers=2,
)
SERIES = dict(
    prediction_length=4,
    context_length=8,
    lags_sequence=[1, 2],
    num_time_features=1,
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    dropout=0.0,
    encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
)


def images_with(size: int, **more: Callable[[int], Tensor]) -> Callable[[int], Batch]:
    return lambda batch: {"pixel_values": torch.randn(batch, 3, size, size), **{name: make(batch) for name, make in more.items()}}


def token_ids(length: int = 8) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(3, VOCABULARY - 4, (batch, length))


def ids_with_images(batch: int, image_token: int = VOCABULARY - 1, count: int = 4) -> Tensor:
    ids = torch.randint(3, VOCABULARY - 4, (batch, 12))
    ids[:, 1 : 1 + count] = image_token
    return ids


def captions(size: int = 16, **more: Any) -> Callable[[int], Batch]:
    return lambda batch: {"input_ids": token_ids()(batch), "pixel_values": torch.randn(batch, 3, size, size), **more}


def answers(batch: int) -> Batch:
    ids = ids_with_images(batch)
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 16, 16), "labels": ids.clone()}


def labelled(shape: Callable[[int], tuple[int, ...]], name: str) -> Callable[[int], Batch]:
    return lambda batch: {name: torch.randn(shape(batch)), "labels": torch.randint(0, CLASSES, (batch,))}


def series(batch: int) -> Batch:
    past, future = 10, 4
    return {
        "past_values": torch.rand(batch, past) + 1,
        "past_time_features": torch.randn(batch, past, 1),
        "past_observed_mask": torch.ones(batch, past),
        "future_values": torch.rand(batch, future) + 1,
        "future_time_features": torch.randn(batch, future, 1),
    }


def patched_series(batch: int) -> Batch:
    return {"past_values": torch.randn(batch, 16, 3), "future_values": torch.randn(batch, 4, 3)}


def speech(batch: int) -> Batch:
    labels = torch.randint(4, 32, (batch, 5))
    labels[0, 3:] = -100
    return {"input_values": torch.randn(batch, 320), "labels": labels}


def boxes(batch: int) -> Batch:
    each = {"class_labels": torch.tensor([1, 2]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.2, 0.2]])}
    return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": [dict(each) for _ in range(batch)]}


def layouts(batch: int) -> Batch:
    return {
        "input_ids": token_ids()(batch),
        "bbox": torch.tensor([1, 2, 10, 12]).expand(batch, 8, 4).clone(),
        "labels": torch.randint(0, CLASSES, (batch, 8)),
    }


def videos(batch: int) -> Batch:
    return {"pixel_values": torch.randn(batch, 2, 3, 16, 16), "labels": torch.randint(0, CLASSES, (batch,))}


def masked_videos(batch: int) -> Batch:
    mask = torch.zeros(batch, 4, dtype=torch.bool)
    mask[:, ::2] = True
    return {"pixel_values": torch.randn(batch, 2, 3, 16, 16), "bool_masked_pos": mask}


def answers_of(count: int) -> Callable[[int], Batch]:
    def make(batch: int) -> Batch:
        ids = ids_with_images(batch, count=count)
        return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 16, 16), "labels": ids.clone()}

    return make


def idefics(batch: int) -> Batch:
    ids = ids_with_images(batch, count=1)
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 1, 3, 16, 16), "labels": ids.clone()}
