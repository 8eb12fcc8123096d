"""The pipelines of the grid: a lower bound for each point, solutions of the best ones, and bounds that certify the rest.

A bound of a mesh is one of every pipeline whose stages have its model axes: of ``m`` micro-batches of ``b`` examples through
``p`` stages, the stage that works longest takes at least ``m x work(b) / p``, which is ``batch x ranks of the model axes /
devices x work(b) / b``, the same for all p; and work(b) / b is least for the largest b. It holds for every cut and every
schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.stage_devices import cluster_for_bounds, fastest_stage_cluster
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS, Axis
from autopar.rules.registry import Registry
from autopar.solve.bounds.block_relaxation import relax_blocks
from autopar.solve.bounds.flow_bound import FlowRelaxation, operation_bound
from autopar.solve.ilp.solve_mesh import MeshSolution
from autopar.solve.ilp.solver import Status
from autopar.solve.pipeline.pipeline_bound import (
    RelaxedCalls,
    StageRelaxation,
    call_seconds,
    operation_calls,
    relaxed_calls,
    with_traded_lines,
)
from autopar.solve.pipeline.pipeline_ranking import rank_pipelines
from autopar.solve.pipeline.split_blocks import with_split_blocks
from autopar.solve.pipeline.stage_program import ScheduleDetail
from autopar.solve.pipeline.stage_search import StageSearch
from autopar.solve.pipeline.tighten import BoundTightening, Task, TightenedBounds, TighteningSteps, raise_bound
from autopar.solve.problem.problem import Problem
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import ScheduleOption, chunks_per_stage, pipeline_asked, pipeline_points, schedule_options
from autopar.solve.space.problem_tables import ProblemTables

Axes = tuple[Axis, ...]


class PipelineSearch:
    """The search over pipelines. Its graph may have split blocks (`split_blocks`); `tables` are those of `graph` as it is.
    `all_solutions` has one entry for each point (all of its schedules together), then one for each pipeline that was priced."""

    def __init__(
        self, graph: Graph, cluster: Cluster, options: SearchOptions, registry: Registry, tables: ProblemTables,
        left: Callable[[], float],
    ) -> None:  # fmt: skip
        chunks = chunks_per_stage(options.force, options.schedule)
        split_graph = with_split_blocks(graph, cluster, {**options.force, "virtual": chunks} if chunks > 1 else options.force)
        tables = tables if split_graph is graph else ProblemTables(split_graph, cluster, options, registry)
        self.graph, self.cluster, self.options, self.registry, self.seconds_left = split_graph, cluster, options, registry, left
        self.tables = tables
        self.stage_search = StageSearch(split_graph, cluster, options, tables, left)
        self.points: dict[GridPoint, MeshSolution] = {}
        self.solutions: list[MeshSolution] = []
        self.seconds_per_example: dict[tuple[Axes, int], float] = {}
        self.ran = False
        self.mixed_devices = len({group.device for group in cluster.groups}) > 1
        self._relaxed: dict[object, RelaxedCalls] = {}
        self._operations: dict[GridPoint, RelaxedCalls] = {}
        self._least: dict[GridPoint, float] = {}
        self._mesh_relaxations: dict[object, StageRelaxation] = {}
        self._memory_bounds: dict[GridPoint, float] = {}
        self._estimated: dict[GridPoint, float] = {}
        self._tightening: BoundTightening | None = None

    @property
    def all_solutions(self) -> list[MeshSolution]:
        return [*self.points.values(), *self.solutions]

    def list_points(self) -> None:
        """List the points of the grid, on meshes that can obey the pins. AutoparError where a pipeline is forced that cannot
        be."""
        asked = pipeline_asked(self.options.force, self.options.schedule)
        if self.cluster.size == 1 and not asked:
            return
        for point in pipeline_points(self.graph, self.cluster, self.options.force, self.registry, self.options.schedule):
            if not self.tables.refusal(point.mesh):
                self.points[point] = MeshSolution(
                    point.mesh, micro_batches=point.micro_batches, zero_group=point.zero_group, stages=point.stages
                )
        if asked and not self.points:
            for refusal in self.tables.refusals():
                raise PlanError(refusal)
            option = f"schedule={self.options.schedule}" if self.options.schedule else f"virtual={self.options.force['virtual']}"
            raise PlanError(f"{option} needs a pipeline, and {self.graph.name} has none on {self.cluster.name}: leave it open")

    def learn_bound(self, problem: Problem, step_seconds: float) -> None:
        """Note a bound on the step of all plans on the problem's mesh, memory and state left out."""
        data = problem.mesh.size_of(DATA_AXIS)
        examples = problem.batch // data
        share = step_seconds * problem.cluster.size / self.cluster.size
        self.learn_rates({(problem.mesh.axes[1:], examples): share})

    def learn_rates(self, rates: Mapping[tuple[Axes, int], float]) -> None:
        """Take the `seconds_per_example` of another search."""
        for key, rate in rates.items():
            self.seconds_per_example[key] = max(self.seconds_per_example.get(key, 0.0), rate)

    def run(self, best_seconds: Callable[[], float]) -> Iterator[MeshSolution]:
        """Solve the points that bounds and estimates do not prune, and yield those that fit."""
        if not self.points:
            return
        for axes, members in self._families().items():
            self._bound_family(axes, members, best_seconds)
        bounds = {point: each.bound_seconds for point, each in self.points.items() if self._is_open(point, best_seconds())}
        bounds = dict(sorted(bounds.items(), key=lambda each: each[1]))
        order = rank_pipelines(self.stage_search, bounds, best_seconds() * (1 - self.options.min_improvement), self._with_memory)
        self._estimated = {point: seconds for seconds, point, _ in reversed(order)}
        for result in self.stage_search.solutions(order, best_seconds()):
            result.bound_seconds = self.points[self._point_of(result)].bound_seconds
            self.solutions.append(result)
            yield result
        self.ran = self.seconds_left() > 0

    def _point_of(self, result: MeshSolution) -> GridPoint:
        return GridPoint(result.mesh, result.micro_batches, result.zero_group, result.stages)

    def _is_open(self, point: GridPoint, best_seconds: float) -> bool:
        result = self.points[point]
        return result.status is not Status.INFEASIBLE and result.bound_seconds < best_seconds * (1 - self.options.min_improvement)

    def _families(self) -> dict[Axes, list[GridPoint]]:
        out: dict[Axes, list[GridPoint]] = {}
        for point in self.points:
            out.setdefault(point.mesh.axes[1:], []).append(point)
        return out

    def _examples(self, point: GridPoint) -> int:
        """Return the examples of one micro-batch on one data rank."""
        return self.graph.batch // point.micro_batches // point.mesh.size_of(DATA_AXIS)

    def _bound_family(self, axes: Axes, members: list[GridPoint], best_seconds: Callable[[], float]) -> None:
        """Bound a family by the least of what is known of micro-batches at least as large; where nothing is, the tables of the
        largest one."""
        largest = max(members, key=lambda point: (self._examples(point), point.stages))
        rates = [
            rate
            for (of, examples), rate in self.seconds_per_example.items()
            if of == axes and examples >= self._examples(largest)
        ]
        if not rates or self.mixed_devices:
            problem = self.problem(largest, for_smaller=True)
            bound = operation_bound(problem) / largest.stages
            if bound < best_seconds():
                bound = max(bound, FlowRelaxation(problem).bound(self.seconds_left()) / largest.stages)
            rates = [bound]
        for point in members:
            self.points[point].bound_seconds = max(self.points[point].bound_seconds, max(rates))

    def tighten(self, best_seconds: float, others_seconds: float) -> None:
        """Raise the least bounds, as long as they are what the certificate is short of (`others_seconds`: bounds of what is no
        pipeline): first with memory and state, then with the tables of their own micro-batch and the bubble too. Goes on where it
        ended before."""
        if not self.ran:
            return
        self._tightening = self._tightening or self._new_tightening(best_seconds)
        self._tightening.enough_seconds = min(best_seconds * (1 - self.options.sharp_gap), others_seconds)
        self._tightening.run(self.seconds_left, self.options.processes)

    def _new_tightening(self, best_seconds: float) -> BoundTightening:
        def bound_schedule(task: Task) -> TightenedBounds:
            members, option, detail = task
            least, seconds = self.schedule_bound(members, option, detail, best_seconds)
            return TightenedBounds(seconds, least, self._relaxed.get(self._family(members[0])))

        steps = TighteningSteps(
            self._with_memory, self._is_bounded, self.schedules, bound_schedule, self._family, self._relaxed
        )  # fmt: skip
        return BoundTightening(self.points, steps, best_seconds)

    def schedules(self, members: Sequence[GridPoint]) -> Sequence[ScheduleOption]:
        """Return the schedules of points; none where they have too few micro-batches for a forced one."""
        try:
            return schedule_options(self.graph, members[0], self.options.force, self.options.schedule)
        except PlanError:
            return ()

    def _with_memory(self, point: GridPoint) -> float:
        """Return the `mesh_bound` with the bound that the point has, once."""
        if point not in self._memory_bounds:
            self._memory_bounds[point] = self.mesh_bound(point, self.points[point].bound_seconds)
            raise_bound(self.points[point], self._memory_bounds[point])
        return self._memory_bounds[point]

    def _is_bounded(self, point: GridPoint) -> bool:
        """Return whether `mesh_bound` was taken, or says less than the point's own tables, of the largest micro-batch."""
        return point in self._memory_bounds or self._largest(point) == point.micro_batches

    def _largest(self, point: GridPoint) -> int:
        """The fewest micro-batches on its mesh of which its own are parts."""
        same_mesh = (each for each in self.points if each.mesh == point.mesh and point.micro_batches % each.micro_batches == 0)
        return min(each.micro_batches for each in same_mesh)

    def _family(self, point: GridPoint) -> object:
        """Return what points of one relaxation have in common."""
        return point.mesh.axes[1:], self._examples(point)

    def problem(self, point: GridPoint, for_smaller: bool = False) -> Problem:
        """Return the tables of one stage, on devices that are no slower than those of any stage. `for_smaller`: with prices whose
        bounds hold for smaller micro-batches too."""
        cluster = cluster_for_bounds(self.cluster) if for_smaller else self.cluster
        return self.tables.problem(replace(point, zero_group=0), None, fastest_stage_cluster(cluster, point.stages))

    def mesh_bound(self, point: GridPoint, flow_seconds: float) -> float:
        """Bound a point by the seconds of its calls, with memory and the communication of state, by the tables of the largest
        micro-batch on its mesh: a call of a smaller one takes at least its share."""
        largest = replace(point, micro_batches=self._largest(point))
        key = largest.mesh, largest.micro_batches
        if key not in self._mesh_relaxations:
            problem = self.problem(largest, for_smaller=True)
            calls = {name: call_seconds(problem, name, 0.0) for name in problem.blocks}
            self._mesh_relaxations[key] = StageRelaxation(problem, RelaxedCalls(0.0, relax_blocks(problem), calls), self.cluster)
        relaxation = self._mesh_relaxations[key]
        share = largest.micro_batches / point.micro_batches
        calls = {name: each.part(share) for name, each in relaxation.relaxed.calls.items()}
        relaxed = replace(relaxation.relaxed, flow_seconds=flow_seconds, calls=calls)
        return replace(relaxation, relaxed=relaxed).under_any_schedule(point) / self._ranks_per_core

    def schedule_bound(
        self, members: Sequence[GridPoint], option: ScheduleOption, detail: ScheduleDetail, best_seconds: float
    ) -> tuple[float, float]:
        """Return the bounds of points that differ in `zero_group` only, under any schedule, and under this one. Operations alone
        first: those of small micro-batches often say enough."""
        point, shared, key = members[0], self._ranks_per_core, self._family(members[0])
        problem = self.problem(point)
        if key not in self._relaxed:
            at = replace(point, zero_group=0)  # not its family: which of its points comes first differs between processes
            if at not in self._operations:
                self._operations[at] = operation_calls(problem, point.stages)
            operations = self._operations[at]
            least = StageRelaxation(problem, operations, self.cluster).least_under_any_schedule(members) / shared
            if least >= best_seconds * (1 - self.options.sharp_gap):
                return least, least
            self._relaxed[key] = relaxed_calls(problem, point.stages, operations.blocks, self.seconds_left)
        if not self._relaxed[key].serves(detail):
            self._relaxed[key] = with_traded_lines(problem, self._relaxed[key], self.seconds_left)
        relaxation, at = StageRelaxation(problem, self._relaxed[key], self.cluster), replace(point, zero_group=0)
        if at not in self._least:
            self._least[at] = relaxation.least_under_any_schedule(members) / shared
        least = self._least[at]
        if least >= best_seconds:
            return least, least
        return least, max(least, relaxation.under_schedule(members, option, detail) / shared)

    @property
    def _ranks_per_core(self) -> float:
        """The factor by which a step is at most shorter than its schedule's clock (`schedules.shared_cores`)."""
        return max(1.0, self.cluster.device.ranks_per_core)

    def bounds(self) -> Iterable[float]:
        """Return the bounds below every pipeline of each point that is not shown to be infeasible."""
        return [result.bound_seconds for result in self.points.values() if result.status is not Status.INFEASIBLE]

    def finished(self, best_seconds: float) -> list[MeshSolution]:
        """Return all results. What was not solved beside `best_seconds` is pruned by its bound, or says why it was not tried."""
        for point, result in self.points.items():
            if self.ran and result.status is Status.TIMEOUT:
                result.leave(best_seconds, self.options.min_improvement, self._why_not_tried(point))
        return self.all_solutions

    def _why_not_tried(self, point: GridPoint) -> str:
        if point in self.stage_search.priced:
            return "the partitions that were priced do not fit, or are listed with their schedules"
        if point in self._estimated:
            return f"estimated at {self._estimated[point]:.4g} s, and enough others were priced before"
        return "estimated to be no faster than the best plan then"
