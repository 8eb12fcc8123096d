"""The minimum-memory plan, however slow: it tells by how much a model does not fit, and which changes would make it fit.

Two methods. The *fixed* one prices a configuration that saves most (ZeRO-3, full recomputation, one example per micro-batch) on
every width of a tensor axis within a node: some 10 ms each. The *solved* one asks the joint ILP for the least excess over the
memory, over all that may be chosen, offloading too. Both return plans that the evaluator priced, so that what is said to fit does
fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import AutoparError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS, EXPERT_AXIS
from autopar.rules.registry import Registry
from autopar.schedules.pipeline_schedule import INTERLEAVED
from autopar.solve.fixed.candidate import BlockPlacements, fixed_candidate, place_blocks
from autopar.solve.fixed.configuration import FixedConfiguration
from autopar.solve.ilp.decode import decode
from autopar.solve.ilp.formulate import formulate
from autopar.solve.ilp.memory_events import add_memory_constraint
from autopar.solve.ilp.solve_mesh import PricedPlan
from autopar.solve.ilp.solver import most_nodes, solve
from autopar.solve.space.grid import GROUP, GridPoint, devices_per_node, grid_points, least_memory_points
from autopar.solve.space.meshes import divisors
from autopar.solve.space.micro_batches import micro_batch_counts, why_one_micro_batch
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import chunks_per_stage, pipeline_asked
from autopar.solve.space.problem_tables import ProblemTables

_MESHES = 4
"""Meshes that are solved, with one model axis at most (two where the second is forced)."""

OfPipelines = Callable[[Graph, Cluster, SearchOptions, Registry], PricedPlan | None]


class MinimumMemory:
    """Minimum-memory plans of several problems; placements that do not depend on the cluster are cached. At most `most_solved`
    of them are solved by an integer program. `of_pipelines` solves for them (`pipeline.least_memory`); without it they have fixed
    plans alone."""

    def __init__(self, registry: Registry, most_solved: float, of_pipelines: OfPipelines | None = None) -> None:
        self.registry, self.left, self.of_pipelines = registry, most_solved, of_pipelines
        self._placed: dict[tuple[str, int], BlockPlacements | None] = {}

    def fitting_plan(self, graph: Graph, cluster: Cluster, options: SearchOptions, exact: bool = True) -> PricedPlan | None:
        """Return some plan that fits, or None."""
        plan = self.fixed_plan(graph, cluster, options)
        if (plan is None or plan.shortage_bytes) and exact and self.left > 0:
            plan = self.solved_plan(graph, cluster, options)
        return plan if plan is not None and not plan.shortage_bytes else None

    def fixed_plan(self, graph: Graph, cluster: Cluster, options: SearchOptions) -> PricedPlan | None:
        """The fixed configuration with the least peak memory; None where forced degrees or pins exclude them all."""
        if options.pins or {"tp2", EXPERT_AXIS} & set(options.force):
            return None
        best: PricedPlan | None = None
        for configuration in self._configurations(graph, cluster, options):
            placed = self._place(graph, configuration)
            if placed is None:
                continue
            try:
                candidate = fixed_candidate(graph, cluster, configuration, placed, self.registry)
                plan = PricedPlan(candidate, evaluate(graph, candidate, cluster, options.optimizer))
            except PlanError:  # too few layers or micro-batches for the pipeline
                continue
            if best is None or plan.evaluation.peak_memory_bytes < best.evaluation.peak_memory_bytes:
                best = plan
        return best

    def _configurations(self, graph: Graph, cluster: Cluster, options: SearchOptions) -> Iterator[FixedConfiguration]:
        force, one_micro_batch = options.force, bool(why_one_micro_batch(graph, self.registry))
        stages = forced_stages(options)
        schedule = options.schedule if options.schedule not in ("", INTERLEAVED) else "1f1b"
        virtual = chunks_per_stage(force, options.schedule) if stages > 1 else 1
        for width in divisors(min(devices_per_node(cluster), cluster.size)):
            if cluster.size % (width * stages) or width != force.get("tp", width):
                continue
            data = cluster.size // (width * stages)
            if data != force.get(DATA_AXIS, data) or graph.batch % data:
                continue
            counts = micro_batch_counts(graph.batch, data, force, one_micro_batch)
            group = force.get(GROUP, 0)
            if counts and not (group and data % group):
                yield FixedConfiguration(
                    tp=width, sequence_parallel=width > 1, zero=force.get("zero", 3), zero_group=group, micro_batches=max(counts),
                    recompute="full", precision=options.precision, optimizer=options.optimizer, pp=stages, virtual=virtual,
                    schedule=schedule,
                )  # fmt: skip

    def _place(self, graph: Graph, configuration: FixedConfiguration) -> BlockPlacements | None:
        key = graph.fingerprint, configuration.tp
        if key not in self._placed:
            try:
                self._placed[key] = place_blocks(graph, configuration, self.registry)
            except AutoparError:
                self._placed[key] = None
        return self._placed[key]

    def solved_plan(self, graph: Graph, cluster: Cluster, options: SearchOptions) -> PricedPlan | None:
        """The least excess by the joint ILP, over the meshes until a plan fits or time ends. None where there is no mesh. Stages
        of pipelines are no one problem: they are partitioned for least memory."""
        if forced_stages(options) > 1:
            return self._pipeline(graph, cluster, options)
        try:
            node, ordered = devices_per_node(cluster), bool(options.pins)
            points = grid_points(graph, cluster.size, node, options.force, self.registry, ordered)
        except AutoparError:
            return None
        tables = ProblemTables(graph, cluster, options, self.registry)
        best: PricedPlan | None = None
        wide = bool({"tp2", EXPERT_AXIS} & set(options.force))
        for point in least_memory_points(each for each in points if wide or len(each.mesh.axes) <= 2)[:_MESHES]:
            if self.left <= 0 or (best is not None and not best.shortage_bytes):
                break
            if tables.refusal(point.mesh):
                continue
            plan = self._least_excess(tables, point)
            if plan is not None and (best is None or plan.shortage_bytes < best.shortage_bytes):
                best = plan
        return best

    def _pipeline(self, graph: Graph, cluster: Cluster, options: SearchOptions) -> PricedPlan | None:
        if self.of_pipelines is None or options.pins:
            return None
        self.left -= 1
        return self.of_pipelines(graph, cluster, options, self.registry)

    def _least_excess(self, tables: ProblemTables, point: GridPoint) -> PricedPlan | None:
        problem = tables.problem(point)
        form = formulate(problem, recompute=True)
        add_memory_constraint(form, minimise_excess=True)
        self.left -= 1
        outcome = solve(form.model, relative_gap=0.01, nodes=most_nodes(form.model))
        if not outcome.values:
            return None
        candidate = decode(form, outcome.values)
        return PricedPlan(candidate, evaluate(tables.graph, candidate, tables.cluster, problem.optimizer))


def without_forced(options: SearchOptions, *names: str) -> SearchOptions:
    """Return `options` with these degrees no longer forced; without the pipeline's, its chunks and its schedule are free too."""
    gone = (*names, "virtual") if "pp" in names else names
    schedule = "" if "pp" in names else options.schedule
    return replace(options, force={name: value for name, value in options.force.items() if name not in gone}, schedule=schedule)


def forced_stages(options: SearchOptions) -> int:
    """Pipeline stages at least, by what is forced."""
    return options.force.get("pp", 2 if pipeline_asked(options.force, options.schedule) else 1)
