"""Point-to-point transfers between pipeline stages: what crosses a cut of the model, over which link, and in what time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import AxisLink, Link
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.step.call_trace import CallTrace
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS, Axis, Mesh
from autopar.ir.placement import Shard


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
