"""Collectives that compiled blocks run in pieces beside products: the groups of mesh axes that do so, and the operators of those
without symmetric memory.

The operators stand for torch's over symmetric memory (``symm_mem.fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter``),
with the same arguments. In step i each of n ranks sends to the one i places on; what it has itself needs no message.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ..compat.async_tp import AsyncTpGroup, Groups, set_up_symmetric_memory, symmetric_memory_problem
from ..compat.collectives import coordinate_in, group_named, send_around
from ..device.mesh import MeshHandle
from .agreement import gather


def async_tp_groups(mesh: MeshHandle, axes: Mapping[str, int], compiled: bool = True, by_messages: bool = False) -> Groups:
    """Return the groups of these axes, each with the elements that a tensor has at least whose collective runs in pieces: over
    symmetric memory, or, where that was asked for, `by_messages`. None where a rank has neither: a warning then says why. All
    ranks must call, `compiled` by inductor or not: those that are not send whole tensors."""
    handles = [mesh.axis(name) for name in axes if mesh.axis(name).size > 1]
    if not handles:
        return frozenset()
    facts = gather((symmetric_memory_problem(mesh.device), socket.gethostname(), compiled))
    if not any(each for *_, each in facts):
        return frozenset()
    reason = "a rank's blocks are not compiled by inductor"
    if all(each for *_, each in facts):
        hosts = [host for _, host, _ in facts]
        found = [problem for problem, *_ in facts]
        for handle in handles:
            if len({hosts[rank] for rank in dist.get_process_group_ranks(mesh.group(handle.name))}) > 1:
                found.append(f"the axis {handle.name} spans several hosts")
        if not any(gather(any(found))):
            for handle in handles:
                found += gather(set_up_symmetric_memory(handle.group_name))
        found = gather([each for each in found if each])
        reason = next((each for problems in found for each in problems), "")
        if not reason or by_messages:
            return frozenset(AsyncTpGroup(each.group_name, axes[each.name], not reason) for each in handles)
    if dist.get_rank() == 0:
        warnings.warn(
            f"collectives do not run in pieces beside products, though the plan is priced so ({reason}): steps take longer, else "
            "nothing changes",
            stacklevel=3,
        )
    return frozenset()


@torch.library.custom_op("autopar::all_gather_products", mutates_args=())
def all_gather_products(shard: Tensor, matrices: list[Tensor], dim: int, group: str) -> tuple[Tensor, list[Tensor]]:
    """Gather ``shard[..., s, ..., k]`` along `dim`, and multiply with each ``[k, m]``: each shard as soon as it is there.

    Returns the whole ``[..., n s, ..., k]`` and the products ``[..., n s, ..., m]``.
    """
    size, place = group_named(group).size(), coordinate_in(group)
    rows = shard.movedim(dim, 0)
    own = rows.flatten(0, -2).contiguous()
    whole = own.new_empty(size, *own.shape)
    results = [own.new_empty(size, own.shape[0], each.shape[1]) for each in matrices]
    messages = [send_around(own, whole[(place - step) % size], step, group) for step in range(1, size)]
    whole[place] = own
    for step in range(size):
        source = (place - step) % size
        if step:
            messages[step - 1].wait()
        for result, matrix in zip(results, matrices, strict=True):
            torch.mm(whole[source], matrix, out=result[source])
    shape = size * rows.shape[0], *rows.shape[1:-1], -1
    return whole.view(shape).movedim(0, dim), [each.view(shape).movedim(0, dim) for each in results]


@all_gather_products.register_fake
def _(shard: Tensor, matrices: list[Tensor], dim: int, group: str) -> tuple[Tensor, list[Tensor]]:
    rows = shard.movedim(dim, 0)
    shape = group_named(group).size() * rows.shape[0], *rows.shape[1:-1]
    whole, *results = (rows.new_empty(*shape, each.shape[-1]).movedim(0, dim) for each in (shard, *matrices))
    return whole, results


@torch.library.custom_op("autopar::product_reduce_scatter", mutates_args=())
def product_reduce_scatter(x: Tensor, matrix: Tensor, op: str, dim: int, group: str) -> Tensor:
    """Multiply ``x[..., n s, ..., k]`` with ``[k, m]``, and reduce to ``[..., s, ..., m]``, this rank's shard along `dim`: each
    rank's rows are sent as soon as they are computed, its own come last. `op`: sum or avg."""
    size, place = group_named(group).size(), coordinate_in(group)
    rows = x.movedim(dim, 0)
    rows = rows.reshape(size, rows.shape[0] // size, *rows.shape[1:])
    shape = rows.shape[1:-1]
    parts = rows.new_empty(size, prod(shape), matrix.shape[1])
    messages = []
    for step in range(1, size):
        product = torch.mm(rows[(place + step) % size].reshape(-1, x.shape[-1]), matrix)
        messages.append(send_around(product, parts[(place - step) % size], step, group))
    torch.mm(rows[place].reshape(-1, x.shape[-1]), matrix, out=parts[place])
    for message in messages:
        message.wait()
    result = parts.sum(0) if op == "sum" else parts.mean(0)
    return result.view(*shape, -1).movedim(0, dim).contiguous()


@product_reduce_scatter.register_fake
def _(x: Tensor, matrix: Tensor, op: str, dim: int, group: str) -> Tensor:
    shape = [*x.shape[:-1], matrix.shape[1]]
    shape[dim] //= group_named(group).size()
    return x.new_empty(shape)
