"""The grid: what the search enumerates outside of the ILP. It is finite, and the certificate has a line for every point of it.

A point is a mesh, a number of micro-batches, a state group, and a pipeline: its stages, the model chunks of a stage and its
schedule. The mesh is that of one pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import BatchError, ClusterError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS, EXPERT_AXIS, Mesh
from autopar.ir.plan import BlockPlan, Candidate, Precision
from autopar.operations.experts import indivisible_experts
from autopar.operations.notation.notation import BATCH_DIMS
from autopar.rules.registry import Registry
from autopar.solve.space.meshes import meshes
from autopar.solve.space.micro_batches import MICRO, expert_axis_fits, micro_batch_counts, why_one_micro_batch

GROUP = "zero_group"
"""Forces the number of neighbours on the data axis that share one copy of the state; 0 is all of them."""


@dataclass(frozen=True, slots=True)
class GridPoint:
    """A candidate of the grid. State is sharded over `zero_group` neighbours on the data axis (0: all). Without a `schedule` a
    point of several pipeline stages stands for all of its schedules, with any number of model chunks (`virtual`)."""

    mesh: Mesh
    micro_batches: int = 1
    zero_group: int = 0
    stages: int = 1
    virtual: int = 1
    schedule: str = ""

    @staticmethod
    def of(candidate: Candidate) -> GridPoint:
        pipeline = candidate.pipeline
        of_pipeline = (pipeline.stages, pipeline.virtual, pipeline.schedule) if pipeline.stages > 1 else ()
        return GridPoint(candidate.mesh, candidate.micro_batches, candidate.zero_group, *of_pipeline)

    def candidate(self, blocks: tuple[BlockPlan, ...], batch: int, precision: Precision) -> Candidate:
        """Return the plan of these blocks at the point, without its pipeline."""
        return Candidate(self.mesh, blocks, batch, precision, micro_batches=self.micro_batches, zero_group=self.zero_group)

    def examples(self, batch: int) -> int:
        """Return the examples of one micro-batch on one data rank."""
        return batch // self.micro_batches // self.mesh.size_of(DATA_AXIS)

    def __str__(self) -> str:
        if self.stages > 1:
            chunks = f" x {self.virtual}" if self.virtual > 1 else ""
            schedule = f" ({self.schedule}{chunks})" if self.schedule else ""
            return f"pp={self.stages}{schedule} x {replace(self, stages=1)}"
        micro_batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"{self.mesh}{micro_batches}" + (f", state in groups of {self.zero_group}" if self.zero_group else "")


def grid_points(
    graph: Graph, size: int, node_size: int, force: Mapping[str, int], registry: Registry, ordered: bool = False
) -> tuple[GridPoint, ...]:
    """Return every point for a cluster of `size` devices in nodes of `node_size`, few micro-batches first, and one state group
    before several. `ordered`: as `meshes`.

    BatchError or ClusterError where what is forced leaves nothing.
    """
    if (indivisible := indivisible_experts(graph, force.get(EXPERT_AXIS, 1))) is not None:
        node, number = indivisible
        raise ClusterError(
            f"ep={force[EXPERT_AXIS]} does not divide the {number} experts of {node.module or node.name} ({node.source}): "
            f"force a divisor of {number}"
        )
    one_micro_batch = bool(why_one_micro_batch(graph, registry))
    experts = dispatches_tokens(graph, registry) and force.get(EXPERT_AXIS) != 1
    out = [
        GridPoint(mesh, micro_batches, group)
        for mesh in meshes(size, graph.batch, force, node_size, experts, ordered)
        for micro_batches in micro_batch_counts(graph.batch, mesh.size_of(DATA_AXIS), force, one_micro_batch)
        if expert_axis_fits(mesh, graph.batch, micro_batches, force, experts)
        for group in zero_groups(mesh, node_size, force)
    ]
    if not out and MICRO in force:
        reason = why_one_micro_batch(graph, registry)
        raise BatchError(
            f"micro={force[MICRO]} cannot be: {reason}" if reason
            else f"micro={force[MICRO]} times no data degree of these meshes divides the batch of {graph.batch}: force a divisor"
        )  # fmt: skip
    if not out and EXPERT_AXIS in force:
        raise BatchError(
            f"ep={force[EXPERT_AXIS]} shards the batch of a data rank, and no micro-batch of batch {graph.batch} divides by it: "
            "force a divisor"
        )
    if not out:
        raise ClusterError(f"{GROUP}={force[GROUP]} divides no data degree of these meshes: force a divisor")
    return tuple(out)


def least_memory_points(points: Iterable[GridPoint]) -> list[GridPoint]:
    """Return per stages and mesh the point with the smallest micro-batches and the widest state group."""

    def order(point: GridPoint) -> tuple[int, int]:
        return point.micro_batches, point.zero_group or point.mesh.size_of(DATA_AXIS)

    least: dict[tuple[Mesh, int], GridPoint] = {}
    for point in points:
        key = point.mesh, point.stages
        least[key] = max(least.get(key, point), point, key=order)
    return list(least.values())


def dispatches_tokens(graph: Graph, registry: Registry) -> bool:
    """Return whether some operation distributes the batch over another of its dimensions: tokens to experts."""
    ops = {node.op for block in graph.blocks for node in block.nodes}
    rules = filter(None, map(registry.rule, ops))
    return any(BATCH_DIMS in (function.factor, *function.also) for rule in rules for function in rule.functions)


def zero_groups(mesh: Mesh, node_size: int, force: Mapping[str, int]) -> tuple[int, ...]:
    """State groups: the whole data axis (0), the data ranks of one node, and in factors of four what lies between. A forced one
    must divide the data axis."""
    data = mesh.size_of(DATA_AXIS)
    if GROUP in force:
        group = force[GROUP]
        return () if group and data % group else (0 if group == data else group,)
    if force.get("zero") == 0:
        return (0,)
    out, group = [0], max(1, node_size // (mesh.size // data))
    while group < data:
        if group > 1 and data % group == 0:
            out.append(group)
        group *= 4
    return tuple(out)


def devices_per_node(cluster: Cluster) -> int:
    """Devices that the innermost of several link levels joins; all where there is one level."""
    return cluster.links[0].devices if len(cluster.links) > 1 else cluster.size
