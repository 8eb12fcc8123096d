"""``torch.nn.attention.flex_attention`` as ordinary operations, while a model is traced.

The kernel has no backward on CPUs and its mask no tensor that could be sharded. So `mask_mod` and `score_mod` are called once on
grids of indices ``b [B, 1, 1, 1], h [1, H, 1, 1], q [1, 1, S, 1], k [1, 1, 1, T]``, whose results broadcast. Scores that are not
modified give ``scaled_dot_product_attention`` under a mask, from which `normalize.masks` reads causal attention, windows and
padding; else scores, their modification, a softmax in float32 at least, and the product with the values are written out. A call
through ``torch.compile`` is one of the function itself here. A mask made outside of the model's forward serves as well, if the
tensors that it reads belong to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops import utils
from torch.nn.attention import flex_attention as flex

from autopar.runtime.compat.hooks import replaced

Modify = Callable[..., Tensor]


@contextmanager
def flex_as_operations() -> Iterator[None]:
    """Changes what torch's functions do, by whatever name a model has them, and puts them back."""
    pairs: list[tuple[Any, Any]] = [(flex.flex_attention, _attention), (flex.create_block_mask, _block_mask)]
    before = [function.__code__ for function, _ in pairs]
    try:
        for function, instead in pairs:
            function.__code__ = instead.__code__
        with replaced(utils, "_hop_compile_and_call", _branches_compiled), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for (function, _), code in zip(pairs, before, strict=True):
            function.__code__ = code


_compile_and_call = utils._hop_compile_and_call


def _branches_compiled(*args: Any, **kwargs: Any) -> Any:
    """``torch.cond`` and ``while_loop`` read their branches with dynamo, so that what these refer to becomes operands."""
    with torch.compiler.set_stance("default"):
        return _compile_and_call(*args, **kwargs)  # type: ignore[no-untyped-call]


def _attention(  # type: ignore[no-untyped-def]
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, kernel_options=None,
    *, return_aux=None,
):  # fmt: skip
    from autopar.capture.tracing.flex import written_out  # it runs as a function of torch's module, whose names it sees

    return written_out(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux)


def _block_mask(  # type: ignore[no-untyped-def]
    mask_mod, B, H, Q_LEN, KV_LEN, device=None, BLOCK_SIZE=128, _compile=False, separate_full_blocks=True,
    compute_dq_write_order=False, dq_kv_order=True,
):  # fmt: skip
    from autopar.capture.tracing.flex import unblocked

    return unblocked(mask_mod, Q_LEN, KV_LEN, device)


def unblocked(mask_mod: Modify, queries: int, keys: int, device: Any) -> flex.BlockMask:
    """A mask that knows its function and no blocks."""
    count = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
    return flex.BlockMask((queries, keys), count, count.unsqueeze(-1), None, None, None, None, None, None, mask_mod=mask_mod)


def written_out(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Modify | None, block_mask: flex.BlockMask | None, scale: float | None,
    enable_gqa: bool, return_lse: bool, return_aux: Any,
) -> Any:  # fmt: skip
    """Return the result of the kernel. A row without a key gives zeros."""
    grids = _grids(q, k)
    mask = None if block_mask is None else _called(block_mask.mask_mod, grids, ())
    grouped = q.shape[1] != k.shape[1]
    repeated = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) if grouped else x for x in (k, v)]
    wide = q.dtype if q.dtype is torch.float64 else torch.float32
    scores = torch.matmul(q.to(wide), repeated[0].to(wide).transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    changed = scores if score_mod is None else _called(score_mod, grids, (scores,))
    if changed is scores:
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa and grouped)
    else:
        weights = changed if mask is None else changed.masked_fill(~mask, torch.finfo(wide).min)
        weights = weights.softmax(-1)
        weights = weights if mask is None else weights.masked_fill(~mask, 0.0)
        out = torch.matmul(weights.to(v.dtype), repeated[1])
    if not return_lse and return_aux is None:
        return out
    lse = torch.logsumexp(changed if mask is None else changed.masked_fill(~mask, float("-inf")), -1)
    return (out, lse) if return_lse else (out, flex.AuxOutput(lse=lse))


def _grids(q: Tensor, k: Tensor) -> list[Tensor]:
    """Numbers of examples, heads, queries and keys."""
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return [
        torch.arange(size, device=q.device).view(*(-1 if at == dim else 1 for at in range(4))) for dim, size in enumerate(sizes)
    ]


def _called(function: Modify, grids: list[Tensor], scores: tuple[Tensor, ...]) -> Tensor:
    """The function on all indices at once; for each by `torch.vmap` where it indexes step by step (``table[b][q]``), which gives
    more dimensions."""
    found = function(*scores, *grids)
    if found.dim() == 4:
        return found
    flat = [grid.flatten() for grid in grids]
    for level in reversed(range(4)):
        own = [0 if at == level else None for at in range(4)]
        function = torch.vmap(function, in_dims=(*(0 for _ in scores), *own))
    with TransformGetItemToIndex():  # as torch's own eager form: ``table[q]`` asks for no number
        return function(*scores, *flat)
