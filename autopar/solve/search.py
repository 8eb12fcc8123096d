"""The search over the grid of meshes, micro-batches and pipelines: bounds prune it, ILPs solve what is left, the evaluator prices
every solution, and the least bound certifies the best one.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import ClusterError, UnsupportedOp
from autopar.ir.graph import Graph
from autopar.rules.expand import missing_rules
from autopar.solve.bounds.minimum_memory import MinimumMemory
from autopar.solve.bounds.warm_start import WarmStart
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.solve_mesh import MeshSolution
from autopar.solve.mesh.mesh_search import MeshSearch
from autopar.solve.pipeline.least_memory import least_memory_pipeline
from autopar.solve.pipeline.pipeline_search import PipelineSearch
from autopar.solve.problem.forced_axes import forced_axes, why_disobeyed
from autopar.solve.result import PlanResult
from autopar.solve.search_report import raise_infeasible, report_grid, report_solution, result_of
from autopar.solve.search_state import Progress, SearchPoint, SearchState
from autopar.solve.space.force import with_offloaded_optimizer
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import pipeline_asked
from autopar.solve.tighten import BoundTask, tighten

_MAX_POINTS = 8
"""Points that are tried for a plan where the time limit left none."""


def search(graph: Graph, cluster: Cluster, options: SearchOptions, progress: Progress | None = None) -> PlanResult:
    """Return the best plan for `graph` on `cluster`. Raises BatchError, ClusterError, UnsupportedOp (strict) and Infeasible.

    Every mesh gets a bound (`mesh_bounds`), which is one of pipelines whose stages have its model axes too. Points whose
    bound is not below the best plan are pruned. The others are solved without the memory constraint first, which is the answer
    where that plan fits, and then under it. KeyboardInterrupt ends the search with the best plan so far, where there is one.
    """
    return _Search(SearchState(graph, cluster, options, progress or (lambda line: None))).run()


class _Search:
    """One search: its queue of points, and what each of the two kinds of points is bounded and solved by."""

    def __init__(self, state: SearchState) -> None:
        self.state, self.meshes, self.pipelines = state, MeshSearch(state), PipelineSearch(state)

    def run(self) -> PlanResult:
        state = self.state
        self._check_rules()
        self._check_overlap()
        interrupted = self._find()
        if state.best is None and state.seconds_left() > 0:
            interrupted = self._find_with_offloaded_optimizer() or interrupted
            state = self.state
        if state.best is None:
            raise_infeasible(state, self.pipelines.stage_search.placement.refusal)
        assert state.best is not None
        return result_of(state, state.best, interrupted)

    def _find_with_offloaded_optimizer(self) -> bool:
        """Search once more, where no plan fits, with the optimizer's state in host memory, and take what that finds."""
        state = self.state
        options = with_offloaded_optimizer(state.cluster, state.options)
        if options is None:
            return False
        state.progress("no plan fits: once more with the optimizer's state in host memory")
        again = _Search(SearchState(state.graph, state.cluster, options, state.progress))
        interrupted = again._find()
        if again.state.best is not None:
            self.state = again.state
        return interrupted

    def _find(self) -> bool:
        """Search, and return whether that was interrupted."""
        state = self.state
        state.list_points()
        report_grid(state)
        interrupted = False
        try:
            for solution in self._solutions():
                self._take(solution)
            tighten(state, self._tasks)
        except KeyboardInterrupt:
            if state.best is None:
                raise
            interrupted = True
            state.progress("interrupted: the best plan so far")
        if state.best is None and pipeline_asked(state.options.force, state.options.schedule):
            self._take(least_memory_solution(state))
        elif state.best is None and state.forced:
            self._take(warm_start_solution(state))
        return interrupted

    def _solutions(self) -> Iterator[MeshSolution]:
        """Solve the points, and yield what comes of them. Meshes of at most one model axis first: such problems are small, and
        what they give prunes most of the others. Of these one point of each mesh before the pipelines, of which none is pruned
        without a plan; and where pipelines are better, most meshes need not be solved."""
        state, meshes, pipelines = self.state, self.meshes, self.pipelines
        wide = [each for each in state.mesh_points if len(each.point.mesh.axes) > 2]
        narrow = [each for each in state.mesh_points if len(each.point.mesh.axes) <= 2]
        meshes.solve_data_parallel()
        meshes.bounds.bound(narrow)
        yield from meshes.warm_starts(narrow)
        yield from meshes.solve(meshes.one_of_each(narrow))
        pipelines.bounds.bound(state.pipeline_points)
        yield from pipelines.solve(state.pipeline_points)
        yield from meshes.solve(narrow)
        meshes.bounds.bound(wide)
        yield from meshes.warm_starts(wide)
        yield from meshes.solve(wide)

    def _tasks(self, each: SearchPoint, enough: float) -> Iterator[BoundTask]:
        return (self.pipelines if each.is_pipeline else self.meshes).bounds.tasks(each, enough)

    def _check_rules(self) -> None:
        if not self.state.options.strict:
            return
        for block in self.state.graph.blocks:
            for node in missing_rules(block, self.state.registry):
                raise UnsupportedOp(
                    f"{node.op} at {node.source or node.name} has no sharding rule: "
                    f"give one with autopar.register_rule({node.op.replace('.', '::', 1)!r}, ...), or plan without strict"
                )

    def _check_overlap(self) -> None:
        """Refuse what programs of autopar do not overlap: bounds and integer programs add such collectives to the compute."""
        cluster = self.state.cluster
        for name in ("model_parallel", "expert_dispatch"):
            if getattr(cluster.overlap, name):
                raise ClusterError(
                    f"{cluster.name}: programs of autopar have no overlap.{name}: leave it out of the cluster's file, or plan "
                    "for software that has it (autopar plan --for megatron)"
                )

    def _take(self, solution: MeshSolution | None) -> None:
        if solution is None:
            return
        self.state.offer(solution)
        report_solution(self.state, solution)


def least_memory_solution(state: SearchState) -> MeshSolution | None:
    """The pipeline of layers dealt evenly that recomputes all, or the one whose stages are partitioned for least memory, where
    none that the stage search makes fits: its estimates of memory err on the safe side."""
    search = MinimumMemory(state.registry, 1, least_memory_pipeline)
    memory_plan = search.fitting_plan(state.graph, state.cluster, state.options)
    return memory_plan.solution() if memory_plan is not None and memory_plan.obeys(state.options.force) else None


def warm_start_solution(state: SearchState) -> MeshSolution | None:
    """Return one sharding that fits for forced degrees whose problems were too large for the time; it obeys them too."""
    plans = WarmStart(state.graph, state.cluster, state.options, state.tables, lambda: inf)
    for each in [each for each in state.mesh_points if each.solution.status is Status.TIMEOUT][:_MAX_POINTS]:
        plan = plans.fastest_fitting(each.point)
        axes = forced_axes(each.point.mesh, state.options.force)
        if plan is None or why_disobeyed(state.tables.problem(each.point), plan.candidate, axes):
            continue
        each.solution = plan.solution(each.bound_seconds)
        return each.solution
    return None
