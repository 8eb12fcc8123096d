"""A decoder in sizes and flags: what its graph is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder, without its number of layers. Sizes are in elements; flags say which operations the implementation launches.
    The defaults are a Llama's, as Hugging Face runs it."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq: int
    gated: bool = True
    gelu: bool = True
    rms_norm: bool = True
    rope: bool = True
    learned_positions: bool = False
    bias: bool = False
    tied: bool = False
    flash: bool = True
    dropout: float = 0.0
    fused_projections: bool = False
    float_logits: bool = True
    loss_in_place: bool = False
    norm_heads: bool = False
    experts: int = 0
    top_k: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    latent: Latent | None = None


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): ranks of the compressed queries and key-values,
    and head sizes without position, with position, and of values."""

    query_rank: int
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
