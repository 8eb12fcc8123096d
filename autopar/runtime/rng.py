"""Random masks that come from one seed, differ between shards and agree between replicas.

A generator belongs to the coordinates of a rank on the axes that cut the tensor. Ranks with equal coordinates there draw the
same numbers, since all ranks run the same program.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from .axis import AxisHandle


class Seeded(Protocol):
    """What `dropout` needs of a mesh."""

    seed: int

    def axis(self, name: str) -> AxisHandle: ...


@lru_cache(maxsize=1024)
def generator(key: int, device: str) -> torch.Generator:
    """The generator of a shard, made at first use. `generator.cache_clear()` starts all afresh."""
    return torch.Generator(device).manual_seed(key)


# One opaque operation, so that torch.compile neither merges nor repeats the draw.
@torch.library.custom_op("autopar::keep_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _keep_mask(x: torch.Tensor, p: float, key: int) -> torch.Tensor:
    keep = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return keep.bernoulli_(1 - p, generator=generator(key, str(x.device)))


@_keep_mask.register_fake
def _(x: torch.Tensor, p: float, key: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def shard_key(mesh: Seeded, sharded_axes: Iterable[str]) -> int:
    """Differs between ranks that hold different elements, agrees between replicas."""
    key = mesh.seed
    for name in sharded_axes:
        key = key * 65_537 + mesh.axis(name).coordinate + 1
    return key % (1 << 62)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention_dropout(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    training: bool,
    mesh: Seeded,
    sharded_axes: Iterable[str] = (),
    *,
    dropout_p: float,
    **options: Any,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` whose dropout draws like `dropout`. The kernels draw from torch's own generator, so it is
    seeded from the shard's for the call and put back after it. Arguments as of torch's function."""
    if not training:
        return F.scaled_dot_product_attention(q, k, v, **options)
    seed = int(torch.randint(1 << 62, (), generator=generator(shard_key(mesh, sharded_axes), "cpu")))
    with torch.random.fork_rng(devices=[q.device] if q.is_cuda else []):
        torch.manual_seed(seed)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, **options)


def dropout(x: torch.Tensor, p: float, training: bool, mesh: Seeded, sharded_axes: Iterable[str] = ()) -> torch.Tensor:
    """Dropout of a local tensor. `sharded_axes` are the mesh axes on which `x` is Shard; on all others its mask agrees."""
    if not training or p == 0:
        return x
    if p == 1:
        return torch.zeros_like(x) * x
    mask: torch.Tensor = _keep_mask(x.detach(), p, shard_key(mesh, sharded_axes))
    return x * (mask / (1 - p))
