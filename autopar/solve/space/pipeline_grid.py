"""The points of the grid that are pipelines: pipeline stages, the mesh of one stage, micro-batches, state group; and their
schedules.

A stage has at most one model axis, there are at most as many stages as the graph has calls, and at least as many micro-batches as
stages (with fewer, the bubble is longer than the work), unless other degrees are forced. GPipe and naive schedules are slower
than 1F1B and need as much memory or more, and DualPipe-V without overlapped communication is ZB-V with more micro-batches in
flight: they are only taken where they are forced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError, BatchError, PlanError
from autopar.ir.batch_totals import why_one_graph
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS, EXPERT_AXIS
from autopar.ir.pipeline.chunk_calls import layer_calls
from autopar.ir.verify import MOST_PASSES
from autopar.rules.registry import Registry
from autopar.schedules.builder import ScheduleBuilder
from autopar.schedules.pipeline_schedule import INTERLEAVED, builder_named, schedule_builders
from autopar.solve.space.force import AXES
from autopar.solve.space.grid import GridPoint, devices_per_node, dispatches_tokens, zero_groups
from autopar.solve.space.meshes import divisors, meshes
from autopar.solve.space.micro_batches import MICRO, expert_axis_fits, micro_batch_counts, why_one_micro_batch

PIPELINE_FORCES = ("pp", "virtual")
"""The degrees that only pipelines have."""

_CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Model chunks per stage that are tried, beside one chunk per layer."""


