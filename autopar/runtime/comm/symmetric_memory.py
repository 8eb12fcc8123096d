"""Symmetric memory of the groups of mesh axes, in which compiled blocks run products in pieces beside collectives."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Mapping

import torch.distributed as dist

from ..compat.async_tp import Groups, set_up_symmetric_memory, symmetric_memory_problem
from ..device.mesh import MeshHandle
from .agreement import gather


def async_tp_groups(mesh: MeshHandle, axes: Mapping[str, int], compiled: bool = True) -> Groups:
    """Return the groups of these axes with symmetric memory, none where a rank has none: a warning then says why. Each axis with
    the elements that a tensor has at least whose collective runs in pieces. All ranks must call, `compiled` by inductor or not:
    those that are not send whole tensors."""
    handles = [mesh.axis(name) for name in axes if mesh.axis(name).size > 1]
    if not handles:
        return frozenset()
    problem = symmetric_memory_problem(mesh.device) if compiled else "a rank's blocks are not compiled by inductor"
    problems = gather((problem, socket.gethostname(), compiled))
    if not any(each for *_, each in problems):
        return frozenset()
    hosts = [host for _, host, _ in problems]
    found = [problem for problem, *_ in problems]
    for handle in handles:
        if len({hosts[rank] for rank in dist.get_process_group_ranks(mesh.group(handle.name))}) > 1:
            found.append(f"the axis {handle.name} spans several hosts")
    if not any(gather(any(found))):
        for handle in handles:
            found += gather(set_up_symmetric_memory(handle.group_name))
    found = gather([each for each in found if each])
    reason = next((each for problems in found for each in problems), "")
    if not reason:
        return frozenset((handle.group_name, axes[handle.name]) for handle in handles)
    if dist.get_rank() == 0:
        warnings.warn(
            f"collectives do not run in pieces beside products, though the plan is priced so ({reason}): steps take longer, else "
            "nothing changes",
            stacklevel=3,
        )
    return frozenset()
