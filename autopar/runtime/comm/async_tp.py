"""Groups of mesh axes whose collectives compiled blocks run in pieces beside products."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Mapping

import torch.distributed as dist

from ..compat.async_tp import AsyncTpGroup, Groups, set_up_symmetric_memory, symmetric_memory_problem
from ..device.mesh import MeshHandle
from . import async_tp_products  # noqa: F401  registers the operators of groups without symmetric memory
from .agreement import gather


def async_tp_groups(mesh: MeshHandle, axes: Mapping[str, int], compiled: bool = True) -> Groups:
    """Return the groups of these axes, each with the elements that a tensor has at least whose collective runs in pieces: over
    symmetric memory where all ranks of the job have it, else by messages. All ranks must call, `compiled` by inductor or not:
    those that are not send whole tensors, as then all do, and a warning says so."""
    handles = [mesh.axis(name) for name in axes if mesh.axis(name).size > 1]
    if not handles:
        return frozenset()
    facts = gather((compiled, symmetric_memory_problem(mesh.device), socket.gethostname()))
    if not all(each for each, *_ in facts):
        if dist.get_rank() == 0 and any(each for each, *_ in facts):
            warnings.warn(
                "collectives do not run in pieces beside products, though the plan is priced so (a rank's blocks are not "
                "compiled by inductor): steps take longer, else nothing changes",
                stacklevel=3,
            )
        return frozenset()
    hosts = [host for *_, host in facts]
    groups = (dist.get_process_group_ranks(mesh.group(each.name)) for each in handles)
    symmetric = not any(problem for _, problem, _ in facts)
    symmetric = all(gather(symmetric and all(len({hosts[rank] for rank in ranks}) == 1 for ranks in groups)))
    for handle in handles if symmetric else ():
        symmetric = all(gather(symmetric and not set_up_symmetric_memory(handle.group_name)))
    return frozenset(AsyncTpGroup(each.group_name, axes[each.name], symmetric) for each in handles)
