"""Functional collectives: torch.ops._c10d_functional, seen on 2.13.0. They return while in flight; `wait_tensor` waits.

On gloo 2.13.0 all of them work, bfloat16 sums, int64, bool gathers, reduce_scatter and all_to_all included.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist


def all_reduce(flat: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """Reduce ``[k] -> [k]`` over the ranks; `op` is sum, max or min."""
    result: torch.Tensor = torch.ops._c10d_functional.all_reduce(flat, op, group)
    return result


def all_gather(flat: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Gather ``[k] -> [size * k]``."""
    result: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor(flat, size, group)
    return result


def reduce_scatter(flat: torch.Tensor, op: str, size: int, group: str) -> torch.Tensor:
    """Reduce ``[size * k] -> [k]``, a part for each rank."""
    result: torch.Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(flat, op, size, group)
    return result


def all_to_all(flat: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Exchange ``[size * k] -> [size * k]``, k elements to each rank."""
    splits = [flat.shape[0] // size] * size
    result: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(flat, splits, splits, group)
    return result


def all_to_all_rows(rows: torch.Tensor, receive: list[int], send: list[int], group: str) -> torch.Tensor:
    """Exchange ``[sum(send), ...] -> [sum(receive), ...]``: so many rows to and from each rank, or none. Seen on 2.13.0, on gloo
    too."""
    result: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(rows, receive, send, group)
    return result


def wait_tensor(raw: torch.Tensor) -> torch.Tensor:
    """Wait for a functional collective; the tensor."""
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(raw)
    return result


def group_name(device_mesh: Any, axis: str) -> str:
    """The name under which functional collectives know the group of a mesh axis. Ranks whose meshes are alike have the same one,
    and so compile the same graphs: torch numbers groups, each of which has other ranks. Seen on 2.13.0."""
    group, bindings = device_mesh.get_group(axis), cast(Any, torch._C._distributed_c10d)
    sizes = zip(device_mesh.mesh_dim_names, device_mesh.mesh.shape, strict=True)
    name = f"{axis} of {' x '.join(f'{each}={size}' for each, size in sizes)}"
    with suppress(RuntimeError, KeyError):  # no mesh before had it, or its group was destroyed, which keeps the name
        ranks = [dist.get_process_group_ranks(each) for each in (group_named(name), group)]
        if ranks[0] != ranks[1]:  # a mesh of other ranks
            return str(group.group_name)
    bindings._unregister_process_group(name)
    bindings._register_process_group(name, group)
    return name


def group_named(group: str) -> Any:
    """Return the group of that name. Seen on 2.13.0."""
    return cast(Any, torch._C._distributed_c10d)._resolve_process_group(group)


def coordinate_in(group: str) -> int:
    """Return this rank's place in the group of that name."""
    return int(group_named(group).rank())


def send_around(x: torch.Tensor, into: torch.Tensor, step: int, group: str) -> Any:
    """Start to send ``x[k, ...]`` to the rank `step` places on, and to receive that of the one as many places back; the message
    in flight, which is waited for by ``wait()``."""
    ring = group_named(group)
    size, place = ring.size(), ring.rank()
    to, back = ([x.shape[0] * (rank == (place + way) % size) for rank in range(size)] for way in (step, -step))
    return dist.all_to_all_single(into, x, back, to, group=ring, async_op=True)


def own_store() -> Any:
    """The default group's store over a new connection, for another thread. Seen on 2.13.0."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()
