"""The state of a running search: the points of the grid with their bounds, the best plan so far, the time that is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import monotonic

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.stage_devices import cluster_for_bounds
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.rules.registry import default_registry
from autopar.solve.ilp.solve_mesh import MeshSolution, MeshSolver
from autopar.solve.ilp.solver import Status
from autopar.solve.pipeline.pipeline_search import PipelineSearch
from autopar.solve.problem.forced_axes import forced_axes
from autopar.solve.problem.problem import Problem
from autopar.solve.space.grid import GridPoint, devices_per_node, grid_points
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import force_without_pipeline, pipeline_asked
from autopar.solve.space.problem_tables import ProblemTables

Progress = Callable[[str], None]

LARGE = 8000
"""Variables of placements from which on the problem under memory takes long."""

_WORTH_A_COPY = 2000
"""Variables of placements from which on a problem takes more than a tenth of a second."""


@dataclass(slots=True)
class SearchPoint:
    """A point of the grid: its solution so far, whether nothing remains to be done for it, and the step of its warm start (0: it
    has none)."""

    point: GridPoint
    solution: MeshSolution
    done: bool = False
    warm_start_seconds: float = 0.0

    @property
    def bound_seconds(self) -> float:
        return self.solution.bound_seconds

    def raise_bound(self, seconds: float) -> None:
        """Raise the bound of the point, which only grows."""
        self.solution.bound_seconds = max(self.solution.bound_seconds, seconds)

    def settle(self, status: Status, reason: str = "") -> None:
        """Leave the point without a plan."""
        self.solution.status, self.solution.reason, self.done = status, reason, True


class SearchState:
    """The state of a search. `variables` has the size of each mesh's problem, `points` the grid without pipelines; `pipelines`
    has its own points. `fitting` are all plans that were found and fit. `cluster_for_bounds`: with the prices of bounds that hold
    for more micro-batches too. `out_of_time`: the user's time limit ended something, so that the answer may depend on the
    machine."""

    def __init__(self, graph: Graph, cluster: Cluster, options: SearchOptions, progress: Progress) -> None:
        if options.batch not in (0, graph.batch):
            graph = replace(graph, batch=options.batch)
        self.graph, self.cluster, self.options, self.progress = graph, cluster, options, progress
        self.registry = options.registry or default_registry()
        self.cluster_for_bounds = cluster_for_bounds(cluster)
        self.tables = ProblemTables(graph, cluster, options, self.registry)
        self.began = monotonic()
        self.out_of_time = False
        self.pipelines = PipelineSearch(graph, cluster, options, self.registry, self.tables, self.seconds_left)
        self.best: MeshSolution | None = None
        self.fitting: list[MeshSolution] = []
        self.points: list[SearchPoint] = []
        self.variables: dict[Mesh, int] = {}

    def list_points(self) -> None:
        """List the grid, on meshes that can obey the pins. AutoparError where what is forced or pinned cannot be."""
        force = self.options.force
        if not pipeline_asked(force, self.options.schedule):
            node, rest = devices_per_node(self.cluster), force_without_pipeline(force)
            self.points = [
                SearchPoint(point, MeshSolution(point.mesh, micro_batches=point.micro_batches, zero_group=point.zero_group))
                for point in grid_points(self.graph, self.cluster.size, node, rest, self.registry, bool(self.options.pins))
                if not self.tables.refusal(point.mesh)
            ]
        self.pipelines.list_points()
        refusals = self.tables.refusals()
        if refusals and not (self.points or self.pipelines.points):
            raise PlanError(refusals[0])

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
        return self.best.evaluation.step_seconds if self.best is not None and self.best.evaluation is not None else inf

    def cutoff_seconds(self) -> float:
        """Return the seconds above which plans are not looked for: they do not count as equally fast."""
        return self.best_seconds() * (1 + self.options.indifference)

    def offer(self, solution: MeshSolution) -> None:
        """Take a solution as the best plan where it is."""
        if not solution.solved or solution.evaluation is None:
            return
        self.fitting.append(solution)
        if solution.evaluation.step_seconds < self.best_seconds():
            self.best = solution

    # -- pruning

    def is_pruned(self, each: SearchPoint, bound_seconds: float = 0.0) -> bool:
        """Return whether its bound, or this one, says that no plan of it is better than the best one by enough: two model axes
        have to be worth more than `indifference` where the best plan has fewer, a large problem `min_improvement_large`. Also
        where time is over: the bound stays."""
        mesh, options = each.point.mesh, self.options
        wider = len(mesh.axes) > 2 and (self.best is None or len(mesh.axes) > len(self.best.mesh.axes))
        enough = max(options.min_improvement, options.indifference if wider else 0.0)
        if self._is_large(mesh):
            enough = max(enough, options.min_improvement_large)
        bound_seconds = max(bound_seconds, each.bound_seconds)
        return bound_seconds > self.best_seconds() * (1 - enough) or self.seconds_left() <= 0

    def why_not_tried(self, each: SearchPoint) -> str:
        """Say why a point was left out that bounds do not prune."""
        if self._is_large(each.point.mesh):
            return f"a problem of more than {LARGE} variables, too large for the gain that is possible at most"
        return "the gain that is possible at most is too small for another axis"

    def any_open(self, points: Sequence[SearchPoint]) -> bool:
        """Return whether some of the points may still have a better plan."""
        return any(not each.done and not self.is_pruned(each) for each in points)

    def is_large(self, each: SearchPoint) -> bool:
        return self._is_large(each.point.mesh)

    def is_worth_a_copy(self, each: SearchPoint) -> bool:
        """Return whether its problem takes much longer than a copy of this process."""
        return self.variables.get(each.point.mesh, _WORTH_A_COPY) >= _WORTH_A_COPY

    def _is_large(self, mesh: Mesh) -> bool:
        """Return whether the problem of a mesh is large, or where its size is not known, those of as many axes."""
        most = self.variables.get(mesh)
        if most is None:
            most = max((size for other, size in tuple(self.variables.items()) if len(other.axes) == len(mesh.axes)), default=0)
        return most > LARGE

    def pending_points(self, points: Sequence[SearchPoint]) -> list[SearchPoint]:
        """Return the points that are not done, the lowest bounds first, few micro-batches before many; of large problems those
        with one ZeRO group before those with several, which are harder and seldom much better."""

        def order(each: SearchPoint) -> tuple[bool, float, int]:
            return each.point.zero_group > 0 and self.is_large(each), each.bound_seconds, each.point.micro_batches

        return sorted((each for each in points if not each.done), key=order)

    # -- the certificate

    def bound_without_pipelines(self) -> float:
        """Return a bound below every plan of each point that is no pipeline and is not shown to be infeasible."""
        feasible = (each for each in self.points if each.solution.status is not Status.INFEASIBLE)
        return min((each.bound_seconds for each in feasible), default=inf)

    def lower_bound_seconds(self) -> float:
        return min(self.bound_without_pipelines(), self.best_seconds(), *self.pipelines.bounds())

    def gap(self) -> float:
        best = self.best_seconds()
        return max(0.0, 1 - self.lower_bound_seconds() / best) if 0 < best < inf else 1.0
