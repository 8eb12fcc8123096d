"""A decoder in sizes and flags: what its graph is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder, without its number of layers. Sizes are in elements; flags say which operations the implementation launches."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq: int
    gated: bool
    gelu: bool
    rms_norm: bool
    rope: bool
    learned_positions: bool
    bias: bool
    tied: bool
    flash: bool
    dropout: float
    fused_projections: bool
    float_logits: bool
    loss_in_place: bool
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
