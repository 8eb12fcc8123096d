"""Ways to sum all gradients of a device over the data axis, without overlap: one all-reduce, or parameter servers."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.comm.collectives import fastest_algorithm, parameter_server_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.state.state_group import state_group
from autopar.cost_models.step.stage_devices import stage_cluster
from autopar.cost_models.tensors.sizes import itemsize
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Candidate


@dataclass(frozen=True, slots=True)
class GradientExchange:
    """A method of exchange: a device's bytes in the reduce dtype, the seconds, and their ratio to the all-reduce."""

    method: str
    bytes: float
    seconds: float
    relative: float


def gradient_exchanges(graph: Graph, candidate: Candidate, cluster: Cluster) -> tuple[GradientExchange, ...]:
    """Return the fastest all-reduce, and one or as many parameter servers as the last link level has members. Nothing on one data
    rank.

    With several pipeline stages: of their mean gradient bytes, on the devices of one of them.
    """
    mesh = candidate.mesh
    if mesh.size_of(DATA_AXIS) == 1:
        return ()
    trainable = 0.0
    for block in graph.blocks:
        stored = zip(block.parameters, candidate.block(block.name).parameters, strict=True)
        group = state_group(stored, mesh, candidate.precision)
        trainable += group.trainable * graph.count(block.name) / candidate.pipeline.stages
    gradient_bytes = trainable * itemsize(candidate.precision.reduction)
    link = links_of_axis(stage_cluster(cluster, candidate.pipeline.stages), mesh, mesh.index(DATA_AXIS))
    reduced = fastest_algorithm("all_reduce", gradient_bytes, link)
    exchanges = [(f"all-reduce, {reduced}", reduced.seconds)]
    for servers in dict.fromkeys((1, link.levels[-1].width)):
        name = "one parameter server" if servers == 1 else f"{servers} parameter servers"
        exchanges.append((name, parameter_server_seconds(gradient_bytes, link, servers)))
    return tuple(GradientExchange(name, gradient_bytes, seconds, seconds / reduced.seconds) for name, seconds in exchanges)
