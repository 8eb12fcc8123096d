"""The search: bounds for every point of the grid, the promising ones solved and priced again, the best, a certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf
from time import monotonic

from autopar.cost_models.evaluate import Evaluation
from autopar.cost_models.hardware import Cluster
from autopar.errors import Infeasible, UnsupportedOp
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.plan import Candidate
from autopar.rules.expand import missing_rules
from autopar.rules.registry import default_registry
from autopar.solve.bounds import Flow, ideal_seconds, work_bound
from autopar.solve.candidates import Attempt, MeshResult
from autopar.solve.first_look import FirstLooks
from autopar.solve.grid import Point, grid, inner_devices
from autopar.solve.ilp import Status
from autopar.solve.infeasible import explanation
from autopar.solve.memory import least_kept_bytes
from autopar.solve.meshes import mesh_of
from autopar.solve.options import SearchOptions
from autopar.solve.pipeline_grid import wanted, without_pipeline
from autopar.solve.pipeline_search import PipelineSearch
from autopar.solve.problem import Problem, regrouped
from autopar.solve.room import BlockNeeds, needs, room_bound
from autopar.solve.tables import Tables

__all__ = ["SearchOptions", "SearchResult", "search"]

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The plan that was chosen. `lower_bound_seconds` is below every plan on every point of the grid, `gap` is relative to the
    step. `meshes` has every point. `warnings` would be bugs: an evaluator and an ILP that disagree. `graph` is that of the
    candidate: pipeline stages may have blocks of their own."""

    candidate: Candidate
    evaluation: Evaluation
    baselines: Mapping[str, Evaluation | None]
    status: Status
    lower_bound_seconds: float
    gap: float
    meshes: tuple[MeshResult, ...]
    seconds: float
    warnings: tuple[str, ...] = ()
    graph: Graph | None = None


def search(graph: Graph, cluster: Cluster, options: SearchOptions, progress: Progress | None = None) -> SearchResult:
    """The best plan for `graph` on `cluster`. Raises BatchError, ClusterError, UnsupportedOp (strict) and Infeasible.

    Every mesh gets a bound (`bounds`), which is one of pipelines whose stages have its model axes too. Points whose bound is
    not below the best plan are not looked at. The others are solved without the memory constraint first, which is the answer
    where that plan fits, and then under it. KeyboardInterrupt ends the search with the best plan so far, where there is one.
    """
    return _Search(graph, cluster, options, progress or (lambda line: None)).run()


@dataclass(slots=True)
class _Point:
    """What is known of one point of the grid: its result, and whether it is settled."""

    point: Point
    result: MeshResult
    done: bool = False

    @property
    def bound(self) -> float:
        return self.result.bound_seconds


