"""Attention of one rectangle of the score matrix, with the log-sum-exp by which rectangles are merged; and its backward from that
of the whole rows.

Queries are [B, h, s, d], keys [B, g, t, d], values [B, g, t, e], where g divides h. The kernel is torch's own if it has one that
returns the log-sum-exp, else plain operations. A backward that is given `out` and `lse` of the whole rows, not of the rectangle,
computes the rectangle's part of the gradients (Liu et al., Ring Attention, arXiv 2310.01889; FlashAttention-2, arXiv 2307.08691).
"""

from __future__ import annotations

import torch

LOWEST = float("-inf")
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, bias: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse [B, h, s]) of scores ``scale * q k^T + bias``; `causal`: a query sees the keys up to its own number. A row
    without a key has a log-sum-exp of minus infinity, and zeros."""
    kernel = _kernel(q, v, bias)
    if kernel == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    elif kernel == "flash":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    else:
        return _plain(q, k, v, bias, causal, scale)
    if bias is not None:
        lse = lse.masked_fill((bias == LOWEST).all(-1), LOWEST)
    return out, lse


def attend_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    *, bias: torch.Tensor | None, causal: bool, scale: float,
) -> Grads:  # fmt: skip
    """Gradients of q, k and v. `lse` of a row without a key is any finite number."""
    kernel = _kernel(q, v, bias)
    if kernel == "cpu":
        back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return back(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)  # type: ignore[no-any-return]
    if kernel == "flash":
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        back = torch.ops.aten._scaled_dot_product_flash_attention_backward
        sizes = (None, None, q.shape[2], k.shape[2])
        return back(grad.contiguous(), q, k, v, out, lse.contiguous(), *sizes, 0.0, causal, state, unused, scale=scale)  # type: ignore[no-any-return]
    return plain_backward(grad, q, k, v, out, lse, bias=bias, causal=causal, scale=scale)[:3]


def _kernel(q: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> str:
    """``cpu``, ``flash`` or ``plain``."""
    if q.shape[-1] != v.shape[-1]:
        return "plain"
    if q.device.type == "cpu":
        return "cpu"
    half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cuda" and half and bias is None and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return "flash"
    return "plain"


def _scores(
    q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries by group [B, g, r, s, d], and their scores [B, g, r, s, t]; both wide."""
    dtype = wide(q.dtype)
    grouped = q.to(dtype).unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
    scores = torch.matmul(grouped * scale, k.to(dtype).unsqueeze(2).transpose(-1, -2))
    if bias is not None:
        shape = (*q.shape[:3], k.shape[2])
        scores = scores + bias.to(dtype).expand(shape).unflatten(1, scores.shape[1:3])
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, LOWEST)
    return grouped, scores


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _, scores = _scores(q, k, bias, causal, scale)
    lse = torch.logsumexp(scores, -1)
    finite = lse.masked_fill(lse == LOWEST, 0.0)
    weights = torch.exp(scores - finite.unsqueeze(-1))
    out = torch.matmul(weights, v.to(weights.dtype).unsqueeze(2)).flatten(1, 2)
    return out, lse.flatten(1, 2)


def plain_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    *, bias: torch.Tensor | None, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attend_backward` by plain operations, and the gradient of what is added to the scores, [B, h, s, t]."""
    grouped, scores = _scores(q, k, bias, causal, scale)
    groups = scores.shape[1:3]
    weights = torch.exp(scores - lse.unflatten(1, groups).unsqueeze(-1))
    above = grad.to(weights.dtype).unflatten(1, groups)
    mean = (above * out.to(weights.dtype).unflatten(1, groups)).sum(-1, keepdim=True)
    to_scores = weights * (torch.matmul(above, v.to(weights.dtype).unsqueeze(2).transpose(-1, -2)) - mean)
    scaled = to_scores * scale
    to_q = torch.matmul(scaled, k.to(weights.dtype).unsqueeze(2)).flatten(1, 2)
    to_k = torch.matmul(scaled.transpose(-1, -2), grouped).sum(2)
    to_v = torch.matmul(weights.transpose(-1, -2), above).sum(2)
    return to_q, to_k, to_v, to_scores.flatten(1, 2)
