"""The state of a running search: the points of the grid with their bounds, the best plan so far, the time that is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.stage_devices import cluster_for_bounds, fastest_stage_cluster
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS, Axis, Mesh
from autopar.rules.registry import default_registry
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.solve_mesh import MeshSolution, MeshSolver
from autopar.solve.pipeline.split_blocks import with_split_blocks
from autopar.solve.problem.forced_axes import forced_axes
from autopar.solve.problem.problem import Problem
from autopar.solve.space.grid import GridPoint, devices_per_node, grid_points
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import chunks_per_stage, force_without_pipeline, pipeline_asked, pipeline_points
from autopar.solve.space.problem_tables import ProblemTables

Progress = Callable[[str], None]

LARGE = 8000
"""Variables of placements from which on the problem under memory takes long."""

_WORTH_A_COPY = 2000
"""Variables of placements from which on a problem takes more than a tenth of a second."""


@dataclass(slots=True, eq=False)
class SearchPoint:
    """A point of the grid: its solution so far, whether nothing remains to be done for it, and why it was `left_out` where
    bounds do not prune it."""

    solution: MeshSolution
    done: bool = False
    left_out: str = ""

    @property
    def point(self) -> GridPoint:
        return self.solution.point

    @property
    def is_pipeline(self) -> bool:
        """Whether it stands for pipelines, with all of their schedules."""
        return self.point.stages > 1

    @property
    def bound_seconds(self) -> float:
        return self.solution.bound_seconds

    def raise_bound(self, seconds: float) -> None:
        """Raise the bound of the point, which only grows; infinite where nothing fits."""
        self.solution.bound_seconds = max(self.solution.bound_seconds, seconds)
        if seconds == inf:
            self.settle(Status.INFEASIBLE)

    def settle(self, status: Status, reason: str = "") -> None:
        """Leave the point without a plan."""
        self.solution.status, self.solution.reason, self.done = status, reason, True


@dataclass(slots=True)
class MeshFacts:
    """What bounds of some meshes say of other points: the least step of any plan by data sheet (0 before the first problem is
    there), the size of each mesh's problem, and bounds on all pipelines by the model axes of their stages and the examples of a
    micro-batch on one data rank."""

    ideal_seconds: float = 0.0
    variables: dict[Mesh, int] = field(default_factory=dict)
    pipeline_seconds: dict[tuple[tuple[Axis, ...], int], float] = field(default_factory=dict)

    def copy(self) -> MeshFacts:
        return MeshFacts(self.ideal_seconds, dict(self.variables), dict(self.pipeline_seconds))

    def learn(self, other: MeshFacts) -> None:
        """Take the facts of another process."""
        self.ideal_seconds = self.ideal_seconds or other.ideal_seconds
        self.variables.update(other.variables)
        for key, seconds in other.pipeline_seconds.items():
            self.pipeline_seconds[key] = max(self.pipeline_seconds.get(key, 0.0), seconds)

    def learn_bound(self, problem: Problem, step_seconds: float) -> None:
        """Take a bound on the step of all plans on the problem's mesh, memory and state left out."""
        key = problem.mesh.axes[1:], problem.graph.batch // problem.mesh.size_of(DATA_AXIS)
        self.learn(MeshFacts(pipeline_seconds={key: step_seconds}))


