"""The sampler of a parallel model: of its data ranks' parts, of batches by length, or of packed rows."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from math import lcm, prod
from numbers import Integral
from typing import Any

from torch.utils.data import DistributedSampler

from ..device.mesh import MeshHandle
from ..errors import RuntimeProblem
from .epoch_sampler import checked_lengths, require_one_sampler
from .length_sampler import LengthBatchSampler
from .packed_sampler import PackedBatchSampler


def sampler_on_mesh(
    mesh: MeshHandle,
    dataset: Sized,
    planned_batch: int | None,
    *,
    lengths: Iterable[int] | None = None,
    batch_size: int | None = None,
    programs: int | None = None,
    multiple: int | None = None,
    packed_tokens: int | None = None,
    drop_last: bool | None = None,
    **order: Any,
) -> DistributedSampler[Any] | LengthBatchSampler | PackedBatchSampler:
    """Return what `parallel.sampler` describes. `planned_batch`: that of a plan. `order`: ``shuffle`` and ``seed``."""
    of_lengths = {"batch_size": batch_size, "programs": programs, "multiple": multiple}
    if lengths is None:
        if given := [name for name, value in (of_lengths | {"packed_tokens": packed_tokens}).items() if value is not None]:
            raise RuntimeProblem(f"{given[0]}= is for a sampler by length: give lengths= too")
        dp = mesh.dp
        return DistributedSampler(dataset, dp.size, dp.coordinate, drop_last=drop_last is not False, **order)  # type: ignore[arg-type]
    shards, checked = prod(axis.size for axis in mesh.model_axes), checked_lengths(lengths, dataset)
    if packed_tokens is not None:
        if given := [name for name, value in (of_lengths | {"drop_last": drop_last}).items() if value is not None]:
            raise RuntimeProblem(f"packed_tokens= makes rows that hold every document once: leave out {given[0]}=")
        _check_row(packed_tokens, mesh.dp.size * shards, mesh.pp.size)
        out: LengthBatchSampler | PackedBatchSampler = PackedBatchSampler(checked, packed_tokens=packed_tokens, **order)
    else:
        batch_size = planned_batch if batch_size is None else batch_size
        if batch_size is None:
            raise RuntimeProblem("an exported program does not say the size of its batches: give batch_size=")
        # any of the model axes may shard a sequence, in halves for ring attention
        out = LengthBatchSampler(
            checked, batch_size=batch_size, rank=mesh.dp.coordinate,
            num_replicas=mesh.dp.size, programs=5 if programs is None else programs,
            multiple=lcm(8, 2 * shards) if multiple is None else multiple, drop_last=drop_last is not False, **order,
        )  # fmt: skip
    require_one_sampler(out, mesh)
    return out


def _check_row(tokens: Any, shards: int, stages: int) -> None:
    if stages > 1:
        raise RuntimeProblem("a packed row is a single micro-batch, which a pipeline cannot overlap with others: plan with pp=1")
    if isinstance(tokens, Integral) and tokens % shards:
        more = -(-int(tokens) // shards) * shards
        raise RuntimeProblem(f"packed_tokens={tokens} does not divide into the {shards} shards of a row: give {more}")
