"""Lower bounds of the step for meshes without pipeline stages, cheap ones first: data sheet, operations, relaxation, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from autopar.ir.mesh import Mesh
from autopar.solve.bounds.block_relaxation import BlockRelaxation, relax_blocks
from autopar.solve.bounds.flow_bound import FlowRelaxation, bound_by_blocks, has_many_blocks, ideal_seconds, operation_bound
from autopar.solve.bounds.memory_bound import memory_bound
from autopar.solve.forked import Lookahead
from autopar.solve.ilp.linear_model import Status
from autopar.solve.problem.forced_axes import check_forced_axes, forced_axes
from autopar.solve.problem.pins import constraint_texts
from autopar.solve.problem.problem import Problem, with_zero_group
from autopar.solve.search_state import MeshFacts, SearchPoint, SearchState
from autopar.solve.tighten import BoundTask


@dataclass(slots=True)
class _Relaxations:
    """The linear relaxations of a mesh that were solved: the bound of `FlowRelaxation`, and seconds of single blocks.
    `all_blocks` once each of these was, `whole` once one of all was, `sharp` once nothing is left out."""

    flow_seconds: float = 0.0
    block_seconds: dict[str, float] = field(default_factory=dict)
    all_blocks: bool = False
    whole: bool = False
    sharp: bool = False


@dataclass(frozen=True, slots=True)
class _MeshReport:
    """The report of a process on one mesh: the bound, status and end of each point, and what others have to know."""

    points: tuple[tuple[float, Status, bool], ...]
    relaxations: _Relaxations
    facts: MeshFacts


class _MeshBound:
    """The bound of one mesh, at its least number of micro-batches, which holds for its multiples; with what memory and state add
    for each of its points."""

    def __init__(self, state: SearchState, members: Sequence[SearchPoint]) -> None:
        self.state, self.members = state, members
        self.relaxations = _Relaxations()

    @cached_property
    def problem(self) -> Problem:
        least = min((each.point for each in self.members), key=lambda point: point.micro_batches)
        return self.state.problem(least, self.state.cluster_for_bounds)

    @cached_property
    def blocks(self) -> tuple[BlockRelaxation, ...]:
        return relax_blocks(self.problem)

    def take(self, report: _MeshReport) -> None:
        """Take a report into this process, where it is not from here."""
        self.relaxations = report.relaxations
        self.state.facts.learn(report.facts)
        for each, (bound, status, done) in zip(self.members, report.points, strict=True):
            each.solution.bound_seconds, each.solution.status, each.done = bound, status, done

    def report(self) -> _MeshReport:
        points = tuple((each.bound_seconds, each.solution.status, each.done) for each in self.members)
        return _MeshReport(points, self.relaxations, self.state.facts)

    def bound(self) -> _MeshReport:
        """Bound every point, by the expensive bound only where the cheap one does not prune."""
        state, members = self.state, self.members
        for each in members:
            each.raise_bound(state.facts.ideal_seconds)
        if state.seconds_left() <= 0:
            self.relaxations.sharp = True
            return self.report()
        problem = self.problem
        check_forced_axes(problem, forced_axes(problem.mesh, state.options.force), constraint_texts(state.options.pins))
        if not state.forced and state.solver(problem, members[0].solution).has_useless_axis():
            for each in members:
                each.settle(Status.PRUNED, "nothing can be sharded over one of its axes")
        least = operation_bound(problem)
        state.facts.ideal_seconds = state.facts.ideal_seconds or ideal_seconds(problem)
        self._raise_flow_bound(least)
        for each in members:
            each.solution.bound_seconds = least
        if state.any_open(members):
            least_point = min(members, key=lambda each: (each.done, each.bound_seconds))
            self._bound_by_blocks(lambda seconds: state.is_pruned(least_point, seconds))
        if state.any_open(members):
            self._bound_by_flow()
        return self.report()

    def sharpen(self, enough: float) -> _MeshReport:
        """Raise the bounds by all that was left out, until they are `enough`."""
        if not self.relaxations.all_blocks:
            self._bound_by_blocks(lambda seconds: seconds >= enough)
        if min(each.bound_seconds for each in self.members) < enough:
            self._bound_by_flow(fully=True)
        self.relaxations.sharp = True
        return self.report()

    def _raise_flow_bound(self, step_seconds: float) -> None:
        """Take a bound without memory and state, and pass on what holds for smaller micro-batches too, as the prices for bounds
        do and those of a single point need not."""
        relaxations = self.relaxations
        relaxations.flow_seconds = max(relaxations.flow_seconds, step_seconds)
        if self.problem.cluster == self.state.cluster_for_bounds:
            self.state.facts.learn_bound(self.problem, relaxations.flow_seconds)

    def _bound_by_blocks(self, is_enough: Callable[[float], bool]) -> None:
        """Bound with the linear relaxations of single blocks, which are small."""
        relaxations = self.relaxations
        relaxations.all_blocks = True
        if not has_many_blocks(self.problem):
            return

        def is_done(seconds: float) -> bool:
            relaxations.all_blocks = not is_enough(seconds)
            return not relaxations.all_blocks

        self._raise_flow_bound(bound_by_blocks(self.problem, is_done, self.state.seconds_left, relaxations.block_seconds))
        self._bound_by_memory(fully=False)

    def _bound_by_flow(self, fully: bool = False) -> None:
        """Bound with the linear relaxation of placements, then with memory. Unless `fully`, as long as that may prune some of the
        points."""
        state, members, relaxations = self.state, self.members, self.relaxations
        if not relaxations.whole:  # in no process
            relaxations.whole = True
            flow = FlowRelaxation(self.problem)
            state.facts.variables[self.problem.mesh] = flow.form.model.variables
            self._raise_flow_bound(flow.bound(state.seconds_left()))
        self._bound_by_memory(fully)
        if state.any_open(members) and not state.is_large(members[0]):
            relaxations.sharp = True

    def _bound_by_memory(self, fully: bool) -> None:
        """Raise each point to its `memory_bound` by the tables of its mesh."""
        state, flow_seconds = self.state, self.relaxations.flow_seconds
        for each in self.members:
            each.raise_bound(flow_seconds)
            above = each.bound_seconds >= state.best_seconds() if fully else state.is_pruned(each)
            if not each.done and not above:
                grouped = with_zero_group(self.problem, each.point.zero_group)
                each.raise_bound(memory_bound(grouped, self.blocks, each.point.micro_batches, flow_seconds))


def bound_by_flow(state: SearchState, each: SearchPoint, problem: Problem) -> None:
    """Bound one point by its linear relaxation, by its own tables."""
    if state.any_open([each]):
        bound = _MeshBound(state, (each,))
        bound.problem, bound.relaxations.flow_seconds = problem, each.bound_seconds
        bound._bound_by_flow()


class MeshBounds:
    """The bounds of all meshes of a search, of which some are not sharp."""

    def __init__(self, state: SearchState) -> None:
        self.state = state
        self._open: dict[Mesh, _MeshBound] = {}

    def bound(self, points: Sequence[SearchPoint]) -> None:
        """Bound every point, mesh by mesh."""
        state = self.state
        by_mesh: dict[Mesh, list[SearchPoint]] = {}
        for each in points:
            by_mesh.setdefault(each.point.mesh, []).append(each)
        if not by_mesh:
            return
        first, *others = (_MeshBound(state, members) for members in by_mesh.values())
        first.bound()  # alone: its size, and the least step by data sheet, tell what the others are worth
        known = state.facts.copy()

        def bound(each: _MeshBound) -> _MeshReport:
            state.facts = known.copy()  # what this process saw of other meshes must not matter
            return each.bound()

        with Lookahead(bound, state.options.processes) as ahead:
            reports = [ahead.result(each, others[number:]) for number, each in enumerate(others, 1)]
        for mesh_bound, report in zip(others, reports, strict=True):
            mesh_bound.take(report)
        self._open |= {each.members[0].point.mesh: each for each in (first, *others) if not each.relaxations.sharp}

    def tasks(self, each: SearchPoint, enough: float) -> Iterator[BoundTask]:
        """Yield what raises the bound of a point, once."""
        mesh = each.point.mesh
        bound = self._open.get(mesh)
        if bound is not None and not bound.relaxations.sharp:
            yield BoundTask(mesh, mesh, not self.state.is_worth_a_copy(each), partial(bound.sharpen, enough), bound.take)
