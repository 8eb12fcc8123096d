"""Generative models, fields, self-supervision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.models.zoo_index.specimen import FittedPair, IndexSpecimen, regression, squares


def _unet() -> Any:
    from denoising_diffusion_pytorch import Unet

    return Unet(dim=8, dim_mults=(1, 2), flash_attn=False, attn_heads=2, attn_dim_head=4)


class Denoiser(nn.Module):
    """The package's diffusion, with its own draws of steps and noise."""

    def __init__(self) -> None:
        super().__init__()
        from denoising_diffusion_pytorch import GaussianDiffusion

        self.net = GaussianDiffusion(_unet(), image_size=8, timesteps=10)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x)
        return loss


class Denoiser1d(nn.Module):
    """The same over sequences."""

    def __init__(self) -> None:
        super().__init__()
        from denoising_diffusion_pytorch import GaussianDiffusion1D, Unet1D

        self.net = GaussianDiffusion1D(Unet1D(dim=8, dim_mults=(1, 2), channels=4), seq_length=8, timesteps=10)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x)
        return loss


def _siren() -> Any:
    from siren_pytorch import SirenNet

    return SirenNet(dim_in=2, dim_hidden=16, dim_out=3, num_layers=2)


def _glom() -> Any:
    from glom_pytorch import Glom

    return Glom(dim=16, levels=2, image_size=8, patch_size=4)


class Slots(nn.Module):
    """Slots of a set, which are started at random."""

    def __init__(self) -> None:
        super().__init__()
        from slot_attention import SlotAttention

        self.net, self.out = SlotAttention(num_slots=3, dim=16, iters=2, hidden_dim=16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.out(self.net(x)).mean(1), x.mean(1))


class Quantized(nn.Module):
    """An autoencoder with the package's vector quantization."""

    def __init__(self) -> None:
        super().__init__()
        from vector_quantize_pytorch import VectorQuantize

        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.codes = VectorQuantize(dim=16, codebook_size=8, learnable_codebook=True, ema_update=False)

    def forward(self, x: Tensor) -> Tensor:
        h, _, loss = self.codes(self.up(x))
        return F.mse_loss(self.down(h), x) + loss.sum()


class FiniteScalars(nn.Module):
    """An autoencoder with finite scalar quantization."""

    def __init__(self) -> None:
        super().__init__()
        from vector_quantize_pytorch import FSQ

        self.up, self.codes, self.down = nn.Linear(8, 16), FSQ([8, 5, 5, 5], dim=16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.codes(self.up(x))[0]), x)


class Siamese(nn.Module):
    """One net for two views, and a loss of the package's metric learning."""

    def __init__(self) -> None:
        super().__init__()
        from pytorch_metric_learning.losses import TripletMarginLoss

        self.net, self.loss = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), TripletMarginLoss()

    def forward(self, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        anchors = (torch.arange(x.shape[0]), torch.arange(x.shape[0]), torch.arange(x.shape[0]).flip(0))
        loss: Tensor = self.loss(self.net(x), y, anchors, self.net(z), y)
        return loss


class Gan(nn.Module):
    """A discriminator of the package's blocks beside a generator: both losses at once."""

    def __init__(self) -> None:
        super().__init__()
        from pytorchcv.models.common.conv import conv3x3_block

        self.make = nn.Sequential(nn.ConvTranspose2d(4, 8, 4), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh())
        self.judge = nn.Sequential(
            conv3x3_block(in_channels=3, out_channels=8, stride=2),
            conv3x3_block(in_channels=8, out_channels=8, stride=2),
            nn.Flatten(),
            nn.Linear(32, 1),
        )

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        false = self.make(z)
        real, fake = self.judge(x), self.judge(false.detach())
        return F.softplus(-real).mean() + F.softplus(fake).mean() + F.softplus(-self.judge(false)).mean()


def generative_models() -> dict[str, IndexSpecimen]:
    """By name."""
    n = torch.randn
    return {
        "ddpm_unet": IndexSpecimen(
            "denoising_diffusion_pytorch",
            "diffusion",
            "2006.11239",
            lambda: FittedPair(_unet(), F.mse_loss),
            lambda b: {"x": n(b, 3, 8, 8), "z": torch.randint(0, 10, (b,)), "y": n(b, 3, 8, 8)},
        ),
        "ddpm": IndexSpecimen(
            "denoising_diffusion_pytorch", "diffusion", "2006.11239", Denoiser, lambda b: {"x": torch.rand(b, 3, 8, 8)}
        ),
        "ddpm_1d": IndexSpecimen(
            "denoising_diffusion_pytorch", "diffusion", "2006.11239", Denoiser1d, lambda b: {"x": torch.rand(b, 4, 8)}
        ),
        "siren": IndexSpecimen("siren_pytorch", "fields", "2006.09661", squares(_siren), regression((2,), (3,))),
        "glom": IndexSpecimen("glom_pytorch", "images", "2102.12627", squares(_glom), regression((3, 8, 8), (4, 2, 16))),
        "slot_attention": IndexSpecimen("slot_attention", "sets", "2006.15055", Slots, lambda b: {"x": n(b, 6, 16)}),
        "vector_quantize": IndexSpecimen(
            "vector_quantize_pytorch", "autoencoders", "1711.00937", Quantized, lambda b: {"x": n(b, 4, 8)}
        ),
        "finite_scalars": IndexSpecimen(
            "vector_quantize_pytorch", "autoencoders", "2309.15505", FiniteScalars, lambda b: {"x": n(b, 4, 8)}
        ),
        "triplets": IndexSpecimen(
            "pytorch_metric_learning",
            "siamese",
            "1503.03832",
            Siamese,
            lambda b: {"x": n(b, 8), "z": n(b, 8), "y": torch.arange(b)},
        ),
        "gan": IndexSpecimen("pytorchcv", "GANs", "1406.2661", Gan, lambda b: {"x": n(b, 3, 8, 8), "z": n(b, 4, 1, 1)}),
    }
