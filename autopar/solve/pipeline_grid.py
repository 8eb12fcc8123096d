"""The points of the grid that are pipelines: stages, the mesh of one stage, micro-batches, state group; and their schedules.

A stage has at most one model axis, at most as many stages as the graph has calls, and at least as many micro-batches as stages:
with fewer, the pipeline stands still more than it works. What is forced may be otherwise. GPipe and naive schedules are slower
than 1F1B and hold as much or more, and DualPipe-V without overlapped communication is ZB-V that holds more: they are for who
asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.cost_models.hardware import Cluster
from autopar.errors import AutoparError, BatchError, PlanError
from autopar.ir.chunks import SCHEDULES, V_SHAPED, check_schedule, layer_calls
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS, EXPERT_AXIS
from autopar.ir.plan import Pipeline
from autopar.rules.registry import Registry
from autopar.solve.grid import MICRO, Point, batch_fits, deals_tokens, inner_devices, micro_batch_counts, zero_groups
from autopar.solve.meshes import divisors, meshes
from autopar.solve.parts import why_one_micro_batch

OWN = ("pp", "virtual", "schedule")
"""What only pipelines have, of what can be forced."""

_CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Of a stage; and as many as there are layers for."""


@dataclass(frozen=True, slots=True)
class Way:
    """A schedule. It waits for about so many passes through one stage, for each further stage (`waiting`), and for so many
    transfers with each micro-batch (`trips`: builders hold as many micro-batches as keep stages busy without any, so a round trip
    costs two, of each chunk; V-shaped ones have slack). Its stages hold `held` micro-batches on average."""

    virtual: int
    schedule: str
    waiting: float
    held: float

    @property
    def trips(self) -> float:
        return 0.5 if self.schedule in V_SHAPED else 2.0 * self.virtual


def wanted(force: Mapping[str, int]) -> bool:
    """Whether only pipelines are asked for."""
    return force.get("pp", 1) > 1


def unwanted(force: Mapping[str, int]) -> bool:
    """Whether none is asked for."""
    return force.get("pp", 2) == 1


def without_pipeline(force: Mapping[str, int]) -> dict[str, int]:
    """What is forced beside the pipeline."""
    return {name: value for name, value in force.items() if name not in OWN}


def pipeline_points(graph: Graph, cluster: Cluster, force: Mapping[str, int], registry: Registry) -> Iterator[Point]:
    """Every point, those with few stages first. AutoparError where a pipeline is forced that cannot be."""
    if unwanted(force):
        return
    rest = without_pipeline(force)
    whole = bool(why_one_micro_batch(graph, registry))
    experts = deals_tokens(graph, registry) and force.get(EXPERT_AXIS) != 1
    found_any = False
    degrees = [force["pp"]] if wanted(force) else divisors(cluster.size)[1:]
    for stages in degrees:
        if wanted(force):
            _check(graph, cluster, stages * force.get("virtual", 1), stages)
        if stages > len(graph.calls) or cluster.size % stages:
            continue
        size, node = cluster.size // stages, inner_devices(cluster)
        try:
            found = meshes(size, graph.batch, rest, min(node, size), experts)
        except AutoparError:
            if wanted(force):
                raise
            continue
        for mesh in found:
            if len(mesh.axes) > 2 and not {"tp2", EXPERT_AXIS} & set(force):
                continue
            for parts in micro_batch_counts(graph.batch, mesh.size_of(DATA_AXIS), rest, whole):
                if not batch_fits(mesh, graph.batch, parts, force, experts):
                    continue
                if parts < stages and not (wanted(force) and (MICRO in force or parts == _most(graph, mesh.size_of(DATA_AXIS)))):
                    continue
                for group in zero_groups(mesh, node, force):
                    found_any = True
                    yield Point(mesh, parts, group, stages)
    if wanted(force) and not found_any:
        raise BatchError(_nothing(graph, force, why_one_micro_batch(graph, registry)))


def _nothing(graph: Graph, force: Mapping[str, int], whole: str) -> str:
    if MICRO in force:
        reason = whole or f"times no data degree of these meshes it divides the batch of {graph.batch}"
        return f"micro={force[MICRO]} cannot be: {reason}; force a divisor"
    return f"no data degree and state group of a pipeline of {force['pp']} stages divide the batch of {graph.batch}: change it"


def _most(graph: Graph, data: int) -> int:
    return graph.batch // data


def _check(graph: Graph, cluster: Cluster, chunks: int, stages: int) -> None:
    if cluster.size % stages:
        raise PlanError(f"pp={stages} does not divide the {cluster.size} devices of {cluster.name}: force a divisor")
    if chunks > len(graph.calls):
        raise PlanError(
            f"{graph.name} has {len(graph.calls)} blocks, pp={stages} with {chunks // stages} chunks a stage needs {chunks}: "
            "take fewer stages"
        )


def ways(graph: Graph, point: Point, force: Mapping[str, int]) -> tuple[Way, ...]:
    """The schedules of a point. PlanError where a forced one cannot be."""
    layers = max(len(layer_calls(graph)[1]), 1)
    asked = SCHEDULES[force["schedule"]] if "schedule" in force else ""
    names = (asked,) if asked else ("1f1b", "zb-h1", "zbv")
    out = []
    for name in names:
        for virtual in [force["virtual"]] if "virtual" in force else sorted({*_CHUNKS, max(1, layers // point.stages)}):
            if "virtual" not in force and not _usual(name, virtual, point.stages, layers, bool(asked)):
                continue
            try:
                check_schedule(Pipeline(point.stages, virtual, name), point.micro_batches)
            except PlanError:
                if asked:
                    raise
                continue
            many = point.micro_batches
            out.append(Way(virtual, name, _waiting(name, virtual, many), min(many, _held(name, virtual, point.stages, many))))
    return tuple(out)


def _usual(name: str, virtual: int, stages: int, layers: int, asked: bool) -> bool:
    """Whether a schedule is looked at with so many chunks, where nobody says how many."""
    if name in V_SHAPED:
        return virtual == 2 and (stages * 2 <= layers or asked)
    return virtual == 1 or (name == "1f1b" and virtual * stages <= layers)


def _held(name: str, virtual: int, stages: int, micro_batches: int) -> float:
    if name in ("gpipe", "naive"):
        return float(micro_batches) if name == "gpipe" else 1.0
    return (stages + 1) / 2 if name == "1f1b" and virtual == 1 else float(stages)


def _waiting(name: str, virtual: int, micro_batches: int) -> float:
    if name == "naive":
        return float(micro_batches)
    if name in V_SHAPED:
        return 1 / 6
    return (1 / 3 if name == "zb-h1" else 1.0) / virtual
