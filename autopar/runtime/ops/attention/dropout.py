"""Attention whose dropout mask is that of this shard's random stream.

torch's kernels draw from torch's own generator, so it is seeded from the stream for the call and restored after it. Compiled code
calls this as it is: the seed is a tensor of the traced graph, and the backward computes the attention again with the same mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.autograd import apply, autograd_in_kernel
from ...device.rng import SeedSource, next_seed, seed_stream, shard_key


def attention_dropout(
    q: Tensor, k: Tensor, v: Tensor, training: bool, mesh: SeedSource, sharded_axes: Iterable[str] = (), *,
    dropout_p: float, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``scaled_dot_product_attention`` with the dropout mask of this shard's stream. Arguments are those of torch's
    function."""
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not training:
        return F.scaled_dot_product_attention(q, k, v, attn_mask, **options | {"dropout_p": 0.0})
    if torch.compiler.is_compiling():
        seed = next_seed(mesh, sharded_axes)
        return apply(_AttentionDropout, options, seed, q, k, v, attn_mask)  # type: ignore[no-any-return]
    return _attend(seed_stream(shard_key(mesh, sharded_axes)).next_seed(), q, k, v, attn_mask, options)


@contextmanager
def _seeded(seed: int | Tensor, device: torch.device) -> Iterator[None]:
    """Let torch's own generator of a device begin at a seed, and go on after it as if nothing had been drawn."""
    on_device = device.type == "cuda"
    own = torch.cuda.default_generators[device.index] if on_device else torch.default_generator
    with torch.random.fork_rng([device.index] if on_device else []):
        own.manual_seed(int(seed))
        yield


def _attend(seed: int | Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Mapping[str, Any]) -> Tensor:
    with _seeded(seed, q.device):
        return F.scaled_dot_product_attention(q, k, v, mask, **options)


@torch.library.custom_op("autopar::attention_dropout", mutates_args=())
def _traced_attend(
    seed: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return _attend(seed, q, k, v, mask, options).contiguous()


@_traced_attend.register_fake
def _(seed: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@torch.library.custom_op("autopar::attention_dropout_gradients", mutates_args=())
def _traced_gradients(
    grad: Tensor, wanted: Sequence[bool], seed: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *,
    dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of those of q, k, v and the mask that are `wanted`."""
    with autograd_in_kernel():
        q, k, v = (x.detach().requires_grad_(want) for x, want in zip((q, k, v), wanted, strict=False))
        mask = None if mask is None else mask.detach().requires_grad_(wanted[3])
        options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        result = _attend(seed, q, k, v, mask, options)
        leaves = [x for x in (q, k, v, mask) if x is not None and x.requires_grad]
        return [each.contiguous() for each in torch.autograd.grad(result, leaves, grad)]


@_traced_gradients.register_fake
def _(
    grad: Tensor, wanted: Sequence[bool], seed: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, want in zip((q, k, v, mask), wanted, strict=True) if x is not None and want]


class _AttentionDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Any, seed: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(seed, q, k, v, mask)
        result: Tensor = _traced_attend(seed, q, k, v, mask, **options)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        seed, q, k, v, mask = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        found = iter(_traced_gradients(grad, wanted, seed, q, k, v, mask, **ctx.options))
        return None, None, *(next(found) if want else None for want in wanted)
