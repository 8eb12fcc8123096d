"""The devices of each pipeline stage, also on different devices: stages are neighbours, in the order of the groups; and the
point-to-point transfers between stages: what crosses a cut of the model, over which link, and in what time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.bottleneck import bottleneck_device, fastest_device
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import AxisLink, Device, Link, NodeGroup
from autopar.cost_models.hardware.measured_collectives import STATE_KINDS
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.step.call_trace import CallTrace
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS, Axis, Mesh
from autopar.ir.placement import Shard


def stage_cluster(cluster: Cluster, stages: int) -> Cluster:
    """Return the devices of one of `stages` equal pipeline stages, on the same links. PlanError where they do not divide."""
    if stages == 1:
        return cluster
    if cluster.size % stages:
        raise PlanError(f"{cluster.name} has {cluster.size} devices, which {stages} pipeline stages do not divide")
    return replace(cluster, size=cluster.size // stages)


def stage_clusters(cluster: Cluster, stages: int) -> tuple[Cluster, ...]:
    """Return the devices of each stage. A stage on several groups of devices has the bottleneck of them."""
    whole = stage_cluster(cluster, stages)
    if stages == 1 or len({group.device for group in cluster.groups}) < 2:
        return (whole,) * stages
    starts = [sum(group.size for group in cluster.groups[:number]) for number in range(len(cluster.groups))]
    out = []
    for stage in range(stages):
        first, end = stage * whole.size, (stage + 1) * whole.size
        touched = [
            group for start, group in zip(starts, cluster.groups, strict=True) if start < end and first < start + group.size
        ]
        out.append(_cluster_of_groups(whole, touched))
    return tuple(out)


def _cluster_of_groups(whole: Cluster, groups: list[NodeGroup]) -> Cluster:
    if len({group.device for group in groups}) > 1:
        return replace(whole, device=bottleneck_device([group.device for group in groups]), groups=())
    one = groups[0]
    links = (*one.links[:-1], replace(one.links[-1], devices=max(whole.size, one.links[-1].devices)))
    return replace(whole, device=one.device, links=links if len(groups) == 1 else whole.links, groups=())


def fastest_stage_cluster(cluster: Cluster, stages: int) -> Cluster:
    """Return devices at least as good, in every figure, as those of any stage: for lower bounds."""
    clusters = stage_clusters(cluster, stages)
    if len({each.device for each in clusters}) < 2:
        return clusters[0]
    best = max(clusters, key=lambda each: each.links[0].bandwidth_bytes_per_second)
    return replace(best, device=fastest_device([each.device for each in clusters]))


def cluster_for_bounds(cluster: Cluster) -> Cluster:
    """Return a cluster on which no plan takes longer than on `cluster`, and a batch at once is never slower than in
    micro-batches, which the bounds of solve/bounds rest on: measured tables without what makes a large message dearer than
    several small ones, and no fresh pages. State, whose messages do not depend on the number of micro-batches, keeps its prices.
    `cluster` itself where that changes nothing."""
    device, links = _part_for_bounds(cluster.device, cluster.links)
    groups = tuple(NodeGroup(*_part_for_bounds(group.device, group.links), group.size) for group in cluster.groups)
    bound_cluster = replace(cluster, device=device, links=links, groups=groups)
    return cluster if bound_cluster == cluster else bound_cluster


def _part_for_bounds(device: Device, links: tuple[Link, ...]) -> tuple[Device, tuple[Link, ...]]:
    return replace(device, fresh_page_bytes_per_second=0.0), tuple(map(_link_for_bounds, links))


def _link_for_bounds(link: Link) -> Link:
    measured = tuple(replace(each, for_bounds=each.kind not in STATE_KINDS) for each in link.measured)
    return replace(link, measured=measured)


def send_seconds(graph: Graph, traces: Mapping[str, CallTrace], cut: int, repeated: Collection[str], link: AxisLink) -> float:
    """Return the seconds of one transfer over the cut before call `cut`. With scattered sends each rank of a model axis sends its
    share of an activation that all of them hold (arXiv 2104.04473, section 4.1), and the receivers all-gather the shares."""
    costs = next(iter(traces.values())).costs
    whole = cut_bytes(graph, traces, cut, repeated)
    if not costs.cluster.overlap.scattered_sends:
        return collective_seconds("point_to_point", whole, link)
    data = costs.mesh.index(DATA_AXIS)
    axes = [axis for axis, size in enumerate(costs.mesh.sizes) if axis != data and size > 1]
    share = cut_bytes(graph, traces, cut, repeated, prod(costs.mesh.sizes[axis] for axis in axes))
    gathers = [collective_seconds("all_gather", whole, links_of_axis(costs.cluster, costs.mesh, axis)) for axis in axes]
    return collective_seconds("point_to_point", share, link) + (sum(gathers) if share < whole else 0.0)


def cut_bytes(
    graph: Graph, traces: Mapping[str, CallTrace], cut: int, repeated: Collection[str] = (), scattered: int = 1
) -> float:
    """Return what one device sends over the cut before call `cut` for one micro-batch: every value that is produced before it,
    used after it and not `repeated`. Of values that are not sharded on the model axes it sends one of `scattered` shares."""
    data = next(iter(traces.values())).costs.mesh.index(DATA_AXIS)
    used = {name for call in graph.calls[cut:] for name in call.inputs} - set(repeated)
    total = 0.0
    for call in graph.calls[:cut]:
        if used.isdisjoint(call.outputs):
            continue
        trace = traces[call.block]
        for name, value, placements in zip(call.outputs, trace.costs.block.outputs, trace.plan.outputs, strict=True):
            if name in used:
                sharded = any(type(place) is Shard for axis, place in enumerate(placements) if axis != data)
                total += trace.costs.value_bytes(value, placements) / (1 if sharded else scattered)
    return total


def stage_link(cluster: Cluster, size: int, stage: int, other: int) -> AxisLink:
    """Return the link between two stages of `size` devices each. Stages are the outermost axis: a rank and its peer are a
    multiple of `size` apart."""
    here, there = stage * size, other * size
    joined = (
        link for link in cluster.links if all((here + r) // link.devices == (there + r) // link.devices for r in (0, size - 1))
    )
    return link_among_stages(cluster, size, next(joined, cluster.links[-1]), 2)


def link_among_stages(cluster: Cluster, size: int, link: Link, stages: int) -> AxisLink:
    """Return `link` as the link of an axis of so many stages of `size` devices each."""
    mesh = Mesh((Axis("pp", stages), Axis("rest", size)))
    return links_of_axis(replace(cluster, size=mesh.size, links=(link,)), mesh, 0)
