"""A plan that fits, quickly: one sharding of all blocks, and as much recomputation and state sharding as it takes.

Where the joint problem under memory is large, this is its incumbent: what is not better than such plans need not be solved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.cost_models.evaluate import Evaluation, evaluate
from autopar.cost_models.hardware import Cluster
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Candidate
from autopar.solve.candidates import MeshResult
from autopar.solve.frontier import Frontier, frontier
from autopar.solve.grid import Point
from autopar.solve.ilp import Status
from autopar.solve.options import SearchOptions
from autopar.solve.problem import Problem
from autopar.solve.tables import Tables


class FirstLooks:
    """Of one graph on one cluster; shardings are kept, since points of equal model axes and micro-batches have one in common."""

    def __init__(
        self, graph: Graph, cluster: Cluster, options: SearchOptions, tables: Tables, left: Callable[[], float]
    ) -> None:
        self.graph, self.cluster, self.options, self.tables, self.left = graph, cluster, options, tables, left
        self._frontiers: dict[object, Frontier | None] = {}

    def look(self, point: Point) -> MeshResult | None:
        """The fastest of the plans that fit, or None. FEASIBLE: nothing is proven of it."""
        problem = self.tables.problem(point)
        found = self._frontier(point, problem)
        if found is None:
            return None
        best: tuple[Evaluation, Candidate] | None = None
        zeros = sorted(problem.zeros if point.mesh.size_of(DATA_AXIS) > 1 else (0,), reverse=True)
        for number in range(len(found.options)):
            fitting = False
            for zero in zeros:  # from the least memory on
                candidate = self._candidate(point, found, number, zero)
                priced = evaluate(self.graph, candidate, self.cluster, self.options.optimizer, problem.batch_costs)
                if not priced.fits:
                    break
                fitting = True
                if best is None or priced.step_seconds < best[0].step_seconds:
                    best = priced, candidate
            if fitting:
                break  # what keeps less takes longer
        if best is None:
            return None
        return MeshResult(
            point.mesh, Status.FEASIBLE, 0.0, best[0].step_seconds, best[1], best[0],
            micro_batches=point.micro_batches, zero_group=point.zero_group,
        )  # fmt: skip

    def _frontier(self, point: Point, problem: Problem) -> Frontier | None:
        """The data degree changes no price but that of the state."""
        data = point.mesh.size_of(DATA_AXIS)
        key = point.mesh.axes[1:], problem.batch // data, data > 1
        if key not in self._frontiers:
            self._frontiers[key] = frontier(self.tables.problem(replace(point, zero_group=0), (0,)), self.left())
        return self._frontiers[key]

    def _candidate(self, point: Point, found: Frontier, number: int, zero: int) -> Candidate:
        options = found.options[number]
        blocks = tuple(replace(options[block.name], zero=zero) for block in self.graph.blocks)
        return Candidate(
            point.mesh, blocks, self.graph.batch, self.options.precision, point.micro_batches, point.zero_group
        )
