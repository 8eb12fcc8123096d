"""Activation partition (ZeRO-R, arXiv 1910.02054, section 6.1): which saved tensors a plan may keep in parts between forward and
backward."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.placement import Invariant, Placements, Replicate, format_placements
from autopar.ir.plan import BlockPlan


def replicated_on(placements: Placements, index: int) -> bool:
    """Return whether all ranks of the mesh axis hold the same whole value."""
    return isinstance(placements[index], Replicate | Invariant)


def chosen_tensors(plan: BlockPlan) -> bool:
    """Return whether it is decided value by value what the block saves, and where."""
    return bool(plan.recompute_nodes or plan.recompute_conversions or plan.offload or plan.partition_saved)


def saving_everything(plan: BlockPlan) -> BlockPlan:
    """The plan with all that its backward needs saved whole, on the device."""
    return replace(plan, recompute=False, recompute_nodes=(), recompute_conversions=(), offload=(), partition_saved=())


def verify_partition(where: str, plan: BlockPlan, reached: Mapping[str, Collection[Placements]], mesh: Mesh) -> None:
    """PlanError where a value of `partition_saved` is not there in that placement, not whole on each rank of its axis, or also
    saved in another way. `reached`: the placements that each value takes on."""
    seen = {(value, at): "offload" for value, at in plan.offload}
    for value, at, axis in plan.partition_saved:
        if axis not in mesh.names or axis == DATA_AXIS or mesh.size_of(axis) == 1:
            raise PlanError(f"{where}: {value} is partitioned over {axis!r}: write a model axis of {mesh} with several ranks")
        if at not in reached.get(value, ()):
            raise PlanError(f"{where}: {value} is to be partitioned as {format_placements(at)!r}, which the block does not have")
        if not replicated_on(at, mesh.index(axis)):
            text = f"{where}: {value} is {format_placements(at)!r}, so each rank of {axis} saves a part of its own already"
            raise PlanError(f"{text}: leave it out of partition_saved")
        if (value, at) in seen:
            raise PlanError(f"{where}: {value} as {format_placements(at)!r} is in {seen[value, at]} too: save it in one way")
        seen[value, at] = "partition_saved"
