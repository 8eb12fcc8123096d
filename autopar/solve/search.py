"""The search over the grid of meshes, micro-batches and pipelines: bounds prune it, ILPs solve what is left, the evaluator prices
every solution, and the least bound certifies the best one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import ClusterError, UnsupportedOp
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.rules.expand import missing_rules
from autopar.solve.bounds.memory_bound import memory_bound
from autopar.solve.bounds.warm_start import WarmStart
from autopar.solve.fallback_plans import least_memory_solution, warm_start_solution
from autopar.solve.forked import Lookahead
from autopar.solve.ilp.block_memory import unavoidable_shortage_bytes
from autopar.solve.ilp.solve_mesh import MeshSolution
from autopar.solve.ilp.solver import Status
from autopar.solve.offload_optimizer import with_offloaded_optimizer
from autopar.solve.pipeline.pipeline_search import PipelineSearch
from autopar.solve.pipeline.point_bounds import PipelineBounds
from autopar.solve.result import PlanResult
from autopar.solve.search_bounds import MeshBounds, bound_by_flow
from autopar.solve.search_report import raise_infeasible, report_grid, report_solution, result_of
from autopar.solve.search_state import Progress, SearchPoint, SearchState
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.meshes import mesh_of
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import pipeline_asked
from autopar.solve.space.problem_tables import ProblemTables
from autopar.solve.tighten import BoundTask, tighten

_RELAXATION_ITERATIONS = 10_000
"""Iterations of the linear relaxation of a large problem under memory: one that takes more keeps the bound that it has."""

_SLOW_SHARE = 0.8
"""The share of a slow problem's variables from which on problems count as slow too."""

_MAX_WARM_START_RATIO = 1.12
"""Warm start over best plan: a joint optimum is seldom faster than its warm start by more (DeepSeek-V3 on 256 H100: 1.11)."""

_MEMORY_ITERATIONS = 12_500
"""Iterations of one problem under memory, once there is a plan: few take two thirds of that."""


def search(graph: Graph, cluster: Cluster, options: SearchOptions, progress: Progress | None = None) -> PlanResult:
    """Return the best plan for `graph` on `cluster`. Raises BatchError, ClusterError, UnsupportedOp (strict) and Infeasible.

    Every mesh gets a bound (`search_bounds`), which is one of pipelines whose stages have its model axes too. Points whose
    bound is not below the best plan are pruned. The others are solved without the memory constraint first, which is the answer
    where that plan fits, and then under it. KeyboardInterrupt ends the search with the best plan so far, where there is one.
    """
    return _Search(SearchState(graph, cluster, options, progress or (lambda line: None))).run()


@dataclass(frozen=True, slots=True)
class _PointOutcome:
    """The outcome of a point under memory in one process, whether it `ran` the ILP, and how large slow problems are."""

    solution: MeshSolution
    done: bool
    ran: bool
    slow_variables: float


