"""The least bytes and seconds of a transfer between two pipeline stages, wherever the model is cut."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.step.stage_devices import stage_clusters, stage_link
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.pipeline.stage_values import repeatable_values
from autopar.solve.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class StageTransfer:
    """The transfer of a micro-batch from a stage to the next one, or back. `on_data_links`: the communication of state uses the
    same links."""

    seconds: float = 0.0
    on_data_links: bool = False


def stage_transfers(problem: Problem, cluster: Cluster, stages: int) -> tuple[StageTransfer, ...]:
    """Return the transfers from each stage to the next one, and from the last one to the first. `problem` is of one stage,
    `cluster` the whole one."""
    size, mesh = least_cut_bytes(problem), problem.mesh
    data = links_of_axis(stage_clusters(cluster, stages)[0], mesh, mesh.index(DATA_AXIS))
    links = [stage_link(cluster, mesh.size, stage, (stage + 1) % stages) for stage in range(stages)]
    return tuple(
        StageTransfer(collective_seconds("point_to_point", size, link), data.shares(link)) if size else StageTransfer()
        for link in links
    )


def least_cut_bytes(problem: Problem) -> float:
    """Return the least bytes that one device sends over any cut of the model for one micro-batch: the values that cross it, each
    at its smallest placement, but those that every stage may compute for itself; where nothing else crosses, there is no cut."""
    graph, boundary, sizes = problem.graph, problem.boundary, problem.mesh.sizes
    repeatable, last_reader = repeatable_values(graph), dict[str, int]()
    for index, call in enumerate(graph.calls):
        last_reader.update(dict.fromkeys(call.inputs, index))
    data = problem.mesh.index(DATA_AXIS)
    scattered = prod(size for axis, size in enumerate(sizes) if axis != data) if problem.cluster.overlap.scattered_sends else 1
    smallest: dict[tuple[str, str], float] = {}  # the same for all calls of a block
    changes = [0.0] * (len(graph.calls) + 1)
    for index, call in enumerate(graph.calls):
        table = problem.blocks[call.block]
        for name, value in zip(call.outputs, table.block.outputs, strict=True):
            number = boundary.class_of(name)
            if number is None or name in repeatable or last_reader.get(name, index) <= index:
                continue
            key = call.block, value
            if key not in smallest:
                smallest[key] = min(table.costs.value_bytes(value, at) for at in problem.placements[number]) / scattered
            changes[index + 1] += smallest[key]
            changes[last_reader[name] + 1] -= smallest[key]
    # a cut before each call but the first
    crossing = list(accumulate(changes))[1 : len(graph.calls)]
    return min((size for size in crossing if size > 1e-6), default=0.0)
