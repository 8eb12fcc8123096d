"""Small models of every family, unmodified, with random weights and batches that have uneven ignored labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.models import model_families
from support.models.model_families import VOCABULARY, Family
from support.models.routed_mlp import RoutedMlp, routed_batch


class Mlp(nn.Module):
    """Two layers and a mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


class ConvNet(nn.Module):
    """Two convolutions, with or without batch norm, a pool and a classifier."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        norms = [nn.BatchNorm2d(16), nn.BatchNorm2d(32)] if batch_norm else [nn.Identity(), nn.Identity()]
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=not batch_norm), norms[0], nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=not batch_norm), norms[1], nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(32 * 4 * 4, 8)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(pixels).flatten(1)), labels)


class Attention(nn.Module):
    """Heads over a memory, or over the queries' own sequence."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, causal: bool = False) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.reshape(y.shape[0], y.shape[1], self.heads, -1).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(memory)), split(self.value(memory))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """A layer over the source."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, 4)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A layer over the target that reads the memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, 4)
        self.cross_norm, self.cross = nn.LayerNorm(width), Attention(width, 4)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, True)
        x = x + self.cross(self.cross_norm(x), memory)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class EncoderDecoder(nn.Module):
    """A sequence to a sequence; the word table is the head's too. The memory goes to every decoder layer."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList(Encoder(width) for _ in range(layers))
        self.decoder = nn.ModuleList(Decoder(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        memory, x = self.words(source), self.words(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return F.cross_entropy(self.head(x).reshape(-1, VOCABULARY), labels.reshape(-1))


@dataclass(frozen=True, slots=True)
class Case:
    """`build` makes the model (CPU, float32), `batch` one global batch of a given size."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]


def token_batch(batch: int) -> dict[str, Tensor]:
    return model_families.token_batch(batch, first=0)


def sequence_pair_batch(batch: int) -> dict[str, Tensor]:
    """Source and target of different lengths."""
    given = token_batch(batch)
    return {"source": torch.randint(0, VOCABULARY, (batch, 12)), "target": given["input_ids"], "labels": given["labels"]}


def image_batch(batch: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 16, 16), "labels": torch.randint(0, 8, (batch,))}


def _hugging_face(name: str, config: str, **sizes: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**sizes))
        return model

    return build


def _gpt2(layers: int) -> Callable[[], nn.Module]:
    sizes = dict(
        n_embd=32, n_layer=layers, n_head=4, vocab_size=VOCABULARY, n_positions=64, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, loss_type="ForCausalLMLoss",
    )  # fmt: skip
    return _hugging_face("GPT2LMHeadModel", "GPT2Config", **sizes)


def long_cases() -> dict[str, Case]:
    """For pipelines: eight chunks' worth of layers, and a value that several stages read."""
    return {"gpt2_deep": Case(_gpt2(6), token_batch), "encoder_decoder": Case(EncoderDecoder, sequence_pair_batch)}


def cases() -> dict[str, Case]:
    """Every family of the issue. Heads divide by four (grouped: eight on four), dropout off."""
    decoder = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=VOCABULARY, use_cache=False, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    encoder = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return {
        "gpt2": Case(_gpt2(2), token_batch),
        "llama": Case(_hugging_face("LlamaForCausalLM", "LlamaConfig", **decoder), token_batch),
        "qwen3": Case(_hugging_face("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **decoder), token_batch),
        "bert": Case(
            _hugging_face("BertForMaskedLM", "BertConfig", vocab_size=VOCABULARY, max_position_embeddings=64, **encoder),
            token_batch,
        ),
        "vit": Case(
            _hugging_face("ViTForImageClassification", "ViTConfig", image_size=16, patch_size=4, num_labels=8, **encoder),
            image_batch,
        ),
        "mlp": Case(Mlp, lambda batch: {"x": torch.randn(batch, 16), "y": torch.randn(batch, 8)}),
        "convnet": Case(ConvNet, lambda batch: {"pixels": torch.randn(batch, 3, 8, 8), "labels": torch.randint(0, 8, (batch,))}),
        "convnet_bn": Case(
            lambda: ConvNet(batch_norm=True),
            lambda batch: {"pixels": torch.randn(batch, 3, 8, 8), "labels": torch.randint(0, 8, (batch,))},
        ),
    }


def routed_cases() -> dict[str, Case]:
    """Mixtures of experts that call `autopar.ops.moe_experts`."""
    return {
        "routed": Case(RoutedMlp, routed_batch),
        "routed_capacity": Case(lambda: RoutedMlp(0.75), routed_batch),
        "routed_capacity_flat": Case(lambda: RoutedMlp(0.75, flat=True), routed_batch),
    }


def make(name: str, dtype: torch.dtype = torch.float64, batch: int = 8, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in `dtype` and one batch."""
    return make_case((cases() | long_cases())[name], dtype, batch, seed)


def make_case(
    case: Case | Family, dtype: torch.dtype = torch.float64, batch: int = 8, seed: int = 0
) -> tuple[nn.Module, dict[str, Any]]:
    """The model in `dtype` and one batch. Biases that start at zero get values: a tensor of noise has no scale to compare by."""
    torch.manual_seed(seed)
    model = case.build().to(dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no kernel for float64 on a CPU
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    inputs = case.batch(batch)
    floating = {key: value.to(dtype) for key, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()}
    return model, inputs | floating
