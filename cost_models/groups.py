"""Which ranks share one copy of the state: parts of the data axis (HSDP), and what is left of it beside expert parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.hardware import AxisLink, Cluster, links_across, links_of_axis, links_of_group
from autopar.errors import PlanError
from autopar.ir.mesh import DATA_AXIS, Axis, Mesh
from autopar.ir.placement import Placements, Shard
from autopar.rules.strategy import InnerCollective


def state_links(cluster: Cluster, mesh: Mesh, zero_group: int) -> tuple[AxisLink, AxisLink | None]:
    """What the ranks that share one copy of the state are joined by, and what joins equal places of different copies.

    PlanError where `zero_group` (0: the whole data axis) does not divide the data axis.
    """
    axis = mesh.index(DATA_AXIS)
    size = mesh.sizes[axis]
    if zero_group in (0, size):
        return links_of_axis(cluster, mesh, axis), None
    if size % zero_group:
        raise PlanError(f"state in groups of {zero_group} does not divide {size} data ranks: take a divisor")
    return links_of_group(cluster, mesh, axis, zero_group), links_across(cluster, mesh, axis, zero_group)


def expert_links(cluster: Cluster, mesh: Mesh, cut: int, placed: Sequence[Placements]) -> AxisLink:
    """What joins the ranks that hold the same experts, where experts are cut over `cut` neighbours.

    Neighbours are those on the data axis where the model axes cut each expert; else they are ranks, model axes included.
    PlanError where `cut` does not divide them.
    """
    axis = mesh.index(DATA_AXIS)
    sliced = any(isinstance(place, Shard) for at in placed for other, place in enumerate(at) if other != axis)
    whole = mesh.sizes[axis] if sliced else mesh.size
    if whole % cut:
        raise PlanError(f"experts in groups of {cut} do not divide {whole} ranks: take a divisor")
    if sliced:
        return links_across(cluster, mesh, axis, cut)
    return links_of_axis(cluster, Mesh((Axis(DATA_AXIS, whole // cut), Axis("ep", cut))), 0)


def inner_seconds(
    collective: InnerCollective,
    full_bytes: float,
    axis: int,
    label: Sequence[str],
    cuts: Sequence[int],
    mesh: Mesh,
    cluster: Cluster,
) -> float:
    """Seconds of what a named function communicates on `axis`, where its factor is cut. `full_bytes` is the global tensor;
    `label` and `cuts` tell per axis which factor is cut, and into how many parts."""
    factor = label[axis]
    others = [other for other in range(len(label)) if label[other] != factor]
    with_tokens = [other for other in others if collective.tokens and label[other].startswith("batch") and cuts[other] > 1]
    full = full_bytes / prod(cuts[other] for other in others if other not in with_tokens)
    size = mesh.sizes[axis] * prod(mesh.sizes[other] for other in with_tokens)
    group = min(collective.group or size, size)
    if with_tokens:  # neighbouring ranks: the model axes are inside
        links = links_of_axis(cluster, Mesh((Axis(DATA_AXIS, mesh.size // group), Axis("ep", group))), 1)
    else:
        links = links_of_axis(cluster, mesh, axis) if group == size else links_of_group(cluster, mesh, axis, group)
    sent = full * group / size * (distinct_share(collective.copies, links.levels[-1].width) if links.levels else 1.0)
    return collective_seconds(collective.kind, sent, links)


def distinct_share(copies: int, places: int) -> float:
    """Of `copies` that go to places at random, the share that goes to a place for the first time: ``n (1 - (1 - 1/n)^k) / k``."""
    return places * (1 - (1 - 1 / places) ** copies) / copies
