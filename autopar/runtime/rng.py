"""Random masks that come from one seed, differ between shards and agree between replicas.

A stream of seeds belongs to the coordinates of a rank on the axes that cut the tensor, and each draw takes the next one. Ranks
with equal coordinates there draw the same numbers, since all ranks run the same program. What the backward runs again draws the
numbers of the forward: `Draws` remembers where the streams stood.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from .apply import apply
from .axis import AxisHandle


class Seeded(Protocol):
    """What `dropout` needs of a mesh."""

    seed: int

    def axis(self, name: str) -> AxisHandle: ...


class Stream:
    """The seeds of one shard: a function of its key and of how many were drawn before."""

    def __init__(self, key: int) -> None:
        self.key, self.count = key, 0

    def draw(self) -> int:
        watching = _watching.get()
        if watching is not None:
            watching.counts.setdefault(self, self.count)
        self.count += 1
        return hash((self.key, self.count)) % (1 << 62)  # of whole numbers: the same in every process


@lru_cache(maxsize=1024)
def stream(key: int) -> Stream:
    """The stream of a shard, made at first use. `stream.cache_clear()` starts all afresh."""
    return Stream(key)


class Draws:
    """Where the streams stood when a piece of the forward first drew from them. It runs inside; a second run inside `repeated`
    draws the same, and leaves the streams as it found them."""

    def __init__(self) -> None:
        self.counts: dict[Stream, int] = {}
        self.outer: Draws | None = None

    def __enter__(self) -> Draws:
        self.outer = _watching.get()
        _watching.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _watching.set(self.outer)
        if self.outer is not None:
            for each, count in self.counts.items():
                self.outer.counts.setdefault(each, count)
        self.outer = None

    @property
    def repeated(self) -> Repeated:
        return Repeated(self.counts)


class Repeated:
    """Puts streams back for a second run; may be entered more than once."""

    def __init__(self, counts: dict[Stream, int]) -> None:
        self.counts = counts
        self.now: dict[Stream, int] = {}

    def __enter__(self) -> None:
        self.now = {each: each.count for each in self.counts}
        for each, count in self.counts.items():
            each.count = count

    def __exit__(self, *error: object) -> None:
        for each, count in self.now.items():
            each.count = count


_watching: ContextVar[Draws | None] = ContextVar("watching", default=None)


@lru_cache(maxsize=16)
def _generator(device: str) -> torch.Generator:
    return torch.Generator(device)


# One opaque operation, so that torch.compile neither merges nor repeats the draw.
@torch.library.custom_op("autopar::keep_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _keep_mask(x: torch.Tensor, p: float, key: int) -> torch.Tensor:
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    return keep.bernoulli_(1 - p, generator=_generator(str(x.device)).manual_seed(stream(key).draw()))


@_keep_mask.register_fake
def _(x: torch.Tensor, p: float, key: int) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.bool, device=x.device)


def _number(name: str) -> int:
    """Of an axis; plain arithmetic, which torch.compile follows."""
    number = 0
    for letter in name:
        number = number * 131 + ord(letter)
    return number


def shard_key(mesh: Seeded, sharded_axes: Iterable[str]) -> int:
    """Differs between ranks that hold different elements, agrees between replicas. The axes count by name: rank 0 of one axis
    must not share a stream with rank 0 of another, which other ranks would not advance."""
    key = mesh.seed
    for name in sharded_axes:
        key = (key * 65_537 + _number(name)) * 65_537 + mesh.axis(name).coordinate + 1
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
    with torch.random.fork_rng(devices=[q.device] if q.is_cuda else []):
        torch.manual_seed(stream(shard_key(mesh, sharded_axes)).draw())
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, **options)


class _Dropout(torch.autograd.Function):
    """Keeps a mask of one byte an element, as torch's own does on CUDA."""

    @staticmethod
    def forward(ctx: Any, p: float, key: int, x: torch.Tensor) -> torch.Tensor:
        mask: torch.Tensor = _keep_mask(x, p, key)
        ctx.save_for_backward(mask)
        ctx.scale = 1 / (1 - p)
        return (x * mask).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return None, None, (grad * mask).mul_(ctx.scale)


def dropout(x: torch.Tensor, p: float, training: bool, mesh: Seeded, sharded_axes: Iterable[str] = ()) -> torch.Tensor:
    """Dropout of a local tensor. `sharded_axes` are the mesh axes on which `x` is Shard; on all others its mask agrees."""
    if not training or p == 0:
        return x
    if p == 1:
        return torch.zeros_like(x) * x
    return apply(_Dropout, p, shard_key(mesh, sharded_axes), x)  # type: ignore[no-any-return]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def random(
    like: torch.Tensor, kind: str, a: float, b: float, dtype: torch.dtype, mesh: Seeded, sharded_axes: Iterable[str] = ()
) -> torch.Tensor:
    """Random numbers for every element of a local tensor, drawn like `dropout`: ``uniform`` (from a to b), ``normal`` (mean a,
    deviation b), ``exponential`` (rate a), ``bernoulli`` (probability a), ``integers`` (from a to b, exclusive)."""
    generator = _generator(str(like.device)).manual_seed(stream(shard_key(mesh, sharded_axes)).draw())
    with torch.no_grad():
        out = torch.empty(like.shape, dtype=dtype, device=like.device)
        if kind == "uniform":
            return out.uniform_(a, b, generator=generator)
        if kind == "normal":
            return out.normal_(a, b, generator=generator)
        if kind == "exponential":
            return out.exponential_(a, generator=generator)
        if kind == "bernoulli":
            return out.bernoulli_(a, generator=generator)
        return out.random_(int(a), int(b), generator=generator)
