"""Pipeline stages on a cluster of different devices: which group a stage sits on. Stages are neighbours, in the order of the
groups."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_models.devices import NodeGroup
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.pipeline import part_of
from autopar.cost_models.slowest import fastest_device, slowest_device


def stage_parts(cluster: Cluster, stages: int) -> tuple[Cluster, ...]:
    """The devices of each stage. One that lies on several groups has what all of these have: it waits for the slowest."""
    whole = part_of(cluster, stages)
    if stages == 1 or len({group.device for group in cluster.groups}) < 2:
        return (whole,) * stages
    starts = [sum(group.size for group in cluster.groups[:number]) for number in range(len(cluster.groups))]
    out = []
    for stage in range(stages):
        first, behind = stage * whole.size, (stage + 1) * whole.size
        touched = [
            group for start, group in zip(starts, cluster.groups, strict=True) if start < behind and first < start + group.size
        ]
        out.append(_part(whole, touched))
    return tuple(out)


def _part(whole: Cluster, groups: list[NodeGroup]) -> Cluster:
    if len({group.device for group in groups}) > 1:
        return replace(whole, device=slowest_device([group.device for group in groups]), groups=())
    one = groups[0]
    links = (*one.links[:-1], replace(one.links[-1], devices=max(whole.size, one.links[-1].devices)))
    return replace(whole, device=one.device, links=links if len(groups) == 1 else whole.links, groups=())


def fastest_part(cluster: Cluster, stages: int) -> Cluster:
    """Devices that are in no figure worse than those of any stage: for bounds."""
    parts = stage_parts(cluster, stages)
    if len({part.device for part in parts}) < 2:
        return parts[0]
    best = max(parts, key=lambda part: part.links[0].bandwidth_bytes_per_second)
    return replace(best, device=fastest_device([part.device for part in parts]))