class _Search:
    """One search. `memory_binds` once a plan that ignores memory turned out too large: from then on problems are solved under
    memory only. `slow_variables`: the least size of a problem whose relaxation under memory took too long."""

    def __init__(self, state: SearchState) -> None:
        self.state = state
        self.bounds, self.pipeline_bounds = MeshBounds(state), PipelineBounds(state)
        self.pipelines = PipelineSearch(state, self.pipeline_bounds)
        self.memory_binds = False
        self.slow_variables = inf

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
            self._solve()
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

    def _solve(self) -> None:
        """Solve meshes of at most one model axis first: such problems are small, and what they give prunes most of the others.
        Before the pipelines one point of each mesh: without a plan none of them is pruned."""
        state = self.state
        self._solve_data_parallel()
        for wide in (False, True):
            members = [each for each in state.mesh_points if (len(each.point.mesh.axes) > 2) == wide]
            self.bounds.bound(members)
            self._warm_start(members)
            if not wide:
                self._solve_points(self._one_of_each_mesh(members))
                self._solve_pipelines()
            self._solve_points(members)
        tighten(state, self._tasks)

    def _tasks(self, each: SearchPoint, enough: float) -> Iterator[BoundTask]:
        return (self.pipeline_bounds if each.is_pipeline else self.bounds).tasks(each, enough)

    def _one_of_each_mesh(self, members: Sequence[SearchPoint]) -> list[SearchPoint]:
        """The point with the least bound of every mesh whose problem is not large."""
        points: dict[Mesh, SearchPoint] = {}
        for each in self.state.pending_points(members):
            if not self.state.is_large(each):
                points.setdefault(each.point.mesh, each)
        return list(points.values())

    def _solve_points(self, members: Sequence[SearchPoint]) -> None:
        """Solve one point after the other, unless those before prune it; other processes begin with the next ones."""
        state = self.state
        for each in state.pending_points(members):
            if not self.memory_binds and not state.is_pruned(each):
                self._solve_without_memory(each)
        reads = lambda each: (state.best_seconds(), self.slow_variables)  # noqa: E731
        with Lookahead(self._solved_with_memory, state.options.processes, reads) as ahead:
            for each, outcome in ahead.results(state.pending_points(members), self._is_open, state.is_worth_a_copy):
                each.solution, each.done = outcome.solution, outcome.done
                self.slow_variables = min(self.slow_variables, outcome.slow_variables)
                if outcome.ran:
                    self._take(outcome.solution)

    def _is_open(self, each: SearchPoint) -> bool:
        return not self.state.is_pruned(each)

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

    # -- steps

    def _solve_data_parallel(self) -> None:
        """Solve plain data parallelism over all devices, DDP and FSDP, in as few micro-batches as fit."""
        state = self.state
        mesh = mesh_of(state.cluster.size)
        if state.graph.batch % mesh.size or state.options.stored:  # which is of one mesh
            return
        counts = sorted({each.point.micro_batches for each in state.points if each.point.mesh == mesh} or {1})
        tables = ProblemTables(state.graph, state.cluster, replace(state.options, pins={}), state.registry)
        for zero in (0, 3):
            for count in counts:
                solution = MeshSolution(mesh, micro_batches=count)
                problem = tables.problem(GridPoint(mesh, count), (zero,))
                state.solver(problem, solution).solve_without_memory(state.seconds_left())
                if solution.solved:
                    if not state.forced:
                        state.offer(solution)
                    break

    def _solve_pipelines(self) -> None:
        """Solve pipelines beside the meshes of their stages: where they are better, most meshes need not be solved."""
        members = self.state.pipeline_points
        self.pipeline_bounds.bound(members)
        for solution in self.pipelines.solve(members):
            self._take(solution)

    def _warm_start(self, members: Sequence[SearchPoint]) -> None:
        """Look for plans that fit, for large problems before they are solved under memory. Not for a forced axis: what it may
        leave replicated is part of the problem."""
        state = self.state
        if state.forced:
            return
        plans = WarmStart(state.graph, state.cluster, state.options, state.tables, state.seconds_left)

        def solve(each: SearchPoint) -> MeshSolution | None:
            solution = plans.fastest_fitting(each.point)
            if solution is not None:
                solution.bound_seconds = each.bound_seconds
            return solution

        order = [each for each in state.pending_points(members) if state.is_large(each)]
        with Lookahead(solve, state.options.processes) as ahead:
            for each, solution in ahead.results(order, self._is_open, lambda each: True):
                if solution is None:
                    continue
                each.warm_start_seconds = solution.step_seconds or 0.0
                if 0 < each.warm_start_seconds < state.best_seconds():
                    self._take(solution)

    def _solve_without_memory(self, each: SearchPoint) -> None:
        """Solve without the memory constraint, unless bounds show that such a plan does not fit."""
        state = self.state
        problem = state.tables.problem(each.point)
        if unavoidable_shortage_bytes(problem) > 0:
            return
        if memory_bound(replace(problem, zeros=(min(problem.zeros),)), (), each.point.micro_batches, {1.0: 0.0}) == inf:
            return  # it would replicate what does not fit
        bound = each.bound_seconds
        state.solver(problem, each.solution).solve_without_memory(state.seconds_left())
        each.raise_bound(bound)
        state.offer(each.solution)
        if each.solution.solved:
            each.done = True
            self._prune_more_micro_batches(each)
        else:
            self.memory_binds = True
        report_solution(state, each.solution)

    def _prune_more_micro_batches(self, solved: SearchPoint) -> None:
        """Prune more micro-batches: they are not faster where the fewer ones fit, but for measured prices that say so."""
        if self.state.cluster_for_bounds != self.state.cluster:
            return
        for each in self.state.points:
            same = (each.point.mesh, each.point.zero_group) == (solved.point.mesh, solved.point.zero_group)
            if same and not each.done and each.point.micro_batches % solved.point.micro_batches == 0:
                each.raise_bound(solved.bound_seconds)
                each.settle(Status.PRUNED, f"{solved.point.micro_batches} micro-batches are no slower, and fit")

    def _solved_with_memory(self, each: SearchPoint) -> _PointOutcome:
        ran = self._solve_with_memory(each)
        return _PointOutcome(each.solution, each.done, ran, self.slow_variables)

    def _solve_with_memory(self, each: SearchPoint) -> bool:
        """Solve under the memory constraint, and return whether the ILP ran. Before that the sharper bound of this number of
        micro-batches, and where the problem is large, the linear relaxation: only what may be better by `min_improvement_large`
        is solved then."""
        state = self.state
        problem = state.tables.problem(each.point)
        if each.point.micro_batches > 1:
            bound_by_flow(state, each, problem)
        solver = state.solver(problem, each.solution)
        if state.is_large(each) and not state.is_pruned(each):
            variables = state.facts.variables[each.point.mesh]
            hopeless = each.warm_start_seconds > _MAX_WARM_START_RATIO * state.best_seconds()
            if hopeless or variables >= self.slow_variables:
                return False  # it stays with the bound that it has
            left = state.seconds_left()
            relaxed_seconds = solver.relax_with_memory(left, None if state.forced else _RELAXATION_ITERATIONS)
            if relaxed_seconds is None and state.best is not None:
                self.slow_variables = _SLOW_SHARE * variables
                return False
            each.raise_bound(relaxed_seconds or 0.0)
        if state.is_pruned(each):
            return False
        bound = each.bound_seconds
        hurry = state.best is not None and not state.forced
        iterations = _MEMORY_ITERATIONS if hurry else inf
        solver.solve_with_memory(state.seconds_left(), state.cutoff_seconds(), iterations)
        if each.solution.status is not Status.INFEASIBLE:
            each.raise_bound(bound)
        each.done = True
        return True