class SearchState:
    """The state of a search. `points` is the whole grid, with and without pipelines. `pipeline_graph` may have split blocks
    (`split_blocks`), with `pipeline_tables` of its own. `fitting` are all plans that were found and fit. `cluster_for_bounds`:
    with the prices of bounds that hold for more micro-batches too. `out_of_time`: the user's time limit ended something, so that
    the answer may depend on the machine."""

    def __init__(self, graph: Graph, cluster: Cluster, options: SearchOptions, progress: Progress) -> None:
        if options.batch not in (0, graph.batch):
            graph = replace(graph, batch=options.batch)
        self.graph, self.cluster, self.options, self.progress = graph, cluster, options, progress
        self.registry = options.registry or default_registry()
        self.cluster_for_bounds = cluster_for_bounds(cluster)
        self.tables = self.pipeline_tables = ProblemTables(graph, cluster, options, self.registry)
        chunks = chunks_per_stage(options.force, options.schedule)
        force = {**options.force, "virtual": chunks} if chunks > 1 else options.force
        self.pipeline_graph = with_split_blocks(graph, cluster, force)
        if self.pipeline_graph is not graph:
            self.pipeline_tables = ProblemTables(self.pipeline_graph, cluster, options, self.registry)
        self.began = monotonic()
        self.out_of_time = False
        self.best: MeshSolution | None = None
        self.fitting: list[MeshSolution] = []
        self.points: list[SearchPoint] = []
        self.facts = MeshFacts()

    def list_points(self) -> None:
        """List the grid, on meshes that can obey the pins. AutoparError where what is forced or pinned cannot be."""
        force, schedule, size = self.options.force, self.options.schedule, self.cluster.size
        asked = pipeline_asked(force, schedule)
        points: list[GridPoint] = []
        if not asked:
            node, rest = devices_per_node(self.cluster), force_without_pipeline(force)
            points += grid_points(self.graph, size, node, rest, self.registry, bool(self.options.pins))
        if asked or size > 1:
            points += pipeline_points(self.pipeline_graph, self.cluster, force, self.registry, schedule)
        self.points = [
            SearchPoint(MeshSolution(each))
            for each in points
            if not (self.pipeline_tables if each.stages > 1 else self.tables).refusal(each.mesh)
        ]
        if self.points:
            return
        for refusal in self.tables.refusals() or self.pipeline_tables.refusals():
            raise PlanError(refusal)
        if asked:
            option = f"schedule={schedule}" if schedule else f"virtual={force['virtual']}"
            raise PlanError(f"{option} needs a pipeline, and {self.graph.name} has none on {self.cluster.name}: leave it open")

    @property
    def mesh_points(self) -> list[SearchPoint]:
        """The points that are no pipelines."""
        return [each for each in self.points if not each.is_pipeline]

    @property
    def pipeline_points(self) -> list[SearchPoint]:
        return [each for each in self.points if each.is_pipeline]

    def problem(self, point: GridPoint, cluster: Cluster | None = None) -> Problem:
        """Return the tables of a point; of a pipeline those of one stage, on devices that are no slower than those of any, whose
        state is shared by the whole data axis."""
        if point.stages == 1:
            return self.tables.problem(point, cluster=cluster)
        devices = fastest_stage_cluster(cluster or self.cluster, point.stages)
        return self.pipeline_tables.problem(replace(point, zero_group=0), cluster=devices)

    def solver(self, problem: Problem, solution: MeshSolution) -> MeshSolver:
        """The ILP of a problem, which writes to `solution`."""
        axes = forced_axes(problem.mesh, self.options.force)
        return MeshSolver(self.graph, problem, axes, self.options.relative_gap, solution)

    # -- time and the best plan

    @property
    def forced(self) -> bool:
        """Whether the user fixes placements, degrees or a schedule."""
        force = self.options.force
        return bool(force_without_pipeline(force) or pipeline_asked(force, self.options.schedule) or self.options.pins)

    def seconds_left(self) -> float:
        """The rest of the user's time limit, the only clock that a search looks at: all other limits are counts."""
        left = self.options.time_limit_seconds - (monotonic() - self.began)
        self.out_of_time = self.out_of_time or left <= 0
        return left

    def best_seconds(self) -> float:
        return self.best.plan.evaluation.step_seconds if self.best is not None and self.best.plan is not None else inf

    def cutoff_seconds(self) -> float:
        """Return the seconds above which plans are not looked for: they do not count as equally fast."""
        return self.best_seconds() * (1 + self.options.indifference)

    def offer(self, solution: MeshSolution) -> None:
        """Take a solution as the best plan where it is."""
        if not solution.solved or solution.plan is None:
            return
        self.fitting.append(solution)
        if solution.plan.evaluation.step_seconds < self.best_seconds():
            self.best = solution

    # -- pruning

    def is_pruned(self, each: SearchPoint, bound_seconds: float = 0.0) -> bool:
        """Return whether its bound, or this one, says that no plan of it is better than the best one by enough. Also where time
        is over: the bound stays."""
        bound_seconds = max(bound_seconds, each.bound_seconds)
        return bound_seconds > self.best_seconds() * (1 - self._least_improvement(each)) or self.seconds_left() <= 0

    def _least_improvement(self, each: SearchPoint) -> float:
        """Return by how much a plan has to be better: two model axes have to be worth more than `indifference` where the best
        plan has fewer, a large problem `min_improvement_large`; neither is asked of pipelines, whose stages are solved by
        themselves."""
        options, axes = self.options, len(each.point.mesh.axes)
        if each.is_pipeline:
            return options.min_improvement
        wider = axes > 2 and (self.best is None or axes > len(self.best.point.mesh.axes))
        large = options.min_improvement_large if self.is_large(each) else 0.0
        return max(options.min_improvement, options.indifference if wider else 0.0, large)

    def why_not_tried(self, each: SearchPoint) -> str:
        """Say why a point was left out that bounds do not prune."""
        if each.left_out:
            return each.left_out
        if self.is_large(each):
            return f"a problem of more than {LARGE} variables, too large for the gain that is possible at most"
        return "the gain that is possible at most is too small for another axis"

    def is_open(self, each: SearchPoint) -> bool:
        """Return whether a point may still have a better plan."""
        return not each.done and not self.is_pruned(each)

    def any_open(self, points: Sequence[SearchPoint]) -> bool:
        return any(map(self.is_open, points))

    def is_large(self, each: SearchPoint) -> bool:
        """Return whether the problem of its mesh is large, or where its size is not known, those of as many axes."""
        mesh, variables = each.point.mesh, self.facts.variables
        most = variables.get(mesh)
        if most is None:
            most = max((size for other, size in variables.items() if len(other.axes) == len(mesh.axes)), default=0)
        return most > LARGE

    def is_worth_a_copy(self, each: SearchPoint) -> bool:
        """Return whether its problem takes much longer than a copy of this process."""
        return self.facts.variables.get(each.point.mesh, _WORTH_A_COPY) >= _WORTH_A_COPY

    def pending_points(self, points: Sequence[SearchPoint]) -> list[SearchPoint]:
        """Return the points that are not done, the lowest bounds first, few micro-batches before many; of large problems those
        with one ZeRO group before those with several, which are harder and seldom much better."""

        def order(each: SearchPoint) -> tuple[bool, float, int]:
            return each.point.zero_group > 0 and self.is_large(each), each.bound_seconds, each.point.micro_batches

        return sorted((each for each in points if not each.done), key=order)

    # -- the certificate

    def feasible_points(self) -> list[SearchPoint]:
        """Return the points that are not shown to be infeasible: each plan is of one of them, and not below its bound."""
        return [each for each in self.points if each.solution.status is not Status.INFEASIBLE]

    def lower_bound_seconds(self) -> float:
        return min((self.best_seconds(), *(each.bound_seconds for each in self.feasible_points())))

    def gap(self) -> float:
        best = self.best_seconds()
        return max(0.0, 1 - self.lower_bound_seconds() / best) if 0 < best < inf else 1.0
