"""Lower bounds of the step for every point of the grid, the cheap ones first: data sheet, operations, linear relaxation,
memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from time import monotonic

from autopar.ir.mesh import Mesh
from autopar.solve.bounds.flow_bound import FlowRelaxation, bound_by_blocks, has_many_blocks, ideal_seconds, operation_bound
from autopar.solve.bounds.memory_bound import BlockRelaxation, memory_bound, relax_blocks
from autopar.solve.ilp.solver import Status
from autopar.solve.problem.forced_axes import check_forced_axes, forced_axes
from autopar.solve.problem.problem import Problem, with_zero_group
from autopar.solve.search_state import SearchPoint, SearchState

_THREADS = 2


class SearchBounds:
    """`ideal_seconds` is the least step of any plan on any mesh, by data sheet; 0 before the first problem is there."""

    def __init__(self, state: SearchState) -> None:
        self.state = state
        self.ideal_seconds = 0.0

    def bound(self, points: Sequence[SearchPoint]) -> None:
        """A bound for every point; of a mesh, at its least number of micro-batches, with what memory and state add for each. The
        expensive bound only where the cheap one does not prune."""
        by_mesh: dict[Mesh, list[SearchPoint]] = {}
        for each in points:
            by_mesh.setdefault(each.point.mesh, []).append(each)
        with ThreadPoolExecutor(_THREADS) as pool:  # one solves while the other writes tables
            try:
                list(pool.map(self._bound_mesh, by_mesh.values()))
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _bound_mesh(self, members: Sequence[SearchPoint]) -> None:
        state = self.state
        for each in members:
            each.raise_bound(self.ideal_seconds)
        if state.seconds_left() <= 0:
            return
        began = monotonic()
        problem = state.tables.problem(min((each.point for each in members), key=lambda point: point.micro_batches))
        check_forced_axes(problem, forced_axes(problem.mesh, state.options.force))
        if not state.forced and state.solver(problem, members[0].solution).has_useless_axis():
            for each in members:
                each.settle(Status.PRUNED)
        least = operation_bound(problem)
        self.ideal_seconds = self.ideal_seconds or ideal_seconds(problem)
        state.pipelines.learn_bound(problem, least)
        for each in members:
            each.solution.bound_seconds = least
        if state.any_open(members):
            blocks = relax_blocks(problem)
            self._bound_by_memory(members, problem, blocks, {1.0: least})
            self._bound_by_blocks(members, problem, blocks)
            self._bound_by_flow(members, problem, blocks)
        members[0].solution.seconds += monotonic() - began

    def bound_by_flow(self, each: SearchPoint, problem: Problem) -> None:
        """The linear relaxation of one point, by its own tables."""
        self._bound_by_flow([each], problem, relax_blocks(problem))

    def _bound_by_blocks(self, members: Sequence[SearchPoint], problem: Problem, blocks: tuple[BlockRelaxation, ...]) -> None:
        """With the linear relaxations of single blocks, which are small."""
        state = self.state
        if not has_many_blocks(problem) or not state.any_open(members):
            return
        seconds = bound_by_blocks(problem, state.is_pruned, state.seconds_left)
        state.pipelines.learn_bound(problem, seconds)
        self._bound_by_memory(members, problem, blocks, {1.0: seconds})

    def _bound_by_flow(self, members: Sequence[SearchPoint], problem: Problem, blocks: tuple[BlockRelaxation, ...]) -> None:
        """With the linear relaxation of placements, and then with what its collectives and state send over one link."""
        state = self.state
        if not state.any_open(members):
            return
        flow = FlowRelaxation(problem)
        state.variables[problem.mesh] = flow.form.model.variables
        bounds: dict[float, float] = {}
        for weight in (1.0, 0.5):
            if state.any_open(members) and (weight == 1.0 or flow.shared):
                bounds[weight] = flow.bound(state.seconds_left(), weight)
                if weight == 1.0:
                    state.pipelines.learn_bound(problem, bounds[1.0])
                self._bound_by_memory(members, problem, blocks, bounds)

    def _bound_by_memory(
        self,
        members: Sequence[SearchPoint],
        problem: Problem,
        blocks: tuple[BlockRelaxation, ...],
        flow_bounds: Mapping[float, float],
    ) -> None:
        """`memory_bound` of each point by the tables of its mesh."""
        for each in members:
            if each.done or self.state.is_pruned(max(each.bound_seconds, flow_bounds[1.0])):
                each.raise_bound(flow_bounds[1.0])
                continue
            grouped = with_zero_group(problem, each.point.zero_group)
            bound = memory_bound(grouped, blocks, each.point.micro_batches, flow_bounds)
            each.raise_bound(bound)
            if bound == inf:
                each.settle(Status.INFEASIBLE)
