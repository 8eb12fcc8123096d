"""An expert's pipeline as one point of the stage search: its stages, chunks, micro-batches and the mesh of one stage are given,
and what our programs save, recompute and shard of the state in it is searched, as everywhere.

The grid has one model axis a stage (`solve.space.pipeline_grid`). Experts also cut the context, or deal experts out, beside the
tensor axis; with these degrees known one point is enough.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.rules.registry import default_registry
from autopar.software.configuration import Configuration
from autopar.solve.ilp.linear_model import Status
from autopar.solve.pipeline.stage_search import StageSearch
from autopar.solve.result import PlanResult
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.meshes import mesh_of
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import schedule_options
from autopar.solve.space.problem_tables import ProblemTables


def stage_mesh(configuration: Configuration, size: int) -> Mesh | None:
    """The mesh of one stage on a cluster of `size` devices. The context is outside of the tensor axis, which joins neighbours;
    the expert axis, whose ranks have batches of their own, takes its ranks from the data axis; where these are too few, the
    tensor axis takes part in dealing experts out. None where context and experts are cut, or these degrees do not divide."""
    data = configuration.data(size)
    if configuration.experts > 1:
        dealt = configuration.experts if data % configuration.experts == 0 else configuration.experts // configuration.tensor
        if configuration.context > 1 or not dealt or data % dealt:
            return None
        return mesh_of(data // dealt, configuration.tensor, ep=dealt)
    return mesh_of(data, configuration.context, configuration.tensor)


def stage_point(configuration: Configuration, graph: Graph, cluster: Cluster) -> tuple[GridPoint, int] | None:
    """The pipeline of these degrees for `graph` at its batch, and its chunks per stage. None where it is no pipeline, or its
    stages have no mesh."""
    mesh = stage_mesh(configuration, cluster.size)
    if mesh is None or configuration.stages == 1:
        return None
    return GridPoint(
        mesh, configuration.micro_batches(graph.batch, cluster.size), stages=configuration.stages
    ), configuration.virtual


def stage_seed(point: GridPoint, virtual: int, graph: Graph, cluster: Cluster, options: SearchOptions) -> PlanResult | None:
    """The plan of a `stage_point` by our programs. None where nothing of these degrees fits."""
    registry = options.registry or default_registry()
    free = replace(options, force={}, schedule="")
    search = StageSearch(graph, cluster, free, ProblemTables(graph, cluster, free, registry), lambda: inf)
    try:
        (option,) = schedule_options(graph, point, {"virtual": virtual}, "1f1b")
        plan = search.solve_point(point, option)
    except AutoparError:
        return None
    if plan is None:
        return None
    return PlanResult(
        graph=plan.graph or graph,
        candidate=plan.candidate,
        evaluation=plan.evaluation,
        status=Status.FEASIBLE,
        lower_bound_seconds=plan.evaluation.step_seconds,
        gap=0.0,
        solutions=(plan.solution(),),
    )
