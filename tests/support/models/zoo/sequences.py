"""Language, speech, time series, state spaces, neural operators."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 32


class RecurrentLanguageModel(nn.Module):
    """torch's example word_language_model: sequence first, LSTM or GRU with dropout between its layers."""

    def __init__(self, kind: str = "LSTM", dropout: float = 0.0, layers: int = 2) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(WORDS, 16)
        self.rnn = getattr(nn, kind)(16, 16, layers, dropout=dropout)
        self.decoder = nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, _ = self.rnn(self.drop(self.encoder(tokens)))
        scores = F.log_softmax(self.decoder(self.drop(x)).view(-1, WORDS), dim=1)
        return F.nll_loss(scores, targets.view(-1))


class SequenceFirstTransformer(nn.Module):
    """torch's example word_language_model: `nn.TransformerEncoder` with the batch at dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.decoder = nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        mask = torch.log(torch.tril(torch.ones(len(tokens), len(tokens)))).to(self.decoder.weight)
        x = self.layers(self.encoder(tokens) * math.sqrt(16), mask=mask)
        return F.cross_entropy(self.decoder(x).view(-1, WORDS), targets.view(-1))


class WaveNet(nn.Module):
    """arXiv 1609.03499: dilated causal convolutions, gates, skips."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv1d(1, 8, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
        self.residual = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.skip = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(8, 8, 1), nn.ReLU(), nn.Conv1d(8, 16, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, total = self.embed(x), 0
        for i in range(3):
            a, b = self.dilated[i](F.pad(x, (2**i, 0))).chunk(2, dim=1)
            z = torch.tanh(a) * torch.sigmoid(b)
            total = total + self.skip[i](z)[:, :, -16:]
            x = x + self.residual[i](z)
        return F.cross_entropy(self.out(total), y)


class Conformer(nn.Module):
    """arXiv 2005.08100: half-step feed forward, attention, a convolution module with GLU and batch norm."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.ff1, self.ff2 = (
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim)) for _ in range(2)
        )
        self.norm, self.attention = nn.LayerNorm(dim), nn.MultiheadAttention(dim, 4, batch_first=True)
        self.conv_norm, self.point1 = nn.LayerNorm(dim), nn.Conv1d(dim, 2 * dim, 1)
        self.depth, self.batch_norm = nn.Conv1d(dim, dim, 5, padding=2, groups=dim), nn.BatchNorm1d(dim)
        self.point2, self.last, self.out = nn.Conv1d(dim, dim, 1), nn.LayerNorm(dim), nn.Linear(dim, 6)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1], device=x.device)[None, :] >= lengths[:, None]
        x = x + 0.5 * self.ff1(x)
        z = self.norm(x)
        x = x + self.attention(z, z, z, key_padding_mask=padding, need_weights=False)[0]
        z = F.glu(self.point1(self.conv_norm(x).transpose(1, 2)), dim=1)
        z = self.point2(F.silu(self.batch_norm(self.depth(z)))).transpose(1, 2)
        x = self.last((x + z) + 0.5 * self.ff2(x + z))
        loss = F.cross_entropy(self.out(x).transpose(1, 2), y, reduction="none")
        return loss.masked_fill(padding, 0.0).sum() / lengths.sum()


class PatchTst(nn.Module):
    """arXiv 2211.14730: instance normalization, patches by `unfold`, channel independence, batch norm over tokens."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(8, dim), nn.Parameter(torch.randn(7, dim) * 0.02)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.norm1, self.norm2 = nn.BatchNorm1d(dim), nn.BatchNorm1d(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
        self.head = nn.Linear(7 * dim, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, std = x.mean(1, keepdim=True).detach(), torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5).detach()
        z = ((x - mean) / std).permute(0, 2, 1).unfold(-1, 8, 4)
        b, c = z.shape[:2]
        z = self.embed(z).reshape(b * c, 7, -1) + self.position
        z = self.norm1((z + self.attention(z, z, z)[0]).transpose(1, 2)).transpose(1, 2)
        z = self.norm2((z + self.ff(z)).transpose(1, 2)).transpose(1, 2)
        found = self.head(z.reshape(b, c, -1)).permute(0, 2, 1) * std + mean
        return F.mse_loss(found, y)


class NBeats(nn.Module):
    """arXiv 1905.10437: doubly residual stacks, trend and seasonal bases as plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 6)) for _ in range(2)
        )
        back, ahead = torch.arange(16) / 16.0, torch.arange(4) / 4.0
        self.trend = [torch.stack([t**i for i in range(3)]) for t in (back, ahead)]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        forecast = torch.zeros(size=(x.size(0), 4), dtype=x.dtype)
        for stack in self.stacks:
            theta = stack(x)
            x = x - theta[:, :3].mm(self.trend[0].to(x))
            forecast = forecast.to(x.device) + theta[:, 3:].mm(self.trend[1].to(x))
        return F.l1_loss(forecast, y)


class SelectiveScan(nn.Module):
    """Mamba, arXiv 2312.00752, as in mamba-minimal: a causal convolution and a loop over time."""

    def __init__(self, dim: int = 8, state: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, dim)
        self.into, self.conv = nn.Linear(dim, 4 * dim, bias=False), nn.Conv1d(2 * dim, 2 * dim, 4, groups=2 * dim, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(2 * dim, 2 + 2 * state, bias=False), nn.Linear(2, 2 * dim)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1).float().repeat(2 * dim, 1)))
        self.D, self.out, self.state = nn.Parameter(torch.ones(2 * dim)), nn.Linear(2 * dim, dim, bias=False), state

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, gate = self.into(self.embed(tokens)).split([16, 16], dim=-1)
        length = x.shape[1]
        x = F.silu(self.conv(x.transpose(1, 2))[:, :, :length].transpose(1, 2))
        delta, b, c = self.x_proj(x).split([2, self.state, self.state], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        a = -torch.exp(self.A_log)
        d_a = torch.exp(torch.einsum("bld,dn->bldn", delta, a))
        d_bx = torch.einsum("bld,bln,bld->bldn", delta, b, x)
        h, ys = torch.zeros((x.shape[0], x.shape[2], self.state), device=x.device, dtype=x.dtype), []
        for i in range(length):
            h = d_a[:, i] * h + d_bx[:, i]
            ys.append(torch.einsum("bdn,bn->bd", h, c[:, i, :]))
        y = (torch.stack(ys, dim=1) + x * self.D) * F.silu(gate)
        return F.cross_entropy((self.out(y) @ self.embed.weight.T).view(-1, WORDS), targets.view(-1))


class FourierOperator(nn.Module):
    """FNO, arXiv 2010.08895: complex weights on the low modes of a real FFT."""

    def __init__(self, width: int = 8, modes: int = 3) -> None:
        super().__init__()
        self.lift, self.modes = nn.Linear(2, width), modes
        self.weights = nn.Parameter(torch.randn(width, width, modes, 2) / width)
        self.skip, self.out = nn.Conv1d(width, width, 1), nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        v = self.lift(x).permute(0, 2, 1)
        f = torch.fft.rfft(v)
        low = torch.einsum("bix,iox->box", f[:, :, : self.modes], torch.view_as_complex(self.weights))
        out = torch.zeros(v.shape[0], v.shape[1], f.shape[-1], dtype=f.dtype, device=x.device)
        out[:, :, : self.modes] = low
        v = F.gelu(torch.fft.irfft(out, n=v.size(-1)) + self.skip(v))
        return F.mse_loss(self.out(v.permute(0, 2, 1)), y)


class ComplexRotaryLlama(nn.Module):
    """Meta's llama: complex rotary factors as a plain attribute, made by `torch.polar`."""

    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.heads = nn.Embedding(WORDS, dim), heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w2, self.w3 = nn.Linear(dim, 32, bias=False), nn.Linear(32, dim, bias=False), nn.Linear(dim, 32, bias=False)
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, WORDS, bias=False)
        freqs = 1.0 / (10000.0 ** (torch.arange(0, dim // heads, 2).float() / (dim // heads)))
        freqs = torch.outer(torch.arange(32), freqs)
        self.freqs_cis = torch.polar(torch.ones_like(freqs), freqs)

    def rotate(self, x: Tensor, freqs: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        b, s = tokens.shape
        x = self.embed(tokens)
        self.freqs_cis = self.freqs_cis.to(x.device)
        freqs = self.freqs_cis[0:s]
        q, k, v = (w(self.norm(x)).view(b, s, self.heads, -1) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (self.rotate(q, freqs), self.rotate(k, freqs), v))
        mask = torch.triu(torch.full((s, s), float("-inf"), device=tokens.device), diagonal=1)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
        scores = F.softmax((scores + mask).float(), dim=-1).type_as(q)
        x = x + self.wo(torch.matmul(scores, v).transpose(1, 2).contiguous().view(b, s, -1))
        z = self.norm(x)
        x = x + self.w2(F.silu(self.w1(z)) * self.w3(z))
        return F.cross_entropy(self.output(self.norm(x)).view(-1, WORDS), targets.view(-1))


class GeluFunction(torch.autograd.Function):
    """As in Bloom: a GELU with a backward by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        ff = 0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)
        return ff * grad


class ScaledGradient(torch.autograd.Function):
    """The backward is not the derivative: gradients are reversed (DANN, arXiv 1505.07818)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


class CustomFunctions(nn.Module):
    """A GELU by hand, and gradient reversal before a domain head."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.label, self.domain = nn.Linear(dim, 4), nn.Linear(dim, 2)

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        h = x + self.down(GeluFunction.apply(self.up(x)))
        loss = F.cross_entropy(self.label(h), y)
        return loss + F.cross_entropy(self.domain(ScaledGradient.apply(h, 0.5)), domain)


class ClipText(nn.Module):
    """OpenAI's CLIP: sequence first inside, `attn_mask` a plain tensor, end of text by argmax, contrastive loss."""

    def __init__(self, dim: int = 16, length: int = 8) -> None:
        super().__init__()
        self.tokens, self.position = nn.Embedding(WORDS, dim), nn.Parameter(torch.randn(length, dim) * 0.01)
        self.attention, self.norm = nn.MultiheadAttention(dim, 4), nn.LayerNorm(dim)
        self.projection = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)
        self.visual = nn.Linear(12, dim)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))
        self.attn_mask = torch.empty(length, length).fill_(float("-inf")).triu_(1)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        x = (self.tokens(text) + self.position.type(self.projection.dtype)).permute(1, 0, 2)
        self.attn_mask = self.attn_mask.to(dtype=x.dtype, device=x.device) if self.attn_mask is not None else None
        z = self.norm(x)
        x = (x + self.attention(z, z, z, need_weights=False, attn_mask=self.attn_mask)[0]).permute(1, 0, 2)
        x = x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.projection
        image = self.visual(image)
        x, image = x / x.norm(dim=1, keepdim=True), image / image.norm(dim=1, keepdim=True)
        logits = self.logit_scale.exp() * image @ x.t()
        labels = torch.arange(x.shape[0], device=x.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
