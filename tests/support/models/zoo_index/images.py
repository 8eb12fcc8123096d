"""Images: classification, segmentation, detection."""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F

from support.models.zoo_index.specimen import Fitted, IndexSpecimen, classes, images, masks, regression, squares


def _timm_vit() -> Any:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=8)


def _timm_swin() -> Any:
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        img_size=16, patch_size=2, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=8, drop_path_rate=0.0
    )


def _timm_convnext() -> Any:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(depths=(1, 1, 2, 1), dims=(8, 8, 16, 16), num_classes=8)


def _timm_resnet() -> Any:
    from timm.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, (1, 1, 1, 1), channels=(8, 8, 16, 16), num_classes=8)


def _timm_mixer() -> Any:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(img_size=16, patch_size=4, num_blocks=2, embed_dim=32, num_classes=8)


def _timm_mambaout() -> Any:
    from timm.models.mambaout import MambaOut

    return MambaOut(depths=(1, 1), dims=(16, 32), num_classes=8)


def _torchvision(name: str, **options: Any) -> Any:
    from torchvision import models

    return getattr(models, name)(num_classes=8, **options)


def _torchvision_swin() -> Any:
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], 16, [1, 1], [2, 4], [4, 4], num_classes=8)


def _cait() -> Any:
    from vit_pytorch.cait import CaiT

    return CaiT(image_size=16, patch_size=4, num_classes=8, dim=32, depth=2, cls_depth=1, heads=4, mlp_dim=32, dim_head=8)


def _max_vit() -> Any:
    from vit_pytorch.max_vit import MaxViT

    return MaxViT(num_classes=8, dim=16, depth=(1, 1), dim_head=8, window_size=2)


def _cct() -> Any:
    from vit_pytorch.cct import CCT

    return CCT(
        img_size=16, embedding_dim=32, n_conv_layers=1, kernel_size=3, num_layers=2, num_heads=4, num_classes=8,
        dropout_rate=0.0, attention_dropout=0.0, stochastic_depth_rate=0.0,
    )  # fmt: skip


def _lambda() -> Any:
    from lambda_networks import LambdaLayer
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), LambdaLayer(16, dim_k=8, heads=4, r=5, dim_out=16), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 8),
    )  # fmt: skip


def _smp(name: str, **options: Any) -> Any:
    import segmentation_models_pytorch

    return getattr(segmentation_models_pytorch, name)("mobilenet_v2", encoder_weights=None, classes=4, **options)


def _unet() -> Any:
    from unet import UNet2D

    return UNet2D(
        in_channels=3, out_classes=4, num_encoding_blocks=3, out_channels_first_layer=8, padding=1, normalization="batch"
    )


def _centernet() -> Any:
    from pytorchcv.models.centernet import CenterNet
    from torch import nn

    backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
    backbone.out_channels = 16  # type: ignore[assignment]
    return CenterNet(backbone, 16, [16, 8], return_heatmap=True, num_classes=4)


def _fcos_head() -> Any:
    from torch import nn
    from torchvision.models.detection.fcos import FCOSHead

    class Detector(nn.Module):
        """A backbone of one level and the head of FCOS."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Conv2d(3, 32, 3, 2, 1), FCOSHead(32, 1, 4, num_convs=1)

        def forward(self, x: Any) -> Any:
            found = self.head([self.body(x).relu()])
            return found["cls_logits"].mean(-1) + found["bbox_regression"].exp().sum(-1) + found["bbox_ctrness"].squeeze(-1)

    return Detector()


def image_models() -> dict[str, IndexSpecimen]:
    """By name."""
    small, medium = images(3, 16, 16), images(3, 32, 32)
    rows: dict[str, tuple[str, str, str, Any, Any]] = {
        "timm_vit": ("timm", "images", "2010.11929", classes(_timm_vit), small),
        "timm_swin": ("timm", "images", "2103.14030", classes(_timm_swin), small),
        "timm_convnext": ("timm", "images", "2201.03545", classes(_timm_convnext), medium),
        "timm_resnet": ("timm", "images", "1512.03385", classes(_timm_resnet), medium),
        "timm_mixer": ("timm", "images", "2105.01601", classes(_timm_mixer), small),
        "timm_mambaout": ("timm", "images", "2405.07992", classes(_timm_mambaout), small),
        "torchvision_swin": ("torchvision", "images", "2103.14030", classes(_torchvision_swin), small),
        "torchvision_shufflenet": (
            "torchvision", "images", "1807.11164", classes(lambda: _torchvision("shufflenet_v2_x0_5")), medium,
        ),
        "torchvision_mnasnet": (
            "torchvision", "images", "1807.11626", classes(lambda: _torchvision("mnasnet0_5", dropout=0.0)), medium,
        ),
        "cait": ("vit_pytorch", "images", "2103.17239", classes(_cait), small),
        "max_vit": ("vit_pytorch", "images", "2204.01697", classes(_max_vit), small),
        "cct": ("vit_pytorch", "images", "2104.05704", classes(_cct), small),
        "lambda_network": ("lambda_networks", "images", "2102.08602", classes(_lambda), images(3, 8, 8)),
        "smp_unet": (
            "segmentation_models_pytorch", "segmentation", "1505.04597",
            classes(lambda: _smp("Unet", encoder_depth=3, decoder_channels=(16, 8, 8))), masks(3, 16, 16),
        ),
        "smp_fpn": (
            "segmentation_models_pytorch", "segmentation", "1612.03144",
            classes(lambda: _smp("FPN", decoder_pyramid_channels=32, decoder_segmentation_channels=128, decoder_dropout=0.0)),
            masks(3, 32, 32),
        ),
        "smp_deeplab": (
            "segmentation_models_pytorch", "segmentation", "1802.02611",
            classes(lambda: _smp("DeepLabV3Plus", decoder_channels=16, decoder_atrous_rates=(1, 2, 3))), masks(3, 32, 32),
        ),
        "unet": ("unet", "segmentation", "1505.04597", classes(_unet), masks(3, 16, 16)),
        "centernet": ("pytorchcv", "detection", "1904.07850", squares(_centernet), regression((3, 16, 16), (8, 32, 32))),
        "fcos_head": (
            "torchvision", "detection", "1904.01355", lambda: Fitted(_fcos_head(), F.mse_loss), regression((3, 16, 16), (64,)),
        ),
    }  # fmt: skip
    return {name: IndexSpecimen(*row) for name, row in rows.items()}