@dataclass(frozen=True, slots=True)
class ScheduleOption:
    """A schedule with `virtual` model chunks per stage, and estimates for ranking. `bubble_passes`: the bubble per further stage,
    in passes of a micro-batch through one stage. `transfers`: exposed p2p transfers per micro-batch (schedules keep as many
    micro-batches in flight as hide the computation but no transfer, so each chunk exposes both directions; V-shaped schedules
    have slack). `in_flight`: micro-batches in flight per stage, on average."""

    virtual: int
    schedule: str
    bubble_passes: float
    in_flight: float

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients have actions of their own."""
        return builder_named(self.schedule).splits_backward

    @property
    def transfers(self) -> float:
        return 0.5 if builder_named(self.schedule).v_shaped else 2.0 * self.virtual


def pipeline_forced(force: Mapping[str, int]) -> bool:
    """Return whether only pipelines are allowed."""
    return force.get("pp", 1) > 1


def pipeline_asked(force: Mapping[str, int], schedule: str) -> bool:
    """Return whether what is forced only pipelines have, whatever their number of stages."""
    return pipeline_forced(force) or bool(schedule) or force.get("virtual", 1) > 1


def force_without_pipeline(force: Mapping[str, int]) -> dict[str, int]:
    """The forced degrees of one pipeline stage."""
    return {name: value for name, value in force.items() if name not in PIPELINE_FORCES}


def chunks_per_stage(force: Mapping[str, int], schedule: str = "") -> int:
    """The fewest model chunks of a stage that what is forced allows."""
    several = schedule == INTERLEAVED or (schedule and builder_named(schedule).v_shaped)
    return force.get("virtual", 2 if several else 1)


def pipeline_points(
    graph: Graph, cluster: Cluster, force: Mapping[str, int], registry: Registry, schedule: str = ""
) -> Iterator[GridPoint]:
    """Yield every point, those with few stages first. AutoparError where a pipeline is forced that is impossible."""
    if force.get("pp", 2) == 1:
        return
    if reason := why_one_graph(graph):
        if pipeline_forced(force):
            raise PlanError(f"pp={force['pp']} cannot be: {reason}; take pp=1")
        return
    rest = force_without_pipeline(force)
    one_micro_batch = bool(why_one_micro_batch(graph, registry))
    experts = dispatches_tokens(graph, registry) and force.get(EXPERT_AXIS) != 1
    found_any = False
    degrees = [force["pp"]] if pipeline_forced(force) else divisors(cluster.size)[1:]
    for stages in degrees:
        if pipeline_forced(force):
            _check(graph, cluster, stages * chunks_per_stage(force, schedule), force)
        if stages > len(graph.calls) or cluster.size % stages:
            continue
        size, node = cluster.size // stages, devices_per_node(cluster)
        try:
            stage_meshes = meshes(size, graph.batch, rest, min(node, size), experts)
        except AutoparError:
            if pipeline_forced(force):
                raise
            continue
        for mesh in stage_meshes:
            if len(mesh.axes) > 2 and not {"tp2", EXPERT_AXIS} & set(force):
                continue
            for micro_batches in micro_batch_counts(graph.batch, mesh.size_of(DATA_AXIS), rest, one_micro_batch):
                if not expert_axis_fits(mesh, graph.batch, micro_batches, force, experts):
                    continue
                if micro_batches < stages and not (
                    pipeline_forced(force) and (MICRO in force or micro_batches == graph.batch // mesh.size_of(DATA_AXIS))
                ):
                    continue
                if micro_batches * stages > MOST_PASSES and MICRO not in force:
                    continue
                for group in zero_groups(mesh, node, force):
                    found_any = True
                    yield GridPoint(mesh, micro_batches, group, stages)
    if pipeline_forced(force) and not found_any:
        raise BatchError(_no_point_reason(graph, force, why_one_micro_batch(graph, registry)))


def _no_point_reason(graph: Graph, force: Mapping[str, int], one_micro_batch: str) -> str:
    if MICRO in force and not one_micro_batch:
        reason = f"times no data degree of these meshes it divides the batch of {graph.batch}"
        return f"micro={force[MICRO]} cannot be: {reason}; force a divisor"
    if one_micro_batch:
        whole = graph.batch // force.get(DATA_AXIS, 1)
        return (
            f"a pipeline of {force['pp']} stages takes several micro-batches, but {one_micro_batch}: plan without one (pp=1), or "
            f"with one micro-batch ({MICRO}={whole})"
        )
    return f"no data degree and state group of a pipeline of {force['pp']} stages divide the batch of {graph.batch}: change it"


def _check(graph: Graph, cluster: Cluster, chunks: int, force: Mapping[str, int]) -> None:
    stages, degrees = force["pp"], {name: value for name, value in force.items() if name == "pp" or name in AXES}
    if cluster.size % prod(degrees.values()):
        written = " x ".join(f"{name}={value}" for name, value in degrees.items())
        raise PlanError(f"{written} does not divide the {cluster.size} devices of {cluster.name}: force degrees that do")
    if chunks > len(graph.calls):
        written = min(graph.updated_buffers(), default="")
        where = f" (none ends between the write of the buffer {written} and what reads it)" if written else ""
        remedy = "take fewer stages, or make each layer a module of an nn.ModuleList"
        if not any(parameter.trainable for parameter in graph.parameters().values()):
            where = f"{where} (all of it is frozen, and blocks end inside of a layer only where gradients go)"
            remedy += ", or plan it unfrozen and call parallel.requires_grad_(False) afterwards"
        raise PlanError(
            f"{graph.name} has {len(graph.calls)} blocks{where}, pp={stages} with {chunks // stages} chunks a stage needs "
            f"{chunks}: {remedy}"
        )


def schedule_options(graph: Graph, point: GridPoint, force: Mapping[str, int], schedule: str = "") -> tuple[ScheduleOption, ...]:
    """Return the schedules of a point: those that builders offer the search, or the forced one. PlanError where that cannot
    be."""
    layers = max(len(layer_calls(graph)[1]), 1)
    name = "1f1b" if schedule == INTERLEAVED else schedule
    builders = [builder_named(name)] if name else [each for each in schedule_builders().values() if each.searched]
    micro_batches = point.micro_batches
    out = []
    for builder in builders:
        for virtual in [force["virtual"]] if "virtual" in force else sorted({*_CHUNKS, max(1, layers // point.stages)}):
            if "virtual" not in force and not _usual(builder, virtual, point.stages, layers, schedule):
                continue
            try:
                builder.check(point.stages, virtual, micro_batches)
            except PlanError:
                if schedule:
                    raise
                continue
            in_flight = min(micro_batches, builder.in_flight(point.stages, virtual, micro_batches))
            out.append(ScheduleOption(virtual, builder.name, builder.bubble_passes(virtual, micro_batches), in_flight))
    return tuple(out)


def _usual(builder: ScheduleBuilder, virtual: int, stages: int, layers: int, forced: str) -> bool:
    """Return whether a schedule is looked at with so many chunks a stage, where nobody says how many."""
    if builder.v_shaped:
        return virtual == 2 and (stages * 2 <= layers or bool(forced))
    if forced == INTERLEAVED:
        return virtual == 2 or (virtual > 2 and virtual * stages <= layers)
    return virtual == 1 or (builder.interleaved and virtual * stages <= layers)
