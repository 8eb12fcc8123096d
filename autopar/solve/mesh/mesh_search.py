"""The meshes of the grid that are solved: without the memory constraint first, which is the answer where that plan fits, and then
under it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from autopar.ir.mesh import Mesh
from autopar.solve.bounds.memory_bound import memory_bound
from autopar.solve.bounds.warm_start import WarmStart
from autopar.solve.forked import Lookahead
from autopar.solve.ilp.block_memory import unavoidable_shortage_bytes
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.solve_mesh import MeshSolution
from autopar.solve.mesh.mesh_bounds import MeshBounds, bound_by_flow
from autopar.solve.search_state import SearchPoint, SearchState
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.meshes import mesh_of


@dataclass(frozen=True, slots=True)
class _PointOutcome:
    """The outcome of a point under memory in one process, and whether it `ran` the ILP."""

    solution: MeshSolution
    done: bool
    ran: bool


class MeshSearch:
    """The search over meshes without pipeline stages. `memory_binds` once a plan that ignores memory turned out too large: from
    then on problems are solved under memory only."""

    def __init__(self, state: SearchState) -> None:
        self.state, self.bounds = state, MeshBounds(state)
        self.memory_binds = False

    def solve_data_parallel(self) -> None:
        """Solve plain data parallelism over all devices, DDP and FSDP, in as few micro-batches as fit; not beside forced degrees,
        which it need not obey."""
        state = self.state
        mesh = mesh_of(state.cluster.size)
        if state.graph.batch % mesh.size or state.options.stored or state.forced:  # which is of one mesh
            return
        counts = sorted({each.point.micro_batches for each in state.points if each.point.mesh == mesh} or {1})
        for zero in (0, 3):
            for count in counts:
                solution = MeshSolution(GridPoint(mesh, count))
                problem = state.tables.problem(solution.point, (zero,))
                state.solver(problem, solution).solve_without_memory(state.seconds_left())
                if solution.solved:
                    state.offer(solution)
                    break

    def warm_starts(self, points: Sequence[SearchPoint]) -> Iterator[MeshSolution]:
        """Yield better and better plans that fit, of large problems before they are solved under memory. Not for a forced axis:
        what it may leave replicated is part of the problem."""
        state = self.state
        if state.forced:
            return
        plans = WarmStart(state.graph, state.cluster, state.options, state.tables, state.seconds_left)

        def solve(each: SearchPoint) -> MeshSolution | None:
            plan = plans.fastest_fitting(each.point)
            return plan.solution(each.bound_seconds) if plan is not None else None

        order = [each for each in state.pending_points(points) if state.is_large(each)]
        with Lookahead(solve, state.options.processes) as ahead:
            for _, solution in ahead.results(order, state.is_open, state.is_worth_a_copy):
                if solution is not None and (solution.step_seconds or inf) < state.best_seconds():
                    yield solution

    def one_of_each(self, points: Sequence[SearchPoint]) -> list[SearchPoint]:
        """Return the point with the least bound of every mesh whose problem is not large."""
        first: dict[Mesh, SearchPoint] = {}
        for each in self.state.pending_points(points):
            if not self.state.is_large(each):
                first.setdefault(each.point.mesh, each)
        return list(first.values())

    def solve(self, points: Sequence[SearchPoint]) -> Iterator[MeshSolution]:
        """Solve one point after the other, unless those before prune it, and yield what comes of them; other processes begin with
        the next ones."""
        state = self.state
        for each in state.pending_points(points):
            if not self.memory_binds and not state.is_pruned(each):
                yield from self._solve_without_memory(each)
        with Lookahead(self._solved_with_memory, state.options.processes, lambda each: state.best_seconds()) as ahead:
            for each, outcome in ahead.results(state.pending_points(points), state.is_open, state.is_worth_a_copy):
                each.solution, each.done = outcome.solution, outcome.done
                if outcome.ran:
                    yield outcome.solution

    def _solve_without_memory(self, each: SearchPoint) -> Iterator[MeshSolution]:
        """Solve without the memory constraint, unless bounds show that such a plan does not fit."""
        state = self.state
        problem = state.tables.problem(each.point)
        if unavoidable_shortage_bytes(problem) > 0:
            return
        if memory_bound(replace(problem, zeros=(min(problem.zeros),)), (), each.point.micro_batches, 0.0) == inf:
            return  # it would replicate what does not fit
        bound = each.bound_seconds
        state.solver(problem, each.solution).solve_without_memory(state.seconds_left())
        each.raise_bound(bound)
        if each.solution.solved:
            each.done = True
            self._prune_more_micro_batches(each)
        else:
            self.memory_binds = True
        yield each.solution

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
        return _PointOutcome(each.solution, each.done, ran)

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
            each.raise_bound(solver.relax_with_memory(state.seconds_left()) or 0.0)
        if state.is_pruned(each):
            return False
        solver.solve_with_memory(state.seconds_left(), state.cutoff_seconds())
        if each.bound_seconds < (each.solution.step_seconds or 0.0) * (1 - state.options.sharp_gap):
            solver.divide_calls(state.seconds_left())
        each.done = True
        return True
