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
