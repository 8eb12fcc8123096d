"""Torch modules of the models of published runs, as written for one device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.decoders.decoder import Architecture


class Attention(nn.Module):
    """Causal self-attention. One fused projection in the order of key-value groups (Megatron), or three projections.

    Without flash attention it is Megatron's fused-softmax kernel: scale and mask are inside the softmax, so the graph has
    scores, softmax, dropout and context, which are the kernels that it launches and the tensors that it saves.
    """

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        width = (a.heads + 2 * a.kv_heads) * a.head_dim
        if a.fused_projections:
            self.qkv = nn.Linear(a.hidden, width, bias=a.bias)
        else:
            self.q = nn.Linear(a.hidden, a.heads * a.head_dim, bias=a.bias)
            self.k = nn.Linear(a.hidden, a.kv_heads * a.head_dim, bias=a.bias)
            self.v = nn.Linear(a.hidden, a.kv_heads * a.head_dim, bias=a.bias)
        self.out = nn.Linear(a.heads * a.head_dim, a.hidden, bias=a.bias)
        if a.norm_heads:
            self.q_norm, self.k_norm = nn.RMSNorm(a.head_dim), nn.RMSNorm(a.head_dim)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        a = self.a
        q, k, v = self.project(x)
        if a.norm_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if a.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=a.heads != a.kv_heads)
        else:
            scores = torch.matmul(q, k.transpose(2, 3))
            y = torch.matmul(F.dropout(torch.softmax(scores, -1), a.dropout, self.training), v)
        out: Tensor = self.out(y.transpose(1, 2).reshape(x.shape[0], a.seq, a.heads * a.head_dim))
        return out

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, S, heads, head_dim]."""
        a = self.a
        if not a.fused_projections:
            shape = (x.shape[0], a.seq, -1, a.head_dim)
            return self.q(x).view(shape), self.k(x).view(shape), self.v(x).view(shape)
        each = a.heads // a.kv_heads
        grouped = self.qkv(x).view(x.shape[0], a.seq, a.kv_heads, each + 2, a.head_dim)
        q, k, v = grouped.split([each, 1, 1], 3)
        return q.reshape(x.shape[0], a.seq, a.heads, a.head_dim), k.squeeze(3), v.squeeze(3)


