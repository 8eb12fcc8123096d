"""The cluster: nodes, links, and which mesh axis lies on which."""

from __future__ import annotations

from math import prod
from typing import Any

from autopar.cost_models.breakdown.step_timeline import StepTimeline
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import AxisLink, Link
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.step.stage_devices import stage_cluster, stage_link
from autopar.ir.describe import describe_axis
from autopar.ir.mesh import DATA_AXIS, PIPELINE_AXIS
from autopar.ir.plan_file.plan_file import Plan

_EVERY_DEVICE = 64
"""Clusters up to so many devices are drawn whole; of larger ones, nodes of each end."""


def cluster_facts(plan: Plan, cluster: Cluster, timeline: StepTimeline) -> dict[str, Any]:
    """Return the links from the innermost level outwards, the mesh axes with the levels that their groups use, and the kinds of
    devices. Ranks are row-major over the axes, outermost first."""
    return {
        "name": cluster.name,
        "note": cluster.note,
        "size": cluster.size,
        "node": min(cluster.size, cluster.links[0].devices) if cluster.links else cluster.size,
        "shown": _EVERY_DEVICE,
        "links": [_link(each) for each in cluster.links],
        "devices": [
            {"name": device.name, "count": size, "memory_bytes": device.memory_bytes}
            for device, size in ([(each.device, each.size) for each in cluster.groups] or [(cluster.device, cluster.size)])
        ],
        "axes": _axes(plan, cluster, timeline),
    }


def _link(link: Link) -> dict[str, Any]:
    return {
        "name": link.name,
        "devices": link.devices,
        "kind": link.kind,
        "bytes_per_second": link.bandwidth_bytes_per_second / link.oversubscription,
        "latency_seconds": link.latency_seconds,
    }


def _axes(plan: Plan, cluster: Cluster, timeline: StepTimeline) -> list[dict[str, Any]]:
    """Return the pipeline axis and the mesh's, outermost first, each with its stride in ranks."""
    candidate, mesh, evaluation = plan.candidate, plan.candidate.mesh, timeline.evaluation
    stages, out = candidate.pipeline.stages, []
    if stages > 1:
        sent = sum(chunk.send_seconds for chunk in timeline.chunks)
        out.append(
            {
                "name": PIPELINE_AXIS, "size": stages, "stride": mesh.size, "shards": ["layers, by stages"],
                "levels": _levels(stage_link(cluster, mesh.size, 0, 1)), "seconds": None, "exposed": None,
                "note": f"{sent:.3g} s for one micro-batch over all cuts, one way",
            }
        )  # fmt: skip
    part = stage_cluster(cluster, stages)
    seconds, exposed = dict(evaluation.axis_seconds), dict(evaluation.exposed_axis_seconds)
    for index, axis in enumerate(mesh.axes):
        data = axis.name == DATA_AXIS
        shards = ["the batch", "state (ZeRO)"][: 1 + any(block.zero for block in candidate.blocks)]
        waits = timeline.evaluation.stall_seconds if data else 0.0
        out.append(
            {
                "name": axis.name, "size": axis.size, "stride": prod(mesh.sizes[index + 1 :]),
                "shards": shards if data else list(describe_axis(plan.graph, candidate, index)),
                "levels": _levels(links_of_axis(part, mesh, index)),
                "seconds": seconds.get(axis.name), "exposed": exposed.get(axis.name, 0.0) + waits,
                "note": f"state in groups of {candidate.zero_group}" if data and candidate.zero_group else "",
            }
        )  # fmt: skip
    return out


def _levels(link: AxisLink) -> list[dict[str, Any]]:
    return [
        {"link": level.link.name, "width": level.width, "bytes_per_second": level.link.bandwidth_bytes_per_second}
        for level in link.levels
    ]
