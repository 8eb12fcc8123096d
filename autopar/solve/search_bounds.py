"""Lower bounds of the step for every point of the grid, the cheap ones first: data sheet, operations, linear relaxation,
memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from autopar.ir.mesh import Mesh
from autopar.solve.bounds.block_relaxation import BlockRelaxation, relax_blocks
from autopar.solve.bounds.flow_bound import FlowRelaxation, bound_by_blocks, has_many_blocks, ideal_seconds, operation_bound
from autopar.solve.bounds.memory_bound import memory_bound
from autopar.solve.forked import Lookahead, forked_map
from autopar.solve.ilp.solver import Status
from autopar.solve.pipeline.pipeline_search import Axes
from autopar.solve.problem.forced_axes import check_forced_axes, forced_axes
from autopar.solve.problem.problem import Problem, with_zero_group
from autopar.solve.search_state import SearchPoint, SearchState


@dataclass(slots=True)
class _RoughBound:
    """What is known of the bounds of one mesh: those of `FlowRelaxation` by weight. `all_blocks` once every block was relaxed by
    itself, `sharp` once nothing is left out. `tables` makes the problem again where another process had it."""

    members: tuple[SearchPoint, ...]
    tables: Callable[[], Problem]
    bounds: dict[float, float]
    flow: FlowRelaxation | None = None
    blocks: tuple[BlockRelaxation, ...] | None = None
    all_blocks: bool = False
    sharp: bool = False
    _problem: Problem | None = None

    @property
    def problem(self) -> Problem:
        if self._problem is None:
            self._problem = self.tables()
        return self._problem


@dataclass(frozen=True, slots=True)
class _Learned:
    """What a process says of one mesh: the bound, status and end of each point, what remains to be sharpened, and what the rest
    of the search is told of its size and of pipelines."""

    points: tuple[tuple[float, Status, bool], ...]
    weights: Mapping[float, float]
    all_blocks: bool
    sharp: bool
    ideal_seconds: float
    variables: Mapping[Mesh, int]
    seconds_per_example: Mapping[tuple[Axes, int], float]


class SearchBounds:
    """`ideal_seconds` is the least step of any plan on any mesh, by data sheet; 0 before the first problem is there."""

    def __init__(self, state: SearchState) -> None:
        self.state = state
        self.ideal_seconds = 0.0
        self._rough: dict[Mesh, _RoughBound] = {}

    def bound(self, points: Sequence[SearchPoint]) -> None:
        """A bound for every point; of a mesh, at its least number of micro-batches, with what memory and state add for each. The
        expensive bound only where the cheap one does not prune."""
        by_mesh: dict[Mesh, list[SearchPoint]] = {}
        for each in points:
            by_mesh.setdefault(each.point.mesh, []).append(each)
        if not by_mesh:
            return
        first, *meshes = by_mesh.values()
        self._bound_mesh(first)  # alone: its size, and the least step by data sheet, tell what the others are worth
        sizes = dict(self.state.variables)

        def learn(members: Sequence[SearchPoint]) -> _Learned:
            self.state.variables = dict(sizes)  # what this process saw of other meshes must not matter
            self._bound_mesh(members)
            return self._learned(members, self._rough.get(members[0].point.mesh))

        for members, learned in zip(meshes, forked_map(learn, meshes, self.state.options.processes), strict=True):
            self._take(members, learned)

    def _learned(self, members: Sequence[SearchPoint], rough: _RoughBound | None) -> _Learned:
        state = self.state
        return _Learned(
            points=tuple((each.bound_seconds, each.solution.status, each.done) for each in members),
            weights=rough.bounds if rough else {},
            all_blocks=rough.all_blocks if rough else False,
            sharp=rough is None,
            ideal_seconds=self.ideal_seconds,
            variables=dict(state.variables),
            seconds_per_example=dict(state.pipelines.seconds_per_example),
        )

    def _take(self, members: Sequence[SearchPoint], learned: _Learned) -> None:
        """Into this process, where it is not from here."""
        state, mesh = self.state, members[0].point.mesh
        self.ideal_seconds = self.ideal_seconds or learned.ideal_seconds
        state.variables.update(learned.variables)
        state.pipelines.learn_rates(learned.seconds_per_example)
        for each, (bound, status, done) in zip(members, learned.points, strict=True):
            each.solution.bound_seconds, each.solution.status, each.done = bound, status, done
        if not learned.sharp and mesh not in self._rough:
            self._rough[mesh] = _RoughBound(
                tuple(members), self._tables(members), dict(learned.weights), all_blocks=learned.all_blocks
            )

    def _tables(self, members: Sequence[SearchPoint]) -> Callable[[], Problem]:
        """The problem of the least number of micro-batches, whose bound holds for its multiples by the prices for bounds."""
        least = min((each.point for each in members), key=lambda point: point.micro_batches)
        return lambda: self.state.tables.problem(least, cluster=self.state.cluster_for_bounds)

    def _bound_mesh(self, members: Sequence[SearchPoint]) -> None:
        state = self.state
        for each in members:
            each.raise_bound(self.ideal_seconds)
        if state.seconds_left() <= 0:
            return
        rough = _RoughBound(tuple(members), self._tables(members), {})
        problem = rough.problem
        check_forced_axes(problem, forced_axes(problem.mesh, state.options.force))
        if not state.forced and state.solver(problem, members[0].solution).has_useless_axis():
            for each in members:
                each.settle(Status.PRUNED, "nothing can be sharded over one of its axes")
        least = operation_bound(problem)
        self.ideal_seconds = self.ideal_seconds or ideal_seconds(problem)
        self._tell_pipelines(problem, least)
        for each in members:
            each.solution.bound_seconds = least
        rough.bounds[1.0] = least
        if state.any_open(members):
            least_point = min(members, key=lambda each: (each.done, each.bound_seconds))
            self._bound_by_blocks(rough, lambda seconds: state.is_pruned(least_point, seconds))
        if state.any_open(members):
            self._bound_by_flow(rough)
        if not rough.sharp:
            self._rough[problem.mesh] = rough

    def bound_by_flow(self, each: SearchPoint, problem: Problem) -> None:
        """The linear relaxation of one point, by its own tables."""
        if self.state.any_open([each]):
            self._bound_by_flow(_RoughBound((each,), lambda: problem, {1.0: each.bound_seconds}))

    def tighten(self) -> None:
        """The least bounds, those of pipelines and the others in turn, as long as that raises the least of all."""
        state, least = self.state, -inf
        while state.seconds_left() > 0 and state.lower_bound_seconds() > least:
            least = state.lower_bound_seconds()
            self.tighten_pipelines()
            self._tighten_meshes()

    def tighten_pipelines(self) -> None:
        """As long as one of them is the least bound."""
        state = self.state
        state.pipelines.tighten(state.best_seconds(), state.bound_without_pipelines())

    def _tighten_meshes(self) -> None:
        """Those that the certificate is short of, where something was left out. Other processes begin with the next ones."""
        state = self.state
        enough = state.best_seconds() * (1 - state.options.sharp_gap)
        ahead: Lookahead[_RoughBound, _Learned] = Lookahead(lambda rough: self._sharpened(rough, enough), state.options.processes)
        with ahead:
            while state.seconds_left() > 0:
                able = [each for each in state.points if each.solution.status is not Status.INFEASIBLE]
                able = sorted((each for each in able if each.bound_seconds < enough), key=lambda each: each.bound_seconds)
                if not able or able[0].bound_seconds > state.lower_bound_seconds():
                    return
                rough = list({each.point.mesh: self._rough.get(each.point.mesh) for each in able}.values())
                first, *rest = (each if each is not None and not each.sharp else None for each in rough)
                if first is None:
                    return
                upcoming = (each for each in rest if each is not None and state.is_worth_a_copy(each.members[0]))
                learned = ahead.result(first, upcoming)
                first.all_blocks, first.sharp = learned.all_blocks, True
                self._take(first.members, learned)

    def _sharpened(self, rough: _RoughBound, enough: float) -> _Learned:
        if not rough.all_blocks:
            self._bound_by_blocks(rough, lambda seconds: seconds >= enough)
        if min(each.bound_seconds for each in rough.members) < enough:
            self._bound_by_flow(rough, fully=True)
        return self._learned(rough.members, rough)

    def _bound_by_blocks(self, rough: _RoughBound, is_enough: Callable[[float], bool]) -> None:
        """With the linear relaxations of single blocks, which are small."""
        state, problem = self.state, rough.problem
        rough.all_blocks = True
        if not has_many_blocks(problem):
            return

        def ended(seconds: float) -> bool:
            rough.all_blocks = not is_enough(seconds)
            return not rough.all_blocks

        rough.bounds[1.0] = max(rough.bounds[1.0], bound_by_blocks(problem, ended, state.seconds_left))
        self._tell_pipelines(problem, rough.bounds[1.0])
        self._bound_by_memory(rough, fully=False)

    def _tell_pipelines(self, problem: Problem, step_seconds: float) -> None:
        """What holds for smaller micro-batches too, as the prices for bounds do and those of a single point need not."""
        if problem.cluster == self.state.cluster_for_bounds:
            self.state.pipelines.learn_bound(problem, step_seconds)

    def _bound_by_flow(self, rough: _RoughBound, fully: bool = False) -> None:
        """With the linear relaxation of placements, then with memory; and with what collectives and state send over one link,
        which seldom says more. Unless `fully`, as long as that may prune some of the points, and of a large problem without the
        last."""
        state, members, problem = self.state, rough.members, rough.problem
        if rough.flow is None:
            rough.flow = flow = FlowRelaxation(problem)
            state.variables[problem.mesh] = flow.form.model.variables
            rough.bounds[1.0] = max(rough.bounds[1.0], flow.bound(state.seconds_left()))
            self._tell_pipelines(problem, rough.bounds[1.0])
            self._bound_by_memory(rough, fully)
        if fully or (state.any_open(members) and not state.is_large(members[0])):
            rough.sharp = True
            if rough.flow.shared:
                rough.bounds[0.5] = rough.flow.bound(state.seconds_left(), 0.5)
            self._bound_by_memory(rough, fully)

    def _bound_by_memory(self, rough: _RoughBound, fully: bool) -> None:
        """`memory_bound` of each point by the tables of its mesh."""
        state, flow = self.state, rough.bounds[1.0]
        for each in rough.members:
            each.raise_bound(flow)
            above = each.bound_seconds >= state.best_seconds() if fully else state.is_pruned(each)
            if each.done or above:
                continue
            rough.blocks = rough.blocks or relax_blocks(rough.problem)
            grouped = with_zero_group(rough.problem, each.point.zero_group)
            bound = memory_bound(grouped, rough.blocks, each.point.micro_batches, rough.bounds)
            each.raise_bound(bound)
            if bound == inf:
                each.settle(Status.INFEASIBLE)
