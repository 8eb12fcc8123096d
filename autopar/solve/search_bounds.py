"""Lower bounds of the step for every point of the grid, cheap ones first: data sheet, operations, relaxation, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from autopar.ir.mesh import Mesh
from autopar.solve.bounds.block_relaxation import BlockRelaxation, relax_blocks
from autopar.solve.bounds.flow_bound import FlowRelaxation, bound_by_blocks, has_many_blocks, ideal_seconds, operation_bound
from autopar.solve.bounds.memory_bound import memory_bound
from autopar.solve.forked import Lookahead, forked_map
from autopar.solve.ilp.solver import Status
from autopar.solve.pipeline.pipeline_search import Axes
from autopar.solve.problem.forced_axes import check_forced_axes, forced_axes
from autopar.solve.problem.pins import constraint_texts
from autopar.solve.problem.problem import Problem, with_zero_group
from autopar.solve.search_state import SearchPoint, SearchState


@dataclass(slots=True)
class _MeshBound:
    """The bounds of one mesh: those of `FlowRelaxation` by weight. `all_blocks` once every block was relaxed by itself
    (`block_seconds`: of those that were), `sharp` once nothing is left out. `tables` rebuilds the problem where another process
    had it."""

    members: tuple[SearchPoint, ...]
    tables: Callable[[], Problem]
    bounds: dict[float, float]
    flow: FlowRelaxation | None = None
    blocks: tuple[BlockRelaxation, ...] | None = None
    block_seconds: dict[str, float] = field(default_factory=dict)
    all_blocks: bool = False
    sharp: bool = False
    _problem: Problem | None = None

    @property
    def problem(self) -> Problem:
        if self._problem is None:
            self._problem = self.tables()
        return self._problem


@dataclass(frozen=True, slots=True)
class _MeshReport:
    """The report of a process on one mesh: the bound, status and end of each point, what remains to be sharpened, and what the
    rest of the search has to know of its size and of pipelines."""

    points: tuple[tuple[float, Status, bool], ...]
    weights: Mapping[float, float]
    block_seconds: Mapping[str, float]
    all_blocks: bool
    sharp: bool
    ideal_seconds: float
    variables: Mapping[Mesh, int]
    seconds_per_example: Mapping[tuple[Axes, int], float]


class SearchBounds:
    """The bounds of a search. `ideal_seconds` is the least step of any plan on any mesh, by data sheet; 0 before the first
    problem is there."""

    def __init__(self, state: SearchState) -> None:
        self.state = state
        self.ideal_seconds = 0.0
        self._mesh_bounds: dict[Mesh, _MeshBound] = {}

    def bound(self, points: Sequence[SearchPoint]) -> None:
        """Bound every point; of a mesh, at its least number of micro-batches, with what memory and state add for each. The
        expensive bound only where the cheap one does not prune."""
        by_mesh: dict[Mesh, list[SearchPoint]] = {}
        for each in points:
            by_mesh.setdefault(each.point.mesh, []).append(each)
        if not by_mesh:
            return
        first, *meshes = by_mesh.values()
        self._bound_mesh(first)  # alone: its size, and the least step by data sheet, tell what the others are worth
        sizes = dict(self.state.variables)

        def learn(members: Sequence[SearchPoint]) -> _MeshReport:
            self.state.variables = dict(sizes)  # what this process saw of other meshes must not matter
            self._bound_mesh(members)
            return self._report(members, self._mesh_bounds.get(members[0].point.mesh))

        for members, report in zip(meshes, forked_map(learn, meshes, self.state.options.processes), strict=True):
            self._take(members, report)

    def _report(self, members: Sequence[SearchPoint], mesh_bound: _MeshBound | None) -> _MeshReport:
        state = self.state
        return _MeshReport(
            points=tuple((each.bound_seconds, each.solution.status, each.done) for each in members),
            weights=mesh_bound.bounds if mesh_bound else {},
            block_seconds=mesh_bound.block_seconds if mesh_bound else {},
            all_blocks=mesh_bound.all_blocks if mesh_bound else False,
            sharp=mesh_bound is None,
            ideal_seconds=self.ideal_seconds,
            variables=dict(state.variables),
            seconds_per_example=dict(state.pipelines.seconds_per_example),
        )

    def _take(self, members: Sequence[SearchPoint], report: _MeshReport) -> None:
        """Take a report into this process, where it is not from here."""
        state, mesh = self.state, members[0].point.mesh
        self.ideal_seconds = self.ideal_seconds or report.ideal_seconds
        state.variables.update(report.variables)
        state.pipelines.learn_rates(report.seconds_per_example)
        for each, (bound, status, done) in zip(members, report.points, strict=True):
            each.solution.bound_seconds, each.solution.status, each.done = bound, status, done
        if not report.sharp and mesh not in self._mesh_bounds:
            self._mesh_bounds[mesh] = _MeshBound(
                tuple(members), self._tables(members), dict(report.weights), block_seconds=dict(report.block_seconds),
                all_blocks=report.all_blocks,
            )  # fmt: skip

    def _tables(self, members: Sequence[SearchPoint]) -> Callable[[], Problem]:
        """Return the problem of the least number of micro-batches, whose bound holds for its multiples."""
        least = min((each.point for each in members), key=lambda point: point.micro_batches)
        return lambda: self.state.tables.problem(least, cluster=self.state.cluster_for_bounds)

    def _bound_mesh(self, members: Sequence[SearchPoint]) -> None:
        state = self.state
        for each in members:
            each.raise_bound(self.ideal_seconds)
        if state.seconds_left() <= 0:
            return
        mesh_bound = _MeshBound(tuple(members), self._tables(members), {})
        problem = mesh_bound.problem
        check_forced_axes(problem, forced_axes(problem.mesh, state.options.force), constraint_texts(state.options.pins))
        if not state.forced and state.solver(problem, members[0].solution).has_useless_axis():
            for each in members:
                each.settle(Status.PRUNED, "nothing can be sharded over one of its axes")
        least = operation_bound(problem)
        self.ideal_seconds = self.ideal_seconds or ideal_seconds(problem)
        self._inform_pipelines(problem, least)
        for each in members:
            each.solution.bound_seconds = least
        mesh_bound.bounds[1.0] = least
        if state.any_open(members):
            least_point = min(members, key=lambda each: (each.done, each.bound_seconds))
            self._bound_by_blocks(mesh_bound, lambda seconds: state.is_pruned(least_point, seconds))
        if state.any_open(members):
            self._bound_by_flow(mesh_bound)
        if not mesh_bound.sharp:
            self._mesh_bounds[problem.mesh] = mesh_bound

    def bound_by_flow(self, each: SearchPoint, problem: Problem) -> None:
        """Bound one point by its linear relaxation, by its own tables."""
        if self.state.any_open([each]):
            self._bound_by_flow(_MeshBound((each,), lambda: problem, {1.0: each.bound_seconds}))

    def tighten(self) -> None:
        """Raise the least bounds, those of pipelines and the others in turn, as long as that raises the least of all."""
        state, least = self.state, -inf
        while state.seconds_left() > 0 and state.lower_bound_seconds() > least:
            least = state.lower_bound_seconds()
            self.tighten_pipelines()
            self._tighten_meshes()

    def tighten_pipelines(self) -> None:
        """Raise bounds of pipelines as long as one of them is the least bound."""
        state = self.state
        state.pipelines.tighten(state.best_seconds(), state.bound_without_pipelines())

    def _tighten_meshes(self) -> None:
        """Raise the bounds of meshes that the certificate is short of, where something was left out. Other processes begin with
        the next ones."""
        state = self.state
        enough = state.best_seconds() * (1 - state.options.sharp_gap)
        ahead: Lookahead[_MeshBound, _MeshReport] = Lookahead(lambda mesh: self._sharpen(mesh, enough), state.options.processes)
        with ahead:
            while state.seconds_left() > 0:
                feasible = [each for each in state.points if each.solution.status is not Status.INFEASIBLE]
                feasible = sorted((each for each in feasible if each.bound_seconds < enough), key=lambda each: each.bound_seconds)
                if not feasible or feasible[0].bound_seconds > state.lower_bound_seconds():
                    return
                mesh_bounds = list({each.point.mesh: self._mesh_bounds.get(each.point.mesh) for each in feasible}.values())
                first, *rest = (each if each is not None and not each.sharp else None for each in mesh_bounds)
                if first is None:
                    return
                upcoming = (each for each in rest if each is not None and state.is_worth_a_copy(each.members[0]))
                report = ahead.result(first, upcoming)
                first.all_blocks, first.sharp = report.all_blocks, True
                self._take(first.members, report)

    def _sharpen(self, mesh_bound: _MeshBound, enough: float) -> _MeshReport:
        if not mesh_bound.all_blocks:
            self._bound_by_blocks(mesh_bound, lambda seconds: seconds >= enough)
        if min(each.bound_seconds for each in mesh_bound.members) < enough:
            self._bound_by_flow(mesh_bound, fully=True)
        return self._report(mesh_bound.members, mesh_bound)

    def _bound_by_blocks(self, mesh_bound: _MeshBound, is_enough: Callable[[float], bool]) -> None:
        """Bound with the linear relaxations of single blocks, which are small."""
        state, problem = self.state, mesh_bound.problem
        mesh_bound.all_blocks = True
        if not has_many_blocks(problem):
            return

        def is_done(seconds: float) -> bool:
            mesh_bound.all_blocks = not is_enough(seconds)
            return not mesh_bound.all_blocks

        seconds = bound_by_blocks(problem, is_done, state.seconds_left, mesh_bound.block_seconds)
        mesh_bound.bounds[1.0] = max(mesh_bound.bounds[1.0], seconds)
        self._inform_pipelines(problem, mesh_bound.bounds[1.0])
        self._bound_by_memory(mesh_bound, fully=False)

    def _inform_pipelines(self, problem: Problem, step_seconds: float) -> None:
        """Pass on what holds for smaller micro-batches too, as the prices for bounds do and those of a single point need not."""
        if problem.cluster == self.state.cluster_for_bounds:
            self.state.pipelines.learn_bound(problem, step_seconds)

    def _bound_by_flow(self, mesh_bound: _MeshBound, fully: bool = False) -> None:
        """Bound with the linear relaxation of placements, then with memory; and with what collectives and state send over one
        link, which seldom says more. Unless `fully`, as long as that may prune some of the points, and of a large problem without
        the last."""
        state, members, problem = self.state, mesh_bound.members, mesh_bound.problem
        if mesh_bound.flow is None:
            mesh_bound.flow = flow = FlowRelaxation(problem)
            state.variables[problem.mesh] = flow.form.model.variables
            mesh_bound.bounds[1.0] = max(mesh_bound.bounds[1.0], flow.bound(state.seconds_left()))
            self._inform_pipelines(problem, mesh_bound.bounds[1.0])
            self._bound_by_memory(mesh_bound, fully)
        if fully or (state.any_open(members) and not state.is_large(members[0])):
            mesh_bound.sharp = True
            if mesh_bound.flow.shared:
                mesh_bound.bounds[0.5] = mesh_bound.flow.bound(state.seconds_left(), 0.5)
            self._bound_by_memory(mesh_bound, fully)

    def _bound_by_memory(self, mesh_bound: _MeshBound, fully: bool) -> None:
        """Raise each point to its `memory_bound` by the tables of its mesh."""
        state, flow = self.state, mesh_bound.bounds[1.0]
        for each in mesh_bound.members:
            each.raise_bound(flow)
            above = each.bound_seconds >= state.best_seconds() if fully else state.is_pruned(each)
            if each.done or above:
                continue
            mesh_bound.blocks = mesh_bound.blocks or relax_blocks(mesh_bound.problem)
            grouped = with_zero_group(mesh_bound.problem, each.point.zero_group)
            bound = memory_bound(grouped, mesh_bound.blocks, each.point.micro_batches, mesh_bound.bounds)
            each.raise_bound(bound)
            if bound == inf:
                each.settle(Status.INFEASIBLE)
