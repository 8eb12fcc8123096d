"""For `inspect --comm`: the gradients of one step exchanged by collectives, and by parameter servers for comparison."""

from __future__ import annotations

from typing import Any

from autopar.ir.mesh import DATA_AXIS
from autopar.ir.planfile import Plan


def exchanges(plan: Plan) -> list[dict[str, Any]]:
    """Ways, with their seconds, in which the data axis could add up the gradients of one device and get the result, in one piece
    and not overlapped. Empty on one data rank, and where the plan does not describe its cluster. Of a pipeline: the mean of its
    stages."""
    from autopar.cost_models.collectives import chosen, parameter_server_seconds
    from autopar.cost_models.hardware import Cluster, links_of_axis
    from autopar.cost_models.pipeline import part_of
    from autopar.cost_models.sizes import itemsize
    from autopar.cost_models.state import group_of

    candidate, mesh = plan.candidate, plan.candidate.mesh
    if mesh.size_of(DATA_AXIS) == 1 or not plan.document.cluster.description:
        return []
    held = 0.0
    for block in plan.graph.blocks:
        stored = zip(block.parameters, candidate.block(block.name).parameters, strict=True)
        held += group_of(stored, mesh).trainable * plan.graph.count(block.name) / candidate.pipeline.stages
    sent = held * itemsize(candidate.precision.master)
    cluster = part_of(Cluster.from_dict(plan.document.cluster.description), candidate.pipeline.stages)
    link = links_of_axis(cluster, mesh, mesh.index(DATA_AXIS))
    way = chosen("all_reduce", sent, link)
    found = [(f"all-reduce, {way}", way.seconds)]
    for servers in dict.fromkeys((1, link.levels[-1].width)):
        name = "one parameter server" if servers == 1 else f"{servers} parameter servers"
        found.append((name, parameter_server_seconds(sent, link, servers)))
    return [{"way": name, "bytes": sent, "seconds": taken, "times": taken / way.seconds} for name, taken in found]
