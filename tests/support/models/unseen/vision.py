"""Detection, segmentation and depth; images and videos."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from support.models.model_families import CLASSES, Family, hugging_face, image_batch
from support.models.unseen.batches import DROPS, SIZES, boxes, images_with, masked_videos, videos


class DepthLoss(nn.Module):
    """What trains a model of depths, which has no loss of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, depth: Tensor) -> Tensor:
        return nn.functional.l1_loss(self.model(pixel_values).predicted_depth, depth)


def _depths(name: str, **sizes: Any) -> Family:
    plain = hugging_face(name, images_with(16, depth=lambda b: torch.rand(b, 64, 64)), **sizes)
    return Family(name, lambda: DepthLoss(plain.build()), plain.batch)


def dense_vision() -> list[Family]:
    resnet = dict(
        model_type="resnet",
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    maps = images_with(32, labels=lambda b: torch.randint(0, CLASSES, (b, 32, 32)))
    return [
        hugging_face(
            "DetrForObjectDetection",
            boxes,
            use_timm_backbone=False,
            backbone=None,
            use_pretrained_backbone=False,
            backbone_config=resnet | dict(out_features=["stage4"]),
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_queries=5,
            dropout=0.0,
            num_labels=CLASSES,
        ),
        hugging_face(
            "YolosForObjectDetection",
            boxes,
            image_size=[32, 32],
            patch_size=16,
            num_detection_tokens=5,
            num_labels=CLASSES,
            **SIZES,
            **DROPS,
        ),
        hugging_face(
            "UperNetForSemanticSegmentation",
            maps,
            "UperNetConfig",
            backbone_config=resnet,
            hidden_size=16,
            pool_scales=[1, 2],
            auxiliary_in_channels=16,
            auxiliary_channels=16,
            num_labels=CLASSES,
        ),
        _depths(
            "DPTForDepthEstimation",
            image_size=16,
            patch_size=4,
            backbone_out_indices=[0, 1, 2, 3],
            reassemble_factors=[4, 2, 1, 0.5],
            neck_hidden_sizes=[8, 8, 16, 16],
            fusion_hidden_size=16,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            **DROPS,
        ),
        hugging_face(
            "MobileViTForSemanticSegmentation",
            maps,
            image_size=32,
            hidden_sizes=[16, 24, 32],
            aspp_out_channels=16,
            neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 48],
            num_attention_heads=2,
            atrous_rates=[1, 2, 3],
            num_labels=CLASSES,
            aspp_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            **DROPS,
        ),
    ]


def image_classes() -> list[Family]:
    labelled, small = image_batch(32), image_batch(16)
    video = dict(image_size=16, patch_size=8, num_frames=2, **SIZES, **DROPS)
    decoder = dict(
        decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32
    )
    return [
        hugging_face(
            "LevitForImageClassification",
            labelled,
            image_size=32,
            hidden_sizes=[16, 32, 32],
            num_attention_heads=[2, 2, 2],
            depths=[1, 1, 1],
            key_dim=[8, 8, 8],
            drop_path_rate=0,
            mlp_ratio=[2, 2, 2],
            attention_ratio=[2, 2, 2],
            num_labels=CLASSES,
        ),
        hugging_face(
            "PoolFormerForImageClassification",
            labelled,
            "PoolFormerConfig",
            depths=[1, 1],
            hidden_sizes=[8, 16],
            num_encoder_blocks=2,
            patch_sizes=[7, 3],
            strides=[4, 2],
            padding=[2, 1],
            drop_path_rate=0.0,
            num_labels=CLASSES,
        ),
        hugging_face(
            "FocalNetForImageClassification",
            labelled,
            image_size=32,
            embed_dim=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            focal_levels=[2, 2],
            focal_windows=[3, 3],
            drop_path_rate=0.0,
            num_labels=CLASSES,
        ),
        hugging_face("VideoMAEForPreTraining", masked_videos, tubelet_size=2, norm_pix_loss=False, **decoder, **video),
        hugging_face("TimesformerForVideoClassification", videos, drop_path_rate=0, num_labels=CLASSES, **video),
        hugging_face(
            "ViTMAEForPreTraining",
            lambda b: images_with(16, noise=lambda b: torch.rand(b, 16))(b),
            image_size=16,
            patch_size=4,
            **decoder,
            **SIZES,
            **DROPS,
        ),
        hugging_face(
            "PvtForImageClassification",
            small,
            image_size=16,
            num_encoder_blocks=2,
            depths=[1, 1],
            sequence_reduction_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[4, 2],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            drop_path_rate=0.0,
            num_labels=CLASSES,
            **DROPS,
        ),
    ]
