"""Collectives that a calibration times, with the process group's backend (gloo or NCCL)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist


def collective_calls(device: torch.device, size: int, thorough: bool) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """(kind, bytes of the whole tensor, call) for each kind and message size."""
    cuda = device.type == "cuda"
    sizes = [2**12, 2**18, 2**22, 2**24] if thorough else [2**12, 2**22]
    for full in sizes:
        count = full * (8 if cuda else 1) // 4 // size**2 * size**2 or size**2
        whole = torch.ones(count, device=device)
        part = torch.ones(count // size, device=device)
        other = torch.ones_like(part)
        yield "all_reduce", 4.0 * count, partial(_reduce, whole)
        yield "all_gather", 4.0 * count, partial(dist.all_gather_into_tensor, whole, part)
        yield "reduce_scatter", 4.0 * count, partial(dist.reduce_scatter_tensor, part, whole)
        yield "all_to_all", 4.0 * count, partial(dist.all_to_all_single, other, part)


def _reduce(whole: torch.Tensor) -> object:
    """The average of ones stays one, however often."""
    return dist.all_reduce(whole, op=dist.ReduceOp.MAX)
