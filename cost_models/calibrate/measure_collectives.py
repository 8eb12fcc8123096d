"""Collectives that a calibration times, with the process group's backend (gloo or NCCL)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from autopar.runtime.compat import collectives

SMALL_SIZES, SIZES = (2**12, 2**22), (2**12, 2**16, 2**20, 2**22, 2**24, 2**26)
"""Bytes of the whole tensor, of which a GPU takes eight times as many. Of the largest ones a collective's own buffers are fresh
pages of the operating system each time."""

SMALL_STATE_SIZES = (*SMALL_SIZES, 2**24, 2**26)
"""Bytes of parameters and gradients in a quick calibration."""

PARAMETERS = 4
"""Parameters of one FSDP2 group."""

Collective = tuple[str, float, Callable[[], object]]
"""Kind, bytes of the whole tensor (of a message: what is sent), and a call."""


def collective_calls(
    device: torch.device, size: int, thorough: bool, group: dist.ProcessGroup | None = None
) -> Iterator[Collective]:
    """Yield each kind and message size over the `size` ranks of `group`, by default all."""
    for full in SIZES if thorough else SMALL_SIZES:
        yield from calls_of_size(device, size, full, group)
    for full in SIZES if thorough else SMALL_STATE_SIZES:
        yield from state_calls_of_size(device, size, full, group)


def narrower_groups(size: int) -> Iterator[tuple[int, dist.ProcessGroup]]:
    """Yield for each power of 2 below `size` that divides it the group of so many neighbours that this rank is in. All groups of
    a width communicate at once, as those of a mesh axis do."""
    width = 2
    while width < size and size % width == 0:
        group, _ = dist.new_subgroups(width)
        assert group is not None
        yield width, group
        width *= 2


def calls_of_size(device: torch.device, size: int, full: int, group: dist.ProcessGroup | None = None) -> Iterator[Collective]:
    """Yield each kind over the `size` ranks of `group`, of about `full` bytes; as programs call them, functional: results are new
    tensors. (Measured on 4 ranks of 2 cores: an all-reduce of 4 MB takes 11 to 12 ms in place and 16 ms so.)"""
    count = full * (8 if device.type == "cuda" else 1) // 4 // size**2 * size**2 or size**2
    whole = torch.ones(count, device=device)
    part = torch.ones(count // size, device=device)
    other = torch.ones_like(part)
    name = (group or dist.distributed_c10d._get_default_group()).group_name
    yield "all_reduce", 4.0 * count, lambda: collectives.wait_tensor(collectives.all_reduce(whole, "sum", name))
    yield "all_gather", 4.0 * count, lambda: collectives.wait_tensor(collectives.all_gather(part, size, name))
    yield "reduce_scatter", 4.0 * count, lambda: collectives.wait_tensor(collectives.reduce_scatter(whole, "sum", size, name))
    yield "all_to_all", 4.0 * count, lambda: collectives.wait_tensor(collectives.all_to_all(part, size, name))
    yield "point_to_point", 4.0 * part.numel(), partial(_shift, part, other, group)


def state_calls_of_size(
    device: torch.device, size: int, full: int, group: dist.ProcessGroup | None = None
) -> Iterator[Collective]:
    """Yield, on CPUs, FSDP2's collectives of a group of parameters of about `full` bytes, which has buffers of its own for each
    call, between which and the tensors it copies. On GPUs the copies run beside compute, at memory bandwidth."""
    if device.type != "cpu":
        return
    count = full // 4 // (size * PARAMETERS) * size * PARAMETERS or size * PARAMETERS
    yield "parameter_gather", 4.0 * count, partial(_gather_parameters, torch.ones(count // size), size, group)
    gradients = torch.ones(count).chunk(PARAMETERS)
    yield "gradient_scatter", 4.0 * count, partial(_scatter_gradients, gradients, size, group)


def _gather_parameters(shard: torch.Tensor, size: int, group: dist.ProcessGroup | None) -> None:
    """All-gather into a flat buffer, and copy each parameter out of it."""
    whole = shard.new_empty(size * shard.numel())
    dist.all_gather_into_tensor(whole, shard.clone(), group=group)
    each = shard.numel() // PARAMETERS
    out = [shard.new_empty(size, each) for _ in range(PARAMETERS)]
    torch.split_with_sizes_copy(whole.view(size, -1), [each] * PARAMETERS, dim=1, out=out)


def _scatter_gradients(gradients: Sequence[torch.Tensor], size: int, group: dist.ProcessGroup | None) -> None:
    """Copy new gradients into a flat buffer, and reduce-scatter it."""
    new = [gradient.clone() for gradient in gradients]
    flat = torch.cat([gradient.view(size, -1) for gradient in new], dim=1).view(-1)
    dist.reduce_scatter_tensor(flat.new_empty(flat.numel() // size), flat, group=group)


def _shift(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Send to the next rank while receiving from the one before, as a pipeline's ranks do."""
    here, size = dist.get_rank(group), dist.get_world_size(group)
    ends = (dist.isend, sent, (here + 1) % size), (dist.irecv, received, (here - 1) % size)
    requests = [dist.P2POp(way, tensor, group=group, group_peer=peer) for way, tensor, peer in ends]
    for work in dist.batch_isend_irecv(requests):
        work.wait()
