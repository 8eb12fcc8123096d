"""Models of bench_choice: a step takes some tenths of a second on four local processes, and different plans are fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from plain_llama import Llama, LlamaSizes
from support.models.routed_mlp import RoutedMlp
from torch import Tensor, nn

Batch = dict[str, Tensor]


class Classifier(nn.Module):
    """Layers, and the cross entropy of what they make."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), labels)


class SmallUNet(nn.Module):
    """Two levels down and up, with skip connections, and a mean squared error."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def pair(inputs: int, outputs: int) -> nn.Module:
            first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
            return nn.Sequential(first, nn.GroupNorm(8, outputs), nn.SiLU(), second, nn.SiLU())

        self.enter, self.down, self.middle = pair(3, width), pair(width, 2 * width), pair(2 * width, 4 * width)
        self.up, self.leave = pair(6 * width, 2 * width), pair(3 * width, width)
        self.out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        first = self.enter(x)
        second = self.down(F.avg_pool2d(first, 2))
        third = self.middle(F.avg_pool2d(second, 2))
        y = self.up(torch.cat((F.interpolate(third, scale_factor=2), second), 1))
        y = self.leave(torch.cat((F.interpolate(y, scale_factor=2), first), 1))
        return F.mse_loss(self.out(y), target)


def mlp(width: int, depth: int, batch: int) -> tuple[nn.Module, Batch]:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return Classifier(*layers, nn.Linear(width, 16)), {"x": torch.randn(batch, width), "labels": torch.randint(16, (batch,))}


def convolutions(width: int, batch: int) -> tuple[nn.Module, Batch]:
    widths = (3, width, width, 2 * width, 2 * width)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, stride=2 if outputs > inputs > 3 else 1), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 16)]
    return Classifier(*layers), {"x": torch.randn(batch, 3, 32, 32), "labels": torch.randint(16, (batch,))}


def unet(width: int, batch: int) -> tuple[nn.Module, Batch]:
    return SmallUNet(width), {"x": torch.randn(batch, 3, 32, 32), "target": torch.randn(batch, 3, 32, 32)}


def llama(sizes: LlamaSizes, batch: int, length: int) -> tuple[nn.Module, Batch]:
    tokens = torch.randint(sizes.vocabulary, (batch, length + 1))
    return Llama(sizes, length), {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def gpt(layers: int, width: int, batch: int, length: int) -> tuple[nn.Module, Batch]:
    import transformers

    still: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    sizes = {"n_layer": layers, "n_embd": width, "n_head": 8, "vocab_size": 4096, "n_positions": length}
    config = transformers.GPT2Config(**sizes, **still, loss_type="ForCausalLMLoss")
    tokens = torch.randint(4096, (batch, length))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def mixture(width: int, inner: int, batch: int) -> tuple[nn.Module, Batch]:
    x = torch.randn(batch, 32, width)
    return RoutedMlp(width=width, inner=inner, number=8), {"x": x, "labels": torch.randint(0, 8, (batch, 32))}


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "wide mlp": lambda: mlp(2048, 4, 64),
    "gpt": lambda: gpt(4, 512, 16, 64),
    "thin mlp": lambda: mlp(256, 8, 4096),
    "convolutions": lambda: convolutions(48, 64),
    "llama": lambda: llama(LlamaSizes(512, 1408, 4, 8, 4, 4096), 8, 64),
    "u-net": lambda: unet(24, 16),
    "mixture": lambda: mixture(256, 1024, 32),
    "long sequence": lambda: llama(LlamaSizes(256, 704, 2, 8, 4, 1024), 4, 1024),
}


def build(name: str) -> tuple[nn.Module, Batch]:
    """The model and a global batch, the same in every process."""
    torch.manual_seed(0)
    return MODELS[name]()
