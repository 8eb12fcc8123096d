"""Process groups that shard state or exchange tokens: subgroups of the data axis (HSDP), and data ranks beside expert
parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import AxisLink
from autopar.cost_models.hardware.mesh_links import links_across, links_of_axis, links_of_group
from autopar.errors import PlanError
from autopar.ir.mesh import DATA_AXIS, Axis, Mesh
from autopar.ir.placement import Placements, Shard
from autopar.operations.notation.rule import OperationCollective


def state_links(cluster: Cluster, mesh: Mesh, zero_group: int) -> tuple[AxisLink, AxisLink | None]:
    """Return the links of the ranks that shard one copy of the state, and those that replicate it (None: there is one copy only).

    PlanError where `zero_group` (0: the whole data axis) does not divide the data axis.
    """
    axis = mesh.index(DATA_AXIS)
    size = mesh.sizes[axis]
    if zero_group in (0, size):
        return links_of_axis(cluster, mesh, axis), None
    if size % zero_group:
        raise PlanError(f"state in groups of {zero_group} does not divide {size} data ranks: take a divisor")
    return links_of_group(cluster, mesh, axis, zero_group), links_across(cluster, mesh, axis, zero_group)


def stage_link(cluster: Cluster, mesh: Mesh) -> AxisLink:
    """Return the links of all ranks of a stage."""
    return links_of_axis(cluster, Mesh((Axis(DATA_AXIS, mesh.size),)), 0)


def expert_links(cluster: Cluster, mesh: Mesh, expert_parallel: int, placed: Sequence[Placements]) -> AxisLink:
    """Return the links of the ranks that replicate the same experts, where experts are sharded over `cut` neighbours.

    Neighbours are those on the data axis where the model axes cut each expert; else they are ranks, model axes included.
    PlanError where `cut` does not divide them.
    """
    axis = mesh.index(DATA_AXIS)
    sliced = any(isinstance(place, Shard) for at in placed for other, place in enumerate(at) if other != axis)
    whole = mesh.sizes[axis] if sliced else mesh.size
    if whole % expert_parallel:
        raise PlanError(f"experts in groups of {expert_parallel} do not divide {whole} ranks: take a divisor")
    if sliced:
        return links_across(cluster, mesh, axis, expert_parallel)
    return links_of_axis(cluster, Mesh((Axis(DATA_AXIS, whole // expert_parallel), Axis("ep", expert_parallel))), 0)


def operation_collective_seconds(
    collective: OperationCollective,
    full_bytes: float,
    axis: int,
    factors: Sequence[str],
    shard_counts: Sequence[int],
    mesh: Mesh,
    cluster: Cluster,
) -> float:
    """Return the seconds of one collective inside an operation, on `axis`, which shards a factor of the operation. `full_bytes`
    is the global tensor; `factors` and `cuts` tell per axis which factor it shards, and into how many parts."""
    factor = factors[axis]
    others = [other for other in range(len(factors)) if factors[other] != factor]
    with_tokens = [
        other for other in others if collective.tokens and factors[other].startswith("batch") and shard_counts[other] > 1
    ]
    full = full_bytes / prod(shard_counts[other] for other in others if other not in with_tokens)
    size = mesh.sizes[axis] * prod(mesh.sizes[other] for other in with_tokens)
    group = min(collective.group or size, size)
    if with_tokens:  # neighbouring ranks: the model axes are inside
        links = links_of_axis(cluster, Mesh((Axis(DATA_AXIS, mesh.size // group), Axis("ep", group))), 1)
    else:
        links = links_of_axis(cluster, mesh, axis) if group == size else links_of_group(cluster, mesh, axis, group)
    if collective.copies > 1 and links.levels:
        return sent_once_seconds(full * group / size, collective.copies, links)
    return collective_seconds(collective.kind, full * group / size, links)


def sent_once_seconds(full_bytes: float, copies: int, links: AxisLink) -> float:
    """Return the seconds of an all-to-all of which a token is sent to each node once, to the member with the sender's index, and
    forwarded inside the node meanwhile (DeepEP; DeepSeek-V3, arXiv 2412.19437, section 3.2.2): a step for each other node, not
    for each of their members. `full_bytes` counts all copies."""
    outer = links.levels[-1]
    share = distinct_share(copies, outer.width)
    if len(links.levels) == 1:
        return collective_seconds("all_to_all", share * full_bytes, links)
    inside = links.size // outer.width
    across = replace(links, size=outer.width, levels=(outer,))
    within = replace(links, size=inside, levels=links.levels[:-1])
    return max(
        collective_seconds("all_to_all", share * full_bytes / inside, across),
        collective_seconds("all_to_all", full_bytes / outer.width, within),
    )


def distinct_share(copies: int, nodes: int) -> float:
    """Return the share of `copies`, sent to random places, that is the first to its place: ``n (1 - (1 - 1/n)^k) / k``."""
    return nodes * (1 - (1 - 1 / nodes) ** copies) / copies
