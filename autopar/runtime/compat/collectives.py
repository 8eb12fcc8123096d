"""Functional collectives: torch.ops._c10d_functional, seen on 2.13.0. They return while in flight; `wait_tensor` waits.

On gloo 2.13.0 all of them work, bfloat16 sums, int64, bool gathers, reduce_scatter and all_to_all included.
"""

from __future__ import annotations

from typing import Any

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
    """The name under which functional collectives know the group of a mesh axis. Seen on 2.13.0."""
    name: str = device_mesh.get_group(axis).group_name
    return name


def own_store() -> Any:
    """The default group's store over a new connection, for another thread. Seen on 2.13.0."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()