class LatentAttention(nn.Module):
    """Multi-head latent attention: queries, and keys with values, are projected from compressed vectors; all heads share one
    rotated key (arXiv 2405.04434, section 2.1)."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        assert a.latent is not None
        self.a, self.l = a, a.latent
        self.query_down, self.query_norm = nn.Linear(a.hidden, self.l.query_rank, bias=False), nn.RMSNorm(self.l.query_rank)
        self.query_up = nn.Linear(self.l.query_rank, a.heads * (self.l.plain_dim + self.l.rope_dim), bias=False)
        self.kv_down, self.kv_norm = nn.Linear(a.hidden, self.l.kv_rank + self.l.rope_dim, bias=False), nn.RMSNorm(self.l.kv_rank)
        self.kv_up = nn.Linear(self.l.kv_rank, a.heads * (self.l.plain_dim + self.l.value_dim), bias=False)
        self.out = nn.Linear(a.heads * self.l.value_dim, a.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, latent, batch = self.a, self.l, x.shape[0]
        q = self.query_up(self.query_norm(self.query_down(x))).view(batch, a.seq, a.heads, -1).transpose(1, 2)
        q, q_turned = q.split([latent.plain_dim, latent.rope_dim], -1)
        kv, k_turned = self.kv_down(x).split([latent.kv_rank, latent.rope_dim], -1)
        kv = self.kv_up(self.kv_norm(kv)).view(batch, a.seq, a.heads, -1).transpose(1, 2)
        k, v = kv.split([latent.plain_dim, latent.value_dim], -1)
        k_turned = rotate(k_turned.unsqueeze(1), cos, sin).expand(-1, a.heads, -1, -1)
        q, k = torch.cat([q, rotate(q_turned, cos, sin)], -1), torch.cat([k, k_turned], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, a.seq, a.heads * latent.value_dim))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    return x * cos + torch.cat([-right, left], -1) * sin


class FeedForward(nn.Module):
    """The MLP of a layer: two matrices with GELU or squared ReLU, or three with a SiLU gate."""

    def __init__(self, a: Architecture, ffn: int) -> None:
        super().__init__()
        self.a = a
        if a.gated and not a.fused_projections:
            self.gate = nn.Linear(a.hidden, ffn, bias=a.bias)
        self.up = nn.Linear(a.hidden, 2 * ffn if a.gated and a.fused_projections else ffn, bias=a.bias)
        self.down = nn.Linear(ffn, a.hidden, bias=a.bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.a.gated:
            h = self.up(x)
            out: Tensor = self.down(F.gelu(h, approximate="tanh") if self.a.gelu else F.relu(h).square())
            return out
        if self.a.fused_projections:
            gate, up = self.up(x).chunk(2, -1)
        else:
            gate, up = self.gate(x), self.up(x)
        out = self.down(F.silu(gate) * up)
        return out


@lru_cache(maxsize=1)
def experts_operator() -> Any:
    """``ap::experts(x, scores, up, down, top_k)``: each token through its `top_k` best experts, weighted. Only traced, never run.

    x [B, S, H], scores [B, S, E], up [E, F, H] ([E, 2 F, H] with gates), down [E, H, F]; gives [B, S, H].
    """

    def never(*_: Any) -> Any:
        raise AssertionError("only traced, never run")

    schema = "(Tensor x, Tensor scores, Tensor up, Tensor down, int top_k) -> Tensor"
    found = torch.library.custom_op("ap::experts", never, mutates_args=(), schema=schema)
    found.register_fake(lambda x, scores, up, down, top_k: torch.empty_like(x))
    return found


class Experts(nn.Module):
    """A mixture of experts: a router, routed experts, and possibly a shared expert for every token."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.router = nn.Linear(a.hidden, a.experts, bias=False)
        self.up = nn.Parameter(torch.empty(a.experts, 2 * a.ffn if a.gated else a.ffn, a.hidden))
        self.down = nn.Parameter(torch.empty(a.experts, a.hidden, a.ffn))
        if a.shared_ffn:
            self.shared = FeedForward(a, a.shared_ffn)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.router(x), -1)
        y: Tensor = experts_operator()(x, scores, self.up, self.down, self.a.top_k)
        return y + self.shared(x) if self.a.shared_ffn else y


def norm(a: Architecture) -> nn.Module:
    """The norm of a decoder: RMS norm or layer norm."""
    return nn.RMSNorm(a.hidden) if a.rms_norm else nn.LayerNorm(a.hidden, bias=a.bias)


class Layer(nn.Module):
    """A pre-norm transformer layer; its MLP is a mixture of experts unless the layer is `dense`."""

    def __init__(self, a: Architecture, dense: bool) -> None:
        super().__init__()
        self.dropout = a.dropout
        self.norm1, self.attention = norm(a), LatentAttention(a) if a.latent else Attention(a)
        self.norm2, self.mlp = (
            norm(a),
            Experts(a) if a.experts and not dense else FeedForward(a, a.dense_ffn if a.experts else a.ffn),
        )

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x), cos, sin), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class Decoder(nn.Module):
    """The whole decoder: from tokens and labels, [B, S], to the mean cross entropy."""

    def __init__(self, a: Architecture, layers: int) -> None:
        super().__init__()
        self.a = a
        self.words = nn.Embedding(a.vocab, a.hidden)
        if a.learned_positions:
            self.positions = nn.Parameter(torch.empty(a.seq, a.hidden))
        if a.rope:
            turned = a.latent.rope_dim if a.latent else a.head_dim
            self.register_buffer("cos", torch.empty(a.seq, turned))
            self.register_buffer("sin", torch.empty(a.seq, turned))
        self.layers = nn.ModuleList(Layer(a, index < a.dense_layers) for index in range(layers))
        self.norm = norm(a)
        self.head = nn.Linear(a.hidden, a.vocab, bias=False)
        if a.tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens)
        if self.a.learned_positions:
            x = x + self.positions
        x = F.dropout(x, self.a.dropout, self.training)
        cos, sin = (self.cos.to(x.dtype), self.sin.to(x.dtype)) if self.a.rope else (None, None)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        if self.a.float_logits:
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