class _Search:
    def __init__(self, graph: Graph, cluster: Cluster, options: SearchOptions, progress: Progress) -> None:
        if options.batch not in (0, graph.batch):
            graph = replace(graph, batch=options.batch)
        self.graph, self.cluster, self.options, self.progress = graph, cluster, options, progress
        self.registry = options.registry or default_registry()
        self.tables = Tables(graph, cluster, options, self.registry)
        self.began = monotonic()
        self.best: MeshResult | None = None
        self.baselines: dict[str, MeshResult | None] = {"ddp": None, "fsdp": None}
        self.points: list[_Point] = []
        self.pipelines = PipelineSearch(graph, cluster, options, self.registry, self.tables, self._left_for_pipelines)
        self.tight = False
        self.sizes: dict[Mesh, int] = {}
        self.least = 0.0
        self.piped_at = self.began

    def run(self) -> SearchResult:
        self._check_rules()
        node = inner_devices(self.cluster)
        force = self.options.force
        plain = () if wanted(force) else grid(self.graph, self.cluster.size, node, without_pipeline(force), self.registry)
        self.points = [
            _Point(point, MeshResult(point.mesh, micro_batches=point.micro_batches, zero_group=point.zero_group))
            for point in plain
        ]
        self.pipelines.list_points()
        meshes = {each.point.mesh for each in self.points}
        piped = f", {len(self.pipelines.results)} pipelines" if self.pipelines.results else ""
        self.progress(f"grid: {len(self.points)} candidates on {len(meshes)} meshes of {self.cluster.size} devices{piped}")
        interrupted = False
        try:
            self._stages()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            interrupted = True
            self.progress("interrupted: the best plan so far")
        if self.best is None:
            self._fail()
        assert self.best is not None
        return self._result(self.best, interrupted)

    def _stages(self) -> None:
        """At most one model axis first: such problems are small, and what they give prunes most of the others."""
        self._compare()
        for wide in (False, True):
            members = [each for each in self.points if (len(each.point.mesh.axes) > 2) == wide]
            self._bound(members)
            self._look(members)
            if not wide:
                self._pipelines()
            for each in self._promising(members):
                if not self.tight and not self._hopeless(each.bound):
                    self._unlimited(each)
            for each in self._promising(members):
                if not self._hopeless(each.bound):
                    self._limited(each)

    def _pipelines(self) -> None:
        """Beside the meshes of their stages: where they are better, most meshes need no look."""
        self.piped_at = monotonic()
        for result in self.pipelines.run(self._best_seconds):
            self._offer(result)
            self._report(result)

    def _look(self, members: Sequence[_Point]) -> None:
        """At large problems, before they are solved under memory: what fits, quickly. A forced axis is not for that: what it may
        leave whole is part of the problem."""
        if self._forced():
            return
        looks = FirstLooks(self.graph, self.cluster, self.options, self.tables, self._left)
        for each in self._promising(members):
            if self._large(each) and not self._hopeless(each.bound):
                began = monotonic()
                found = looks.look(each.point)
                if found is not None:
                    found.bound_seconds, found.seconds = each.bound, monotonic() - began
                    if found.step_seconds is not None and found.step_seconds < self._best_seconds():
                        self._offer(found)
                        self._report(found)

    # -- what is worth a look

    def _forced(self) -> bool:
        force = self.options.force
        return bool(without_pipeline(force) or wanted(force) or self.options.pins)

    def _left(self) -> float:
        return self.options.time_limit_seconds - (monotonic() - self.began)

    def _left_for_pipelines(self) -> float:
        if wanted(self.options.force):
            return self._left()
        large = any(variables > LARGE for mesh, variables in self.sizes.items() if len(mesh.axes) == 2)
        share = (_LARGE_SHARE if large else _PIPELINES_SHARE) * self.options.time_limit_seconds
        return min(self._left(), share - (monotonic() - self.piped_at))

    def _best_seconds(self) -> float:
        return self.best.evaluation.step_seconds if self.best is not None and self.best.evaluation is not None else inf

    def _hopeless(self, bound_seconds: float, worth: float = 0.0) -> bool:
        """Also where time is over: the bound stays."""
        return bound_seconds > self._best_seconds() * (1 - max(worth, self.options.worth)) or self._left() <= 0

    def _offer(self, result: MeshResult | None) -> None:
        if result is None or not result.solved or result.evaluation is None:
            return
        if result.evaluation.step_seconds < self._best_seconds():
            self.best = result

    def _check_rules(self) -> None:
        if not self.options.strict:
            return
        for block in self.graph.blocks:
            for node in missing_rules(block, self.registry):
                raise UnsupportedOp(
                    f"{node.op} at {node.source or node.name} has no sharding rule: "
                    f"give one with autopar.register_rule({node.op.replace('.', '::', 1)!r}, ...), or plan without strict"
                )

    # -- stages

    def _attempt(self, problem: Problem, result: MeshResult) -> Attempt:
        force = self.options.force
        axes = tuple(i for i, axis in enumerate(problem.mesh.axes) if axis.name != DATA_AXIS and axis.name in force)
        return Attempt(self.graph, problem, axes, self.options.relative_gap, result)

    def _compare(self) -> None:
        """Plain data parallelism over all devices, replicated and fully sharded, in as few micro-batches as fit."""
        mesh = mesh_of(self.cluster.size)
        if self.graph.batch % mesh.size:
            return
        counts = sorted({each.point.micro_batches for each in self.points if each.point.mesh == mesh} or {1})
        tables = Tables(self.graph, self.cluster, replace(self.options, pins={}), self.registry)
        for name, zero in (("ddp", 0), ("fsdp", 3)):
            for count in counts:
                attempt = self._attempt(tables.problem(Point(mesh, count), (zero,)), MeshResult(mesh, micro_batches=count))
                attempt.unlimited(self._left())
                self.baselines[name] = attempt.result
                if attempt.result.solved:
                    break
            found = self.baselines[name]
            if not self._forced():
                self._offer(found)

    def _bound(self, points: Sequence[_Point]) -> None:
        """A bound for every point; of a mesh, at its least number of micro-batches, with what memory and state add for each. The
        dear bound only where the cheap one does not prune."""
        by_mesh: dict[Mesh, list[_Point]] = {}
        for each in points:
            by_mesh.setdefault(each.point.mesh, []).append(each)
        with ThreadPoolExecutor(_THREADS) as pool:  # one solves while the other writes tables
            try:
                list(pool.map(self._bound_mesh, by_mesh.values()))
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _bound_mesh(self, members: Sequence[_Point]) -> None:
        for each in members:
            each.result.bound_seconds = max(each.bound, self.least)
        if self._left() <= 0:
            return
        began = monotonic()
        problem = self.tables.problem(min((each.point for each in members), key=lambda point: point.micro_batches))
        if not self._forced() and self._attempt(problem, members[0].result).repeats_everything():
            for each in members:
                each.result.status, each.done = Status.PRUNED, True
        least = work_bound(problem)
        self.least = self.least or ideal_seconds(problem)
        self.pipelines.learn(problem, least)
        for each in members:
            each.result.bound_seconds = least
        if self._any(members):
            of = needs(problem)
            self._room(members, problem, of, {1.0: least})
            self._flow(members, problem, of)
        members[0].result.seconds += monotonic() - began

    def _flow(self, members: Sequence[_Point], problem: Problem, of: tuple[BlockNeeds, ...]) -> None:
        """With the linear relaxation of placements, and then with what its collectives and state send over one link."""
        if not self._any(members):
            return
        flow = Flow(problem)
        self.sizes[problem.mesh] = flow.made.model.variables
        bounds: dict[float, float] = {}
        for weight in (1.0, 0.5):
            if self._any(members) and (weight == 1.0 or flow.shared):
                bounds[weight] = flow.bound(self._left(), weight)
                if weight == 1.0:
                    self.pipelines.learn(problem, bounds[1.0])
                self._room(members, problem, of, bounds)

    def _promising(self, points: Sequence[_Point]) -> list[_Point]:
        """What is not done, the lowest bounds first, whole batches before parts; of large problems those with one group of the
        state before those with several, which are harder and seldom much better."""

        def order(each: _Point) -> tuple[bool, float, int]:
            return each.point.zero_group > 0 and self._large(each), each.bound, each.point.micro_batches

        return sorted((each for each in points if not each.done), key=order)

    def _large(self, each: _Point) -> bool:
        return self.sizes.get(each.point.mesh, 0) > LARGE

    def _any(self, members: Sequence[_Point]) -> bool:
        """Whether some of the points is still worth a look."""
        return any(not each.done and not self._hopeless(each.bound) for each in members)

    def _room(self, members: Sequence[_Point], problem: Problem, of: tuple[BlockNeeds, ...], flow: Mapping[float, float]) -> None:
        """`room_bound` of each point by the tables of its mesh."""
        for each in members:
            if each.done or self._hopeless(max(each.bound, flow[1.0])):
                each.result.bound_seconds = max(each.bound, flow[1.0])
                continue
            bound = room_bound(regrouped(problem, each.point.zero_group), of, each.point.micro_batches, flow)
            each.result.bound_seconds = max(each.bound, bound)
            if bound == inf:
                each.result.status, each.done = Status.INFEASIBLE, True

    def _unlimited(self, each: _Point) -> None:
        """Without the memory constraint, unless a look shows that such a plan does not fit."""
        problem = self.tables.problem(each.point)
        if least_kept_bytes(problem) > self.cluster.device.room_bytes:
            return
        if room_bound(replace(problem, zeros=(min(problem.zeros),)), (), each.point.micro_batches, {1.0: 0.0}) == inf:
            return  # it would replicate what does not fit
        before = each.bound
        self._attempt(problem, each.result).unlimited(self._left())
        each.result.bound_seconds = max(before, each.result.bound_seconds)
        self._offer(each.result)
        if each.result.solved:
            each.done = True
            self._dominate(each)
        else:
            self.tight = True  # one plan too large, and the others are solved under the limit at once
        self._report(each.result)

    def _dominate(self, solved: _Point) -> None:
        """More micro-batches are not faster, where the fewer ones fit."""
        for each in self.points:
            same = (each.point.mesh, each.point.zero_group) == (solved.point.mesh, solved.point.zero_group)
            if same and not each.done and each.point.micro_batches % solved.point.micro_batches == 0:
                each.result.bound_seconds = max(each.bound, solved.bound)
                each.result.status, each.done = Status.PRUNED, True

    def _limited(self, each: _Point) -> None:
        """Under the memory constraint. Before that the sharper bound of this number of micro-batches, and where the problem is
        large, the linear relaxation: only what may be better by `worth_large` is solved then."""
        problem = self.tables.problem(each.point)
        if each.point.micro_batches > 1:
            self._flow([each], problem, needs(problem))
        attempt = self._attempt(problem, each.result)
        large = self._large(each)
        worth = self.options.worth_large if large else 0.0
        if large and not self._hopeless(each.bound, worth):
            found = attempt.relaxed(self._left() if self._forced() else min(self._left(), _LARGE_SECONDS))
            if found is None and self.best is not None:
                return  # it stays with the bound that it has
            each.result.bound_seconds = found or each.bound
        if each.bound == inf:
            each.result.status, each.done = Status.INFEASIBLE, True
        if self._hopeless(each.bound, worth):
            return
        least = each.bound
        hurry = self.best is not None and not self._forced()
        attempt.limited(min(self._left(), _HARD_SECONDS) if hurry else self._left())
        if each.result.status is not Status.INFEASIBLE:
            each.result.bound_seconds = max(each.bound, least)
        each.done = True
        self._offer(each.result)
        self._report(each.result)

    # -- results

    def _report(self, result: MeshResult) -> None:
        evaluation = result.evaluation
        size = f"{evaluation.step_seconds:.4g} s, {evaluation.peak_memory_bytes / 2**30:.1f} GiB" if evaluation else ""
        if result.solved:
            text = f"{result.status:10} {size}"
        elif result.excess_bytes:
            text = f"{result.status:10} short of {result.excess_bytes / 2**30:.1f} GiB per device"
        elif size:
            text = f"too large  {size}: to be solved under the memory limit"
        else:
            text = str(result.status)
        best = f"; best {self._best_seconds():.4g} s" if self.best is not None else ""
        gap = f", gap {100 * self._gap():.1f} %" if self.best is not None and self._lower() > 0 else ""
        self.progress(f"{result!s:36} {text} ({result.seconds:.1f} s{best}{gap})")

    def _bounds(self) -> Iterable[float]:
        """Below every plan of each point that is not shown to be infeasible."""
        for each in self.points:
            if each.result.status is not Status.INFEASIBLE:
                yield each.bound
        yield from self.pipelines.bounds()

    def _lower(self) -> float:
        return min([*self._bounds(), self._best_seconds()])

    def _gap(self) -> float:
        best = self._best_seconds()
        return max(0.0, 1 - self._lower() / best) if 0 < best < inf else 1.0

    def _fail(self) -> None:
        results = [each.result for each in self.points]
        if wanted(self.options.force):
            self.pipelines.fail()
        if any(result.status is Status.TIMEOUT for result in results):
            raise Infeasible(f"no plan for {self.graph.name} within {self.options.time_limit_seconds:g} s: raise the time limit")
        raise Infeasible(explanation(self.graph, self.cluster, self.options, self.registry, self._nearest()))

    def _nearest(self) -> list[Attempt]:
        """What lacks least: per mesh the smallest micro-batches, all state sharded, few meshes; and by how much."""
        smallest: dict[Mesh, _Point] = {}
        for each in self.points:
            first = smallest.setdefault(each.point.mesh, each)
            if (-each.point.micro_batches, each.point.zero_group) < (-first.point.micro_batches, first.point.zero_group):
                smallest[each.point.mesh] = each
        out = []
        for each in sorted(smallest.values(), key=lambda each: len(each.point.mesh.axes))[:_LOOKS]:
            attempt = self._attempt(self.tables.problem(each.point), each.result)
            attempt.result.excess_bytes = attempt.missing_bytes(_LOOK_SECONDS)
            out.append(attempt)
        return out

    def _result(self, best: MeshResult, interrupted: bool) -> SearchResult:
        assert best.candidate is not None and best.evaluation is not None
        for each in self.points:
            if not each.done and not interrupted and self._left() > 0:
                each.result.status = Status.PRUNED
        results = [*(each.result for each in self.points), *self.pipelines.finished()]
        pruned = sum(result.status is Status.PRUNED for result in results)
        solved = sum(result.solved for result in results)
        self.progress(
            f"{len(results)} candidates: {solved} solved, {pruned} pruned by bounds, "
            f"{sum(result.status is Status.INFEASIBLE for result in results)} do not fit; gap {100 * self._gap():.2g} %"
        )
        proven = not interrupted and all(result.status is not Status.TIMEOUT for result in results)
        status = Status.OPTIMAL if proven and best.status is Status.OPTIMAL else Status.FEASIBLE
        warnings = [warning for result in results for warning in result.warnings]
        return SearchResult(
            best.candidate,
            best.evaluation,
            {name: result.evaluation if result is not None else None for name, result in self.baselines.items()},
            status,
            self._lower(),
            self._gap(),
            tuple(results),
            monotonic() - self.began,
            tuple(warnings),
            best.graph or self.graph,
        )


_THREADS = 2

_LOOKS = 8
"""Meshes that are looked at for what an infeasible problem lacks."""

_LOOK_SECONDS = 5.0

_LARGE_SECONDS = 2.0
"""For the linear relaxation of a large problem under memory: one that takes longer is left, with the bound that it has."""

_HARD_SECONDS = 4.0
"""For one problem under memory, once there is a plan: few take half of that."""

_PIPELINES_SHARE, _LARGE_SHARE = 0.4, 0.1
"""Of the time, for pipelines; and where their stages are large problems by themselves."""

LARGE = 8000
"""Variables of placements from which on the problem under memory takes long."""
