"""Deep models of other kinds than decoders, on the meta device, as planned at full size: ``autopar plan
tests/benchmarks/deep_models.py:resnet152 --cluster dgx-h100:2 --dtype bf16``. Those with `twice` have twice the depth.

They need the packages transformers and diffusers (only `sdxl`), for their code alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Example = tuple[nn.Module, Mapping[str, Tensor]]


def resnet152() -> Example:
    return _resnet((3, 8, 36, 3))


def resnet152_twice() -> Example:
    return _resnet((3, 16, 72, 3))


def swin_l() -> Example:
    return _swin((2, 2, 18, 2))


def swin_l_twice() -> Example:
    return _swin((2, 2, 36, 2))


def t5_11b() -> Example:
    return _t5(24)


def t5_11b_twice() -> Example:
    return _t5(48)


def sdxl() -> Example:
    """The U-Net of Stable Diffusion XL, at images of 1024 pixels."""
    return _sdxl(blocks=2, layers=10)


def sdxl_twice() -> Example:
    """With twice the transformer layers in each block of attention."""
    return _sdxl(blocks=2, layers=20)


def unet() -> Example:
    """The network of Ronneberger et al., https://arxiv.org/abs/1505.04597, with padding and batch norm."""
    with torch.device("meta"):
        model = UNet((64, 128, 256, 512, 1024), classes=21)
        return model, {"images": torch.empty(128, 3, 512, 512), "labels": torch.empty(128, 512, 512, dtype=torch.long)}


# -- classifiers


class Classifier(nn.Module):
    """A model that gives logits, with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(pixel_values).logits, labels)


def _images(batch: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.empty(batch, 3, size, size), "labels": torch.empty(batch, dtype=torch.long)}


def _resnet(depths: Sequence[int]) -> Example:
    from transformers import ResNetConfig, ResNetForImageClassification

    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig(depths=list(depths), num_labels=1000))
        return Classifier(model), _images(512, 224)


def _swin(depths: Sequence[int]) -> Example:
    """Swin-L at images of 384 pixels: https://arxiv.org/abs/2103.14030."""
    from transformers import SwinConfig, SwinForImageClassification

    with torch.device("meta"):
        config = SwinConfig(
            image_size=384, window_size=12, embed_dim=192, depths=list(depths), num_heads=[6, 12, 24, 48], num_labels=1000,
            drop_path_rate=0.0,
        )  # fmt: skip
        return Classifier(SwinForImageClassification(config)), _images(512, 384)


# -- encoder and decoder


def _t5(layers: int) -> Example:
    """T5-11B, https://arxiv.org/abs/1910.10683, at its lengths of pretraining and 128 examples."""
    from transformers import T5Config, T5ForConditionalGeneration

    with torch.device("meta"):
        config = T5Config(
            d_model=1024, d_kv=128, d_ff=65536, num_layers=layers, num_heads=128, use_cache=False, dropout_rate=0.0,
            decoder_start_token_id=0,
        )  # fmt: skip
        ids = torch.empty(128, 512, dtype=torch.long)
        return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


# -- U-Nets


class Denoiser(nn.Module):
    """The U-Net of a diffusion model, with its loss."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, sample: Tensor, timestep: Tensor, context: Tensor, text: Tensor, ids: Tensor, target: Tensor) -> Tensor:
        out = self.unet(sample, timestep, context, added_cond_kwargs={"text_embeds": text, "time_ids": ids}).sample
        return nn.functional.mse_loss(out, target)


def _sdxl(blocks: int, layers: int) -> Example:
    from diffusers import UNet2DConditionModel

    batch = 64
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            sample_size=128,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(320, 640, 1280),
            layers_per_block=blocks,
            transformer_layers_per_block=[1, layers // 5, layers],
            attention_head_dim=[5, 10, 20],
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )
        return Denoiser(unet), {
            "sample": torch.empty(batch, 4, 128, 128),
            "timestep": torch.empty(batch),
            "context": torch.empty(batch, 77, 2048),
            "text": torch.empty(batch, 1280),
            "ids": torch.empty(batch, 6),
            "target": torch.empty(batch, 4, 128, 128),
        }


class _Double(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class UNet(nn.Module):
    """For segmentation."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        down, up = list(zip((3, *widths), widths, strict=False)), list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.down = nn.ModuleList(_Double(channels, out) for channels, out in down)
        self.up = nn.ModuleList(nn.ConvTranspose2d(channels, out, 2, stride=2) for channels, out in up)
        self.join = nn.ModuleList(_Double(2 * out, out) for _, out in up)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in self.down:
            kept.append(block(nn.functional.max_pool2d(kept[-1], 2) if kept else images))
        x = kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        return nn.functional.cross_entropy(self.head(x), labels)
