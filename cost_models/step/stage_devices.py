"""The devices of each pipeline stage, also on different devices. Stages are neighbours, in the order of the groups."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_models.hardware.bottleneck import bottleneck_device, fastest_device
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import Device, Link, NodeGroup
from autopar.cost_models.hardware.measured_collectives import STATE_KINDS
from autopar.errors import PlanError


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
