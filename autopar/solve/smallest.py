"""The plan that takes least memory, however slow: for telling what does not fit, and what would.

Two looks. A *quick* one forces what saves most (all state sharded, layers run again from their inputs, one example a
micro-batch) on every width of a tensor axis in the node, and prices it: some 10 ms each. An *exact* one asks the joint ILP for
the least excess over the memory, which knows all that may be chosen, offloading too, and prices its answer. Both answers are
plans that the evaluator priced, so that what is said to fit does fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import monotonic

from autopar.cost_models.evaluate import Evaluation, evaluate
from autopar.cost_models.hardware import Cluster
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS, EXPERT_AXIS
from autopar.ir.plan import Candidate
from autopar.rules.registry import Registry
from autopar.solve import ilp
from autopar.solve.decode import decode
from autopar.solve.forced import Forced, Placed, forced, place
from autopar.solve.formulate import formulate
from autopar.solve.grid import GROUP, Point, grid, inner_devices, micro_batch_counts
from autopar.solve.memory import limit
from autopar.solve.meshes import divisors
from autopar.solve.options import SearchOptions
from autopar.solve.parts import why_one_micro_batch
from autopar.solve.tables import Tables

_MESHES = 4
"""The exact look takes so many meshes, of one model axis at most (two where the second is forced)."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A priced plan. `short_bytes` is what a device lacks for it, 0 where it fits."""

    candidate: Candidate
    evaluation: Evaluation

    @property
    def short_bytes(self) -> int:
        return max(0, self.evaluation.peak_memory_bytes - self.evaluation.memory_capacity_bytes)

    def __str__(self) -> str:
        return str(Point(self.candidate.mesh, self.candidate.micro_batches, self.candidate.zero_group))


class Smallest:
    """Looks for plans of one problem after another; what does not depend on the cluster is kept. `until` is when to end, by
    `time.monotonic`."""

    def __init__(self, registry: Registry, until: float) -> None:
        self.registry, self.until = registry, until
        self._placed: dict[tuple[str, int], Placed | None] = {}

    def late(self) -> bool:
        return monotonic() > self.until

    def fitting(self, graph: Graph, cluster: Cluster, options: SearchOptions, exact: bool = True) -> Fit | None:
        """Some plan that fits, or None."""
        found = self.quick(graph, cluster, options)
        if (found is None or found.short_bytes) and exact and not self.late():
            found = self.exact(graph, cluster, options)
        return found if found is not None and not found.short_bytes else None

    def quick(self, graph: Graph, cluster: Cluster, options: SearchOptions) -> Fit | None:
        """The forced plan with the least peak; None where what the user forces or pins is beyond it."""
        if options.pins or {"tp2", EXPERT_AXIS} & set(options.force):
            return None
        best: Fit | None = None
        for wanted in self._wanted(graph, cluster, options):
            placed = self._place(graph, wanted)
            if placed is None:
                continue
            candidate = forced(graph, cluster, wanted, placed, self.registry)
            found = Fit(candidate, evaluate(graph, candidate, cluster, options.optimizer))
            if best is None or found.evaluation.peak_memory_bytes < best.evaluation.peak_memory_bytes:
                best = found
        return best

    def _wanted(self, graph: Graph, cluster: Cluster, options: SearchOptions) -> Iterator[Forced]:
        force, whole = options.force, bool(why_one_micro_batch(graph, self.registry))
        for width in divisors(min(inner_devices(cluster), cluster.size)):
            if cluster.size % width or width != force.get("tp", width):
                continue
            data = cluster.size // width
            if data != force.get(DATA_AXIS, data) or graph.batch % data:
                continue
            counts = micro_batch_counts(graph.batch, data, force, whole)
            group = force.get(GROUP, 0)
            if counts and not (group and data % group):
                yield Forced(
                    tp=width, sequence_parallel=width > 1, zero=force.get("zero", 3), zero_group=group, micro_batches=max(counts),
                    recompute="full", precision=options.precision, optimizer=options.optimizer,
                )  # fmt: skip

    def _place(self, graph: Graph, wanted: Forced) -> Placed | None:
        key = graph.fingerprint, wanted.tp
        if key not in self._placed:
            try:
                self._placed[key] = place(graph, wanted, self.registry)
            except AutoparError:
                self._placed[key] = None
        return self._placed[key]

    def exact(self, graph: Graph, cluster: Cluster, options: SearchOptions) -> Fit | None:
        """The least excess by the joint ILP, over the meshes until one fits or time is over. None where there is no mesh."""
        try:
            points = grid(graph, cluster.size, inner_devices(cluster), options.force, self.registry)
        except AutoparError:
            return None
        tables = Tables(graph, cluster, options, self.registry)
        best: Fit | None = None
        for point in _saving(points, options):
            if self.late() or (best is not None and not best.short_bytes):
                break
            found = self._least(tables, point)
            if found is not None and (best is None or found.short_bytes < best.short_bytes):
                best = found
        return best

    def _least(self, tables: Tables, point: Point) -> Fit | None:
        problem = tables.problem(point)
        made = formulate(problem, replay=True)
        limit(made, minimise_excess=True)
        left = max(0.1, self.until - monotonic())
        outcome = ilp.solve(made.model, time_limit_seconds=left, relative_gap=0.01)
        if not outcome.values:
            return None
        candidate = decode(made, outcome.values)
        return Fit(candidate, evaluate(tables.graph, candidate, tables.cluster, problem.optimizer))


def _saving(points: tuple[Point, ...], options: SearchOptions) -> list[Point]:
    """Of each mesh the smallest micro-batches and the widest state group, few axes first."""
    least: dict[object, Point] = {}
    for point in points:
        if len(point.mesh.axes) > 2 and not {"tp2", EXPERT_AXIS} & set(options.force):
            continue
        known = least.setdefault(point.mesh, point)
        group = point.zero_group or point.mesh.size_of(DATA_AXIS), point.micro_batches
        if group > (known.zero_group or known.mesh.size_of(DATA_AXIS), known.micro_batches):
            least[point.mesh] = point
    return list(least.values())[:_MESHES]


def without(options: SearchOptions, *names: str) -> SearchOptions:
    """`options` with these degrees no longer forced."""
    return replace(options, force={name: value for name, value in options.force.items() if name not in names})
